"""Metrics of one's own: functions in files, in folders of KVBENCH_METHODS, and handed over in Python."""

import json
from collections import OrderedDict

import pytest

import kvbench
from kvbench.base.errors import KvbenchError, UsageError
from kvbench.base.example import Example
from kvbench.cli.main import main
from kvbench.tasks import metrics
from kvbench.tasks.metrics import own

SOURCE = """
def first_word(prediction, reference):
    'The first words are equal.'
    return prediction.split()[:1] == reference.split()[:1]


def fails(prediction, reference):
    return prediction.index("\\0")


def returns_a_word(prediction, reference):
    return "good"


def of_three(prediction, reference, more):
    return 1.0
"""
EXAMPLE = Example(id="", prompt="", answers=("Rome", "Paris, France"), max_new_tokens=1)
ROWS = [
    {"prompt": "the magic number of paris is 471. what is the magic number of paris? ", "answers": ["471", "paris"]},
    {"prompt": "the magic number of rome is 12. what is the magic number of rome? ", "answers": ["12", "rome"]},
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a file of metrics and a file of prompts."""
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(own, "LOADED", {})
    return tmp_path


def run(metric, *words):
    """The exit status of a run of two prompts on the tiny model."""
    asked = ["dataset=file", "path=rows.jsonl", "max_new_tokens=2", "method=snapkv", "kv_ratio=0.5", "results=r"]
    return main(["run", f"metric={metric}", *asked, *words])


def test_the_best_reference_counts_and_the_source_is_part_of_the_identity(folder):
    metric = metrics.choose("mine.py:first_word")
    assert metric.name == "mine.py:first_word" and metric.description == "The first words are equal."
    assert metrics.score(metric.name, "Paris, of course", EXAMPLE) == 1.0
    assert metrics.score(metric.name, "Berlin", EXAMPLE) == 0.0
    before = metric.identity()
    (folder / "mine.py").write_text(SOURCE + "# edited\n")
    after = metrics.choose(str(folder / "mine.py:first_word")).identity()
    assert before["source"] != after["source"] and before | after == after
    # a stored result of a metric that is not here shows its mean
    assert metrics.metric("gone.py:score").show(0.5) == 50.0


def test_a_folder_of_own_methods_may_hold_the_file(folder, monkeypatch):
    (folder / "deep").mkdir()
    (folder / "mine.py").rename(folder / "deep" / "theirs.py")
    monkeypatch.setenv("KVBENCH_METHODS", f"{folder / 'none'}:{folder / 'deep'}")
    assert metrics.choose("theirs.py:first_word").name == "theirs.py:first_word"


REFUSED = {
    "none.py:f": "there is no file 'none.py' here or in a folder of KVBENCH_METHODS",
    "mine.py:f": "mine.py has no function 'f'; it has first_word, fails, returns_a_word, of_three",
    "mine.py:of_three": r"a function of \(prediction, reference\), not of \(prediction, reference, more\)",
    "broken.py:f": r"broken.py:1: SyntaxError",
    "raising.py:f": r"raising.py:2: ZeroDivisionError",
    "function:f": "there is no file 'function'",
}


@pytest.mark.parametrize("written", REFUSED)
def test_a_metric_that_cannot_be_read_is_refused_with_the_reason(written, folder):
    (folder / "broken.py").write_text("def f(:")
    (folder / "raising.py").write_text("\n1 / 0")
    with pytest.raises(UsageError, match=REFUSED[written]):
        metrics.choose(written)


@pytest.mark.parametrize(
    ("name", "reason"), [("fails", r"mine.py:8: ValueError"), ("returns_a_word", "returned 'good'")]
)
def test_a_metric_that_fails_says_where(name, reason, folder):
    metric = metrics.choose(f"mine.py:{name}")
    with pytest.raises(KvbenchError, match=reason):
        metrics.score(metric.name, "a", EXAMPLE)


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), [1.0]])
def test_a_score_is_a_number_from_0_to_1(value):
    metric = own.OwnMetric("m.py:f", lambda prediction, reference: value, digest="")
    with pytest.raises(KvbenchError, match="a score is a number from 0 to 1, or None"):
        metric.score("a", "b", EXAMPLE)


@pytest.mark.e2e("runs on the tiny model")
def test_a_run_scores_by_it_and_measures_again_after_an_edit(folder, capsys):
    assert run("mine.py:first_word", "--json") == 0
    first = json.loads(capsys.readouterr().out)
    assert [column["metric"] for column in first["columns"]] == ["mine.py:first_word"]
    assert run("mine.py:first_word", "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["rows"][0]["cells"][0]["cell"] == first["rows"][0]["cells"][0]["cell"]
    (folder / "mine.py").write_text(SOURCE.replace("[:1]", "[:2]"))
    assert run("mine.py:first_word", "--json") == 0
    edited = json.loads(capsys.readouterr().out)
    assert edited["rows"][0]["cells"][0]["cell"] != first["rows"][0]["cells"][0]["cell"]
    # the stored results need no file to be listed
    (folder / "mine.py").unlink()
    own.LOADED.clear()
    assert main(["list", "runs", "results=r"]) == 0
    assert main(["show", edited["rows"][0]["cells"][0]["cell"], "results=r"]) == 0
    assert kvbench.results("r")["metric"].tolist() == ["mine.py:first_word"] * 4


@pytest.mark.e2e("runs on the tiny model")
def test_a_run_whose_metric_fails_says_so_and_keeps_what_was_scored(folder, capsys):
    source = "def f(prediction, reference):\n    return {'471': 1, 'paris': 0}[reference]\n"
    (folder / "mine.py").write_text(source)
    assert run("mine.py:f", "batch_rows=1") == 1
    captured = capsys.readouterr()
    assert "mine.py:2: KeyError: '12' (example line-2)" in captured.err and "Traceback" not in captured.err
    samples = list(folder.glob("r/cells/*/samples*.jsonl"))
    assert len(samples) == 2 and all(len(path.read_text().splitlines()) == 1 for path in samples)


@pytest.mark.parametrize("metric", ["none.py:f", "mine.py:none", "5"])
def test_a_run_with_a_wrong_metric_ends_with_2(metric, folder, capsys):
    assert run(metric) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_score_takes_it_for_answers_of_other_programs(folder, capsys):
    lines = [{"pred": "Paris it is", "answers": ["Paris"]}, {"pred": "Bern", "answers": ["Paris"]}]
    (folder / "mytask.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["score", "mytask.jsonl", "metric=mine.py:first_word", "--json"]) == 0
    (task,) = json.loads(capsys.readouterr().out)["tasks"]
    assert task["score"] == 50.0 and task["metric"] == "mine.py:first_word"
    assert main(["score", "mytask.jsonl", "metric=mine.py:fails", "--json"]) != 0
    assert "mine.py:8: ValueError" in capsys.readouterr().err


def starts_alike(prediction, reference):
    """The first letters are equal."""
    return prediction[:1] == reference[:1]


@pytest.mark.e2e("runs on the tiny model")
def test_compare_takes_a_function(tmp_path):
    model, tokenizer = kvbench.load_model("tiny")
    settings = {"kv_ratio": 0.5, "max_new_tokens": 2, "progress": False, "results": tmp_path}
    report = kvbench.compare(model, tokenizer, ROWS, ["snapkv"], metric=starts_alike, **settings)
    assert [column.metric for column in report.columns] == ["function:starts_alike"]
    for row in report.rows:
        assert row.cells[0].status == "measured"
    # the same source gives the same results
    again = kvbench.compare(model, tokenizer, ROWS, ["snapkv"], metric=starts_alike, **settings)
    assert again.rows[0].cells[0].cell == report.rows[0].cells[0].cell


def test_a_function_without_source_is_refused():
    for given in (len, OrderedDict(a=1).get, eval("lambda prediction, reference: 1.0")):
        with pytest.raises(UsageError, match="its source is part of what identifies a result"):
            own.hand_over(given)
