"""A dataset of rows is one YAML file: its fields, what it refuses, and a run on one that was added."""

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml
from support import processes, worked
from support.dataset_files import write_lines

from kvbench.base.errors import UsageError
from kvbench.tasks.base import load_tasks

ROOT = Path(__file__).parents[2]
SQUAD = worked.block("conf/dataset/squad.yaml")
ROWS = [
    {"id": "a", "context": "Paris lies on the {Seine}.", "question": "Where?", "texts": ["the Seine", "Seine"] * 2},
    {"id": "b", "context": "Rome lies on the Tiber.", "question": "Where? ", "texts": ["the Tiber "]},
]  # fmt: skip


def load(folder, **changes):
    entry = yaml.safe_load(SQUAD)["squad"]
    rows = {**entry["_rows_"], **changes.pop("rows", {})}
    return load_tasks("squad", {**entry, "_rows_": rows, **changes}, [], None, folder)


def test_fields_of_rows_become_prompts_and_references(tmp_path):
    write_lines(tmp_path / "squad_dev.jsonl", *ROWS)
    (task,) = load(tmp_path)
    one, two = task.examples
    assert (task.id, task.metric, task.source, task.first_line) == ("squad", "squad_f1", "SQuAD, squad_dev.jsonl", True)
    assert (one.id, one.answers, one.max_new_tokens) == ("a", ("the Seine", "Seine"), 6)
    assert one.prompt == "Paris lies on the {Seine}.\n\nQuestion: Where?\nAnswer:"
    assert one.prompt.endswith(one.question) and two.answers == ("the Tiber",) and not task.note
    assert load(tmp_path, metric="exact_match")[0].metric == "exact_match"


def test_rows_are_left_out_parted_and_drawn_as_the_format_says(tmp_path):
    rows = [{"q": f"q{i}", "best": "x; y;", "w": "z", "kind": "text" if i else "image"} for i in range(9)]
    write_lines(tmp_path / "squad_dev.jsonl", *rows)
    shape = {"prompt": "{q}:", "question": "", "answers": ["best"], "split": {"best": ";"}, "id": "", "size": 9}
    skip = {"only": {"kind": ["text"]}, "left_out": "are images", "note": "ours"}
    (task,) = load(tmp_path, rows={**shape, **skip})
    assert task.note == "squad: 1 of 9 are images; 8 questions, the release of published tables has 9; ours"
    assert (task.examples[0].id, task.examples[0].answers) == ("squad-1", ("x", "y"))
    choice = {"prompt": "{q}\n{choices}", "choices": ["best", "w"], "metric": "letter"}
    (drawn,) = load(tmp_path, rows={**shape, **choice})
    assert {e.answers for e in drawn.examples} == {("A",), ("B",)} and drawn.examples[0].classes == ("A", "B")
    shown = {e.prompt.partition("\n")[2] for e in drawn.examples}
    assert shown == {"(A) x; y;\n(B) z", "(A) z\n(B) x; y;"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": {"prmpt": "x"}}, r"conf/dataset/squad\.yaml, _rows_: .*'prmpt'"),
        ({"rows": {"task": {"fist_line": True}}}, r"_rows_: .*'fist_line'"),
        ({"rows": {"choices": [f"option {i}" for i in range(11)]}}, "choices has 11 options, at most 10 are possible"),
        ({"rows": {"metric": "classification"}}, "metric classification needs classes"),
        ({"rows": {"answers": []}}, r"line 1: there is no reference under any key"),
        ({"rows": {"prompt": "{contxt}"}}, r"squad_dev\.jsonl, line 1: there is no key 'contxt'"),
        ({"rows": {"answers": ["answer"]}}, "line 1: there is no key 'answer'"),
        ({"rows": {"metric": "f2"}}, "unknown metric f2"),
        ({"rows": {"metric": ["squad_f1", "frist_word"]}}, "unknown metric frist_word"),
        ({"metric": "f1"}, "Available: squad_f1, exact_match|Available: exact_match, squad_f1"),
        ({"rows": {"after": "####"}}, r"'texts' must end in '#### N', where squad_f1 can score N"),
        ({"file": "nowhere.jsonl"}, r"nowhere\.jsonl not found in"),
        ({"max_new_tokens": 0}, r"dataset\.squad\.max_new_tokens=0"),
    ],
)
def test_formats_and_rows_that_do_not_fit_are_named(tmp_path, changes, message):
    write_lines(tmp_path / "squad_dev.jsonl", *ROWS)
    with pytest.raises(UsageError, match=message):
        load(tmp_path, **changes)


@pytest.mark.e2e("whole runs")
def test_one_yaml_file_adds_a_dataset(tmp_path):
    """In a copy of the package, nothing but conf/dataset/squad.yaml is new."""
    for name in ("kvbench", "conf"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "papers/data"))
    (tmp_path / "conf/dataset/squad.yaml").write_text(SQUAD)
    (tmp_path / "data").mkdir()
    write_lines(tmp_path / "data/squad_dev.jsonl", *ROWS)
    command = ["run", "model=tiny", "method=snapkv", "kv_size=24", "window=4"]
    command += ["dataset=squad", "max_new_tokens=3", "data.root=data", "results=results", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = processes.run(*command, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert [c["task"] for c in record["columns"]] == ["squad"] and record["columns"][0]["metric"] == "squad_f1"
    files = (tmp_path / "results").rglob("samples*.jsonl")
    samples = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert {s["id"] for s in samples} == {"a", "b"} and len(samples) == 4
