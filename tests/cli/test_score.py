"""score: real answers to the last digit, adversarial ones against slow copies, and what is said of damaged files."""

import csv
import io
import json
import time
from pathlib import Path
from statistics import fmean

import pytest
from data import data_path
from metrics import slow

from kvbench.cli.main import main
from kvbench.store import ResultStore

PREDICTIONS = Path(__file__).parent.parent / "predictions"
LLAMA = ("predictions", "llama2-7b-chat-4k")


def number_after(text, mark):
    """The digits after the first ``mark`` that digits follow; None without one."""
    for part in text.split(mark)[1:]:
        digits = ""
        for c in part:
            if not c.isdecimal():
                break
            digits += c
        if digits:
            return digits
    return None


def retrieval(mark):
    def score(prediction, reference, classes):
        right = number_after(reference, mark)
        return None if right is None else slow.share_of_numbers(prediction, right)

    return score


def plain(function):
    return lambda prediction, reference, classes: function(prediction, reference)


def code(ratio):
    return plain(lambda prediction, reference: ratio(slow.code_line(prediction), reference) / 100)


def labels(prediction, reference, classes):
    return slow.classification(prediction, reference, classes) if classes else None


SLOW = {
    **dict.fromkeys(["qasper", "triviaqa", "2wikimqa"], plain(slow.f1)),
    **dict.fromkeys(["gov_report", "samsum"], plain(slow.rouge_l)),
    **dict.fromkeys(["trec", "lsht"], labels),
    **dict.fromkeys(["lcc", "repobench-p"], code(slow.fuzz_ratio)),
    **dict.fromkeys(["dureader", "vcsum"], plain(slow.rouge_zh)),
    "passage_count": plain(slow.share_of_numbers),
    "passage_retrieval_en": retrieval("Paragraph "),
    "multifieldqa_zh": plain(slow.f1_zh),
    "passage_retrieval_zh": retrieval("段落"),
}
FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")


def slow_scores(path, functions=SLOW):
    """(length, score) of every line of a file of predictions, None where no reference can be scored."""
    found = []
    for line in path.read_bytes().decode("utf-8").split("\n"):
        if not line:
            continue
        row = json.loads(line)
        text = row["pred"]
        if path.stem in FIRST_LINE:
            text = text.lstrip("\n").split("\n")[0]
        scores = [functions[path.stem](text, answer, row["all_classes"]) for answer in row["answers"]]
        found.append((row["length"], max((s for s in scores if s is not None), default=None)))
    return found


def mean(scores):
    known = [s for s in scores if s is not None]
    return 100 * fmean(known) if known else None


def run(capsys, *arguments):
    """(status, JSON, stderr) of one score."""
    status = main(["score", *map(str, arguments), "--json"])
    captured = capsys.readouterr()
    return status, json.loads(captured.out), captured.err


def by_dataset(result):
    return {t["dataset"]: t for t in result["tasks"]}


def write(folder, name, *rows):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


def row(pred="nine", answers=("nine",), **more):
    return {"pred": pred, "answers": list(answers), "all_classes": None, "length": 10, **more}


def test_the_official_scores_of_real_answers(capsys):
    folder = data_path(*LLAMA)
    official = json.loads((folder / "result.json").read_text())
    start = time.perf_counter()
    status, result, err = run(capsys, folder, "code_sim=difflib")
    assert time.perf_counter() - start < 30
    assert status == 0
    assert {d: t["score"] for d, t in by_dataset(result).items()} == official
    assert len(official) == 21 and sum(t["n"] for t in result["tasks"]) == 4750
    assert all(t["ci"][0] < t["score"] < t["ci"][1] and t["unscored"] == 0 for t in result["tasks"])
    assert "4750 answers to 21 datasets" in err and "scoring and intervals" in err


def test_only_code_depends_on_the_backend(capsys):
    folder = data_path(*LLAMA)
    official = json.loads((folder / "result.json").read_text())
    _, result, _ = run(capsys, folder)
    scores = {d: t["score"] for d, t in by_dataset(result).items()}
    assert scores == {**official, "lcc": 60.87, "repobench-p": 54.45}


def test_the_three_published_rows_stand_beside(capsys):
    _, result, _ = run(capsys, data_path(*LLAMA), "model=llama2-7b-chat", "method=full", "prompt=longbench")
    tasks = by_dataset(result)
    published = {d: {(j["paper"], j["table"]): j for j in t["published"]} for d, t in tasks.items()}
    rows = {("think", "12"), ("uncomp", "1"), ("vatp", "1")}
    assert sum(set(j) == rows for j in published.values()) == 16
    think, vatp = published["2wikimqa"][("think", "12")], published["2wikimqa"][("vatp", "1")]
    assert (think["value"], think["verdict"], think["indicative"]) == (25.50, "outside", True)
    assert think["because"] == ["prompt policy longbench here, think there"]
    assert (vatp["value"], vatp["verdict"], vatp["indicative"]) == (27.44, "inside", True)
    assert "LongBench-E" in vatp["because"][0]
    narrative = published["narrativeqa"][("vatp", "1")]
    assert (narrative["verdict"], narrative["indicative"]) == ("inside", False)  # same split, same prompts
    for t in tasks.values():
        for j in t["published"]:
            assert j["verdict"] == ("inside" if t["ci"][0] <= j["value"] <= t["ci"][1] else "outside")


