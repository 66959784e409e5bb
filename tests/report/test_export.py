"""export kvpress: folders as kvpress names and fills them, and as its leaderboard reads them."""

import csv
import json
import re
from dataclasses import dataclass, field

import pytest
import yaml
from support.stored import Cell as PlainCell
from support.stored import measure, sample

from kvbench.cli.main import main
from kvbench.report.export_kvpress import RULER, folder_name
from kvbench.store.store import ResultStore
from kvbench.studies import imports
from kvbench.studies.imports import scoring

QWEN3 = {"dataset": "ruler", "data_dir": "4096", "model": "Qwen/Qwen3-8B"}
SCORES = (96.7, 89.4, 99.8, 92.0, 61.8, 99.7, 99.6, 100, 100, 97.2, 58.4, 46.2, 93.0)


@dataclass(frozen=True)
class Cell(PlainCell):
    """A cell of a chain, as a run stores it."""

    stages: tuple = ()
    prompt: dict = field(default_factory=dict)

    @property
    def identity(self):
        stages = [{"id": method, "revision": 1, "knobs": knobs} for method, knobs in self.stages]
        return {"task": self.column, "chain": {"stages": stages, "per": "kv_head"}, "prompt": self.prompt}


@dataclass(frozen=True)
class Chosen(Cell):
    """A cell whose examples are its own."""

    content: str = ""

    @property
    def identity(self):
        return {**super().identity, "content": self.content}


def answered(store, cell, answers):
    """Store (prediction, references) as the cell's samples."""
    writer = store.open(cell, {"device": "cpu", "torch": "2", "model": "llama3-8b-instruct"}, 0, mix=False)
    for i, (prediction, references) in enumerate(answers):
        writer.append(sample(i, prediction=prediction, answers=references, n=1000, kept=125.0))
    writer.close()


def ruler(store, task, answers, size=500, name="", **more):
    chain = {"stages": (("snapkv", {"kv_ratio": 0.125}),), "prompt": {"query_aware": False}, **more}
    cell = Cell(name=name or f"{task} {more}", column=f"ruler/{task}/4096", size=size, **chain)
    answered(store, cell, answers)


def loaded(folder):
    """The loader's rule: the mean over all tasks, and the mean of the CSV's ratio, with two digits each."""
    metrics = json.loads((folder / "metrics.json").read_text())
    scores = [values["string_match"] for values in metrics.values()]
    with (folder / "predictions.csv").open(newline="") as lines:
        ratios = [float(row["compression_ratio"]) for row in csv.DictReader(lines)]
    return round(sum(scores) / len(scores), 2), round(sum(ratios) / len(ratios), 2)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (
            {"press_name": "snapkv", "compression_ratio": 0.875, "query_aware": True},
            "ruler__4096__Qwen--Qwen3-8B__snapkv__0.88__query_aware",
        ),
        ({"press_name": "no_press", "compression_ratio": 0.0}, "ruler__4096__Qwen--Qwen3-8B__no_press__0.00"),
        ({"press_name": "kvzap_mlp", "threshold": -3.0}, "ruler__4096__Qwen--Qwen3-8B__kvzap_mlp__-3.00"),
        (
            {
                "press_name": "snap_think", "compression_ratio": 0.5, "fraction": 0.1, "max_context_length": 8192,
                "query_aware": True, "key_channel_compression_ratio": 0.5,
            },
            "ruler__4096__Qwen--Qwen3-8B__snap_think__0.50__fraction0.100__max_context8192__query_aware__key_channel_cr0.50",
        ),
    ],
)  # fmt: skip
def test_a_folder_is_named_as_kvpress_names_it(config, name):
    """C9."""
    assert folder_name({**QWEN3, **config}) == name


def test_the_leaderboards_loader_reads_a_written_folder(tmp_path, capsys):
    """C12: thirteen scores whose mean is 87.22, of a run at .875."""
    store = ResultStore(tmp_path / "results")
    for task, score in zip(RULER, SCORES, strict=True):
        right = round(score * 5)
        ruler(store, task, [(" 11", ["11"] if i < right else ["12"]) for i in range(500)])
    assert main(["export", "kvpress", f"results={store.root}", f"output={tmp_path / 'out'}"]) == 0
    (folder,) = (tmp_path / "out").iterdir()
    assert folder.name == "ruler__4096__meta-llama--Meta-Llama-3-8B-Instruct__snapkv__0.88"
    assert loaded(folder) == (87.22, 0.88)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert [*config][:6] == ["dataset", "data_dir", "model", "device", "press_name", "compression_ratio"]
    assert (config["compression_ratio"], config["fraction"], config["query_aware"]) == (0.875, 1.0, False)
    assert config["press_init_command"].endswith("snapkv kv_ratio=0.125")
    assert capsys.readouterr().err == ""


