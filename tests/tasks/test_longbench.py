"""LongBench's loader: prompts as its own script formats them, and one message for whatever is wrong with the files."""

import json

import pytest
from support.data import data_path
from transformers import PreTrainedTokenizerBase

from kvbench.base.conf import entries
from kvbench.base.errors import UsageError
from kvbench.cli.main import main
from kvbench.plan import words
from kvbench.plan.cells import build_groups
from kvbench.plan.config import parse
from kvbench.tasks import longbench
from kvbench.tasks.base import load_tasks
from kvbench.tasks.metrics import METRICS

ENGLISH = [
    *("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "gov_report", "qmsum"),
    *("multi_news", "trec", "triviaqa", "samsum", "passage_count", "passage_retrieval_en", "lcc", "repobench-p"),
]
CHINESE = ["multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh"]
EXTENDED = [t for t in ENGLISH if t not in ("narrativeqa", "musique", "qmsum")]
TEMPLATE = "Read this.\n\n{context}\n\nNow: {input}\nAnswer:"


def example(index, **more):
    row = {
        "input": f"What is {index}?",
        "context": f"Salt {{input}} {index} {{x}}.",
        "answers": [str(index), "salt"],
        "length": 3000 * index + 1,
        "dataset": "any",
        "language": "en",
        "all_classes": ["salt", "mill"],
        "_id": f"id-{index}",
    }
    return {**row, **more}


def line(row):
    return json.dumps(row, ensure_ascii=False) + "\n"


@pytest.fixture
def root(tmp_path):
    """A data folder with LongBench's two files in its own form and no data yet."""
    folder = tmp_path / "longbench"
    folder.mkdir()
    names = [*ENGLISH, *CHINESE]
    prompts = {n: f"{n}. {TEMPLATE}" for n in names}
    prompts["gov_report"] = "Report:\n{context}\n\nSummary:"
    (folder / "dataset2prompt.json").write_text(json.dumps(prompts), encoding="utf-8")
    (folder / "dataset2maxlen.json").write_text(json.dumps({n: 10 + i for i, n in enumerate(names)}), encoding="utf-8")
    return tmp_path


def fill(root, names, ending="", folder="longbench", rows=4):
    (root / folder).mkdir(parents=True, exist_ok=True)
    for name in names:
        text = "".join(line(example(i)) for i in range(1, rows + 1))
        (root / folder / f"{name}{ending}.jsonl").write_text(text, encoding="utf-8")


def load(root, dataset="longbench", *selection, **knobs):
    return load_tasks(dataset, {**entries("dataset")[dataset], **knobs}, selection, None, root)


def test_the_three_suites_and_their_metrics(root):
    fill(root, ENGLISH + CHINESE)
    fill(root, EXTENDED, ending="_e")
    for dataset, names in (("longbench", ENGLISH), ("longbench_zh", CHINESE), ("longbench_e", EXTENDED)):
        tasks = load(root, dataset)
        assert [t.id for t in tasks] == [f"{dataset}/{n}" for n in names]
        assert all(t.metric in METRICS and t.category and "4 examples" in t.source for t in tasks)
    assert len(EXTENDED) == 13
    metrics = {n: s.metric for n, s in longbench.TASKS.items()}
    assert metrics["qmsum"] == "rouge_l" and metrics["dureader"] == "rouge_zh" and metrics["lsht"] == "classification"


def test_prompts_are_what_the_official_script_formats(root):
    fill(root, ["qasper", "gov_report"])
    templates = json.loads((root / "longbench" / "dataset2prompt.json").read_text())
    for task in load(root, "longbench", "gov_report", "qasper"):
        name = task.id.partition("/")[2]
        assert [e.prompt for e in task.examples] == [templates[name].format(**example(i)) for i in range(1, 5)]
        assert all(e.prompt.endswith(e.question) and "Salt" not in e.question for e in task.examples)
        assert task.examples[0].answers == ("1", "salt")
        assert {e.max_new_tokens for e in task.examples} == {10 + ENGLISH.index(name)}
        assert [e.id for e in task.examples] == ["id-1", "id-2", "id-3", "id-4"]


def test_how_answers_end_and_what_of_them_counts(root):
    fill(root, ENGLISH + CHINESE)
    tasks = {t.id.partition("/")[2]: t for d in ("longbench", "longbench_zh") for t in load(root, d)}
    assert {n for n, t in tasks.items() if t.first_line} == {"trec", "triviaqa", "samsum", "lsht"}
    assert {n for n, t in tasks.items() if not t.chat} == {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}
    assert {n for n, t in tasks.items() if t.stop or t.forbid_first or t.min_new_tokens} == {"samsum"}
    samsum = tasks["samsum"]
    assert (samsum.stop, samsum.forbid_first, samsum.min_new_tokens) == (("\n",), ("\n",), 1)
    assert samsum.answer("\n\nShe brings salt.\nDialogue:") == "She brings salt."
    for name, task in tasks.items():  # runs and score must read one answer alike, down to the indentation of code
        for text in ("\n\n\treturn salt;\nmore", " salt \n", "", "\n"):
            assert task.answer(text) == longbench.scored_part(name, text)
    assert tasks["trec"].examples[0].classes == ("salt", "mill")
    assert tasks["qasper"].examples[0].classes == ()


def test_only_selected_files_are_read(root):
    fill(root, ["qasper", "trec"])
    (root / "longbench" / "lcc.jsonl").write_bytes(b"\xff not text")
    assert [t.id for t in load(root, "longbench", "trec", "qasper")] == ["longbench/trec", "longbench/qasper"]
    with pytest.raises(UsageError, match=r"lcc\.jsonl, line 1: not UTF-8"):
        load(root, "longbench", "lcc")


def test_the_archive_may_lie_as_it_unpacks(root):
    fill(root, ["qasper"], folder="longbench/data")
    fill(root, ["qasper"], ending="_e", folder="longbench/data", rows=2)
    assert len(load(root, "longbench", "qasper")[0].examples) == 4
    assert len(load(root, "longbench_e", "qasper")[0].examples) == 2


def test_longbench_e_knows_its_ranges(root):
    fill(root, ["qasper"], ending="_e")
    task = load(root, "longbench_e", "qasper")[0]
    assert [e.meta["bucket"] for e in task.examples] == ["0-4k", "4-8k", "8k+", "8k+"]
    assert [longbench.length_bucket(n) for n in (1, 3999, 4000, 7999, 8000)] == ["0-4k", "0-4k", "4-8k", "4-8k", "8k+"]


def test_the_backend_of_code_sim_is_a_knob_and_identity(root):
    fill(root, ["lcc", "trec", "qasper"])
    assert load(root, "longbench", "lcc")[0].metric == "code_sim"
    by_difflib = load(root, "longbench", "lcc", "qasper", code_sim="difflib")
    assert [t.metric for t in by_difflib] == ["code_sim_difflib", "f1"]
    ids = []
    for backend in ("levenshtein", "difflib"):
        run = words.read(["dataset=longbench/lcc", f"code_sim={backend}", "method=full", f"data.root={root}"])[0]
        (group,) = build_groups(parse(run), {}, None, None, n_layers=1)
        ids.append(group.cells[0].id)
    assert ids[0] != ids[1]
    for backend in ("levenshtein", "difflib"):
        (lcc, trec) = load(root, "longbench", "lcc", "trec", code_sim=backend, rules="mended")
        plain = load(root, "longbench", "lcc", code_sim=backend)[0].metric
        assert (lcc.metric, trec.metric) == (f"{plain}_mended", "classification_mended")
    with pytest.raises(UsageError, match=r"dataset\.longbench\.rules"):
        load(root, "longbench", "lcc", rules="better")
    with pytest.raises(UsageError, match="unknown backend fuzzy of code_sim"):
        load(root, "longbench", "lcc", code_sim="fuzzy")


def test_missing_files_of_a_suite_are_named_with_the_two_ways(root):
    fill(root, ["qasper"])
    with pytest.raises(UsageError) as caught:
        load(root)
    message = str(caught.value)
    assert message.startswith("longbench/narrativeqa.jsonl, ") and "and 12 more not found in" in message
    assert "longbench/qasper.jsonl" not in message
    assert f"Download it: `kvbench data fetch longbench data.root={root}`. Or put it there yourself." in message
    assert message.endswith("These tasks are there: dataset=longbench/qasper")
    with pytest.raises(UsageError, match="kvbench data fetch longbench"):
        load(None, "longbench", "qasper")


def test_official_files_are_needed_and_checked(root):
    fill(root, ["qasper"])
    prompts = root / "longbench" / "dataset2prompt.json"
    for text, reason in (
        ('{"qasper": "no place for it"}', "the prompt of qasper must be text with one"),
        ('["qasper"]', "must be a JSON object by task"),
        ("{", "not JSON"),
    ):
        prompts.write_text(text)
        with pytest.raises(UsageError, match=reason):
            load(root, "longbench", "qasper")
    prompts.unlink()
    with pytest.raises(UsageError, match=r"longbench/dataset2prompt\.json not found in"):
        load(root, "longbench", "qasper")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"context": None}, "'context' must be text"),
        ({"answers": []}, "'answers' must be text or a list"),
        ({"answers": [1]}, "'answers' must be text or a list"),
        ({"length": "long"}, "'length' must be a whole number"),
        ({"all_classes": None}, "'all_classes' must be text or a list"),
        ({"input": 7}, "'input' must be text"),
        ("{", "not JSON"),
        ("[]\n", "must be a JSON object"),
    ],
)
def test_damaged_lines_are_named(root, row, reason):
    text = row if isinstance(row, str) else line(example(2, **row))
    (root / "longbench" / "trec.jsonl").write_text(line(example(1)) + text, encoding="utf-8")
    with pytest.raises(UsageError, match=r"trec\.jsonl, line 2: ") as caught:
        load(root, "longbench", "trec")
    assert reason in str(caught.value)


