"""RULER's score of a length, the mean of its tasks, and its means over lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbench.report.table import Table
from kvbench.tasks.metrics.ruler import over_lengths

if TYPE_CHECKING:
    from kvbench.report.report import Report

ALL, WITHOUT_QA = 13, 11
QA = ("qa_1", "qa_2")
MEANS = ("plain\nmean", "weights\nrising", "weights\nfalling")


def sheets(report: Report) -> list[Table]:
    """Return the table of scores by length: of several tasks at several lengths, or of all that RULER has at one."""
    places = _places(report)
    lengths = sorted({length for _, length in places})
    tasks = list(dict.fromkeys(task for task, _ in places))
    complete = len(places) == len(tasks) * len(lengths)
    if not complete or len(tasks) < (2 if len(lengths) > 1 else WITHOUT_QA):
        return []
    rows = []
    for row in report.rows:
        summaries = {place: row.cells[i].summary for place, i in places.items()}
        scores = [s.score for s in summaries.values() if s is not None and s.score is not None]
        if len(scores) < len(places):
            continue
        by_place = dict(zip(places, scores, strict=True))
        by_length = [sum(by_place[task, length] for task in tasks) / len(tasks) for length in lengths]
        shown = [*by_length, *(over_lengths(by_length) if len(lengths) > 1 else ())]
        rows.append((row.method.replace(" ", "\n"), *(f"{score:.1f}" for score in shown)))
    heads = ("method", *map(str, lengths), *(MEANS if len(lengths) > 1 else ()))
    return [Table(heads, tuple(rows), headings={0: _heading(tasks)})] if rows else []


def _places(report: Report) -> dict[tuple[str, int], int]:
    """Return the number of the column of each (task, length) of RULER, without its substitutes."""
    places = {}
    for i, column in enumerate(report.columns):
        _, task, length = (*column.task.split("/"), "", "")[:3]
        if column.category == "RULER" and "@" not in task and length.isdigit():
            places[task, int(length)] = i
    return places


def _heading(tasks: list[str]) -> str:
    """Return what the mean over these tasks by length is called, and which are missing."""
    name = mean_name(tasks)
    missing = {
        f"ruler-{ALL}": ": mean of all tasks",
        f"ruler-{WITHOUT_QA}": f": mean of all tasks but {' and '.join(QA)}",
    }
    return f"{name}{missing.get(name, '')}, by length"


def mean_name(tasks: list[str]) -> str:
    """Return what a mean over these tasks is called: RULER's own name only for all of them."""
    if len(tasks) == ALL:
        return f"ruler-{ALL}"
    if len(tasks) == WITHOUT_QA and not any(qa in tasks for qa in QA):
        return f"ruler-{WITHOUT_QA}"
    return f"mean of {', '.join(tasks)}"
