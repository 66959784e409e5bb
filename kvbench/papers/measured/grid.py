"""A paper's table as text: the paper's layout, our numbers beside the printed ones, and notes for the reader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from textwrap import wrap

from kvbench.base.formatting import format_number, format_percent, with_interval
from kvbench.papers.measured import timing_text
from kvbench.papers.measured.agreement import describe_agreement
from kvbench.papers.measured.cell_view import CellView, View
from kvbench.papers.measured.our_table import OurTable, TableLine
from kvbench.papers.spec import stand_ins
from kvbench.papers.spec.numbers import decimals
from kvbench.papers.spec.published import FRACTION
from kvbench.papers.spec.row_knobs import parse_setting
from kvbench.papers.spec.table_spec import MEANS, SCORE
from kvbench.papers.spec.workloads import label_workloads
from kvbench.report.notes import MANY_EMPTY
from kvbench.report.render import EVICTING, EVICTS
from kvbench.report.table import Bold, Table
from kvbench.store.provenance import describe_local_changes
from kvbench.tasks.metrics.stats import FEWEST, FLOOR

SHOWS = ("both", "ours", "published", "delta", "share")
"""What the cells of a table can hold: both sides, one side, their difference, or both sides in per cent of their full
cache."""
WRONG = ("refused", "failed")
"""Statuses that are shown as ✗, with the reason in a note."""
FAILS = "†"
"""Marks a column in which the model fails even with the full cache."""
FEW = "‡"
"""Marks a column with fewer than FEWEST examples."""
UNCHANGED = "="
"""Marks the number of a method that compressed nothing."""
ABSOLUTE = " abs"
"""Stands behind a value that cannot be a share of its full cache."""
UNLIKE = "°"
"""Marks a difference to a score that was made under other conditions."""
LABEL = 22
"""The settings of a row are wrapped into lines of at most this many characters."""

Line = tuple[TableLine, tuple[CellView, ...]]
"""A row of a view with its cells."""


def format_cells(view: View, show: str, intervals: bool = False) -> Table:
    """Return a table of texts: the rows' labels, and the lines of every cell, with the best of each block in bold.

    show: one of SHOWS, or ``beside`` for the printed side alone, in the place of ours.
    intervals: True to show the 95 % interval below each of our numbers.
    """
    timings = view.ours.timings
    field = _choose_compared_field(view, show)
    base = timings.bench.base if timings is not None else "full"
    # the column's number of examples, which its head names
    counts = [max(entries[i].n for _, entries in view.rows) for i in range(len(view.columns))]
    headings: dict[int, str] = {}
    rows: list[tuple[str, ...]] = []
    for heading, block in _group_by_heading(view.rows, view.ours.declared.blocks).items():
        headings[len(rows)] = heading
        # the other rows are compared with the base row, so it is never the best one
        compressed = [(line, entries) for line, entries in block if line.row.method != base]
        best_values = [_find_best(compressed, i, field) for i in range(len(view.columns))]
        for line, entries in block:
            texts = [_format_label(line, heading, show)]
            for entry, best, count in zip(entries, best_values, counts, strict=True):
                text = _format_cell(view, line, entry, show, intervals, count)
                # an unchanged cell is not compressed, so it cannot be the best unless the paper's own number is shown
                can_be_best = line.row.method != base and (show in ("published", "beside") or not entry.unchanged)
                if can_be_best and best is not None and getattr(entry, field) == best:
                    text = Bold(text)
                texts.append(text)
            rows.append(tuple(texts))
    names = [column.name for column in view.columns]
    if timings is not None:
        names = [timing_text.name_column(timings, name) for name in names]
    elif show not in ("published", "beside"):
        names = [_head_column(view, i) for i in range(len(names))]
    # the first column has the rows' labels, and neither a name nor a group
    heads = ("", *names)
    groups = ("", *(column.group for column in view.columns))
    table = Table(heads, tuple(rows), breaks=True, groups=groups, headings=headings)
    spans = [count for group, count in table.spans() if group]
    # the line of groups above the columns says nothing if there is one group, or if each group is one column
    if len(spans) > 1 and max(spans) > 1:
        return table
    return replace(table, groups=())


def _head_column(view: View, index: int) -> str:
    column = view.columns[index]
    entries = [entries[index] for _, entries in view.rows if entries[index].n]
    if not entries or column.dataset in MEANS or column.quantity != SCORE:
        return column.name
    most = max(entries, key=lambda entry: entry.n)
    lines = [column.name, f"n {most.n}{FEW if most.few else ''}"]
    if most.full is not None:
        lines.append(f"full {format_number(most.full, 1)}{FAILS if most.floor else ''}")
    return "\n".join(lines)


def _format_cell(view: View, line: TableLine, entry: CellView, show: str, intervals: bool, count: int) -> str:
    # the full cache's share of itself is always 100 and needs no interval
    if line.row.method == "full":
        entry = replace(entry, relative_ci=None)
    if entry.timed is None:
        cell_lines = _format_score(entry, show, view.ours.stand_in, intervals)
    else:
        cell_lines = timing_text.format_cell(entry, show)
    # the column's head names the number of examples that most rows have
    if entry.cell and entry.n != count and show in ("both", "ours", "share"):
        cell_lines.append(f"n {entry.n}")
    return "\n".join(cell_lines)


def _choose_compared_field(view: View, show: str) -> str:
    printed = show in ("published", "beside")
    # times compare as ratios to a base row
    if view.ours.timings is not None:
        return "published_relative" if printed else "relative"
    if printed:
        return "published"
    return "relative" if show == "share" else "ours"


def _format_label(line: TableLine, heading: str, show: str) -> str:
    in_heading = heading.split(", ")
    settings = []
    for setting in line.row.setting.split(";"):
        if setting and _format_setting(*setting.split("=", 1)) not in in_heading:
            settings.append(setting)
    label = [line.row.method]
    label += wrap(" ".join(settings), LABEL, break_long_words=False)
    if line.chain is not None and line.chain.evicts and show != "published":
        label.append(EVICTS)
    return "\n".join(label)


def _find_best(rows: Sequence[Line], index: int, field: str) -> float | None:
    column_entries = [entries[index] for _, entries in rows]
    # these conditions concern our side: the paper's own values compare in any case
    if field != "published":
        column_entries = [entry for entry in column_entries if not entry.unchanged]
        # a row that answered other examples may be better by chance
        counts = {entry.n for entry in column_entries if entry.n}
        if len(counts) > 1:
            return None
    values = [value for value in (getattr(entry, field) for entry in column_entries) if value is not None]
    if len(values) < 2:
        return None
    less_is_better = any(entry.timed is not None and entry.timed.less_is_better for entry in column_entries)
    if field in ("ours", "published"):
        less_is_better = less_is_better or any(entry.less_is_better for entry in column_entries)
    if less_is_better:
        return min(values)
    return max(values)


def _format_score(entry: CellView, show: str, stand_in: bool, intervals: bool) -> list[str]:
    as_share = show == "share"
    ours = _format_our_side(entry, as_share, intervals)
    printed = _format_printed(entry, as_share)
    difference = format_number(entry.delta, 2, sign=True)
    if entry.unlike:
        difference += UNLIKE
    kept = _format_kept(entry.budget)
    lines = list(ours)
    if show == "ours":
        if entry.budgeted:
            lines.append(kept)
    elif show in ("published", "beside"):
        lines = [printed, _format_kept(entry.published_budget)]
    elif show == "delta":
        # an empty or a refused cell stays as it is, and the scores of two models have no difference
        if entry.status != "none" and entry.status not in WRONG:
            lines = ["—"] if stand_in else [difference]
    # both sides: ours, and behind it the printed side in brackets
    else:
        delta = ""
        if printed and not as_share and not stand_in and entry.delta is not None:
            delta = f", Δ {difference}"
        lines.append(f"({printed}{delta})")
        if entry.budgeted:
            budgets = kept
            if entry.published_budget is not None:
                budgets += f" ({format_percent(entry.published_budget)})"
            lines.append(budgets.strip())
    # brackets are empty if the paper prints nothing in this cell
    return [line for line in lines if line not in ("", "()")]


def _format_kept(budget: float | None) -> str:
    """Return the text of a share of tokens kept in per cent; '' if it is not known."""
    return "" if budget is None else f"kept {format_percent(budget)}"


def _format_our_side(entry: CellView, as_share: bool, intervals: bool) -> list[str]:
    if entry.status == "none":
        return []
    if entry.status in WRONG:
        return ["✗"]
    value, ci, unit = entry.ours, entry.ci, ""
    if as_share:
        value, ci = entry.relative, entry.relative_ci
    # a full cache that scores 0 has no share
    if value is None and entry.full is not None:
        value, ci, unit = entry.score, None, ABSOLUTE
    if entry.status == "missing" or value is None:
        # a number that follows from others needs no measurement
        return ["" if entry.exact else "—"]
    digits = 1
    if entry.printed and not as_share:
        digits = decimals(entry.printed)
    mark = unit + UNCHANGED if entry.unchanged else unit
    return with_interval(value, ci if intervals else None, digits, mark=mark).split("\n")


def _format_printed(entry: CellView, as_share: bool) -> str:
    """Return the paper's value of a cell as text, with its marks; '' if the paper prints none."""
    value, digits = entry.published, 2
    if as_share:
        value, digits = entry.published_relative, 1
    if entry.status == "none" and value is None:
        return ""
    # without the paper's full-cache row there is no share of it: show the absolute value, and say so
    if as_share and value is None and entry.published is not None:
        return f"{format_number(entry.published, 2)}{entry.mark}{ABSOLUTE}"
    if value is None and not entry.printed:
        return ""
    text = format_number(value, digits)
    # a table that prints shares shows the printed characters even where shares are asked for
    as_printed = not as_share or value == entry.published
    if entry.printed and as_printed:
        text = entry.printed
    text += entry.mark
    if entry.exact and as_printed:
        text += f" {entry.exact}"
    if entry.stated is not None and not as_share:
        text += f" stated {format_number(entry.stated, 2)}"
    return text


