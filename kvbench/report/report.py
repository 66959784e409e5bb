"""The report of a run as records: cells by method and task, and the table of means behind what is printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from kvbench.base.extras import require
from kvbench.plan.equal_memory import Matched
from kvbench.report import render
from kvbench.store.results import CellSummary

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure as Canvas


@dataclass(frozen=True)
class Delta:
    """The mean paired difference to the full cache in printed units, with its 95 % interval."""

    mean: float
    ci: tuple[float, float] | None


@dataclass(frozen=True)
class CellResult:
    """One cell of a report: a summary, or the reason why there is none.

    status: measured, missing, refused or failed.
    settings: the settings that ``labels.fields`` returns.
    floor: whether a full cache's scores say nothing; None for other cells.
    fall_beside_full: the fall from a context's first question to its last minus the full cache's.
    unchanged: whether nothing was compressed: tokens, bytes and answers are the full cache's.
    damaged: whether it counts as failed since its files cannot be read.
    """

    task: str
    cell: str
    status: str
    evicts: bool = False
    settings: Mapping[str, object] = field(default_factory=dict)
    reason: str | None = None
    floor: bool | None = None
    summary: CellSummary | None = None
    delta: Delta | None = None
    fall_beside_full: Delta | None = None
    unchanged: bool = False
    damaged: bool = False

    def record(self) -> dict[str, object]:
        """Return the cell as ``--json`` prints it."""
        return {
            **{"task": self.task, "cell": self.cell, "evicts": self.evicts, **self.settings},
            **({} if self.floor is None else {"floor": self.floor}),
            "status": self.status,
            **({"reason": self.reason} if self.status in ("refused", "failed") else {}),
            **({} if self.summary is None else self.summary.record()),
            **({} if self.delta is None else {"delta": self.delta.mean, "delta_ci": self.delta.ci}),
            **({} if self.fall_beside_full is None else {"fall_beside_full": asdict(self.fall_beside_full)}),
            **({"nothing_compressed": True} if self.unchanged else {}),
        }


@dataclass(frozen=True)
class RowMeans:
    """Means of one method over all its measured cells: tokens, bytes and milliseconds are weighted by prompts.

    score_mean: the mean of the cells' scores in printed units, with its 95 % interval, ``score_ci``.
    delta: its paired difference to the full cache, over the examples that both answered; None for the full cache.
    """

    score_mean: float | None
    score_ci: tuple[float, float] | None
    delta: Delta | None
    kept_percent: float
    nominal_percent: float | None
    attended_percent: float | None
    payload: float
    overhead: float
    payload_kv_head: float | None
    payload_query_head: float | None
    percent_of_full: float
    payload_percent_of_full: float
    prefill_ms: float
    compress_ms: float
    decode_ms_per_token: float


@dataclass(frozen=True)
class ReportRow:
    """One method of a report; ``means`` is None if none of its cells is measured."""

    method: str
    evicts: bool
    cells: tuple[CellResult, ...]
    means: RowMeans | None

    def record(self) -> dict[str, object]:
        """Return the row as ``--json`` prints it."""
        row = {"method": self.method, "evicts": self.evicts, "cells": [cell.record() for cell in self.cells]}
        if self.means is None:
            return row
        delta = self.means.delta
        means = {**asdict(self.means), "delta": delta and delta.mean, "delta_ci": delta and delta.ci}
        return row | means


@dataclass(frozen=True)
class ReportColumn:
    """One task of a report. ``floor`` is True if the full cache's own scores on it say nothing."""

    task: str
    metric: str
    category: str
    floor: bool


@dataclass(frozen=True)
class Report:
    """The content of a run's table: cells by method and task, notes for the reader, the results folder.

    apart: the rows that were measured by another run or part than the first.
    """

    model: str
    settings: str
    columns: tuple[ReportColumn, ...]
    rows: tuple[ReportRow, ...]
    notes: tuple[str, ...]
    results: str
    matched: tuple[Matched, ...] = ()
    apart: tuple[str, ...] = ()

    @property
    def cells(self) -> list[CellResult]:
        """Return the cells of all rows."""
        return [cell for row in self.rows for cell in row.cells]

    def to_markdown(self) -> str:
        """Return the tables of scores and storage with their notes as Markdown."""
        return render.render(self, "md")

    def to_pandas(self) -> pd.DataFrame:
        """Return a row per method and task, with the columns of ``--format csv``."""
        require("pandas", "to_pandas")
        import pandas as pd

        return pd.DataFrame(render.records(self), columns=list(render.CSV_FIELDS))

    def plot(self) -> Canvas:
        """Return a figure with a panel a task: scores with intervals against bytes in per cent of the full cache."""
        require("matplotlib", "plot")
        from kvbench.report import scatter

        return scatter.draw(self)

    def _repr_markdown_(self) -> str:
        return self.to_markdown()

    def record(self) -> dict[str, object]:
        """Return the report as ``--json`` prints it."""
        return {
            "model": self.model,
            "settings": self.settings,
            **({"matched": [asdict(m) for m in self.matched]} if self.matched else {}),
            "columns": [asdict(column) for column in self.columns],
            "rows": [row.record() for row in self.rows],
            "notes": list(self.notes),
            "results": self.results,
        }
