"""The readers of other tools' files, on what those tools write."""

import json

import numpy as np
import pandas as pd
import pytest

from kvbench.base.errors import UsageError
from kvbench.studies import imports
from kvbench.studies.imports import base, scoring
from kvbench.tasks.metrics import METRICS
from kvbench.tasks.rows import FileRow

TEXTS = [
    "plain",
    "it's",
    'a "quote"',
    "both ' and \"",
    "back\\slash",
    "line\nbreak",
    "[1]",
    "a, b",
    "...",
    "naïve 漢字 🙂",
    "\x00",
    "",
    " ",
    "'",
    "x" * 300,
]


@pytest.mark.parametrize("texts", [TEXTS, TEXTS[:1], [], TEXTS[1:4] * 12], ids=["all", "one", "none", "many"])
@pytest.mark.parametrize("form", [lambda t: str(np.array(t, dtype=object)), str], ids=["numpy", "python"])
def test_printed_lists_come_back(tmp_path, texts, form):
    assert base.read_texts(FileRow(tmp_path, "line 1", {"answers": form(list(texts))}), "answers") == tuple(texts)


@pytest.mark.parametrize("value", ["[1] and [2]", "[see above]", "plain", "[x for x in y]"])
def test_texts_in_brackets_stay_texts(tmp_path, value):
    assert base.read_texts(FileRow(tmp_path, "line 1", {"answers": value}), "answers") == (value,)


def test_a_list_that_numpy_shortened_is_refused(tmp_path):
    shortened = str(np.array([str(i) for i in range(2000)], dtype=object))
    with pytest.raises(UsageError, match=r"line 1: 'answers' was shortened"):
        base.read_texts(FileRow(tmp_path, "line 1", {"answers": shortened}), "answers")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qasper", ("qasper", False)),
        ("qasper_e", ("qasper", True)),
        ("qasper-e", ("qasper", True)),
        ("longbench_repobench-p_e", ("repobench-p", True)),
        ("longbench_passage_retrieval_zh", ("passage_retrieval_zh", False)),
        ("mystery_e", ("mystery_e", False)),
    ],
)
def test_names_of_datasets(name, expected):
    assert base.split_task_name(name) == expected


def frame(task=("qasper", "trec")):
    return pd.DataFrame(
        {
            "task": list(task),
            "predicted_answer": ["a\r\n b, 'c'", None],
            "answers": [np.array(["a", "b 'c'"], dtype=object), np.array(["Date"], dtype=object)],
            "all_classes": [None, np.array(["Date", "Order, rank"], dtype=object)],
            "length": [3000, 5000],
        }
    )


EXPECTED = {
    "qasper": ("a\r\n b, 'c'", ("a", "b 'c'"), (), 3000),
    "trec": ("", ("Date",), ("Date", "Order, rank"), 5000),
}


def fields(predictions):
    return {p.dataset: (a.prediction, a.references, a.classes, a.length) for p in predictions for a in p.answers}


def test_kvpress_csv_as_pandas_writes_it(tmp_path):
    path = tmp_path / "predictions.csv"
    frame().to_csv(path, index=False)
    predictions = imports.read_predictions(path)
    assert fields(predictions) == EXPECTED
    assert [p.answers[0].place for p in predictions] == [
        "line 2",
        "line 4",
    ]  # a quoted line break is a line of the file


