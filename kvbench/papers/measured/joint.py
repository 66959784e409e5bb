"""Several tables as one run, so that each prompt is read once for all rows of all of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

from kvbench.plan.cells import Group
from kvbench.run.experiment import RunPlan


def joint(runs: Iterable[RunPlan]) -> list[RunPlan]:
    """Merge runs that read and answer alike into one with the cells of all of them.

    Runs of one model can differ in prompt policy or sampling, as tables of two papers do.
    """
    by_policy: dict[str, list[RunPlan]] = {}
    for run in runs:
        cfg = run.cfg
        key = json.dumps([repr(cfg.model), repr(cfg.prompt), repr(cfg.sampling), run.dtype, str(run.store.root)])
        by_policy.setdefault(key, []).append(run)
    return [
        replace(mergeable[0], groups=_merge_groups(g for r in mergeable for g in r.groups))
        for mergeable in by_policy.values()
    ]


def _merge_groups(groups: Iterable[Group]) -> tuple[Group, ...]:
    """Return one group per task as it is asked: all cells, each once, over the examples of the largest group."""
    by_task: dict[str, list[Group]] = {}
    for group in groups:
        identity = {k: v for k, v in group.cells[0].identity.items() if k != "chain"}
        by_task.setdefault(json.dumps(identity, sort_keys=True, default=str), []).append(group)
    return tuple(
        replace(
            max(same_task, key=lambda g: len(g.examples)),
            cells=tuple({c.id: c for g in same_task for c in g.cells}.values()),
        )
        for same_task in by_task.values()
    )
