"""Runs as a user starts them, for tests."""

import json
from pathlib import Path

from kvbench.cli.main import main
from kvbench.methods.snapkv import SnapKV
from kvbench.plan import config, run_plan
from kvbench.run import host as run_host

SMALL = ["dataset=tiny/needle,tiny/code", "length=160", "examples=4"]


def prepare(*overrides, **changes):
    cfg = config.read(list(overrides))
    return run_plan.prepare(type(cfg)(**{**cfg.__dict__, **changes}))


def metrics_of(results):
    """Every cell's metrics without what depends on the clock."""
    collected = {}
    for path in sorted(Path(results).glob("cells/*/metrics.json")):
        metrics = json.loads(path.read_text())
        metrics.pop("timing")
        collected[path.parent.name] = metrics
    return collected


def run_json(capsys, *arguments):
    status = main(["run", *arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def counted(monkeypatch):
    """Return the lists that grow by one with every prompt read and with every compression of SnapKV's first layer."""
    prefills, compressions = [], []
    prefill, compress = run_host.prefill_chains, SnapKV.compress
    monkeypatch.setattr(
        run_host, "prefill_chains", lambda *a, **more: prefills.append(len(a[2])) or prefill(*a, **more)
    )
    monkeypatch.setattr(
        SnapKV,
        "compress",
        lambda self, cache, obs: (compressions.append(1) if obs.layer == 0 else None) or compress(self, cache, obs),
    )
    return prefills, compressions
