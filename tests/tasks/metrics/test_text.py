import pytest
from support import metric_reference as slow

from kvbench.tasks.metrics.text import contains, exact_match, first_line, normalise_answer, qa_f1


@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        ("The cat sat.", "a cat sat", 1.0),
        ("cat", "the black cat", 2 / 3),
        ("cat cat cat", "cat dog", 2 * (1 / 3) * (1 / 2) / (1 / 3 + 1 / 2)),
        ("U.S.A", "usa", 1.0),
        ("it's", "its", 1.0),
        ("", "cat", 0.0),
        ("the", "a", 0.0),
        ("“cat”", "cat", 0.0),  # SQuAD strips ASCII punctuation only
    ],
)
def test_f1_by_hand(prediction, reference, expected):
    assert qa_f1(prediction, reference) == pytest.approx(expected, abs=1e-12)


def test_f1_equals_a_slow_copy():
    shared = 0
    for prediction, reference in slow.pairs(400, 120):
        assert qa_f1(prediction, reference) == pytest.approx(slow.f1(prediction, reference), abs=1e-12)
        shared += 0 < qa_f1(prediction, reference) < 1
    assert shared > 100


def test_articles_go_after_punctuation():
    assert normalise_answer("The-cat, a dog; (an) Owl!") == "thecat dog owl"


def test_f1_of_a_very_long_answer():
    assert qa_f1("word " * 50_000, "word") == pytest.approx(2 / 50_001)


def test_exact_match_ignores_only_whitespace():
    assert exact_match(" 4 7\n1 ", "4 7 1") == 1.0
    assert exact_match("Paris", "paris") == 0.0
    assert exact_match("471", "4 7 1") == 0.0
    assert exact_match("", "471") == 0.0


def test_contains():
    assert contains("it is 471, I think", "471") == 1.0
    assert contains("4 7 1", "471") == 0.0
    assert contains("", "471") == 0.0
    assert contains("anything", " ") is None


def test_first_line():
    assert first_line("\n\n red\nblue") == " red"
    assert first_line("\n\n") == ""
