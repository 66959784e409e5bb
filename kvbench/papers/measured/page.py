"""A paper's table on the page, in five formats, and as plain data."""

from __future__ import annotations

import html
from collections.abc import Iterator
from textwrap import fill
from typing import Any

from kvbench.papers.measured import timing_text
from kvbench.papers.measured.cell_view import View
from kvbench.papers.measured.grid import grid, notes, title
from kvbench.tables import writers
from kvbench.tables.table import WIDTH

FORMATS = ("text", "md", "csv", "latex", "html")
CSV_FIELDS = (
    *("paper", "table", "model", "method", "setting", "column", "status", "ours", "ci_low", "ci_high", "n", "of"),
    *("published", "mark", "delta", "stand_in", "ours_percent_of_full", "percent_low", "percent_high"),
    *("published_percent_of_full", "stated", "exact", "kept_percent", "published_kept_percent", "cell", "reason"),
    *timing_text.CSV_FIELDS,
)


def render(view: View, style: str = "text", show: str = "both", terminal: bool = False) -> str:
    """The table in one of FORMATS, showing one of SHOWS, with what the reader must know below it.

    ``terminal``: text is for a terminal, where the best of a block is bold.
    """
    if style == "csv":
        return writers.csv(CSV_FIELDS, records(view))
    name, table, lines = title(view, show), grid(view, show), notes(view, show)
    if style == "html":
        name, said = html.escape(name), "".join(f"<li>{html.escape(n)}</li>" for n in lines)
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title></head>\n<body>\n'
            f"<h1>{name}</h1>\n{writers.html(table)}\n<ul>{said}</ul>\n</body></html>\n"
        )
    if style == "md":
        return f"# {name}\n\n{writers.compose([table], lines, style)}"
    below = "".join(f"{writers.note(n, style)}\n" for n in lines)
    if style == "latex":
        return f"% {name}\n% needs booktabs, makecell and amssymb\n{writers.latex(table)}{below}"
    pieces = "".join(writers.text(piece, terminal) for piece in table.folded())
    return f"{fill(name, WIDTH, break_on_hyphens=False)}\n\n{pieces}{below}"


def as_json(view: View) -> dict[str, Any]:
    """The table as plain data: its title, a record of what is known of each cell, and the notes below it."""
    cells = [{k: v for k, v in record.items() if v not in (None, "")} for record in records(view)]
    return {"table": view.ours.declared.id, "title": title(view, "both"), "cells": cells, "notes": notes(view, "both")}


def records(view: View) -> Iterator[dict[str, Any]]:
    """Yield a record of each cell under the names of CSV_FIELDS, numbers as they are."""
    declared = view.ours.declared
    for line, entries in view.rows:
        for column, e in zip(view.columns, entries, strict=True):
            if e.status == "none":
                continue
            low, high = e.ci or (None, None)
            relative_low, relative_high = e.relative_ci or (None, None)
            row = {
                "paper": declared.paper,
                "table": declared.table,
                "model": line.row.model,
                "method": line.row.method,
                "setting": line.row.setting,
                "column": column.name,
                "status": e.status,
                "ours": e.ours,
                "ci_low": low,
                "ci_high": high,
                "n": e.n,
                "of": e.of,
                "published": e.published,
                "mark": e.mark,
                "delta": None if view.ours.stand_in or e.timed is not None else e.delta,
                "stand_in": view.ours.model if view.ours.stand_in else "",
                "ours_percent_of_full": e.relative,
                "percent_low": relative_low,
                "percent_high": relative_high,
                "published_percent_of_full": e.published_relative,
                "stated": e.stated,
                "exact": e.exact,
                "kept_percent": e.budget,
                "published_kept_percent": e.published_budget,
                "cell": e.cell,
                "reason": e.reason,
            }
            if view.ours.timings is not None:
                row |= timing_text.csv_row(view.ours.timings, e)
            yield row
