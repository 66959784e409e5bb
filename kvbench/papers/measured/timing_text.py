"""An efficiency table's cells as text: both ratios side by side, and below them each side's value on its own device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvbench.base.formatting import DASH, format_number, with_interval
from kvbench.bench.records import FAILED, NOT_RUN, OOM, REFUSED
from kvbench.papers.timed.row_matching import INTEGRATED, MISSING
from kvbench.papers.timed.timings import SCRIPT, Timings

SHORT = {"pct": "%", "x": ""}
"""Words for a printed unit in a column's head, where the unit itself is not written."""


def name_column(timings: Timings, column: str) -> str:
    """Return a column's name with the unit in which the paper prints it, such as ``decode ms``."""
    # all rows of a column have one unit
    unit = next(row.cells[column].unit for row in timings.table.rows if column in row.cells)
    return f"{column} {SHORT.get(unit, unit)}".rstrip()


def format_cell(cell: Any, show: str) -> list[str]:
    """Return the lines of text in one cell of a table of timings.

    show: ``both`` (each side's ratio to the base row, and each side's value), ``ours``, ``published``, ``delta`` (the
    difference of the ratios), or ``beside``, which shows what ``published`` does.
    """
    timed = cell.timed
    # a sign replaces a missing number: every other status says in one way or another that nothing was measured
    signs = {REFUSED: "✗", FAILED: "✗", OOM: OOM, "measured": ""}
    sign = signs.get(cell.status, "—")
    our_ratio, paper_ratio = sign or _format_ratio(timed.ratio), _format_ratio(timed.published_ratio)
    printed = _format_printed(cell)
    if show in ("published", "beside"):
        # a base row has no ratio to itself, and some rows have none in the paper
        if timed.published_ratio is None:
            return [printed]
        return [paper_ratio, printed]
    if show == "delta":
        if timed.ratio is None or timed.published_ratio is None:
            return [sign or "—"]
        return [format_number(timed.ratio - timed.published_ratio, 2, sign=True)]
    value, spread = "", ""
    if timed.value is not None:
        mark = " ∫" if INTEGRATED in timed.marks else ""
        ci = None if timed.low is None else (timed.low, timed.high)
        value, _, spread = with_interval(timed.value, ci, 3, significant=True, mark=mark).partition("\n")
    # without a ratio, the value alone is shown: a dash above it would mean that nothing was measured
    value_alone = bool(value) and timed.ratio is None
    if show == "ours":
        texts = [value, spread] if value_alone else [our_ratio, value, spread]
        return [text for text in texts if text]
    texts = []
    # the paper's ratio still needs ours beside it, be it only a dash
    if not value_alone or timed.published_ratio is not None:
        texts.append(f"{our_ratio} ({paper_ratio})")
    if value:
        texts.append(f"ours {value}")
    texts.append(f"paper {printed}")
    return texts


def _format_printed(cell: Any) -> str:
    # papers write in many ways that a row does not fit into memory, but the cell's flag always says out-of-memory
    if "out-of-memory" in cell.timed.printed.flag.lower():
        return OOM
    text = f"{cell.paper_text or '—'}{cell.paper_mark}"
    if cell.paper_exact:
        text += f" {cell.paper_exact}"
    return text


def _format_ratio(ratio: float | None) -> str:
    if ratio is None:
        return DASH
    return f"{format_number(ratio, 2)}×"


def write_notes(timings: Timings, cells: Sequence[Any], show: str = "both") -> list[str]:
    """Return the notes for readers: both devices, the base of ratios, a stand-in's scale, and missing rows.

    cells: both sides of all cells of the table.
    """
    bench = timings.bench
    cells = [cell for cell in cells if cell.timed is not None]
    paper_note = f"N.NN×: the paper's over its own {bench.base}; the paper's is {_describe_paper_models(timings)}."
    if show == "published":
        return [paper_note, *_write_notes_on_printed(cells)]
    texts: list[str] = []
    if timings.any_measured:
        texts += _write_notes_on_ours(timings, show)
    else:
        # only the paper's ratios are shown; otherwise these brackets follow our ratio
        texts.append(paper_note.replace("N.NN×", "(N.NN×)", 1))
    if any(INTEGRATED in cell.timed.marks for cell in cells):
        texts.append("∫ integrated: steps were run at a few cache lengths and interpolated between them.")
    if show != "delta":
        # marks of printed values do not stand beside our side alone
        texts += _write_notes_on_printed(cells, with_marks=show != "ours")
    # several columns show one row, so a set names each failure once
    failures = set()
    for timed in timings.lines:
        if timed.status in (REFUSED, FAILED) and timed.row:
            failures.add((timed.row["method"], timed.row["workload"], timed.reason))
    texts += [f"✗ {method} at {workload}: {reason}" for method, workload, reason in sorted(failures)]
    for reason, names in _group_names_by_reason(timings).items():
        texts.append(f"— not run: {', '.join(names)}: {reason}")
    if any(timed.status == MISSING for timed in timings.lines):
        texts.append(f"— not measured yet: {timings.command}")
    for device, count in timings.left_out.items():
        texts.append(f"Left out: {count} rows of {device}; a table shows one device.")
    if timings.stand_in:
        texts.append(f"GPU numbers are missing: {SCRIPT} {bench.results} measures them; they are then shown instead.")
    if timings.any_measured:
        texts.append(f"Rows: {timings.file.parent.name}/{timings.file.name}.")
    return texts


