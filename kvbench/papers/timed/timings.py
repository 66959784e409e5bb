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

from kvbench.bench import records, request
from kvbench.bench.records import Row
from kvbench.cache.model_shape import Shape
from kvbench.errors import UsageError, unknown
from kvbench.papers.spec import stand_ins
from kvbench.papers.spec.published import Published, model_id
from kvbench.papers.spec.table_spec import TableSpec
from kvbench.papers.timed import bench_spec, row_matching
from kvbench.papers.timed.row_matching import TimedCell
from kvbench.run import config
from kvbench.run.words import rewrite

KIND = "efficiency"
SCRIPT = "scripts/gpu_tables.sh"
DONE = ("measured", "OOM")
TOKENS, BYTES = "kept_tokens", "cache_bytes"
"""A share of tokens, and what it follows from."""
KEYS = ("repeats", "warmup", "steps", "generate", "check", "seed", "memory_limit", "threads", "again")
"""Arguments of ``bench time`` that a table leaves open."""


@dataclass(frozen=True)
class Timings:
    """A table's measured rows. ``file`` is where they are kept, ``left_out`` counts rows of devices not shown."""

    table: TableSpec
    bench: bench_spec.BenchSpec
    file: Path
    cells: Mapping[Published, TimedCell]
    left_out: Mapping[str, int]

    @property
    def stand_in(self) -> bool:
        """Whether a small model on a CPU is shown."""
        return self.bench.scaled

    @property
    def there(self) -> bool:
        """Whether anything was measured."""
        return any(c.status in DONE for c in self.cells.values())

    @property
    def missing(self) -> list[str]:
        """Workloads that are wanted and not measured."""
        return row_matching.workloads(self.bench, list(self.cells.values()))

    @property
    def device(self) -> str:
        """Where it was measured; '' if it was not."""
        return next((c.device for c in self.cells.values() if c.row is not None), "")

    @property
    def command(self) -> str:
        """What measures the rows that are missing."""
        if not self.stand_in:
            return f"{SCRIPT} {self.bench.results}"
        model = "" if self.bench.model == stand_ins.MODEL else f" model={self.bench.model}"
        return f"python -m kvbench table {self.table.id}{model}"


def read(table: TableSpec, model: str, results: Path) -> Timings:
    """What ``results`` holds for a table on ``model``; KvbenchError for a damaged file.

    Without a model: the paper's own where there are rows of it, else tiny.
    """
    bench = bench_spec.load(table.paper, table.table)
    if not model:
        found = read(table, bench.model, results)
        return found if found.there else read(table, stand_ins.MODEL, results)
    own = [bench.model, *(table.entry(m) for m in table.models())]
    if model_id(model) not in map(model_id, own):
        bench = bench.on(model)
    file = results / ("cpu" if bench.scaled else "gpu") / f"{bench.results}.jsonl"
    rows = records.read(file)
    cells = [_with_tokens(bench, c, rows) for c in row_matching.place(bench, table.printed, rows)]
    by_cell = dict(zip(table.printed, cells, strict=True))
    return Timings(table, bench, file, by_cell, row_matching.others(bench, cells, rows))


def kept_tokens(row: Row, full: Row, shape: Shape) -> float:
    """The share of the prompt's tokens that a row's caches hold, from its bytes.

    Of a method that keeps whole keys and values of some tokens, as many in every head of a layer: what it would hold of
    all tokens are the full cache's bytes, but with the payload of as many heads as it stores.
    """
    itemsize = getattr(torch, row["dtype"]).itemsize
    heads = shape.query_heads if "per=query_head" in row["method"].split() else shape.kv_heads
    more = (shape.full_bytes(row["prompt"], itemsize, h) for h in (heads, shape.kv_heads))
    of_all = full["quantities"][BYTES]["median"] + row["batch"] * (next(more) - next(more))
    return float(row["quantities"][BYTES]["median"] / of_all)


