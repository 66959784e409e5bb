"""The table of several questions on one compressed context: a block for each task, a line for each method."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbench.report.table import Table, size

if TYPE_CHECKING:
    from kvbench.report.report import CellResult, Report

HEADS = ("method", "first\nquestion", "last\nquestion", "fall", "beside\nfull's", "compressed", "after\nthe last")
CSV_FIELDS = (
    *("first", "last", "fall", "fall_low", "fall_high", "fall_beside_full", "fall_beside_full_low"),
    *("fall_beside_full_high", "question_mean", "questions", "pairs", "bytes_compressed", "bytes_last", "by_index"),
)
MODES = {
    "isolated": "each question branches from the compressed context",
    "gold": "earlier questions stay with their references",
    "own": "earlier questions stay with the model's answers",
}
"""What a cache holds when a question comes, by ``turns=``."""


def sheets(report: Report) -> list[Table]:
    """Return the table of falls from the first question to the last, or [] if no context has several."""
    rows: list[tuple[str, ...]] = []
    headings: dict[int, str] = {}
    for i, column in enumerate(report.columns):
        cells = [(row.method, row.cells[i], row.cells[i].summary) for row in report.rows]
        asked = [(method, c, s.questions) for method, c, s in cells if s is not None and s.questions is not None]
        if asked:
            headings[len(rows)] = _heading(column.task, asked[0][1])
        for method, cell, turns in asked:
            beside = cell.fall_beside_full
            line = (
                _number(turns.first),
                _number(turns.last),
                _with_interval(turns.fall, turns.fall_ci),
                "" if beside is None else _with_interval(beside.mean, beside.ci),
                size(turns.bytes_compressed),
                size(turns.bytes_last),
            )
            rows.append((method.replace(" ", "\n"), *line))
    return [Table(HEADS, tuple(rows), headings=headings)] if rows else []


def _heading(task: str, cell: CellResult) -> str:
    """Return the heading of a task's block: how many contexts and questions, and what stays between questions."""
    assert cell.summary is not None and cell.summary.questions is not None
    turns = cell.summary.questions
    alone = f", {turns.contexts - turns.pairs} of them with one" if turns.pairs < turns.contexts else ""
    count = f"{turns.questions} questions on {turns.contexts} contexts{alone}"
    return f"{task}: {count}; {MODES[str(cell.settings['turns'])]}"


def _number(value: float | None, sign: bool = False) -> str:
    return "—" if value is None else f"{value:{'+' if sign else ''}.1f}".replace("-", "−")


def _with_interval(value: float | None, ci: tuple[float, float] | None) -> str:
    return _number(value, True) + ("" if ci is None else f"\n[{ci[0]:.0f}, {ci[1]:.0f}]")


def record(cell: CellResult) -> dict[str, object]:
    """Return one cell's scores by question under the names of CSV_FIELDS."""
    turns = cell.summary.questions if cell.summary is not None else None
    if turns is None:
        return {}
    values: dict[str, object] = {name: value for name, value in vars(turns).items() if name in CSV_FIELDS}
    values["by_index"] = " ".join("—" if x.score is None else f"{x.score:.4g}" for x in turns.by_index)
    if turns.fall_ci is not None:
        values |= {"fall_low": turns.fall_ci[0], "fall_high": turns.fall_ci[1]}
    if (beside := cell.fall_beside_full) is not None:
        values["fall_beside_full"] = beside.mean
        if beside.ci is not None:
            values |= {"fall_beside_full_low": beside.ci[0], "fall_beside_full_high": beside.ci[1]}
    return {f"turns_{name}": value for name, value in values.items()}


def legend(report: Report) -> list[str]:
    """Return the lines below the table: what a fall is, and the scores by other metrics."""
    summaries = [(r.method, c.task, c.summary.questions) for r in report.rows for c in r.cells if c.summary is not None]
    asked = [(method, task, turns) for method, task, turns in summaries if turns is not None]
    if not asked:
        return []
    lines = [
        "Several questions on one context: it is compressed once, before any question is known. A cell's score is the "
        "mean over contexts of the mean over their questions. Fall: score of a context's last question minus that of "
        "its first, mean over contexts with several; [a, b]: 95 % interval over contexts; beside full's: "
        "minus the full cache's fall. Bytes are of keys, values and overhead, mean per context. Scores by index of "
        "question: --json, --format csv."
    ]
    columns = len(report.columns)
    for method, task, turns in asked:
        if turns.beside:
            others = ", ".join(f"{name} {_number(value)}" for name, value in turns.beside.items())
            lines.append(f"{task + ', ' if columns > 1 else ''}{method}: {others}.")
    return lines
