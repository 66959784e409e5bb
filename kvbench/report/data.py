"""The records of a report: cells by method and task, means by method, and notes for readers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from kvbench.kv.pages import PagesFreed
from kvbench.store.results import CellSummary
from kvbench.tasks.metrics import metric

if TYPE_CHECKING:
    from kvbench.plan.equal_memory import Matched


@dataclass(frozen=True)
class Delta:
    """The mean paired difference to the full cache in printed units.

    mean: the method's score minus the full cache's, mean over examples.
    ci: the 95 % interval of ``mean``; None if there are too few examples for an interval.
    """

    mean: float
    ci: tuple[float, float] | None

    @property
    def is_sure(self) -> bool:
        """True if the interval lies wholly above or below 0."""
        if self.ci is None:
            return False
        low, high = self.ci
        return not low <= 0 <= high


@dataclass(frozen=True)
class CellResult:
    """One cell of a report: a summary, or the reason why there is no summary.

    task: the name of the column.
    cell: the cell's id; '' for a method that could not be planned.
    status: measured, missing, refused or failed.
    evicts: whether the method also drops tokens while it answers.
    settings: the settings that ``labels.list_settings`` returns.
    reason: the reason why a cell is refused or failed; None for any other.
    floor: for a cell of the full cache, whether the model fails on the task; None for any other cell.
    summary: the means over the samples; None if the cell is not measured.
    delta: the mean paired difference to the full cache; None without pairs, and for the full cache.
    fall_beside_full: for contexts with several questions, the score of the last question minus that of the first, and
    then minus the same difference of the full cache; None for any other.
    unchanged: whether nothing was compressed: tokens, bytes and answers are the full cache's.
    damaged: whether the cell counts as failed because its files cannot be read.
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
        # the keys are printed in the order in which they are added
        record: dict[str, object] = {"task": self.task, "cell": self.cell, "evicts": self.evicts}
        record |= self.settings
        # only cells of the full cache have this key
        if self.floor is not None:
            record["floor"] = self.floor
        record["status"] = self.status
        # a missing cell has no reason to print, even if one is known
        if self.status in ("refused", "failed"):
            record["reason"] = self.reason
        if self.summary is not None:
            record |= self.summary.record()
        if self.delta is not None:
            record["delta"] = self.delta.mean
            record["delta_ci"] = self.delta.ci
        if self.fall_beside_full is not None:
            record["fall_beside_full"] = asdict(self.fall_beside_full)
        if self.unchanged:
            record["nothing_compressed"] = True
        return record


@dataclass(frozen=True)
class RowMeans:
    """Means of one method over all its measured cells: tokens, bytes and milliseconds are weighted by prompts.

    score_mean: the mean of the cells' scores in printed units; None if a cell has no score, or if their units differ.
    score_ci: the 95 % interval of ``score_mean``.
    delta: the mean paired difference to the full cache, over the examples that both answered. It is None for the full
    cache, for perplexities, and if a task has no pairs.
    kept_percent: the tokens held, in per cent of the prompt's tokens.
    nominal_percent: the tokens of the budget, in per cent of the prompt's tokens; None without a budget.
    attended_percent: the tokens that a decode step attends, in per cent of the prompt's tokens; None without masking.
    payload: the bytes of a prompt's keys and values, as the run stored them.
    overhead: the bytes of the data beside the keys and values, as the run stored them.
    held16: the bytes held of a prompt, payload and overhead, at 16 bits.
    payload_kv_head: the payload under ``per=kv_head``.
    payload_query_head: the payload under ``per=query_head``.
    percent_of_full: ``held16`` in per cent of the full cache's bytes.
    payload_percent_of_full: the payload of ``held16`` alone, in per cent of the full cache's bytes.
    prefill_ms: the milliseconds to read a prompt.
    compress_ms: the milliseconds to compress its cache.
    decode_ms_per_token: the milliseconds of a decode step.
    pages_freed: the shares of a prompt's pages that an engine could give back; None for results of older versions.
    compressed_percent: the bytes of the layers that methods compress, in per cent of their full cache's bytes, at 16
        bits; None if no other layers hold anything.
    """

    score_mean: float | None
    score_ci: tuple[float, float] | None
    delta: Delta | None
    kept_percent: float
    nominal_percent: float | None
    attended_percent: float | None
    payload: float
    overhead: float
    held16: float
    payload_kv_head: float | None
    payload_query_head: float | None
    percent_of_full: float
    payload_percent_of_full: float
    prefill_ms: float
    compress_ms: float
    decode_ms_per_token: float
    pages_freed: PagesFreed | None = None
    compressed_percent: float | None = None


