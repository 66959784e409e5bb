"""The table of several questions on one compressed context: a block for each task, a line for each method."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbench.base.formatting import format_number, format_size, with_interval
from kvbench.report.table import Table

if TYPE_CHECKING:
    from kvbench.report.data import CellResult, ReportData
    from kvbench.store.turns import TurnsSummary

HEADS = ("method", "first\nquestion", "last\nquestion", "fall", "beside\nfull's", "compressed", "after\nthe last")
CSV_FIELDS = (
    "first",
    "last",
    "fall",
    "fall_low",
    "fall_high",
    "fall_beside_full",
    "fall_beside_full_low",
    "fall_beside_full_high",
    "question_mean",
    "questions",
    "pairs",
    "bytes_compressed",
    "bytes_last",
    "by_index",
)
MODES = {
    "isolated": "each question branches from the compressed context",
    "gold": "earlier questions stay with their references",
    "own": "earlier questions stay with the model's answers",
}
"""The content of a cache when a question comes, by ``turns=``."""


def build_tables(report: ReportData) -> list[Table]:
    """Return the table of falls from the first question to the last; [] if no context has several questions."""
    rows: list[tuple[str, ...]] = []
    headings: dict[int, str] = {}
    for i, column in enumerate(report.columns):
        block_start = len(rows)
        for row in report.rows:
            cell = row.cells[i]
            turns = _find_turns(cell)
            if turns is None:
                continue
            # all methods answer the same questions, so any of them gives the numbers for the heading
            if len(rows) == block_start:
                headings[block_start] = _build_heading(column.task, turns, str(cell.settings["turns"]))
            rows.append(_build_line(row.method, turns, cell))
    if not rows:
        return []
    return [Table(HEADS, tuple(rows), headings=headings)]


def _find_turns(cell: CellResult) -> TurnsSummary | None:
    if cell.summary is None:
        return None
    return cell.summary.questions


def _build_heading(task: str, turns: TurnsSummary, mode: str) -> str:
    """Return the heading of a task's block: the numbers of contexts and questions, and the history of a question."""
    count = f"{turns.questions} questions on {turns.contexts} contexts"
    # a context with one question has no fall, so the block's first and last scores are means over the others
    if turns.pairs < turns.contexts:
        count += f", {turns.contexts - turns.pairs} of them with one"
    return f"{task}: {count}; {MODES[mode]}"


def _build_line(method: str, turns: TurnsSummary, cell: CellResult) -> tuple[str, ...]:
    """Return the row of a method on one task: the texts below HEADS. ``turns`` is the summary of the ``cell``."""
    # the full cache's own line has no fall beside the full cache's
    beside_full = ""
    if cell.fall_beside_full is not None:
        beside_full = with_interval(cell.fall_beside_full.mean, cell.fall_beside_full.ci, sign=True)
    return (
        # one knob below the other keeps the first column narrow
        method.replace(" ", "\n"),
        format_number(turns.first),
        format_number(turns.last),
        with_interval(turns.fall, turns.fall_ci, sign=True),
        beside_full,
        format_size(turns.bytes_compressed),
        format_size(turns.bytes_last),
    )


def record_questions(cell: CellResult) -> dict[str, object]:
    """Return one cell's scores by question under the names of CSV_FIELDS; {} without several questions."""
    turns = _find_turns(cell)
    if turns is None:
        return {}
    values: dict[str, object] = {name: value for name, value in vars(turns).items() if name in CSV_FIELDS}
    scores_by_index = []
    for question in turns.by_index:
        if question.score is None:
            scores_by_index.append("—")
        else:
            scores_by_index.append(f"{question.score:.4g}")
    # one spreadsheet cell holds the scores of all questions, as numbers separated by spaces
    values["by_index"] = " ".join(scores_by_index)
    if turns.fall_ci is not None:
        values["fall_low"], values["fall_high"] = turns.fall_ci
    beside_full = cell.fall_beside_full
    if beside_full is not None:
        values["fall_beside_full"] = beside_full.mean
        if beside_full.ci is not None:
            values["fall_beside_full_low"], values["fall_beside_full_high"] = beside_full.ci
    # the prefix tells these columns from a report's other CSV columns
    return {f"turns_{name}": value for name, value in values.items()}


def explain_questions(report: ReportData) -> list[str]:
    """Return the lines below the table: first what its columns mean, then each row's scores by other metrics.

    Return [] if no context has several questions, and there is no table.
    """
    lines = []
    has_questions = False
    for row in report.rows:
        for cell in row.cells:
            turns = _find_turns(cell)
            if turns is None:
                continue
            has_questions = True
            if turns.beside:
                others = ", ".join(f"{name} {format_number(value)}" for name, value in turns.beside.items())
                place = f"{cell.task}, {row.method}" if len(report.columns) > 1 else row.method
                lines.append(f"{place}: {others}.")
    if not has_questions:
        return []
    explanation = (
        "Several questions on one context: it is compressed once, before any question is known. A score is the "
        "mean over contexts of the mean over their questions. Fall: score of a context's last question minus that of "
        "its first, mean over contexts with several; [a, b]: 95 % interval over contexts; beside full's: "
        "minus the full cache's fall. Bytes are of keys, values and overhead, mean per context. Scores by index of "
        "question: --json, --format csv."
    )
    lines.insert(0, explanation)
    return lines
