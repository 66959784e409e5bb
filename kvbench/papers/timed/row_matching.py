"""Matching of measured rows to the printed cells of an efficiency table.

A paper's absolute values depend on its devices, so only ratios compare: our row over our base row, the paper's row over
the paper's base row. A ratio exists only where two rows were measured in one session on one device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from kvbench.bench import records
from kvbench.bench.records import MEASURED, NOT_RUN, Row
from kvbench.papers.spec.published import AVERAGE, Published
from kvbench.papers.timed.bench_spec import BenchSpec

UNITS = {"s": 1.0, "ms": 1e-3, "ms/token": 1e-3, "s/100token": 0.01, "GB": 1e9, "MB": 1e6, "MiB": 2**20, "pct": 0.01}
"""The size of each printed unit in kvbench's units: seconds, bytes, and fractions of 1."""
MORE_IS_BETTER = ("throughput", "speedup_vs_full")
"""The printed metrics of which a larger value is better."""
MISSING = "missing"
"""The status of a cell that can be measured and was not yet."""
INTEGRATED = "integrated"
"""The mark of a row whose decoding steps ran at a few cache lengths only and were interpolated between them."""
OF_STEPS = ("tpot", "decode", "total", "throughput", "attention")
"""The quantities that depend on decoding steps, so that INTEGRATED concerns them. All others were measured as usual."""
PER = {
    "token_time": ("tpot", "batch"),
    "first_token_time": ("ttft", "batch"),
    "latency": ("total", "new"),
}
"""Quantities of tables that are (a stored quantity) / (a number of its row): its batch, or its new tokens.

They are the seconds per token if the tokens of all rows count, the seconds of reading per prompt of the batch, and the
seconds of the whole generation per new token of a row.
"""
SHARES = {"kept": "cache_bytes", "speedup": "throughput"}
"""Quantities of tables that are the ratio of a stored quantity to the full cache's, measured in the same session."""

TimedLine = dict[str, Any]
"""A printed cell with the row that was measured for it.

printed: the published cell.
status: the row's status (``measured``, ``OOM``, ...), ``not run`` (see ``reason``), or ``missing`` if it can be
measured and was not yet.
value, low, high: our median and quartiles, in the printed unit; None if the row has none.
ratio: our value divided by our base row's value.
published_ratio: the printed value divided by the printed base.
marks: the row's marks that concern this quantity, such as ``integrated``.
row, base: our measured rows, if any.
device: the device on which the row was measured, or '' without a row.
less_is_better: whether a smaller value of the cell's quantity is better, as for times and bytes.
"""


def device_name(row: Row) -> str:
    """Return the device of a row by name. A CPU's name includes its number of threads, on which its times depend."""
    facts = row["facts"]
    if not str(facts["device"]).startswith("cpu"):
        return str(facts["device"])
    threads = facts.get("threads")
    plural = "" if threads == 1 else "s"
    # PyTorch names a CPU only by its architecture; the processor's name says more, if it is known
    return f"CPU {facts.get('processor') or facts['device']}, {threads} thread{plural}"


def match_cells(bench: BenchSpec, printed: Sequence[Published], rows: Sequence[Row]) -> pd.DataFrame:
    """Return a frame with a line (TimedLine) for every printed cell, with the latest measured row that belongs to it.

    All rows are of one device: the device that measured this table last.

    rows: the rows of the table's file, oldest first. They may be of other tables, models and devices, too.
    """
    # (workload, method) of the table's rows
    keys = {bench.find_row_key(cell) for cell in printed} - {None}
    of_table = [
        row for row in rows if row.get("model") == bench.model and (row.get("workload"), row.get("method")) in keys
    ]
    # rows of two devices do not compare, so a table shows the device that was measured last; rows are oldest first
    devices = [device_name(row) for row in of_table if row["status"] != NOT_RUN]
    device_rows = [row for row in rows if not devices or device_name(row) == devices[-1]]
    # objects, so that a number that is missing stays None
    return pd.DataFrame([_match_cell(cell, bench, printed, device_rows) for cell in printed], dtype=object)


def count_others(bench: BenchSpec, cells: pd.DataFrame, rows: Sequence[Row]) -> Mapping[str, int]:
    """Count the rows of the table's model that were measured on other devices than the table shows, by device."""
    shown = set(cells["device"]) - {""}
    # a table that shows nothing leaves nothing out
    if not shown:
        return Counter()
    devices = [device_name(row) for row in rows if row.get("model") == bench.model]
    return Counter(name for name in devices if name not in shown)


def list_workloads(bench: BenchSpec, cells: pd.DataFrame, measured: bool = False) -> list[str]:
    """Return the workloads on which cells are to be measured, in the paper's order.

    They are the workloads of missing cells; with ``measured``, also those of cells that have a row already.
    """
    # a cell with a reason against running has no row, so ``measured`` leaves it out, too
    wanted = cells[(cells["status"] == MISSING) | (measured & cells["row"].notna())]
    keys = [bench.find_row_key(cell) for cell in wanted["printed"]]
    return list(dict.fromkeys(key[0] for key in keys if key is not None))


