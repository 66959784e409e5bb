"""Matching of measured rows to the printed cells of an efficiency table.

A paper's absolute values depend on its devices, so only ratios compare: our row over our base row, the paper's row over
the paper's base row. A ratio exists only where two rows were measured in one session on one device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class TimedCell:
    """A printed cell with the row that was measured for it.

    status: the row's status (``measured``, ``OOM``, ...), ``not run`` (see ``reason``), or ``missing`` if it can be
    measured and was not yet.
    value, spread: our median and (lower, upper) quartile, in the printed unit; None if the row has none.
    ratio: our value divided by our base row's value.
    published_ratio: the printed value divided by the printed base.
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
    def less_is_better(self) -> bool:
        """True if a smaller value of the cell's quantity is better, as for times and bytes."""
        return self.printed.metric not in MORE_IS_BETTER

    @property
    def device(self) -> str:
        """The device on which the row was measured, or '' without a row."""
        return "" if self.row is None else device_name(self.row)


def device_name(row: Row) -> str:
    """Return the device of a row by name. A CPU's name includes its number of threads, on which its times depend."""
    facts = row["facts"]
    if not str(facts["device"]).startswith("cpu"):
        return str(facts["device"])
    threads = facts.get("threads")
    plural = "" if threads == 1 else "s"
    # PyTorch names a CPU only by its architecture; the processor's name says more, if it is known
    return f"CPU {facts.get('processor') or facts['device']}, {threads} thread{plural}"


def match_cells(declared: BenchSpec, printed: Sequence[Published], rows: Sequence[Row]) -> list[TimedCell]:
    """Return a TimedCell for every printed cell, with the latest measured row that belongs to it.

    All rows are of one device: the device that measured this table last.

    rows: the rows of the table's file, oldest first. They may be of other tables, models and devices, too.
    """
    # (workload, method) of the table's rows
    table_rows = set()
    for cell in printed:
        key = declared.find_row_key(cell)
        if key is not None:
            table_rows.add(key)
    # rows of two devices do not compare, so a table shows the device that was measured last; rows are oldest first
    latest_device = None
    for row in rows:
        is_of_table = row.get("model") == declared.model and (row.get("workload"), row.get("method")) in table_rows
        if is_of_table and row["status"] != NOT_RUN:
            latest_device = device_name(row)
    device_rows = [row for row in rows if latest_device is None or device_name(row) == latest_device]
    return [_match_cell(cell, declared, printed, device_rows) for cell in printed]


def count_others(declared: BenchSpec, cells: Sequence[TimedCell], rows: Sequence[Row]) -> Mapping[str, int]:
    """Count the rows of the table's model that were measured on other devices than the table shows, by device."""
    # a table that shows nothing leaves nothing out
    shown_devices = {cell.device for cell in cells if cell.row is not None}
    if not shown_devices:
        return Counter()
    devices = [device_name(row) for row in rows if row.get("model") == declared.model]
    return Counter(name for name in devices if name not in shown_devices)


def list_workloads(declared: BenchSpec, cells: Sequence[TimedCell], measured: bool = False) -> list[str]:
    """Return the workloads on which cells are to be measured, in the paper's order.

    They are the workloads of missing cells; with ``measured``, also those of cells that have a row already.
    """
    names = []
    for cell in cells:
        # a cell with a reason against running has no row, so ``measured`` leaves it out, too
        if cell.status == MISSING or (measured and cell.row is not None):
            key = declared.find_row_key(cell.printed)
            if key is not None:
                workload, _ = key
                names.append(workload)
    return list(dict.fromkeys(names))


def find_stored_quantity(quantity: str) -> str:
    """Return the quantity of stored rows from which a quantity of a table is computed, by SHARES and PER or itself."""
    if quantity in SHARES:
        return SHARES[quantity]
    if quantity in PER:
        stored_quantity, _ = PER[quantity]
        return stored_quantity
    return quantity


