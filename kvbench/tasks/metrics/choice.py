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
    """Return 1 if the first line is the reference, else 0. Case, spaces and punctuation at the ends do not count."""
    return float(_normalise_label(first_line(prediction.lstrip())) == _normalise_label(reference))


def classification(
    prediction: str, reference: str, classes: Sequence[str], *, examine_all: bool = False
) -> float | None:
    """Return 1 / the number of class names found in the prediction if the right name is among them, else 0.

    A name that is merely a part of the right name does not count as found. Returns None without classes.

    examine_all: True if each name is examined. LongBench never examines the name after one that does not count.
    """
    if not classes:
        return None
    names = [name for name in classes if name in prediction]
    if examine_all:
        names = [name for name in names if name == reference or name not in reference]
    # LongBench removes names from the list while walking over it, so it never examines the name after a removed one;
    # this loop does the same, since the result is the benchmark's score
    i = 0
    while i < len(names):
        name = names[i]
        if name != reference and name in reference:
            names.remove(name)
        i += 1
    if reference not in names:
        return 0.0
    return 1.0 / len(names)


def count(prediction: str, reference: str) -> float:
    """Return LongBench's count score: the share of the prediction's numbers that equal the reference.

    The score is 0 if the prediction has no number. Numbers are compared as texts, so 07 is not 7.
    """
    numbers = _NUMBER.findall(prediction)
    if not numbers:
        return 0.0
    return numbers.count(str(reference)) / len(numbers)


def retrieval(prediction: str, reference: str) -> float | None:
    """Return the share of the prediction's numbers that are the N of the reference ``Paragraph N``.

    Returns None for a reference of another form.
    """
    paragraph = _PARAGRAPH.search(reference)
    if paragraph is None:
        return None
    return count(prediction, paragraph[1])


def _normalise_label(text: str) -> str:
    """Return a label in the form for comparison: lower case, single spaces, no punctuation at the ends."""
    words = " ".join(text.lower().split())
    # a label of nothing but punctuation stays unchanged, or it would equal every other such label
    return words.strip(string.punctuation + " ") or words
