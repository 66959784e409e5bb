"""Stored cells as a table for a terminal."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from kvbench.report.listing import StoredCell
from kvbench.store.labels import explain_budgets
from kvbench.store.store import STATUSES, ResultStore

WIDTH = 24
"""The number of characters in a line of a cell of the table."""


def format_runs(cells: Sequence[StoredCell], store: ResultStore) -> str:
    """Return the cells as text that fits 100 columns, with reasons and counts below."""
    from kvbench.report.table import Table
    from kvbench.report.writers import compose

    headers = ("status\nn of N", "method", "dataset\nmodel", "score\ninterval", "last change\nid")
    sheet = Table(headers, tuple(_list_texts(cell) for cell in cells), left=3)
    return compose([sheet], _list_notes(cells, store), "text")


def _list_notes(cells: Sequence[StoredCell], store: ResultStore) -> list[str]:
    """Return the notes below a table of cells: budgets, reasons, busy cells, the store's warnings, and counts."""
    # one reason often holds for many cells: it is printed once, with their ids
    ids_by_reason: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        if cell.status.reason:
            ids_by_reason.setdefault((cell.status.status, cell.status.reason), []).append(cell.id)
    notes = explain_budgets(cell.label for cell in cells)
    notes += [f"{status} {', '.join(ids)}: {reason}" for (status, reason), ids in ids_by_reason.items()]
    for cell in cells:
        if cell.status.measuring:
            shards = ", ".join(map(str, cell.status.measuring))
            notes.append(f"{cell.id} is being measured now, shard {shards}")
    notes += store.warnings
    counts = Counter(cell.status.status for cell in cells)
    totals = [f"{counts[status]} {status}" for status in STATUSES if counts[status]]
    notes.append(f"{len(cells)} results in {store.root}/cells/<id>/: {', '.join(totals)}.")
    return notes


def _list_texts(cell: StoredCell) -> tuple[str, ...]:
    """Return the texts of one cell's line in the table, one for each header."""
    status = cell.status
    # None: the cell's record does not say how many examples there are
    total = str(status.of) if status.of is not None else "?"
    # a label is the method's name, and behind it the knobs that tell it from other rows
    name, _, knobs = cell.label.partition(" ")
    method_lines = _break_text(name, "+") + _break_text(knobs, " ") + _break_text(cell.differs, " ")
    place_lines = _break_text(cell.record.column, " ") + _break_text(cell.record.model, "/")
    # a result that kvbench did not measure shows its kind: imported, or engine
    if cell.record.kind is not None:
        place_lines.append(cell.record.kind)
    return (
        f"{status.status}\n{status.n} of {total}",
        "\n".join(method_lines),
        "\n".join(place_lines),
        _format_score(cell),
        f"{_format_age(status.changed)}\n{cell.id}",
    )


def _format_score(cell: StoredCell) -> str:
    """Return a cell's score with its interval, or the text in place of a score."""
    from kvbench.base.formatting import with_interval
    from kvbench.report.render import UNCHANGED

    summary = cell.summary
    if summary is None or summary.score is None:
        return "—"
    if cell.unchanged:
        return UNCHANGED
    return f"{summary.metric} {with_interval(summary.score, summary.ci)}"


def _break_text(text: str, separator: str) -> list[str]:
    """Break a text into lines of at most WIDTH characters, behind separators.

    A part between two separators that is longer than a line is cut anywhere.
    """
    if not text:
        return []
    lines: list[str] = []
    line = ""
    for i, part in enumerate(text.split(separator)):
        # the first part has no separator in front
        longer = f"{line}{separator}{part}" if i > 0 else part
        if len(longer) <= WIDTH:
            line = longer
            continue
        if i > 0:
            # the line ends with the separator; a space would not be seen there
            lines.append(f"{line}{separator}".rstrip(" "))
        # cut a part that is longer than a line; the next parts go behind its last piece
        line = part
        while len(line) > WIDTH:
            lines.append(line[:WIDTH])
            line = line[WIDTH:]
    lines.append(line)
    # a text may begin or end with a separator
    return [line for line in lines if line]


def _format_age(changed: float | None) -> str:
    """Return in words how long ago a time in seconds was, in the largest unit that it reaches."""
    if changed is None:
        return "—"
    # a clock that was set back gives a time in the future
    seconds = max(0.0, time.time() - int(changed))
    for unit, unit_seconds in (("day", 86400), ("hour", 3600), ("minute", 60)):
        count = int(seconds // unit_seconds)
        if count == 1:
            return f"1 {unit} ago"
        if count > 1:
            return f"{count} {unit}s ago"
    return "just now"