def test_answers_are_scored_as_kvpress_scores_them_and_score_reads_them_again(tmp_path, capsys):
    """C5: half of four numbers, any of several references, and control characters that are deleted."""
    store = ResultStore(tmp_path / "results")
    ruler(
        store,
        "niah_multivalue",
        [(" 11, 22 and 33", ["11", "22", "44", "55"]), ("", ["1"]), ("1234\n567", ["1234567"])],
    )
    ruler(store, "qa_1", [("It was 308 points", ["308", "three"])])
    ruler(store, "qa_1@xquad", [("308", ["308"])])
    where = [f"results={store.root}", f"output={tmp_path / 'out'}"]
    assert main(["export", "kvpress", "name=ruler@2025", *where, "--json"]) == 0
    captured = capsys.readouterr()
    (listed,) = json.loads(captured.out)["folders"]
    assert listed["tasks"] == ["niah_multivalue", "qa_1"] and listed["n"] == 4
    assert "only 2 of RULER's 13 tasks: 1 of 1" in captured.err and "only a part of their data set" in captured.err
    (folder,) = (tmp_path / "out").iterdir()
    assert folder.name.startswith("ruler@2025__4096__") and folder.name.endswith("__0.88__fraction0.004")
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics == {"niah_multivalue": {"string_match": 50.0}, "qa_1": {"string_match": 100.0}}
    rows = (folder / "predictions.csv").read_text().splitlines()
    assert rows[1] == "e0,niah_multivalue,['11' '22' '44' '55'],\" 11, 22 and 33\",0.875"
    assert rows[2] == "e1,niah_multivalue,['1'],,0.875"
    for predictions in imports.read_predictions(folder / "predictions.csv"):
        name = scoring.choose_metric(predictions, "levenshtein", None)
        scored = scoring.score_file(predictions, name)
        assert scoring.compute_printed_mean(name, scored.scores) == metrics[predictions.dataset]["string_match"]


@pytest.mark.parametrize(
    ("stages", "press", "ratio"),
    [
        ((), "no_press", "0.00"),
        ((("keynorm", {"kv_ratio": 0.5}),), "knorm", "0.50"),
        ((("streamingllm", {"kv_size": 125}),), "streaming_llm", "0.88"),
        ((("kvpress:keydiff", {"compression_ratio": 0.3}),), "keydiff", "0.30"),
        ((("kvpress:adakv:snapkv", {"compression_ratio": 0.3}),), "adakv_snapkv", "0.30"),
        ((("snapkv", {"kv_ratio": 0.5}), ("think", {"ratio": 0.5})), "snap_think", "0.50__key_channel_cr0.50"),
    ],
)
def test_methods_have_the_names_of_kvpresss_registry(stages, press, ratio, tmp_path, capsys):
    store = ResultStore(tmp_path / "results")
    kept = 1000.0 if not stages else 125.0
    cell = Cell(column="tiny/needle", size=1, stages=stages, prompt={"query_aware": False})
    writer = store.open(cell, {"device": "cpu", "torch": "2", "model": "tiny"}, 0, mix=False)
    writer.append(sample(0, answers=["1"], n=1000, kept=kept))
    writer.close()
    assert main(["export", "kvpress", f"results={store.root}", f"output={tmp_path / 'out'}"]) == 0
    assert [p.name for p in (tmp_path / "out").iterdir()] == [f"tiny__needle__tiny__{press}__{ratio}"]


