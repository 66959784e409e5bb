"""Tables as text, Markdown, LaTeX and HTML, and records as CSV."""

from __future__ import annotations

import csv as csv_module
import html as html_module
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, islice
from textwrap import fill, wrap
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from kvbench.base.visible import visible
from kvbench.report.table import WIDTH, Bold, Table, lines

FORMULA = re.compile(r"[=+@\t]|-(?!\d)")
MARKUP = re.compile("<(?=[a-zA-Z/!?])(?!cell>)")
"""The beginning of a tag; results/cells/<cell>/ is what our own notes say."""
LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "{": r"\{",
        "}": r"\}",
        "$": r"\$",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "&": r"\&",
        "%": r"\%",
        "_": r"\_",
        "#": r"\#",
        "~": r"\textasciitilde{}",
        "Δ": r"$\Delta$",
        "−": "$-$",
        "✗": r"$\times$",
        "×": r"$\times$",
        "—": "---",
        "✓": r"$\checkmark$",
        "±": r"$\pm$",
        "∫": r"$\int$",
    }
)
"""What LaTeX has for signs that mean something to it, or that its fonts lack."""


def compose(tables: Sequence[Table], notes: Sequence[str], style: str) -> str:
    """Return tables with the notes below them as one text; ``style`` is text, md or latex."""
    return "\n".join([*(WRITERS[style](t) for t in tables), *(note(n, style) for n in notes)]) + "\n"


def note(text: str, style: str) -> str:
    """Return a note for below a table; ``style`` is text, md or latex."""
    text = visible(text)
    if style == "text":
        return fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)
    text = text.replace("\n", " ")
    return f"% {text}" if style == "latex" else f"- {MARKUP.sub('&lt;', text)}"


def text(table: Table, terminal: bool = False) -> str:
    """Return a table as text of at most WIDTH characters a line; ``terminal`` makes the best of a block bold."""
    rich_table = RichTable(
        box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True, header_style="none"
    )
    for i, head in enumerate(table.heads):
        rich_table.add_column(Text(visible(head)), justify="left" if i < table.left else "right")
    for heading, rows in table.blocks:
        if heading:
            rich_table.add_row(Text(visible("· " + heading.replace(", ", "\n  "))))
        for i, row in enumerate(rows):
            rich_table.add_row(*map(_styled, row), end_section=table.ruled or i == len(rows) - 1)
    out = io.StringIO()
    console = Console(
        width=WIDTH,
        file=out,
        color_system="standard" if terminal else None,
        force_terminal=terminal,
        legacy_windows=False,
    )
    console.print(rich_table)
    drawn_lines = [line.rstrip() for line in out.getvalue().splitlines()]
    return "\n".join([*_group_lines(table, drawn_lines), *drawn_lines]) + "\n"


def _styled(cell: str) -> Text:
    first, *rest = lines(cell)
    return Text("\n").join([Text(first, style="bold" if isinstance(cell, Bold) else ""), *map(Text, rest)])


def _group_lines(table: Table, drawn_lines: Sequence[str]) -> list[str]:
    """Return the lines with the groups' names, each ending where the head of its last column does."""
    if not table.spans():
        return []
    rule = next(i for i, line in enumerate(drawn_lines) if line.startswith("─"))
    ends = [0, *(match.end() for match in re.finditer(r"\S+(?: \S+)*", drawn_lines[rule - 1]))]
    places, column = [], 0
    for group, count in table.spans():
        last = column + count - 1
        start = max(ends[column - 1] + 2, ends[column] - table.width(column)) if column else 0
        if group:
            parts = wrap(group, max(1, ends[last] - start), break_long_words=False)
            start = min(start, ends[last] - max(map(len, parts)))
            places.append((start, ends[last] - start, parts))
        column = last + 1
    tallest = max(len(parts) for _, _, parts in places)
    out = [""] * tallest
    for start, width, parts in places:
        for i, line in enumerate(parts, tallest - len(parts)):
            out[i] = out[i].ljust(start) + line.center(width).rstrip()
    return out