@pytest.mark.parametrize("orient", ["records", "columns", "index"])
def test_kvpress_json(tmp_path, orient):
    path = tmp_path / "predictions.json"
    frame().to_json(path, orient=orient)
    if orient == "index":
        with pytest.raises(UsageError, match="there is no key 'predicted_answer'"):
            imports.read_predictions(path)
    else:
        assert fields(imports.read_predictions(path)) == EXPECTED


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("longbench__qasper__owner--model__snapkv__0.50", "qasper"),
        ("longbench__qasper__owner--model__snapkv__0.50__fraction0.100__query_aware", "qasper"),
        ("longbench__qasper__owner--model__dms__-3.00", "qasper"),
        ("qasper__owner--model__snapkv__0.50", "qasper"),
        ("qasper__owner--model__snapkv__0.50__fraction0.100", "qasper"),
    ],
)
def test_kvpress_files_without_a_task_are_named_by_their_folder(name, task, tmp_path):
    folder = tmp_path / name
    folder.mkdir()
    frame().drop(columns="task").to_csv(folder / "predictions.csv", index=False)
    assert {p.dataset for p in imports.read_predictions(folder / "predictions.csv")} == {task}


def sample(answer, **more):
    doc = {"answers": ["a", "b"], "all_classes": ["a"], "length": 7}
    return json.dumps({"doc": doc, "target": "['a', 'b']", "filtered_resps": [answer], "filter": "none", **more}) + "\n"


def test_lm_eval_samples(tmp_path):
    path = tmp_path / "samples_longbench_qasper_e_2025-01-02T03-04-05.678901.jsonl"
    path.write_text(sample("x") + sample("y", filter="other") + sample(["z", "second"]), encoding="utf-8")
    (predictions,) = imports.read_predictions(path)
    assert (predictions.dataset, predictions.extended, predictions.layout) == ("qasper", True, "lm-evaluation-harness")
    assert [a.prediction for a in predictions.answers] == ["x", "z"]
    assert predictions.answers[0].references == ("a", "b") and predictions.answers[0].length == 7
    assert [a.place for a in predictions.answers] == ["line 1", "line 3"]


def test_lm_eval_targets_stand_in_for_references(tmp_path):
    path = tmp_path / "samples_squad.jsonl"
    path.write_text(sample("x", doc={}), encoding="utf-8")
    (predictions,) = imports.read_predictions(path)
    assert predictions.dataset == "squad" and predictions.answers[0].references == ("a", "b")


def test_folders_are_read_one_level_deep(tmp_path):
    with pytest.raises(UsageError, match="holds no predictions"):
        imports.find_files(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.json").write_text("{}")
    (tmp_path / "run" / "qasper.jsonl").write_text("{}\n")
    assert imports.find_files(tmp_path) == [tmp_path / "run" / "qasper.jsonl"]
    (tmp_path / "trec.jsonl").write_text("{}\n")
    assert imports.find_files(tmp_path) == [tmp_path / "trec.jsonl"]


def made(name, n, seed):
    texts = [f"answer {i * seed % 7} of salt" for i in range(n)]
    answers = tuple(
        base.ImportedAnswer(t, ("answer 3 of salt", "mill"), None, 1000 * i, f"line {i}") for i, t in enumerate(texts)
    )
    return base.Predictions(name, name == "qasper", None, "longbench", answers, "")


def test_answers_of_longbench_e_are_scored_by_length_too():
    files = [(made("qasper", 40, 3), "f1"), (made("dureader", 9, 5), "rouge_zh"), (made("lcc", 25, 2), "code_sim")]
    scored = [scoring.score_file(*file) for file in files]
    assert all(len(s.scores) == len(s.predictions.answers) for s in scored)
    assert [len(b.scores) for b in scored[0].buckets] == [4, 4, 32]
    assert tuple(value for b in scored[0].buckets for value in b.scores) == scored[0].scores  # lengths ascend
    assert [s.buckets for s in scored[1:]] == [(), ()]


def test_a_fallback_metric_is_for_other_datasets_only():
    assert scoring.choose_metric(made("lcc", 1, 1), "difflib", "f1") == "code_sim_difflib"
    assert scoring.choose_metric(made("mystery", 1, 1), "difflib", "f1") == "f1"
    with pytest.raises(UsageError, match="has no metric"):
        scoring.choose_metric(made("mystery", 1, 1), "difflib", None)
    assert "f1" in METRICS
