"""A paper's table as text: the paper's layout, our numbers beside the printed ones, and notes for the reader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from textwrap import wrap
from typing import Any

from kvbench.base.formatting import format_number, format_percent, with_interval
from kvbench.papers.measured import timing_text
from kvbench.papers.measured.agreement import describe_agreement
from kvbench.papers.measured.plan import Line, PaperTable
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
cache. Where ``show`` is a parameter, it may also be ``beside``: the printed side alone, in the place of ours."""
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


def format_cells(table: PaperTable, show: str, intervals: bool = False) -> Table:
    """Return a table of texts: the rows' labels, and the lines of every cell, with the best of each block in bold.

    intervals: True to show the 95 % interval below each of our numbers.
    """
    printed = show in ("published", "beside")
    field = "paper_value" if printed else "value"
    base = "full"
    if table.timings is not None:
        # times compare as ratios to a base row
        field = "paper_share" if printed else "share"
        base = table.timings.bench.base
    elif show == "share":
        field = "share"
    # the column's number of examples, which its head names
    lines = [(line, table.pairs_of(line)) for line in table.lines]
    counts = []
    for i in range(len(table.columns)):
        counts.append(max(cells[i].n for _, cells in lines))
    headings: dict[int, str] = {}
    rows: list[tuple[str, ...]] = []
    for heading, block in _group_by_heading(table, lines).items():
        headings[len(rows)] = heading
        # the other rows are compared with the base row, so it is never the best one
        compressed = [cells for line, cells in block if line.method != base]
        best_values: list[float | None] = [None] * len(table.columns)
        if compressed:
            best_values = [_find_best(column, field) for column in zip(*compressed, strict=True)]
        for line, cells in block:
            texts = [_format_label(line, heading, show)]
            for cell, best, count in zip(cells, best_values, counts, strict=True):
                text = _format_cell(table, line, cell, show, intervals, count)
                # an unchanged cell is not compressed, so it cannot be the best unless the paper's own number is shown
                can_be_best = line.method != base and (printed or not cell.unchanged)
                if can_be_best and best is not None and getattr(cell, field) == best:
                    text = Bold(text)
                texts.append(text)
            rows.append(tuple(texts))
    names = [column.name for column in table.columns]
    if table.timings is not None:
        names = [timing_text.name_column(table.timings, name) for name in names]
    elif not printed:
        names = [_head_column(table, i) for i in range(len(names))]
    # the first column has the rows' labels, and neither a name nor a group
    groups = tuple([""] + [column.group for column in table.columns])
    texts_table = Table(tuple([""] + names), tuple(rows), breaks=True, groups=groups, headings=headings)
    spans = [count for group, count in texts_table.spans() if group]
    # the line of groups above the columns says nothing if there is one group, or if each group is one column
    if len(spans) > 1 and max(spans) > 1:
        return texts_table
    return replace(texts_table, groups=())


def _head_column(table: PaperTable, index: int) -> str:
    column = table.columns[index]
    cells = [cell for cell in table.pairs[index :: len(table.columns)] if cell.n]
    if not cells or column.dataset in MEANS or column.quantity != SCORE:
        return column.name
    most = max(cells, key=lambda cell: cell.n)
    lines = [column.name, f"n {most.n}"]
    if most.n < FEWEST:
        lines[-1] += FEW
    if most.full is not None:
        lines.append(f"full {format_number(most.full, 1)}")
        if most.floor:
            lines[-1] += FAILS
    return "\n".join(lines)


def _format_cell(table: PaperTable, line: Line, cell: Any, show: str, intervals: bool, count: int) -> str:
    if cell.timed is not None:
        lines = timing_text.format_cell(cell, show)
    else:
        # the full cache's share of itself is always 100 and needs no interval
        with_ci = intervals and not (show == "share" and line.method == "full")
        lines = _format_score(cell, show, table.stand_in, with_ci)
    # the column's head names the number of examples that most rows have
    if cell.cell and cell.n != count and show in ("both", "ours", "share"):
        lines.append(f"n {cell.n}")
    return "\n".join(lines)


def _format_label(line: Line, heading: str, show: str) -> str:
    in_heading = heading.split(", ")
    settings = [part for part in line.setting.split(";") if part]
    settings = [part for part in settings if _format_setting(*part.split("=", 1)) not in in_heading]
    label = [line.method] + wrap(" ".join(settings), LABEL, break_long_words=False)
    if line.chain is not None and line.chain.evicts and show != "published":
        label.append(EVICTS)
    return "\n".join(label)


