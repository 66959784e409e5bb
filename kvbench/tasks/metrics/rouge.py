"""ROUGE. Published tables used two packages that disagree. Each has its own name here.

``rouge_l`` is ROUGE-L F of the package ``rouge`` (LongBench, Q-Hitter, ReFreeKV). It has no stemming, splits words at
spaces and sentences at full stops, and counts *sets* of words of the longest common subsequences of all sentence pairs.
``rouge1_stem`` is ROUGE-1 F of Google's ``rouge-score`` with Porter stemming (needle scripts).

``rouge_l`` equals the result of ``rouge`` 1.0.1 to the last bit. It is over ten times as fast and does not recurse. The
tests compare the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import chain
from typing import Any

OFFICIAL_DEPTH = 991
"""Nested calls that ``rouge`` may make under LongBench's ``eval.py`` before Python's default limit of 1000 stops it."""


def rouge_l(prediction: str, reference: str) -> float:
    """Return ROUGE-L F in [0, 1] of the package ``rouge``, as LongBench calls it.

    Texts without anything between their full stops score 0: the package raises an error, and LongBench's evaluator
    counts 0. The package also recurses once per word and fails on very long sentences, and LongBench again counts 0. A
    sentence pair that needs more than OFFICIAL_DEPTH nested calls therefore makes the score 0. Source:
    github.com/pltrdy/rouge 1.0.1; github.com/THUDM/LongBench metrics.py.
    """
    predicted_sentences, reference_sentences = _split_sentences(prediction), _split_sentences(reference)
    if not predicted_sentences or not reference_sentences:
        return 0.0
    # the union over all sentence pairs of the words of their longest common subsequence
    common: set[str] = set()
    for reference_words in reference_sentences:
        for predicted_words in predicted_sentences:
            words, calls = _common_subsequence(reference_words, predicted_words)
            if calls > OFFICIAL_DEPTH:
                return 0.0
            common |= words
    recall = len(common) / len(set(chain.from_iterable(reference_sentences)))
    precision = len(common) / len(set(chain.from_iterable(predicted_sentences)))
    return _f_score(precision, recall)


def rouge_n(prediction: str, reference: str, n: int) -> float:
    """Return ROUGE-n F in [0, 1] of the package ``rouge``, over sets of n-grams. N-grams continue across sentences.

    Source: github.com/pltrdy/rouge 1.0.1, rouge_score.rouge_n with exclusive=True.
    """

    def collect_ngrams(text: str) -> set[tuple[str, ...]]:
        """Return the different n-grams of a text's words."""
        words = list(chain.from_iterable(_split_sentences(text)))
        return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}

    predicted, expected = collect_ngrams(prediction), collect_ngrams(reference)
    if not predicted or not expected:
        return 0.0
    shared = len(predicted & expected)
    return _f_score(shared / len(predicted), shared / len(expected))


def _f_score(precision: float, recall: float) -> float:
    """Return 2 P R / (P + R + 1e-8), the F score of the package ``rouge``. Its small term avoids a division by 0."""
    # in the package's own order of operations, so that the result is the same to the last bit
    return 2.0 * ((precision * recall) / (precision + recall + 1e-8))


def rouge1_stem(prediction: str, reference: str) -> float:
    """Return ROUGE-1 F in [0, 1] of ``rouge-score`` with stemming. Text without ASCII letters or digits scores 0.

    Source: github.com/google-research/google-research, rouge.
    """
    return float(_rouge_scorer().score(reference, prediction)["rouge1"].fmeasure)


@cache
def _rouge_scorer() -> Any:
    """Return the package's scorer of ROUGE-1 with stemming."""
    # import rouge-score on first use: it loads nltk, which takes longer than most commands
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rouge1"], use_stemmer=True)


def _split_sentences(text: str) -> list[list[str]]:
    """Return the words of each sentence, as the package splits a text at full stops. Empty sentences are left out."""
    # split() and then split(" "): a sentence of spaces has one empty word, as in the package
    return [" ".join(sentence.split()).split(" ") for sentence in text.split(".") if sentence]


def _common_subsequence(x: list[str], y: list[str]) -> tuple[set[str], int]:
    """Return (words of one longest common subsequence, number of nested calls that ``rouge`` needs to find it).

    Rows of the dynamic programme are bit vectors (Hyyro 2004): bit j of row i is 0 where the length grows from column j
    to j + 1. If there are several longest subsequences, this function finds the same one as ``rouge``.
    """
    if set(x).isdisjoint(y):
        # without a common word, the package walks along the columns to the edge
        return set(), len(y) + 1
    rows = list(_length_rows(x, y))
    # walk back from the corner (len x, len y), as the package's recursion does; each step is one of its calls
    i, j, calls = len(x), len(y), 1
    # length of the subsequence of x[:i] and y[:j] = the number of zeros among the lowest j bits of row i
    remaining = j - rows[i].bit_count()
    words = set()
    while remaining:
        calls += 1
        if x[i - 1] == y[j - 1]:
            # the words agree, so both texts go back by one
            words.add(x[i - 1])
            i, j, remaining = i - 1, j - 1, remaining - 1
        elif rows[i] >> (j - 1) & 1:
            # column j adds nothing to row i
            j -= 1
        else:
            i -= 1
    if i:
        # no common word remains, but the package still walks column by column to the edge
        calls += j
    return words, calls


def _length_rows(x: list[str], y: list[str]) -> Iterator[int]:
    """Yield the bit vectors, of len(y) bits each, of rows 0 to len(x). Row i is about the first i words of ``x``."""
    # bit j of places[word] is 1 where y[j] is the word
    places: dict[str, int] = {}
    for j, word in enumerate(y):
        places[word] = places.get(word, 0) | 1 << j
    mask = (1 << len(y)) - 1
    row = mask  # row 0 has no words, so no length grows
    yield row
    for word in x:
        # V' = (V + (V & M)) | (V & ~M), where V - (V & M) is V & ~M
        matches = row & places.get(word, 0)
        row = ((row + matches) | (row - matches)) & mask
        yield row
