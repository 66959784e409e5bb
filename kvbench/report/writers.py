"""Tables as text, Markdown, LaTeX and HTML, and records as CSV."""

from __future__ import annotations

import csv as csv_module
import html as html_module
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from textwrap import fill, wrap
from typing import Literal, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from kvbench.base.visible import visible
from kvbench.report.table import GAP, WIDTH, Bold, Table, split_lines

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
    write_table = WRITERS[style]
    parts = [note(sentence, style) for sentence in above]
    # an empty line separates the lines from the table; in LaTeX they are comments and need none
    if above and style != "latex":
        parts.append("")
    parts += [write_table(table) for table in tables]
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
    places = _place_groups(table, _find_head_ends(table, drawn_lines))
    # a name with fewer lines than the tallest stands at the bottom, right above the heads
    tallest = max(len(place.lines) for place in places)
    group_lines = [""] * tallest
    for place in places:
        for i, text in enumerate(place.lines, start=tallest - len(place.lines)):
            group_lines[i] = group_lines[i].ljust(place.start) + text.center(place.width).rstrip()
    return group_lines


def _find_head_ends(table: Table, drawn_lines: Sequence[str]) -> list[int]:
    """Return for each column the number of characters from the line's start to the end of the column's head."""
    # an empty head of the first column shows no text to find below
    ends = [] if table.heads[0] else [0]
    # the heads' last line stands right above the rule
    rule = next(i for i, line in enumerate(drawn_lines) if line.startswith("─"))
    # a head there is a run of words with single spaces, and more spaces stand between two columns
    for match in re.finditer(r"\S+(?: \S+)*", drawn_lines[rule - 1]):
        ends.append(match.end())
    return ends


class _GroupPlace(NamedTuple):
    """The place of a column group's name above a drawn table.

    start: the number of characters before the name.
    width: the number of characters in which the name's lines are centred.
    lines: the lines of the name.
    """

    start: int
    width: int
    lines: list[str]


def _place_groups(table: Table, ends: Sequence[int]) -> list[_GroupPlace]:
    """Return the place of each column group that has a name. ``ends`` are the ends of the columns' heads."""
    places = []
    column = 0
    for group, count in table.spans():
        last = column + count - 1
        end = ends[last]
        start = 0
        if column > 0:
            # start behind the column before; a head narrower than its column begins further to the right
            start = max(ends[column - 1] + GAP, ends[column] - table.width(column))
        if group:
            # a name wider than its columns is wrapped; ``wrap`` takes no width below 1
            name_lines = wrap(group, max(1, end - start), break_long_words=False)
            # a single word that is still wider begins further to the left
            start = min(start, end - max(map(len, name_lines)))
            places.append(_GroupPlace(start, end - start, name_lines))
        column = last + 1
    return places


def markdown(table: Table) -> str:
    """Return a table as Markdown. Pipes and tags in it are escaped."""

    def join_row(cells: Iterable[str]) -> str:
        return f"| {' | '.join(cells)} |"

    def write_cell(text: str) -> str:
        """Return a cell's lines in one line of Markdown. The first line of a Bold cell is bold."""
        parts = split_lines(_escape_markdown(text))
        if isinstance(text, Bold):
            parts[0] = f"**{parts[0]}**"
        line_break = "<br>" if table.breaks else " "
        return line_break.join(parts)

    count = len(table.headers)
    alignments = ["---"] * table.left + ["---:"] * (count - table.left)
    out = [join_row(map(write_cell, table.headers)), f"|{'|'.join(alignments)}|"]
    spans = table.spans()
    if spans:
        # Markdown has one line of heads and no cell over several columns, so a group's name stands in its first column
        names = [""] * count
        column = 0
        for group, columns in spans:
            if group:
                names[column] = f"*{_escape_markdown(group)}*"
            column += columns
        out.append(join_row(names))
    for heading, rows in table.blocks:
        if heading:
            out.append(f"| *{_escape_markdown(heading)}* |{' |' * (count - 1)}")
        out += [join_row(map(write_cell, cells)) for cells in rows]
    return "\n".join(out) + "\n"


def _escape_markdown(text: str) -> str:
    """Return a text in which Markdown finds neither a new cell nor a tag."""
    return _strip_tags(text.replace("|", r"\|"))