def _find_best(cells: Sequence[Any], field: str) -> float | None:
    """Return the best value of a column within one block of rows.

    Return None if fewer than two values compare, or if our values rest on different numbers of examples.
    """
    # these conditions concern our side: the paper's own values compare in any case
    if field != "paper_value":
        cells = [cell for cell in cells if not cell.unchanged]
        # a row that answered other examples may be better by chance
        if len({cell.n for cell in cells if cell.n}) > 1:
            return None
    values = [getattr(cell, field) for cell in cells if getattr(cell, field) is not None]
    if len(values) < 2:
        return None
    # less is better for some times, and for perplexities but not for their shares, since these are inverse
    less = any(cell.timed is not None and cell.timed.less_is_better for cell in cells)
    if field in ("value", "paper_value"):
        less = less or any(cell.paper_less_is_better for cell in cells)
    return min(values) if less else max(values)


def find_delta(cell: Any) -> float | None:
    """Return our number minus the printed value; None if one of the two is missing."""
    if cell.value is None or cell.paper_value is None:
        return None
    delta: float = cell.value - cell.paper_value
    return delta


def _format_score(cell: Any, show: str, stand_in: bool, intervals: bool) -> list[str]:
    as_share = show == "share"
    lines = _format_our_side(cell, as_share, intervals)
    printed = _format_printed(cell, as_share)
    difference = format_number(find_delta(cell), 2, sign=True)
    if cell.unlike:
        difference += UNLIKE
    kept = _format_kept(cell.kept)
    if show == "ours":
        if cell.paper_budgeted:
            lines.append(kept)
    elif show in ("published", "beside"):
        lines = [printed, _format_kept(cell.paper_kept)]
    elif show == "delta":
        # an empty or a refused cell stays as it is, and the scores of two models have no difference
        if cell.status != "none" and cell.status not in WRONG:
            lines = ["—"] if stand_in else [difference]
    # both sides: ours, and behind it the printed side in brackets
    else:
        if printed and not as_share and not stand_in and find_delta(cell) is not None:
            printed += f", Δ {difference}"
        lines.append(f"({printed})")
        if cell.paper_budgeted:
            if cell.paper_kept is not None:
                kept += f" ({format_percent(cell.paper_kept)})"
            lines.append(kept.strip())
    # brackets are empty if the paper prints nothing in this cell
    return [line for line in lines if line not in ("", "()")]


def _format_kept(budget: float | None) -> str:
    if budget is None:
        return ""
    return f"kept {format_percent(budget)}"


def _format_our_side(cell: Any, as_share: bool, intervals: bool) -> list[str]:
    # the paper's table has no such cell
    if cell.status == "none":
        return []
    if cell.status in WRONG:
        return ["✗"]
    value, low, high = cell.value, cell.low, cell.high
    digits = decimals(cell.paper_text) if cell.paper_text else 1
    if as_share:
        value, low, high, digits = cell.share, cell.share_low, cell.share_high, 1
    unit = ""
    # a full cache that scores 0 has no share
    if value is None and cell.full is not None:
        value, low, unit = cell.score, None, ABSOLUTE
    if cell.status == "missing" or value is None:
        # a number that follows from others needs no measurement
        return ["" if cell.paper_exact else "—"]
    if cell.unchanged:
        unit += UNCHANGED
    ci = (low, high) if intervals and low is not None else None
    return with_interval(value, ci, digits, mark=unit).split("\n")


def _format_printed(cell: Any, as_share: bool) -> str:
    value, digits = cell.paper_value, 2
    if as_share:
        value, digits = cell.paper_share, 1
    if cell.status == "none" and value is None:
        return ""
    # without the paper's full-cache row there is no share of it: show the absolute value, and say so
    if as_share and value is None and cell.paper_value is not None:
        return f"{format_number(cell.paper_value, 2)}{cell.paper_mark}{ABSOLUTE}"
    if value is None and not cell.paper_text:
        return ""
    # a table that prints shares shows the printed characters even where shares are asked for
    as_printed = not as_share or value == cell.paper_value
    text = format_number(value, digits)
    if cell.paper_text and as_printed:
        text = cell.paper_text
    text += cell.paper_mark
    if cell.paper_exact and as_printed:
        text += f" {cell.paper_exact}"
    if cell.paper_stated is not None and not as_share:
        text += f" stated {format_number(cell.paper_stated, 2)}"
    return text


def _format_setting(key: str, value: str) -> str:
    if key == "model":
        return value
    # a GPU is the paper's, since ours is named below the table
    if key == "gpu":
        return f"the paper's {value}"
    return f"{key} {value}"


