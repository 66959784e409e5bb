"""Matching of measured rows to the printed cells of an efficiency table.

A paper's absolute values are of its own devices: what compares is a ratio, ours to our base row, theirs to theirs.
A ratio is of two rows that were measured beside each other on one device, or there is none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvbench.bench import records
from kvbench.bench.records import MEASURED, NOT_RUN, Row
from kvbench.papers.spec.published import Published
from kvbench.papers.timed.bench_spec import BenchSpec

UNITS = {"s": 1.0, "ms": 1e-3, "ms/token": 1e-3, "s/100token": 0.01, "GB": 1e9, "MB": 1e6, "MiB": 2**20, "pct": 0.01}
"""Our seconds, bytes and fractions per printed unit."""
MORE_IS_BETTER = ("throughput", "speedup_vs_full")
MISSING = "missing"
INTEGRATED = "integrated"
OF_STEPS = ("tpot", "decode", "total", "throughput", "attention")
"""Quantities that a mark of integrated steps is about; the rest of a row was measured as it is."""
QUARTILES = ("median", "q1", "q3")


@dataclass(frozen=True)
class TimedCell:
    """A printed cell with the row that was measured for it.

    status: the row's (``measured``, ``OOM``, ...), ``not run`` (see ``reason``), or ``missing`` if it can be measured.
    value, spread: our median and (lower, upper) quartile, in the printed unit.
    ratio: our value over that of our base row; published_ratio: the same of the printed values.
    marks: the row's marks that concern this quantity, such as ``integrated``.
    row, base: our measured rows, if any.
    """

    printed: Published
    status: str
    reason: str = ""
    value: float | None = None
    spread: tuple[float, float] | None = None
    ratio: float | None = None
    published_ratio: float | None = None
    marks: tuple[str, ...] = ()
    row: Row | None = None
    base: Row | None = None

    @property
    def lower(self) -> bool:
        """Tell whether less is better."""
        return self.printed.metric not in MORE_IS_BETTER

    @property
    def device(self) -> str:
        """Return the device of the row; '' without one."""
        return "" if self.row is None else device(self.row)


def device(row: Row) -> str:
    """Return the device of a row by name; a CPU with its number of threads, without which times say nothing."""
    facts = row["facts"]
    if not str(facts["device"]).startswith("cpu"):
        return str(facts["device"])
    threads = facts.get("threads")
    name = facts.get("processor") or facts["device"]
    return f"CPU {name}, {threads} thread{'s' if threads != 1 else ''}"


def place(declared: BenchSpec, printed: Sequence[Published], rows: Sequence[Row]) -> list[TimedCell]:
    """Match every printed cell with its latest row on one device: that of the latest row of all."""
    wanted = {(declared.model, *row_key) for c in printed if (row_key := declared.ours(c)) is not None}
    candidates = [r for r in rows if (r.get("model"), r.get("workload"), r.get("method")) in wanted]
    latest_device = next((device(r) for r in reversed(candidates) if r["status"] != NOT_RUN), None)
    device_rows = [r for r in rows if latest_device is None or device(r) == latest_device]
    return [_cell(c, declared, printed, device_rows) for c in printed]


def others(declared: BenchSpec, cells: Sequence[TimedCell], rows: Sequence[Row]) -> Mapping[str, int]:
    """Count the rows of the table's model on devices that it does not show."""
    shown = {c.device for c in cells if c.row is not None}
    devices = [device(r) for r in rows if r.get("model") == declared.model]
    return Counter(d for d in devices if shown and d not in shown)


def workloads(declared: BenchSpec, cells: Sequence[TimedCell], measured: bool = False) -> list[str]:
    """Return the workloads that are wanted and not measured, in the paper's order; all with ``measured``."""
    row_keys = (declared.ours(c.printed) for c in cells if c.status == MISSING or (measured and c.row is not None))
    return list(dict.fromkeys(key[0] for key in row_keys if key is not None))


