"""run: compose, plan, measure, print."""

from __future__ import annotations

import argparse
import inspect
import json
from collections import Counter
from collections.abc import Mapping
from textwrap import fill
from typing import TYPE_CHECKING, Any

import yaml

from kvbench.base.conf import HELP_WIDTH, write_key_help
from kvbench.base.errors import UsageError
from kvbench.base.visible import say
from kvbench.cli import launchers
from kvbench.methods.core import registry
from kvbench.plan import words
from kvbench.run.console import add_format_option, print_plans, stopping

if TYPE_CHECKING:
    from kvbench.report.report import Report

ENDS = (
    ("refused", "were refused", ""),
    ("failed", "failed", ". The same command tries them again"),
    (
        "damaged",
        "could not be read",
        ". `kvbench clean --yes` moves damaged results away. The next run measures them again",
    ),
)
"""(status, what happened in words, what helps) of cells that end without a result."""


class Help(argparse.Action):
    """Print the verb's help, or the keys that a topic behind --help names, and stop."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: object, values: Any, option: object = None) -> None:
        """Print the help and end the process. An argument of the form ``key=value`` behind --help is no topic."""
        try:
            if values and "=" not in values:
                print(_write_help(values), end="")
            else:
                print(parser.format_help(), end="")
        except UsageError as error:
            parser.error(str(error))
        parser.exit()


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    about = "show this help. --help keys: all keys. --help NAME: the options of a method or dataset"
    parser.add_argument("-h", "--help", action=Help, nargs="?", metavar="keys|NAME", help=about)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="methods, data and model, and their options")
    parser.add_argument("--plan", action="store_true", help="show what would be measured, and stop")
    parser.add_argument("--config", action="store_true", help="print the configuration with all values, and stop")
    parser.add_argument(
        "-m",
        "--multirun",
        action="store_true",
        help="divide the examples into parts (shards=N or shard=0,1,...), and measure each part in its own process, "
        "started by a Hydra launcher",
    )
    add_report_options(parser)


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for printing the report of a run."""
    parser.add_argument(
        "--intervals",
        action="store_true",
        help="show for every task the score's 95 %% interval and its difference from the full cache's score",
    )
    parser.add_argument(
        "--notes", action="store_true", help="show what each method stores, and how the numbers were measured"
    )
    add_format_option(parser)


def main(args: argparse.Namespace) -> int:
    """Measure the missing results of a run and print its report. Return 1 if a cell was refused or failed, else 0."""
    if any(word.startswith("engine=") for word in args.overrides):
        # the rows of an engine: nothing is compressed here
        from kvbench.engines import verb

        return verb.main(args)
    requests = words.read(args.overrides, args.multirun)
    # several models give several requests; with -m, which a launcher belongs to, only one model is possible
    first_request = requests[0]
    launchers.check_launcher(first_request)
    from kvbench.plan import config

    for request in requests:
        config.check_request(request)
    # these import PyTorch, which takes seconds
    from kvbench.plan import run_plan
    from kvbench.run import experiment
    from kvbench.run.wandb_logger import listeners

    if args.config:
        for request in requests:
            config.parse(request)  # raises for a run that is not possible: its configuration is not shown
            composed = config.compose_with_knobs(request)
            if args.json:
                print(json.dumps(composed, indent=1))
            else:
                print(yaml.safe_dump(composed, sort_keys=False))
        return 0
    # a grid of models is a run for each; all are planned before the first is measured
    plans = [run_plan.prepare(config.parse(request)) for request in requests]
    if args.plan:
        return print_plans(plans, args.json)
    if args.multirun:
        from kvbench.cli.sweep import run_shards

        first_plan = plans[0]
        with stopping(plans, ["run", "-m"] + args.overrides) as stop:
            # the shards are measured by other processes, into the same folder of results
            run_shards(first_request, first_plan)
            reports = [experiment.settle(first_plan, listeners(first_plan.cfg.logger))]
    else:
        with stopping(plans, ["run"] + args.overrides) as stop:
            reports = [experiment.measure(plan, args.json, listeners(plan.cfg.logger)) for plan in plans]
    if stop.status is not None:
        return stop.status
    return print_reports(reports, args)


def print_reports(reports: list[Report], args: argparse.Namespace) -> int:
    """Print reports as the options say. Return exit status 1 if any cell was refused or failed, else 0.

    args: the parsed options of ``add_report_options``, and ``json``.
    """
    from kvbench.report import render

    if args.json:
        # one model's report is printed alone, without a list around it
        records = [report.record() for report in reports]
        content = records[0] if len(records) == 1 else records
        print(json.dumps(content, indent=1, ensure_ascii=False))
    else:
        detail = render.Detail(intervals=args.intervals, notes=args.notes)
        for report in reports:
            if len(reports) > 1:
                print(f"model {report.model}\n")
            print(render.render_report(report, args.format, detail), end="")
    counts: Counter[str] = Counter()
    for report in reports:
        for cell in report.cells:
            # the report counts damaged cells as failed, but a different command repairs them
            counts["damaged" if cell.damaged else cell.status] += 1
    exit_status = 0
    for status, outcome, hint in ENDS:
        if counts[status]:
            say(f"{counts[status]} of the results {outcome}. The reasons stand below the table{hint}")
            exit_status = 1
    return exit_status


def _write_help(topic: str) -> str:
    """Return the text of ``run --help TOPIC``. Raises UsageError for an unknown topic."""
    if topic in registry.available() and registry.path_of(topic).suffix == ".py":
        # a method of the user's own has no YAML file, and its file is read, not run
        about, defaults = registry.described(topic)
        return _list_options(topic, defaults, fill(about, HELP_WIDTH))
    if not registry.of_kvpress(topic):
        return write_key_help(topic)
    from kvbench.methods.core.kvpress import stage_class

    # kvpress's methods have no YAML file: their knobs are the arguments of their classes
    press = stage_class(topic)
    entry = registry.defaults(press.id)
    defaults = {name: entry[name] for name in registry.knob_names(press.id)}
    return _list_options(press.id, defaults, inspect.getdoc(press) or "")


def _list_options(method: str, defaults: Mapping[str, object], about: str) -> str:
    """Return the help on a method without a YAML file: its options with their defaults, and what it does."""
    lines = [f"method={method}:"]
    lines += [f"  {name}: {json.dumps(default, default=str)}" for name, default in defaults.items()]
    return "\n".join(lines) + f"\n\n{about}\n"
