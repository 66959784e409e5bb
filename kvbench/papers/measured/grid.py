"""A paper's table as text: the paper's layout, our numbers beside the printed ones, and what the reader must know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from textwrap import wrap

from kvbench.papers.measured import timing_text
from kvbench.papers.measured.cell_view import OF_ALL, WIDE, CellView, View
from kvbench.papers.measured.our_table import OurTable, TableLine
from kvbench.papers.spec import stand_ins
from kvbench.papers.spec.published import FRACTION
from kvbench.papers.spec.row_knobs import parse
from kvbench.papers.spec.table_spec import MEANS, SCORE
from kvbench.papers.spec.workloads import labels
from kvbench.report.render import EVICTING, EVICTS
from kvbench.report.summary import MANY_EMPTY
from kvbench.report.table import Bold, Table
from kvbench.store.provenance import local_changes
from kvbench.tasks.metrics.stats import FEWEST, FLOOR

SHOWS = ("both", "ours", "published", "delta")
WRONG = ("refused", "failed")
UNLIKE = "°"
"""Marks a difference to a score that was made under other conditions."""
LABEL = 22
"""Characters of a line of a row's setting."""

Line = tuple[TableLine, tuple[CellView, ...]]
"""A row of a view with its entries."""


def grid(view: View, show: str) -> Table:
    """Return the cells as text: one of SHOWS, or ``beside``, the printed side in the unit of ours."""
    stand_in, timings = view.ours.stand_in, view.ours.timings
    printed = show in ("published", "beside")
    field = "relative" if stand_in else "ours"
    if printed:
        field = "published"
    if timings is not None:
        field = "published_relative" if printed else "relative"
    base = "full" if timings is None else timings.bench.base
    headings: dict[int, str] = {}
    rows: list[tuple[str, ...]] = []
    for heading, block in _by_block(view.rows, view.ours.declared.blocks).items():
        headings[len(rows)] = heading
        compressed = [(line, entries) for line, entries in block if line.row.method != base]
        best_values = [_best(compressed, i, column.name, field) for i, column in enumerate(view.columns)]
        differing = [_counts_differ(block, i) for i in range(len(view.columns))]
        for line, entries in block:
            evicts = line.chain is not None and line.chain.evicts and show != "published"
            # what the heading of its block says does not stand in a row, too
            parts = [
                p for p in line.row.setting.split(";") if p and _heading(*p.split("=", 1)) not in heading.split(", ")
            ]
            setting = wrap(" ".join(parts), LABEL, break_long_words=False)
            label = [line.row.method, *setting, *([EVICTS] if evicts else [])]
            cells = []
            for e, best, differs in zip(entries, best_values, differing, strict=True):
                if line.row.method == "full":  # its share of itself needs no interval
                    e = replace(e, relative_ci=None)
                cell_lines = timing_text.lines(e, show) if e.timed is not None else _cell(e, show, stand_in)
                if e.n and differs and not e.few and show in ("both", "ours"):
                    cell_lines.append(f"n {e.n}")
                text = "\n".join(cell_lines)
                says_something = printed or not e.unchanged
                bold = line.row.method != base and best is not None and getattr(e, field) == best and says_something
                cells.append(Bold(text) if bold else text)
            rows.append(("\n".join(label), *cells))
    names = ("", *(c.name if timings is None else timing_text.name(timings, c.name) for c in view.columns))
    table = Table(names, tuple(rows), breaks=True, groups=("", *(c.group for c in view.columns)), headings=headings)
    spans = [count for group, count in table.spans() if group]
    # what is one group, or one column, says nothing
    return table if len(spans) > 1 and max(spans) > 1 else replace(table, groups=())


def _counts_differ(rows: Sequence[Line], index: int) -> bool:
    """Tell whether rows of a block rest on different numbers of examples in a column."""
    counts = {entries[index].n for _, entries in rows}
    return len(counts - {0}) > 1


