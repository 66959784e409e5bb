"""The papers' tables on the tiny model: measure and write them, or re-render them from what was measured alone.

python scripts/paper_tables.py                measure what is missing, write results/tables/<paper>-<n>.md and samples
python scripts/paper_tables.py think/2        one table, or all of a paper
python scripts/paper_tables.py --verify       fail if a committed table differs from what its samples give

Scores follow from the samples beside a table, efficiency tables from the rows in results/gpu, or else results/cpu. How
much of each was measured stands in results/tables/counts.csv.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from kvbench import archive, experiment
from kvbench.errors import KvbenchError
from kvbench.papers import counts, declared, measured, page, standin, timings
from kvbench.papers.declared import Declared
from kvbench.papers.measured import Ours
from kvbench.papers.view import View, view
from kvbench.store import ResultStore

ROWS = Path(__file__).resolve().parent.parent / "results"
FOLDER = ROWS / "tables"
EXAMPLES = 50  # of each task


def rendered(seen: View) -> str:
    """The table as Markdown, with the command that makes it."""
    table = seen.ours.declared
    limit = "" if table.kind == timings.KIND else f" limit={EXAMPLES}"
    head, _, rest = page.render(seen, "md").partition("\n")
    return f"{head}\n\n`python -m kvbench table {table.id}{limit}`\n{rest}"


def prepare(table: Declared, results: str, *more: str) -> Ours:
    """The table's run with its results in ``results``; what was timed is in a folder of its own, which is committed."""
    if table.kind == timings.KIND:
        return measured.timed(timings.read(table, "", ROWS))
    return measured.prepare(table, standin.MODEL, [f"results={results}", f"limit={EXAMPLES}", *more])


def measure_shard(table_id: str, results: str, shard: int, shards: int) -> None:
    """Measure one process's part of a table."""
    (table,) = declared.find(table_id)
    ours = prepare(table, results, f"shard={shard}", f"shards={shards}", "threads=1")
    assert ours.run is not None
    experiment.measure(ours.run, quiet=True)


def write(table: Declared, results: str) -> None:
    """Write the table from what was measured, and its samples; what is timed is measured here, alone."""
    ours = prepare(table, results)
    if ours.timings is not None:
        timings.measure(ours.timings)
        ours = prepare(table, results)
    elif ours.run is not None:
        experiment.settle(ours.run)
        cells = [c.id for g in ours.run.groups for c in g.cells]
        archive.pack(ours.run.store, cells, _samples(table))
    seen = view(ours)
    _page(table).write_text(rendered(seen), encoding="utf-8")
    if _counted(table):
        counts.write(FOLDER, counts.count(seen))


def measure(tables: Sequence[Declared], results: str, workers: int) -> None:
    """Measure what is missing of all tables and write each as soon as it is whole.

    Every process takes its share of the examples of one table after the other: never two of them the same share of a
    cell that two tables have in common.
    """
    start = time.monotonic()
    with ExitStack() as pools:
        parts: dict[str, list[Future[None]]] = {t.id: [] for t in tables}
        for shard in range(workers):
            pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
            pools.callback(pool.shutdown, cancel_futures=True)
            for table in tables:
                if table.measurable:
                    parts[table.id].append(pool.submit(measure_shard, table.id, results, shard, workers))
        # what is timed waits until nothing else runs
        for table in sorted(tables, key=lambda t: t.kind == timings.KIND):
            for part in parts[table.id]:
                part.result()
            write(table, results)
            print(f"{_page(table)}  ({time.monotonic() - start:.0f} s so far)", flush=True)


def verify(table: Declared) -> bool:
    """Whether the committed table, and what is counted of it, is what its samples or rows give."""
    with tempfile.TemporaryDirectory() as folder:
        if table.measurable:
            archive.unpack(_samples(table), ResultStore(Path(folder)))
        seen = view(prepare(table, folder))
        same = _page(table).exists() and rendered(seen) == _page(table).read_text(encoding="utf-8")
        return same and (not _counted(table) or counts.read(FOLDER).get(table.id) == counts.count(seen))


def _counted(table: Declared) -> bool:
    return table.measurable or table.kind == timings.KIND


def _page(table: Declared) -> Path:
    return FOLDER / f"{table.paper}-{table.table}.md"


def _samples(table: Declared) -> Path:
    return FOLDER / f"{table.paper}-{table.table}.samples.jsonl.gz"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure or verify the tables named, all by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", default=["all"], help="paper/number, paper or all (default)")
    parser.add_argument("--verify", action="store_true", help="re-render from samples and compare")
    parser.add_argument("--results", default="results", help="folder of measured cells")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that share the examples")
    args = parser.parse_args(arguments)
    try:
        tables = list({t.id: t for name in args.tables for t in declared.find(name)}.values())
        if not args.verify:
            measure(tables, args.results, args.workers)
            return 0
        wrong = [t.id for t in tables if not verify(t)]
    except KvbenchError as error:
        print(f"kvbench: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        print("kvbench: interrupted; finished answers are kept: run it again to go on", file=sys.stderr)
        return 130
    if wrong:
        print(f"kvbench: {', '.join(wrong)} differ from their samples; make tables", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