def source(quantity: str) -> str:
    """Return the quantity of a row from which one of a table follows."""
    return SHARES.get(quantity, PER.get(quantity, (quantity,))[0])


def _cell(cell: Published, declared: BenchSpec, printed: Sequence[Published], rows: Sequence[Row]) -> TimedCell:
    """Build a printed cell's timing: its row, the base row measured beside it, and both ratios."""
    printed_base = _printed_base(cell, declared, printed)
    published_ratio = None
    if printed_base is not None and printed_base.value and cell.value is not None:
        published_ratio = cell.value / printed_base.value
    cell_with = partial(TimedCell, cell, published_ratio=published_ratio)
    row_key, quantity, reason = declared.ours(cell), declared.quantities.get(cell.metric), declared.why_not(cell)
    if cell.dataset == "avg":
        reason = reason or "an average over all datasets, of which some are not run"
    if reason or row_key is None or quantity is None:
        return cell_with(NOT_RUN, reason or "no row is declared for it")
    fields = {"model": declared.model, "workload": row_key[0], "method": row_key[1]}
    row = next((r for r in reversed(rows) if all(r.get(k) == v for k, v in fields.items())), None)
    if row is None:
        return cell_with(MISSING)
    marks = tuple(m for m in row["marks"] if m != INTEGRATED or source(quantity) in OF_STEPS)
    cell_with = partial(cell_with, marks=marks, row=row)
    if row["status"] != MEASURED:
        return cell_with(str(row["status"]), str(row["reason"]))
    base_key = declared.ours(cell, declared.base)
    base = records.base(row, rows, base_key[1]) if base_key is not None else None
    # what the paper's base does not have, such as a time to prune, is no share of what ours has
    if base is not None and (printed_base is None or base["status"] != MEASURED or device(base) != device(row)):
        base = None
    unit = UNITS.get(cell.unit, 1.0)
    value, low, high = (_value(row, rows, quantity, stat) for stat in QUARTILES)
    base_value = None if base is None else _value(base, rows, quantity, "median")
    repeats = int(row["quantities"].get(source(quantity), {}).get("n", 1))
    return cell_with(
        MEASURED,
        value=None if value is None else value / unit,
        spread=None if low is None or high is None or repeats < 2 else (low / unit, high / unit),
        ratio=value / base_value if value is not None and base_value else None,
        base=base,
    )


def _printed_base(cell: Published, declared: BenchSpec, printed: Sequence[Published]) -> Published | None:
    """Return the printed cell of the base method on the same model, dataset, device and workload."""

    def where(c: Published) -> tuple[Any, ...]:
        """Return the parts of a cell that it shares with that of its base."""
        return (c.model, c.dataset, c.metric, c.settings.get("gpu"), declared.printed_workload(c))

    return next((c for c in printed if c.method == declared.base and where(c) == where(cell)), None)


def _value(row: Row, rows: Sequence[Row], quantity: str, stat: str) -> float | None:
    """Return a statistic of a row's quantity, in seconds, bytes or as a share; None where there is none."""
    if quantity in SHARES:
        name = SHARES[quantity]
        return records.ratio(row, records.base(row, rows), name) if stat == "median" else None
    name, divisor = PER.get(quantity, (quantity, lambda row: 1.0))
    statistics = row["quantities"].get(name)
    return None if statistics is None or stat not in statistics else float(statistics[stat]) / divisor(row)


PER: dict[str, tuple[str, Callable[[Row], float]]] = {
    "token_time": ("tpot", lambda row: float(row["batch"])),
    "first_token_time": ("ttft", lambda row: float(row["batch"])),
    "latency": ("total", lambda row: float(row["new"])),
}
"""Seconds of a token of one row, of one prompt's first token, and of a token of all rows."""

SHARES = {"kept": "cache_bytes", "speedup": "throughput"}
"""Over the full cache of the same session."""