def markdown(table: Table) -> str:
    """Return a table as Markdown; pipes and tags in it are escaped."""

    def row(cells: Iterable[str]) -> str:
        return f"| {' | '.join(cells)} |"

    def inert(text: str) -> str:
        return MARKUP.sub("&lt;", text.replace("|", r"\|"))

    def cell(text: str) -> str:
        first, *rest = lines(inert(text))
        first = f"**{first}**" if isinstance(text, Bold) else first
        return ("<br>" if table.breaks else " ").join([first, *rest])

    count = len(table.headers)
    out = [row(map(cell, table.headers)), f"|{'|'.join(['---'] * table.left + ['---:'] * (count - table.left))}|"]
    # Markdown has one line of heads, and no cell over several columns
    firsts = [[f"*{inert(group)}*" if group else ""] + [""] * (count - 1) for group, count in table.spans()]
    out += [row(chain.from_iterable(firsts))] if firsts else []
    for heading, rows in table.blocks:
        out += [f"| *{inert(heading)}* |{' |' * (count - 1)}"] if heading else []
        out += [row(map(cell, cells)) for cells in rows]
    return "\n".join(out) + "\n"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as Markdown with all columns to the left, for pages that are read and diffed."""
    return markdown(Table(tuple(heads), tuple(map(tuple, rows)), left=len(heads)))


def latex(table: Table) -> str:
    """Return a table as a LaTeX tabular of booktabs, with makecell where lines of cells stay lines."""

    def cell(text: str) -> str:
        first, *rest = lines(_escaped(text))
        first = rf"\textbf{{{first}}}" if isinstance(text, Bold) else first
        # {}: a bracket right after a line break would be read as its length
        return r"\makecell{" + r"\\{}".join([first, *rest]) + "}" if table.breaks else " ".join([first, *rest])

    count = len(table.headers)
    out = [rf"\begin{{tabular}}{{{'l' * table.left}{'r' * (count - table.left)}}}", r"\toprule"]
    spans = [
        rf"\multicolumn{{{n}}}{{c}}{{{_escaped(group)}}}" if group else " & ".join([""] * n)
        for group, n in table.spans()
    ]
    out += [" & ".join(spans) + r" \\"] if spans else []
    out.append(" & ".join(_escaped(h.replace("\n", " ")) for h in table.headers) + r" \\")
    for heading, rows in table.blocks:
        out.append(r"\midrule")
        out += [rf"\multicolumn{{{count}}}{{l}}{{\emph{{{_escaped(heading)}}}}} \\"] if heading else []
        out += [" & ".join(map(cell, row)) + r" \\" for row in rows]
    return "\n".join([*out, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _escaped(text: str) -> str:
    """Return a text that LaTeX prints as it is."""
    # a bracket right after a line break would be read as its length
    return re.sub(r"^\[", "{[}", visible(text).translate(LATEX))


def html(
    table: Table,
    kind: str = "",
    cell: Callable[[int, int], str] | None = None,
    columns: Sequence[str] = (),
    rows: Sequence[str] = (),
) -> str:
    """Return a table as an HTML element of class ``kind``. All data are escaped.

    ``cell`` returns the content at (row, column) in place of the cell's own text. ``columns`` and ``rows`` are their
    classes. Without ``columns``, the first cell of each row is its head.
    """

    def element(tag: str, content: str, css: str = "") -> str:
        return f'<{tag} class="{html_module.escape(css)}">{content}</{tag}>' if css else f"<{tag}>{content}</{tag}>"

    content = cell or (lambda row, column: html_lines(table.rows[row][column]))
    kinds = columns or [""] * len(table.headers)
    spans = "".join(f'<th colspan="{n}">{html_module.escape(name)}</th>' for name, n in table.spans())
    heads = (element("th", html_module.escape(h), k) for h, k in zip(table.headers, kinds, strict=True))
    out = [element("tr", spans, "groups")] if spans else []
    out = [f"<thead>{''.join(out)}<tr>{''.join(heads)}</tr></thead>"]
    numbers = iter(range(len(table.rows)))
    for heading, block in table.blocks:
        name = html_module.escape(heading)
        body = [f'<tr class="block"><th colspan="{len(kinds)}">{name}</th></tr>'] if heading else []
        for row in islice(numbers, len(block)):
            cells = (element("th" if i == 0 and not columns else "td", content(row, i), k) for i, k in enumerate(kinds))
            body.append(element("tr", "".join(cells), rows[row] if rows else ""))
        out.append(element("tbody", "\n".join(body)))
    return element("table", "\n".join(out), kind)


def html_lines(cell: str, small: bool = False) -> str:
    """Return the lines of a cell below each other as HTML; with ``small``, all but the first are small elements."""
    first, *rest = lines(html_module.escape(cell))
    first = f"<b>{first}</b>" if isinstance(cell, Bold) else first
    return first + "".join(f"<small>{line}</small>" if small else f"<br>{line}" for line in rest)


def csv(fields: Sequence[str], records: Iterable[Mapping[str, Any]]) -> str:
    """Return records as CSV under a line of ``fields``, without keys that are no field; numbers are not rounded.

    A text that a spreadsheet would take for a formula gets an apostrophe in front.
    """
    out = io.StringIO()
    writer = csv_module.DictWriter(out, fields, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()

    def inert(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return f"'{visible(value)}" if FORMULA.match(value) else visible(value)

    writer.writerows({field: inert(value) for field, value in record.items()} for record in records)
    return out.getvalue()


WRITERS: Mapping[str, Callable[[Table], str]] = {"text": text, "md": markdown, "latex": latex}