def find_stored_quantity(quantity: str) -> str:
    """Return the quantity of stored rows from which a quantity of a table is computed, by SHARES and PER or itself."""
    stored, _ = PER.get(quantity, (SHARES.get(quantity, quantity), ""))
    return stored


def _match_cell(cell: Published, bench: BenchSpec, printed: Sequence[Published], rows: Sequence[Row]) -> TimedLine:
    printed_base = _find_printed_base(cell, bench, printed)
    line: TimedLine = {"printed": cell, "status": NOT_RUN, "reason": "", "marks": (), "device": ""}
    line["less_is_better"] = cell.metric not in MORE_IS_BETTER
    line |= dict.fromkeys(("value", "low", "high", "ratio", "published_ratio", "row", "base"))
    # there is none if the paper prints no base cell, if one of the two cells has no number, or if the base is 0
    if printed_base is not None and cell.value is not None and printed_base.value:
        line["published_ratio"] = cell.value / printed_base.value
    key = bench.find_row_key(cell)
    quantity = bench.quantities.get(cell.metric)
    reason = bench.why_not(cell)
    if not reason and cell.dataset == AVERAGE:
        reason = "an average over all datasets, of which some are not run"
    if reason or key is None or quantity is None:
        return line | {"reason": reason or "no row is declared for it"}
    # rows are appended as they are measured, so the latest one is the last
    of_cell = [r for r in rows if (r.get("model"), r.get("workload"), r.get("method")) == (bench.model, *key)]
    if not of_cell:
        return line | {"status": MISSING}
    row = of_cell[-1]
    marks = tuple(row["marks"])
    # a quantity that does not depend on decoding steps, such as a peak of memory, was not interpolated
    if find_stored_quantity(quantity) not in OF_STEPS:
        marks = tuple(mark for mark in marks if mark != INTEGRATED)
    line |= {"status": str(row["status"]), "marks": marks, "row": row, "device": device_name(row)}
    if row["status"] != MEASURED:
        return line | {"reason": str(row["reason"])}
    # if the paper's base row lacks the quantity, such as a time to prune, there is no ratio to compare
    if printed_base is not None:
        line["base"] = _find_base_row(bench, cell, row, rows)
    # a unit without an entry, such as token/s, is kvbench's own
    unit = UNITS.get(cell.unit, 1.0)
    value, low, high = (_read_statistic(row, rows, quantity, name) for name in ("median", "q1", "q3"))
    if value is not None:
        line["value"] = value / unit
        base_value = None
        if line["base"] is not None:
            base_value = _read_statistic(line["base"], rows, quantity, "median")
        # the unit cancels; a time or a size of 0 has no ratio to it
        if base_value:
            line["ratio"] = value / base_value
    # a single repeat has no spread
    repeats = int(row["quantities"].get(find_stored_quantity(quantity), {}).get("n", 1))
    if low is not None and high is not None and repeats > 1:
        line |= {"low": low / unit, "high": high / unit}
    return line


def _find_base_row(bench: BenchSpec, cell: Published, row: Row, rows: Sequence[Row]) -> Row | None:
    key = bench.find_row_key(cell, bench.base)
    if key is None:
        return None
    # ``row_of_base`` looks on the workload of ``row``
    base = records.row_of_base(row, rows, key[1])
    if base is None or base["status"] != MEASURED or device_name(base) != device_name(row):
        return None
    return base


def _find_printed_base(cell: Published, bench: BenchSpec, printed: Sequence[Published]) -> Published | None:
    def list_conditions(c: Published) -> tuple[str | None, ...]:
        return c.model, c.dataset, c.metric, c.settings.get("gpu"), bench.find_printed_workload(c)

    bases = [other for other in printed if other.method == bench.base]
    return next((base for base in bases if list_conditions(base) == list_conditions(cell)), None)


def _read_statistic(row: Row, rows: Sequence[Row], quantity: str, stat: str) -> float | None:
    """Return a statistic of a row's quantity in seconds, bytes or as a ratio; None if the row lacks it."""
    if quantity in SHARES:
        # the quartiles of a row and of its full cache do not give the quartiles of their ratio
        if stat != "median":
            return None
        # without a method, ``row_of_base`` finds the row of the full cache
        return records.ratio_of_medians(row, records.row_of_base(row, rows), SHARES[quantity])
    statistics = row["quantities"].get(find_stored_quantity(quantity), {})
    if stat not in statistics:
        return None
    divisor = float(row[PER[quantity][1]]) if quantity in PER else 1.0
    return float(statistics[stat]) / divisor
