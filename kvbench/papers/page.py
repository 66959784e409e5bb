"""A paper's table on the page: the paper's layout, our numbers beside the printed ones, in five formats."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from textwrap import fill, wrap

from rich import box
from rich.console import Console
from rich.table import Table

from kvbench.papers import standin
from kvbench.papers.view import Entry, View, best, by_block
from kvbench.render import WIDTH

SHOWS = ("both", "ours", "published", "delta")
WRONG = ("refused", "failed")
LABEL = 22
"""Characters of a line of a row's setting."""
FORMATS = ("text", "md", "csv", "latex", "html")
CSV_FIELDS = (
    *("paper", "table", "model", "method", "setting", "column", "status", "ours", "ci_low", "ci_high", "n", "of"),
    *("published", "mark", "delta", "stand_in", "ours_percent_of_full", "percent_low", "percent_high"),
    *("published_percent_of_full", "stated", "exact", "kept_percent", "published_kept_percent", "cell", "reason"),
)


@dataclass(frozen=True)
class Text:
    """One cell as text, line by line; the first is bold where it is the best of its block."""

    lines: tuple[str, ...]
    bold: bool = False


@dataclass(frozen=True)
class Grid:
    """A table of text: groups and names of columns, and blocks of rows below headings."""

    names: tuple[str, ...]
    groups: tuple[str, ...]
    blocks: tuple[tuple[str, tuple[tuple[Text, ...], ...]], ...]


def render(view: View, style: str = "text", show: str = "both") -> str:
    """The table in one of FORMATS, showing one of SHOWS, with what the reader must know below it."""
    if style == "csv":
        return _csv(view)
    return _RENDERERS[style](view, grid(view, show), notes(view))


def grid(view: View, show: str) -> Grid:
    """The cells as text: one of SHOWS, or ``beside``, the printed side in the unit of ours."""
    stand_in = view.ours.stand_in
    printed = show in ("published", "beside")
    shown = "published" if printed else "relative" if stand_in else "ours"
    blocks = []
    for heading, indices in by_block(view.rows, view.ours.declared.blocks).items():
        compressed = [i for i in indices if view.rows[i][0].row.method != "full"]
        top = [best([view.rows[i][1][c] for i in compressed], shown) for c in range(len(view.columns))]
        rows = []
        for i in indices:
            line, entries = view.rows[i]
            label = Text((line.row.method, *(_facts(line.row.setting, heading))))
            if line.row.method == "full":  # its share of itself needs no interval
                entries = tuple(replace(e, relative_ci=None) for e in entries)
            cells = [
                _cell(e, show, stand_in, i in compressed and top[c] is not None and getattr(e, shown) == top[c])
                for c, e in enumerate(entries)
            ]
            rows.append((label, *cells))
        blocks.append((heading, tuple(rows)))
    names = tuple(c.name for c in view.columns)
    return Grid(("", *names), ("", *(c.group for c in view.columns)), tuple(blocks))


def _facts(setting: str, heading: str) -> Iterator[str]:
    """The parts of a setting that the block's heading does not say already."""
    parts = [p for p in setting.split(";") if p and p.replace("=", " ", 1) not in heading.split(", ")]
    yield from wrap(" ".join(parts), LABEL, break_long_words=False)


def _cell(entry: Entry, show: str, stand_in: bool, bold: bool) -> Text:
    ours = _ours(entry, stand_in)
    printed = _printed(entry, stand_in and show != "published")
    if show == "ours":
        lines = [*ours, _kept(entry.budget)] if entry.published_budget is not None else ours
    elif show in ("published", "beside"):
        lines = [printed, _kept(entry.published_budget)]
    elif show == "delta":
        lines = [_delta(entry, stand_in)]
    else:
        lines = [*ours, f"({printed})" if stand_in or not printed else _beside(entry, printed)]
        if entry.published_budget is not None:
            lines.append(f"{_kept(entry.budget)} ({entry.published_budget:.0f}%)".strip())
    return Text(tuple(line for line in lines if line not in ("", "()")), bold)


def _kept(percent: float | None) -> str:
    return "" if percent is None else f"kept {percent:.0f}%"


def _ours(entry: Entry, stand_in: bool) -> list[str]:
    if entry.status == "none":
        return [""]
    if entry.status in WRONG:
        return ["✗"]
    value, ci = (entry.relative, entry.relative_ci) if stand_in else (entry.ours, entry.ci)
    if entry.status == "missing" or value is None:
        return ["" if entry.exact else "—"]
    digits = 1 if stand_in else 2
    interval = f"[{ci[0]:.0f}, {ci[1]:.0f}]" if ci else ""
    return [_number(value, digits), interval]


def _printed(entry: Entry, relative: bool) -> str:
    value = entry.published_relative if relative else entry.published
    if entry.status == "none" and value is None:
        return ""
    if relative and value is None and entry.published is not None:
        return f"{_number(entry.published, 2)}{entry.mark} abs"
    text = entry.printed if entry.printed and not relative else _number(value, 1 if relative else 2)
    text += entry.mark
    if entry.exact and not relative:
        text += f" {entry.exact}"
    if entry.stated is not None and not relative:
        text += f" stated {_number(entry.stated, 2)}"
    return text


