"""Render timed rows: times with their quartiles, and ratios to the base row of the same session."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvbench.base.formatting import format_number, format_percent, format_size, with_interval
from kvbench.bench.records import FULL, MEASURED, NOT_RUN, Row, median_of, ratio_of_medians, row_of_base
from kvbench.report.table import Table
from kvbench.report.writers import compose

# the quantities of each table, in the order of its columns
TIMES = ("ttft", "tpot", "decode", "total")
PARTS = ("prefill", "compress", "build", "attention")
BYTES = ("peak_allocated", "peak_reserved", "cache_bytes")
RowAndBase = tuple[Row, Row | None]
"""A row and the row to which its ratios are; None if there is no such row."""


def render(rows: Sequence[Row], over: str = FULL) -> str:
    """Return as text the tables of each model and workload, with ratios to the row of ``over``, and notes below."""
    rows_by_block: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        rows_by_block.setdefault((row["model"], row["workload"]), []).append(row)
    blocks = []
    for (model, workload), block_rows in rows_by_block.items():
        rows_and_bases = [(row, row_of_base(row, block_rows, over)) for row in block_rows]
        tables = [_build_times_table(rows_and_bases)]
        measured = [(row, base_row) for row, base_row in rows_and_bases if row["status"] == MEASURED]
        if measured:
            tables += [_build_parts_table(measured), _build_bytes_table(measured)]
        text = compose(tables, [], "text")
        blocks.append(f"{model}: prompt + new tokens x rows {workload}\n\n{text}")
    notes = compose([], list(_list_notes(rows, over)), "text")
    return "\n".join([*blocks, notes])


def _build_times_table(rows_and_bases: Sequence[RowAndBase]) -> Table:
    """Return the table of TIMES and throughput. Rows that were not run are left out: only the notes explain them."""
    body = []
    for row, base_row in rows_and_bases:
        if row["status"] == NOT_RUN:
            continue
        # the batch is None if the row ended before the largest batch was found
        cells = [_write_label(row), str(row["batch"] or "max")]
        if row["status"] == MEASURED:
            cells += [_write_time(row, quantity, base_row) for quantity in TIMES]
            cells.append(_write_median(row, "throughput", base_row, format_number))
        else:
            # the status replaces the first number, and all others stay empty
            cells.append(str(row["status"]))
            cells += [""] * len(TIMES)
        body.append(tuple(cells))
    return Table(("method", "batch", "TTFT", "TPOT", "decode", "total", "tokens/s"), tuple(body))


def _build_parts_table(measured: Sequence[RowAndBase]) -> Table:
    """Return the table of PARTS: the parts of the time to the first token, and the time of attention in all passes."""
    body = []
    for row, base_row in measured:
        cells = [_write_label(row)]
        cells += [_write_time(row, quantity, base_row) for quantity in PARTS]
        body.append(tuple(cells))
    return Table(("method", "prefill", "compress", "build", "attention"), tuple(body))


def _build_bytes_table(measured: Sequence[RowAndBase]) -> Table:
    """Return the table of BYTES, and of how close a decode step comes to the memory's bandwidth."""
    body = []
    for row, base_row in measured:
        cells = [_write_label(row)]
        cells += [_write_median(row, quantity, base_row, format_size) for quantity in BYTES]
        roofline = row["roofline"]
        cells += [
            format_size(roofline["moved"]),
            _write_seconds(roofline["bound"]),
            format_percent(100 * roofline["fraction"]),
        ]
        body.append(tuple(cells))
    return Table(("method", "peak", "reserved", "cache", "step\nmoves", "bound", "reached"), tuple(body))


def _list_notes(rows: Sequence[Row], over: str) -> Iterator[str]:
    """Yield the meaning of the columns, the machine, the remarks, and the reasons for unmeasured rows.

    over: the method or peer to whose rows ratios are made.
    """
    measured = [row for row in rows if row["status"] == MEASURED]
    if measured:
        yield from _explain_columns(measured, over)
    if len({row["session"] for row in measured}) > 1:
        yield f"Rows are of several sessions: each has its own row of {over}, and ratios are to that."
    if any("integrated" in row["marks"] for row in measured):
        yield _explain_interpolation(measured)
    methods_by_mark: dict[str, list[str]] = {}
    for row in measured:
        for mark in row["marks"]:
            if mark != "integrated":
                methods_by_mark.setdefault(mark, []).append(row["method"])
    for mark, methods in methods_by_mark.items():
        yield f"{', '.join(dict.fromkeys(methods))}: {mark}."
    for row in rows:
        if row["status"] != MEASURED:
            text = f"{row['status']}: {row['method']} at {row['workload']}"
            if row["reason"]:
                text += f": {row['reason']}"
            yield text


