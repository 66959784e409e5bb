"""Other models in place of the papers': their sizes, and which of the tiny model's tasks stands for which dataset.

The tiny model reads short prompts of its own, so that published numbers of tokens are scaled to them. Any other reads
the papers' own data under the papers' own budgets and windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from kvbench.base.errors import KvbenchError
from kvbench.kv.model_shape import from_config
from kvbench.methods.uncomp_stage import STARTS
from kvbench.papers.spec import row_knobs
from kvbench.papers.spec.row_knobs import StandIn
from kvbench.papers.spec.table_spec import BUDGET, MEAN, MEANS, SHARE, Given, TableRow, TableSpec, given, group_of
from kvbench.tasks.longbench import CODE, FEW_SHOT, MULTI, SINGLE, SUMMARY, SYNTHETIC

MODEL = "tiny"
PROMPT = 1024
TINY = StandIn(length=PROMPT, of=PROMPT, layers=6, heads=8, dim=32)

BY_GROUP = {
    SINGLE: "needle",
    MULTI: "hop",
    SUMMARY: "listing",
    FEW_SHOT: "labels",
    SYNTHETIC: "multikey",
    CODE: "code",
}
OTHERS = {
    "needle": "needle",
    "gsm8k": "hop",
    "gpqa": "labels",
    "theoremqa": "multikey",
    "truthfulqa": "listing",
    "coqa": "needle",
    "mdqa": "needle",
    "xsum": "listing",
    "cnn_dailymail": "hop",
    "wikitext103": "listing",
    "ptb": "code",
}
SAMPLES = {method: {"samples": "32"} for method in ("uncomp-group", "uncomp-stage", "palu", "asvd")}
"""Calibration windows: the tiny model's statistics settle with fewer than the papers' models need."""


def task_of(dataset: str, table: TableSpec) -> str:
    """Return the tiny task that stands for a table's dataset, or the dataset where it is such a task."""
    if dataset in BY_GROUP.values():
        return dataset
    task = table.tasks.get(dataset) or BY_GROUP.get(group_of(dataset)) or OTHERS.get(dataset)
    if task is None:
        place = f"kvbench/papers/data/{table.paper}/tables.yaml"
        raise KvbenchError(f"no task of the tiny suite stands for {dataset}: {place} says which under tasks:")
    return task


def size(config: Any, scaled_from: int | None) -> StandIn:
    """Return the stand-in of a model's configuration; tiny has the length of prompts that it is scaled from."""
    if scaled_from is not None:
        return replace(TINY, of=scaled_from)
    shape = from_config(config)
    heads, dim = shape.query_heads, shape.head_dim
    return StandIn(1, 1, shape.layers, heads, dim, heads_of=heads, dim_of=dim)


def depths(size: StandIn) -> Mapping[str, Mapping[str, str]]:
    """Return knobs by method where a paper states them for its own models' numbers of layers only."""
    return {} if size.layers in STARTS else {"uncomp-stage": {"schedule": "relative"}}


def notes(table: TableSpec) -> Iterator[str]:
    """Yield what the tiny model's tasks and numbers of tokens stand for."""
    datasets_of: dict[str, list[str]] = {}
    for dataset in dict.fromkeys(c.dataset for c in table.scores):
        datasets_of.setdefault(task_of(dataset, table), []).append(dataset)
    pairs = (f"{task} for {', '.join(names)}" for task, names in datasets_of.items())
    yield f"Tasks of the tiny suite: {'; '.join(pairs)}."
    methods = {line.method for line in table.rows}
    for method, knobs in table.stand_in.items():
        if method in methods:
            yield f"{method} runs with {', '.join(f'{k}={v}' for k, v in knobs.items())} here."
    if table.length != PROMPT:
        yield (
            f"Numbers of tokens are the paper's times {PROMPT}/{table.length}: 512 there are "
            f"{round(512 * PROMPT / table.length)} here; windows likewise, down to {row_knobs.SHORTEST_WINDOW}."
        )


def settled(row: TableRow, stand_in: StandIn) -> str:
    """Return a row's setting in kvbench's knobs, at the stand-in's size."""
    knobs = row_knobs.knobs(row.method, row.setting, stand_in)
    return ";".join(f"{k.rpartition('.')[2]}={v}" for k, v in knobs.items() if v != "null")


def own_table(table: TableSpec, rows: Iterable[tuple[str, str]]) -> Given:
    """Return ``table`` with the tiny suite's tasks as columns, each once, and (method, setting) of ``rows``."""
    tasks = list(dict.fromkeys(task_of(c.dataset, table) for c in table.scores))
    budget_tasks = {task_of(c.dataset, table) for c in table.columns if c.what == BUDGET}
    cells = []
    for method, setting in rows:
        cells += [("", method, setting, task, "mean") for task in tasks]
        cells += [("", method, setting, task, BUDGET) for task in tasks if task in budget_tasks]
        cells += [("", method, setting, name, "mean") for name in MEANS if len(tasks) > 1]
    return given(table, cells, average=MEAN if table.average == MEAN else SHARE)
