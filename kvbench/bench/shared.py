"""A whole table beside a busy process: how much longer it takes, and what it costs that threads wait passively.

    python -m kvbench.bench.shared [--repeats 3] [--threads 2] [--tokens 2048]

The rows are those of part (b) of kvbench.bench.tables, on a Llama with random weights. Each run is a process of its
own, in turns: with OpenMP's own policy, by which threads spin while they wait for work, or with
OMP_WAIT_POLICY=PASSIVE, which kvbench's command line sets; alone, or beside a process that computes on one core
without pause.
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

from kvbench.bench.ratio import in_process, in_turns, median_ratio, options, verdict
from kvbench.bench.tables import random_llama, through_kvbench

SHARED, ALONE = 2.0, 1.1
POLICIES = {"default": None, "passive": "PASSIVE"}


@contextmanager
def busy() -> Iterator[None]:
    """Keep one core busy meanwhile, by a process of its own."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def table_seconds(policy: str, threads: int, tokens: int, beside: bool) -> float:
    """Return the seconds of one table in a process of its own, under a policy of POLICIES."""
    run = partial(
        in_process,
        "shared",
        "--once",
        "--threads",
        threads,
        "--tokens",
        tokens,
        env={"OMP_WAIT_POLICY": POLICIES[policy]},
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
        f"{policy}, {where}": partial(table_seconds, policy, args.threads, args.tokens, where == "beside")
        for policy in POLICIES
        for where in ("alone", "beside")
    }
    times = in_turns(runs, args.repeats)
    print(f"{args.repeats} repeats, {args.threads} threads; seconds of a table beside a busy process / alone")
    ratios = {policy: median_ratio(times[f"{policy}, beside"], times[f"{policy}, alone"]) for policy in POLICIES}
    print(f"  {'; '.join(f'{name}: {min(spent):.1f} to {max(spent):.1f}' for name, spent in times.items())}")
    print(f"  threads that spin: {ratios['default']:.2f}x")
    ok = verdict("threads that wait passively", ratios["passive"], ratios["passive"] <= SHARED, f"at most {SHARED:g}x")
    alone = median_ratio(times["passive, alone"], times["default, alone"])
    return 0 if verdict("alone, passive / spinning", alone, alone <= ALONE, f"at most {ALONE:g}x") and ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