@pytest.mark.parametrize("key", ["input", "context", "answers", "length", "all_classes"])
def test_missing_keys_are_named(root, key):
    row = example(1)
    del row[key]
    (root / "longbench" / "trec.jsonl").write_text(line(row), encoding="utf-8")
    with pytest.raises(UsageError, match=rf"trec\.jsonl, line 1: there is no key '{key}'"):
        load(root, "longbench", "trec")


def test_repeated_and_missing_ids_stay_examples_of_their_own(root):
    rows = [example(1), example(2, _id="id-1"), {k: v for k, v in example(3).items() if k != "_id"}]
    (root / "longbench" / "trec.jsonl").write_text("".join(map(line, rows)), encoding="utf-8")
    assert [e.id for e in load(root, "longbench", "trec")[0].examples] == ["id-1", "id-1#2", "line 3"]


def test_unknown_tasks_and_splits(root):
    with pytest.raises(UsageError, match="Did you mean qasper"):
        load(root, "longbench", "qaspr")
    with pytest.raises(UsageError, match="unknown task musique of dataset longbench_e"):
        load(root, "longbench_e", "musique")
    with pytest.raises(UsageError, match=r"unknown value english of dataset\.longbench\.split"):
        load(root, "longbench", split="english")


def test_the_official_multi_news():
    data_path("longbench", "multi_news.jsonl")
    folder = data_path("longbench")
    (task,) = load(folder.parent, "longbench", "multi_news")
    template = json.loads((folder / "dataset2prompt.json").read_text(encoding="utf-8"))["multi_news"]
    rows = [json.loads(x) for x in (folder / "multi_news.jsonl").read_bytes().decode().split("\n") if x]
    assert [e.prompt for e in task.examples] == [template.format(**r) for r in rows]
    assert len(task.examples) == 200 and {e.max_new_tokens for e in task.examples} == {512}
    assert task.source == "multi_news.jsonl, 200 examples; prompts of LongBench's dataset2prompt.json"


