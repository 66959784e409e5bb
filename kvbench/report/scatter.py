"""The picture of a report: scores against bytes held, one panel a task."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import rcParams
from matplotlib.figure import Figure as Canvas

from kvbench.report import looks
from kvbench.report.style import GREY, of_look, styled
from kvbench.store.labels import explain_budgets

if TYPE_CHECKING:
    from kvbench.report.data import ReportData
    from kvbench.store.results import CellSummary

BUDGETS = ("kv_size=", "kv_ratio=")
"""The options whose values a line joins."""
COLUMNS = 3
WIDTH, HEIGHT = 3.6, 2.8
"""Inches of a panel."""
LETTERS = 34
"""Letters of the legend below a panel. Entries that do not fit into a line begin another one."""
TITLE_LETTERS = 56
"""Letters of the legend's title below a panel, which is text alone."""
LINE = 0.16
"""Inches of a line of the legend's title."""


class Shown(Canvas):
    """A figure that a notebook shows by itself, whatever matplotlib's settings are."""

    def _repr_png_(self) -> bytes:
        """Return the figure as a PNG file, which a Jupyter notebook shows by itself."""
        picture = io.BytesIO()
        self.savefig(picture, format="png", dpi=110)
        return picture.getvalue()


def draw_report(report: ReportData) -> Shown:
    """Return a figure with a panel per task: each method's score with its interval over its bytes in % of full.

    The report must have at least one task.
    """
    tasks = report.columns
    columns = min(COLUMNS, len(tasks))
    rows = math.ceil(len(tasks) / columns)
    # a method has one look in all panels, whatever is measured of it
    line_looks = looks.looks_of([line_of(row.method) for row in report.rows])
    with styled():
        # the legend takes half an inch below the panels, and each line above its entries a little more
        title_lines = _explain_lines(report, columns)
        height = HEIGHT * rows + 0.5 + LINE * len(title_lines)
        figure = Shown(figsize=(WIDTH * columns, height), dpi=200, layout="constrained")
        panels = list(figure.subplots(rows, columns, squeeze=False).flat)
        for i, task in enumerate(tasks):
            panel = panels[i]
            _draw_panel(panel, report, i, line_looks)
            panel.set_title(f"{task.task}{_describe_examples(report, i)}")
            panel.set_ylabel(task.metric)
            panel.set_xlabel("size in % of the full cache, 16 bits")
        # the last row may have more places than tasks
        for panel in panels[len(tasks) :]:
            panel.set_visible(False)
        _draw_legend(figure, panels[: len(tasks)], columns, title="\n".join(title_lines))
    return figure


def _draw_legend(figure: Shown, panels: Sequence[Any], columns: int, title: str) -> None:
    """Draw one legend for all ``panels`` below them, as wide as ``columns`` panels, ``title`` above its entries."""
    # a method may be missing in some panels, so collect the entries of all of them
    entries: dict[str, Any] = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        for handle, label in zip(handles, labels, strict=True):
            entries.setdefault(label, handle)
    # an entry is as wide as the longest label and eight letters, for its line and the gap behind it
    longest = max(map(len, entries), default=0)
    most_columns = columns * LETTERS // (8 + longest)
    # at least one column: a label may be wider than the panels, and there may be no entry
    figure.legend(
        list(entries.values()),
        list(entries),
        loc="outside lower center",
        ncols=max(1, min(most_columns, len(entries))),
        title=title or None,
        title_fontsize=rcParams["legend.fontsize"],
    )


def _explain_lines(report: ReportData, columns: int) -> list[str]:
    """Return the text above the legend, in lines as wide as ``columns`` panels: the meaning of lines and budgets."""
    lines = []
    for note in explain_budgets(row.method for row in report.rows):
        lines += wrap(f"A line joins the budgets of one method. {note}", columns * TITLE_LETTERS)
    return lines


def line_of(label: str) -> str:
    """Return the name of a method's line: its label without its budgets."""
    return " ".join(word for word in label.split() if not word.startswith(BUDGETS))


def _describe_examples(report: ReportData, task: int) -> str:
    """Return in words how many examples each point of a task has, and whether the points have intervals.

    task: the index of the task's column.

    Return '' if no method is measured on the task.
    """
    summaries = [row.cells[task].summary for row in report.rows]
    measured = [summary for summary in summaries if summary is not None]
    if not measured:
        return ""
    fewest = min(summary.n for summary in measured)
    most = max(summary.n for summary in measured)
    count = f"n = {fewest}"
    if fewest != most:
        count += f" to {most}"
    if any(summary.ci is not None for summary in measured):
        return f", {count}, 95 % intervals"
    return f", {count}, too few for intervals"


def _draw_panel(panel: Any, report: ReportData, task: int, line_looks: Mapping[str, looks.Look]) -> None:
    """Draw the methods' points on one task, and the full cache as a dashed line. A line joins one method's budgets.

    task: the index of the task's column.
    line_looks: the look of each line, by the method without its budgets.
    """
    # the measured budgets of each method, by its line's name
    lines: dict[str, list[CellSummary]] = {}
    for row in report.rows:
        line = line_of(row.method)
        cell = row.cells[task]
        if cell.unchanged:
            # a point at the full cache's would look like a method that loses nothing: make only an entry of the legend
            panel.plot([], [], " ", label=f"{line_looks[line].name}: nothing was compressed")
        elif cell.summary is not None and cell.summary.score is not None:
            lines.setdefault(line, []).append(cell.summary)
    # the full cache has one row at most, and none if it was not measured
    for full in lines.pop("full", []):
        panel.axhline(full.score, color=GREY, linestyle="--", label="full cache")
    for line, summaries in lines.items():
        _draw_line(panel, summaries, line_looks[line])
    panel.set_xlim(left=0)


def _draw_line(panel: Any, summaries: Sequence[CellSummary], look: looks.Look) -> None:
    """Draw one method's scores with their intervals over their sizes in per cent of the full cache, joined by a line.

    summaries: the results under each of the method's budgets. Each must have a score.
    """
    points = []
    for summary in summaries:
        score = summary.score
        assert score is not None, "the caller drops summaries without a score"
        # too few examples have no interval: draw a bar of length 0
        low, high = summary.ci or (score, score)
        points.append((summary.percent_of_full, score, low, high))
    # sorted: the line runs from the smallest size to the largest; transposed to [4, points]
    sizes, scores, lows, highs = np.array(sorted(points), dtype=float).T
    # the lengths of the bar below and above each point
    bars = [scores - lows, highs - scores]
    panel.errorbar(sizes, scores, yerr=bars, label=look.name, capsize=2, **of_look(look))
