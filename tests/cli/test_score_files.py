"""score: files that are damaged, strange or not meant, and answers that are kept as imported cells."""

import csv
import io
import json
from pathlib import Path

import pytest
from support.predicted import PREDICTIONS, by_dataset, mean, row, run, write

from kvbench.cli.main import main
from kvbench.papers.report import page
from kvbench.report import open_results
from kvbench.store.store import ResultStore

DAMAGED = {
    "qasper.jsonl": (["{'pred': 1}\n"], "line 2: not JSON"),
    "hotpotqa.jsonl": (['{"pred": "a", "answers": ["b"], \n'], "line 2: not JSON"),
    "musique.jsonl": ([{"answers": ["x"]}], "line 2: there is no key 'pred'; its keys: 'answers'"),
    "2wikimqa.jsonl": ([{"pred": "x"}], "line 2: there is no key 'answers'"),
    "narrativeqa.jsonl": ([row(None)], "line 2: 'pred' must be text, got null"),
    "gov_report.jsonl": ([row(answers=[{"a": 1}])], "line 2: 'answers' must be text or a list of texts"),
    "trec.jsonl": ([{"pred": "x", "answers": ["y"]}], "line 2: there is no key 'all_classes', which classification"),
    "multi_news.jsonl": (["[1, 2]\n"], "line 2: must be a JSON object"),
    "mystery.jsonl": ([], "dataset 'mystery' has no metric"),
    "qmsum.jsonl": ([row(length="long")], "line 2: 'length' must be a whole number"),
}


def test_damaged_files_are_named_with_line_and_reason_and_the_others_scored(capsys, tmp_path):
    for name, (rows, _) in DAMAGED.items():
        write(tmp_path, name, row(all_classes=["nine"]), *rows)
    (tmp_path / "samsum.jsonl").write_bytes(json.dumps(row()).encode() + b'\n{"pred": "caf\xe9"}\n')
    (tmp_path / "lcc.jsonl").write_bytes(b"\n \n")
    write(tmp_path, "triviaqa.jsonl", row("nine\nten"), row("ten"))
    status, result, err = run(capsys, tmp_path)
    assert status == 1
    assert [(t["dataset"], t["score"], t["n"]) for t in result["tasks"]] == [("triviaqa", 50.0, 2)]
    text = {Path(e["file"]).name: e["error"] for e in result["errors"]}
    assert len(text) == len(DAMAGED) + 2
    for name, (_, reason) in DAMAGED.items():
        assert f"{name}" in text[name] and reason in text[name], text[name]
    assert "line 2: not UTF-8 text (byte 13 of the line)" in text["samsum.jsonl"]
    assert "is empty" in text["lcc.jsonl"]
    assert all(e["error"] in err for e in result["errors"])


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("predictions.csv", "predicted_answer\nnine\n", "line 2: there is no key 'answer'"),
        ("predictions.csv", "task,answers,predicted_answer\nqasper,['a'],x\nqasper,['b']\n", "line 3: 2 cells"),
        (
            "predictions.csv",
            "task,answers,predicted_answer\nqasper,\"['a'\n 'b' ...]\",x\n",
            "line 2: 'answers' was short",
        ),
        ("predictions.csv", "task,answers,predicted_answer\nqasper,\"['a']\"x,y\n", "line 2: not CSV"),
        ("predictions.json", '{"score": 1}', "must hold a list of objects, or columns"),
        ("predictions.json", '[{"task": "qasper", "answers": ["a"]}]', "entry 1: there is no key 'predicted_answer'"),
        ("samples_qasper.jsonl", '{"filtered_resps": ["a"]}\n', "line 1: there is no key 'doc'"),
        (
            "samples_qasper.jsonl",
            '{"doc": {"answers": ["a"]}, "filtered_resps": [1]}\n',
            "line 1: 'filtered_resps' must",
        ),
    ],
)
def test_damaged_files_of_other_tools(capsys, tmp_path, name, content, reason):
    write(tmp_path, name, content)
    status, result, _ = run(capsys, tmp_path)
    assert status == 2 and result["tasks"] == []
    assert name in result["errors"][0]["error"] and reason in result["errors"][0]["error"]


def test_other_tables_beside_predictions_are_skipped_with_a_note(capsys, tmp_path):
    write(tmp_path, "qasper.jsonl", row())
    write(tmp_path, "timings.csv", "step,seconds\n1,2\n")
    status, result, err = run(capsys, tmp_path)
    assert (status, result["errors"], [t["dataset"] for t in result["tasks"]]) == (0, [], ["qasper"])
    assert "skipped" in err and "timings.csv: a CSV without the column predicted_answer" in err
    for name in ("a.csv", "b.csv"):
        write(tmp_path / "tables", name, "x\n1\n")
    assert main(["score", str(tmp_path / "tables")]) == 2
    assert "holds no predictions" in capsys.readouterr().err
    status, result, _ = run(capsys, tmp_path / "timings.csv")  # asked for by name
    assert status == 2 and "there is no key 'predicted_answer'" in result["errors"][0]["error"]


