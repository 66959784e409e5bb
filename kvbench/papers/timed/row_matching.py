"""Which measured row stands for which printed cell of an efficiency table.

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

GB, MB, MIB = 1e9, 1e6, 2**20
UNITS = {"s": 1.0, "ms": 1e-3, "ms/token": 1e-3, "s/100token": 0.01, "GB": GB, "MB": MB, "MiB": MIB, "pct": 0.01}
"""Our seconds, bytes and fractions per printed unit."""
MORE_IS_BETTER = ("throughput", "speedup_vs_full")
MISSING = "missing"
INTEGRATED = "integrated"
OF_STEPS = ("tpot", "decode", "total", "throughput", "attention")
"""What a mark of integrated steps is about; the rest of a row was measured as it is."""
QUARTILES = ("median", "q1", "q3")


@dataclass(frozen=True)
class TimedCell:
    """A printed cell with what was measured for it.

    status: measured, OOM, refused or failed as the row says, ``not run`` (``reason`` says why), or ``missing`` if it
    can be measured and was not. value: ours in the printed unit, ``spread`` its quartiles. ratio: ours over our base
    row, published_ratio theirs over theirs. marks: of the row, such as ``integrated``. row, base: what they are of.
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
        """Whether less is better."""
        return self.printed.metric not in MORE_IS_BETTER

    @property
    def device(self) -> str:
        """Where the row was measured; '' without one."""
        return "" if self.row is None else device(self.row)


def device(row: Row) -> str:
    """The device of a row by name; a CPU's with its number of threads, without which its times say nothing."""
    facts = row["facts"]
    if not str(facts["device"]).startswith("cpu"):
        return str(facts["device"])
    threads = facts.get("threads")
    name = facts.get("processor") or facts["device"]
    return f"CPU {name}, {threads} thread{'s' if threads != 1 else ''}"


def place(declared: BenchSpec, printed: Sequence[Published], rows: Sequence[Row]) -> list[TimedCell]:
    """Every printed cell with its measured row, the latest of them, on one device: that of the latest row of all."""
    wanted = {(declared.model, *at) for c in printed if (at := declared.ours(c)) is not None}
    known = [r for r in rows if (r.get("model"), r.get("workload"), r.get("method")) in wanted]
    last = next((device(r) for r in reversed(known) if r["status"] != NOT_RUN), None)
    mine = [r for r in rows if last is None or device(r) == last]
    return [_cell(c, declared, printed, mine) for c in printed]


def others(declared: BenchSpec, cells: Sequence[TimedCell], rows: Sequence[Row]) -> Mapping[str, int]:
    """How many rows of the table's model are of devices that it does not show."""
    shown = {c.device for c in cells if c.row is not None}
    mine = [device(r) for r in rows if r.get("model") == declared.model]
    return Counter(d for d in mine if shown and d not in shown)


def workloads(declared: BenchSpec, cells: Sequence[TimedCell], measured: bool = False) -> list[str]:
    """The workloads that are wanted and not measured, in the paper's order; all that are wanted with ``measured``."""
    wanted = (declared.ours(c.printed) for c in cells if c.status == MISSING or (measured and c.row is not None))
    return list(dict.fromkeys(at[0] for at in wanted if at is not None))


def source(quantity: str) -> str:
    """The quantity of a row that one of a table follows from."""
    return SHARES.get(quantity, PER.get(quantity, (quantity,))[0])


def _cell(cell: Published, declared: BenchSpec, printed: Sequence[Published], rows: Sequence[Row]) -> TimedCell:
    beneath = _printed_base(cell, declared, printed)
    theirs = None if beneath is None or not beneath.value or cell.value is None else cell.value / beneath.value
    timed = partial(TimedCell, cell, published_ratio=theirs)
    at, quantity, why = declared.ours(cell), declared.quantities.get(cell.metric), declared.why_not(cell)
    if cell.dataset == "avg":
        why = why or "an average over all datasets, of which some are not run"
    if why or at is None or quantity is None:
        return timed(NOT_RUN, why or "no row is declared for it")
    alike = {"model": declared.model, "workload": at[0], "method": at[1]}
    row = next((r for r in reversed(rows) if all(r.get(k) == v for k, v in alike.items())), None)
    if row is None:
        return timed(MISSING)
    marks = tuple(m for m in row["marks"] if m != INTEGRATED or source(quantity) in OF_STEPS)
    timed = partial(timed, marks=marks, row=row)
    if row["status"] != MEASURED:
        return timed(str(row["status"]), str(row["reason"]))
    beside = declared.ours(cell, declared.base)
    base = records.base(row, rows, beside[1]) if beside is not None else None
    # what the paper's base does not have, such as a time to prune, is no share of what ours has
    if base is not None and (beneath is None or base["status"] != MEASURED or device(base) != device(row)):
        base = None
    unit = UNITS.get(cell.unit, 1.0)
    value, low, high = (_value(row, rows, quantity, stat) for stat in QUARTILES)
    other = None if base is None else _value(base, rows, quantity, "median")
    repeats = int(row["quantities"].get(source(quantity), {}).get("n", 1))
    return timed(
        MEASURED,
        value=None if value is None else value / unit,
        spread=None if low is None or high is None or repeats < 2 else (low / unit, high / unit),
        ratio=value / other if value is not None and other else None,
        base=base,
    )


def _printed_base(cell: Published, declared: BenchSpec, printed: Sequence[Published]) -> Published | None:
    """The printed cell of the base method on the same model, dataset, device and workload."""

    def where(c: Published) -> tuple[Any, ...]:
        return (c.model, c.dataset, c.metric, c.settings.get("gpu"), declared.printed_workload(c))

    return next((c for c in printed if c.method == declared.base and where(c) == where(cell)), None)


def _value(row: Row, rows: Sequence[Row], quantity: str, stat: str) -> float | None:
    if quantity in SHARES:
        name = SHARES[quantity]
        return records.ratio(row, records.base(row, rows), name) if stat == "median" else None
    name, per = PER.get(quantity, (quantity, lambda row: 1.0))
    found = row["quantities"].get(name)
    return None if found is None or stat not in found else float(found[stat]) / per(row)


PER: dict[str, tuple[str, Callable[[Row], float]]] = {
    "token_time": ("tpot", lambda row: float(row["batch"])),
    "first_token_time": ("ttft", lambda row: float(row["batch"])),
    "latency": ("total", lambda row: float(row["new"])),
}
"""Seconds of a token of one row, of one prompt's first token, and of a token of all rows."""

SHARES = {"kept": "cache_bytes", "speedup": "throughput"}
"""Over the full cache of the same session."""