def test_means_stand_beside_the_published_ones(capsys):
    given = [str(data_path(*LLAMA)), "model=llama2-7b-chat", "method=full"]
    _, result, _ = run(capsys, *given)
    english = [t["score"] for t in result["tasks"] if t["published"]]
    assert len(english) == 16 and result["mean"] == round(fmean(english), 2) == 33.35
    assert main(["score", *given]) == 0
    last = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("mean of the 16") and "cells" in x)
    assert last.split()[4:] == ["33.35", "33.37", "33.34", "—,", "cells", "32.66"]


def test_adversarial_predictions_equal_slow_copies(capsys):
    status, result, _ = run(capsys, PREDICTIONS)
    files = sorted(PREDICTIONS.glob("*.jsonl"))
    assert status == 0 and len(result["tasks"]) == len(files) == 14
    for path in files:
        expected = [s for _, s in slow_scores(path)]
        task = by_dataset(result)[path.stem]
        assert task["n"] == len(expected)
        assert task["unscored"] == expected.count(None)
        assert task["score"] == pytest.approx(mean(expected), abs=0.00501), path.stem
    assert sum(t["unscored"] for t in result["tasks"]) == 6
    assert by_dataset(result)["passage_retrieval_en"]["unscored"] == 2


def test_adversarial_code_with_difflib(capsys):
    functions = dict.fromkeys(["lcc", "repobench-p"], code(slow.difflib_ratio))
    _, result, _ = run(capsys, PREDICTIONS, "code_sim=difflib")
    for name in functions:
        expected = mean([s for _, s in slow_scores(PREDICTIONS / f"{name}.jsonl", functions)])
        assert by_dataset(result)[name]["score"] == pytest.approx(expected, abs=0.00501)
        assert by_dataset(result)[name]["metric"] == "code_sim_difflib"


def test_longbench_e_by_length(capsys):
    folder = PREDICTIONS / "pred_e" / "self-written"
    status, result, _ = run(capsys, folder)
    assert status == 0 and len(result["tasks"]) == 3
    for task in result["tasks"]:
        scores = slow_scores(folder / f"{task['dataset']}.jsonl")
        ranges = {
            "0-4k": [s for n, s in scores if n < 4000],
            "4-8k": [s for n, s in scores if 4000 <= n < 8000],
            "8k+": [s for n, s in scores if n >= 8000],
        }
        assert task["split"] == "e"
        assert {k: b["n"] for k, b in task["buckets"].items()} == {k: len(s) for k, s in ranges.items()}
        for name, values in ranges.items():
            expected = mean(values)
            assert task["buckets"][name]["score"] == (expected and pytest.approx(expected, abs=0.00501))
    assert by_dataset(result)["lcc"]["buckets"]["8k+"]["score"] is None  # nothing of that length: no number


def test_the_split_is_what_is_said_else_what_the_files_tell(capsys, tmp_path):
    write(tmp_path / "a", "qasper.jsonl", *[row()] * 201)
    write(tmp_path / "a", "multifieldqa_en.jsonl", *[row()] * 150)
    write(tmp_path / "a", "narrativeqa.jsonl", *[row()] * 200)
    write(tmp_path / "b", "qasper_e.jsonl", row())
    write(tmp_path / "b", "trec.jsonl", row(all_classes=["nine"]))

    def splits(*arguments):
        return {d: t["split"] for d, t in by_dataset(run(capsys, *arguments)[1]).items()}

    assert splits(tmp_path / "a") == {"qasper": "e", "multifieldqa_en": "e", "narrativeqa": "standard"}
    assert set(splits(tmp_path / "a", "split=standard").values()) == {"standard"}
    assert splits(tmp_path / "b") == {"qasper": "e", "trec": "standard"}
    assert splits(tmp_path / "b", "split=e") == {"qasper": "e", "trec": "e"}


