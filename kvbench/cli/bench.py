"""bench: what methods cost, measured here: memory by the byte, and time, throughput and peaks end to end."""

from __future__ import annotations

import argparse
import json

from kvbench.base.errors import UsageError
from kvbench.cli import bench_memory
from kvbench.plan.keys import pairs


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("what", choices=("memory", "time"), help="what to measure")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="which methods, models and sizes")
    parser.add_argument("--formula", action="store_true", help="memory: build nothing, print the formulas alone")
    parser.add_argument("--plan", action="store_true", help="time: say what would be measured, and stop")


def main(args: argparse.Namespace) -> int:
    """Print the benchmark asked for. Return exit status 1 if bytes differ from their formula or a timed row failed."""
    other = {"memory": ("time", "--plan", args.plan), "time": ("memory", "--formula", args.formula)}
    verb, option, is_set = other[args.what]
    if is_set:
        raise UsageError(f"{option} belongs to bench {verb}: leave it out")
    if args.what == "memory":
        return bench_memory.main(args)
    from kvbench.bench import request, time_table

    rows, path = request.measure(args.overrides, args.plan, beside=not args.json)
    if args.plan:
        return 0
    over = request.OWN["over"].value(pairs(args.overrides))
    if args.json:
        print(json.dumps(time_table.as_json(rows, over), indent=1, ensure_ascii=False))
    else:
        print(f"{time_table.render(rows, over=over)}Rows: {path}")
    return 1 if any(row["status"] == "failed" for row in rows) else 0
