"""Cells of the papers' efficiency tables: placed, in printed units, ratio beside ratio; and the script behind them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvbench import config
from kvbench.bench import papers, records
from kvbench.cli.rewrite import rewrite, split_list
from kvbench.errors import UsageError
from kvbench.papers import published

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu_tables.sh"


def row(method, workload, model="llama2-7b", session="s", batch=300, new=338, status="measured", **quantities):
    return {
        "key": f"{method} {workload} {session}",
        "session": session,
        "model": model,
        "method": method,
        "workload": workload,
        "batch": batch,
        "new": new,
        "status": status,
        "reason": "",
        "marks": ["integrated"],
        "facts": {"device": "a GPU"},
        "quantities": {k: {"median": v} for k, v in quantities.items()},
    }


@pytest.fixture
def think(tmp_path):
    at = "160+338x300"
    rows = [
        row("full", at, status="OOM"),
        row("kivi bits=4", at, peak_allocated=60e9, ttft=30.0, tpot=0.06),
        row("think+kivi ratio=0.4 bits=4", at, peak_allocated=54e9, ttft=36.0, tpot=0.045),
        # of another session: shown, but no ratio
        row("think+kivi ratio=0.5 bits=4", at, session="t", peak_allocated=48e9, ttft=1.0, tpot=1.0),
    ]
    records.append(tmp_path / "think10.jsonl", rows)
    return {(c.row, c.column): c for c in papers.measured("think", "10", tmp_path)}


def test_values_are_in_printed_units_and_ratios_stand_beside_ratios(think):
    setting = "bits=4/4;ratio=0.4;batch=300;prompt=160;gen=338"
    memory = think[f"kivi+think {setting}", "peak_memory/peak_memory"]
    assert (memory.value, memory.unit, memory.ratio) == (54.0, "GB", pytest.approx(0.9))
    assert memory.published == 53.3 and memory.published_ratio == pytest.approx(53.3 / 61.7)
    assert memory.marks == ("integrated", "a GPU")
    token = think[f"kivi+think {setting}", "tpot/tpot"]
    # a step of 45 ms for 300 rows
    assert (token.value, token.ratio) == (pytest.approx(0.15), pytest.approx(0.75))
    assert token.published_ratio == pytest.approx(0.25 / 0.27)
    first = think[f"kivi+think {setting}", "ttft/ttft"]
    assert (first.value, first.ratio) == (pytest.approx(120.0), pytest.approx(1.2))


def test_a_row_of_another_session_has_no_ratio(think):
    other = think["kivi+think bits=4/4;ratio=0.5;batch=300;prompt=160;gen=338", "peak_memory/peak_memory"]
    assert other.value == 48.0 and other.ratio is None and other.published_ratio == pytest.approx(51.2 / 61.7)


def test_out_of_memory_and_what_is_not_run_are_said(tmp_path):
    at, chat = "3712+384x8", "llama2-7b-chat"
    group = papers.load("uncomp", "10").methods["uncomp-group"]
    rows = [row("full", at, chat, batch=8, status="OOM"), row(group, at, chat, batch=8, tpot=0.04)]
    records.append(tmp_path / "uncomp10.jsonl", rows)
    cells = {(c.row, c.column): c for c in papers.measured("uncomp", "10", tmp_path)}
    full = cells["full batch=8;prompt=3712;gen=384;kv_size=full", "wikitext2/tpot"]
    assert full.value is None and "OOM" in full.marks
    mine = cells["uncomp-group batch=8;prompt=3712;gen=384;kv_size=384", "wikitext2/tpot"]
    assert mine.value == pytest.approx(5.0) and mine.ratio is None
    assert mine.published_ratio == pytest.approx(5.436 / 11.823)
    theirs = cells["uncomp-group batch=10;prompt=3712;gen=384;kv_size=384", "wikitext2/tpot"]
    assert theirs.published_ratio is None and theirs.marks == ("not run: no row is there",)
    cells = papers.measured("qhitter", "2", tmp_path)
    assert all(any("not run" in m for m in c.marks) for c in cells)
    assert any("take more than one such GPU" in c.marks[-1] for c in cells if c.model == "opt-30b")


def test_shares_are_of_the_full_cache_of_the_session(tmp_path):
    at, chat = "4096+128x12", "llama2-7b-chat"
    half = "scissorhands+vatp half_ratio=0.25 sinks=20"
    records.append(
        tmp_path / "vatp4.jsonl", [row("full", at, chat, throughput=50.0), row(half, at, chat, throughput=80.0)]
    )
    found = [c for c in papers.measured("vatp", "4", tmp_path) if "budget=0.5;gpu=a100-80g" in c.row]
    speed, ratio = found
    assert (speed.value, speed.ratio) == (80.0, pytest.approx(1.6))
    assert speed.published_ratio == pytest.approx(126.45 / 79.78)
    assert ratio.column.endswith("speedup_vs_full") and ratio.value == pytest.approx(1.6)


@pytest.fixture(scope="module")
def dry():
    done = subprocess.run([SCRIPT, "--dry-run"], capture_output=True, text=True, env=environment(), check=True)
    return done.stdout


def environment(**more):
    return {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), **more}


def test_the_script_keeps_to_its_time_and_names_what_is_not_run(dry):
    minutes = [int(line.split("about ")[1].split()[0]) for line in dry.splitlines() if line.startswith("== ")]
    assert max(minutes) <= 8 and sum(minutes) <= 40
    assert "qhitter/2: not run: opt-30b" in dry and "refreekv/3: not run: llama-3-70b-instruct" in dry


@pytest.mark.parametrize(("paper", "table"), papers.tables())
def test_every_declared_row_is_measured_by_a_part(paper, table, dry):
    declared, made = papers.load(paper, table), set()
    for arguments in papers.files(dry)[declared.results]:
        given = dict(a.split("=", 1) for a in arguments.split())
        own = {"workloads", "repeats", "generate", "steps", "peers", "memory_limit", "check"}
        rest = [f"{k}={v}" for k, v in given.items() if k not in own]
        cfg = config.parse(config.compose_config(rewrite([*rest, "weights=random"]).runs[0]))
        assert cfg.model.name == declared.model and cfg.model.architecture
        methods = ["full", *(c.label for c in cfg.chains), *given["peers"].split(",")]
        made |= {(w, m) for w in split_list(given["workloads"]) for m in methods}
    cells = [c for c in published.load_table(paper, table) if c.dataset != "avg" and not declared.why_not(c)]
    # the script measures single-GPU settings in the order of their value, and not all of a table's batches
    placed = {at for c in cells if (at := declared.ours(c)) is not None}
    assert {m for _, m in placed} <= {m for _, m in made}, "a method that no part measures"
    assert placed & made and len(placed & made) >= 0.7 * len(placed)
    assert {c.metric for c in cells} <= set(declared.quantities)


def test_a_table_that_is_not_declared():
    with pytest.raises(UsageError, match="unknown efficiency table 'think/2'"):
        papers.load("think", "2")


@pytest.mark.slow
def test_the_script_runs_and_goes_on_where_it_was(tmp_path):
    small = environment(KVBENCH_GPU_TABLES_SMALL="1", FOLDER=str(tmp_path))
    asked = [SCRIPT, "check", "uncomp3"]
    done = subprocess.run(asked, capture_output=True, text=True, env=small, timeout=280)
    assert done.returncode == 0, done.stderr
    found = {name: records.read(tmp_path / f"{name}.jsonl") for name in ("check", "uncomp3")}
    assert {r["status"] for rows in found.values() for r in rows} == {"measured"}
    assert len(found["uncomp3"]) == 7 and "integrated" in found["check"][0]["marks"]
    assert json.dumps(found) and "TTFT" in done.stdout
