"""An efficiency table's cells as text: both ratios side by side, and below them each side's value on its own device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvbench.base.formatting import DASH, format_number, with_interval
from kvbench.bench.records import FAILED, NOT_RUN, OOM, REFUSED, Row
from kvbench.papers.timed.row_matching import INTEGRATED, MISSING, TimedCell
from kvbench.papers.timed.timings import SCRIPT, Timings

if TYPE_CHECKING:
    from kvbench.papers.measured.cell_view import CellView

SHORT = {"pct": "%", "x": ""}
"""Words for a printed unit in a column's head, where the unit itself is not written."""


def name_column(timings: Timings, column: str) -> str:
    """Return a column's name with the unit in which the paper prints it, such as ``decode ms``."""
    # all rows of a column have one unit
    unit = next(row.cells[column].unit for row in timings.table.rows if column in row.cells)
    return f"{column} {SHORT.get(unit, unit)}".rstrip()


def format_cell(entry: CellView, show: str) -> list[str]:
    """Return the lines of text in one cell of a table of timings.

    entry: a cell with a timing.
    show: ``both`` (each side's ratio to the base row, and each side's value), ``ours``, ``published``, ``delta`` (the
    difference of the ratios), or ``beside``, which shows what ``published`` does.
    """
    cell = entry.timed
    # the caller takes only entries with a timing
    assert cell is not None
    our_ratio = _choose_sign(entry) or _format_ratio(cell.ratio)
    paper_ratio, printed = _format_ratio(cell.published_ratio), _format_printed(entry)
    if show in ("published", "beside"):
        # a base row has no ratio to itself, and some rows have none in the paper
        if cell.published_ratio is None:
            return [printed]
        return [paper_ratio, printed]
    if show == "delta":
        if cell.ratio is None or cell.published_ratio is None:
            return [_choose_sign(entry) or "—"]
        return [format_number(cell.ratio - cell.published_ratio, 2, sign=True)]
    value, spread = _format_value(cell)
    # without a ratio, the value alone is shown: a dash above it would mean that nothing was measured
    value_alone = bool(value) and cell.ratio is None
    texts = []
    if show == "ours":
        if not value_alone:
            texts.append(our_ratio)
        if value:
            texts.append(value)
        if spread:
            texts.append(spread)
        return texts
    # the paper's ratio still needs ours beside it, be it only a dash
    if not value_alone or cell.published_ratio is not None:
        texts.append(f"{our_ratio} ({paper_ratio})")
    if value:
        texts.append(f"ours {value}")
    texts.append(f"paper {printed}")
    return texts


def _format_value(cell: TimedCell) -> tuple[str, str]:
    """Return (our value of a cell, with ∫ if its steps were interpolated, its quartiles); '' for what is not known."""
    if cell.value is None:
        return "", ""
    mark = " ∫" if INTEGRATED in cell.marks else ""
    value, _, spread = with_interval(cell.value, cell.spread, 3, significant=True, mark=mark).partition("\n")
    return value, spread


def _choose_sign(entry: CellView) -> str:
    """Return the text that replaces a missing number; '' if there is a number."""
    if entry.status in (REFUSED, FAILED):
        return "✗"
    if entry.status == OOM:
        return OOM
    if entry.status == "measured":
        return ""
    # every other status says in one way or another that nothing was measured
    return "—"


def _format_printed(entry: CellView) -> str:
    # callers take only entries with a timing
    assert entry.timed is not None
    # papers write in many ways that a row does not fit into memory, but the cell's flag always says out-of-memory
    if "out-of-memory" in entry.timed.printed.flag.lower():
        return OOM
    text = f"{entry.printed or '—'}{entry.mark}"
    if entry.exact:
        text += f" {entry.exact}"
    return text


def _format_ratio(ratio: float | None) -> str:
    """Format a ratio; None is a dash."""
    return DASH if ratio is None else f"{format_number(ratio, 2)}×"