def _best(rows: Sequence[Line], index: int, column: str, field: str) -> float | None:
    """Return the best value of a field (``ours``, ``relative``, ``published``) in a block's column, or None.

    Two values are needed to have a best one. Less is better of some times, and of perplexities, but not of their
    shares, which are inverse.
    """
    entries = [entries[index] for _, entries in rows]
    if field != "published":
        entries = [e for e in entries if not e.unchanged and not e.few and not e.wide]
        if len({e.n for e in entries if e.n}) > 1:  # the best of other examples is not the best
            return None
    values = [value for e in entries if (value := getattr(e, field)) is not None]
    if len(values) < 2:
        return None
    printed = (line.row.cells.get(column) for line, _ in rows if field in ("ours", "published"))
    less_is_better = any(e.timed is not None and e.timed.lower for e in entries)
    less_is_better |= any(c is not None and c.metric == "perplexity" for c in printed)
    return min(values) if less_is_better else max(values)


def _cell(entry: CellView, show: str, stand_in: bool) -> list[str]:
    """Return the lines of a cell that is a score."""
    ours = _ours(entry, stand_in)
    printed = _printed(entry, stand_in and show != "published")
    difference = _number(entry.delta, 2, sign=True) + (UNLIKE if entry.unlike else "")
    kept, printed_kept = ("" if b is None else f"{b:.0f}%" for b in (entry.budget, entry.published_budget))
    if show == "ours":
        lines = [*ours, kept and f"kept {kept}"] if entry.budgeted else ours
    elif show in ("published", "beside"):
        lines = [printed, printed_kept and f"kept {printed_kept}"]
    elif show == "delta":
        # of a stand-in a difference says nothing
        lines = ours if entry.status in ("none", *WRONG) else ["—" if stand_in else difference]
    else:
        delta = "" if stand_in or not printed or entry.delta is None else f", Δ {difference}"
        lines = [*ours, f"({printed}{delta})"]
        if entry.budgeted:
            lines.append(" ".join(filter(None, (kept and f"kept {kept}", printed_kept and f"({printed_kept})"))))
    return [line for line in lines if line not in ("", "()")]


def _ours(entry: CellView, stand_in: bool) -> list[str]:
    """Return our side of a cell as lines: its number and, if known, its interval; or a sign in place of a number."""
    if entry.status == "none":
        return [""]
    if entry.status in WRONG:
        return ["✗"]
    if stand_in and entry.floor:
        return ["floor"]
    if entry.unchanged:
        return ["not", "compressed"]
    if entry.few:
        return [f"n {entry.n}"]
    if entry.wide:
        return ["wide"]
    value, ci = (entry.relative, entry.relative_ci) if stand_in else (entry.ours, entry.ci)
    if entry.status == "missing" or value is None:
        return ["" if entry.exact else "—"]
    digits = 1 if stand_in else 2
    interval = f"[{ci[0]:.0f}, {ci[1]:.0f}]" if ci else ""
    return [_number(value, digits), interval]


def _printed(entry: CellView, relative: bool) -> str:
    """Return the text of the printed side of a cell, with its marks."""
    value = entry.published_relative if relative else entry.published
    if entry.status == "none" and value is None:
        return ""
    if relative and value is None and entry.published is not None:
        return f"{_number(entry.published, 2)}{entry.mark} abs"
    if value is None and not entry.printed:
        return ""
    as_printed = not relative or value == entry.published  # of some tables the printed values are shares
    text = entry.printed if entry.printed and as_printed else _number(value, 1 if relative else 2)
    text += entry.mark
    if entry.exact and as_printed:
        text += f" {entry.exact}"
    if entry.stated is not None and not relative:
        text += f" stated {_number(entry.stated, 2)}"
    return text


def notes(view: View, show: str = "both") -> list[str]:
    """Return the notes for readers of one of SHOWS, or ``beside``: origin of numbers, n, marks and refusals."""
    ours, declared = view.ours, view.ours.declared
    entries = [e for _, row in view.rows for e in row]
    if ours.timings is not None:
        return [*timing_text.notes(ours.timings, entries, show), *declared.sources]
    lines = list(_ours_notes(view, entries, show)) if ours.run is not None and show != "published" else []
    if show in ("both", "beside", "published"):
        lines += _printed_notes(view, entries, ours.stand_in and show != "published")
    if show == "published":
        return [*lines, *declared.sources]
    refused = {e.reason: line.row.name for line, row in view.rows for e in row if e.status in WRONG}
    lines += [f"✗ {name}: {reason}" for reason, name in refused.items()]
    skipped = list(dict.fromkeys(line.skipped for line, _ in view.rows if line.skipped))
    if skipped:
        lines.append(f"— not run here: {', '.join(skipped)}.")
    # columns of scores that could be read and have a row without a number
    waiting = [
        column.name
        for i, column in enumerate(view.columns)
        if ours.run is not None and column.what == SCORE and column.dataset not in MEANS
        if any(line.chain and row[i].status == "missing" and not row[i].reason for line, row in view.rows)
    ]
    if waiting:
        lines.append(f"— not measured yet: {', '.join(waiting)}.")
    if show != "published" and any(e.unchanged for e in entries):
        lines.append("not compressed: tokens, bytes and answers are the full cache's, so the number says nothing.")
    lines += [f"— {what}." for what in absent(ours)]
    return [*lines, *declared.sources]


