"""RULER's two metrics, on its own examples."""

import pytest
from support.grids import grid

from kvbench.base.example import Example
from kvbench.tasks.metrics import metric, score
from kvbench.tasks.metrics.ruler import average_over_lengths


def scored(name, prediction, *references):
    return score(name, prediction, Example("0", "", references, 1))


@grid(
    "name,prediction,references,expected",
    [
        ("string_match_all", " 11, 22 and 33", ("11", "22", "33", "44"), 0.75),
        ("string_match_all", "44\n", ("11", "22", "33", "44"), 0.25),
        ("string_match_all", "1234\n567", ("1234567",), 0.0),  # kvpress deletes what parts it here
        ("string_match_all", "\x0012\x1f34", ("12", "34"), 1.0),
        ("string_match_all", "12\x1f34", ("1234",), 0.0),
        ("string_match_all", "wandering-AGE", ("Wandering-Age",), 1.0),
        ("string_match_part", "It was 308 points", ("308", "three"), 1.0),
        ("string_match_part", "none", ("308", "three"), 0.0),
    ],
)
def test_scores_are_rulers(name, prediction, references, expected):
    assert scored(name, prediction, *references) == expected


def test_means_over_lengths_are_rulers():
    means = average_over_lengths([95.5, 93.8, 91.6, 87.4, 84.7, 77.0])
    assert [round(x, 1) for x in means] == [88.3, 85.4, 91.3]


def test_a_tasks_score_is_the_mean_over_its_samples():
    samples = [("a b", "a", "b"), ("a", "a", "b"), ("c", "c", "d", "e", "f")]
    mean = sum(scored("string_match_all", prediction, *references) for prediction, *references in samples) / 3
    assert round(metric("string_match_all").show(mean), 2) == pytest.approx(58.33)
