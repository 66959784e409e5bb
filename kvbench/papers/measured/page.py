"""A paper's table as a page in five formats, and as plain data."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from textwrap import fill

from kvbench.papers.measured.cell_view import CellView, View
from kvbench.papers.measured.grid import format_cells, warn_of_few_examples, write_notes, write_title
from kvbench.papers.timed.row_matching import TimedCell
from kvbench.report import writers
from kvbench.report.table import WIDTH, Table

FORMATS = ("text", "md", "csv", "latex", "html")
"""The values of --format: the formats in which a table can be written."""
CSV_FIELDS = (
    "paper",
    "table",
    "model",
    "method",
    "setting",
    "column",
    "status",
    "ours",
    "ci_low",
    "ci_high",
    "n",
    "of",
    "published",
    "mark",
    "delta",
    "stand_in",
    # shares of the full cache in per cent, of scores
    "ours_percent_of_full",
    "percent_low",
    "percent_high",
    "published_percent_of_full",
    "stated",
    "exact",
    "kept_percent",
    "published_kept_percent",
    "cell",
    "reason",
    # ratios to a base row, of efficiency tables
    "unit",
    "ratio",
    "published_ratio",
    "base",
    "device",
    "workload",
    "marks",
)

Record = dict[str, object]
"""A cell of a table as plain data, by the names of CSV_FIELDS."""


def render(view: View, style: str = "text", show: str = "both", terminal: bool = False, intervals: bool = False) -> str:
    """Return the table as text, with a title above and notes below it. CSV has neither, and all numbers unrounded.

    style: one of FORMATS.
    show: what its cells contain, one of grid.SHOWS. It does not change CSV.
    terminal: True to mark the best value of each block in bold. It only changes the format ``text``.
    intervals: True to show the 95 % interval of each of our numbers. Markdown folds a second table with them.
    """
    # CSV is for programs, so it has all numbers, unrounded, and no notes
    if style == "csv":
        return writers.csv(CSV_FIELDS, list_records(view))
    heading = write_title(view, show)
    table = format_cells(view, show, intervals and style != "md")
    footnotes = write_notes(view, show)
    # the paper's own numbers rest on the paper's examples
    caution = warn_of_few_examples(view) if show != "published" else ""
    if style == "html":
        return _render_html(heading, caution, table, footnotes)
    if style == "md":
        above = f"**{caution}**\n\n" if caution else ""
        text = f"# {heading}\n\n{above}{writers.compose([table], footnotes, style)}"
        if intervals and any(entry.scores for _, row in view.rows for entry in row):
            folded = writers.markdown(format_cells(view, "ours", intervals=True))
            text += f'\n<details markdown="1"><summary>95 % intervals</summary>\n\n{folded}\n</details>\n'
        return text
    footer = "".join(f"{writers.note(note, style)}\n" for note in footnotes)
    if style == "latex":
        # an empty tabular would look like a fault of the document
        if _is_empty(view, table):
            hint = "% There is no number in it yet: leave out --stored, or take --show published."
            return f"% {heading}\n{hint}\n{footer}"
        above = f"% {caution}\n" if caution else ""
        return f"% {heading}\n{above}% needs booktabs, makecell and amssymb\n{writers.latex(table)}{footer}"
    # in a terminal a wide table is folded into pieces of WIDTH characters
    pieces = "".join(writers.text(piece, terminal) for piece in table.folded())
    above = f"{caution}\n" if caution else ""
    return f"{above}{fill(heading, WIDTH, break_on_hyphens=False)}\n\n{pieces}{footer}"


def _render_html(heading: str, caution: str, table: Table, footnotes: Sequence[str]) -> str:
    """Return a whole HTML page with a heading, a warning ('' for none), the table, and its notes as a list."""
    heading = html.escape(heading)
    above = f"<p><strong>{html.escape(caution)}</strong></p>\n" if caution else ""
    items = "".join(f"<li>{html.escape(note)}</li>" for note in footnotes)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{heading}</title></head>\n<body>\n'
        f"<h1>{heading}</h1>\n{above}{writers.html(table)}\n<ul>{items}</ul>\n</body></html>\n"
    )


def _is_empty(view: View, table: Table) -> bool:
    for _, entries in view.rows:
        if any(entry.status not in ("none", "missing") for entry in entries):
            return False
    texts: list[str] = []
    for row in table.rows:
        # the first column has the rows' labels
        texts += row[1:]
    return not any(text.strip("—") for text in texts)


def as_json(view: View) -> dict[str, object]:
    """Return plain data: the table's title, a record of each cell, and the notes below it."""
    # most fields are empty, so leave empty ones out
    cells = []
    for record in list_records(view):
        cells.append({key: record[key] for key in CSV_FIELDS if record.get(key) not in (None, "")})
    return {
        "table": view.ours.declared.id,
        "title": write_title(view, "both"),
        "cells": cells,
        "notes": write_notes(view, "both"),
    }


def list_records(view: View) -> Iterator[Record]:
    """Yield a record of each cell under the names of CSV_FIELDS, with unrounded numbers."""
    table, timings = view.ours.declared, view.ours.timings
    for line, entries in view.rows:
        for column, entry in zip(view.columns, entries, strict=True):
            # the paper's table has no such cell
            if entry.status == "none":
                continue
            low, high = entry.ci or (None, None)
            # on another model, or another device, a difference in printed units says nothing
            delta = entry.delta if not view.ours.stand_in and entry.timed is None else None
            record: Record = {
                "paper": table.paper,
                "table": table.table,
                "model": line.row.model,
                "method": line.row.method,
                "setting": line.row.setting,
                "column": column.name,
                "status": entry.status,
                "ours": entry.ours,
                "ci_low": low,
                "ci_high": high,
                "n": entry.n,
                "of": entry.total,
                "published": entry.published,
                "mark": entry.mark,
                "delta": delta,
                "stand_in": view.ours.model if view.ours.stand_in else "",
                "stated": entry.stated,
                "exact": entry.exact,
                "kept_percent": entry.budget,
                "published_kept_percent": entry.published_budget,
                "reason": entry.reason,
            }
            if entry.timed is None or timings is None:
                record |= _list_share_fields(entry)
            else:
                record |= _list_ratio_fields(entry.timed, timings.bench.base)
            yield record


def _list_share_fields(entry: CellView) -> Record:
    low, high = entry.relative_ci or (None, None)
    return {
        "ours_percent_of_full": entry.relative,
        "percent_low": low,
        "percent_high": high,
        "published_percent_of_full": entry.published_relative,
        "cell": entry.cell,
    }


def _list_ratio_fields(cell: TimedCell, base: str) -> Record:
    # a cell that was not measured has no row
    workload, key = "", ""
    if cell.row is not None:
        workload, key = cell.row["workload"], cell.row["key"]
    return {
        "unit": cell.printed.unit,
        "ratio": cell.ratio,
        "published_ratio": cell.published_ratio,
        "base": base,
        "device": cell.device,
        "workload": workload,
        "marks": " ".join(cell.marks),
        "cell": key,
    }
