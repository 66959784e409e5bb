"""ROUGE: the two packages that published tables used, which disagree, each under its own name.

``rouge_l`` is ROUGE-L F of the package ``rouge`` (LongBench, Q-Hitter, ReFreeKV): no stemming, words split at spaces,
sentences at full stops, *sets* of words of the longest common subsequences of all sentence pairs. ``rouge1_stem`` is
ROUGE-1 F of Google's ``rouge-score`` with Porter stemming (needle scripts).

``rouge_l`` computes what ``rouge`` 1.0.1 computes, to the last bit, over ten times as fast and without its recursion:
the tests compare the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

OFFICIAL_DEPTH = 991
"""Nested calls that ``rouge`` may make under LongBench's ``eval.py`` before Python's default limit of 1000 stops it."""


def rouge_l(prediction: str, reference: str) -> float:
    """Return ROUGE-L F in [0, 1] of the package ``rouge``, as LongBench calls it.

    Texts without anything between their full stops score 0, where the package raises and LongBench's evaluator counts
    0. The package also recurses once per word and fails on very long sentences, which LongBench again counts as 0: a
    sentence pair that needs more than OFFICIAL_DEPTH nested calls makes the score 0 here too.
    Source: github.com/pltrdy/rouge 1.0.1; github.com/THUDM/LongBench metrics.py.
    """
    hypothesis, truth = _sentences(prediction), _sentences(reference)
    if not hypothesis or not truth:
        return 0.0
    common: set[str] = set()
    for x in truth:
        for y in hypothesis:
            words, calls = _common_subsequence(x, y)
            if calls > OFFICIAL_DEPTH:
                return 0.0
            common |= words
    recall = len(common) / len({word for sentence in truth for word in sentence})
    precision = len(common) / len({word for sentence in hypothesis for word in sentence})
    return 2.0 * ((precision * recall) / (precision + recall + 1e-8))


def rouge_n(prediction: str, reference: str, n: int) -> float:
    """Return ROUGE-n F in [0, 1] of the package ``rouge``: of sets of n-grams, which go on from sentence to sentence.

    Source: github.com/pltrdy/rouge 1.0.1, rouge_score.rouge_n with exclusive=True.
    """

    def grams(text: str) -> set[tuple[str, ...]]:
        words = [word for sentence in _sentences(text) for word in sentence]
        return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}

    found, wanted = grams(prediction), grams(reference)
    if not found or not wanted:
        return 0.0
    shared = len(found & wanted)
    precision, recall = shared / len(found), shared / len(wanted)
    return 2.0 * ((precision * recall) / (precision + recall + 1e-8))


def rouge1_stem(prediction: str, reference: str) -> float:
    """Return ROUGE-1 F in [0, 1] of ``rouge-score`` with stemming; text without ASCII letters or digits scores 0.

    Source: github.com/google-research/google-research, rouge.
    """
    return float(_rouge_scorer().score(reference, prediction)["rouge1"].fmeasure)


@cache
def _rouge_scorer() -> Any:
    # Imported on first use: rouge-score loads nltk, which takes longer than most commands.
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rouge1"], use_stemmer=True)


def _sentences(text: str) -> list[list[str]]:
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def _common_subsequence(x: list[str], y: list[str]) -> tuple[set[str], int]:
    """Return (words of one longest common subsequence, number of nested calls that ``rouge`` needs to find it).

    Rows of the dynamic programme are bit vectors (Hyyro 2004): bit j of row i is 0 where the length grows from column j
    to j + 1. Of several longest subsequences this walks to the one that ``rouge`` finds.
    """
    if set(x).isdisjoint(y):
        return set(), len(y) + 1
    rows = list(_rows(x, y))
    i, j, calls = len(x), len(y), 1
    remaining = j - rows[i].bit_count()
    words = set()
    while remaining:
        calls += 1
        if x[i - 1] == y[j - 1]:
            words.add(x[i - 1])
            i, j, remaining = i - 1, j - 1, remaining - 1
        elif rows[i] >> (j - 1) & 1:
            j -= 1
        else:
            i -= 1
    return words, calls + (j if i else 0)


def _rows(x: list[str], y: list[str]) -> Iterator[int]:
    places: dict[str, int] = {}
    for j, word in enumerate(y):
        places[word] = places.get(word, 0) | 1 << j
    mask = (1 << len(y)) - 1
    row = mask
    yield row
    for word in x:
        grown = row & places.get(word, 0)
        row = ((row + grown) | (row - grown)) & mask
        yield row
