"""RULER's score at a length, the mean over its tasks, and RULER's means over lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvbench.base.formatting import format_number
from kvbench.report.table import Table
from kvbench.tasks.metrics.ruler import average_over_lengths

if TYPE_CHECKING:
    from kvbench.report.data import ReportColumn, ReportData, ReportRow

# RULER evaluates 13 tasks (arXiv 2404.06654); without the documents of its two QA tasks, 11 remain
ALL, WITHOUT_QA = 13, 11
QA = ("qa_1", "qa_2")
MEANS = ("plain\nmean", "weights\nrising", "weights\nfalling")


def build_tables(report: ReportData) -> list[Table]:
    """Return the table of RULER's mean scores by length, in a list.

    Return [] unless the report has the same tasks, at least two, at several lengths, or WITHOUT_QA tasks or more at one
    length.
    """
    # the index of each column of RULER's own, by (task, length)
    columns = {}
    for index, column in enumerate(report.columns):
        task_and_length = _parse_column(column)
        if task_and_length is not None:
            columns[task_and_length] = index
    lengths = sorted({length for _, length in columns})
    tasks = list(dict.fromkeys(task for task, _ in columns))
    # each length must have the same tasks, or their means do not compare
    is_complete = len(columns) == len(tasks) * len(lengths)
    # at one length, a mean over some of the tasks would only repeat the table of scores
    has_several_lengths = len(lengths) > 1
    fewest_tasks = 2 if has_several_lengths else WITHOUT_QA
    if not is_complete or len(tasks) < fewest_tasks:
        return []
    rows = []
    for row in report.rows:
        scores = _read_scores(row, columns)
        # means over different tasks do not compare, so a row that lacks a score is left out
        if len(scores) < len(columns):
            continue
        # the score at a length is the mean over its tasks
        means = [sum(scores[task, length] for task in tasks) / len(tasks) for length in lengths]
        # the means over lengths, in the order of MEANS
        if has_several_lengths:
            means += average_over_lengths(means)
        texts = [row.method.replace(" ", "\n")]
        texts += map(format_number, means)
        rows.append(tuple(texts))
    if not rows:
        return []
    heads = ["method"]
    heads += [str(length) for length in lengths]
    if has_several_lengths:
        heads += MEANS
    return [Table(tuple(heads), tuple(rows), headings={0: _build_heading(tasks)})]


def _read_scores(row: ReportRow, columns: Mapping[tuple[str, int], int]) -> dict[tuple[str, int], float]:
    """Return a method's scores by (task, length). A cell without a score is left out.

    columns: the index of the cell's column, by (task, length).
    """
    scores = {}
    for task_and_length, index in columns.items():
        summary = row.cells[index].summary
        if summary is not None and summary.score is not None:
            scores[task_and_length] = summary.score
    return scores


def _parse_column(column: ReportColumn) -> tuple[str, int] | None:
    """Return (task, length) of a column such as ``ruler/niah_single_1/4096``, or None if it is not RULER's own."""
    # a dataset without tasks, or a task without a length, has fewer parts
    parts = column.task.split("/")
    if column.category != "RULER" or len(parts) < 3:
        return None
    task, length = parts[1], parts[2]
    # qa_1@xquad and niah_multikey_1@many are substitutes for RULER's tasks, and their scores are not RULER's
    if "@" in task or not length.isdigit():
        return None
    return task, int(length)


def _build_heading(tasks: Sequence[str]) -> str:
    """Return the table's heading: the name of the mean over ``tasks``, and which of RULER's tasks it leaves out."""
    name = name_mean(tasks)
    coverage = {
        f"ruler-{ALL}": ": mean of all tasks",
        f"ruler-{WITHOUT_QA}": f": mean of all tasks but {' and '.join(QA)}",
    }
    return f"{name}{coverage.get(name, '')}, by length"


def name_mean(tasks: Sequence[str]) -> str:
    """Return the name of a mean over these tasks of RULER, each named once.

    Only a mean over all tasks, or over all but the two QA tasks, has RULER's own name.
    """
    if len(tasks) == ALL:
        return f"ruler-{ALL}"
    if len(tasks) == WITHOUT_QA and not any(qa in tasks for qa in QA):
        return f"ruler-{WITHOUT_QA}"
    return f"mean of {', '.join(tasks)}"