def write_notes(view: View, show: str = "both") -> list[str]:
    """Return the notes below a table: where numbers come from, n, the meaning of marks, and why cells were refused.

    show: what the table shows, one of SHOWS or ``beside``.
    """
    ours, sources = view.ours, list(view.ours.declared.sources)
    entries = [entry for _, row in view.rows for entry in row]
    if ours.timings is not None:
        return timing_text.write_notes(ours.timings, entries, show) + sources
    lines: list[str] = []
    if show != "published":
        lines += describe_agreement(view)
    if ours.run is not None and show != "published":
        lines += _write_notes_on_ours(view, entries, show)
    if show in ("both", "beside", "published", "share"):
        lines += _write_notes_on_printed(view, entries, show == "share")
    if show == "published":
        return lines + sources
    # the note names the last of several rows with one reason
    row_by_reason: dict[str, str] = {}
    for line, row in view.rows:
        for entry in row:
            if entry.status in WRONG:
                row_by_reason[entry.reason] = line.row.name
    lines += [f"✗ {name}: {reason}" for reason, name in row_by_reason.items()]
    skipped = list(dict.fromkeys(line.skipped for line, _ in view.rows if line.skipped))
    if skipped:
        lines.append(f"— not run here: {', '.join(skipped)}.")
    waiting = _list_waiting_columns(view)
    if waiting:
        lines.append(f"— not measured yet: {', '.join(waiting)}.")
    if show in ("both", "ours", "share") and any(entry.unchanged for entry in entries):
        lines.append(f"{UNCHANGED}: not compressed. Tokens, bytes and answers are the full cache's.")
    lines += [f"— {reason}." for reason in list_reasons_for_absence(ours)]
    return lines + sources


