import pytest
from support import metric_reference as slow

from kvbench.base.example import Example
from kvbench.tasks.metrics import score
from kvbench.tasks.metrics.squad import best_subspan_em, coqa_f1, squad_f1


@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        ("The white cat.", "white cat", 1.0),
        ("a white and tabby cat", "white cat", 2 * 0.5 / 1.5),
        ("dog", "white cat", 0.0),
        ("", "white", 0.0),
        ("white", "", 0.0),
        ("", "", 1.0),
        ("the", "a", 1.0),
        ("Wilhelm Röntgen", "röntgen", 2 / 3),
        ("no no no", "no", 2 / 4),
    ],
)
def test_squad_f1_by_hand(prediction, reference, expected):
    assert squad_f1(prediction, reference) == pytest.approx(expected)


def test_squad_f1_equals_a_slow_copy():
    for prediction, reference in slow.pairs(300, 60, seed=21):
        words, right = slow.squad_words(prediction), slow.squad_words(reference)
        expected = slow.f1(prediction, reference) if words and right else float(words == right)
        assert squad_f1(prediction, reference) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("prediction", "references", "expected"),
    [
        ("white", ["white", "a white cat", "it is grey", "black"], (2 / 3 + 1 + 1 + 1) / 4),
        ("white", ["white", "white", "black"], 1.0),
        ("white", ["white", "black"], 1 / 2),
        ("white", ["white"], 1.0),
        ("white", ["a white cat"], 2 / 3),
        ("", ["white", "the"], 1 / 2),
        ("white", [], None),
    ],
)
def test_coqa_f1_leaves_each_reference_out_once(prediction, references, expected):
    assert coqa_f1(prediction, references) == pytest.approx(expected)
    assert score("coqa_f1", prediction, Example("0", "", tuple(references), 1)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        ("It was Wilhelm Conrad Röntgen, in 1901.", "wilhelm conrad röntgen", 1.0),
        ("the May 18, 2018 release", "May 18 2018", 1.0),
        ("in a 1914 battle", "1914", 1.0),
        ("19145", "1914", 1.0),  # a part, not a word, by the benchmark's definition
        ("cat and the dog", "cat and dog", 1.0),
        ("cat", "cat and dog", 0.0),
        ("", "1914", 0.0),
        ("anything", "The", None),
        ("anything", "", None),
    ],
)
def test_best_subspan_em_by_hand(prediction, reference, expected):
    assert best_subspan_em(prediction, reference) == expected


def test_best_subspan_em_equals_a_slow_copy():
    seen = set()
    for prediction, reference in slow.pairs(300, 60, seed=22):
        for part in (reference, " ".join(prediction.split()[1:3])):
            right, text = " ".join(slow.squad_words(part)), " ".join(slow.squad_words(prediction))
            starts = range(len(text) - len(right) + 1)
            expected = float(any(text[i : i + len(right)] == right for i in starts)) if right else None
            assert best_subspan_em(prediction, part) == expected
            seen.add(expected)
    assert seen >= {0.0, 1.0}