@pytest.mark.parametrize("tool", ["kvpress", "lm_eval"])
def test_other_tools_files_score_as_longbenchs(capsys, tool):
    status, result, _ = run(capsys, PREDICTIONS / tool)
    assert status == 0 and len(result["tasks"]) == 2
    _, own, _ = run(capsys, PREDICTIONS)
    for name, task in by_dataset(result).items():
        for key in ("score", "ci", "n", "unscored", "metric"):
            assert task[key] == by_dataset(own)[name][key], (name, key)
        assert task["layout"] == {"kvpress": "kvpress", "lm_eval": "lm-evaluation-harness"}[tool]


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
    said = {Path(e["file"]).name: e["error"] for e in result["errors"]}
    assert len(said) == len(DAMAGED) + 2
    for name, (_, reason) in DAMAGED.items():
        assert f"{name}" in said[name] and reason in said[name], said[name]
    assert "line 2: not UTF-8 text (byte 13 of the line)" in said["samsum.jsonl"]
    assert "is empty" in said["lcc.jsonl"]
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
    assert status == 1 and result["tasks"] == []
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
    assert status == 1 and "there is no key 'predicted_answer'" in result["errors"][0]["error"]


def test_rows_that_match_as_well_are_counted_and_the_setting_shown(capsys):
    given = [str(PREDICTIONS), "model=llama2-7b-chat", "method=h2o", "--format", "md"]
    assert main(["score", *given]) == 0
    text = capsys.readouterr().out
    assert "setting unknown: kv_size=384;compress_pct=9.38" in text and "setting unknown: budget=0.5" in text
    assert main(["score", *given, "setting=kv_size=384"]) == 0
    assert "setting unknown" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("{tmp}/nowhere", "there is no folder or file"),
        ("{tmp}/empty", "holds no predictions"),
        ("{tmp}/note.txt", "is not a file of predictions"),
        ("{good} code_sim=fuzzy", "unknown backend of code_sim 'fuzzy'"),
        ("{good} code_simm=difflib", "Did you mean code_sim"),
        ("{good} difflib", "is not key=value"),
        ("{good} metric=bleuu", "unknown metric"),
        ("{good} split=f", "unknown split"),
        ("{good} prompt=thinc", "Did you mean think"),
        ("{good} model=a --model b", "given twice"),
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
    assert run(capsys, tmp_path)[0] == 1
    status, result, _ = run(capsys, tmp_path, "metric=exact_match")
    assert status == 0
    assert [(t["dataset"], t["score"], t["n"], t["split"]) for t in result["tasks"]] == [("gsm8k", 100.0, 1, None)]


def test_imported_cells_are_stored_once_and_shown_as_imported(capsys, tmp_path):
    given = ["--store", "model=llama2-7b-chat", "method=full", f"results={tmp_path}"]
    status, result, _ = run(capsys, PREDICTIONS, *given)
    assert status == 0
    store = ResultStore(tmp_path)
    assert sorted(t["cell"] for t in result["tasks"]) == store.cells()
    before = {c: (store.cell(c), store.samples(c)) for c in store.cells()}
    run(capsys, PREDICTIONS, *given)
    assert {c: (store.cell(c), store.samples(c)) for c in store.cells()} == before
    assert not store.warnings
    task = by_dataset(result)["dureader"]
    record = store.cell(task["cell"])
    assert (record["kind"], record["label"], record["column"]) == ("imported", "full", "longbench_zh/dureader")
    assert record["identity"]["kind"] == "imported" and record["identity"]["model"] == "llama2-7b-chat"
    scores = [s["score"] for s in store.samples(task["cell"]).values()]
    assert len(scores) == task["n"] and mean(scores) == pytest.approx(task["score"], abs=0.00501)
    assert main(["list", "runs", "--results", str(tmp_path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines.count(["imported"]) == 14
    assert main(["show", task["cell"], "--results", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "imported from" in shown and "payload" not in shown


def test_another_answer_is_another_cell(capsys, tmp_path):
    given = ["--store", "model=m", "method=full", f"results={tmp_path / 'r'}"]
    for text in ("nine", "ten"):
        write(tmp_path / "p", "qasper.jsonl", row(text))
        run(capsys, tmp_path / "p", *given)
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
    given = [str(PREDICTIONS), "model=llama2-7b-chat", "method=full"]
    assert main(["score", *given]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    assert "indicative" in text and "ThinK table 12" in text and "unscored" in text
    assert main(["score", *given, "--format", "md"]) == 0
    assert "| qasper | f1 |" in capsys.readouterr().out
    assert main(["score", *given, "--format", "latex"]) == 0
    assert r"\begin{tabular}" in capsys.readouterr().out
    assert main(["score", *given, "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert sum(r["kind"] == "score" for r in rows) == 14
    assert {r["paper"] for r in rows if r["kind"] == "published"} == {"think", "uncomp", "vatp"}


def test_help_has_examples_that_run(capsys, tmp_path, monkeypatch):
    from kvbench.cli import score

    monkeypatch.chdir(PREDICTIONS.parent.parent)
    lines = [x.strip() for x in score.EXAMPLES.splitlines() if x.strip().startswith("python -m kvbench")]
    assert len(lines) == 4
    for line in lines:
        assert main(line.replace("/tmp/kvbench-imported", str(tmp_path)).split()[3:]) == 0, line
        assert capsys.readouterr().out
