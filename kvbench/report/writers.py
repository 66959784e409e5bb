"""Tables as text, Markdown, LaTeX and HTML, and records as CSV."""

from __future__ import annotations

import csv as csv_module
import html as html_module
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from textwrap import fill, wrap
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from kvbench.base.visible import visible
from kvbench.report.table import WIDTH, Bold, Table, split_lines

# spreadsheets compute a text that begins with one of these signs; a minus before a digit is a number
FORMULA = re.compile(r"[=+@\t]|-(?!\d)")
# the beginning of a tag; our own notes have the path results/cells/<cell>/, and its <cell> must stay readable
MARKUP = re.compile("<(?=[a-zA-Z/!?])(?!cell>)")
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
"""LaTeX's commands for the signs that it would read as commands, or that its fonts lack."""


def compose(tables: Sequence[Table], notes: Sequence[str], style: str, above: Sequence[str] = ()) -> str:
    """Return the lines ``above``, the tables and the notes below them as one text; ``style`` is text, md or latex."""
    parts = [note(sentence, style) for sentence in above]
    # an empty line separates the lines from the table; in LaTeX they are comments and need none
    if above and style != "latex":
        parts.append("")
    parts += [WRITERS[style](table) for table in tables]
    parts += [note(sentence, style) for sentence in notes]
    return "\n".join(parts) + "\n"


def note(text: str, style: str) -> str:
    """Return a note to stand below a table; ``style`` is text, md or latex."""
    text = visible(text)
    if style == "text":
        return fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)
    # a LaTeX comment and an item of a Markdown list end with their line
    text = text.replace("\n", " ")
    if style == "latex":
        return f"% {text}"
    return f"- {_strip_tags(text)}"


def text(table: Table, terminal: bool = False) -> str:
    """Return a table as text of at most WIDTH characters a line. With ``terminal`` the best values are bold."""
    rich_table = RichTable(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        collapse_padding=True,
        header_style="none",
        show_header=not table.bare,
    )
    for i, head in enumerate(table.heads):
        justify: Literal["left", "right"] = "left" if i < table.left else "right"
        # only the last column of a bare table, the verdicts, may break its texts
        stays_unbroken = table.bare and i < len(table.heads) - 1
        rich_table.add_column(Text(visible(head)), justify=justify, no_wrap=stays_unbroken)
    for heading, rows in table.blocks:
        if heading:
            # Table.folded leaves four characters for the point and the indentation
            rich_table.add_row(Text(visible("· " + heading.replace(", ", "\n  "))))
        for i, row in enumerate(rows):
            ends_block = i == len(rows) - 1
            rich_table.add_row(*map(_make_rich_text, row), end_section=table.ruled or ends_block)
    # rich draws into a string, so it cannot see whether a terminal will show the text
    color_system: Literal["standard"] | None = "standard" if terminal else None
    out = io.StringIO()
    console = Console(width=WIDTH, file=out, color_system=color_system, force_terminal=terminal, legacy_windows=False)
    console.print(rich_table)
    # rich fills every line with spaces up to the table's width
    drawn_lines = [line.rstrip() for line in out.getvalue().splitlines()]
    return "\n".join(_group_lines(table, drawn_lines) + drawn_lines) + "\n"


def _make_rich_text(cell: str) -> Text:
    """Return a cell for rich. The first line of a Bold cell is bold."""
    parts = [Text(line) for line in split_lines(cell)]
    if isinstance(cell, Bold):
        parts[0].stylize("bold")
    return Text("\n").join(parts)


