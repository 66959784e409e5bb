"""Our side of an efficiency table: rows of ``bench time`` in results/gpu, or of a small model in results/cpu.

On the paper's own model only what is there is shown: scripts/gpu_tables.sh measures it, on a GPU. Any other model
stands in for it on a CPU, at sizes that bench<N>.yaml scales down, and is measured here. A table shows one of the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kvbench.base.errors import UsageError, unknown
from kvbench.bench import records, request
from kvbench.bench.records import Row
from kvbench.kv.model_shape import Shape
from kvbench.papers.spec import stand_ins
from kvbench.papers.spec.published import Published, model_id
from kvbench.papers.spec.table_spec import TableSpec
from kvbench.papers.timed import bench_spec, row_matching
from kvbench.papers.timed.row_matching import TimedCell
from kvbench.plan import config

KIND = "efficiency"
SCRIPT = "scripts/gpu_tables.sh"
DONE = ("measured", "OOM")
TOKENS, BYTES = "kept_tokens", "cache_bytes"
"""A share of tokens, and what it follows from."""
KEYS = ("repeats", "warmup", "steps", "generate", "check", "seed", "memory_limit", "threads", "again")
"""Arguments of ``bench time`` that a table leaves open."""


@dataclass(frozen=True)
class Timings:
    """The measured rows of a table. ``file`` holds them, ``left_out`` counts rows of devices not shown."""

    table: TableSpec
    bench: bench_spec.BenchSpec
    file: Path
    cells: Mapping[Published, TimedCell]
    left_out: Mapping[str, int]

    @property
    def stand_in(self) -> bool:
        """Tell whether a small model on a CPU is shown."""
        return self.bench.scaled

    @property
    def there(self) -> bool:
        """Tell whether anything was measured."""
        return any(c.status in DONE for c in self.cells.values())

    @property
    def device(self) -> str:
        """Return the device of the measured rows; '' without any."""
        return next((c.device for c in self.cells.values() if c.row is not None), "")

    @property
    def command(self) -> str:
        """Return the command that measures the missing rows."""
        if not self.stand_in:
            return f"{SCRIPT} {self.bench.results}"
        model = "" if self.bench.model == stand_ins.MODEL else f" model={self.bench.model}"
        return f"python -m kvbench table {self.table.id}{model}"


def read(table: TableSpec, model: str, results: Path) -> Timings:
    """Read the stored rows of a table on ``model``; raise KvbenchError for a damaged file.

    Without a model, read those of the paper's own model where there are any, else those of tiny.
    """
    bench = bench_spec.load(table.paper, table.table)
    if not model:
        timings = read(table, bench.model, results)
        return timings if timings.there else read(table, stand_ins.MODEL, results)
    paper_models = [bench.model, *(table.entry(m) for m in table.models())]
    if model_id(model) not in map(model_id, paper_models):
        bench = bench.on(model)
    file = results / ("cpu" if bench.scaled else "gpu") / f"{bench.results}.jsonl"
    rows = records.read(file)
    cells = [_with_tokens(bench, c, rows) for c in row_matching.place(bench, table.printed, rows)]
    by_cell = dict(zip(table.printed, cells, strict=True))
    return Timings(table, bench, file, by_cell, row_matching.others(bench, cells, rows))


def kept_tokens(row: Row, full: Row, shape: Shape) -> float:
    """Return the share of the prompt's tokens that a row's caches hold, from its bytes.

    This holds for methods that keep whole keys and values of some tokens, as many in every head of a layer. Holding
    all tokens would take the full cache's bytes, with the payload of as many heads as the method stores.
    """
    itemsize = getattr(torch, row["dtype"]).itemsize
    heads = shape.query_heads if "per=query_head" in row["method"].split() else shape.kv_heads
    payloads = (shape.full_bytes(row["prompt"], itemsize, h) for h in (heads, shape.kv_heads))
    all_bytes = full["quantities"][BYTES]["median"] + row["batch"] * (next(payloads) - next(payloads))
    return float(row["quantities"][BYTES]["median"] / all_bytes)


def _with_tokens(bench: bench_spec.BenchSpec, cell: TimedCell, rows: Sequence[Row]) -> TimedCell:
    """Return the cell with its share of tokens where that is its quantity."""
    if bench.quantities.get(cell.printed.metric) != TOKENS or cell.row is None or cell.status != records.MEASURED:
        return cell
    full = records.base(cell.row, rows)
    if full is None or full["status"] != records.MEASURED:
        return cell
    return replace(cell, value=100 * kept_tokens(cell.row, full, _shape(bench.model)))


@cache
def _shape(model: str) -> Shape:
    """Return the shape of a model's cache."""
    return request.shape_of(config.read([f"model={model}"]))


