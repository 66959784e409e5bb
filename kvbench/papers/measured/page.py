"""A paper's table as a page in five formats, and as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import fill

from kvbench.papers import fill_template
from kvbench.papers.measured.plan import PaperTable
from kvbench.papers.measured.text import find_delta, format_cells, warn_of_few_examples, write_notes, write_title
from kvbench.report import writers
from kvbench.report.table import WIDTH

FORMATS = ("text", "md", "csv", "latex", "html")
"""The values of --format: the formats in which a table can be written."""
CSV_FIELDS = (
    ("paper", "table", "model", "method", "setting", "column", "status", "ours", "ci_low", "ci_high", "n", "of")
    + ("published", "mark", "delta", "stand_in")
    # shares of the full cache in per cent, of scores
    + ("ours_percent_of_full", "percent_low", "percent_high", "published_percent_of_full")
    + ("stated", "exact", "kept_percent", "published_kept_percent", "cell", "reason")
    # ratios to a base row, of efficiency tables
    + ("unit", "ratio", "published_ratio", "base", "device", "workload", "marks")
)

Record = dict[str, object]
"""A cell of a table as plain data, by the names of CSV_FIELDS."""


def render(
    table: PaperTable, style: str = "text", show: str = "both", terminal: bool = False, intervals: bool = False
) -> str:
    """Return the table as text, with a title above and notes below it. CSV has neither, and all numbers unrounded.

    style: one of FORMATS.
    show: what its cells contain, one of text.SHOWS. It does not change CSV.
    terminal: True to mark the best value of each block in bold. It only changes the format ``text``.
    intervals: True to show the 95 % interval of each of our numbers. Markdown folds a second table with them.
    """
    # CSV is for programs, so it has all numbers, unrounded, and no notes
    if style == "csv":
        return writers.csv(CSV_FIELDS, list_records(table))
    heading = write_title(table, show)
    texts = format_cells(table, show, intervals and style != "md")
    notes = write_notes(table, show)
    # the paper's own numbers rest on the paper's examples
    caution = ""
    if show != "published":
        caution = warn_of_few_examples(table)
    if style == "html":
        return fill_template("table.html", heading=heading, caution=caution, table=writers.html(texts), notes=notes)
    if style == "md":
        text = f"# {heading}\n\n"
        if caution:
            text += f"**{caution}**\n\n"
        text += writers.compose([texts], notes, style)
        if intervals and any(cell.scores for cell in table.pairs):
            folded = writers.markdown(format_cells(table, "ours", intervals=True))
            text += f'\n<details markdown="1"><summary>95 % intervals</summary>\n\n{folded}\n</details>\n'
        return text
    footer = "".join(f"{writers.note(note, style)}\n" for note in notes)
    if style == "latex":
        # an empty tabular would look like a fault of the document; the first column has the rows' labels
        shown = any("".join(row[1:]).strip("—") for row in texts.rows)
        if not shown and all(cell.status in ("none", "missing") for cell in table.pairs):
            hint = "% There is no number in it yet: leave out --stored, or take --show published."
            return f"% {heading}\n{hint}\n{footer}"
        above = f"% {caution}\n" if caution else ""
        return f"% {heading}\n{above}% needs booktabs, makecell and amssymb\n{writers.latex(texts)}{footer}"
    # in a terminal a wide table is folded into pieces of WIDTH characters
    pieces = "".join(writers.text(piece, terminal) for piece in texts.folded())
    above = f"{caution}\n" if caution else ""
    return f"{above}{fill(heading, WIDTH, break_on_hyphens=False)}\n\n{pieces}{footer}"


def as_json(table: PaperTable) -> dict[str, object]:
    """Return plain data: the table's title, a record of each cell, and the notes below it."""
    # most fields are empty, so leave empty ones out
    cells = []
    for record in list_records(table):
        cells.append({key: record[key] for key in CSV_FIELDS if record.get(key) not in (None, "")})
    return {"table": table.spec.id, "title": write_title(table), "cells": cells, "notes": write_notes(table)}


def list_records(table: PaperTable) -> Iterator[Record]:
    """Yield a record of each cell under the names of CSV_FIELDS, with unrounded numbers."""
    lines = table.lines
    for cell in table.pairs:
        # the paper's table has no such cell
        if cell.status == "none":
            continue
        line, timed = lines[cell.row], cell.timed
        record: Record = {
            "paper": table.spec.paper,
            "table": table.spec.table,
            "model": line.model,
            "method": line.method,
            "setting": line.setting,
            "column": cell.column,
            "status": cell.status,
            "ours": cell.value,
            "ci_low": cell.low,
            "ci_high": cell.high,
            "n": cell.n,
            "of": cell.of,
            "published": cell.paper_value,
            "mark": cell.paper_mark,
            # on another model, or another device, a difference in printed units says nothing
            "delta": find_delta(cell) if not table.stand_in and timed is None else None,
            "stand_in": table.model if table.stand_in else "",
            "stated": cell.paper_stated,
            "exact": cell.paper_exact,
            "kept_percent": cell.kept,
            "published_kept_percent": cell.paper_kept,
            "reason": cell.reason,
        }
        if timed is None or table.timings is None:
            record |= {
                "ours_percent_of_full": cell.share,
                "percent_low": cell.share_low,
                "percent_high": cell.share_high,
                "published_percent_of_full": cell.paper_share,
                "cell": cell.cell,
            }
        else:
            # a cell that was not measured has no row
            row = timed.row or {"workload": "", "key": ""}
            record |= {
                "unit": timed.printed.unit,
                "ratio": timed.ratio,
                "published_ratio": timed.published_ratio,
                "base": table.timings.bench.base,
                "device": timed.device,
                "workload": row["workload"],
                "marks": " ".join(timed.marks),
                "cell": row["key"],
            }
        yield record
