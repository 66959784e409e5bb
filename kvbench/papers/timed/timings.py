"""Our side of an efficiency table: rows of ``bench time`` in results/gpu, or of a small model in results/cpu.

For the paper's own model only stored rows are shown: scripts/gpu_tables.sh measures them, on a GPU. Any other model
stands in for it on a CPU, at sizes that bench<N>.yaml scales down, and is measured here. A table shows one of the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from kvbench.base.errors import UsageError, unknown
from kvbench.bench import architecture, records, request
from kvbench.bench.records import Row
from kvbench.kv.model_shape import Shape
from kvbench.papers.spec import stand_ins
from kvbench.papers.spec.published import Published, model_id
from kvbench.papers.spec.table_spec import TableSpec
from kvbench.papers.timed import bench_spec, row_matching
from kvbench.plan import config

KIND = "efficiency"
"""The kind of the tables that are timed (see catalogue.KINDS)."""
SCRIPT = "scripts/gpu_tables.sh"
"""The script that measures the rows of the papers' own models on a GPU."""
DONE = ("measured", "OOM")
"""The statuses of cells that have run."""
TOKENS, BYTES = "kept_tokens", "cache_bytes"
"""A quantity of tables, the share of tokens kept; and the quantity of stored rows from which it is computed."""
KEYS = ("repeats", "warmup", "steps", "generate", "check", "seed", "memory_limit", "threads", "again")
"""Arguments of ``bench time`` that a table's declaration leaves to the user."""


@dataclass(frozen=True)
class Timings:
    """The measured rows of an efficiency table, matched to its printed cells.

    bench: how the table is timed.
    file: the JSON lines with the rows.
    cells: a line for each printed cell (``row_matching.TimedLine``), in the order of ``table.printed``.
    left_out: the number of rows by device, for devices that the table does not show.
    """

    table: TableSpec
    bench: bench_spec.BenchSpec
    file: Path
    cells: pd.DataFrame
    left_out: Mapping[str, int]

    @cached_property
    def lines(self) -> list[Any]:
        """The lines of ``cells``."""
        return list(self.cells.itertuples())

    def find_cell(self, printed: Published) -> Any:
        """Return the line of a printed cell."""
        return self.lines[self.table.printed.index(printed)]

    @property
    def stand_in(self) -> bool:
        """True if the table shows a small model on a CPU in place of the paper's model."""
        return self.bench.scaled

    @property
    def any_measured(self) -> bool:
        """True if any row of the table has run, even if it ran out of memory."""
        return bool(self.cells["status"].isin(DONE).any())

    @property
    def device(self) -> str:
        """The device of the measured rows, or '' without any."""
        # all rows are of one device (see ``row_matching.match_cells``)
        return max(self.cells["device"])

    @property
    def command(self) -> str:
        """The command that measures the missing rows."""
        if not self.stand_in:
            return f"{SCRIPT} {self.bench.results}"
        command = f"kvbench table {self.table.id}"
        if self.bench.model != stand_ins.MODEL:
            command += f" model={self.bench.model}"
        return command


def read_timings(table: TableSpec, model: str, results: Path) -> Timings:
    """Read the stored rows of a table on ``model``.

    model: an entry of conf/model, a folder or a hub id; '' for the paper's own model if it has rows, else the tiny
    model.
    results: the results folder.

    Raises UsageError for a table without a declaration, and KvbenchError for a damaged file.
    """
    bench = bench_spec.load(table.paper, table.table)
    if not model:
        timings = read_timings(table, bench.model, results)
        if timings.any_measured:
            return timings
        model = stand_ins.MODEL
    # the paper's models run at the paper's sizes on a GPU, other models at the stand-in's sizes on a CPU
    paper_models = {model_id(table.model_entry(name)) for name in table.models()}
    if model_id(model) not in paper_models | {model_id(bench.model)}:
        bench = bench.scale_for(model)
    file = results / ("cpu" if bench.scaled else "gpu") / f"{bench.results}.jsonl"
    rows = records.read_rows(file)
    cells = row_matching.match_cells(bench, table.printed, rows)
    values = [_find_value(bench, cell, rows) for cell in cells.itertuples()]
    cells["value"] = pd.Series(values, dtype=object)
    return Timings(table, bench, file, cells, left_out=row_matching.count_others(bench, cells, rows))


def compute_kept_share(row: Row, full: Row, shape: Shape) -> float:
    """Return the share of the prompt's tokens that a row's caches hold, computed from its bytes.

    full: the row of the full cache, measured in the same session.
    shape: the shape of the model's cache.

    The method must keep whole keys and values, and the same number of tokens in every head of a layer.

        share = bytes / (full bytes + batch * (payload under the method's heads - payload under the full cache's heads))

    ``bytes`` and ``full bytes`` are those of the row and of the full cache. A payload is the keys and values of one
    whole prompt.
    """
    itemsize = getattr(torch, row["dtype"]).itemsize
    stored_heads = shape.kv_heads
    if "per=query_head" in row["method"].split():
        stored_heads = shape.query_heads
    # bytes of one prompt's keys and values, under the heads of the method and of the full cache
    method_payload = shape.full_bytes(row["prompt"], itemsize, stored_heads)
    full_payload = shape.full_bytes(row["prompt"], itemsize, shape.kv_heads)
    # the bytes that the method would hold if it kept all tokens
    all_bytes = full["quantities"][BYTES]["median"] + row["batch"] * (method_payload - full_payload)
    return float(row["quantities"][BYTES]["median"] / all_bytes)