def _strip_tags(text: str) -> str:
    """Return a text in which Markdown finds no HTML element."""
    return MARKUP.sub("&lt;", text)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as Markdown with all columns to the left, for pages that are read and diffed."""
    return markdown(Table(tuple(heads), tuple(map(tuple, rows)), left=len(heads)))


def latex(table: Table) -> str:
    """Return a table as a LaTeX tabular of booktabs, with makecell for cells that keep their lines."""

    def write_cell(text: str) -> str:
        """Return a cell as LaTeX. The first line of a Bold cell is bold."""
        parts = split_lines(_escape_latex(text))
        if isinstance(text, Bold):
            parts[0] = rf"\textbf{{{parts[0]}}}"
        if not table.breaks:
            return " ".join(parts)
        # LaTeX would read a bracket right after a line break as its length; {} prevents this
        return r"\makecell{" + r"\\{}".join(parts) + "}"

    count = len(table.headers)
    alignments = "l" * table.left + "r" * (count - table.left)
    out = [rf"\begin{{tabular}}{{{alignments}}}", r"\toprule"]
    group_cells = []
    for group, columns in table.spans():
        if group:
            group_cells.append(rf"\multicolumn{{{columns}}}{{c}}{{{_escape_latex(group)}}}")
        else:
            # columns without a group still need their separators
            group_cells.append(" & ".join([""] * columns))
    if group_cells:
        out.append(" & ".join(group_cells) + r" \\")
    heads = [_escape_latex(header.replace("\n", " ")) for header in table.headers]
    out.append(" & ".join(heads) + r" \\")
    for heading, rows in table.blocks:
        out.append(r"\midrule")
        if heading:
            out.append(rf"\multicolumn{{{count}}}{{l}}{{\emph{{{_escape_latex(heading)}}}}} \\")
        out += [" & ".join(map(write_cell, row)) + r" \\" for row in rows]
    out += [r"\bottomrule", r"\end{tabular}"]
    return "\n".join(out) + "\n"


def _escape_latex(text: str) -> str:
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

    cell: returns the HTML at (row, column) in place of the cell's own text. Rows are numbered through all blocks.
    columns: the class of each column, '' for none. Without them, the first cell of each row is its head.
    rows: the class of each row, numbered through all blocks.
    """

    def write_content(row: int, column: int) -> str:
        if cell is not None:
            return cell(row, column)
        return html_lines(table.rows[row][column])

    count = len(table.headers)
    column_classes = columns or [""] * count
    row_classes = rows or [""] * len(table.rows)
    out = [_write_html_head(table, column_classes)]
    number = 0
    for heading, block in table.blocks:
        body = []
        if heading:
            body.append(f'<tr class="block"><th colspan="{count}">{html_module.escape(heading)}</th></tr>')
        for _ in block:
            cells = []
            for i, column_class in enumerate(column_classes):
                tag = "th" if i == 0 and not columns else "td"
                cells.append(_write_element(tag, write_content(number, i), column_class))
            body.append(_write_element("tr", "".join(cells), row_classes[number]))
            number += 1
        out.append(_write_element("tbody", "\n".join(body)))
    return _write_element("table", "\n".join(out), kind)


def _write_html_head(table: Table, column_classes: Sequence[str]) -> str:
    """Return the head of an HTML table: the names of column groups if there are any, and the heads of the columns."""
    head_rows = ""
    groups = "".join(f'<th colspan="{count}">{html_module.escape(name)}</th>' for name, count in table.spans())
    if groups:
        head_rows += _write_element("tr", groups, "groups")
    heads = []
    for header, column_class in zip(table.headers, column_classes, strict=True):
        heads.append(_write_element("th", html_module.escape(header), column_class))
    head_rows += _write_element("tr", "".join(heads))
    return _write_element("thead", head_rows)


def _write_element(tag: str, content: str, css_class: str = "") -> str:
    """Return an HTML element around ``content``, which is HTML already, with the class ``css_class``; '' for none."""
    if not css_class:
        return f"<{tag}>{content}</{tag}>"
    return f'<{tag} class="{html_module.escape(css_class)}">{content}</{tag}>'


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
    for record in records:
        writer.writerow({field: _disarm_formula(value) for field, value in record.items()})
    return out.getvalue()


def _disarm_formula(value: object) -> object:
    """Return a value that no spreadsheet computes: a text like a formula gets an apostrophe in front."""
    if not isinstance(value, str):
        return value
    if FORMULA.match(value):
        return f"'{visible(value)}"
    return visible(value)


WRITERS: Mapping[str, Callable[[Table], str]] = {"text": text, "md": markdown, "latex": latex}
