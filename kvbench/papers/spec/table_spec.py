"""The declaration of a paper's table: its measurement and its layout.

What it shows and of which kind it is stands in kvbench/papers/data/<paper>/paper.yaml, and its printed cells in
published/table<N>.csv. What differs from the defaults below stands in tables.yaml for all of the paper's tables and in
table<N>.yaml for one; either need not be there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from typing import Any

import yaml

from kvbench.base.errors import KvbenchError, unknown
from kvbench.papers import files
from kvbench.papers.spec import catalogue, published
from kvbench.papers.spec.published import Published
from kvbench.tasks.longbench import TASKS

RUN_KINDS = ("quality", "ablation", "analysis")
"""Tables whose cells, where they are scores of a method on a dataset, ``run`` measures."""

FACTS = "dataset-facts"
SCORES = ("accuracy", "f1", "rouge_l", "edit_sim", "bleu", "perplexity", "mean")
RATIO = "ratio_to_full"
"""The printed metric of scores in per cent of the full cache's."""
MEANS = {"avg"}
SCORE, BUDGET = "score", "budget"
MEAN, RELATIVE, SHARE = "mean", "relative", "share"


@dataclass(frozen=True)
class Column:
    """A column of a paper's table: a dataset, the quantity printed (its score, or another) and its group."""

    dataset: str
    what: str
    group: str = ""

    @property
    def name(self) -> str:
        """Return the name in addresses: the dataset, followed by its quantity unless that is its score."""
        return self.dataset if self.what in (SCORE, self.dataset) else f"{self.dataset}/{self.what}".lstrip("/")


@dataclass(frozen=True)
class TableRow:
    """A row of a paper's table, with its printed cells by the name of their column."""

    model: str
    method: str
    setting: str
    cells: Mapping[str, Published]

    @property
    def name(self) -> str:
        """Return the name in addresses and print: the method with its setting."""
        return f"{self.method} {self.setting}".strip()


@dataclass(frozen=True)
class TableSpec:
    """A table of a paper as declared.

    title: its content. kind: as in paper.yaml. length: tokens of the prompts, by which the tiny model scales numbers
    of tokens. blocks: keys of a row's setting (or ``model``) whose values head blocks of rows. full: the paper's tables
    that have a full-cache row where this one has none. arguments: of ``run`` by published method, for what the paper's
    rows leave unsaid. average: how the paper averages, the mean, the mean share of the full cache (share), or how far
    that is from 100 (relative). entries: conf/model by published model, where the names differ. stand_in: arguments
    that the tiny stand-in alone needs, by method. sources: where what is not printed comes from. workloads: the paper's
    knobs of a dataset (``needle``), or of it in one model's rows (``needle/mistral-7b-instruct-v0.2``). settings: by
    dataset, settings that its rows have beside their own. tasks: the task of the tiny suite that stands for a
    dataset. unlike: conditions of its scores that the paper leaves open. extended: they seem to be of LongBench-E.
    """

    paper: str
    table: str
    title: str
    kind: str
    preset: str = ""
    length: int = 1024
    blocks: tuple[str, ...] = ("model",)
    full: tuple[str, ...] = ()
    arguments: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    average: str = MEAN
    entries: Mapping[str, str] = field(default_factory=dict)
    stand_in: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    workloads: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    tasks: Mapping[str, str] = field(default_factory=dict)
    unlike: str = ""
    extended: bool = False

    @property
    def id(self) -> str:
        """Return the address, as in ``think/2``."""
        return f"{self.paper}/{self.table}"

    @cached_property
    def printed(self) -> tuple[Published, ...]:
        """Return the cells as printed."""
        return published.load_table(self.paper, self.table)

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """Return the columns in the paper's order, without averages of scores, which are computed."""
        computed = MEANS if self.kind in RUN_KINDS else ()
        return tuple(dict.fromkeys(_place(self.kind, c)[1] for c in self.printed if c.dataset not in computed))

    @cached_property
    def rows(self) -> tuple[TableRow, ...]:
        """Return the rows in the paper's order."""
        by_row: dict[tuple[str, str, str], dict[str, Published]] = {}
        for c in self.printed:
            row, column = _place(self.kind, c)
            by_row.setdefault(row, {})[column.name] = c
        return tuple(TableRow(*key, cells) for key, cells in by_row.items())

    @property
    def scores(self) -> tuple[Column, ...]:
        """Return the columns that are scores of datasets."""
        return tuple(c for c in self.columns if c.what == SCORE)

    @property
    def measurable(self) -> bool:
        """Tell whether the cells are scores that ``run`` measures."""
        return self.kind in RUN_KINDS and bool(self.scores)

    def entry(self, model: str) -> str:
        """Return the entry of conf/model for a published model."""
        return self.entries.get(model, published.model_id(model))

    def models(self) -> tuple[str, ...]:
        """Return the models of the rows, in their order."""
        return tuple(dict.fromkeys(r.model for r in self.rows))

    def full_row(self, model: str) -> TableRow | None:
        """Return the full-cache row of ``model``, here or in the tables that ``full`` names."""
        for table in (self, *(load(self.paper, t) for t in self.full)):
            rows = [r for r in table.rows if r.model == model and r.method == "full"]
            if rows:
                return rows[0]
        return None


