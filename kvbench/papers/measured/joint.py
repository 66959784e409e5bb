"""Several tables as one run, so that each prompt is read once for all rows of all tables."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

from kvbench.plan.cells import Group
from kvbench.plan.run_plan import RunPlan


def join_runs(runs: Iterable[RunPlan]) -> list[RunPlan]:
    """Merge runs that read and answer alike into one run with the cells of all.

    Runs of one model can differ in prompt policy or sampling, as tables of two papers do.
    """
    runs_by_policy: dict[str, list[RunPlan]] = {}
    for run in runs:
        cfg = run.cfg
        # a model's record holds mappings and cannot be part of a key, but its text can
        policy = json.dumps([repr(cfg.model), repr(cfg.prompt), repr(cfg.sampling), run.dtype, str(run.store.root)])
        runs_by_policy.setdefault(policy, []).append(run)
    merged = []
    for runs_alike in runs_by_policy.values():
        first_run = runs_alike[0]
        groups: list[Group] = []
        for run in runs_alike:
            groups.extend(run.groups)
        # nothing else differs between the runs: their datasets and chains are in the groups
        merged.append(replace(first_run, groups=_merge_groups(groups)))
    return merged


def _merge_groups(groups: Iterable[Group]) -> tuple[Group, ...]:
    groups_by_task: dict[str, list[Group]] = {}
    for group in groups:
        # without its chain, a cell's identity describes task, prompts and sampling, in which a group's cells agree
        first_cell = group.cells[0]
        identity = {key: value for key, value in first_cell.identity.items() if key != "chain"}
        task = json.dumps(identity, sort_keys=True, default=str)
        groups_by_task.setdefault(task, []).append(group)
    merged = []
    for groups_alike in groups_by_task.values():
        largest = max(groups_alike, key=lambda group: len(group.examples))
        cell_by_id = {}
        for group in groups_alike:
            cell_by_id.update({cell.id: cell for cell in group.cells})
        merged.append(replace(largest, cells=tuple(cell_by_id.values())))
    return tuple(merged)