def write_notes(timings: Timings, entries: Sequence[CellView], show: str = "both") -> list[str]:
    """Return the notes for readers: both devices, the base of ratios, a stand-in's scale, and missing rows.

    entries: all cells of the table.
    show: what the table shows, one of grid.SHOWS or ``beside``.
    """
    bench = timings.bench
    paper_note = f"N.NN×: the paper's over its own {bench.base}; the paper's is {_describe_paper_models(timings)}."
    if show == "published":
        return [paper_note, *_write_notes_on_printed(entries)]
    cells = [entry.timed for entry in entries if entry.timed is not None]
    texts: list[str] = []
    if timings.any_measured:
        texts += _write_notes_on_ours(timings, show)
    else:
        # only the paper's ratios are shown; otherwise these brackets follow our ratio
        texts.append(paper_note.replace("N.NN×", "(N.NN×)", 1))
    if any(INTEGRATED in cell.marks for cell in cells):
        texts.append("∫ integrated: steps were run at a few cache lengths and interpolated between them.")
    if show == "ours":
        # marks of printed values do not stand in this table, so leave out their notes
        texts += _write_notes_on_printed([replace(entry, exact="", mark="") for entry in entries])
    elif show != "delta":
        texts += _write_notes_on_printed(entries)
    # several columns show one row, so a set names each failure once
    failures = set()
    for cell in cells:
        if cell.status in (REFUSED, FAILED) and cell.row:
            failures.add((cell.row["method"], cell.row["workload"], cell.reason))
    texts += [f"✗ {method} at {workload}: {reason}" for method, workload, reason in sorted(failures)]
    for reason, names in _group_names_by_reason(timings).items():
        texts.append(f"— not run: {', '.join(names)}: {reason}")
    if any(cell.status == MISSING for cell in cells):
        texts.append(f"— not measured yet: {timings.command}")
    for device, count in timings.left_out.items():
        texts.append(f"Left out: {count} rows of {device}; a table shows one device.")
    if timings.stand_in:
        texts.append(f"GPU numbers are missing: {SCRIPT} {bench.results} measures them; they are then shown instead.")
    if timings.any_measured:
        texts.append(f"Rows: {timings.file.parent.name}/{timings.file.name}.")
    return texts


def _group_names_by_reason(timings: Timings) -> dict[str, dict[str, None]]:
    names_by_reason: dict[str, dict[str, None]] = {}
    for printed, cell in timings.cells.items():
        if cell.status != NOT_RUN:
            continue
        # name an average as such, and any other cell by its method, unless a name is declared as not run
        excluded = "avg" if printed.dataset == "avg" else printed.method
        # the declaration excludes a cell by its model, method or dataset: name the one that it excludes
        for name in (printed.model, printed.method, printed.dataset):
            if name in timings.bench.not_run:
                excluded = name
                break
        names_by_reason.setdefault(cell.reason, {})[excluded] = None
    return names_by_reason


def _write_notes_on_ours(timings: Timings, show: str) -> Iterator[str]:
    bench = timings.bench
    # N.NN stands for any ratio in the table
    start = "±N.NN: our ratio less the paper's. A ratio is" if show == "delta" else "N.NN×:"
    ratio_text = f"{start} ours over our {bench.base} row, measured beside it (the paper's over its own)"
    ours = f"{bench.model} with random weights on {timings.device}; the paper's"
    if timings.stand_in:
        yield (
            f"Substitute model: ours is {ours} is {_describe_paper_models(timings)}. {ratio_text}. "
            "Only ratios compare, and of those the direction; no GPU took part."
        )
        yield _write_scale(timings)
    else:
        yield f"Ours: {ours}: {_describe_paper_models(timings)}. {ratio_text}. Only ratios compare."
    if len(_list_paper_devices(timings)) > 1:
        yield "Ours is of one device and stands beside each of the paper's."
    yield _write_repeats([cell.row for cell in timings.cells.values() if cell.row is not None])
    yield from _write_agreement(timings)
    for note in bench.notes:
        yield f"Ours: {note}."


