"""What it costs to have lines on the device, as ratios of times measured in one process, alternating.

A line is written alone, as the store does it (synced when SYNC_S old), and synced each; and a cell is opened, closed
and given its metrics, with syncs and without any.

    python -m kvbench.bench.sync [--folder results] [--lines 200] [--repeats 5]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kvbench.example import Example
from kvbench.methods.chain import Chain
from kvbench.run.plan import Cell
from kvbench.run.store import SYNC_S, ResultStore, Writer
from kvbench.tasks.base import Task

SAMPLE: Mapping[str, Any] = {"prediction": "y" * 200, "score": 1.0, "meta": {"length": 512}, "answers": ["z" * 40]}
TASK = Task("bench/sync", (Example("0", "prompt", ("answer",), 8),), "f1", "none")


@dataclass(frozen=True)
class Bench:
    """An empty store and as much of a plan as it needs."""

    store: ResultStore

    def cell(self, name: str) -> Cell:
        return Cell({"name": name}, Chain(), name, TASK, "bench/sync")

    def writer(self, name: str) -> Writer:
        return self.store.open(self.cell(name), {}, 0, False)

    def lines(self, name: str, count: int, each: bool) -> float:
        """Seconds a line."""
        writer = self.writer(name)
        start = time.perf_counter()
        for i in range(count):
            writer.append({"id": str(i), **SAMPLE})
            if each:
                self.store.sync()
        took = time.perf_counter() - start
        writer.close()
        return took / count

    def once(self, name: str) -> float:
        """Seconds of all that a cell costs beside its lines."""
        start = time.perf_counter()
        writer = self.writer(name)
        writer.append({"id": "0", **SAMPLE})
        writer.close()
        self.store.write_metrics(writer.path.parent.name, {"n": 1})
        return time.perf_counter() - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("results"), help="on the disk to measure (default results)")
    parser.add_argument("--lines", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        bench = Bench(ResultStore(Path(folder)))
        print(_compare(bench, args.lines, args.repeats))


def _compare(bench: Bench, lines: int, repeats: int) -> str:
    ways: dict[str, Callable[[str], float]] = {
        "line, as the store does it": lambda name: bench.lines(name, lines, each=False),
        "line, each synced": lambda name: bench.lines(name, lines, each=True),
        "cell, as the store does it": bench.once,
        "cell, nothing synced": lambda name: _unsynced(bench.once, name),
    }
    found: dict[str, list[float]] = {way: [] for way in ways}
    for i in range(repeats):
        for way, run in ways.items():
            found[way].append(run(f"{way.replace(' ', '-')}-{i}"))
    line, each, cell, bare = (statistics.median(v) for v in found.values())
    one = each - line
    return (
        f"line: {1e6 * line:.0f} us as the store does it, {1e6 * each:.0f} us if each is synced: "
        f"{each / line:.0f} times as long\n"
        f"cell (opened, closed, metrics): {1e3 * cell:.1f} ms, {1e3 * bare:.1f} ms without any sync: "
        f"{cell / bare:.1f} times as long\n"
        f"a run that always writes into 24 cells syncs 24 files every {SYNC_S:g} s: "
        f"{100 * 24 * one / SYNC_S:.1f} % of its time; each line synced at 20 answers a second: {100 * 20 * one:.1f} %"
    )


def _unsynced(run: Callable[[str], float], name: str) -> float:
    nothing: AbstractContextManager[Any] = patch.object(os, "fsync", lambda fd: None)
    with nothing:
        return run(name)


if __name__ == "__main__":
    main()