def _group_lines(table: Table, drawn_lines: Sequence[str]) -> list[str]:
    """Return the lines that hold the names of column groups, to stand above the drawn table.

    ``drawn_lines`` is the table as rich drew it. rich knows no cell over several columns, so the names are placed here.
    Each name ends where the head of its group's last column ends. No head but the first column's may be empty.
    """
    if not table.spans():
        return []
    # the heads' last line stands right above the rule; a head there is a run of words with single spaces
    rule = next(i for i, line in enumerate(drawn_lines) if line.startswith("─"))
    # the end of each column's head; an empty head of the first column is no run of words
    ends = [] if table.heads[0] else [0]
    for match in re.finditer(r"\S+(?: \S+)*", drawn_lines[rule - 1]):
        ends.append(match.end())

    # (first character, number of characters, lines) of each group's name
    places: list[tuple[int, int, list[str]]] = []
    column = 0
    for group, count in table.spans():
        last = column + count - 1
        start = 0
        if column > 0:
            # start two spaces behind the column before; a head narrower than its column begins further to the right
            start = max(ends[column - 1] + 2, ends[column] - table.width(column))
        if group:
            # a name wider than its columns is wrapped (``wrap`` takes no width below 1). A single word that is still
            # wider begins further to the left
            parts = wrap(group, max(1, ends[last] - start), break_long_words=False)
            start = min(start, ends[last] - max(map(len, parts)))
            places.append((start, ends[last] - start, parts))
        column = last + 1

    # a name with fewer lines than the tallest stands at the bottom, right above the heads
    tallest = max(len(parts) for _, _, parts in places)
    out = [""] * tallest
    for start, width, parts in places:
        for i, line in enumerate(parts, tallest - len(parts)):
            out[i] = out[i].ljust(start) + line.center(width).rstrip()
    return out


def markdown(table: Table) -> str:
    """Return a table as Markdown. Pipes and tags in it are escaped."""

    def row(cells: Iterable[str]) -> str:
        return f"| {' | '.join(cells)} |"

    def inert(text: str) -> str:
        """Return a text in which Markdown finds neither a new cell nor a tag."""
        return _strip_tags(text.replace("|", r"\|"))

    def cell(text: str) -> str:
        """Return a cell's lines in one line of Markdown. The first line of a Bold cell is bold."""
        parts = split_lines(inert(text))
        if isinstance(text, Bold):
            parts[0] = f"**{parts[0]}**"
        line_break = "<br>" if table.breaks else " "
        return line_break.join(parts)

    count = len(table.headers)
    alignments = ["---"] * table.left + ["---:"] * (count - table.left)
    out = [row(map(cell, table.headers)), f"|{'|'.join(alignments)}|"]
    spans = table.spans()
    if spans:
        # Markdown has one line of heads and no cell over several columns, so a group's name stands in its first column
        names = [""] * count
        column = 0
        for group, columns in spans:
            if group:
                names[column] = f"*{inert(group)}*"
            column += columns
        out.append(row(names))
    for heading, rows in table.blocks:
        if heading:
            out.append(f"| *{inert(heading)}* |{' |' * (count - 1)}")
        out += [row(map(cell, cells)) for cells in rows]
    return "\n".join(out) + "\n"


