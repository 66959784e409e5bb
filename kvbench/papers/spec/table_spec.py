"""The declaration of a paper's table: its measurement and its layout.

Its title and kind stand in kvbench/papers/data/<paper>/paper.yaml, its printed cells in published/table<N>.csv. Values
that differ from the defaults below stand in tables.yaml for all of the paper's tables, and in table<N>.yaml for one.
Both files are optional.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from typing import Any, NamedTuple

import yaml

from kvbench.base.conf import YAML_LOADER
from kvbench.base.errors import KvbenchError, unknown
from kvbench.papers import data_files
from kvbench.papers.spec import catalogue, published
from kvbench.papers.spec.published import Published
from kvbench.tasks.longbench import TASKS

RUN_KINDS = ("quality", "ablation", "analysis")
"""Tables whose cells, where they are scores of a method on a dataset, ``run`` measures."""

FACTS = "dataset-facts"
"""The kind of a table in which each row is a dataset and each column a fact about it."""
SCORES = ("accuracy", "f1", "rouge_l", "edit_sim", "bleu", "perplexity", "mean")
"""The published metrics that make a cell a score."""
RATIO = "ratio_to_full"
"""The printed metric of scores in per cent of the full cache's."""
MEANS = {"avg"}
"""The names of columns that average their row."""
SCORE, BUDGET = "score", "budget"
"""The quantities of a Column that ``run`` measures: the score on a dataset, and the share of tokens kept."""
MEAN, RELATIVE, SHARE = "mean", "relative", "share"
"""The ways in which a paper averages (see ``TableSpec.average``)."""

DatasetKnob = str | int | float | bool | list[int]
"""The value of a dataset's knob in tables.yaml. A list has the lengths or depths that the dataset's prompts take."""


@dataclass(frozen=True)
class Column:
    """A column of a paper's table.

    dataset: the published dataset; '' in a table of facts about datasets.
    quantity: the printed quantity: SCORE, BUDGET or another metric.
    group: the task group of a LongBench dataset, '' for others.
    """

    dataset: str
    quantity: str
    group: str = ""

    @property
    def name(self) -> str:
        """The column's name, as users type it: the dataset, and behind it any quantity other than its score."""
        # some cells have their quantity's name in the dataset's place, too, such as kv_memory: write it once
        if self.quantity in (SCORE, self.dataset):
            return self.dataset
        # in a table of facts, rows name the datasets and columns do not: leave out the slash
        return f"{self.dataset}/{self.quantity}".lstrip("/")


@dataclass(frozen=True)
class TableRow:
    """A row of a paper's table, with its printed cells by the name of their column."""

    model: str
    method: str
    setting: str
    cells: Mapping[str, Published]

    @property
    def name(self) -> str:
        """The row's name, as users type it and as it is printed: the method with its setting."""
        return f"{self.method} {self.setting}".strip()


