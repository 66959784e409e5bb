"""BLEU of one answer against one reference."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter

_ORDER = 4
"""The number of words in the longest n-grams that are compared."""


def bleu(prediction: str, reference: str) -> float:
    """Return sentence BLEU-4 in [0, 1] over words of ``tokenize``: exponential smoothing, brevity penalty, case kept.

    The k-th n-gram order without a match counts as ``1 / 2**k`` matches. The score is 0 if an order is longer than the
    prediction, or if no word matches. These are the settings of sacrebleu (github.com/mjpost/sacrebleu) in
    lm-evaluation-harness's ``truthfulqa_gen``: ``smooth_method=exp``, ``tokenize=intl``, no effective order.
    """
    words, reference_words = tokenize(prediction), tokenize(reference)
    if len(words) < _ORDER:
        return 0.0  # the prediction has no n-gram of the longest order
    precisions = []
    smooth = 1.0
    for n in range(1, _ORDER + 1):
        predicted, expected = _count_ngrams(words, n), _count_ngrams(reference_words, n)
        # clipped matches: an n-gram counts at most as often as the reference has it
        matches: float = sum((predicted & expected).values())
        if not matches:
            if n == 1:
                return 0.0
            # the k-th order without a match counts as 1 / 2^k matches
            smooth *= 2
            matches = 1 / smooth
        precisions.append(matches / predicted.total())
    # BLEU = min(1, exp(1 - r / c)) * (p_1 p_2 p_3 p_4)^(1/4) for r reference words and c predicted words
    brevity = min(1.0, math.exp(1 - len(reference_words) / len(words)))
    return brevity * math.exp(sum(map(math.log, precisions)) / _ORDER)


def tokenize(text: str) -> list[str]:
    """Split text into words at spaces, at symbols, and at punctuation that does not stand between two digits.

    "3.5" and a final "1999." stay whole. This is the international tokenisation of mteval-v14. Its rules replace from
    left to right, one after the other.
    """
    text = text.strip()
    # each rule is a pattern over Unicode categories (N number, P punctuation, S symbol), and the place, within a match,
    # of the character that gets spaces around it
    for pattern, offset in (("[^N]P", 1), ("P[^N]", 0), ("S", 0)):
        # Python's re has no \p{N}, so the pattern is matched to a text of one category letter for each character
        categories = "".join(unicodedata.category(character)[0] for character in text)
        spaced_places = {match.start() + offset for match in re.finditer(pattern, categories)}
        characters = []
        for i, character in enumerate(text):
            characters.append(f" {character} " if i in spaced_places else character)
        text = "".join(characters)
    return text.split()


def _count_ngrams(words: list[str], n: int) -> Counter[tuple[str, ...]]:
    """Return how often each run of ``n`` words occurs."""
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
