import math
import random

import pytest
from support import metric_reference as slow

from kvbench.tasks.metrics.bleu import bleu, tokenize


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        ("Nothing happens.", ["Nothing", "happens", "."]),
        ("It's 3.5, or $1,000", ["It", "'", "s", "3.5", ",", "or", "$", "1,000"]),
        ("in 1999.", ["in", "1999."]),
        ("a+b…é", ["a", "+", "b", "…", "é"]),
    ],
)
def test_tokenize(text, words):
    assert tokenize(text) == words


@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        # sacrebleu 2.6.0: corpus_bleu([p], [[r]], smooth_method="exp", tokenize="intl") / 100
        ("the cat sat on the mat", "the cat sat on the mat", 1.0),
        ("the cat sat on a mat", "the cat sat on the mat", 0.5372849659117709),
        ("the cat sat on", "the cat sat on the mat", 0.6065306597126334),
        ("dogs run in the big park", "the cat sat on the mat", 0.08116697886877475),
        ("a big cat is in the house now", "the cat sat on the mat", 0.06567274736060395),
        ("dogs run big parks", "the cat sat on the mat", 0.0),
        ("the cat", "the cat", 0.0),
        ("", "the cat", 0.0),
    ],
)
def test_bleu(prediction, reference, expected):
    assert bleu(prediction, reference) == pytest.approx(expected, abs=1e-9)


def test_bleu_equals_a_slow_copy():
    def grams(words, n):
        return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]

    def slow_bleu(p, r):
        logs, misses = [], 0
        for n in (1, 2, 3, 4):
            ours, rest = grams(p, n), grams(r, n)
            hits = 0
            for gram in ours:
                if gram in rest:
                    rest.remove(gram)
                    hits += 1
            if not ours or (n == 1 and not hits):
                return 0.0
            misses += not hits
            logs.append(math.log((hits or 2.0**-misses) / len(ours)))
        return math.exp(sum(logs) / 4 + min(0, 1 - len(r) / len(p)))

    rng = random.Random(0)
    seen = 0
    for _ in range(500):
        p, r = (rng.choices("abcd", k=rng.randrange(0, 12)) for _ in range(2))
        value = bleu(" ".join(p), " ".join(r))
        assert value == pytest.approx(slow_bleu(p, r), abs=1e-12)
        seen += 0 < value < 1
    assert seen > 200


def test_bleu_never_fails():
    for prediction, reference in slow.pairs(100, 80, seed=9):
        assert 0.0 <= bleu(prediction, reference) <= 1.0
