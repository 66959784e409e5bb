import json

import pytest
from support import metric_reference as slow
from support.grids import grid

import kvbench.tasks.metrics as package
from kvbench.base.errors import UsageError
from kvbench.base.example import Example
from kvbench.cli.main import main
from kvbench.tasks.metrics import METRICS, metric, score

NAMES = {"f1", "rouge_l", "rouge1", "accuracy", "exact_match", "contains", "code_sim", "edit_sim"}
LONGBENCH_CHOICES = {"classification", "count", "retrieval"}


def example(*answers: str, classes: tuple[str, ...] = ()) -> Example:
    return Example("0", "prompt", answers, 8, classes)


ANSWERED = [name for name, m in METRICS.items() if m.formula is None and name != "math_equal"]
"""Metrics of answers; likelihoods are measured while a text is read. test_math_equal.py holds math_equal to the same: a
process computes each of its scores."""
REFERENCES = {"letter": "B", "theorem": "True", "retrieval_zh": "段落3", "last_integer": "3"}
"""What the metrics of one kind of answer can score; all others score paragraph names too."""


def test_names():
    assert set(METRICS) >= NAMES | LONGBENCH_CHOICES
    assert all(m.name == name and m.revision >= 1 and m.scale == 100 for name, m in METRICS.items())
    assert all(m.description and m.source for m in METRICS.values())


@grid("name", ANSWERED)
@grid("prediction", ["", "\n", "...", "\n\n.\n"])
def test_predictions_without_content_score_zero(name, prediction):
    right = REFERENCES.get(name, "Paragraph 3")
    assert score(name, prediction, example(right, classes=(right, "other"))) == 0.0


@pytest.mark.parametrize("name", ANSWERED)
def test_scores_stay_between_zero_and_one(name):
    for prediction, reference in slow.pairs(100, 200, seed=11):
        right = REFERENCES.get(name, "Paragraph 3")
        value = score(name, prediction, example(reference, right, classes=("a", "b", reference)))
        assert value is not None and 0.0 <= value <= 1.0


def test_best_reference_counts():
    assert score("f1", "the cat", example("dog", "cat", "cat sat")) == 1.0
    assert score("f1", "the cat", example("dog", "cat sat")) == pytest.approx(2 / 3)


def test_unscorable_is_none_not_zero():
    assert all(score(name, "answer", example()) is None for name in METRICS)
    assert score("retrieval", "3", example("3")) is None
    assert score("retrieval", "3", example("3", "Paragraph 3")) == 1.0
    assert score("classification", "label", example("label")) is None
    assert metric("classification").needs_classes


def test_code_sim_backends_have_names_of_their_own():
    a, b = "\tint cba = abc;", "\tint abc = cba;"
    assert score("code_sim", a, example(b)) != score("code_sim_difflib", a, example(b))


def test_unknown_metric():
    with pytest.raises(UsageError, match=r"unknown metric rogue_l\. Did you mean rouge_l"):
        metric("rogue_l")
    with pytest.raises(UsageError, match="All metrics: `kvbench list metrics`"):
        score("meteor", "", example("a"))


def test_a_metric_is_a_function_and_a_line(tmp_path, capsys, monkeypatch):
    def starts(prediction, reference):
        return float(prediction.startswith(reference[:1]))

    entry = package.Metric("starts", "begins as the reference", "here", package.by_pair(starts))
    monkeypatch.setattr(package, "METRICS", {**package.METRICS, "starts": entry})
    (tmp_path / "p.jsonl").write_text('{"prompt": "the magic number of paris is", "answers": "4"}\n')
    arguments = ["run", "dataset=file", f"path={tmp_path / 'p.jsonl'}", "metric=starts", "method=full", "--json"]
    assert main([*arguments, f"results={tmp_path / 'r'}"]) == 0
    (column,) = json.loads(capsys.readouterr().out)["columns"]
    assert column["metric"] == "starts"