def _group_by_heading(
    table: PaperTable, lines: Sequence[tuple[Line, list[Any]]]
) -> dict[str, list[tuple[Line, list[Any]]]]:
    """Return lines with their cells by the heading above them, in the paper's order; '' for those without one."""
    blocks: dict[str, list[tuple[Line, list[Any]]]] = {}
    for line, cells in lines:
        # a setting named model would replace the row's own model
        setting = {"model": line.model} | parse_setting(line.setting)
        heading = ", ".join(_format_setting(key, setting[key]) for key in table.spec.blocks if setting.get(key))
        blocks.setdefault(heading, []).append((line, cells))
    return blocks


def write_title(table: PaperTable, show: str = "both") -> str:
    """Return one line: the table, its title, our model, and its examples."""
    start = f"{table.spec.id}: {table.spec.title}"
    measured = table.run is not None or (table.timings is not None and table.timings.any_measured)
    if show == "published" or not measured:
        return f"{start} — as printed"
    model = table.model
    if table.stand_in:
        model += " (substitute model)"
    counts = _describe_counts(table)
    if counts:
        model += f", {counts}"
    return f"{start} — {model}"


def warn_of_few_examples(table: PaperTable) -> str:
    """Return a warning for the first line of a table whose cells all have too few examples; '' for any other."""
    measured = _list_measured(table)
    if not measured or max(cell.n for cell in measured) >= FEWEST:
        return ""
    return f"! {_describe_counts(table)}. Preview only: nothing here can be compared."


def _list_measured(table: PaperTable) -> list[Any]:
    if table.timings is not None:
        return []
    # an average has the sum of its cells' examples, but no stored result of its own
    return [cell for cell in table.pairs if cell.n and cell.cell]


def _describe_counts(table: PaperTable) -> str:
    measured = _list_measured(table)
    if not measured:
        return ""
    counts, sizes = [cell.n for cell in measured], [cell.of for cell in measured]
    return f"n = {_format_range(counts)} of {_format_range(sizes)} examples a task"