@dataclass(frozen=True)
class TableSpec:
    """A table of a paper as declared.

    title: the description of its content.
    kind: one of catalogue.KINDS.
    preset: the entry of conf/preset with the paper's settings.
    length: the tokens of the prompts. The tiny model scales numbers of tokens by it.
    blocks: keys of a row's setting (or ``model``) whose values head blocks of rows.
    full: the paper's tables to take a full-cache row from, if this table has no such row.
    arguments: arguments of ``run``, by published method, that the rows of the table do not print.
    average: how the paper averages: the mean, the mean share of the full cache (share), or its distance from 100
    (relative).
    entries: the entry of conf/model by published model, if the names differ.
    stand_in: arguments that only the tiny stand-in needs, by method.
    sources: the sources of settings that are not printed.
    workloads: the paper's knobs of a dataset (``needle``), or of a dataset in one model's rows
    (``needle/mistral-7b-instruct-v0.2``).
    settings: further settings of all rows (``key=value;key=value``), by the dataset for which they hold. A row's own
    settings override them.
    tasks: the task of the tiny suite that stands for a dataset.
    unlike: conditions of its scores that the paper leaves open.
    extended: whether its scores seem to come from LongBench-E.
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
    workloads: Mapping[str, Mapping[str, DatasetKnob]] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    tasks: Mapping[str, str] = field(default_factory=dict)
    unlike: str = ""
    extended: bool = False

    @property
    def id(self) -> str:
        """The address of the table, such as ``think/2``."""
        return f"{self.paper}/{self.table}"

    @cached_property
    def printed(self) -> tuple[Published, ...]:
        """The table's published cells, in the order of their file."""
        return published.load_table(self.paper, self.table)

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """The columns in the paper's order. Averages of scores are left out, since kvbench computes them."""
        # kvbench averages its own scores, and compares the result with the printed average
        computed = MEANS if self.kind in RUN_KINDS else ()
        columns = []
        for cell in self.printed:
            if cell.dataset not in computed:
                _, column = _place_cell(self.kind, cell)
                columns.append(column)
        return tuple(dict.fromkeys(columns))

    @cached_property
    def rows(self) -> tuple[TableRow, ...]:
        """The rows in the paper's order."""
        # a file may have the cells of a row apart, so rows stand in the order of their first cells
        cells_by_row: dict[tuple[str, str, str], dict[str, Published]] = {}
        for cell in self.printed:
            row, column = _place_cell(self.kind, cell)
            cells_by_row.setdefault(row, {})[column.name] = cell
        rows = []
        for (model, method, setting), cells in cells_by_row.items():
            rows.append(TableRow(model, method, setting, cells=cells))
        return tuple(rows)

    @property
    def scores(self) -> tuple[Column, ...]:
        """The columns that are scores of datasets."""
        return tuple(column for column in self.columns if column.quantity == SCORE)

    @property
    def measurable(self) -> bool:
        """True if the cells are scores that ``run`` measures."""
        return self.kind in RUN_KINDS and bool(self.scores)

    def model_entry(self, model: str) -> str:
        """Return the name of the entry in conf/model for a published model."""
        return self.entries.get(model, published.model_id(model))

    def models(self) -> tuple[str, ...]:
        """Return the models of the rows, in their order."""
        return tuple(dict.fromkeys(row.model for row in self.rows))

    def full_row(self, model: str) -> TableRow | None:
        """Return the full-cache row of ``model`` in this table, or else in the first table of ``full`` that has one.

        Return None if no table has one.
        """
        # a table of ablations often leaves out the full cache, but another table has it
        for rows in [self.rows, *(load(self.paper, table).rows for table in self.full)]:
            for row in rows:
                if row.model == model and row.method == "full":
                    return row
        return None


@dataclass(frozen=True)
class UnprintedTable(TableSpec):
    """A table without printed values, which is measured like a paper's table.

    A claim needs such a table for its rows, and the tiny model for its own tasks as columns.
    """

    cells: tuple[Published, ...] = ()

    @cached_property
    def printed(self) -> tuple[Published, ...]:
        """The table's cells. They decide its rows and columns as printed cells would, but have no values."""
        return self.cells


class UnprintedCell(NamedTuple):
    """A cell to measure for which the paper prints no value. Its fields have the meaning of those of Published."""

    method: str
    setting: str
    dataset: str
    metric: str
    model: str = ""


def table_of_cells(base: TableSpec, cells: Iterable[UnprintedCell], **replaced_fields: Any) -> UnprintedTable:
    """Return a table like ``base`` whose cells are measured, although the paper prints no values for them.

    cells: the cells of the table. They decide its rows and columns.
    replaced_fields: fields of the table that replace those of ``base``.
    """
    blank = {"paper": base.paper, "table": base.table, "value": None, "unit": "", "flag": "", "printed": "", "row": 0}
    published_cells = [Published(**blank, **cell._asdict()) for cell in cells]  # type: ignore[arg-type]
    # dataclasses.replace keeps the class of base, but this table needs another
    values = {f.name: getattr(base, f.name) for f in fields(base)}
    values |= replaced_fields
    values["cells"] = tuple(published_cells)
    return UnprintedTable(**values)


