"""Render timed rows: times with their quartiles, and ratios to the base row of the same session."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvbench.bench.records import FULL, MEASURED, NOT_RUN, Row, base, ratio, value
from kvbench.report.render import size
from kvbench.report.table import Table
from kvbench.report.writers import compose

TIMES = (("ttft", "TTFT"), ("tpot", "TPOT"), ("decode", "decode"), ("total", "total"))
PARTS = (("prefill", "prefill"), ("compress", "compress"), ("build", "build"), ("attention", "attention"))
BYTES = (("peak_allocated", "peak"), ("peak_reserved", "reserved"), ("cache_bytes", "cache"))


def render(rows: Sequence[Row], over: str = FULL) -> str:
    """Return as text the tables of each model and workload, with ratios to the row of ``over``, and notes below."""
    blocks = dict.fromkeys((r["model"], r["workload"]) for r in rows)
    parts = []
    for model, workload in blocks:
        block_rows = [r for r in rows if (r["model"], r["workload"]) == (model, workload)]
        parts.append(
            f"{model}: prompt + new tokens x rows {workload}\n\n"
            + compose(list(_sheets(block_rows, rows, over)), [], "text")
        )
    return "\n".join([*parts, compose([], list(_notes(rows, over)), "text")])


def _sheets(block_rows: Sequence[Row], rows: Sequence[Row], over: str) -> Iterator[Table]:
    bases = [(r, base(r, rows, over)) for r in block_rows if r["status"] != NOT_RUN]
    body = []
    for r, base_row in bases:
        ended = r["status"] != MEASURED
        cells = [str(r["status"]), *[""] * len(TIMES)] if ended else [_time(r, q, base_row) for q, _ in TIMES]
        speed = [] if ended else [_cell(r, "throughput", base_row, lambda speed: f"{speed:.1f}")]
        body.append((_label(r), str(r["batch"] or "max"), *cells, *speed))
    yield Table(("method", "batch", *(name for _, name in TIMES), "tokens/s"), tuple(body))
    measured = [(r, base_row) for r, base_row in bases if r["status"] == MEASURED]
    if not measured:
        return
    parts = tuple((_label(r), *(_time(r, q, base_row) for q, _ in PARTS)) for r, base_row in measured)
    yield Table(("method", *(name for _, name in PARTS)), parts)
    lines = []
    for r, base_row in measured:
        roof, sizes = r["roofline"], [_cell(r, q, base_row, size) for q, _ in BYTES]
        bound = (size(roof["moved"]), _seconds(roof["bound"]), f"{100 * roof['fraction']:.1f} %")
        lines.append((_label(r), *sizes, *bound))
    yield Table(("method", *(name for _, name in BYTES), "step\nmoves", "bound", "reached"), tuple(lines))


def _notes(rows: Sequence[Row], over: str) -> Iterator[str]:
    measured = [r for r in rows if r["status"] == MEASURED]
    if measured:
        repeats = sorted({r["quantities"]["total"]["n"] for r in measured})
        yield (
            f"Medians of {', '.join(map(str, repeats))} repeats in shuffled order, [quartiles]; N.NNx: over {over} in "
            "the same session. TTFT: all rows have their first token and the decode batch stands. TPOT: one step of "
            "all rows. tokens/s: new tokens of all rows over the total."
        )
        facts = measured[-1]["facts"]
        on_cpu = str(facts["device"]).startswith("cpu")
        yield (
            "peak, reserved: the most that a process of its own grew by above its imports, and held in all."
            if on_cpu
            else "peak, reserved: the most that PyTorch's allocator gave out, and held."
        )
        speed = sorted({round(r["roofline"]["bandwidth"] / 1e9, 1) for r in measured})
        yield (
            "moves: weights, stored keys and values, and the new ones, of a mean step; bound: their time at the "
            f"bandwidth of a copy ({', '.join(map(str, speed))} GB/s here); reached: bound over TPOT."
        )
        yield (
            f"{facts['device']}, {facts['threads']} threads, torch {facts['torch']}, {measured[-1]['dtype']}, weights "
            f"{measured[-1]['weights']}, decode attention {facts.get('paths', 'plain')}."
        )
    if len({r["session"] for r in measured}) > 1:
        yield f"Rows are of several sessions: each has its own row of {over}, and ratios are to that."
    if any("integrated" in r["marks"] for r in measured):
        checks = [f"{r['method']} {value(r, 'check'):.3f}" for r in measured if value(r, "check") is not None]
        yield "∫ integrated: steps were run at a few cache lengths and interpolated between them." + (
            f" Over a full generation: {', '.join(checks)}." if checks else ""
        )
    marks = dict.fromkeys(mark for r in measured for mark in r["marks"] if mark != "integrated")
    for mark in marks:
        yield f"{', '.join(dict.fromkeys(r['method'] for r in measured if mark in r['marks']))}: {mark}."
    for r in rows:
        if r["status"] != MEASURED:
            yield f"{r['status']}: {r['method']} at {r['workload']}{': ' if r['reason'] else ''}{r['reason']}"


def _label(row: Row) -> str:
    mark = " ∫" if "integrated" in row["marks"] else ""
    return (row["method"] + mark).replace(" ", "\n")


def _cell(row: Row, quantity: str, to: Row | None, show: Callable[[float], str]) -> str:
    median, share = value(row, quantity), ratio(row, to, quantity)
    if median is None:
        return "—"
    return show(median) + (f"\n{share:.2f}x" if share is not None and to is not row else "")


def _time(row: Row, quantity: str, to: Row | None) -> str:
    spread = row["quantities"].get(quantity, {"n": 0})
    quartiles = f"\n[{_plain(spread['q1'])}, {_plain(spread['q3'])}]" if spread["n"] > 1 else ""
    return _cell(row, quantity, to, lambda median: _seconds(median) + quartiles)


def _seconds(s: float) -> str:
    return f"{_plain(s)} {'s' if s >= 1 else 'ms'}"


def _plain(s: float) -> str:
    """Return the number alone, in the unit of ``_seconds``: seconds from 1 s on, else milliseconds."""
    if s >= 1:
        return f"{s:.2f}"
    return f"{1000 * s:.3g}" if s < 0.1 else f"{1000 * s:.0f}"


def as_json(rows: Sequence[Row], over: str = FULL) -> list[dict[str, Any]]:
    """Return the rows with their ratios to the row of ``over``, a method or a peer, in the same session."""

    def ratios(row: Mapping[str, Any]) -> dict[str, float]:
        base_row = base(row, rows, over)
        quotients = {q: ratio(row, base_row, q) for q in row["quantities"]}
        return {q: r for q, r in quotients.items() if r is not None}

    return [{**r, "ratios": ratios(r)} for r in rows]