@dataclass(frozen=True)
class ReportRow:
    """One method of a report.

    method: the method's label, with its budgets and knobs.
    evicts: whether the method also drops tokens while it answers, on any task.
    cells: the results, one for each column of the report.
    means: the means over the measured cells; None if no cell is measured.
    is_full: whether it is the full cache, with which the others are compared.
    """

    method: str
    evicts: bool
    cells: tuple[CellResult, ...]
    means: RowMeans | None
    is_full: bool = False

    @property
    def is_complete(self) -> bool:
        """True if every task is measured. Only then does the mean compare with other rows' means."""
        return all(cell.summary is not None for cell in self.cells)

    @property
    def is_unchanged(self) -> bool:
        """True if nothing was compressed on any task."""
        return all(cell.unchanged for cell in self.cells)

    @property
    def delta(self) -> Delta | None:
        """The difference to the full cache, of the mean over tasks or of the only task.

        It is None if nothing was compressed, if a task is not measured, and for the full cache.
        """
        if self.is_unchanged:
            # a difference of 0 would look like a method that loses nothing
            return None
        if len(self.cells) == 1:
            return self.cells[0].delta
        if self.means is None or not self.is_complete:
            return None
        return self.means.delta

    @property
    def score_ci(self) -> tuple[float, float] | None:
        """The interval of the score, of the mean over tasks or of the only task; None if there is none."""
        if len(self.cells) == 1 and self.cells[0].summary is not None:
            return self.cells[0].summary.ci
        if self.means is None:
            return None
        return self.means.score_ci

    def record(self) -> dict[str, object]:
        """Return the row as ``--json`` prints it."""
        row: dict[str, object] = {"method": self.method, "evicts": self.evicts}
        row["cells"] = [cell.record() for cell in self.cells]
        if self.means is None:
            return row
        row |= asdict(self.means)
        # the difference is printed flat, as that of a cell; the full cache has none and prints null for both
        row["delta"] = None
        row["delta_ci"] = None
        if self.means.delta is not None:
            row["delta"] = self.means.delta.mean
            row["delta_ci"] = self.means.delta.ci
        return row


@dataclass(frozen=True)
class ReportColumn:
    """One task of a report.

    task: the name of the column.
    metric: the name of the task's metric.
    category: the kind of task, such as "summarisation" or "RULER".
    floor: True if the model fails on the task even with the full cache.
    """

    task: str
    metric: str
    category: str
    floor: bool


@dataclass(frozen=True)
class ReportData:
    """The content of a run's table: cells by method and task, notes for the reader, the results folder.

    model: the path or the hub id of the model.
    settings: the run's settings as one line of text.
    columns: the tasks.
    rows: the methods, each with a cell for every task.
    notes: what a reader must know to read the scores.
    results: the path of the results folder.
    remarks: how the scores were measured, which a reader need not know.
    matched: the budgets of a run at equal memory.
    apart: the labels of rows that did not share the first row's prefill, so that their times do not compare.
    """

    model: str
    settings: str
    columns: tuple[ReportColumn, ...]
    rows: tuple[ReportRow, ...]
    notes: tuple[str, ...]
    results: str
    remarks: tuple[str, ...] = ()
    matched: tuple[Matched, ...] = ()
    apart: tuple[str, ...] = ()

    @property
    def cells(self) -> list[CellResult]:
        """The cells of all rows."""
        # row by row, so that the cells of one method follow each other
        cells: list[CellResult] = []
        for row in self.rows:
            cells += row.cells
        return cells

    @property
    def task_names(self) -> list[str]:
        """The tasks' names for the head of a table.

        If all tasks are of one dataset, its name is left out: ``longbench/qasper`` becomes ``qasper``.
        """
        names = [column.task for column in self.columns]
        if not names:
            return []
        prefix = names[0].partition("/")[0] + "/"
        # fidelity's tasks are perplexities of texts: "token" alone would not name a text
        has_perplexity = any(metric(column.metric).formula is not None for column in self.columns)
        if has_perplexity or not all(name.startswith(prefix) for name in names):
            return names
        return [name.removeprefix(prefix) for name in names]

    def record(self) -> dict[str, object]:
        """Return the report as ``--json`` prints it."""
        record: dict[str, object] = {"model": self.model, "settings": self.settings}
        # only a run at equal memory has matched budgets
        if self.matched:
            record["matched"] = [asdict(match) for match in self.matched]
        # json cannot write dataclasses, so each becomes a mapping
        record["columns"] = [asdict(column) for column in self.columns]
        record["rows"] = [row.record() for row in self.rows]
        record["notes"] = list(self.notes + self.remarks)
        record["results"] = self.results
        return record