MINI = {
    **{"narrativeqa": 6, "qasper": 9, "multifieldqa_en": 7, "hotpotqa": 13, "2wikimqa": 13, "musique": 7},
    **{"gov_report": 12, "qmsum": 6, "multi_news": 11, "trec": 8, "triviaqa": 12, "samsum": 15, "passage_count": 4},
    **{"passage_retrieval_en": 15, "lcc": 26, "repobench-p": 23},
    **{"multifieldqa_zh": 15, "dureader": 6, "vcsum": 6, "lsht": 8, "passage_retrieval_zh": 15},
}
REWORDED = ("narrativeqa", "qasper", "multi_news")
"""The tasks whose prompts MiniLongBench itself words otherwise: another instruction, or one more newline at the end."""


def test_minilongbench_in_longbenchs_own_words():
    folder = data_path("longbench_mini")
    templates = json.loads(data_path("longbench", "dataset2prompt.json").read_text(encoding="utf-8"))
    lengths = json.loads(data_path("longbench", "dataset2maxlen.json").read_text(encoding="utf-8"))
    tasks = [t for d in ("longbench_mini", "longbench_mini_zh") for t in load(folder.parent, d)]
    assert {t.id.partition("/")[2]: len(t.examples) for t in tasks} == MINI
    assert sum(MINI.values()) == 237 and sum(MINI[n] for n in REWORDED) == 26
    for task in tasks:
        name = task.id.partition("/")[2]
        rows = [json.loads(x) for x in (folder / f"{name}.jsonl").read_bytes().decode().split("\n") if x]
        assert [e.prompt for e in task.examples] == [templates[name].format(**r) for r in rows]
        assert all(e.prompt.endswith(e.question) for e in task.examples)
        assert [e.answers for e in task.examples] == [tuple(r["answers"]) for r in rows]
        assert {e.max_new_tokens for e in task.examples} == {lengths[name]}
        spec = longbench.TASKS[name]
        assert (task.metric, task.first_line, task.chat) == (spec.metric, spec.first_line, spec.chat)
        assert task.source.startswith(f"{name}.jsonl, {MINI[name]} examples")


