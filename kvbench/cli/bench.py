"""bench: the cost of methods, measured here: memory by the byte, and time, throughput and peaks end to end."""

from __future__ import annotations

import argparse
import json

from kvbench.base.errors import UsageError
from kvbench.cli import bench_memory
from kvbench.plan.keys import parse_pairs


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("what", choices=("memory", "time"), help="what to measure")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="methods, models and sizes")
    parser.add_argument(
        "--formula",
        action="store_true",
        help="with memory: build no caches, print only the bytes that a formula predicts",
    )
    parser.add_argument("--plan", action="store_true", help="with time: show what would be measured, and stop")


def main(args: argparse.Namespace) -> int:
    """Print the benchmark asked for. Return exit status 1 if bytes differ from their formula or a timed row failed."""
    # argparse takes both options for either benchmark
    if args.what == "memory":
        if args.plan:
            raise UsageError("--plan belongs to bench time: leave it out")
        return bench_memory.main(args)
    if args.formula:
        raise UsageError("--formula belongs to bench memory: leave it out")
    return _print_times(args)


def _print_times(args: argparse.Namespace) -> int:
    """Measure and print times, throughput and peaks. Return exit status 1 if a row failed."""
    from kvbench.bench import request, time_table
    from kvbench.store.labels import explain_budgets

    rows, path = request.measure_rows(args.overrides, args.plan, beside=not args.json)
    # with --plan, measure_rows has printed the plan and measured nothing
    if args.plan:
        return 0
    # the key over=
    over = request.OWN["over"].value(parse_pairs(args.overrides))
    if args.json:
        print(json.dumps(time_table.as_json(rows, over), indent=1, ensure_ascii=False))
    else:
        print(f"{time_table.render(rows, over=over)}Rows: {path}")
        for note in explain_budgets(str(row["method"]) for row in rows):
            print(note)
    # a row that was refused is an answer, one that failed is not
    if any(row["status"] == "failed" for row in rows):
        return 1
    return 0
