"""A paper's table as a page in five formats, and as plain data."""

from __future__ import annotations

import html
from collections.abc import Iterator
from textwrap import fill
from typing import Any

from kvbench.papers.measured.cell_view import CellView, View
from kvbench.papers.measured.grid import grid, notes, title
from kvbench.papers.timed.row_matching import TimedCell
from kvbench.report import writers
from kvbench.report.table import WIDTH, Table

FORMATS = ("text", "md", "csv", "latex", "html")
CSV_FIELDS = (
    *("paper", "table", "model", "method", "setting", "column", "status", "ours", "ci_low", "ci_high", "n", "of"),
    *("published", "mark", "delta", "stand_in", "ours_percent_of_full", "percent_low", "percent_high"),
    *("published_percent_of_full", "stated", "exact", "kept_percent", "published_kept_percent", "cell", "reason"),
    *("unit", "ratio", "published_ratio", "base", "device", "workload", "marks"),
)
SETTINGS = ("model", "method", "setting")
SAME = ("status", "ours", "n", "of", "published", "mark", "stated", "exact", "reason")
"""Fields of a record that are those of the cell."""


def render(view: View, style: str = "text", show: str = "both", terminal: bool = False) -> str:
    """Return the table as text in one of FORMATS, with ``show`` (one of SHOWS) in its cells and notes below.

    ``terminal`` marks the best value of each block in bold, in text only.
    """
    if style == "csv":
        return writers.csv(CSV_FIELDS, records(view))
    heading, table, footnotes = title(view, show), grid(view, show), notes(view, show)
    if style == "html":
        heading, items = html.escape(heading), "".join(f"<li>{html.escape(n)}</li>" for n in footnotes)
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{heading}</title></head>\n<body>\n'
            f"<h1>{heading}</h1>\n{writers.html(table)}\n<ul>{items}</ul>\n</body></html>\n"
        )
    if style == "md":
        return f"# {heading}\n\n{writers.compose([table], footnotes, style)}"
    footer = "".join(f"{writers.note(n, style)}\n" for n in footnotes)
    if style == "latex" and _is_empty(view, table):
        return f"% {heading}\n% There is no number in it yet: leave out --stored, or take --show published.\n{footer}"
    if style == "latex":
        return f"% {heading}\n% needs booktabs, makecell and amssymb\n{writers.latex(table)}{footer}"
    pieces = "".join(writers.text(piece, terminal) for piece in table.folded())
    return f"{fill(heading, WIDTH, break_on_hyphens=False)}\n\n{pieces}{footer}"


def _is_empty(view: View, table: Table) -> bool:
    """Tell whether nothing of a table is measured and its cells show nothing else, as the printed numbers."""
    measured = any(e.status not in ("none", "missing") for _, entries in view.rows for e in entries)
    return not measured and not any(cell.strip("—") for row in table.rows for cell in row[1:])


def as_json(view: View) -> dict[str, Any]:
    """Return plain data: the table's title, a record of each cell, and the notes below it."""
    cells = [{k: r[k] for k in CSV_FIELDS if r.get(k) not in (None, "")} for r in records(view)]
    return {"table": view.ours.declared.id, "title": title(view, "both"), "cells": cells, "notes": notes(view, "both")}


def records(view: View) -> Iterator[dict[str, Any]]:
    """Yield a record of each cell under the names of CSV_FIELDS, numbers as they are."""
    table, timings = view.ours.declared, view.ours.timings
    for line, entries in view.rows:
        row = {"paper": table.paper, "table": table.table, **{k: getattr(line.row, k) for k in SETTINGS}}
        for column, e in zip(view.columns, entries, strict=True):
            if e.status == "none":
                continue
            low, high = e.ci or (None, None)
            yield {
                **row,
                "column": column.name,
                **{key: getattr(e, key) for key in SAME},
                "ci_low": low,
                "ci_high": high,
                "delta": None if view.ours.stand_in or e.timed is not None else e.delta,
                "stand_in": view.ours.model if view.ours.stand_in else "",
                "kept_percent": e.budget,
                "published_kept_percent": e.published_budget,
                **(_relative(e) if e.timed is None or timings is None else _timed(e.timed, timings.bench.base)),
            }


def _relative(e: CellView) -> dict[str, Any]:
    """Return the fields of a score's cell, whose shares are of its full cache."""
    low, high = e.relative_ci or (None, None)
    return {
        **{"ours_percent_of_full": e.relative, "percent_low": low, "percent_high": high},
        **{"published_percent_of_full": e.published_relative, "cell": e.cell},
    }


def _timed(cell: TimedCell, base: str) -> dict[str, Any]:
    """Return the fields of an efficiency table's cell, whose ratios are to the row ``base``."""
    return {
        "unit": cell.printed.unit,
        "ratio": cell.ratio,
        "published_ratio": cell.published_ratio,
        "base": base,
        "device": cell.device,
        "workload": "" if cell.row is None else cell.row["workload"],
        "marks": " ".join(cell.marks),
        "cell": "" if cell.row is None else cell.row["key"],
    }
