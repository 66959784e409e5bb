"""A whole table beside a busy process: how much longer it takes, and what threads that do not spin long cost alone.

    python -m kvbench.bench.shared [--repeats 3] [--threads 2] [--tokens 2048]

The rows are those of part (b) of kvbench.bench.tables, on a Llama with random weights. Each run is a process of its
own, in turns: with OpenMP's threads spinning as long as they do by default while they wait for work, or shortly, as
kvbench's command line sets it (GOMP_SPINCOUNT); alone, or beside a process that computes on one core without pause.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from kvbench.bench.ratio import finish, in_process, in_turns, median_ratio, options, verdict
from kvbench.bench.tables import random_llama, through_kvbench

SHARED, ALONE = 2.0, 1.1
SPINS = {"long": None, "short": "2000"}
"""Values of GOMP_SPINCOUNT: OpenMP's own, some milliseconds, and that of kvbench's command line."""


@contextmanager
def busy() -> Iterator[None]:
    """Keep one core busy meanwhile, by a process of its own."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def table_seconds(spin: str, threads: int, tokens: int, beside: bool) -> float:
    """Return the seconds of one table in a process of its own, that wait as SPINS says."""
    run = partial(
        in_process,
        "shared",
        "--once",
        "--threads",
        threads,
        "--tokens",
        tokens,
        env={"GOMP_SPINCOUNT": SPINS[spin]},
    )
    if not beside:
        return float(run())
    with busy():
        return float(run())


def main() -> int:
    """Print the ratios. Return exit status 1 if one misses its limit, else 0."""
    parser = options(__doc__, repeats=3, threads=2)
    parser.add_argument("--tokens", type=int, default=2048, help="of the prompt")
    parser.add_argument("--once", action="store_true", help="time one table in this process")
    args = parser.parse_args()
    if args.once:
        torch.set_num_threads(args.threads)
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(through_kvbench(*random_llama(Path(folder), tokens=args.tokens))))
        return 0
    runs = {
        f"{spin}, {where}": partial(table_seconds, spin, args.threads, args.tokens, where == "beside")
        for spin in SPINS
        for where in ("alone", "beside")
    }
    times = in_turns(runs, args.repeats)
    print(f"{args.repeats} repeats, {args.threads} threads; seconds of a table beside a busy process / alone")
    ratios = {spin: median_ratio(times[f"{spin}, beside"], times[f"{spin}, alone"]) for spin in SPINS}
    print(f"  {'; '.join(f'{name}: {min(spent):.1f} to {max(spent):.1f}' for name, spent in times.items())}")
    print(f"  threads that spin long: {ratios['long']:.2f}x")
    ok = verdict("threads that spin shortly", ratios["short"], ratios["short"] <= SHARED, f"at most {SHARED:g}x")
    alone = median_ratio(times["short, alone"], times["long, alone"])
    return 0 if verdict("alone, short / long", alone, alone <= ALONE, f"at most {ALONE:g}x") and ok else 1


if __name__ == "__main__":
    finish(main)
