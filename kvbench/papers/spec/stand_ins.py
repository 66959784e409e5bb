"""Substitute models for the papers' models: their sizes, and the tiny model's task for each dataset.

The tiny model reads short prompts of its own, so published numbers of tokens are scaled to them. Any other substitute
reads the papers' own data under the papers' own budgets and windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from kvbench.base.errors import KvbenchError
from kvbench.kv.model_shape import from_config
from kvbench.methods.uncomp_stage import STARTS
from kvbench.papers.spec import row_knobs
from kvbench.papers.spec.row_knobs import StandIn
from kvbench.papers.spec.table_spec import (
    BUDGET,
    MEAN,
    MEANS,
    SHARE,
    TableRow,
    TableSpec,
    UnprintedCell,
    UnprintedTable,
    group_of,
    table_of_cells,
)
from kvbench.tasks.longbench import CODE, FEW_SHOT, MULTI, SINGLE, SUMMARY, SYNTHETIC

MODEL = "tiny"
"""The tiny model's entry of conf/model. It is the substitute if the user names no model."""
PROMPT = 1024
"""Tokens of a prompt of the tiny suite."""
TINY = StandIn(length=PROMPT, paper_length=PROMPT, layers=6, heads=8, dim=32)
"""The tiny model's sizes, for a paper whose prompts are as long as the tiny model's own."""

BY_GROUP = {
    SINGLE: "needle",
    MULTI: "hop",
    SUMMARY: "listing",
    FEW_SHOT: "labels",
    SYNTHETIC: "multikey",
    CODE: "code",
}
"""The tiny model's task by the task group of a LongBench dataset. Both ask for the same kind of reading."""
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
"""The tiny model's task by dataset, for datasets that are not LongBench's. The datasets of one table have different
tasks."""
SAMPLES = {method: {"samples": "32"} for method in ("uncomp-group", "uncomp-stage", "palu", "asvd")}
"""The number of calibration windows by method. The tiny model needs fewer windows than the papers' models."""


def choose_tiny_task(dataset: str, table: TableSpec) -> str:
    """Return the tiny task that stands for a table's dataset. A dataset that is such a task stands for itself.

    Raises KvbenchError if no task stands for the dataset.
    """
    # the columns of a stand-in's own table are tasks already
    if dataset in BY_GROUP.values():
        return dataset
    # the table's own choice comes first; a dataset is LongBench's or has an entry in OTHERS
    task = table.tasks.get(dataset) or BY_GROUP.get(group_of(dataset)) or OTHERS.get(dataset)
    if task is None:
        place = f"kvbench/papers/data/{table.paper}/tables.yaml"
        raise KvbenchError(f"no task of the tiny suite stands for {dataset}: {place} says which under tasks:")
    return task


def find_stand_in_size(config: object, scaled_from: int | None) -> StandIn:
    """Return the sizes by which a paper's rows are scaled to a substitute model.

    config: the model's Hugging Face configuration.
    scaled_from: the tokens of the paper's prompts for the tiny model; None for any other substitute, which keeps the
    published numbers.
    """
    # only the tiny model's numbers are scaled, and its sizes are known
    if scaled_from is not None:
        return replace(TINY, paper_length=scaled_from)
    shape = from_config(config)
    # numbers of tokens, heads and dimensions stay: this model reads the paper's own prompts
    return StandIn(
        length=1,
        paper_length=1,
        layers=shape.layers,
        heads=shape.query_heads,
        dim=shape.head_dim,
        paper_heads=shape.query_heads,
        paper_dim=shape.head_dim,
    )


def choose_depth_knobs(size: StandIn) -> Mapping[str, Mapping[str, str]]:
    """Return knobs by method. They replace values that a paper states only for its own models' layers.

    Return {} for a model with as many layers as one of the paper's models.
    """
    # UNComp's schedule lists layers of models with 32 and 40 layers; others take the same fractions of their depth
    if size.layers in STARTS:
        return {}
    return {"uncomp-stage": {"schedule": "relative"}}


def write_notes(table: TableSpec) -> Iterator[str]:
    """Yield notes on the meaning of the tiny model's tasks and numbers of tokens."""
    # there are six tiny tasks, so several datasets of a table share one
    datasets_of: dict[str, list[str]] = {}
    for dataset in dict.fromkeys(column.dataset for column in table.scores):
        datasets_of.setdefault(choose_tiny_task(dataset, table), []).append(dataset)
    task_texts = [f"{task} for {', '.join(datasets)}" for task, datasets in datasets_of.items()]
    yield f"Tasks of the tiny suite: {'; '.join(task_texts)}."
    methods = {row.method for row in table.rows}
    for method, knobs in table.stand_in.items():
        if method in methods:
            yield f"{method} runs with {', '.join(f'{knob}={value}' for knob, value in knobs.items())} here."
    if table.length != PROMPT:
        # 512 tokens as an example, since most tables have this budget
        example = round(512 * PROMPT / table.length)
        yield (
            f"Numbers of tokens are the paper's times {PROMPT}/{table.length}: 512 there are "
            f"{example} here; windows likewise, down to {row_knobs.SHORTEST_WINDOW}."
        )


def scale_setting(row: TableRow, stand_in: StandIn) -> str:
    """Return a row's setting as text in kvbench's knobs, scaled to the stand-in, such as ``kv_size=32;ratio=0.4``."""
    knobs = row_knobs.run_arguments(row.method, row.setting, stand_in)
    parts = []
    for key, value in knobs.items():
        # a knob is set to null where another one replaces it
        if value != "null":
            # a row names its method already, so leave out ``method.<stage>.``
            knob = key.rpartition(".")[2]
            parts.append(f"{knob}={value}")
    return ";".join(parts)


def make_tiny_table(table: TableSpec, rows: Iterable[tuple[str, str]]) -> UnprintedTable:
    """Return a table for the tiny model: its own tasks, each once, are columns in place of the datasets of ``table``.

    rows: the method and setting of each row.
    """
    tasks = list(dict.fromkeys(choose_tiny_task(column.dataset, table) for column in table.scores))
    budget_tasks = {choose_tiny_task(column.dataset, table) for column in table.columns if column.quantity == BUDGET}
    cells = []
    for method, setting in rows:
        cells += [UnprintedCell(method, setting, task, "mean") for task in tasks]
        cells += [UnprintedCell(method, setting, task, BUDGET) for task in tasks if task in budget_tasks]
        # the average of one task would repeat its score
        if len(tasks) > 1:
            cells += [UnprintedCell(method, setting, average, "mean") for average in MEANS]
    # a difference from the full cache (relative) is shown as the share that it comes from
    average = MEAN if table.average == MEAN else SHARE
    return table_of_cells(table, cells, average=average)