def test_rows_that_match_as_well_are_counted_and_the_setting_shown(capsys):
    arguments = [str(PREDICTIONS), "model=llama2-7b-chat", "method=h2o", "--format", "md"]
    assert main(["score", *arguments]) == 0
    text = capsys.readouterr().out
    assert "setting unknown: kv_size=384;compress_pct=9.38" in text and "setting unknown: budget=0.5" in text
    assert main(["score", *arguments, "setting=kv_size=384"]) == 0
    assert "setting unknown" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("{tmp}/nowhere", "there is no folder or file"),
        ("{tmp}/empty", "holds no predictions"),
        ("{tmp}/note.txt", "is not a file of predictions"),
        ("{good} code_sim=fuzzy", "unknown backend fuzzy of code_sim"),
        ("{good} code_simm=difflib", "Did you mean code_sim"),
        ("{good} difflib", "is not key=value"),
        ("{good} metric=bleuu", "unknown metric"),
        ("{good} split=f", "unknown split"),
        ("{good} prompt=thinc", "Did you mean think"),
        ("{good} model=a --model b", "given 2 times"),
        ("{good} model=", "is empty"),
        ("{good} --store", "--store needs model=NAME method=NAME"),
        ("{good} --store model=m method=full results={good}/qasper.jsonl", "cannot be written"),
    ],
)
def test_requests_that_cannot_be_carried_out(arguments, reason, tmp_path, capsys):
    (tmp_path / "note.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    good = write(tmp_path / "good", "qasper.jsonl", row()).parent
    status = main(["score", *arguments.format(tmp=tmp_path, good=good).split()])
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    assert captured.err.startswith("kvbench: ") and captured.err.count("\n") == 1
    assert reason in captured.err


def test_answers_to_other_datasets_need_a_metric(capsys, tmp_path):
    sample = {"doc": {"question": "?"}, "target": "4 7", "filtered_resps": ["4  7"], "filter": "strict"}
    other = {**sample, "filtered_resps": ["no"], "filter": "flexible"}
    write(tmp_path, "samples_gsm8k_2025-01-02T03-04-05.678901.jsonl", sample, other)
    assert run(capsys, tmp_path)[0] == 2
    status, result, _ = run(capsys, tmp_path, "metric=exact_match")
    assert status == 0
    assert [(t["dataset"], t["score"], t["n"], t["split"]) for t in result["tasks"]] == [("gsm8k", 100.0, 1, None)]


def test_imported_cells_are_stored_once_and_shown_as_imported(capsys, tmp_path):
    arguments = ["--store", "model=llama2-7b-chat", "method=full", f"results={tmp_path}"]
    status, result, _ = run(capsys, PREDICTIONS, *arguments)
    assert status == 0
    store = ResultStore(tmp_path)
    assert sorted(t["cell"] for t in result["tasks"]) == store.cells()
    before = {c: (store.cell(c), store.lines(c)) for c in store.cells()}
    run(capsys, PREDICTIONS, *arguments)
    assert {c: (store.cell(c), store.lines(c)) for c in store.cells()} == before
    assert not store.warnings
    task = by_dataset(result)["dureader"]
    record = store.cell(task["cell"])
    assert (record.kind, record.label, record.column) == ("imported", "full", "longbench_zh/dureader")
    assert record.identity["kind"] == "imported" and record.identity["model"] == "llama2-7b-chat"
    scores = [s["score"] for s in store.lines(task["cell"]).values()]
    assert len(scores) == task["n"] and mean(scores) == pytest.approx(task["score"], abs=0.00501)
    assert main(["list", "runs", "--results", str(tmp_path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines.count(["imported"]) == 14
    assert main(["show", task["cell"], "--results", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "imported from" in shown and "payload" not in shown
    exported = open_results.list_lines(store)
    assert len(exported) == 14 and {line["kind"] for line in exported} == {"imported"}
    text = page.ReportPage("tiny", [], [], [], [], [], exported, verdicts=[]).page()
    assert text.count("complete, imported") == 14


def test_another_answer_is_another_cell(capsys, tmp_path):
    arguments = ["--store", "model=m", "method=full", f"results={tmp_path / 'r'}"]
    for text in ("nine", "ten"):
        write(tmp_path / "p", "qasper.jsonl", row(text))
        run(capsys, tmp_path / "p", *arguments)
    assert len(ResultStore(tmp_path / "r").cells()) == 2


def test_two_files_of_one_dataset_are_shown_both_and_not_stored(capsys, tmp_path):
    for press in ("a", "b"):
        write(tmp_path / press, "qasper.jsonl", row(f"answer {press}", ["a answer"]))
    _, result, _ = run(capsys, tmp_path)
    assert [(t["dataset"], t["score"]) for t in result["tasks"]] == [("qasper", 100.0), ("qasper", 66.67)]
    assert main(["score", str(tmp_path), "--store", "model=m", "method=x", f"results={tmp_path}/r"]) == 2
    assert "2 files answer longbench/qasper" in capsys.readouterr().err
    assert main(["score", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "a/qasper.jsonl" in out and "b/qasper.jsonl" in out


def test_text_fits_and_other_formats_parse(capsys):
    arguments = [str(PREDICTIONS), "model=llama2-7b-chat", "method=full"]
    assert main(["score", *arguments]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    assert "indicative" in text and "ThinK table 12" in text and "unscored" in text
    assert main(["score", *arguments, "--format", "md"]) == 0
    assert "| qasper | f1 |" in capsys.readouterr().out
    assert main(["score", *arguments, "--format", "latex"]) == 0
    assert r"\begin{tabular}" in capsys.readouterr().out
    assert main(["score", *arguments, "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert sum(r["kind"] == "score" for r in rows) == 14
    assert {r["paper"] for r in rows if r["kind"] == "published"} == {"think", "uncomp", "vatp"}