def _strip_tags(text: str) -> str:
    """Return a text in which Markdown finds no HTML element."""
    return MARKUP.sub("&lt;", text)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as Markdown with all columns to the left, for pages that are read and diffed."""
    return markdown(Table(tuple(heads), tuple(map(tuple, rows)), left=len(heads)))


def latex(table: Table) -> str:
    """Return a table as a LaTeX tabular of booktabs, with makecell for cells that keep their lines."""

    def cell(text: str) -> str:
        """Return a cell as LaTeX. The first line of a Bold cell is bold."""
        parts = split_lines(_escape(text))
        if isinstance(text, Bold):
            parts[0] = rf"\textbf{{{parts[0]}}}"
        if not table.breaks:
            return " ".join(parts)
        # LaTeX would read a bracket right after a line break as its length; {} prevents this
        return r"\makecell{" + r"\\{}".join(parts) + "}"

    count = len(table.headers)
    alignments = "l" * table.left + "r" * (count - table.left)
    out = [rf"\begin{{tabular}}{{{alignments}}}", r"\toprule"]
    spans = []
    for group, columns in table.spans():
        if group:
            spans.append(rf"\multicolumn{{{columns}}}{{c}}{{{_escape(group)}}}")
        else:
            # columns without a group still need their separators
            spans.append(" & ".join([""] * columns))
    if spans:
        out.append(" & ".join(spans) + r" \\")
    heads = [_escape(header.replace("\n", " ")) for header in table.headers]
    out.append(" & ".join(heads) + r" \\")
    for heading, rows in table.blocks:
        out.append(r"\midrule")
        if heading:
            out.append(rf"\multicolumn{{{count}}}{{l}}{{\emph{{{_escape(heading)}}}}} \\")
        out += [" & ".join(map(cell, row)) + r" \\" for row in rows]
    out += [r"\bottomrule", r"\end{tabular}"]
    return "\n".join(out) + "\n"


def _escape(text: str) -> str:
    """Return a text escaped for LaTeX, so that it prints unchanged."""
    # LaTeX would read a bracket right after a line break as its length
    return re.sub(r"^\[", "{[}", visible(text).translate(LATEX))


def html(
    table: Table,
    kind: str = "",
    cell: Callable[[int, int], str] | None = None,
    columns: Sequence[str] = (),
    rows: Sequence[str] = (),
) -> str:
    """Return a table as an HTML element of class ``kind``. All data are escaped.

    ``cell`` returns the content at (row, column) in place of the cell's own text. ``columns`` and ``rows`` are the
    classes of columns and rows. Without ``columns``, the first cell of each row is its head.
    """

    def element(tag: str, content: str, css: str = "") -> str:
        """Return an HTML element of class ``css``; '' for no class."""
        if not css:
            return f"<{tag}>{content}</{tag}>"
        return f'<{tag} class="{html_module.escape(css)}">{content}</{tag}>'

    def content(row: int, column: int) -> str:
        """Return the HTML in a cell: the caller's, or else the cell's own text."""
        if cell is not None:
            return cell(row, column)
        return html_lines(table.rows[row][column])

    count = len(table.headers)
    classes = columns or [""] * count
    row_classes = rows or [""] * len(table.rows)
    spans = "".join(f'<th colspan="{n}">{html_module.escape(name)}</th>' for name, n in table.spans())
    head_rows = ""
    if spans:
        head_rows += element("tr", spans, "groups")
    heads = [element("th", html_module.escape(header), css) for header, css in zip(table.headers, classes, strict=True)]
    head_rows += element("tr", "".join(heads))
    out = [element("thead", head_rows)]
    # ``rows`` and ``cell`` number the rows of the whole table, through all blocks
    number = 0
    for heading, block in table.blocks:
        body = []
        if heading:
            body.append(f'<tr class="block"><th colspan="{count}">{html_module.escape(heading)}</th></tr>')
        for _ in block:
            cells = []
            for i, css in enumerate(classes):
                tag = "th" if i == 0 and not columns else "td"
                cells.append(element(tag, content(number, i), css))
            body.append(element("tr", "".join(cells), row_classes[number]))
            number += 1
        out.append(element("tbody", "\n".join(body)))
    return element("table", "\n".join(out), kind)


def html_lines(cell: str, small: bool = False) -> str:
    """Return the lines of a cell below each other as HTML; with ``small``, all but the first are small elements."""
    parts = split_lines(html_module.escape(cell))
    if isinstance(cell, Bold):
        parts[0] = f"<b>{parts[0]}</b>"
    if not small:
        return "<br>".join(parts)
    # the page's style sheet shows small elements as blocks, so they need no line break
    return parts[0] + "".join(f"<small>{line}</small>" for line in parts[1:])


def csv(fields: Sequence[str], records: Iterable[Mapping[str, object]]) -> str:
    """Return records as CSV under a line of ``fields``. Other keys are left out, and numbers are not rounded.

    A text that a spreadsheet would take for a formula gets an apostrophe in front.
    """
    out = io.StringIO()
    writer = csv_module.DictWriter(out, fields, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()

    def inert(value: object) -> object:
        """Return a value that no spreadsheet computes."""
        if not isinstance(value, str):
            return value
        if FORMULA.match(value):
            return f"'{visible(value)}"
        return visible(value)

    for record in records:
        writer.writerow({field: inert(value) for field, value in record.items()})
    return out.getvalue()


WRITERS: Mapping[str, Callable[[Table], str]] = {"text": text, "md": markdown, "latex": latex}
