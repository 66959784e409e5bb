"""table: a paper's table on a model, beside what the paper prints; what is missing is measured first."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from kvbench.base.errors import UsageError, say, unknown
from kvbench.cli.claims import refuse_fixed
from kvbench.plan.keys import one_of, pairs

if TYPE_CHECKING:
    from kvbench.papers.measured.cell_view import View


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument(
        "table", help="paper/number, a paper, all, formats, bytes, through_cache, ranking or leaderboard"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="model=, limit=, results=, ...")
    parser.add_argument("--show", default="both", help="both, ours, published or delta (default both)")
    parser.add_argument("--format", default="text", help="text, md, csv, latex or html (default text)")
    parser.add_argument("--stored", action="store_true", help="measure nothing, show what is in the store")
    parser.add_argument("--plan", action="store_true", help="show what would be measured, and stop")
    parser.add_argument("--trace", nargs=2, metavar=("ROW", "COL"), help="the stored lines behind one number")


def main(args: argparse.Namespace) -> int:
    """Measure missing cells and print. Return exit status 1 if rows were refused."""
    from kvbench.papers.measured import grid, page
    from kvbench.papers.spec import catalogue, table_spec
    from kvbench.papers.timed import timings
    from kvbench.studies import own_tables

    for name, value, allowed in (("--show", args.show, grid.SHOWS), ("--format", args.format, page.FORMATS)):
        one_of(f"value of {name}", allowed, value)
    options = pairs(args.overrides)
    if args.table in own_tables.NAMES:
        return _own(args.table, options, args)
    refuse_fixed(options, "the paper's table")
    if args.table != "all" and args.table.partition("/")[0] not in catalogue.papers():
        raise unknown("paper or table", args.table, ("all", *catalogue.in_place(), *own_tables.NAMES))
    model = options.pop("model", "")
    tables = table_spec.find(args.table)
    if args.trace and len(tables) > 1:
        raise UsageError(f"--trace needs one table, as in think/2, not {args.table}")
    if args.json and (args.plan or args.trace):
        raise UsageError("--json prints the cells of tables: leave it out with --plan and --trace")
    views: list[View] = []
    wrong = False
    for i, table in enumerate(tables):
        if i and args.format == "text" and not args.json:
            print()
        overrides = [f"{k}={v}" for k, v in options.items()]
        if table.kind == timings.KIND:
            # of several tables each takes what is its own; of one, a key that is not is an error
            mine = [o for o in overrides if len(tables) == 1 or timings.allowed(o.partition("=")[0])]
            shown = _timed(table, model, mine, args)
        else:
            shown = _one(table, model, overrides, args)
        if isinstance(shown, int):
            if shown > 1:
                return shown
            wrong |= bool(shown)
            continue
        views.append(shown)
        if not args.json:
            print(page.render(shown, args.format, args.show, sys.stdout.isatty()), end="")
    if args.json:
        plain = [page.as_json(v) for v in views]
        print(json.dumps(plain if len(tables) > 1 else plain[0], indent=1, ensure_ascii=False))
    wrong |= any(e.status in ("refused", "failed") for v in views for _, entries in v.rows for e in entries)
    if wrong:
        say("some cells were refused or failed; the reasons stand below the table")
    return 1 if wrong else 0


def _own(name: str, options: dict[str, str], args: argparse.Namespace) -> int:
    """Measure a table that no paper prints, and print it. Return the exit status."""
    from kvbench.cli.run import print_plans, stopping
    from kvbench.report import writers
    from kvbench.run import experiment
    from kvbench.studies import own_tables

    if args.trace:
        raise UsageError(f"--trace is of papers' tables, not of {name}: kvbench show CELL prints stored answers")
    model = options.pop("model", "") or "tiny"
    runs = own_tables.prepare(name, model, options)
    if args.plan:
        return print_plans(runs, as_json=args.json)
    if not args.stored:
        with stopping(runs, ["table", name, *args.overrides]) as stop:
            for run in runs:
                experiment.fill(run, quiet=args.json)
        if stop.status is not None:
            return stop.status
    reports = [experiment.report(run) for run in runs]
    if not args.json and all(cell.status == "missing" for report in reports for cell in report.cells):
        print(f"nothing of table {name} is measured yet in {reports[0].results}; leave out --stored to measure it")
        return 0
    table = own_tables.read(name, model, runs, reports)
    if args.json:
        print(json.dumps(table.plain, indent=1, ensure_ascii=False))
    else:
        settings = dict.fromkeys(report.settings for report in reports)
        print(writers.compose(table.sheets, [*settings, *table.notes, *reports[0].notes], args.format), end="")
    return 1 if any(c.status in ("refused", "failed") for report in reports for c in report.cells) else 0


def _one(table: Any, model: str, overrides: list[str], args: argparse.Namespace) -> int | View:
    """Measure one table and return its view, or an exit status if something else was printed or a signal ended it."""
    from kvbench.cli.run import print_plans, stopping
    from kvbench.papers.measured import cell_view, grid, our_table, trace
    from kvbench.run import experiment
    from kvbench.run.wandb_logger import listeners

    if args.show == "published":
        ours = our_table.printed(table, model, "--show published")
    else:
        ours = our_table.prepare(table, model, overrides)
    if ours.run is None and ours.absent and "/" in args.table:
        raise UsageError(f"{table.id}: none of its datasets can be read: {'; '.join(grid.absent(ours))}")
    if args.plan:
        if ours.run is None:
            print(f"{table.id}: nothing to measure" + ("" if table.measurable else ", its numbers are no scores"))
        code = print_plans([ours.run] if ours.run else [], as_json=False)
        for reason in grid.absent(ours):
            print(fill(reason, 100, initial_indent="  ", subsequent_indent="    "))
        return code
    if args.trace:
        trace.find(ours, *args.trace)  # a name that is not there costs no measuring
    if ours.run is not None and not args.stored:
        words = ["table", args.table, *args.overrides]
        logger = ours.run.cfg.logger
        follow = listeners(replace(logger, group=logger.group or table.id))
        with stopping([ours.run], words) as stop:
            experiment.measure(ours.run, listeners=follow)
        if stop.status is not None:
            return stop.status
    if args.trace:
        print(trace.trace(ours, *args.trace))
        return 0
    return cell_view.view(ours)


def _timed(table: Any, model: str, overrides: list[str], args: argparse.Namespace) -> int | View:
    """Time one efficiency table and return its view. Return exit status 0 if something else was printed."""
    from kvbench.papers.measured import cell_view, our_table
    from kvbench.papers.timed import timings

    other = next((o for o in overrides if not timings.allowed(o.partition("=")[0])), None)
    if other:
        raise UsageError(
            f"{other} is not possible here: {table.id} is timed, not scored; it takes model=, results=, "
            f"{', '.join(f'{k}=' for k in timings.KEYS)}"
        )
    results = Path(next((o.removeprefix("results=") for o in overrides if o.startswith("results=")), "results"))
    more = [o for o in overrides if not o.startswith("results=")]
    if more and args.stored and "/" in args.table:
        raise UsageError(f"{' '.join(more)} is not possible with --stored, which times nothing: leave one of them out")
    found = timings.read(table, model, results)
    if args.plan:
        timings.measure(found, more, plan=True)
        return 0
    if not args.stored and args.show != "published":
        timings.measure(found, more)
        found = timings.read(table, found.bench.model, results)
    if args.trace:
        print(timings.trace(found, *args.trace))
        return 0
    return cell_view.view(our_table.timed(found))