def _write_scale(timings: Timings) -> str:
    bench = timings.bench
    scaled_by_paper: dict[str, str] = {}
    for printed, cell in timings.cells.items():
        if cell.row is not None:
            scaled_by_paper[bench.find_printed_workload(printed)] = str(cell.row["workload"])
    workloads = []
    for paper_workload, scaled in scaled_by_paper.items():
        workloads.append(scaled if scaled == paper_workload else f"{scaled} for {paper_workload}")
    scale = bench.stand_in.describe()
    return f"The substitute's workloads: {scale}. Prompt + new tokens x rows: {', '.join(workloads)}."


def _write_repeats(rows: Sequence[Row]) -> str:
    # repeats of rows that ran as a whole, and (workload, method, batch) of rows that took as many prompts as fit
    repeats: set[int] = set()
    largest_batches: set[tuple[str, str, int]] = set()
    for row in rows:
        workload = str(row["workload"])
        # only a row that ran as a whole has a total time
        if "total" in row["quantities"]:
            repeats.add(int(row["quantities"]["total"].get("n", 1)))
            # a workload's name ends in its number of rows, or in ``max`` for as many as fit
            if workload.endswith("xmax"):
                largest_batches.add((workload, row["method"], row["batch"]))
    fitted = ""
    if largest_batches:
        batches = [f"{method} {batch}" for _, method, batch in sorted(largest_batches)]
        fitted = f" Rows that fit: {', '.join(batches)}."
    counts = ", ".join(str(count) for count in sorted(repeats)) or "no"
    return f"Medians of {counts} repeats in shuffled order.{fitted}"


def _write_agreement(timings: Timings) -> Iterator[str]:
    compared, agreeing = 0, 0
    for printed, cell in timings.cells.items():
        if cell.ratio is None or cell.published_ratio is None or printed.method == timings.bench.base:
            continue
        # round as shown, to two digits, so that 1.00 agrees only with 1.00
        our_ratio, paper_ratio = round(cell.ratio, 2), round(cell.published_ratio, 2)
        compared += 1
        # both above 1, both below 1, or both exactly 1
        if (our_ratio > 1) == (paper_ratio > 1) and (our_ratio < 1) == (paper_ratio < 1):
            agreeing += 1
    if compared:
        yield f"{agreeing} of {compared} ratios lie on the paper's side of 1."


def _write_notes_on_printed(entries: Sequence[CellView]) -> Iterator[str]:
    timed_entries = [entry for entry in entries if entry.timed is not None]
    if any(_format_printed(entry) == OOM or entry.status == OOM for entry in timed_entries):
        yield "OOM: out of memory."
    recomputed = [entry.exact for entry in entries if entry.exact]
    if recomputed:
        yield f"✓: {recomputed.count('✓')} of {len(recomputed)} printed values follow from those beside them."
    for mark, text in (("?", "suspect"), ("~", "repaired")):
        papers = [entry.timed.printed.paper for entry in entries if entry.timed is not None and entry.mark == mark]
        if papers:
            # all cells of a table are of one paper
            yield f"{mark}: the printed value is {text} (kvbench/papers/data/{papers[0]})."


def _describe_paper_models(timings: Timings) -> str:
    models = []
    for model in timings.table.models():
        # published cells write ``unstated`` if the paper does not name its model
        if model == "unstated":
            models.append("a model that is not stated")
        elif model:
            models.append(model)
    return f"{' and '.join(models)} on {' and '.join(_list_paper_devices(timings)) or timings.bench.device}"


def _list_paper_devices(timings: Timings) -> list[str]:
    devices = [cell.settings["gpu"] for cell in timings.table.printed if "gpu" in cell.settings]
    return list(dict.fromkeys(devices))