def measure(timings: Timings, more: Sequence[str] = (), plan: bool = False) -> None:
    """Measure the missing rows of a stand-in; ``more`` are arguments of ``bench time``, such as again=true.

    With ``plan`` only print what would be measured. Raises UsageError for an argument that is not possible.
    """
    options = dict(m.partition("=")[::2] for m in more)
    again = options.get("again") == "true"
    if not timings.stand_in:
        if again:
            raise UsageError(f"again=true is not possible here: {timings.command} measures {timings.table.id}")
        return
    cells = timings.cells.values()
    workloads = row_matching.workloads(timings.bench, list(cells), measured=again or plan)
    if not workloads:
        return
    words = [w for w in timings.bench.words(workloads) if w.partition("=")[0] not in options]
    threads = torch.get_num_threads()
    try:
        arguments = [*words, *more, f"folder={timings.file.parent}", f"name={timings.file.stem}"]
        request.measure(arguments, plan, beside=False)
    finally:
        torch.set_num_threads(threads)


def allowed(key: str) -> bool:
    """Tell whether an argument of ``table`` is results=, or one of ``bench time`` that a table leaves open."""
    return key in ("results", *KEYS)


def trace(timings: Timings, row: str, column: str) -> str:
    """Return the origin of a number: the lines of the file, and the steps from them; UsageError for no such cell."""
    table = timings.table
    rows = [r for r in table.rows if r.name == row]
    if not rows:
        raise unknown("row", row, list(dict.fromkeys(r.name for r in table.rows)))
    if column not in [c.name for c in table.columns]:
        raise unknown("column", column, [c.name for c in table.columns])
    cells = [timings.cells[r.cells[column]] for r in rows if column in r.cells]
    cell = next((c for c in cells if c.row is not None), cells[0] if cells else None)
    if cell is None:
        raise UsageError(f"{row} has no {column} in {table.id}")
    if cell.row is None:
        reason = cell.reason or f"not measured yet ({timings.command})"
        raise UsageError(f"{row} on {column} is not there: {reason}")
    quantity = timings.bench.quantities[cell.printed.metric]
    lines = [f"{table.id}, {row}, {column}: {quantity} of {cell.row['method']} at {cell.row['workload']}"]
    for name, measured_row in (("row", cell.row), ("base", cell.base)):
        if measured_row is not None:
            stored = BYTES if quantity == TOKENS else row_matching.source(quantity)
            lines += _lines(timings.file, name, measured_row, stored)
    unit = cell.printed.unit
    if cell.value is not None:
        lines.append(f"{cell.value:.6g} {unit} on {cell.device}")
    if cell.ratio is not None:
        lines.append(f"ratio {cell.ratio:.6g}")
    if cell.printed.value is not None:
        ratio = "" if cell.published_ratio is None else f", ratio {cell.published_ratio:.6g}"
        lines.append(f"printed {cell.printed.printed} {unit}{ratio}")
    return "\n".join(lines)


def _lines(file: Path, name: str, row: Mapping[str, Any], quantity: str) -> list[str]:
    """Return where a row stands in the file, and its values of a quantity."""
    number = 1 + max(i for i, r in enumerate(records.read(file)) if r == row)
    statistics = row["quantities"].get(quantity)
    value = row["status"] if statistics is None else ", ".join(f"{k} {v}" for k, v in statistics.items())
    return [f"{name}: {file}, line {number}, key {row['key']}, session {row['session']}", f"  {quantity}: {value}"]
