import random

import pytest
from support import metric_reference as slow

from kvbench.base.example import Example
from kvbench.tasks.metrics import metric, score
from kvbench.tasks.metrics.choice import accuracy, classification, count, retrieval


@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        (" Deep  crimson.\npale olive", "deep crimson", 1.0),
        ("\n\nB)", "b", 1.0),
        ("deep crimson or not", "deep crimson", 0.0),
        ("pale olive\ndeep crimson", "deep crimson", 0.0),
        ("", "deep crimson", 0.0),
        ("", "?", 0.0),
        ("?", "?", 1.0),
    ],
)
def test_accuracy(prediction, reference, expected):
    assert accuracy(prediction, reference) == expected


def test_classification_by_hand():
    classes = ["Other", "Other location", "Date"]
    assert classification("Other location", "Other location", classes) == 1.0  # "Other" is part of the right name
    assert classification("Date or Other location", "Other location", classes) == 1 / 2
    assert classification("Other location", "Other", classes) == 1 / 2
    assert classification("Price", "Date", classes) == 0.0
    assert classification("", "Date", classes) == 0.0
    assert classification("Date", "Date", ()) is None


def test_classification_keeps_the_benchmarks_skip():
    # Removing "a" moves "ab" to the place already visited: it stays and halves the score.
    assert classification("abc", "abc", ["a", "ab", "abc"]) == 1 / 2


def test_mended_classification_examines_every_name():
    for names, share in ((["a", "ab", "abc"], 1.0), (["a", "ab", "abc", "x"], 1 / 2)):
        example = Example("a", "p", ("abc",), 8, classes=tuple(names))
        assert score(metric("classification").mended, "abcx", example) == share
    assert score("classification_mended", "x", example) == 0.0


def test_classification_equals_a_slow_copy():
    rng = random.Random(0)
    values = set()
    for _ in range(500):
        classes = ["".join(rng.choices("abc", k=rng.randrange(1, 4))) for _ in range(8)]
        prediction = "".join(rng.choices("abc ", k=rng.randrange(0, 12)))
        reference = rng.choice(classes)
        expected = slow.classification(prediction, reference, classes)
        assert classification(prediction, reference, classes) == expected
        values.add(expected)
    assert len(values) > 3


def test_count_and_retrieval_by_hand():
    assert count("8 of 16, so 8", "8") == 2 / 3
    assert count("8.5", "8") == 1 / 2
    assert count("08", "8") == 0.0
    assert count("none", "8") == count("", "8") == 0.0
    assert retrieval("Paragraph 15 or 3", "Paragraph 15") == 1 / 2
    assert retrieval("", "Paragraph 15") == 0.0
    assert retrieval("15", "15") is None


def test_count_equals_a_slow_copy():
    for prediction, reference in slow.pairs(200, 60, seed=7):
        right = "".join(c for c in reference if c.isdecimal())[:1] or "3"
        assert count(prediction, right) == slow.share_of_numbers(prediction, right)
        assert retrieval(prediction, f"Paragraph {right}") == slow.share_of_numbers(prediction, right)