def _with_tokens(bench: bench_spec.BenchSpec, cell: TimedCell, rows: Sequence[Row]) -> TimedCell:
    """The cell with its share of tokens where that is what is asked for."""
    if bench.quantities.get(cell.printed.metric) != TOKENS or cell.row is None or cell.status != records.MEASURED:
        return cell
    full = records.base(cell.row, rows)
    if full is None or full["status"] != records.MEASURED:
        return cell
    return replace(cell, value=100 * kept_tokens(cell.row, full, _shape(bench.model)))


@cache
def _shape(model: str) -> Shape:
    return request.shape_of(config.parse(config.compose_config(rewrite([f"model={model}"]).runs[0])))


def measure(timings: Timings, more: Sequence[str] = (), plan: bool = False) -> None:
    """Measure what is missing of a stand-in's rows; ``more`` are arguments of ``bench time``, such as again=true.

    ``plan``: only say what would be measured. Raises UsageError for an argument that is not possible.
    """
    keys = dict(m.partition("=")[::2] for m in more)
    again = keys.get("again") == "true"
    if not timings.stand_in:
        if again:
            raise UsageError(f"again=true is not possible here: {timings.command} measures {timings.table.id}")
        return
    cells = timings.cells.values()
    wanted = row_matching.workloads(timings.bench, list(cells), measured=again or plan)
    if not wanted:
        return
    words = [w for w in timings.bench.words(wanted) if w.partition("=")[0] not in keys]
    threads = torch.get_num_threads()
    try:
        asked = [*words, *more, f"folder={timings.file.parent}", f"name={timings.file.stem}"]
        request.measure(asked, plan, beside=False)
    finally:
        torch.set_num_threads(threads)


def trace(timings: Timings, row: str, column: str) -> str:
    """Where a number comes from: the lines of the file, and how it follows from them. UsageError for no such cell."""
    table = timings.table
    rows = [r for r in table.rows if r.name == row]
    if not rows:
        raise unknown("row", row, list(dict.fromkeys(r.name for r in table.rows)))
    if column not in [c.name for c in table.columns]:
        raise unknown("column", column, [c.name for c in table.columns])
    found = [timings.cells[r.cells[column]] for r in rows if column in r.cells]
    cell = next((c for c in found if c.row is not None), found[0] if found else None)
    if cell is None:
        raise UsageError(f"{row} has no {column} in {table.id}")
    if cell.row is None:
        reason = cell.reason or f"not measured yet ({timings.command})"
        raise UsageError(f"{row} on {column} is not there: {reason}")
    quantity = timings.bench.quantities[cell.printed.metric]
    lines = [f"{table.id}, {row}, {column}: {quantity} of {cell.row['method']} at {cell.row['workload']}"]
    for what, of in (("row", cell.row), ("base", cell.base)):
        if of is not None:
            lines += _lines(timings.file, what, of, BYTES if quantity == TOKENS else row_matching.source(quantity))
    unit = cell.printed.unit
    if cell.value is not None:
        lines.append(f"{cell.value:.6g} {unit} on {cell.device}")
    if cell.ratio is not None:
        lines.append(f"ratio {cell.ratio:.6g}")
    if cell.printed.value is not None:
        theirs = "" if cell.published_ratio is None else f", ratio {cell.published_ratio:.6g}"
        lines.append(f"printed {cell.printed.printed} {unit}{theirs}")
    return "\n".join(lines)


def _lines(file: Path, what: str, row: Mapping[str, Any], quantity: str) -> list[str]:
    number = 1 + max(i for i, r in enumerate(records.read(file)) if r == row)
    found = row["quantities"].get(quantity)
    value = row["status"] if found is None else ", ".join(f"{k} {v}" for k, v in found.items())
    return [f"{what}: {file}, line {number}, key {row['key']}, session {row['session']}", f"  {quantity}: {value}"]