def _beside(entry: Entry, printed: str) -> str:
    return f"({printed}, Δ {_number(entry.delta, 2, sign=True)})" if entry.delta is not None else f"({printed})"


def _delta(entry: Entry, stand_in: bool) -> str:
    """Ours minus the paper's; on a stand-in of the shares of the full cache."""
    if entry.status in ("none", *WRONG):
        return "" if entry.status == "none" else "✗"
    if not stand_in:
        return _number(entry.delta, 2, sign=True)
    if entry.relative is None or entry.published_relative is None:
        return "—"
    return _number(entry.relative - entry.published_relative, 1, sign=True)


def notes(view: View) -> list[str]:
    """What the reader must know: what the numbers are, n, marks, refusals, the mapping of a stand-in."""
    ours, declared = view.ours, view.ours.declared
    entries = [e for _, row in view.rows for e in row]
    lines = []
    if ours.run is None:
        pass
    elif ours.stand_in:
        lines.append(
            f"Stand-in: {ours.model} is none of the paper's models ({', '.join(declared.models())}). Numbers are per "
            "cent of its own full cache, in brackets those of the paper's models; compare orders, not values."
        )
        if any(e.published is not None and e.published_relative is None for e in entries):
            lines.append("abs: as printed, since the paper has no full-cache row of that model.")
        if ours.model == standin.MODEL and ours.tasks:
            lines.append(f"Tasks of the tiny suite: {standin.mapping(ours.tasks)}. Averages count each task once.")
            if declared.length != standin.PROMPT:
                lines.append(
                    f"Numbers of tokens are scaled by {standin.PROMPT}/{declared.length}: 512 there are "
                    f"{round(512 * standin.PROMPT / declared.length)} here; windows likewise, down to 2."
                )
    else:
        lines.append("Ours (published, Δ ours minus published); averages are computed from the cells.")
    counts = sorted({e.n for e in entries if e.n})
    if counts:
        lines.append(
            f"n = {', '.join(map(str, counts))} of {max(e.of for e in entries)} examples a cell; [a, b]: 95 % "
            "bootstrap interval" + (" of paired examples." if ours.stand_in else ".")
        )
    for mark, text in (("?", "suspect"), ("~", "repaired")):
        if any(e.mark == mark for e in entries):
            lines.append(f"{mark}: the printed value is {text} (kvbench/papers/{declared.paper}).")
    wrong = sum(e.stated is not None for e in entries)
    if wrong:
        lines.append(f"{wrong} averages that the paper states do not follow from its cells (--show published).")
    recomputed = [e.exact for e in entries if e.exact]
    if recomputed:
        right = recomputed.count("✓")
        lines.append(
            f"✓: {right} of {len(recomputed)} printed values that need no model follow from what they rest on."
        )
    refused = {e.reason: line.row.name for line, row in view.rows for e in row if e.status in WRONG}
    lines += [f"✗ {name}: {reason}" for reason, name in refused.items()]
    skipped = list(dict.fromkeys(line.skipped for line, _ in view.rows if line.skipped))
    if skipped:
        lines.append(f"— not run here: {', '.join(skipped)}.")
    if ours.absent:
        lines.append(f"— datasets that are not here: {', '.join(ours.absent)} (python -m kvbench data status).")
    return [*lines, *declared.sources]


def title(view: View) -> str:
    """One line: which table, what it shows, on which model."""
    declared = view.ours.declared
    if view.ours.run is None:
        return f"{declared.id}: {declared.title} — as printed"
    return f"{declared.id}: {declared.title} — {view.ours.model}{' (stand-in)' if view.ours.stand_in else ''}"


def _text(view: View, whole: Grid, lines: Sequence[str]) -> str:
    parts = [title(view), ""]
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
        out.append(" & ".join(_spans(whole.groups)) + r" \\")
    out += [" & ".join(_escaped(n) for n in whole.names) + r" \\"]
    for heading, rows in whole.blocks:
        out.append(r"\midrule")
        if heading:
            out.append(rf"\multicolumn{{{count}}}{{l}}{{\emph{{{_escaped(heading)}}}}} \\")
        out += [" & ".join(cell(c) for c in row) + r" \\" for row in rows]
    return "\n".join([*out, r"\bottomrule", r"\end{tabular}", *(f"% {n}" for n in lines)]) + "\n"


def _spans(groups: Sequence[str]) -> Iterator[str]:
    """Runs of equal groups as multicolumns."""
    at = 0
    while at < len(groups):
        end = at
        while end < len(groups) and groups[end] == groups[at]:
            end += 1
        yield (
            rf"\multicolumn{{{end - at}}}{{c}}{{{_escaped(groups[at])}}}"
            if groups[at]
            else " & ".join([""] * (end - at))
        )
        at = end


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
                "delta": None if view.ours.stand_in else e.delta,
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
            writer.writerow(row)
    return out.getvalue()


def _number(value: float | None, digits: int, sign: bool = False) -> str:
    if value is None:
        return "—"
    return f"{value:{'+' if sign else ''}.{digits}f}".replace("-", "−")


_RENDERERS = {"text": _text, "md": _markdown, "latex": _latex, "html": _html}
