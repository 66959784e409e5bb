"""A whole table beside a busy process: how much longer it takes, and what threads that do not spin long cost alone.

    python scripts/bench/shared.py [--repeats 3] [--threads 2] [--tokens 2048]

The rows are those of part (b) of tables.py, on a Llama with random weights. Each run is a process of its own, in turns.
OpenMP's threads spin while they wait for work: as long as they do by default, or shortly, as kvbench's command line
sets it (GOMP_SPINCOUNT). The table runs alone, or beside a process that computes on one core without pause.
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
from ratio import finish, in_process, in_turns, median_ratio, options, verdict
from tables import random_llama, through_kvbench

# a table beside a busy process over the same alone, and short spinning over long, at most
SHARED = 2.0
ALONE = 1.1
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
    """Return the seconds of one table in a process of its own. Its threads wait as SPINS says.

    With ``beside``, another process computes meanwhile.
    """
    arguments = ["--once", "--threads", threads, "--tokens", tokens]
    time_once = partial(in_process, "shared", *arguments, env={"GOMP_SPINCOUNT": SPINS[spin]})
    if not beside:
        return float(time_once())
    with busy():
        return float(time_once())


def main() -> int:
    """Print the ratios. Return exit status 1 if one misses its limit, else 0."""
    parser = options(__doc__, repeats=3, threads=2)
    parser.add_argument("--tokens", type=int, default=2048, help="of the prompt")
    parser.add_argument("--once", action="store_true", help="time one table in this process")
    args = parser.parse_args()
    if args.once:
        # OpenMP reads GOMP_SPINCOUNT when it starts, so each run is a process of its own, and this is one of them
        torch.set_num_threads(args.threads)
        with tempfile.TemporaryDirectory() as folder:
            host, run = random_llama(Path(folder), tokens=args.tokens)
            print(json.dumps(through_kvbench(host, run)))
        return 0
    runs = {}
    for spin in SPINS:
        time_table = partial(table_seconds, spin, args.threads, args.tokens)
        runs[f"{spin}, alone"] = partial(time_table, beside=False)
        runs[f"{spin}, beside"] = partial(time_table, beside=True)
    times = in_turns(runs, args.repeats)
    print(f"{args.repeats} repeats, {args.threads} threads; seconds of a table beside a busy process / alone")
    ranges = [f"{name}: {min(spent):.1f} to {max(spent):.1f}" for name, spent in times.items()]
    print(f"  {'; '.join(ranges)}")
    # the default is printed only for comparison: limits apply to kvbench's setting
    long = median_ratio(times["long, beside"], times["long, alone"])
    print(f"  threads that spin long: {long:.2f}x")
    short = median_ratio(times["short, beside"], times["short, alone"])
    shared_ok = verdict("threads that spin shortly", short, short <= SHARED, f"at most {SHARED:g}x")
    alone = median_ratio(times["short, alone"], times["long, alone"])
    alone_ok = verdict("alone, short / long", alone, alone <= ALONE, f"at most {ALONE:g}x")
    return 0 if shared_ok and alone_ok else 1


if __name__ == "__main__":
    finish(main)