def _place_cell(kind: str, cell: Published) -> tuple[tuple[str, str, str], Column]:
    if kind == FACTS:
        return ("", cell.dataset, ""), Column(dataset="", quantity=cell.metric)
    # a dataset has one column of scores, even if its rows have different metrics
    is_score = cell.metric in SCORES or cell.metric == RATIO
    quantity = SCORE if is_score else cell.metric
    return (cell.model, cell.method, cell.setting), Column(cell.dataset, quantity, group_of(cell.dataset))


@cache
def load(paper: str, table: str) -> TableSpec:
    """Read one table's declaration. Raises UsageError for a missing one, KvbenchError for a damaged file."""
    if (paper, table) not in table_ids():
        # figures and prose are in the catalogue, but no command measures them as tables
        hint = ""
        if any(entry.id == table for entry in catalogue.read_paper(paper).entries):
            hint = "It is no table that is measured: kvbench plot list has the figures."
        names = ["/".join(table_id) for table_id in table_ids()]
        raise unknown("table", f"{paper}/{table}", names, hint, listed_by="kvbench list tables")
    declared = _read_declaration(paper, table)
    about = catalogue.read_paper(paper)
    try:
        # the catalogue has one entry of this id: unpacking another number of entries raises ValueError
        (entry,) = (entry for entry in about.entries if entry.id == table)
        # paper.yaml states these three, unless the table's declaration does
        values = {"title": entry.title, "kind": entry.kind, "preset": about.preset} | declared
        return TableSpec(paper, table, **values)
    # TypeError: an unknown or a missing key
    except (TypeError, ValueError) as error:
        raise KvbenchError(f"{paper}/{table}: {error}") from None


def _read_declaration(paper: str, table: str) -> dict[str, Any]:
    """Return the fields of TableSpec that tables.yaml and table<N>.yaml state for a table; {} without these files."""
    declared: dict[str, Any] = {}
    # a key of table<N>.yaml replaces the same key of tables.yaml, which holds for all of the paper's tables
    for path in data_files(f"{paper}/tables.yaml") + data_files(f"{paper}/table{table}.yaml"):
        try:
            declared |= yaml.load(path.read_text(encoding="utf-8"), Loader=YAML_LOADER)
        except (TypeError, ValueError, yaml.YAMLError) as error:
            raise KvbenchError(f"{path}: {error}") from None
    for key in ("blocks", "full", "sources"):
        if key in declared:
            # YAML has table names as numbers; here they are texts
            declared[key] = tuple(map(str, declared[key]))
    return declared


def table_ids() -> tuple[tuple[str, str], ...]:
    """Return (paper, table) of every table with a number, in the papers' order."""
    order = catalogue.papers_in_order()
    # fig6 and text hold cells that are only audited
    numbered = [(paper, table) for paper, table in published.table_ids() if table.isdigit()]
    # table 10 comes behind table 9
    return tuple(sorted(numbered, key=lambda name: (order.index(name[0]), int(name[1]))))


def find_tables(wanted: str) -> tuple[TableSpec, ...]:
    """Return the tables that a user names: one (``think/2``), all of a paper (``think``), or ``all``.

    Raises UsageError, which names the existing tables, for any other name.
    """
    name, _, table = wanted.partition("/")
    if wanted != "all" and name not in catalogue.paper_ids():
        raise unknown("paper", name, (*catalogue.papers_in_order(), "all"))
    if table:
        # think/table2 is think/2
        return (load(name, table.removeprefix("table")),)
    return tuple(load(paper, number) for paper, number in table_ids() if wanted in ("all", paper))


def group_of(dataset: str) -> str:
    """Return the task group of a LongBench dataset, or '' for any other dataset."""
    if dataset not in TASKS:
        return ""
    return TASKS[dataset].category