def _list_waiting_columns(view: View) -> list[str]:
    if view.ours.run is None:
        return []
    names = []
    for i, column in enumerate(view.columns):
        if column.quantity != SCORE or column.dataset in MEANS:
            continue
        entries = [row[i] for line, row in view.rows if line.chain is not None]
        # a missing number with a reason waits for data, not for a run
        if any(entry.status == "missing" and not entry.reason for entry in entries):
            names.append(column.name)
    return names


def list_reasons_for_absence(ours: OurTable) -> list[str]:
    """Return a sentence for each reason why data cannot be read here: the names of the datasets, then the reason."""
    labels_by_workload = label_workloads(workload.whole for workload in ours.absent)
    names_by_reason: dict[str, list[str]] = {}
    for workload, why in ours.absent.items():
        name = f"{workload.dataset} {labels_by_workload[workload.whole]}".strip()
        names_by_reason.setdefault(why, []).append(name)
    reasons = []
    for why, names in names_by_reason.items():
        verb = "is" if len(names) == 1 else "are"
        reasons.append(f"{', '.join(names)} {verb} missing: {why}")
    return reasons


def _write_notes_on_ours(view: View, entries: Sequence[CellView], show: str) -> Iterator[str]:
    ours = view.ours
    yield from _write_unit_notes(view, entries, show)
    if any(entry.published is not None for entry in entries) and _prints_fractions(view):
        yield "What the paper prints as fractions stands here in per cent, as ours."
    yield from ours.notes
    # for the tiny model's tasks the title says enough
    if ours.model != stand_ins.MODEL and ours.run is not None:
        for note in dict.fromkeys(group.task.note for group in ours.run.groups if group.task.note):
            yield f"{note}."
    conditions: dict[str, None] = {}
    for entry in entries:
        conditions |= dict.fromkeys(entry.unlike)
    if conditions and show in ("both", "delta"):
        texts = "; ".join(conditions)
        yield f"{UNLIKE}: other conditions than the paper's, so that the difference is indicative: {texts}."
    measured = _list_measured(view)
    if measured:
        counts = _format_range([entry.n for entry in measured])
        total = _format_range([entry.total for entry in measured])
        dtype = f", {ours.run.dtype}" if ours.run is not None else ""
        yield f"n = {counts} of {total} examples a task{dtype}; full: the full cache's own score on them."
    if any(entry.few for entry in measured):
        yield f"{FEW}: fewer than {FEWEST} examples."
    if any(entry.floor for entry in measured):
        yield (
            f"{FAILS}: the model fails. Its full cache scores less than {100 * FLOOR:g} points of 100 above empty "
            "answers and guessing, or its interval reaches them."
        )
    yield from _write_empty_answers(view)
    if ours.run is not None:
        changed = describe_local_changes(ours.run.records())
        if changed:
            yield changed
    if show != "published" and any(line.chain is not None and line.chain.evicts for line, _ in view.rows):
        yield f"{EVICTS}: {EVICTING}"


