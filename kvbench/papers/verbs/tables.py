"""Papers' tables on a model, beside the printed values, as `table` prints them. Missing cells are measured first."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from kvbench.base.errors import UsageError
from kvbench.base.visible import say
from kvbench.run.console import print_plans, stopping

if TYPE_CHECKING:
    from kvbench.papers.measured.cell_view import View
    from kvbench.papers.spec.table_spec import TableSpec


def print_tables(options: dict[str, str], args: argparse.Namespace) -> int:
    """Measure the missing cells of the papers' tables that the user named, and print the tables.

    options: the verb's key=value arguments.
    args: the verb's other arguments.

    Return the exit status: 1 if cells were refused or failed, a higher one if a signal ended the measuring, else 0.
    """
    from kvbench.papers.measured import page
    from kvbench.papers.spec import table_spec
    from kvbench.papers.timed import timings

    model = options.pop("model", "")
    tables = table_spec.find_tables(args.table)
    if args.trace and len(tables) > 1:
        raise UsageError(f"--trace needs one table, as in think/2, not {args.table}")
    if args.json and (args.plan or args.trace):
        raise UsageError("--json prints the results of tables: leave it out with --plan and --trace")
    views: list[View] = []
    has_failed = False
    for i, table in enumerate(tables):
        # an empty line between two tables of text
        if i and args.format == "text" and not args.json:
            print()
        table_options = options
        if table.kind == timings.KIND:
            # several tables each take their own keys; one table refuses a key that it does not take
            if len(tables) > 1:
                table_options = {key: value for key, value in options.items() if timings.is_table_key(key)}
            outcome = _time_table(table, model, table_options, args)
        else:
            overrides = [f"{key}={value}" for key, value in options.items()]
            outcome = _measure_table(table, model, overrides, args)
        # an exit status: something else was printed, or a signal ended the measuring (128 and more)
        if isinstance(outcome, int):
            if outcome > 1:
                return outcome
            has_failed |= bool(outcome)
            continue
        views.append(outcome)
        # each table is printed once it is measured: all tables of a paper take hours
        if not args.json:
            _print_view(outcome, args)
    if args.json:
        records = [page.as_json(view) for view in views]
        # one table is printed alone, not as a list of one
        content = records if len(tables) > 1 else records[0]
        print(json.dumps(content, indent=1, ensure_ascii=False))
    has_failed |= any(map(_has_failed_cells, views))
    if has_failed:
        say("some results were refused or failed. The reasons stand below the table")
    return int(has_failed)


def _print_view(view: View, args: argparse.Namespace) -> None:
    from kvbench.papers.measured import page
    from kvbench.store.labels import explain_budgets

    print(page.render(view, args.format, args.show, sys.stdout.isatty(), args.intervals), end="")
    if args.format == "text":
        # a row is named by its method and settings, which semicolons separate
        for note in explain_budgets(line.row.name.replace(";", " ") for line, _ in view.rows):
            print(fill(note, 100))


def _has_failed_cells(view: View) -> bool:
    return any(entry.status in ("refused", "failed") for _, entries in view.rows for entry in entries)


def _measure_table(table: TableSpec, model: str, overrides: Sequence[str], args: argparse.Namespace) -> int | View:
    from kvbench.papers.measured import cell_view, grid, our_table, trace, work
    from kvbench.run import experiment
    from kvbench.run.wandb_logger import listeners

    if args.show == "published":
        ours = our_table.make_printed_table(table, model, "--show published")
    else:
        ours = our_table.prepare(table, model, overrides)
    # a table without data is an error if it was named alone (as think/2); a whole paper shows it, too, with the reasons
    if ours.run is None and ours.absent and "/" in args.table:
        reasons = "; ".join(grid.list_reasons_for_absence(ours))
        raise UsageError(f"{table.id}: none of its datasets can be read: {reasons}")
    if args.plan:
        if ours.run is not None:
            print_plans([ours.run], as_json=False)
            total = work.describe_work(work.list_work([ours.run], None))
            if total:
                print(fill(f"{table.id}: {total}", 100))
        elif table.measurable:
            print(f"{table.id}: nothing to measure")
        else:
            print(f"{table.id}: nothing to measure, because its numbers are not scores")
        for reason in grid.list_reasons_for_absence(ours):
            print(fill(reason, 100, initial_indent="  ", subsequent_indent="    "))
        return 0
    # args.trace has the names of a row and a column
    if args.trace:
        # an unknown name is refused before anything is measured
        trace.find_cell(ours, *args.trace)
    if ours.run is not None and not args.stored:
        # W&B shows the runs of one table together
        logger = ours.run.cfg.logger
        logger = replace(logger, group=logger.group or table.id)
        with stopping([ours.run], ["table", args.table] + args.overrides) as stop:
            experiment.measure(ours.run, listeners=listeners(logger))
        if stop.status is not None:
            return stop.status
    if args.trace:
        print(trace.trace_number(ours, *args.trace))
        return 0
    return cell_view.build_view(ours)


def _time_table(table: TableSpec, model: str, options: Mapping[str, str], args: argparse.Namespace) -> int | View:
    from kvbench.papers.measured import cell_view, our_table
    from kvbench.papers.timed import measuring, timings

    results = Path("results")
    bench_words = []
    for key, value in options.items():
        if not timings.is_table_key(key):
            keys = ", ".join(f"{name}=" for name in timings.KEYS)
            raise UsageError(
                f"{key}={value} is not possible here: {table.id} is timed, not scored. It takes model=, results=, "
                f"{keys}"
            )
        if key == "results":
            results = Path(value)
        else:
            bench_words.append(f"{key}={value}")
    # keys that a whole paper is given may be meant for its scored tables
    if bench_words and args.stored and "/" in args.table:
        raise UsageError(
            f"{' '.join(bench_words)} is not possible with --stored, which times nothing: leave one of them out"
        )
    times = timings.read_timings(table, model, results)
    if args.plan:
        measuring.measure_missing(times, bench_words, plan=True)
        return 0
    if not args.stored and args.show != "published":
        measuring.measure_missing(times, bench_words)
        # the times just measured, of the same model even if it was chosen by default
        times = timings.read_timings(table, times.bench.model, results)
    if args.trace:
        print(timings.trace_number(times, *args.trace))
        return 0
    return cell_view.build_view(our_table.make_timed_table(times))
