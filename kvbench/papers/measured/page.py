"""A paper's table on the page, in five formats, and as plain data."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from textwrap import fill, wrap
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text as RichText

from kvbench.papers.measured import timing_text
from kvbench.papers.measured.cell_view import View
from kvbench.papers.measured.grid import Grid, TextGrid, grid, notes, runs, title
from kvbench.tables.render import WIDTH

FORMATS = ("text", "md", "csv", "latex", "html")
SYMBOLS = {
    "Δ": r"$\Delta$",
    "−": "$-$",
    "✗": r"$\times$",
    "×": r"$\times$",
    "—": "---",
    "✓": r"$\checkmark$",
    "∫": r"$\int$",
}
"""What LaTeX has for signs that its fonts lack."""
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
        return _csv(view)
    name, whole, lines = title(view, show), grid(view, show), notes(view, show)
    return _text(name, whole, lines, terminal) if style == "text" else _RENDERERS[style](name, whole, lines)


def _text(name: str, whole: Grid, lines: Sequence[str], bold: bool) -> str:
    parts = [fill(name, WIDTH, break_on_hyphens=False), ""]
    for piece in _folded(whole):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True, header_style="none")
        for i, column in enumerate(piece.names):
            table.add_column(_short(column), justify="left" if i == 0 else "right")
        for heading, rows in piece.blocks:
            if heading:
                table.add_row("· " + heading.replace(", ", "\n  "))
            for j, row in enumerate(rows):
                table.add_row(*map(_styled, row), end_section=j == len(rows) - 1)
        console = Console(
            width=WIDTH,
            file=io.StringIO(),
            color_system="standard" if bold else None,
            force_terminal=bold,
            legacy_windows=False,
        )
        console.print(table)
        drawn = [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
        parts += [*_group_lines(piece, drawn), *drawn]
    return "\n".join([*parts, *(fill(n, WIDTH, break_long_words=False, break_on_hyphens=False) for n in lines)]) + "\n"


def _styled(cell: TextGrid) -> RichText:
    first, *rest = cell.lines or ("",)
    return RichText("\n").join([RichText(first, style="bold" if cell.bold else ""), *map(RichText, rest)])


def _group_lines(piece: Grid, drawn: Sequence[str]) -> list[str]:
    """The names of groups over their columns, whose right ends are those of the names in the line above the rule."""
    if not any(piece.groups):
        return []
    rule = next(i for i, line in enumerate(drawn) if line.startswith("─"))
    ends = [0, *(found.end() for found in re.finditer(r"\S+(?: \S+)*", drawn[rule - 1]))]
    spans, column = [], 0
    for group, count in runs(piece.groups):
        last = column + count - 1
        start = max(ends[column - 1] + 2, ends[column] - _width(piece, column)) if column else 0
        if group:
            lines = wrap(group, max(1, ends[last] - start), break_long_words=False)
            start = min(start, ends[last] - max(map(len, lines)))
            spans.append((start, ends[last] - start, lines))
        column = last + 1
    tallest = max(len(lines) for _, _, lines in spans)
    out = [""] * tallest
    for start, room, lines in spans:
        for i, line in enumerate(lines, tallest - len(lines)):
            out[i] = out[i].ljust(start) + line.center(room).rstrip()
    return out


def _short(name: str) -> str:
    """A column's name over several lines, where it is long and has a place to break."""
    return re.sub(r"([_/-])(?=\w{2})", r"\1\n", name) if len(name) > 10 else name


def _folded(whole: Grid) -> Iterator[Grid]:
    """The grid in pieces of columns that fit WIDTH, each with the rows' labels."""

    headings = max(len(part) + 4 for heading, _ in whole.blocks for part in heading.split(", "))
    room = WIDTH - max(_width(whole, 0) + 2, headings)
    part: list[int] = []
    used = 0
    for column in range(1, len(whole.names)):
        needed = _width(whole, column) + 2
        if part and used + needed > room:
            yield _columns(whole, part)
            part, used = [], 0
        part.append(column)
        used += needed
    yield _columns(whole, part)


def _width(whole: Grid, column: int) -> int:
    """Characters of a column's widest line."""
    texts = _short(whole.names[column]).split("\n")
    texts += [line for _, rows in whole.blocks for row in rows for line in row[column].lines]
    return max(map(len, texts))


def _columns(whole: Grid, chosen: Sequence[int]) -> Grid:
    at = (0, *chosen)
    return replace(
        whole,
        names=tuple(whole.names[i] for i in at),
        groups=tuple(whole.groups[i] for i in at),
        blocks=tuple((h, tuple(tuple(row[i] for i in at) for row in rows)) for h, rows in whole.blocks),
    )