def _explain_interpolation(measured: Sequence[Row]) -> str:
    """Return the note on interpolated rows, with the quotient of each row that was checked.

    The quotient is the estimated total over the total of a generation in which all steps ran.
    """
    note = "∫ integrated: steps were run at a few cache lengths and interpolated between them."
    checks = []
    for row in measured:
        quotient = median_of(row, "check")
        if quotient is not None:
            checks.append(f"{row['method']} {format_number(quotient, 3)}")
    if checks:
        note += f" Over a full generation: {', '.join(checks)}."
    return note


def _explain_columns(measured: Sequence[Row], over: str) -> Iterator[str]:
    """Yield the meaning of the columns of measured rows, and the machine of the last row.

    over: the method or peer to whose rows ratios are made.
    """
    # rows of several sessions can have different numbers of repeats
    repeats = sorted({row["quantities"]["total"]["n"] for row in measured})
    yield (
        f"Medians of {', '.join(map(str, repeats))} repeats in shuffled order, [quartiles]; N.NNx: over {over} in "
        "the same session. TTFT: all rows have their first token and the decode batch stands. TPOT: one step of "
        "all rows. tokens/s: new tokens of all rows over the total."
    )
    last = measured[-1]
    facts = last["facts"]
    if str(facts["device"]).startswith("cpu"):
        yield "peak, reserved: the most that a process of its own grew by above its imports, and held in all."
    else:
        yield "peak, reserved: the most that PyTorch's allocator gave out, and held."
    # the bandwidth was measured once a session, in GB/s
    speeds = sorted({round(row["roofline"]["bandwidth"] / 1e9, 1) for row in measured})
    yield (
        "moves: weights, stored keys and values, and the new ones, of a mean step; bound: their time at the "
        f"bandwidth of a copy ({', '.join(map(str, speeds))} GB/s here); reached: bound over TPOT."
    )
    yield (
        f"{facts['device']}, {facts['threads']} threads, torch {facts['torch']}, {last['dtype']}, weights "
        f"{last['weights']}, decode attention {facts.get('paths', 'plain')}."
    )


def _write_label(row: Row) -> str:
    """Return the method's name, one word a line, with a mark if the row is interpolated."""
    label: str = row["method"]
    if "integrated" in row["marks"]:
        label += " ∫"
    return label.replace(" ", "\n")


def _write_time(row: Row, quantity: str, base_row: Row | None) -> str:
    """Return the text of a time: the median, its quartiles if there are several repeats, and its ratio."""
    median = median_of(row, quantity)
    if median is None:
        return "—"
    spread = row["quantities"][quantity]
    quartiles = (spread["q1"], spread["q3"]) if spread["n"] > 1 else None
    return _write_seconds(median, quartiles) + _write_ratio(row, quantity, base_row)


def _write_median(row: Row, quantity: str, base_row: Row | None, write: Callable[[float], str]) -> str:
    median = median_of(row, quantity)
    if median is None:
        return "—"
    return write(median) + _write_ratio(row, quantity, base_row)


def _write_ratio(row: Row, quantity: str, base_row: Row | None) -> str:
    """Return a cell's line with its ratio to the base row. Return '' without a base row and in the base row itself."""
    ratio = ratio_of_medians(row, base_row, quantity)
    if ratio is None or base_row is row:
        return ""
    return f"\n{format_number(ratio, 2)}x"


def _write_seconds(seconds: float, quartiles: tuple[float, float] | None = None) -> str:
    """Return a time in seconds as text with its unit, s from 1 s on, else ms, and its quartiles on a second line."""
    unit, factor = ("s", 1) if seconds >= 1 else ("ms", 1000)
    if quartiles is not None:
        quartiles = factor * quartiles[0], factor * quartiles[1]
    return with_interval(factor * seconds, quartiles, 3, significant=True, mark=f" {unit}")


def as_json(rows: Sequence[Row], over: str = FULL) -> list[Row]:
    """Return the rows, each with ``ratios``: by quantity, its median over that of ``over`` in the same session.

    over: a method or a peer. A quantity without a median on either side has no ratio.
    """
    records = []
    for row in rows:
        base_row = row_of_base(row, rows, over)
        ratios = {}
        for quantity in row["quantities"]:
            ratio = ratio_of_medians(row, base_row, quantity)
            if ratio is not None:
                ratios[quantity] = ratio
        records.append(row | {"ratios": ratios})
    return records