@dataclass(frozen=True)
class Given(TableSpec):
    """Rows and columns without printed values, measured like a table: those of claims, or of a stand-in's own tasks."""

    cells: tuple[Published, ...] = ()

    @cached_property
    def printed(self) -> tuple[Published, ...]:
        """Return the cells without printed values."""
        return self.cells


def given(base: TableSpec, cells: Iterable[tuple[str, str, str, str, str]], **other: Any) -> Given:
    """Return ``base`` with other rows and columns: (model, method, setting, dataset, metric) of each cell."""
    published_cells = tuple(
        Published(base.paper, base.table, model, method, setting, dataset, metric, None, "", "", "", 0)
        for model, method, setting, dataset, metric in cells
    )
    return Given(**{**{f.name: getattr(base, f.name) for f in fields(base)}, **other, "cells": published_cells})


def _place(kind: str, cell: Published) -> tuple[tuple[str, str, str], Column]:
    """Return the row (model, method, setting) and the column of a printed cell; each dataset's facts are a row."""
    if kind == FACTS:
        return ("", cell.dataset, ""), Column("", cell.metric)
    what = SCORE if cell.metric in (*SCORES, RATIO) else cell.metric
    return (cell.model, cell.method, cell.setting), Column(cell.dataset, what, group_of(cell.dataset))


@cache
def load(paper: str, table: str) -> TableSpec:
    """Read one table's declaration; raise UsageError for a missing one, KvbenchError for a damaged file."""
    if (paper, table) not in ids():
        listed = any(e.id == table for e in catalogue.paper(paper).entries)
        hint = "It is no table that is measured: python -m kvbench plot list has the figures." if listed else ""
        raise unknown("table", f"{paper}/{table}", [f"{p}/{t}" for p, t in ids()], hint)
    raw: dict[str, Any] = {}
    for path in files(f"{paper}/tables.yaml") + files(f"{paper}/table{table}.yaml"):
        try:
            raw |= yaml.safe_load(path.read_text(encoding="utf-8"))
        except (TypeError, ValueError, yaml.YAMLError) as error:
            raise KvbenchError(f"{path}: {error}") from None
    raw |= {key: tuple(map(str, raw[key])) for key in ("blocks", "full", "sources") if key in raw}
    about = catalogue.paper(paper)
    try:
        (entry,) = (e for e in about.entries if e.id == table)
        return TableSpec(paper, table, **{"title": entry.title, "kind": entry.kind, "preset": about.preset, **raw})
    except (TypeError, ValueError) as error:
        raise KvbenchError(f"{paper}/{table}: {error}") from None


def ids() -> tuple[tuple[str, str], ...]:
    """Return (paper, table) of every table with a number, in the papers' order."""
    order = catalogue.in_place()
    return tuple(
        sorted((t for t in published.tables() if t[1].isdigit()), key=lambda t: (order.index(t[0]), int(t[1])))
    )


def find(wanted: str) -> tuple[TableSpec, ...]:
    """Return the tables of ``think/2``, ``think`` or ``all``; raise UsageError naming what there is."""
    name, _, table = wanted.partition("/")
    if wanted != "all" and name not in catalogue.papers():
        raise unknown("paper", name, (*catalogue.in_place(), "all"))
    if table:
        return (load(name, table.removeprefix("table")),)
    return tuple(load(*t) for t in ids() if wanted in ("all", t[0]))


def group_of(dataset: str) -> str:
    """Return the task group of a LongBench dataset; '' for others."""
    return TASKS[dataset].category if dataset in TASKS else ""
