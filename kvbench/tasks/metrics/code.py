"""Edit similarity of generated code.

LongBench calls ``fuzzywuzzy.fuzz.ratio``, which answers differently with and without python-Levenshtein (real
LLaMA-2-7B-chat answers: lcc 60.87 or 58.65). Here the backend is named by the caller, never by what is installed, and
neither package, which are GPL, is needed: rapidfuzz (MIT) has the same ratio, and the tests compare the two.
"""

from __future__ import annotations

from difflib import SequenceMatcher
from typing import Literal

from rapidfuzz.distance import Indel

Backend = Literal["levenshtein", "difflib"]


def code_sim(prediction: str, reference: str, backend: Backend = "levenshtein") -> float:
    """Return the similarity in [0, 1] of the first line of code to the reference, in whole hundredths as in LongBench.

    The first line of code is the first without a backtick, ``#`` or ``//``; if there is none it is empty. Source:
    github.com/THUDM/LongBench metrics.py; github.com/seatgeek/fuzzywuzzy fuzz.ratio.
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((text for text in lines if not any(mark in text for mark in ("`", "#", "//"))), "")
    return fuzz_ratio(line, reference, backend) / 100


def edit_sim(prediction: str, reference: str) -> float:
    """Return the Levenshtein ratio in [0, 1] of the stripped answers: 1 - indel distance / sum of the lengths."""
    return levenshtein_ratio(prediction.strip(), reference.strip())


def fuzz_ratio(a: str, b: str, backend: Backend) -> int:
    """Return ``fuzzywuzzy.fuzz.ratio`` of two texts, 0 to 100, by a backend. Raises ValueError for another backend."""
    if backend not in ("levenshtein", "difflib"):
        raise ValueError(f"code_sim backend {backend!r}: give levenshtein or difflib")
    if a == b:
        return 100
    if not a or not b:
        return 0
    ratio = levenshtein_ratio(a, b) if backend == "levenshtein" else SequenceMatcher(None, a, b).ratio()
    return round(100 * ratio)


def levenshtein_ratio(a: str, b: str) -> float:
    """Return 1 - indel distance / sum of the lengths, in [0, 1]; 1 for two empty texts."""
    return Indel.normalized_similarity(a, b)