def absent(ours: OurTable) -> list[str]:
    """Return each dataset that cannot be read here, with the reason."""
    tags = labels(w.whole for w in ours.absent)
    return [f"{w.dataset} {tags[w.whole]}".strip() + f" is not here: {why}" for w, why in ours.absent.items()]


def _ours_notes(view: View, entries: Sequence[CellView], show: str) -> Iterator[str]:
    """Yield notes on our numbers: their unit, the data that were read, and n."""
    ours = view.ours
    printed = any(e.published is not None for e in entries)
    if ours.model == stand_ins.MODEL:
        yield "Model tiny: numbers are per cent of its own full cache. What the paper prints: --show published."
    elif ours.stand_in:
        positions = {
            "both": ", in brackets those of the paper's models",
            "beside": ", below them those of the paper's models",
        }
        yield (
            f"Stand-in model, the paper's data: {ours.model} is none of the paper's models "
            f"({', '.join(ours.declared.models())}). Numbers are per cent of its own full cache"
            f"{positions.get(show, '')}; compare orders, not values."
        )
        if show == "delta":
            yield "—: differences to what a paper prints say nothing on a model that is none of its own."
        if show in positions and any(e.published is not None and e.published_relative is None for e in entries):
            yield "abs: as printed, since the paper has no full-cache row of that model."
        yield from _full_scores(view)
    else:
        texts = {"ours": "Ours", "delta": "Δ: ours minus published"}
        yield f"{texts.get(show, 'Ours (published, Δ ours minus published)')}; averages are computed from the cells."
    if printed and FRACTION in {c.unit for line, _ in view.rows for c in line.row.cells.values()}:
        yield "What the paper prints as fractions stands here in per cent, as ours."
    yield from ours.notes
    if ours.model != stand_ins.MODEL and ours.run is not None:  # of tiny's tasks the title says enough
        yield from (f"{note}." for note in dict.fromkeys(g.task.note for g in ours.run.groups if g.task.note))
    unlike = dict.fromkeys(reason for e in entries for reason in e.unlike)
    if unlike and show in ("both", "delta"):
        yield f"{UNLIKE}: other conditions than the paper's, so that the difference is indicative: {'; '.join(unlike)}."
    counts = sorted({e.n for e in entries if e.n and e.cell})  # an average has the sum of its cells'
    if counts:
        paired = " of paired examples" if ours.stand_in else ""
        dtype = "" if ours.run is None else f", {ours.run.dtype}"
        interval = "" if show == "delta" else f"; [a, b]: 95 % interval{paired}"
        sizes = sorted({e.of for e in entries if e.n and e.cell})
        total = str(sizes[-1]) if sizes[0] == sizes[-1] else f"{sizes[0]} to {sizes[-1]}"
        yield f"n = {', '.join(map(str, counts))} of {total} examples a cell{dtype}{interval}."
    if any(e.few for e in entries):
        yield f"n in place of a share: fewer than {FEWEST} examples say nothing."
    if any(e.wide and not e.few for e in entries):
        yield f"wide: the interval of the share is wider than {WIDE:g} percentage points, so that it says nothing."
    yield from _empty_answers(view)
    if ours.run is not None and (changed := local_changes(ours.run.records())):
        yield changed
    if any(line.chain is not None and line.chain.evicts for line in ours.lines):
        yield f"{EVICTS}: {EVICTING}"