def _markdown(name: str, whole: Grid, lines: Sequence[str]) -> str:
    head = [f"# {name}", "", f"| {' | '.join(whole.names)} |"]
    head.append(f"|{'|'.join(['---', *['---:'] * (len(whole.names) - 1)])}|")
    if any(whole.groups):  # Markdown has one line of heads, and no cell over several columns
        firsts = [[f"*{group}*" if group else ""] + [""] * (count - 1) for group, count in runs(whole.groups)]
        head.append(f"| {' | '.join(chain.from_iterable(firsts))} |")
    for heading, rows in whole.blocks:
        if heading:
            head.append(f"| *{heading}* |{' |' * (len(whole.names) - 1)}")
        head += [f"| {' | '.join(_bold(c, '**', '<br>') for c in row)} |" for row in rows]
    return "\n".join([*head, "", *(f"- {n}" for n in lines)]) + "\n"


def _bold(cell: TextGrid, mark: str, between: str) -> str:
    if not cell.bold:
        return between.join(cell.lines)
    return between.join([f"{mark}{cell.lines[0]}{mark}", *cell.lines[1:]])


def _latex(name: str, whole: Grid, lines: Sequence[str]) -> str:
    def cell(text: TextGrid) -> str:
        first, *rest = [_escaped(line) for line in text.lines] or [""]
        # {}: a bracket right after a line break would be read as its length
        return r"\makecell{" + r"\\{}".join([rf"\textbf{{{first}}}" if text.bold else first, *rest]) + "}"

    count = len(whole.names)
    out = [
        f"% {name}",
        "% needs booktabs, makecell and amssymb",
        rf"\begin{{tabular}}{{l{'r' * (count - 1)}}}",
        r"\toprule",
    ]
    if any(whole.groups):
        out.append(" & ".join(map(_span, runs(whole.groups))) + r" \\")
    out += [" & ".join(_escaped(n) for n in whole.names) + r" \\"]
    for heading, rows in whole.blocks:
        out.append(r"\midrule")
        if heading:
            out.append(rf"\multicolumn{{{count}}}{{l}}{{\emph{{{_escaped(heading)}}}}} \\")
        out += [" & ".join(cell(c) for c in row) + r" \\" for row in rows]
    return "\n".join([*out, r"\bottomrule", r"\end{tabular}", *(f"% {n}" for n in lines)]) + "\n"


def _span(run: tuple[str, int]) -> str:
    """A group's name over its columns."""
    name, count = run
    return rf"\multicolumn{{{count}}}{{c}}{{{_escaped(name)}}}" if name else " & ".join([""] * count)


def _escaped(text: str) -> str:
    pairs = (
        ("\\", r"\textbackslash "),
        ("&", r"\&"),
        ("%", r"\%"),
        ("_", r"\_"),
        ("#", r"\#"),
        ("~", r"\textasciitilde "),
    )
    for a, b in (*pairs, *SYMBOLS.items()):
        text = text.replace(a, b)
    return text


def spans_html(groups: Sequence[str]) -> str:
    """Heads over the columns of each group."""
    return "".join(f'<th colspan="{count}">{html.escape(name)}</th>' for name, count in runs(groups))


def table_html(whole: Grid) -> str:
    """The table alone, as an HTML fragment."""
    out = ["<table>", "<thead>"]
    if any(whole.groups):
        out.append(f"<tr>{spans_html(whole.groups)}</tr>")
    out += ["<tr>" + "".join(f"<th>{html.escape(n)}</th>" for n in whole.names) + "</tr>", "</thead>"]
    for heading, rows in whole.blocks:
        out.append("<tbody>")
        if heading:
            out.append(f'<tr class="block"><th colspan="{len(whole.names)}">{html.escape(heading)}</th></tr>')
        for label, *cells in rows:
            body = "".join(f"<td>{_html_cell(c)}</td>" for c in cells)
            out.append(f"<tr><th>{'<br>'.join(map(html.escape, label.lines))}</th>{body}</tr>")
        out.append("</tbody>")
    return "\n".join([*out, "</table>"])


def _html_cell(cell: TextGrid) -> str:
    escaped = TextGrid(tuple(map(html.escape, cell.lines)), cell.bold)
    return (
        "<br>".join([f"<b>{escaped.lines[0]}</b>" if cell.bold else escaped.lines[0], *escaped.lines[1:]])
        if cell.lines
        else ""
    )


def _html(name: str, whole: Grid, lines: Sequence[str]) -> str:
    body = "".join(f"<li>{html.escape(n)}</li>" for n in lines)
    name = html.escape(name)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title></head>\n<body>\n'
        f"<h1>{name}</h1>\n{table_html(whole)}\n<ul>{body}</ul>\n</body></html>\n"
    )


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


def _csv(view: View) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, CSV_FIELDS, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(records(view))
    return out.getvalue()


_RENDERERS = {"md": _markdown, "latex": _latex, "html": _html}
