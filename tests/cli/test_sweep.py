"""Shards through Hydra launchers. Ray's and submitit's run where they are installed; the rest runs everywhere."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from support import processes
from support.runs import metrics_of, prepare

from kvbench.base import extras
from kvbench.base.errors import KvbenchError, UsageError
from kvbench.cli import launchers, sweep
from kvbench.cli.main import main
from kvbench.plan import words
from kvbench.run import experiment

pytestmark = pytest.mark.e2e("starts processes")

ARGUMENTS = ["dataset=tiny/needle,tiny/code", "length=160", "examples=6", "method=snapkv,snapkv+think"]
INSTALLED = {name: not package or extras.installed(package) for name, package in launchers.LAUNCHERS.items()}
OPTIONS = {"basic": [], "ray": ["hydra.launcher.ray.init.num_cpus=2"], "submitit_local": []}


def alone(folder):
    experiment.measure(prepare(*ARGUMENTS, f"results={folder}"), quiet=True)
    return metrics_of(folder)


def command(launcher, folder, *more):
    options = [f"hydra/launcher={launcher}", *OPTIONS[launcher], f"results={folder}", *more]
    return [sys.executable, "-m", "kvbench", "run", "-m", "shards=2", *options, *ARGUMENTS, "--json"]


@pytest.mark.parametrize("launcher", [n for n in OPTIONS if INSTALLED[n]])
def test_two_shards_give_the_metrics_of_one_process(launcher, tmp_path):
    line = command(launcher, tmp_path / "two")
    if launcher == "basic":
        done = processes.run(*line[3:])
    else:
        done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {(c["n"], c["of"]) for r in report["rows"] for c in r["cells"]} == {(6, 6)}
    assert metrics_of(tmp_path / "two") == alone(tmp_path / "one")
    files = {p.name for p in (tmp_path / "two").glob("cells/*/samples-*.jsonl")}
    assert files == {"samples-0.jsonl", "samples-1.jsonl"}


@pytest.mark.parametrize("launcher", [n for n in ("ray", "submitit_local") if INSTALLED[n]])
def test_a_killed_worker_costs_its_unfinished_examples_only(launcher, tmp_path):
    line = command(launcher, tmp_path / "two", "batch_rows=3")
    running = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    worker = _holder(tmp_path / "two", running)
    os.kill(worker, signal.SIGKILL)
    before = {p: p.read_bytes() for p in (tmp_path / "two").glob("cells/*/samples-1.jsonl")}
    running.wait(timeout=250)
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert metrics_of(tmp_path / "two") == alone(tmp_path / "one")
    assert sum(map(len, before.values())) > 0
    assert all(path.read_bytes().startswith(old[: old.rfind(b"\n") + 1]) for path, old in before.items())


def _holder(folder, running):
    """The process that writes shard 1, once it has stored something."""
    while running.poll() is None:
        if any(p.stat().st_size for p in folder.glob("cells/*/samples-1.jsonl")):
            for pid in filter(str.isdigit, os.listdir("/proc")):
                try:
                    stored = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
                except OSError:
                    continue
                if any(h.startswith(str(folder)) and h.endswith("samples-1.jsonl") for h in stored):
                    return int(pid)
        time.sleep(0.02)
    raise AssertionError("the sweep ended before its worker could be killed")


def test_a_shard_that_fails_says_how_to_go_on_and_the_rest_follows(tmp_path, monkeypatch):
    (request,) = words.read([*ARGUMENTS, f"results={tmp_path}", "shards=2"], multirun=True)
    complete = prepare(*ARGUMENTS, f"results={tmp_path}")
    original = experiment.measure

    def measure(prepared, *args, **options):
        if prepared.cfg.shard == 1:
            raise RuntimeError("worker died")
        return original(prepared, *args, **options)

    monkeypatch.setattr(experiment, "measure", measure)
    with pytest.raises(KvbenchError, match=r"RuntimeError: worker died.*Run the same command again") as caught:
        sweep.run_shards(request, complete)
    assert not isinstance(caught.value, UsageError)
    monkeypatch.setattr(experiment, "measure", original)
    done = sum(g.answers_done for g in complete.todo())
    assert 0 < done < 36
    sweep.run_shards(request, complete)
    report = experiment.settle(complete)
    assert {(c.summary.n, c.summary.of) for c in report.cells} == {(6, 6)}


def test_metrics_are_of_all_shards_whichever_wrote_them_last(tmp_path):
    for shard in range(2):
        experiment.measure(prepare(*ARGUMENTS, f"results={tmp_path}", shard=shard, shards=2), quiet=True)
    complete = prepare(*ARGUMENTS, f"results={tmp_path}")
    for path in tmp_path.glob("cells/*/metrics.json"):
        path.write_text('{"status": "partial", "timing": {}}')
    experiment.settle(complete)
    assert {(m["n"], m["status"]) for m in metrics_of(tmp_path).values()} == {(6, "complete")}


@pytest.mark.parametrize(
    ("launcher", "says"),
    [
        ("ray", "pip install -e '.[ray]'"),
        ("submitit_slurm", "pip install -e '.[slurm]'"),
        ("submitit_local", "pip install -e '.[slurm]'"),
        ("rai", "Did you mean ray"),
    ],
)
def test_a_launcher_that_is_not_there_is_one_message_with_the_extra(launcher, says, monkeypatch, capsys):
    monkeypatch.setattr(extras, "installed", lambda package: False)
    assert main(["run", "-m", "shards=2", f"hydra/launcher={launcher}"]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


def test_an_option_that_the_launcher_does_not_take_is_a_usage_error(tmp_path, capsys):
    line = ["run", "-m", "shards=2", "hydra.launcher.bogus=1", *ARGUMENTS, f"results={tmp_path}"]
    assert main(line) == 2
    err = capsys.readouterr().err
    assert "the launcher cannot be set up" in err and "bogus" in err and err.count("\n") == 1


@pytest.mark.parametrize("line", ["shard=0,2", "shard=0,1 shards=3", "shards=0", "shards=x"])
def test_shards_that_leave_examples_out_are_refused(line):
    with pytest.raises(UsageError, match="is not possible"):
        words.read(line.split(), multirun=True)


def test_workers_with_gpus_need_a_named_dtype_where_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep.torch.cuda, "is_available", lambda: False)
    options = ["shards=2", "hydra/launcher=ray", "hydra.launcher.ray.remote.num_gpus=1", f"results={tmp_path}"]
    (request,) = words.read([*ARGUMENTS, *options], multirun=True)
    with pytest.raises(UsageError, match="dtype=bfloat16"):
        sweep.run_shards(request, prepare(*ARGUMENTS, f"results={tmp_path}"))