def _full_scores(view: View) -> Iterator[str]:
    """Yield the full cache's own scores, of which the numbers are shares, and a note on those too low for that."""
    full_entries: dict[str, CellView] = {}
    for line, row in view.rows:
        for column, e in zip(view.columns, row, strict=True):
            parts = view.ours.full(line, column) if e.n and e.full is not None and column.what == SCORE else ()
            if parts:
                name = f"{column.dataset} {parts[0][0].column.partition(' ')[2]}".strip()
                full_entries[name] = max(e, full_entries.get(name, e), key=lambda entry: entry.n)
    texts = [f"{name} {_number(e.full, 1)}" for name, e in full_entries.items()]
    if texts:
        yield f"The full cache's own scores on the same examples: {', '.join(texts)}."
    if any(e.floor for _, row in view.rows for e in row):
        count = "; avg is over the others, avg/all over all" if OF_ALL in view.columns else ""
        yield (
            f"floor: the full cache scores less than {100 * FLOOR:g} points of 100 above empty answers and guessing, "
            f"or its interval reaches them: a share of it says nothing{count}."
        )


def _empty_answers(view: View) -> Iterator[str]:
    """Yield a note on the datasets of which many of the full cache's answers are empty."""
    most: dict[str, CellView] = {}
    for _, row in view.rows:
        for column, e in zip(view.columns, row, strict=True):
            if e.n and e.empty >= MANY_EMPTY * e.n and (column.dataset not in most or e.n > most[column.dataset].n):
                most[column.dataset] = e
    if most:
        counts = ", ".join(f"{name} {e.empty} of {e.n}" for name, e in most.items())
        yield f"Answers of the full cache that are empty: {counts}. Such a column shows when a model falls silent."


def _printed_notes(view: View, entries: Sequence[CellView], relative: bool) -> Iterator[str]:
    """Yield notes that explain the marks of printed values, and averages that the paper states against its cells."""
    paper = view.ours.declared.paper
    for mark, text in (("?", "suspect"), ("~", "repaired")):
        if any(e.mark == mark for e in entries):
            yield f"{mark}: the printed value is {text} (kvbench/papers/data/{paper})."
    stated = [(line.row, e) for line, row in view.rows for e in row if e.stated is not None]
    if stated and relative:  # a share has no room for it
        several = len(view.ours.declared.models()) > 1
        names = (f"{row.model} {row.name}" if several else row.name for row, _ in stated)
        values = (f"{_number(e.stated, 2)} for {_number(e.published, 2)}" for _, e in stated)
        corrections = ", ".join(f"{value} ({name})" for value, name in zip(values, names, strict=True))
        yield f"Averages that the paper states, for what its cells give: {corrections}."
    elif stated:
        yield "stated: the average that the paper states, where its cells give another."
    recomputed = [e.exact for e in entries if e.exact]
    if recomputed:
        right = recomputed.count("✓")
        yield f"✓: {right} of {len(recomputed)} printed values that need no model follow from what they rest on."


def title(view: View, show: str = "both") -> str:
    """Return one line: the table, its title, and our model."""
    declared, timings = view.ours.declared, view.ours.timings
    start = f"{declared.id}: {declared.title}"
    if show == "published" or (view.ours.run is None and (timings is None or not timings.there)):
        return f"{start} — as printed"
    return f"{start} — {view.ours.model}{' (stand-in)' if view.ours.stand_in else ''}"


def _number(value: float | None, digits: int, sign: bool = False) -> str:
    """Format a number with a minus sign of its own width; None is a dash."""
    if value is None:
        return "—"
    return f"{value:{'+' if sign else ''}.{digits}f}".replace("-", "−")


def _heading(key: str, value: str) -> str:
    """Return the text of one setting in a block's heading. A GPU is the paper's: ours is named below the table."""
    return {"model": value, "gpu": f"the paper's {value}"}.get(key, f"{key} {value}")


def _by_block(rows: Sequence[Line], heading_keys: Sequence[str]) -> Mapping[str, list[Line]]:
    """Group rows by the heading above them, in the paper's order; '' is the heading of rows without one."""
    blocks: dict[str, list[Line]] = {}
    for line, entries in rows:
        setting = {"model": line.row.model, **parse(line.row.setting)}
        heading = ", ".join(_heading(k, setting[k]) for k in heading_keys if setting.get(k))
        blocks.setdefault(heading, []).append((line, entries))
    return blocks
