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
    from kvbench.papers.measured.plan import PaperTable
    from kvbench.papers.spec.table_spec import TableSpec


def print_tables(options: dict[str, str], args: argparse.Namespace) -> int:
    """Measure the missing cells of the papers' tables that the user named, and print the tables.

    options: the verb's key=value arguments.
    args: the verb's other arguments.

    Return the exit status: 1 if cells were refused or failed, a higher one if a signal ended the measuring, else 0.
    """
    from kvbench.papers.measured import page
    from kvbench.papers.measured.text import WRONG
    from kvbench.papers.spec import table_spec
    from kvbench.papers.timed import timings

    model = options.pop("model", "")
    specs = table_spec.find_tables(args.table)
    if args.trace and len(specs) > 1:
        raise UsageError(f"--trace needs one table, as in think/2, not {args.table}")
    if args.json and (args.plan or args.trace):
        raise UsageError("--json prints the results of tables: leave it out with --plan and --trace")
    tables: list[PaperTable] = []
    for i, spec in enumerate(specs):
        # an empty line between two tables of text
        if i and args.format == "text" and not args.json:
            print()
        if spec.kind == timings.KIND:
            # several tables each take their own keys; one table refuses a key that it does not take
            taken = {key: text for key, text in options.items() if len(specs) == 1 or timings.is_table_key(key)}
            outcome = _time_table(spec, model, taken, args)
        else:
            outcome = _measure_table(spec, model, [f"{key}={text}" for key, text in options.items()], args)
        # an exit status: something else was printed, or a signal ended the measuring (128 and more)
        if isinstance(outcome, int):
            if outcome:
                return outcome
            continue
        tables.append(outcome)
        # each table is printed once it is measured: all tables of a paper take hours
        if not args.json:
            _print_table(outcome, args)
    if args.json:
        records = [page.as_json(table) for table in tables]
        # one table is printed alone, not as a list of one
        print(json.dumps(records if len(specs) > 1 else records[0], indent=1, ensure_ascii=False))
    has_failed = any(cell.status in WRONG for table in tables for cell in table.pairs)
    if has_failed:
        say("some results were refused or failed. The reasons stand below the table")
    return int(has_failed)


def _print_table(table: PaperTable, args: argparse.Namespace) -> None:
    from kvbench.papers.measured import page
    from kvbench.store.labels import explain_budgets

    print(page.render(table, args.format, args.show, sys.stdout.isatty(), args.intervals), end="")
    if args.format == "text":
        # a row is named by its method and settings, which semicolons separate
        for note in explain_budgets(name.replace(";", " ") for name in table.rows["name"]):
            print(fill(note, 100))


def _measure_table(spec: TableSpec, model: str, overrides: Sequence[str], args: argparse.Namespace) -> int | PaperTable:
    """Measure one table and return it, or an exit status if something else was printed or a signal ended it."""
    from kvbench.papers.measured import cells, plan, text, trace, work
    from kvbench.run import experiment
    from kvbench.run.wandb_logger import listeners

    if args.show == "published":
        table = plan.make_printed_table(spec, model, "--show published")
    else:
        table = plan.prepare(spec, model, overrides)
    reasons = text.list_reasons_for_absence(table)
    # a table without data is an error if it was named alone (as think/2); a whole paper shows it, too, with the reasons
    if table.run is None and reasons and "/" in args.table:
        raise UsageError(f"{spec.id}: none of its datasets can be read: {'; '.join(reasons)}")
    if args.plan:
        if table.run is not None:
            print_plans([table.run], as_json=False)
            total = work.describe_work(work.list_work([table.run], None))
            if total:
                print(fill(f"{spec.id}: {total}", 100))
        else:
            why = "" if spec.measurable else ", because its numbers are not scores"
            print(f"{spec.id}: nothing to measure{why}")
        for reason in reasons:
            print(fill(reason, 100, initial_indent="  ", subsequent_indent="    "))
        return 0
    # args.trace has the names of a row and a column
    if args.trace:
        # an unknown name is refused before anything is measured
        trace.find_cell(table, *args.trace)
    if table.run is not None and not args.stored:
        # W&B shows the runs of one table together
        logger = table.run.cfg.logger
        logger = replace(logger, group=logger.group or spec.id)
        with stopping([table.run], ["table", args.table] + args.overrides) as stop:
            experiment.measure(table.run, listeners=listeners(logger))
        if stop.status is not None:
            return stop.status
    if args.trace:
        print(trace.trace_number(table, *args.trace))
        return 0
    return cells.read_cells(table)


def _time_table(spec: TableSpec, model: str, options: Mapping[str, str], args: argparse.Namespace) -> int | PaperTable:
    """Time one efficiency table and return it. Return exit status 0 if something else was printed."""
    from kvbench.papers.measured import cells, plan
    from kvbench.papers.timed import timings

    for key, value in options.items():
        if not timings.is_table_key(key):
            keys = ", ".join(f"{name}=" for name in timings.KEYS)
            raise UsageError(
                f"{key}={value} is not possible here: {spec.id} is timed, not scored. It takes model=, results=, {keys}"
            )
    results = Path(options.get("results", "results"))
    bench_words = [f"{key}={value}" for key, value in options.items() if key != "results"]
    # keys that a whole paper is given may be meant for its scored tables
    if bench_words and args.stored and "/" in args.table:
        raise UsageError(
            f"{' '.join(bench_words)} is not possible with --stored, which times nothing: leave one of them out"
        )
    times = timings.read_timings(spec, model, results)
    if args.plan:
        timings.measure_missing(times, bench_words, plan=True)
        return 0
    if not args.stored and args.show != "published":
        timings.measure_missing(times, bench_words)
        # the times just measured, of the same model even if it was chosen by default
        times = timings.read_timings(spec, times.bench.model, results)
    if args.trace:
        print(timings.trace_number(times, *args.trace))
        return 0
    return cells.read_cells(plan.make_timed_table(times))