def test_what_cannot_be_one_folder_each_is_told(tmp_path, capsys):
    store = ResultStore(tmp_path / "results")
    store.root.mkdir()
    assert main(["export", "kvpress", f"results={store.root}"]) == 2
    assert "has no measured answers that fit the filters" in capsys.readouterr().err
    assert main(["export", "helm"]) == 2
    assert "unknown format helm of export" in capsys.readouterr().err
    measure(store, PlainCell(), range(2))  # imported answers have no chain
    ruler(store, "vt", [("1", ["1"])])
    ruler(store, "vt", [("1", ["1"])], stages=(("kvpress:snapkv", {"compression_ratio": 0.875}),))
    assert main(["export", "kvpress", f"results={store.root}", f"output={tmp_path / 'out'}"]) == 2
    message = capsys.readouterr().err
    assert "kvpress:snapkv compression_ratio=0.875" in message and "would both be the folder" in message
    assert not (tmp_path / "out").exists()
    ruler(store, "vt", [("1", ["1"])], size=7, name="others")
    options = [f"results={store.root}", "method=snapkv", f"output={tmp_path / 'out'}"]
    assert main(["export", "kvpress", *options]) == 0
    assert len([*(tmp_path / "out").iterdir()]) == 1


def test_of_cells_of_other_settings_those_with_most_answers_are_written_and_the_others_named(tmp_path, capsys):
    store = ResultStore(tmp_path / "results")
    shown = ["results=" + str(store.root), f"output={tmp_path / 'out'}"]
    for content, count in (("aaaa", 1), ("bbbb", 3)):
        for method in ("snapkv", "h2o"):
            stages = ((method, {"kv_ratio": 0.125}),)
            cell = Chosen(name=f"{content} {method}", column="tiny/needle", stages=stages, content=content)
            answered(store, cell, [("1", ["1"])] * count)
    assert main(["export", "kvpress", *shown]) == 0
    (note,) = capsys.readouterr().err.splitlines()[:1]
    assert "tiny/needle: results with content=bbbb, 3 prompts of 1000 tokens are written, not those with " in note
    assert "not those with content=aaaa, 1 prompts of 1000 tokens (cells=" in note
    folders = [*(tmp_path / "out").iterdir()]
    assert len(folders) == 2
    for folder in folders:
        assert len((folder / "predictions.csv").read_text().splitlines()) == 1 + 3
    (ids,) = re.findall(r"cells=([0-9a-f,]+) writes these", note)
    assert main(["export", "kvpress", f"cells={ids}", shown[0], f"output={tmp_path / 'fewer'}"]) == 0
    for folder in (tmp_path / "fewer").iterdir():
        assert len((folder / "predictions.csv").read_text().splitlines()) == 1 + 1


def test_folders_with_other_numbers_of_rulers_tasks_are_told_by_the_range(tmp_path, capsys):
    store = ResultStore(tmp_path / "results")
    for task in ("vt", "cwe", "fwe"):
        ruler(store, task, [("a", ["a"])])
    ruler(store, "vt", [("a", ["a"])], stages=(("h2o", {"kv_ratio": 0.5}),))
    assert main(["export", "kvpress", f"results={store.root}", f"output={tmp_path / 'out'}"]) == 0
    assert "with only 1–3 of RULER's 13 tasks: 2 of 2. Their means are no RULER scores" in capsys.readouterr().err


def test_where_nothing_is_chosen_an_earlier_file_stays(tmp_path, capsys):
    store, output = ResultStore(tmp_path / "results"), tmp_path / "results.jsonl"
    ruler(store, "vt", [("a", ["a"])])
    output.write_text("the results of last week\n")
    assert main(["export", "jsonl", f"results={store.root}", "method=h2o", f"output={output}"]) == 2
    assert f"no measured answers that fit the filters. `kvbench list runs` lists all results. {output} is left" in (
        capsys.readouterr().err
    )
    assert output.read_text() == "the results of last week\n"


def test_no_folder_is_written_outside_of_output(tmp_path, capsys):
    store = ResultStore(tmp_path / "results")
    ruler(store, "vt", [("a", ["a"])])
    for name in ("../x", "..", "a/b", "/tmp"):
        arguments = ["export", "kvpress", f"results={store.root}", f"output={tmp_path / 'deep' / 'out'}"]
        assert main([*arguments, f"name={name}"]) == 2
        assert f"name={name} is not possible" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["results"]
    # a column may hold a path: path=../rows.jsonl
    assert folder_name({**QWEN3, "data_dir": "x_path=../../y", "press_name": "h2o", "compression_ratio": 0.5}) == (
        "ruler__x_path=..--..--y__Qwen--Qwen3-8B__h2o__0.50"
    )