def _find_value(bench: bench_spec.BenchSpec, cell: Any, rows: Sequence[Row]) -> float | None:
    is_share = bench.quantities.get(cell.printed.metric) == TOKENS
    if is_share and cell.row is not None and cell.status == records.MEASURED:
        # a share of tokens needs the full cache of the same session
        full = records.row_of_base(cell.row, rows)
        if full is not None and full["status"] == records.MEASURED:
            return 100 * compute_kept_share(cell.row, full, _read_shape(bench.model))
    value: float | None = cell.value
    return value


@cache
def _read_shape(model: str) -> Shape:
    return architecture.shape_of(config.configure({"model": model}).model)


def is_table_key(key: str) -> bool:
    """Return True if ``kvbench table`` takes the key for a table of times.

    It takes results=, and each key of ``bench time`` that the table's declaration does not fix.
    """
    return key == "results" or key in KEYS


def measure_missing(timings: Timings, more: Sequence[str] = (), plan: bool = False) -> None:
    """Measure the missing rows of an efficiency table by ``bench time``, if the table shows a stand-in.

    For the paper's own model this does nothing: a script times it on a GPU.

    more: the user's arguments of ``bench time``, such as again=true. They replace the table's own.
    plan: True to print the rows that would be measured, and measure none.
    Raises UsageError for an argument that is not possible.
    """
    keys = {argument.partition("=")[0] for argument in more}
    again = "again=true" in more
    if not timings.stand_in:
        if again:
            raise UsageError(f"again=true is not possible here: {timings.command} measures {timings.table.id}")
        return
    # ``again`` and ``plan`` concern rows that are measured already, too
    workloads = row_matching.list_workloads(timings.bench, timings.cells, measured=again or plan)
    if not workloads:
        return
    arguments = [a for a in timings.bench.list_arguments(workloads) if a.partition("=")[0] not in keys]
    # the file that the table reads
    arguments += [*more, f"folder={timings.file.parent}", f"name={timings.file.stem}"]
    # a benchmark sets the number of threads for its process, but this process continues with other tables
    threads = torch.get_num_threads()
    try:
        request.measure_rows(arguments, plan, beside=False)
    finally:
        torch.set_num_threads(threads)


def trace_number(timings: Timings, row: str, column: str) -> str:
    """Return the origin of a number: its lines in the file of timings, and the steps from these lines to the number.

    row, column: the names of the number's row and column.

    Raises UsageError for a cell that is not in the table, and for one that is not measured.
    """
    cell = _find_cell(timings, row, column)
    if cell.row is None:
        reason = cell.reason or f"not measured yet ({timings.command})"
        raise UsageError(f"{row} on {column} is not there: {reason}")
    # a cell has a row only if its quantity is declared
    quantity = timings.bench.quantities[cell.printed.metric]
    # a share of tokens follows from stored bytes; some other quantities also follow from a stored one
    stored_quantity = BYTES if quantity == TOKENS else row_matching.find_stored_quantity(quantity)
    lines = [f"{timings.table.id}, {row}, {column}: {quantity} of {cell.row['method']} at {cell.row['workload']}"]
    for name, stored in (("row", cell.row), ("base", cell.base)):
        if stored is not None:
            lines += _describe_row(timings.file, name, stored, stored_quantity)
    unit = cell.printed.unit
    if cell.value is not None:
        lines.append(f"{cell.value:.6g} {unit} on {cell.device}")
    if cell.ratio is not None:
        lines.append(f"ratio {cell.ratio:.6g}")
    if cell.printed.value is not None:
        lines.append(f"printed {cell.printed.printed} {unit}")
        if cell.published_ratio is not None:
            lines[-1] += f", ratio {cell.published_ratio:.6g}"
    return "\n".join(lines)


def _find_cell(timings: Timings, row: str, column: str) -> Any:
    table = timings.table
    rows = [table_row for table_row in table.rows if table_row.name == row]
    if not rows:
        raise unknown("row", row, list(dict.fromkeys(table_row.name for table_row in table.rows)))
    columns = [table_column.name for table_column in table.columns]
    if column not in columns:
        raise unknown("column", column, columns)
    cells = [timings.find_cell(table_row.cells[column]) for table_row in rows if column in table_row.cells]
    if not cells:
        raise UsageError(f"{row} has no {column} in {table.id}")
    # a row of this name under another model may be the measured one
    return next((cell for cell in cells if cell.row is not None), cells[0])


def _describe_row(file: Path, name: str, row: Row, quantity: str) -> list[str]:
    # lines count from 1; of several equal rows the last one is meant
    number = max(i for i, stored_row in enumerate(records.read_rows(file), start=1) if stored_row == row)
    statistics = row["quantities"].get(quantity)
    # a row that ran out of memory has no statistics, but a status that says so
    values = row["status"]
    if statistics is not None:
        values = ", ".join(f"{key} {value}" for key, value in statistics.items())
    return [f"{name}: {file}, line {number}, key {row['key']}, session {row['session']}", f"  {quantity}: {values}"]
