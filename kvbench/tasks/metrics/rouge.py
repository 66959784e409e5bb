"""ROUGE. Published tables used two packages that disagree. Each has its own name here.

``rouge_l`` is ROUGE-L F of the package ``rouge`` (LongBench, Q-Hitter, ReFreeKV). It has no stemming, and splits words
at spaces and sentences at full stops. It counts the *set* of words in the longest common subsequences of all sentence
pairs.
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
            words, calls = _find_common_subsequence(reference_words, predicted_words)
            if calls > OFFICIAL_DEPTH:
                # here the package fails, and LongBench counts 0
                return 0.0
            common |= words
    recall = len(common) / len(set(chain.from_iterable(reference_sentences)))
    precision = len(common) / len(set(chain.from_iterable(predicted_sentences)))
    return _compute_f_score(precision, recall)


def rouge_n(prediction: str, reference: str, n: int) -> float:
    """Return ROUGE-n F in [0, 1] of the package ``rouge``, over sets of n-grams. N-grams continue across sentences.

    Source: github.com/pltrdy/rouge 1.0.1, rouge_score.rouge_n with exclusive=True.
    """

    def collect_ngrams(text: str) -> set[tuple[str, ...]]:
        words = list(chain.from_iterable(_split_sentences(text)))
        return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}

    predicted, expected = collect_ngrams(prediction), collect_ngrams(reference)
    if not predicted or not expected:
        return 0.0
    shared = len(predicted & expected)
    return _compute_f_score(shared / len(predicted), shared / len(expected))


def _compute_f_score(precision: float, recall: float) -> float:
    """Return 2 P R / (P + R + 1e-8), the F score of the package ``rouge``. Its small term avoids a division by 0."""
    # in the package's own order of operations, so that the result is the same to the last bit
    return 2.0 * ((precision * recall) / (precision + recall + 1e-8))


def rouge1_stem(prediction: str, reference: str) -> float:
    """Return ROUGE-1 F in [0, 1] of ``rouge-score`` with stemming. Text without ASCII letters or digits scores 0.

    Source: github.com/google-research/google-research, rouge.
    """
    return float(_load_rouge_scorer().score(reference, prediction)["rouge1"].fmeasure)


@cache
def _load_rouge_scorer() -> Any:
    """Return the package's scorer of ROUGE-1 with stemming."""
    # import rouge-score on first use: it loads nltk, which takes longer than most commands
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rouge1"], use_stemmer=True)


def _split_sentences(text: str) -> list[list[str]]:
    """Return the words of each sentence, as the package splits a text at full stops. Empty sentences are left out."""
    # split() and then split(" "): a sentence of spaces has one empty word, as in the package
    return [" ".join(sentence.split()).split(" ") for sentence in text.split(".") if sentence]


def _find_common_subsequence(reference: list[str], prediction: list[str]) -> tuple[set[str], int]:
    """Return (words of one longest common subsequence, number of nested calls that ``rouge`` needs to find it).

    reference, prediction: the words of one sentence each.

    If there are several longest subsequences, this function finds the same one as ``rouge``.
    """
    if set(reference).isdisjoint(prediction):
        # without a common word, the package walks along the columns to the edge
        return set(), len(prediction) + 1
    rows = list(_compute_length_rows(reference, prediction))
    # walk back from the ends of both sentences, as the package's recursion does; each step is one of its calls
    i, j, calls = len(reference), len(prediction), 1
    # the length of the subsequence of reference[:i] and prediction[:j] is the number of zeros in the lowest j bits of
    # row i
    remaining = j - rows[i].bit_count()
    words = set()
    while remaining:
        calls += 1
        adds_nothing = rows[i] >> (j - 1) & 1
        if reference[i - 1] == prediction[j - 1]:
            # the words agree, so both sentences go back by one
            words.add(reference[i - 1])
            i, j, remaining = i - 1, j - 1, remaining - 1
        elif adds_nothing:
            # prediction[:j - 1] has a common subsequence of the same length
            j -= 1
        else:
            i -= 1
    if i:
        # no common word remains, but the package still walks column by column to the edge
        calls += j
    return words, calls


def _compute_length_rows(reference: list[str], prediction: list[str]) -> Iterator[int]:
    """Yield the rows of the table of lengths of common subsequences, as bit vectors (Hyyro 2004).

    Row i, from 0 to ``len(reference)``, is about reference[:i] and has a bit for each word of the prediction. Bit j is
    0 if prediction[:j + 1] has a longer common subsequence with it than prediction[:j].
    """
    # bit j of places[word] is 1 where prediction[j] is the word
    places: dict[str, int] = {}
    for j, word in enumerate(prediction):
        places[word] = places.get(word, 0) | 1 << j
    mask = (1 << len(prediction)) - 1
    row = mask  # row 0 has no words, so no length grows
    yield row
    for word in reference:
        # Hyyro's step V' = (V + (V & M)) | (V & ~M), with row V and places M; V & ~M is V - (V & M)
        matches = row & places.get(word, 0)
        row = ((row + matches) | (row - matches)) & mask
        yield row
