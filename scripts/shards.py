"""Papers' tables and claims measured by several processes. Each takes its share of the examples, round by round."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
import verification

from kvbench.base.errors import KvbenchError
from kvbench.engine import memory
from kvbench.models import load
from kvbench.papers.claims import claim_runner, claims
from kvbench.papers.measured import plan, work
from kvbench.papers.measured.plan import PaperTable
from kvbench.papers.measured.work import join_runs
from kvbench.papers.spec import table_spec
from kvbench.papers.spec.table_spec import TableSpec
from kvbench.plan.inputs import Inputs
from kvbench.plan.run_plan import RunPlan
from kvbench.run import experiment

ROUNDS = (26, 100)
"""The most examples of a task on a pretrained model, one round before the next: all of MiniLongBench's, then more of
the larger sets."""
WORKERS = os.cpu_count() or 1
COMMITTED = Path(__file__).resolve().parent.parent / "results"
"""The folder of what is committed."""

Shard = tuple[tuple[str, ...], str, str, tuple[str, ...]]
"""Tables by name, the model, the folder of results, and what is said to ``run`` beside the tables' own."""


def find(name: str, model: str) -> Sequence[TableSpec]:
    """Return the tables of a name; ``claims/<paper>`` names the tables of rows that the paper's claims compare."""
    first, _, paper = name.partition("/")
    return claim_runner.make_tables_of_claims([paper], model) if first == claims.TABLE else table_spec.find_tables(name)


def prepare(table: TableSpec, model: str, results: str, *more: str, inputs: Inputs | None = None) -> PaperTable:
    """Return the table's run with its results in ``results``. ``inputs`` holds what other tables have read."""
    return plan.prepare(table, model, [f"results={results}", *more], inputs)


def measure_shard(shard_tables: Shard, shard: int, shards: int, most: int | None) -> None:
    """Measure one process's part of some tables, at most ``most`` examples of each task.

    Each prompt is read once for all tables. Tasks that fill more cells an hour come first.
    """
    pieces = work.list_work(joined(shard_tables, shard, shards), most)
    if shard == 0:
        print(f"one of {shards} processes: {work.describe_work(pieces)}", flush=True)
    for piece in pieces:
        experiment.fill(replace(piece.run, groups=(piece.group,)), quiet=True)
        if shard == 0:
            print(f"{piece.group.column}: {piece.answers} answers", flush=True)


def calibrate_shard(shard_tables: Shard, shard: int, shards: int) -> None:
    """Compute one process's part of the missing calibrations. No two processes compute the same one."""
    for run in joined(shard_tables, shard, shards):
        chain_of = {r.key: c.chain for g in run.groups for c in g.cells for r in run.session.requests(c.chain).values()}
        chains = [chain_of[key] for key in sorted(chain_of)[shard::shards] if run.session.missing(chain_of[key])]
        if chains:
            weights = load.load_weights(run.cfg.model, run.source, load.resolve_device(run.cfg.device))
            for chain in chains:
                run.session.bind(chain, weights, quiet=True)


@cache
def joined(shard_tables: Shard, shard: int, shards: int) -> list[RunPlan]:
    """Return the runs of some tables. Runs that read the same prompts are joined into one.

    They are cached, since a process needs them in every round.
    """
    free = memory.cache_limit(None, {torch.device("cpu"): 1.0}) / memory.GIB
    names, model, results, table_arguments = shard_tables
    options = (*table_arguments, f"shard={shard}", f"shards={shards}", "threads=1", f"memory={free / shards:.2f}")
    inputs = Inputs()
    runs = [prepare(t, model, results, *options, inputs=inputs).run for name in names for t in find(name, model)]
    return join_runs(r for r in runs if r is not None)


def measure(
    shares: Sequence[tuple[str, Shard]], rounds: Sequence[int | None], workers: int, ended: Callable[[], None]
) -> None:
    """Measure the missing answers of each of ``shares``, (name to print, its tables). Call ``ended`` after each round.

    Every process takes its own share of the examples, so that no two measure the same part of a cell.
    """
    start = time.monotonic()
    with ExitStack() as stack:
        pools = [ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) for _ in range(workers)]
        for pool in pools:
            stack.callback(pool.shutdown, cancel_futures=True)
        # one process calibrates what a task needs when it comes to it; several would compute the same
        if workers > 1:
            _wait(pool.submit(calibrate_shard, g, i, workers) for _, g in shares for i, pool in enumerate(pools))
        for most in rounds:  # within a round no process waits for another
            amount = "" if most is None else f", {most} examples a task"
            parts = [[p.submit(measure_shard, g, i, workers, most) for i, p in enumerate(pools)] for _, g in shares]
            for (name, _), futures in zip(shares, parts, strict=True):
                _wait(futures)
                print(f"{name}{amount}  ({time.monotonic() - start:.0f} s so far)", flush=True)
            ended()


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of every script that measures in shards."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="tiny (default) or an entry of conf/model; --verify: of each, by default")
    verification.add_options(parser)
    parser.add_argument("--pack", action="store_true", help="write what is measured so far, measure nothing")
    parser.add_argument("--results", default="results", help="folder of measured cells")
    parser.add_argument("--committed", type=Path, default=COMMITTED, help="folder of what is committed")
    parser.add_argument("--workers", type=int, default=WORKERS, help="processes that share the examples")
    return parser


def ended(work: Callable[[], int]) -> int:
    """Run ``work`` and return its exit status. Errors and SIGTERM stop its worker processes as well."""
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        return work()
    except KvbenchError as error:
        print(f"kvbench: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        print("kvbench: interrupted; finished answers are kept: run it again to go on", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait(parts: Iterable[Future[None]]) -> None:
    """Wait for all of ``parts``. Raises the error that one of them raised."""
    for part in list(parts):
        part.result()


def _terminated(*_: object) -> None:
    """End as an interrupt does. Terminate the worker processes, too, since they would go on for hours."""
    for child in multiprocessing.active_children():
        child.terminate()
    raise KeyboardInterrupt