def _group_names_by_reason(timings: Timings) -> dict[str, dict[str, None]]:
    """Return the models, methods or datasets that are not run, each once in the table's order, by the reason."""
    names_by_reason: dict[str, dict[str, None]] = {}
    for timed in timings.lines:
        if timed.status == NOT_RUN:
            printed = timed.printed
            # the declaration excludes a cell by its model, method or dataset: name the one that it excludes, else an
            # average as such, and any other cell by its method
            names = [n for n in (printed.model, printed.method, printed.dataset) if n in timings.bench.not_run]
            names.append("avg" if printed.dataset == "avg" else printed.method)
            names_by_reason.setdefault(timed.reason, {})[names[0]] = None
    return names_by_reason


def _write_notes_on_ours(timings: Timings, show: str) -> Iterator[str]:
    bench = timings.bench
    # N.NN stands for any ratio in the table
    start = "N.NN×:"
    if show == "delta":
        start = "±N.NN: our ratio less the paper's. A ratio is"
    ratio_text = f"{start} ours over our {bench.base} row, measured beside it (the paper's over its own)"
    ours = f"{bench.model} with random weights on {timings.device}; the paper's"
    if timings.stand_in:
        yield (
            f"Substitute model: ours is {ours} is {_describe_paper_models(timings)}. {ratio_text}. "
            "Only ratios compare, and of those the direction; no GPU took part."
        )
        # a stand-in's workloads beside the paper's
        scaled: dict[str, str] = {}
        for timed in timings.lines:
            if timed.row is not None:
                scaled[bench.find_printed_workload(timed.printed)] = str(timed.row["workload"])
        workloads = [name if name == paper else f"{name} for {paper}" for paper, name in scaled.items()]
        scale = bench.stand_in.describe()
        yield f"The substitute's workloads: {scale}. Prompt + new tokens x rows: {', '.join(workloads)}."
    else:
        yield f"Ours: {ours}: {_describe_paper_models(timings)}. {ratio_text}. Only ratios compare."
    if len(_list_paper_devices(timings)) > 1:
        yield "Ours is of one device and stands beside each of the paper's."
    yield _write_repeats(timings)
    yield from _write_agreement(timings)
    for note in bench.notes:
        yield f"Ours: {note}."


def _write_repeats(timings: Timings) -> str:
    # repeats of rows that ran as a whole, and (workload, method, batch) of rows that took as many prompts as fit
    repeats: set[int] = set()
    largest_batches: set[tuple[str, str, int]] = set()
    for row in timings.cells["row"]:
        # only a row that ran as a whole has a total time
        if row is not None and "total" in row["quantities"]:
            repeats.add(int(row["quantities"]["total"].get("n", 1)))
            # a workload's name ends in its number of rows, or in ``max`` for as many as fit
            if str(row["workload"]).endswith("xmax"):
                largest_batches.add((str(row["workload"]), row["method"], row["batch"]))
    batches = ", ".join(f"{method} {batch}" for _, method, batch in sorted(largest_batches))
    counts = ", ".join(str(count) for count in sorted(repeats)) or "no"
    note = f"Medians of {counts} repeats in shuffled order."
    if batches:
        note += f" Rows that fit: {batches}."
    return note


def _write_agreement(timings: Timings) -> Iterator[str]:
    compared, agreeing = 0, 0
    for timed in timings.lines:
        if timed.ratio is None or timed.published_ratio is None or timed.printed.method == timings.bench.base:
            continue
        # round as shown, to two digits, so that 1.00 agrees only with 1.00
        ours, paper = round(timed.ratio, 2), round(timed.published_ratio, 2)
        compared += 1
        # both above 1, both below 1, or both exactly 1
        agreeing += (ours > 1) == (paper > 1) and (ours < 1) == (paper < 1)
    if compared:
        yield f"{agreeing} of {compared} ratios lie on the paper's side of 1."


def _write_notes_on_printed(cells: Sequence[Any], with_marks: bool = True) -> Iterator[str]:
    if any(_format_printed(cell) == OOM or cell.status == OOM for cell in cells):
        yield "OOM: out of memory."
    if not with_marks:
        return
    recomputed = [cell.paper_exact for cell in cells if cell.paper_exact]
    if recomputed:
        yield f"✓: {recomputed.count('✓')} of {len(recomputed)} printed values follow from those beside them."
    for mark, text in (("?", "suspect"), ("~", "repaired")):
        papers = [cell.timed.printed.paper for cell in cells if cell.paper_mark == mark]
        if papers:
            # all cells of a table are of one paper
            yield f"{mark}: the printed value is {text} (kvbench/papers/data/{papers[0]})."


def _describe_paper_models(timings: Timings) -> str:
    # published cells write ``unstated`` if the paper does not name its model
    names = {"unstated": "a model that is not stated"}
    models = " and ".join(names.get(model, model) for model in timings.table.models() if model)
    return f"{models} on {' and '.join(_list_paper_devices(timings)) or timings.bench.device}"


def _list_paper_devices(timings: Timings) -> list[str]:
    devices = [cell.settings["gpu"] for cell in timings.table.printed if "gpu" in cell.settings]
    return list(dict.fromkeys(devices))
