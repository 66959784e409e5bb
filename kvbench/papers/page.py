"""A paper's table on the page, in five formats."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from textwrap import fill

from rich import box
from rich.console import Console
from rich.table import Table

from kvbench.papers import timing_text
from kvbench.papers.grid import Grid, Text, grid, notes, runs, title
from kvbench.papers.view import View
from kvbench.render import WIDTH

FORMATS = ("text", "md", "csv", "latex", "html")
CSV_FIELDS = (
    *("paper", "table", "model", "method", "setting", "column", "status", "ours", "ci_low", "ci_high", "n", "of"),
    *("published", "mark", "delta", "stand_in", "ours_percent_of_full", "percent_low", "percent_high"),
    *("published_percent_of_full", "stated", "exact", "kept_percent", "published_kept_percent", "cell", "reason"),
    *timing_text.CSV_FIELDS,
)


def render(view: View, style: str = "text", show: str = "both") -> str:
    """The table in one of FORMATS, showing one of SHOWS, with what the reader must know below it."""
    if style == "csv":
        return _csv(view)
    return _RENDERERS[style](view, grid(view, show), notes(view))


def _text(view: View, whole: Grid, lines: Sequence[str]) -> str:
    parts = [fill(title(view), WIDTH), ""]
    for piece in _folded(whole):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
        for i, name in enumerate(piece.names):
            table.add_column(_short(name), justify="left" if i == 0 else "right")
        for heading, rows in piece.blocks:
            if heading:
                table.add_row("· " + heading.replace(", ", "\n  "))
            for j, row in enumerate(rows):
                table.add_row(*("\n".join(c.lines) for c in row), end_section=j == len(rows) - 1)
        console = Console(width=WIDTH, file=io.StringIO(), color_system=None, legacy_windows=False)
        console.print(table)
        parts += [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    return "\n".join([*parts, *(fill(n, WIDTH, break_long_words=False) for n in lines)]) + "\n"


def _short(name: str) -> str:
    """A column's name over several lines, where it is long and has a place to break."""
    return re.sub(r"([_/-])(?=\w{2})", r"\1\n", name) if len(name) > 10 else name


def _folded(whole: Grid) -> Iterator[Grid]:
    """The grid in pieces of columns that fit WIDTH, each with the rows' labels."""

    def width(column: int) -> int:
        texts = list(_short(whole.names[column]).split("\n"))
        texts += [line for _, rows in whole.blocks for row in rows for line in row[column].lines]
        return max(map(len, texts)) + 2

    headings = max(len(part) + 4 for heading, _ in whole.blocks for part in heading.split(", "))
    room = WIDTH - max(width(0), headings)
    part: list[int] = []
    used = 0
    for column in range(1, len(whole.names)):
        if part and used + width(column) > room:
            yield _columns(whole, part)
            part, used = [], 0
        part.append(column)
        used += width(column)
    yield _columns(whole, part)


def _columns(whole: Grid, chosen: Sequence[int]) -> Grid:
    at = (0, *chosen)
    return replace(
        whole,
        names=tuple(whole.names[i] for i in at),
        groups=tuple(whole.groups[i] for i in at),
        blocks=tuple((h, tuple(tuple(row[i] for i in at) for row in rows)) for h, rows in whole.blocks),
    )


def _markdown(view: View, whole: Grid, lines: Sequence[str]) -> str:
    head = [f"# {title(view)}", "", f"| {' | '.join(whole.names)} |"]
    head.append(f"|{'|'.join(['---', *['---:'] * (len(whole.names) - 1)])}|")
    for heading, rows in whole.blocks:
        if heading:
            head.append(f"| *{heading}* |{' |' * (len(whole.names) - 1)}")
        head += [f"| {' | '.join(_bold(c, '**', '<br>') for c in row)} |" for row in rows]
    return "\n".join([*head, "", *(f"- {n}" for n in lines)]) + "\n"


def _bold(cell: Text, mark: str, between: str) -> str:
    if not cell.bold:
        return between.join(cell.lines)
    return between.join([f"{mark}{cell.lines[0]}{mark}", *cell.lines[1:]])


def _latex(view: View, whole: Grid, lines: Sequence[str]) -> str:
    def cell(text: Text) -> str:
        first, *rest = [_escaped(line) for line in text.lines] or [""]
        # {}: a bracket right after a line break would be read as its length
        return r"\makecell{" + r"\\{}".join([rf"\textbf{{{first}}}" if text.bold else first, *rest]) + "}"

    count = len(whole.names)
    out = [
        f"% {title(view)}",
        "% needs booktabs and makecell",
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
    for a, b in (*pairs, ("Δ", r"$\Delta$"), ("−", "$-$"), ("✗", r"$\times$"), ("—", "---")):
        text = text.replace(a, b)
    return text


def table_html(view: View, whole: Grid) -> str:
    """The table alone, as an HTML fragment."""
    out = ["<table>", "<thead>"]
    if any(whole.groups):
        out.append("<tr>" + "".join(f"<th>{html.escape(g)}</th>" for g in whole.groups) + "</tr>")
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


def _html_cell(cell: Text) -> str:
    escaped = Text(tuple(map(html.escape, cell.lines)), cell.bold)
    return (
        "<br>".join([f"<b>{escaped.lines[0]}</b>" if cell.bold else escaped.lines[0], *escaped.lines[1:]])
        if cell.lines
        else ""
    )


def _html(view: View, whole: Grid, lines: Sequence[str]) -> str:
    body = "".join(f"<li>{html.escape(n)}</li>" for n in lines)
    name = html.escape(title(view))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title></head>\n<body>\n'
        f"<h1>{name}</h1>\n{table_html(view, whole)}\n<ul>{body}</ul>\n</body></html>\n"
    )


def _csv(view: View) -> str:
    """One line per cell, numbers as they are."""
    out = io.StringIO()
    writer = csv.DictWriter(out, CSV_FIELDS, restval="", lineterminator="\n")
    writer.writeheader()
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
            writer.writerow(row)
    return out.getvalue()


_RENDERERS = {"text": _text, "md": _markdown, "latex": _latex, "html": _html}
