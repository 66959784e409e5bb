"""table: a paper's table on a model, beside the printed values, or one of kvbench's own. Missing cells are measured."""

from __future__ import annotations

import argparse
import json

from kvbench.base.errors import UsageError, unknown
from kvbench.papers.verbs.claims import refuse_fixed
from kvbench.papers.verbs.tables import print_tables
from kvbench.plan.keys import check_choice, parse_pairs
from kvbench.run.console import print_plans, stopping

REPLACED = {
    "bytes": "kvbench suite retain-v1-mini",
    "ranking": "kvbench suite retain-v1-mini",
    "leaderboard": "kvbench run preset=kvpress dataset=ruler",
}
"""Tables of earlier releases, each with the command that measures the same."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("table", help="paper/number, a paper, all, formats or through_cache")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="model=, limit=, results=, ...")
    parser.add_argument(
        "--show",
        default="both",
        help="both, ours, published, delta (ours minus published), or share (per cent of the full cache); default both",
    )
    parser.add_argument("--intervals", action="store_true", help="show the 95 %% interval of each of our numbers")
    parser.add_argument("--format", default="text", help="text, md, csv, latex or html (default text)")
    parser.add_argument("--stored", action="store_true", help="measure nothing, show stored results")
    parser.add_argument("--plan", action="store_true", help="show what would be measured, and stop")
    parser.add_argument(
        "--trace",
        nargs=2,
        metavar=("ROW", "COL"),
        help="list the stored answers behind the number in this row and column",
    )


def main(args: argparse.Namespace) -> int:
    """Measure the missing cells of a table and print it. Return exit status 1 if rows were refused."""
    from kvbench.papers.measured import page, text
    from kvbench.papers.spec import catalogue
    from kvbench.studies import own_tables

    check_choice("value of --show", text.SHOWS, args.show)
    check_choice("value of --format", page.FORMATS, args.format)
    options = parse_pairs(args.overrides)
    # kvbench's own studies of all methods are no paper's tables
    if args.table in own_tables.NAMES:
        return _print_own_table(args.table, options, args)
    if args.table in REPLACED:
        raise UsageError(f"there is no table {args.table} any more: use `{REPLACED[args.table]} method=...`")
    refuse_fixed(options, "the paper's table")
    paper, _, _ = args.table.partition("/")
    if args.table != "all" and paper not in catalogue.paper_ids():
        names = ["all"]
        names += catalogue.papers_in_order()
        names += own_tables.NAMES
        raise unknown("table", args.table, names, listed_by="kvbench list tables")
    return print_tables(options, args)


def _print_own_table(name: str, options: dict[str, str], args: argparse.Namespace) -> int:
    """Measure and print one of kvbench's own tables, which no paper has.

    Return the exit status: 1 if a row was refused or failed, or that of a stopped measurement.

    options: the key=value arguments. ``model`` is taken out of them.
    args: the verb's other arguments.
    """
    from kvbench.report import of_run, writers
    from kvbench.run import experiment
    from kvbench.store.labels import explain_budgets
    from kvbench.studies import own_tables

    if args.trace:
        raise UsageError(
            f"--trace is for papers' tables, and {name} is not one. `kvbench show ID` prints stored answers"
        )
    model = options.pop("model", "") or "tiny"
    runs = own_tables.prepare(name, model, options)
    if args.plan:
        return print_plans(runs, as_json=args.json)
    if not args.stored:
        with stopping(runs, ["table", name] + args.overrides) as stop:
            for run in runs:
                experiment.fill(run, quiet=args.json)
        # the user interrupted the measurement
        if stop.status is not None:
            return stop.status
    reports = [of_run.report_run(run) for run in runs]
    statuses: set[str] = set()
    for report in reports:
        statuses |= {cell.status for cell in report.cells}
    if not args.json and statuses <= {"missing"}:
        print(f"nothing of table {name} is measured yet in {reports[0].results}. Leave out --stored to measure it")
        return 0
    table = own_tables.read_own_table(name, runs, reports)
    if args.json:
        print(json.dumps(table.plain, indent=1, ensure_ascii=False))
    else:
        # the runs behind a table often have the same settings: print each line once, in order
        notes = list(dict.fromkeys(report.settings for report in reports))
        notes += table.notes
        notes += reports[0].notes
        if args.format == "text":
            notes += explain_budgets(row.method for report in reports for row in report.rows)
        print(writers.compose(table.sheets, notes, args.format), end="")
    return 1 if statuses & {"refused", "failed"} else 0
