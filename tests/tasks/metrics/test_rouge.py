import random
import subprocess
import sys
import time

import pytest
from rouge import Rouge
from rouge_score.rouge_scorer import RougeScorer
from support import metric_reference as slow

from kvbench.tasks.metrics.rouge import OFFICIAL_DEPTH, rouge1_stem, rouge_l, rouge_n


def package_rouge_l(prediction: str, reference: str) -> float:
    try:
        return Rouge().get_scores([prediction], [reference], avg=True)["rouge-l"]["f"]
    except ValueError:  # nothing between the full stops
        return 0.0


def test_rouge_l_by_hand():
    # One subsequence "the cat sat": recall 3 of 4 words, precision 3 of 3.
    recall, precision = 3 / 4, 3 / 3
    expected = 2 * recall * precision / (recall + precision + 1e-8)
    assert rouge_l("the cat sat", "the black cat sat") == pytest.approx(expected, abs=1e-15)


def test_rouge_l_counts_words_once_over_all_sentences():
    # Both sentences of the answer share "a b" with the reference: the union is two words, of {a, b, x, y} and {a, b}.
    assert rouge_l("a b x. a b y", "a b") == pytest.approx(2 * (1.0 * 0.5) / 1.5, abs=1e-7)


@pytest.mark.parametrize("prediction", ["", ".", "..."])
def test_rouge_l_of_nothing_is_zero(prediction):
    assert rouge_l(prediction, "the cat") == 0.0
    assert rouge_l("the cat", prediction) == 0.0


def test_rouge_l_equals_the_package_on_adversarial_strings():
    between = 0
    for prediction, reference in slow.pairs(300, 150):
        ours = rouge_l(prediction, reference)
        assert ours == package_rouge_l(prediction, reference), (prediction, reference)
        between += 0 < ours < 1
    assert between > 100


def test_rouge_l_equals_the_package_on_sentences():
    rng = random.Random(1)
    vocabulary = [f"w{i}" for i in range(40)] + ["Mr.", "end.", "U.S."]
    for _ in range(40):
        prediction = " ".join(rng.choices(vocabulary, k=rng.randrange(1, 160)))
        reference = " ".join(rng.choices(vocabulary, k=rng.randrange(1, 160)))
        assert rouge_l(prediction, reference) == package_rouge_l(prediction, reference)


OFFICIAL = """
from rouge import Rouge
def rouge_score(prediction, reference):
    try:
        return Rouge().get_scores([prediction], [reference], avg=True)["rouge-l"]["f"]
    except Exception:
        return 0.0
def scorer(prediction):
    return rouge_score(prediction, "b c")
if __name__ == "__main__":
    for n in (987, 988, 989, 2400):
        print(scorer("b " + "a " * n) > 0)
"""


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="later Pythons count frames differently by a few")
def test_depth_is_where_the_official_evaluator_gives_up(tmp_path):
    script = tmp_path / "evaluator.py"
    script.write_text(OFFICIAL)
    actual = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    assert actual.split() == ["True", "True", "False", "False"]
    assert [rouge_l("b " + "a " * n, "b c") > 0 for n in (987, 988, 989, 2400)] == [True, True, False, False]
    assert OFFICIAL_DEPTH == 988 + 3


def test_rouge_l_of_long_texts_is_fast():
    rng = random.Random(2)
    text = [" ".join(rng.choices("abcdefghij", k=20)) + "." for _ in range(50)]
    start = time.process_time()
    score = rouge_l(" ".join(text), " ".join(reversed(text)))
    assert score > 0.99
    assert time.process_time() - start < 2  # the package takes longer than this


def test_rouge1_stems_and_ignores_case():
    assert rouge1_stem("He ATE the sandwiches", "he ate the sandwich") == 1.0
    assert rouge1_stem("cats", "the cat") == pytest.approx(2 / 3)
    assert rouge1_stem("", "the cat") == 0.0
    assert rouge1_stem("漢字", "the cat") == 0.0


def test_rouge1_equals_the_package():
    scorer = RougeScorer(["rouge1"], use_stemmer=True)
    for prediction, reference in slow.pairs(60, 80, seed=3):
        assert rouge1_stem(prediction, reference) == scorer.score(reference, prediction)["rouge1"].fmeasure


@pytest.mark.parametrize("n", [1, 2])
def test_rouge_n_equals_the_package(n):
    pairs = [
        ("the cat sat", "the black cat sat"),
        ("a b x. a b y", "a b"),
        ("a b. c d", "b c d a b"),
        ("one", "one two"),
        ("x y z", "p q r"),
        ("a a a b", "a a b b."),
    ]
    for prediction, reference in pairs:
        want = Rouge().get_scores([prediction], [reference], avg=True)[f"rouge-{n}"]["f"]
        assert rouge_n(prediction, reference, n) == pytest.approx(want, abs=1e-12), (prediction, reference)
    assert rouge_n("", "a b", n) == rouge_n("...", "a b", n) == 0