def _match_cell(cell: Published, declared: BenchSpec, printed: Sequence[Published], rows: Sequence[Row]) -> TimedCell:
    printed_base = _find_printed_base(cell, declared, printed)
    published_ratio = _divide_printed(cell, printed_base)
    key = declared.find_row_key(cell)
    quantity = declared.quantities.get(cell.metric)
    reason = declared.why_not(cell)
    if not reason and cell.dataset == AVERAGE:
        reason = "an average over all datasets, of which some are not run"
    if reason or key is None or quantity is None:
        reason = reason or "no row is declared for it"
        return TimedCell(cell, NOT_RUN, reason, published_ratio=published_ratio)
    workload, method = key
    row = _find_latest_row(rows, declared.model, workload, method)
    if row is None:
        return TimedCell(cell, MISSING, published_ratio=published_ratio)
    marks = tuple(row["marks"])
    # a quantity that does not depend on decoding steps, such as a peak of memory, was not interpolated
    if find_stored_quantity(quantity) not in OF_STEPS:
        marks = tuple(mark for mark in marks if mark != INTEGRATED)
    status = str(row["status"])
    if status != MEASURED:
        return TimedCell(cell, status, str(row["reason"]), published_ratio=published_ratio, marks=marks, row=row)
    base = None
    # if the paper's base row lacks the quantity, such as a time to prune, there is no ratio to compare
    if printed_base is not None:
        base = _find_base_row(declared, cell, row, rows)
    value = _read_statistic(row, rows, quantity, "median")
    # our value / our base row's value; the unit cancels
    ratio = None
    if base is not None and value is not None:
        base_value = _read_statistic(base, rows, quantity, "median")
        # a time or a size of 0 has no ratio to it
        if base_value:
            ratio = value / base_value
    # a unit without an entry, such as token/s, is kvbench's own
    unit = UNITS.get(cell.unit, 1.0)
    return TimedCell(
        printed=cell,
        status=MEASURED,
        value=None if value is None else value / unit,
        spread=_read_quartiles(row, rows, quantity, unit),
        ratio=ratio,
        published_ratio=published_ratio,
        marks=marks,
        row=row,
        base=base,
    )


def _divide_printed(cell: Published, base: Published | None) -> float | None:
    if base is None or cell.value is None or not base.value:
        return None
    return cell.value / base.value


def _find_latest_row(rows: Sequence[Row], model: str, workload: str, method: str) -> Row | None:
    """Return the last row of a model, workload and method; None if there is no such row."""
    # rows are appended as they are measured, so the latest one comes first in reverse
    for row in reversed(rows):
        if (row.get("model"), row.get("workload"), row.get("method")) == (model, workload, method):
            return row
    return None


def _find_base_row(declared: BenchSpec, cell: Published, row: Row, rows: Sequence[Row]) -> Row | None:
    """Return the row of the base method that was measured beside ``row`` on its device, or None without such a row."""
    key = declared.find_row_key(cell, declared.base)
    if key is None:
        return None
    # ``row_of_base`` looks on the workload of ``row``
    _, method = key
    base = records.row_of_base(row, rows, method)
    if base is None or base["status"] != MEASURED or device_name(base) != device_name(row):
        return None
    return base


def _find_printed_base(cell: Published, declared: BenchSpec, printed: Sequence[Published]) -> Published | None:
    """Return the printed cell of the base method under the same conditions; None if the paper prints none."""

    def list_conditions(c: Published) -> tuple[str | None, ...]:
        return c.model, c.dataset, c.metric, c.settings.get("gpu"), declared.find_printed_workload(c)

    for candidate in printed:
        if candidate.method == declared.base and list_conditions(candidate) == list_conditions(cell):
            return candidate
    return None


def _read_quartiles(row: Row, rows: Sequence[Row], quantity: str, unit: float) -> tuple[float, float] | None:
    """Return the quartiles of a row's quantity in the printed unit; None if it was measured once, or has none."""
    low = _read_statistic(row, rows, quantity, "q1")
    high = _read_statistic(row, rows, quantity, "q3")
    # a single repeat has no spread
    statistics = row["quantities"].get(find_stored_quantity(quantity), {})
    repeats = int(statistics.get("n", 1))
    if low is None or high is None or repeats < 2:
        return None
    return low / unit, high / unit


def _read_statistic(row: Row, rows: Sequence[Row], quantity: str, stat: str) -> float | None:
    """Return a statistic of a row's quantity in seconds, bytes or as a ratio; None if the row lacks it."""
    if quantity in SHARES:
        # the quartiles of a row and of its full cache do not give the quartiles of their ratio
        if stat != "median":
            return None
        # without a method, ``row_of_base`` finds the row of the full cache
        return records.ratio_of_medians(row, records.row_of_base(row, rows), SHARES[quantity])
    statistics = row["quantities"].get(find_stored_quantity(quantity))
    if statistics is None or stat not in statistics:
        return None
    value = float(statistics[stat])
    if quantity in PER:
        _, divisor = PER[quantity]
        value /= float(row[divisor])
    return value