def test_minilongbench_says_what_is_missing(root):
    fill(root, ["qasper"], folder="longbench_mini")
    assert load(root, "longbench_mini", "qasper")[0].id == "longbench_mini/qasper"
    with pytest.raises(
        UsageError, match=r"longbench_mini/lcc\.jsonl.* not found in .*data fetch longbench_mini data\.root"
    ):
        load(root, "longbench_mini", "lcc")


def test_a_task_for_every_prompt_of_the_official_file():
    folder = data_path("longbench")
    for name in ("dataset2prompt.json", "dataset2maxlen.json"):
        assert set(json.loads((folder / name).read_text(encoding="utf-8"))) == set(longbench.TASKS)


def test_a_run_reports_longbench_e_by_range(root, capsys):
    fill(root, ["qasper"], ending="_e")
    results = root / "results"
    arguments = [
        "dataset=longbench_e/qasper",
        "method=full",
        "max_length=256",
        f"data.root={root}",
        f"results={results}",
    ]
    assert main(["run", *arguments, "--json"]) == 0
    (cell,) = json.loads(capsys.readouterr().out)["rows"][0]["cells"]
    assert {name: b["n"] for name, b in cell["buckets"].items()} == {"0-4k": 1, "4-8k": 1, "8k+": 2}
    complete = sum(b["n"] * b["score"] for b in cell["buckets"].values()) / 4
    assert complete == pytest.approx(cell["score"])


def test_the_share_of_answers_that_a_kept_fault_concerns_is_told(root, capsys, monkeypatch):
    fill(root, ["lcc"])
    decode = PreTrainedTokenizerBase.decode
    # one of four answers begins with a line of spaces
    leads = {"1": " \n"}

    def answer(self, ids, skip_special_tokens=False, **options):
        if not skip_special_tokens:
            return decode(self, ids, **options)
        leads["n"] = leads.get("n", 0) + 1
        return leads.get(str(leads["n"]), "") + "salt"

    monkeypatch.setattr(PreTrainedTokenizerBase, "decode", answer)
    arguments = ["run", "dataset=longbench/lcc", "method=full", "max_length=256", f"data.root={root}"]
    for rules, concerned in (("scripts", True), ("mended", False)):
        leads.pop("n", None)
        assert main([*arguments, f"results={root / rules}", f"rules={rules}", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        told = "a first line of spaces is scored as the code (metric code_sim_mended, rules=mended of"
        assert any(told in note and note.endswith("concerns: full 25 %.") for note in report["notes"]) == concerned
        assert report["rows"][0]["cells"][0]["score"] == (75 if concerned else 100)
