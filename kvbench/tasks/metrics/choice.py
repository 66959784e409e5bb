"""Metrics for answers out of a closed set: labels, counts, paragraph numbers. Scores are in [0, 1].

``classification``, ``count`` and ``retrieval`` follow github.com/THUDM/LongBench metrics.py to the letter.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

from kvbench.tasks.metrics.text import first_line

_NUMBER = re.compile(r"\d+")
_PARAGRAPH = re.compile(r"Paragraph (\d+)")


def accuracy(prediction: str, reference: str) -> float:
    """Return 1 if the first line is the reference, but for case, spaces and punctuation at the ends, else 0."""
    return float(_label(first_line(prediction.lstrip())) == _label(reference))


def classification(prediction: str, reference: str, classes: Sequence[str]) -> float | None:
    """Return 1 / number of class names found in the prediction if the right one is among them, else 0.

    A name that is merely a part of the right one does not count as found. LongBench removes such names from the list
    while it walks over it, so that the name after a removed one is not examined; that is kept, since it is the
    benchmark's score. Returns None without classes, where there is nothing to choose from.
    """
    if not classes:
        return None
    names = [name for name in classes if name in prediction]
    i = 0
    while i < len(names):
        name = names[i]
        if name != reference and name in reference:
            names.remove(name)
        i += 1
    return 1.0 / len(names) if reference in names else 0.0


def count(prediction: str, reference: str) -> float:
    """Return the share of the numbers in the prediction that are the reference; 0 without a number."""
    numbers = _NUMBER.findall(prediction)
    return numbers.count(str(reference)) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, reference: str) -> float | None:
    """Return the share of the prediction's numbers that are the N of the reference ``Paragraph N``; None without N."""
    paragraph = _PARAGRAPH.search(reference)
    return count(prediction, paragraph[1]) if paragraph else None


def _label(text: str) -> str:
    words = " ".join(text.lower().split())
    return words.strip(string.punctuation + " ") or words
