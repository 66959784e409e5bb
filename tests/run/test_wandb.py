"""Weights & Biases offline: its files are read back and hold what the results folder holds; off, nothing is loaded."""

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from support import processes, wandb_files
from support.runs import SMALL, metrics_of, prepare

from kvbench.cli.main import main
from kvbench.papers.figures import registry
from kvbench.papers.figures.draw import Head
from kvbench.plan.config import LoggerConfig
from kvbench.report.heatmap import BAR, COUNTED, DEPTH, build_map, draw_map, score_silence
from kvbench.run import experiment
from kvbench.run.wandb_logger import flatten_names, listeners, name_run
from kvbench.tasks.needle import EMPTY_SCORES

pytestmark = pytest.mark.e2e("starts W&B")

OFFLINE = ("logger=wandb", "logger.mode=offline")
HAYSTACK = "The old harbour was quiet in the morning, and boats came home with little. " * 400


@pytest.fixture(autouse=True)
def without_settings_of_this_machine(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "WANDB_ENTITY", "WANDB_DIR", "WANDB_RUN_GROUP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    if "wandb" in sys.modules:
        # forgets the environment of the test before
        sys.modules["wandb"].teardown()


def measure(*arguments, **changes):
    prepared = prepare(*arguments, **changes)
    experiment.measure(prepared, quiet=True, listeners=listeners(prepared.cfg.logger))
    return prepared


def table(run, name):
    return json.loads((run["folder"] / "files" / run["summary"][f"{name}/path"]).read_text())


def test_off_means_no_listener_and_no_import():
    assert listeners(LoggerConfig()) == listeners(LoggerConfig("wandb", "disabled")) == ()
    code = "import sys, kvbench.cli.sweep, kvbench.cli.run; sys.exit('wandb' in sys.modules)"
    assert processes.start_code(code).wait() == 0


def test_each_cell_is_a_run_that_holds_its_metrics_and_goes_on_when_resumed(tmp_path, capsys):
    arguments = [*SMALL, "method=snapkv+think", "ratio=0.4", f"results={tmp_path}", *OFFLINE, "logger.samples=4"]
    measure(*arguments, "limit=2")
    assert f"`wandb sync {tmp_path}/wandb/offline-run-*` sends them" in capsys.readouterr().err
    time.sleep(1.05 - time.time() % 1)  # W&B names its folders by the second
    prepared = measure(*arguments, "logger.group=think/2")
    runs = wandb_files.runs(tmp_path)
    cells = {c.id: (g, c) for g in prepared.groups for c in g.cells}
    assert runs.keys() == cells.keys()
    for cell_id, (first, resumed) in runs.items():
        group, cell = cells[cell_id]
        assert first["id"] == resumed["id"] == cell_id
        assert (first["group"], resumed["group"]) == ("tiny", "think/2")
        assert (resumed["project"], resumed["job_type"], resumed["exit"]) == ("kvbench", "cell", 0)
        assert resumed["name"] == f"{cell.label} · {group.column}"
        # steps are answers on disk: those of the resumed run come after those of the first
        assert max(first["rows"]) == 2 < min(resumed["rows"]) and max(resumed["rows"]) == 4
        assert [r["progress/answers"] for r in resumed["rows"].values()] == list(resumed["rows"])
        assert {r["progress/of"] for r in resumed["rows"].values()} == {4}
        on_disk = json.loads((tmp_path / "cells" / cell_id / "metrics.json").read_text())
        for key in ("n", "of", "score", "payload", "overhead", "full_bytes", "kept", "unscored"):
            assert resumed["summary"][key] == on_disk[key]
        assert resumed["summary"]["status"] == on_disk["status"] == "complete"
        assert resumed["summary"]["timing/prefill_s"] == on_disk["timing"]["prefill_s"]
        held_bytes = on_disk["payload16"] + on_disk["overhead16"]
        assert resumed["summary"]["percent_of_full"] == pytest.approx(100 * held_bytes / on_disk["full16"])
        config = resumed["config"]
        assert config["identity"] == json.loads(json.dumps(cell.identity))
        assert (config["method"], config["task"]) == (cell.chain.name, group.task.id)
        assert cell.chain.stages == () or (config["kv_ratio"], config["ratio"]) == (0.25, 0.4)
        assert config["provenance"] == list(prepared.store.cell(cell_id).provenance)
        samples = list(prepared.store.lines(cell_id).values())[:4]
        shown = table(resumed, "samples")
        assert shown["columns"] == ["id", "prediction", "answers", "score", "kept %"]
        assert [row[:2] for row in shown["data"]] == [[s["id"], s["prediction"]] for s in samples]
        assert [row[2] for row in shown["data"]] == ["\n".join(s["answers"]) for s in samples]
        assert [row[3] for row in shown["data"]] == [s["score"] for s in samples]


def test_cells_of_a_papers_table_are_grouped_under_it(tmp_path, capsys):
    assert main(["table", "think/4", "limit=1", "length=128", f"results={tmp_path}", *OFFLINE]) == 0
    capsys.readouterr()
    assert {r["group"] for runs in wandb_files.runs(tmp_path).values() for r in runs} == {"think/4"}


def test_needle_runs_have_a_heat_map_over_all_lengths(tmp_path):
    (tmp_path / "essay.txt").write_text(HAYSTACK)
    needle = ["dataset=needle", f"haystack={tmp_path / 'essay.txt'}", "lengths=128,192", "depths=0,100", "repeats=2"]
    prepared = measure(*needle, "method=keynorm", f"results={tmp_path}", *OFFLINE)
    logged = wandb_files.runs(tmp_path)
    ((heat,),) = [runs for name, runs in logged.items() if name.startswith("needle-")]
    assert heat["config"]["cells"] == sorted(c.id for g in prepared.groups for c in g.cells)
    assert logged.keys() - {heat["id"]} == {c.id for g in prepared.groups for c in g.cells}
    rows = table(heat, "heatmap_values")["data"]
    assert len(rows) == 2 * 2 * 2
    for label, length, depth, score, n, percent in rows:
        group = next(g for g in prepared.groups if g.task.id == f"needle/{length}")
        cell = next(c for c in group.cells if c.label == label)
        scores = [s["score"] for s in prepared.store.lines(cell.id).values() if s["meta"]["depth"] == depth]
        assert n == len(scores) == 2 and score == percent == pytest.approx(100 * sum(scores) / 2)
    images = sorted((heat["folder"] / "files" / "media" / "images").rglob("*.png"))
    assert len(images) == 2 and all(p.stat().st_size > 1000 for p in images)


def test_a_needle_that_silence_scores_is_counted_as_in_the_figure(tmp_path):
    (tmp_path / "essay.txt").write_text(HAYSTACK)
    needle = ["dataset=needle", f"haystack={tmp_path / 'essay.txt'}", "lengths=448", "depths=0,100", "repeats=2"]
    prepared = measure(*needle, "phrasing=completion", "method=keynorm", f"results={tmp_path}", *OFFLINE)
    (task,) = [group.task for group in prepared.groups]
    assert score_silence(task) == pytest.approx(EMPTY_SCORES["completion"])
    ((heat,),) = [runs for name, runs in wandb_files.runs(tmp_path).items() if name.startswith("needle-")]
    logged = table(heat, "heatmap_values")
    data = pd.DataFrame(logged["data"], columns=logged["columns"]).rename(columns={"method": "series"})
    csv = data.drop(columns="found").to_csv(index=False)
    figure = registry.FIGURES["needle/heatmap"]
    shown = figure.prepare(figure.parse(f"# runs: dataset needle phrasing=completion\n{csv}"))
    assert list(data["found"]) == pytest.approx(list(shown["found"])) and (data["found"] < data["score"]).all()
    captions = {f"{series}: {mean}" for series, mean in zip(shown["series"], shown["mean"], strict=True)}
    assert set(heat["summary"]["heatmap/captions"]) == captions


def test_a_map_has_the_words_of_the_figure():
    figure = registry.FIGURES["needle/heatmap"]
    cells = [{"series": "full", "length": n, "depth": d, "found": 50.0, "mean": "50 %"} for n in (1, 2) for d in (0, 9)]
    axes, bar = figure.drawing(pd.DataFrame(cells), Head()).axes
    assert (figure.note, bar.get_ylabel(), axes.get_ylabel()) == (COUNTED, BAR, DEPTH)
    assert axes.images[0].get_clim() == (0, 100)


def test_a_service_that_does_not_answer_costs_one_warning_and_nothing_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    arguments = ["dataset=tiny/needle", "length=128", "examples=4", "method=snapkv"]
    measure(*arguments, f"results={tmp_path / 'a'}", "logger=wandb")
    assert capsys.readouterr().err.count("W&B cannot be used (http://127.0.0.1:9 does not answer") == 1
    measure(*arguments, f"results={tmp_path / 'b'}")
    assert metrics_of(tmp_path / "a") == metrics_of(tmp_path / "b")
    # what could not be sent is kept, ready for `wandb sync`
    assert wandb_files.runs(tmp_path / "a").keys() == metrics_of(tmp_path / "a").keys()


def test_a_cell_that_compressed_nothing_says_so(tmp_path):
    (tmp_path / "essay.txt").write_text(HAYSTACK)
    needle = ["dataset=needle", f"haystack={tmp_path / 'essay.txt'}", "lengths=128", "depths=0", "repeats=1"]
    measure(*needle, "method=h2o", "kv_size=64,4000", f"results={tmp_path}", *OFFLINE)
    logged = wandb_files.runs(tmp_path)
    cells = {runs[-1]["config"].get("label"): runs[-1]["summary"] for runs in logged.values()}
    assert cells["h2o kv_size=4000"]["nothing_compressed"] is True
    assert "nothing_compressed" not in cells["h2o kv_size=64"] and "nothing_compressed" not in cells["full"]
    assert cells["h2o kv_size=4000"]["score"] == cells["full"]["score"]
    ((heat,),) = [runs for name, runs in logged.items() if name.startswith("needle-")]
    captions = [f"full: {cells['full']['score']:.0f} %", "h2o kv_size=4000: nothing was compressed"]
    captions.append(f"h2o kv_size=64: {cells['h2o kv_size=64']['score']:.0f} %")
    assert sorted(heat["summary"]["heatmap/captions"]) == captions


def test_shards_have_runs_of_their_own_and_the_whole_has_the_cells(tmp_path, capsys):
    arguments = ["dataset=tiny/needle", "length=128", "examples=6", "method=snapkv", f"results={tmp_path}", *OFFLINE]
    assert main(["run", "-m", "shards=2", *arguments, "--json"]) == 0
    capsys.readouterr()
    runs = wandb_files.runs(tmp_path)
    cells = {c.id for g in prepare(*arguments).groups for c in g.cells}
    assert runs.keys() == cells | {f"{c}-{i}of2" for c in cells for i in range(2)}
    for cell in cells:
        parts = [runs[f"{cell}-{i}of2"][-1] for i in range(2)]
        assert sum(p["rows"][max(p["rows"])]["progress/answers"] for p in parts) == 6
        assert {p["job_type"] for p in parts} == {"shard"}
        assert runs[cell][-1]["summary"]["n"] == 6 and runs[cell][-1]["job_type"] == "cell"


def test_metrics_become_flat_names():
    metrics = {"score": 50.0, "ci": [40.0, 60.0], "attended": None, "buckets": {"0-4k": {"n": 3, "score": 1.0}}}
    flat = {"score": 50.0, "ci_low": 40.0, "ci_high": 60.0, "buckets/0-4k/n": 3, "buckets/0-4k/score": 1.0}
    assert flatten_names(metrics) == flat
    assert flatten_names({"ci": None}) == {}


def test_run_ids_are_cell_ids_except_for_shards():
    cell = prepare("dataset=tiny/needle", "length=128", "examples=1", "method=full").groups[0].cells[0]
    assert name_run(cell, 0, 1) == cell.id and name_run(cell, 1, 4) == f"{cell.id}-1of4"


def test_a_heat_map_averages_per_place_and_leaves_the_rest_blank():
    heat = build_map([(512, 0, 100.0), (512, 0, 0.0), (1024, 50, 80.0)])
    assert (heat.lengths, heat.depths) == ((512, 1024), (0, 50))
    assert np.array_equal(heat.scores, [[50, np.nan], [np.nan, 80]], equal_nan=True)
    assert list(heat.rows()) == [(512, 0, 50.0, 2), (1024, 50, 80.0, 1)]
    assert heat.mean() == 60, "over three samples, not over two places"
    picture = draw_map(heat, "snapkv")
    assert picture.ndim == 3 and picture.shape[2] == 3 and picture.min() < 100 < picture.max()


def test_the_dashboard_is_printed_without_the_network_and_names_what_is_logged(tmp_path):
    script = Path(__file__).parents[2] / "scripts" / "wandb_dashboard.py"
    done = subprocess.run([sys.executable, script, "--dry-run"], capture_output=True, text=True, check=True)
    panels = [p for section in json.loads(done.stdout)["sections"].values() for p in section]
    measure("dataset=tiny/needle", "length=128", "examples=8", "method=snapkv", f"results={tmp_path}", *OFFLINE)
    logged = {key for (run,) in wandb_files.runs(tmp_path).values() for key in run["summary"]}
    logged |= {"kv_size", "heatmap", "heatmap_values", "samples"}
    logged |= {key for (run,) in wandb_files.runs(tmp_path).values() for key in run["config"]}
    named = {p[k] for p in panels for k in ("metric", "groupby", "key", "x", "y") if k in p}
    named |= {m for p in panels for m in p.get("metrics", ())}
    assert {n.partition(":")[2] or n for n in named} <= logged


def test_the_dashboard_is_a_workspace_that_the_package_takes():
    pytest.importorskip("wandb_workspaces")
    spec = importlib.util.spec_from_file_location("d", Path(__file__).parents[2] / "scripts" / "wandb_dashboard.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    built = module.workspace("team", "kvbench")
    assert [s.name for s in built.sections] == list(module.SECTIONS)
    built._to_model()
