"""Edit similarity of generated code.

LongBench calls ``fuzzywuzzy.fuzz.ratio``, and this answers differently with and without python-Levenshtein (real
LLaMA-2-7B-chat answers: lcc 60.87 or 58.65). Here the caller names the backend, whatever is installed. Neither package,
both GPL, is needed: rapidfuzz (MIT) has the same ratio, and the tests compare the two.
"""

from __future__ import annotations

from difflib import SequenceMatcher
from typing import Literal

from rapidfuzz.distance import Indel

Backend = Literal["levenshtein", "difflib"]


def code_sim(prediction: str, reference: str, backend: Backend = "levenshtein", *, skip_blank: bool = False) -> float:
    """Return the similarity in [0, 1] of the first line of code to the reference, in whole hundredths as in LongBench.

    The first line of code is the first line without a backtick, ``#`` or ``//``. If there is no such line, the empty
    text is compared.

    skip_blank: True if blank lines are skipped, too. LongBench takes a line of spaces for the code.

    Source: github.com/THUDM/LongBench metrics.py; github.com/seatgeek/fuzzywuzzy fuzz.ratio.
    """
    code_line = ""
    for line in prediction.lstrip("\n").split("\n"):
        if skip_blank and not line.strip():
            continue
        # LongBench skips fences of Markdown and comments of Python, C# and Java
        if "`" not in line and "#" not in line and "//" not in line:
            code_line = line
            break
    return fuzz_ratio(code_line, reference, backend) / 100


def edit_sim(prediction: str, reference: str) -> float:
    """Return the Levenshtein ratio in [0, 1] of the stripped answers: 1 - indel distance / sum of the lengths."""
    return levenshtein_ratio(prediction.strip(), reference.strip())


def fuzz_ratio(a: str, b: str, backend: Backend) -> int:
    """Return ``fuzzywuzzy.fuzz.ratio`` of two texts, 0 to 100, by a backend. Raises ValueError for another backend."""
    if backend not in ("levenshtein", "difflib"):
        raise ValueError(f"code_sim backend {backend!r}: give levenshtein or difflib")
    # fuzzywuzzy answers these two cases itself, before it asks a backend
    if a == b:
        return 100
    if not a or not b:
        return 0
    if backend == "levenshtein":
        return round(100 * levenshtein_ratio(a, b))
    return round(100 * SequenceMatcher(isjunk=None, a=a, b=b).ratio())


def levenshtein_ratio(a: str, b: str) -> float:
    """Return 1 - indel distance / sum of the lengths, in [0, 1]; 1 for two empty texts."""
    return Indel.normalized_similarity(a, b)
