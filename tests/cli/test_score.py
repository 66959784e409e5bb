"""score: real answers to the last digit, and adversarial ones against slow copies."""

import json
import time
from statistics import fmean

import pytest
from support import metric_reference as slow
from support.data import data_path
from support.predicted import PREDICTIONS, by_dataset, mean, row, run, write

from kvbench.cli.main import main
from kvbench.studies.imports import scoring

pytestmark = pytest.mark.e2e("runs whole command lines")

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
    collected = []
    for line in path.read_bytes().decode("utf-8").split("\n"):
        if not line:
            continue
        row = json.loads(line)
        text = row["pred"]
        if path.stem in FIRST_LINE:
            text = text.lstrip("\n").split("\n")[0]
        scores = [functions[path.stem](text, answer, row["all_classes"]) for answer in row["answers"]]
        collected.append((row["length"], max((s for s in scores if s is not None), default=None)))
    return collected


@pytest.fixture(scope="module")
def scored_once():
    """While the fixture is used, a file that was scored before is not scored again by the same metric."""
    scores_of_files, score_file = {}, scoring.score_file

    def score(predictions, name):
        key = (predictions.path, predictions.sha256, predictions.dataset, predictions.extended, name)
        if key not in scores_of_files:
            scores_of_files[key] = score_file(predictions, name)
        return scores_of_files[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "score_file", score)
        yield scores_of_files


def test_the_official_scores_of_real_answers(capsys, scored_once):
    scored_once.clear()  # its time is measured
    folder = data_path(*LLAMA)
    official = json.loads((folder / "result.json").read_text())
    start = time.process_time()
    status, result, err = run(capsys, folder, "code_sim=difflib")
    assert time.process_time() - start < 30
    assert status == 0
    assert {d: t["score"] for d, t in by_dataset(result).items()} == official
    assert len(official) == 21 and sum(t["n"] for t in result["tasks"]) == 4750
    assert all(t["ci"][0] < t["score"] < t["ci"][1] and t["unscored"] == 0 for t in result["tasks"])
    assert "4750 answers to 21 datasets" in err and "scoring and intervals" in err


def test_only_code_depends_on_the_backend(capsys, scored_once):
    folder = data_path(*LLAMA)
    official = json.loads((folder / "result.json").read_text())
    _, result, _ = run(capsys, folder)
    scores = {d: t["score"] for d, t in by_dataset(result).items()}
    assert scores == {**official, "lcc": 60.87, "repobench-p": 54.45}


def test_the_three_published_rows_stand_beside(capsys, scored_once):
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


def test_means_stand_beside_the_published_ones(capsys, scored_once):
    arguments = [str(data_path(*LLAMA)), "model=llama2-7b-chat", "method=full"]
    _, result, _ = run(capsys, *arguments)
    english = [t["score"] for t in result["tasks"] if t["published"]]
    assert len(english) == 16 and result["mean"] == round(fmean(english), 2) == 33.35
    assert main(["score", *arguments]) == 0
    last = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("mean of the 16") and "cells" in x)
    assert last.split()[4:] == ["33.35", "33.37", "33.34", "—,", "cells", "32.66"]


def test_adversarial_predictions_equal_slow_copies(capsys, scored_once):
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
    _, own_value, _ = run(capsys, PREDICTIONS)
    for name, task in by_dataset(result).items():
        for key in ("score", "ci", "n", "unscored", "metric"):
            assert task[key] == by_dataset(own_value)[name][key], (name, key)
        assert task["layout"] == {"kvpress": "kvpress", "lm_eval": "lm-evaluation-harness"}[tool]
