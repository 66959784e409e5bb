"""Runs as a user starts them, for tests."""

import json
from pathlib import Path

from kvbench.cli.main import main
from kvbench.plan import config, run_plan

SMALL = ["dataset=tiny/needle,tiny/code", "length=256", "examples=6"]


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