def _format_range(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    if low == high:
        return str(low)
    return f"{low} to {high}"


def write_notes(table: PaperTable, show: str = "both") -> list[str]:
    """Return the notes below a table: where numbers come from, n, the meaning of marks, and why cells were refused."""
    sources = list(table.spec.sources)
    if table.timings is not None:
        return timing_text.write_notes(table.timings, table.pairs, show) + sources
    lines: list[str] = []
    if show != "published":
        lines += describe_agreement(table)
        if table.run is not None:
            lines += _write_notes_on_ours(table, show)
    if show in ("both", "beside", "published", "share"):
        lines += _write_notes_on_printed(table, show == "share")
    if show == "published":
        return lines + sources
    # the note names the last of several rows with one reason
    names: dict[str, str] = {}
    for line in table.lines:
        names.update((cell.reason, line.name) for cell in table.pairs_of(line) if cell.status in WRONG)
    lines += [f"✗ {name}: {reason}" for reason, name in names.items()]
    skipped = [reason for reason in dict.fromkeys(table.rows["skipped"]) if reason]
    if skipped:
        lines.append(f"— not run here: {', '.join(skipped)}.")
    waiting = list(_list_waiting_columns(table))
    if waiting:
        lines.append(f"— not measured yet: {', '.join(waiting)}.")
    if show in ("both", "ours", "share") and any(cell.unchanged for cell in table.pairs):
        lines.append(f"{UNCHANGED}: not compressed. Tokens, bytes and answers are the full cache's.")
    lines += [f"— {reason}." for reason in list_reasons_for_absence(table)]
    return lines + sources


def _list_waiting_columns(table: PaperTable) -> Iterator[str]:
    # those that a run would fill: a row has no number there, although its data can be read
    lines = [table.pairs_of(line) for line in table.lines if line.chain is not None and table.run is not None]
    for i, column in enumerate(table.columns):
        # a missing number with a reason waits for data, not for a run
        waits = any(cells[i].status == "missing" and not cells[i].reason for cells in lines)
        if waits and column.quantity == SCORE and column.dataset not in MEANS:
            yield column.name


def list_reasons_for_absence(table: PaperTable) -> list[str]:
    """Return a sentence for each reason why data cannot be read here: the names of the datasets, then the reason."""
    labels = label_workloads(workload.whole for workload in table.absent)
    names_by_reason: dict[str, list[str]] = {}
    for workload, why in table.absent.items():
        names_by_reason.setdefault(why, []).append(f"{workload.dataset} {labels[workload.whole]}".strip())
    sentences = []
    for why, names in names_by_reason.items():
        verb = "is" if len(names) == 1 else "are"
        sentences.append(f"{', '.join(names)} {verb} missing: {why}")
    return sentences


def _write_notes_on_ours(table: PaperTable, show: str) -> Iterator[str]:
    cells = table.pairs
    assert table.run is not None
    yield from _write_unit_notes(table, show)
    units: set[str] = set()
    for printed in table.rows["printed"]:
        units.update(cell.unit for cell in printed.values())
    if FRACTION in units and any(cell.paper_value is not None for cell in cells):
        yield "What the paper prints as fractions stands here in per cent, as ours."
    yield from table.notes
    # for the tiny model's tasks the title says enough
    if table.model != stand_ins.MODEL:
        for note in dict.fromkeys(group.task.note for group in table.run.groups if group.task.note):
            yield f"{note}."
    conditions = dict.fromkeys(chain.from_iterable(cell.unlike for cell in cells))
    if conditions and show in ("both", "delta"):
        texts = "; ".join(conditions)
        yield f"{UNLIKE}: other conditions than the paper's, so that the difference is indicative: {texts}."
    measured = _list_measured(table)
    if measured:
        yield f"{_describe_counts(table)}, {table.run.dtype}; full: the full cache's own score on them."
    if any(cell.n < FEWEST for cell in measured):
        yield f"{FEW}: fewer than {FEWEST} examples."
    if any(cell.floor for cell in measured):
        yield (
            f"{FAILS}: the model fails. Its full cache scores less than {100 * FLOOR:g} points of 100 above empty "
            "answers and guessing, or its interval reaches them."
        )
    # name a dataset with many empty answers once, with its largest number of examples
    silent: dict[str, Any] = {}
    for cell, column in zip(cells, table.columns * len(table.rows), strict=True):
        name = column.dataset
        if cell.n and cell.empty >= MANY_EMPTY * cell.n and (name not in silent or cell.n > silent[name].n):
            silent[name] = cell
    if silent:
        counts = ", ".join(f"{name} {cell.empty} of {cell.n}" for name, cell in silent.items())
        yield f"Answers of the full cache that are empty: {counts}. Such a column shows when a model falls silent."
    changed = describe_local_changes(table.run.records())
    if changed:
        yield changed
    if any(row_chain is not None and row_chain.evicts for row_chain in table.rows["chain"]):
        yield f"{EVICTS}: {EVICTING}"


def _write_unit_notes(table: PaperTable, show: str) -> Iterator[str]:
    content = {
        "ours": "Our score",
        "beside": "Our score, and the paper's",
        "delta": "Δ: our score minus the published one",
        "share": "Per cent of the full cache: ours, and in brackets the paper's",
    }.get(show, "Our score, in brackets the published one")
    if show == "both" and not table.stand_in:
        content += ", Δ ours minus published"
    if table.model == stand_ins.MODEL:
        yield f"{content}. Model tiny on its own tasks. What the paper prints: --show published."
    elif table.stand_in:
        yield (
            f"{content}. {table.model} is none of the paper's models ({', '.join(table.spec.models())}): compare "
            "orders, not values."
        )
        if show == "delta":
            yield "—: differences to what a paper prints say nothing on a model that is none of its own."
    else:
        yield f"{content}; averages are computed from the cells."
    if show == "share" and any(c.paper_value is not None and c.paper_share is None for c in table.pairs):
        yield "abs: as printed, since the paper has no full-cache row of that model."
    if any(cell.value is None and cell.full == 0 for cell in table.pairs):
        yield "abs: our score, since the full cache scores 0 and has no share."


def _write_notes_on_printed(table: PaperTable, as_share: bool) -> Iterator[str]:
    for mark, text in (("?", "suspect"), ("~", "repaired")):
        if any(cell.paper_mark == mark for cell in table.pairs):
            yield f"{mark}: the printed value is {text} (kvbench/papers/data/{table.spec.paper})."
    # rows of two models can have one name
    several_models = len(table.spec.models()) > 1
    corrections = []
    for line in table.lines:
        name = line.name
        if several_models:
            name = f"{line.model} {name}"
        for cell in table.pairs_of(line):
            if cell.paper_stated is not None:
                stated, computed = format_number(cell.paper_stated, 2), format_number(cell.paper_value, 2)
                corrections.append(f"{stated} for {computed} ({name})")
    if corrections and as_share:  # a cell of shares has no room for the stated average
        yield f"Averages that the paper states, for what its cells give: {', '.join(corrections)}."
    elif corrections:
        yield "stated: the average that the paper states, where its cells give another."
    recomputed = [cell.paper_exact for cell in table.pairs if cell.paper_exact]
    if recomputed:
        right = recomputed.count("✓")
        yield f"✓: {right} of {len(recomputed)} printed values that need no model follow from what they rest on."