def describe_counts(view: View) -> str:
    """Return how many examples the cells of scores have: ``n = 4 to 8 of 13 to 26 examples a task``.

    Returns '' if no cell has examples.
    """
    measured = _list_measured(view)
    if not measured:
        return ""
    counts = [entry.n for entry in measured]
    sizes = [entry.total for entry in measured]
    return f"n = {_format_range(counts)} of {_format_range(sizes)} examples a task"


def warn_of_few_examples(view: View) -> str:
    """Return a warning for the first line of a table whose cells all have too few examples; '' for any other."""
    measured = _list_measured(view)
    if not measured or max(entry.n for entry in measured) >= FEWEST:
        return ""
    return f"! {describe_counts(view)}. Preview only: nothing here can be compared."


def _list_measured(view: View) -> list[CellView]:
    if view.ours.timings is not None:
        return []
    # an average has the sum of its cells' examples, but no stored result of its own
    return [entry for _, row in view.rows for entry in row if entry.n and entry.cell]


def _format_range(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    if low == high:
        return str(low)
    return f"{low} to {high}"


def _write_unit_notes(view: View, entries: Sequence[CellView], show: str) -> Iterator[str]:
    ours = view.ours
    content = {
        "ours": "Our score",
        "beside": "Our score, and the paper's",
        "delta": "Δ: our score minus the published one",
        "share": "Per cent of the full cache: ours, and in brackets the paper's",
    }.get(show, "Our score, in brackets the published one")
    if show == "both" and not ours.stand_in:
        content += ", Δ ours minus published"
    if ours.model == stand_ins.MODEL:
        yield f"{content}. Model tiny on its own tasks. What the paper prints: --show published."
    elif ours.stand_in:
        yield (
            f"{content}. {ours.model} is none of the paper's models ({', '.join(ours.declared.models())}): compare "
            "orders, not values."
        )
        if show == "delta":
            yield "—: differences to what a paper prints say nothing on a model that is none of its own."
    else:
        yield f"{content}; averages are computed from the cells."
    without_share = [entry for entry in entries if entry.published is not None and entry.published_relative is None]
    if show == "share" and without_share:
        yield "abs: as printed, since the paper has no full-cache row of that model."
    if any(entry.ours is None and entry.full == 0 for entry in entries):
        yield "abs: our score, since the full cache scores 0 and has no share."


def _prints_fractions(view: View) -> bool:
    return any(cell.unit == FRACTION for line, _ in view.rows for cell in line.row.cells.values())


def _write_empty_answers(view: View) -> Iterator[str]:
    entry_of: dict[str, CellView] = {}
    for _, row in view.rows:
        for column, entry in zip(view.columns, row, strict=True):
            if not entry.n or entry.empty < MANY_EMPTY * entry.n:
                continue
            # name a dataset once, with its largest number of examples
            if column.dataset not in entry_of or entry.n > entry_of[column.dataset].n:
                entry_of[column.dataset] = entry
    if entry_of:
        counts = ", ".join(f"{name} {entry.empty} of {entry.n}" for name, entry in entry_of.items())
        yield f"Answers of the full cache that are empty: {counts}. Such a column shows when a model falls silent."


def _write_notes_on_printed(view: View, entries: Sequence[CellView], relative: bool) -> Iterator[str]:
    paper = view.ours.declared.paper
    for mark, text in (("?", "suspect"), ("~", "repaired")):
        if any(entry.mark == mark for entry in entries):
            yield f"{mark}: the printed value is {text} (kvbench/papers/data/{paper})."
    # rows of two models can have one name
    several_models = len(view.ours.declared.models()) > 1
    corrections = []
    for line, row in view.rows:
        name = line.row.name
        if several_models:
            name = f"{line.row.model} {name}"
        for entry in row:
            if entry.stated is not None:
                stated, computed = format_number(entry.stated, 2), format_number(entry.published, 2)
                corrections.append(f"{stated} for {computed} ({name})")
    if corrections and relative:  # a cell of shares has no room for the stated average
        yield f"Averages that the paper states, for what its cells give: {', '.join(corrections)}."
    elif corrections:
        yield "stated: the average that the paper states, where its cells give another."
    recomputed = [entry.exact for entry in entries if entry.exact]
    if recomputed:
        right = recomputed.count("✓")
        yield f"✓: {right} of {len(recomputed)} printed values that need no model follow from what they rest on."


def write_title(view: View, show: str = "both") -> str:
    """Return one line: the table, its title, our model, and its examples."""
    declared, timings = view.ours.declared, view.ours.timings
    start = f"{declared.id}: {declared.title}"
    measured = view.ours.run is not None or (timings is not None and timings.any_measured)
    if show == "published" or not measured:
        return f"{start} — as printed"
    model = view.ours.model
    if view.ours.stand_in:
        model += " (substitute model)"
    counts = describe_counts(view)
    if counts:
        model += f", {counts}"
    return f"{start} — {model}"


def _format_setting(key: str, value: str) -> str:
    if key == "model":
        return value
    if key == "gpu":
        return f"the paper's {value}"
    return f"{key} {value}"


def _group_by_heading(rows: Sequence[Line], heading_keys: Sequence[str]) -> Mapping[str, list[Line]]:
    """Return rows grouped by the heading above them, in the paper's order. Rows without a heading have ''."""
    blocks: dict[str, list[Line]] = {}
    for line, entries in rows:
        # a setting named model would replace the row's own model
        setting = {"model": line.row.model} | parse_setting(line.row.setting)
        heading = ", ".join(_format_setting(key, setting[key]) for key in heading_keys if setting.get(key))
        blocks.setdefault(heading, []).append((line, entries))
    return blocks
