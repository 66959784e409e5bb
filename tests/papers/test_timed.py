"""Cells of the papers' efficiency tables: placed, in printed units, ratio beside ratio; and the script behind them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from kvbench.base.errors import UsageError
from kvbench.bench import architecture, records, workload
from kvbench.cli.main import main
from kvbench.papers.spec import published
from kvbench.papers.timed import bench_spec, row_matching
from kvbench.plan import config
from kvbench.plan.words import split_list

pytestmark = pytest.mark.e2e("runs benchmarks")

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu_tables.sh"
OWN = {"workloads", "repeats", "generate", "steps", "peers", "memory_limit", "check"}
AT = "160+338x300"
HALF = "kivi+think bits=4/4;ratio=0.5;batch=300;prompt=160;gen=338"


def row(
    method, workload, model="llama2-7b", session="s", batch=300, new=338, status="measured", device="a GPU", **values
):
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
        "facts": {"device": device, "processor": "a CPU", "threads": 1},
        "quantities": {k: {"median": v, "q1": 0.9 * v, "q3": 1.1 * v, "n": 3} for k, v in values.items()},
    }


def cells(paper, table, rows):
    """By (row, column) as they are addressed."""
    placed = row_matching.match_cells(bench_spec.load(paper, table), published.load_table(paper, table), rows)
    return {
        (f"{c.printed.method} {c.printed.setting}", f"{c.printed.dataset}/{c.printed.metric}"): c
        for c in placed.itertuples()
    }


@pytest.fixture
def think():
    rows = [
        row("full", AT, status="OOM"),
        row("kivi bits=4", AT, peak_allocated=60e9, ttft=30.0, tpot=0.06),
        row("think+kivi ratio=0.4 bits=4", AT, peak_allocated=54e9, ttft=36.0, tpot=0.045),
        # of another session: shown, but no ratio
        row("think+kivi ratio=0.5 bits=4", AT, session="t", peak_allocated=48e9, ttft=1.0, tpot=1.0),
    ]
    return cells("think", "10", rows)


def test_values_are_in_printed_units_and_ratios_stand_beside_ratios(think):
    setting = "bits=4/4;ratio=0.4;batch=300;prompt=160;gen=338"
    memory = think[f"kivi+think {setting}", "peak_memory/peak_memory"]
    assert (memory.value, memory.printed.unit, memory.ratio) == (54.0, "GB", pytest.approx(0.9))
    assert (memory.low, memory.high) == (pytest.approx(48.6), pytest.approx(59.4))
    assert memory.printed.value == 53.3 and memory.published_ratio == pytest.approx(53.3 / 61.7)
    # a peak is that of the rows as they are: only times are interpolated
    assert memory.marks == () and memory.device == "a GPU" and memory.less_is_better
    token = think[f"kivi+think {setting}", "tpot/tpot"]
    # a step of 45 ms for 300 rows
    assert (token.value, token.ratio) == (pytest.approx(0.15), pytest.approx(0.75))
    assert token.published_ratio == pytest.approx(0.25 / 0.27) and token.marks == ("integrated",)
    first = think[f"kivi+think {setting}", "ttft/ttft"]
    assert (first.value, first.ratio) == (pytest.approx(120.0), pytest.approx(1.2))


def test_a_row_of_another_session_has_no_ratio(think):
    other = think[HALF, "peak_memory/peak_memory"]
    assert other.value == 48.0 and other.ratio is None and other.published_ratio == pytest.approx(51.2 / 61.7)


def test_rows_of_two_devices_share_no_table_and_no_ratio():
    first, second = "think+kivi ratio=0.4 bits=4", "think+kivi ratio=0.5 bits=4"
    rows = [
        row("kivi bits=4", AT, device="cpu x86_64", peak_allocated=60e9),
        row(first, AT, device="cpu x86_64", peak_allocated=54e9),
        # as if the session were the same
        row(second, AT, device="another GPU", peak_allocated=48e9),
    ]
    placed = cells("think", "10", rows)
    shown = [c for c in placed.values() if c.row is not None]
    # the latest row's device, whose base was not measured on it
    assert {c.device for c in shown} == {"another GPU"} and all(c.ratio is None for c in shown)
    declared = bench_spec.load("think", "10")
    assert row_matching.count_others(declared, pd.DataFrame(placed.values()), rows) == {"CPU a CPU, 1 thread": 2}
    assert row_matching.list_workloads(declared, pd.DataFrame(placed.values())) == [AT]


def test_out_of_memory_and_what_is_not_run_are_said():
    at, chat = "3712+384x8", "llama2-7b-chat"
    group = bench_spec.load("uncomp", "10").methods["uncomp-group"]
    rows = [row("full", at, chat, batch=8, status="OOM"), row(group, at, chat, batch=8, tpot=0.04)]
    placed = cells("uncomp", "10", rows)
    full = placed["full batch=8;prompt=3712;gen=384;kv_size=full", "wikitext2/tpot"]
    assert full.value is None and full.status == "OOM"
    ours = placed["uncomp-group batch=8;prompt=3712;gen=384;kv_size=384", "wikitext2/tpot"]
    assert ours.value == pytest.approx(5.0) and ours.ratio is None
    assert ours.published_ratio == pytest.approx(5.436 / 11.823)
    peers_value = placed["uncomp-group batch=10;prompt=3712;gen=384;kv_size=384", "wikitext2/tpot"]
    assert peers_value.published_ratio is None and peers_value.status == "missing"
    placed = row_matching.match_cells(bench_spec.load("qhitter", "2"), published.load_table("qhitter", "2"), [])
    assert set(placed["status"]) == {"missing", "not run"}
    assert all("take more than one such GPU" in c.reason for c in placed.itertuples() if c.printed.model == "opt-30b")
    placed = row_matching.match_cells(bench_spec.load("refreekv", "3"), published.load_table("refreekv", "3"), [])
    average = next(c for c in placed.itertuples() if c.printed.dataset == "avg" and "8b" in c.printed.model)
    assert average.status == "not run" and "average" in average.reason


def test_shares_are_of_the_full_cache_of_the_session():
    at, chat = "4096+128x12", "llama2-7b-chat"
    half = "scissorhands+vatp half_ratio=0.25 sinks=20"
    rows = [row("full", at, chat, throughput=50.0), row(half, at, chat, throughput=80.0)]
    placed = [c for (name, _), c in cells("vatp", "4", rows).items() if "budget=0.5;gpu=a100-80g" in name]
    speed, ratio = placed
    assert (speed.value, speed.ratio, speed.less_is_better) == (80.0, pytest.approx(1.6), False)
    assert speed.published_ratio == pytest.approx(126.45 / 79.78)
    assert ratio.printed.metric == "speedup_vs_full" and ratio.value == pytest.approx(1.6)


def test_what_the_papers_base_does_not_have_is_no_ratio():
    at, own_value = "7500+128x1", "llama3-8b-instruct"
    snapkv = bench_spec.load("refreekv", "3").methods["snapkv"]
    rows = [row("full", at, own_value, compress=0.001, total=2.0), row(snapkv, at, own_value, compress=0.1, total=1.0)]
    placed = row_matching.match_cells(bench_spec.load("refreekv", "3"), published.load_table("refreekv", "3"), rows)
    ours = {c.printed.metric: c for c in placed.itertuples() if c.row is not None and c.printed.method == "snapkv"}
    assert ours["prune_time"].value == 0.1 and ours["prune_time"].ratio is None
    assert ours["overall_time"].ratio == 0.5


def test_a_stand_in_divides_what_is_declared_and_rounds_up():
    scale = bench_spec.Scale(lengths=8, rows=5, without=["schedule=paper"])
    assert scale.scale_workload("3712+384x12") == "464+48x3"
    assert scale.scale_workload("100+8x1") == "13+2x1"
    assert scale.scale_workload("160+338xmax") == "20+43xmax"
    assert scale.scale_arguments("a+b schedule=paper kv_size=384 window=32") == "a+b kv_size=48 window=32"
    assert bench_spec.Scale().describe() == "as in the paper"


@pytest.mark.parametrize(("paper", "table"), bench_spec.table_ids())
def test_a_stand_in_measures_every_row_at_a_size_of_its_own(paper, table):
    declared = bench_spec.load(paper, table)
    small = declared.scale_for("tiny")
    printed = [c for c in published.load_table(paper, table) if c.dataset != "avg" and not declared.why_not(c)]
    wanted = {small.find_row_key(c) for c in printed}
    assert None not in wanted
    # two of the paper's workloads never fall together
    assert len(wanted) == len({declared.find_row_key(c) for c in printed})
    arguments = dict(a.split("=", 1) for a in small.list_arguments(sorted({w for w, _ in wanted})))
    rest = [f"{k}={v}" for k, v in arguments.items() if k not in OWN]
    cfg = config.read([*rest, "weights=random"])
    assert {m for _, m in wanted} <= {"full", *(c.label for c in cfg.chains), *arguments["peers"].split(",")}
    assert max(workload.parse_workload(w).prompt for w, _ in wanted) <= 2048
    # as on a GPU, by the same arguments
    options = dict(a.split("=", 1) for a in declared.list_arguments([]))
    assert options["model"] == declared.model and options["method"] == arguments["method"]


@pytest.fixture(scope="module")
def dry():
    done = subprocess.run([SCRIPT, "--dry-run"], capture_output=True, text=True, env=environment(), check=True)
    return done.stdout


def parts(output):
    """The arguments of ``bench time`` by file of results, as the script prints them."""
    collected = {}
    for name, arguments in re.findall(r"^== (\S+), .*?: bench time (.*)$", output, re.M):
        collected.setdefault(name, []).append(arguments)
    return collected


def environment(**more):
    return {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), **more}


def test_the_script_keeps_to_its_time_and_names_what_is_not_run(dry):
    minutes = [int(line.split("about ")[1].split()[0]) for line in dry.splitlines() if line.startswith("== ")]
    assert max(minutes) <= 8 and sum(minutes) <= 40
    assert "qhitter/2: not run: opt-30b" in dry and "refreekv/3: not run: llama-3-70b-instruct" in dry


def test_the_script_measures_what_the_targets_are_about(dry):
    """Decoding of what compresses the prompt alone: 16k tokens, one row and eight, with and without a recorded step."""
    options = [dict(a.split("=", 1) for a in arguments.split()) for arguments in parts(dry)["targets"]]
    for arguments in options:
        sizes = [workload.parse_workload(w) for w in split_list(arguments["workloads"])]
        assert {s.batch for s in sizes} == {1, 8} and min(s.prompt for s in sizes) >= 16384
    assert {a.get("step", "plain") for a in options} == {"plain", "plain,graph"}


def test_a_reason_may_be_about_some_settings_alone():
    collected = row_matching.match_cells(bench_spec.load("qhitter", "2"), published.load_table("qhitter", "2"), [])
    offloaded = [c for c in collected.itertuples() if c.printed.method == "accelerate" and c.printed.model != "opt-30b"]
    status = {c.printed.settings["gen"]: c.status for c in offloaded}
    assert status == {"32": "missing", "512": "not run", "1024": "not run"}


@pytest.mark.parametrize(("paper", "table"), bench_spec.table_ids())
def test_every_declared_row_is_measured_by_a_part(paper, table, dry):
    declared, built = bench_spec.load(paper, table), set()
    for arguments in parts(dry)[declared.results]:
        options = dict(a.split("=", 1) for a in arguments.split())
        rest = [f"{k}={v}" for k, v in options.items() if k not in OWN]
        cfg = config.read([*rest, "weights=random"])
        assert cfg.model.name == declared.model and cfg.model.architecture
        methods = ["full", *(c.label for c in cfg.chains), *options["peers"].split(",")]
        built |= {(w, m) for w in split_list(options["workloads"]) for m in methods}
    printed = [c for c in published.load_table(paper, table) if c.dataset != "avg" and not declared.why_not(c)]
    # the script measures single-GPU settings in the order of their value, and not all of a table's batches
    wanted = {at for c in printed if (at := declared.find_row_key(c)) is not None}
    assert {m for _, m in wanted} <= {m for _, m in built}, "a method that no part measures"
    assert wanted & built and len(wanted & built) >= 0.7 * len(wanted)
    assert {c.metric for c in printed} <= set(declared.quantities)


def test_a_table_that_is_not_declared():
    with pytest.raises(UsageError, match=r"think/bench2\.yaml is missing\. Beside paper\.yaml"):
        bench_spec.load("think", "2")


def test_the_script_runs_and_what_it_measured_is_not_measured_again(tmp_path, capsys, monkeypatch):
    """The script starts a program that notes its arguments; this process, which has torch already, measures."""
    noted = tmp_path / "noted"
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\necho "$@" >> {noted}\n')
    program.chmod(0o755)
    small = environment(KVBENCH_GPU_TABLES_SMALL="1", FOLDER=str(tmp_path), PYTHON=str(program))
    done = subprocess.run([SCRIPT, "check"], capture_output=True, text=True, env=small, timeout=250)
    (arguments,) = parts(done.stdout)["check"]
    measure, unmeasured = noted.read_text().splitlines()
    words = [*arguments.split(), f"folder={tmp_path}", "name=check"]
    assert done.returncode == 0 and measure.split() == ["-m", "kvbench", "bench", "time", *words], done.stderr
    assert unmeasured == "-m kvbench.papers.timed.bench_spec"
    assert main(["bench", "time", *words]) == 0
    printed = capsys.readouterr().out
    rows = records.read_rows(tmp_path / "check.jsonl")
    assert "TTFT" in printed and [(r["method"], r["status"], r["marks"]) for r in rows] == [
        (name, "measured", ["integrated"]) for name in ("full", "kivi bits=4")
    ]
    monkeypatch.setattr(architecture, "build_model", None)
    assert main(["bench", "time", *words]) == 0
    assert records.read_rows(tmp_path / "check.jsonl") == rows and capsys.readouterr().out == printed


def test_a_part_that_fails_is_the_scripts_failure(tmp_path):
    failing = environment(KVBENCH_GPU_TABLES_SMALL="1", FOLDER=str(tmp_path), PYTHON="false")
    assert subprocess.run([SCRIPT, "check"], capture_output=True, env=failing, timeout=60, check=False).returncode == 1
