"""run: compose, plan, measure, print."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import shlex
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from textwrap import fill
from typing import TYPE_CHECKING, Any

import yaml

from kvbench.base.conf import key_help
from kvbench.base.errors import UsageError, notes, say
from kvbench.cli import launchers
from kvbench.methods.core import registry
from kvbench.plan import words

if TYPE_CHECKING:
    from kvbench.plan.cells import GroupPlan, Plan
    from kvbench.report.report import Report
    from kvbench.run.experiment import RunPlan

ENDS = (
    ("refused", "were refused", ""),
    ("failed", "failed", "; the same command tries them again"),
    ("damaged", "could not be read", "; python -m kvbench clean --yes sets damaged ones aside to be measured again"),
)
"""The ways in which cells end without a result, in words, each with what helps."""
MOST_IDS = 24
"""Cells of a plan up to which their ids are printed."""


class Help(argparse.Action):
    """Print the verb's help, or the keys that a topic behind --help names, and stop."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: object, values: Any, option: object = None) -> None:
        """Print the help. An argument of the form ``key=value`` behind --help is no topic."""
        try:
            print(_help(values) if values and "=" not in values else parser.format_help(), end="")
        except UsageError as error:
            parser.error(str(error))
        parser.exit()


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    about = "show this help; with keys every key, with the name of a method or dataset its knobs"
    parser.add_argument("-h", "--help", action=Help, nargs="?", metavar="keys|NAME", help=about)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="what to measure, and how")
    parser.add_argument("--plan", action="store_true", help="show what would be measured, and stop")
    parser.add_argument("--config", action="store_true", help="print the composed configuration, and stop")
    parser.add_argument("-m", "--multirun", action="store_true", help="sweep shard=0,1,... through a Hydra launcher")
    output_arguments(parser)


def output_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for printing a report."""
    parser.add_argument("--format", choices=("text", "md", "csv", "latex"), default="text", help="of the table")


def main(args: argparse.Namespace) -> int:
    """Measure and print. Return exit status 1 if a cell was refused or failed."""
    command = words.read(args.overrides, args.multirun)
    launchers.check(command)
    from kvbench.plan import config
    from kvbench.run import experiment
    from kvbench.run.wandb_logger import listeners

    if args.config:
        for request in command.runs:
            config.parse(request)  # what cannot be carried out is not shown
            composed = config.compose(request)
            print(json.dumps(composed, indent=1) if args.json else yaml.safe_dump(composed, sort_keys=False))
        return 0
    prepared = [experiment.prepare(config.parse(r)) for r in command.runs]
    if args.plan:
        return print_plans(prepared, args.json)
    if command.sweep:
        from kvbench.cli.sweep import sweep

        with stopping(prepared, ["run", "-m", *args.overrides]) as stop:
            sweep(command, prepared[0])
            reports = [experiment.settle(prepared[0], listeners(prepared[0].cfg.logger))]
    else:
        with stopping(prepared, ["run", *args.overrides]) as stop:
            reports = [experiment.measure(p, args.json, listeners(p.cfg.logger)) for p in prepared]
    if stop.status is not None:
        return stop.status
    return print_reports(reports, args)


def _help(topic: str) -> str:
    """Return what ``run --help TOPIC`` prints. Raises UsageError for a topic that there is not."""
    if not registry.of_kvpress(topic):
        return key_help(topic)
    from kvbench.methods.core.kvpress import stage_class

    press = stage_class(topic)
    knobs = "\n".join(f"  {k}: {registry.defaults(press.id)[k]}" for k in registry.knob_names(press.id))
    return f"{press.id}\n{knobs}\n\n{inspect.getdoc(press)}\n"


def print_reports(reports: list[Report], args: argparse.Namespace) -> int:
    """Print reports as the options say. Return exit status 1 if any cell was refused or failed."""
    from kvbench.report import render

    if args.json:
        records = [r.record() for r in reports]
        print(json.dumps(records[0] if len(records) == 1 else records, indent=1, ensure_ascii=False))
    else:
        for r in reports:
            if len(reports) > 1:
                print(f"model {r.model}\n")
            print(render.render(r, args.format), end="")
            if r.apart:
                say(f"measured in another run or part, so that times do not compare: {', '.join(r.apart)}")
    counts = Counter("damaged" if cell.damaged else cell.status for r in reports for cell in r.cells)
    for status, did, hint in ENDS:
        if counts[status]:
            say(f"{counts[status]} of the cells {did}; the reasons stand in the table{hint}")
    return 1 if any(counts[status] for status, _, _ in ENDS) else 0


@dataclass
class Stop:
    """The end of a run. ``status`` is the exit status if a signal ended it, else None."""

    status: int | None = None


@contextmanager
def stopping(prepared: Sequence[RunPlan], asked: Sequence[str]) -> Iterator[Stop]:
    """End on SIGINT or SIGTERM once measured answers are safe; print the progress and the command to go on.

    A second signal ends the process at once, since code of a method may have caught the first. ``asked`` are the verb
    and its arguments.
    """
    stop = Stop()
    signals: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        if signals:
            say("ended at once; the answers that were stored are safe")
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        signals.append(number)
        raise KeyboardInterrupt(f"stopped by {'Ctrl-C' if number == signal.SIGINT else signal.Signals(number).name}")

    previous_handlers = {}
    if threading.current_thread() is threading.main_thread():
        previous_handlers = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    except KeyboardInterrupt as error:
        for note in notes(error):
            say(note)
        stop.status = 128 + (signals[-1] if signals else signal.SIGINT)
        todo = [t for p in prepared for t in p.todo()]
        answered, left = (sum(t.answers_done for t in todo), sum(t.answers_to_do for t in todo))
        command = shlex.join(["python", "-m", "kvbench", *asked])
        say(f"interrupted. {answered} of {answered + left} answers are done and safe; to go on:\n  {command}")
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def print_plans(prepared: Sequence[RunPlan], as_json: bool) -> int:
    """Print what would be measured, and measure nothing."""
    plans = [p.plan() for p in prepared]
    if as_json:
        shown = [
            {"model": p.cfg.model.path, "preset": p.cfg.preset, **asdict(plan)}
            | {"matched": [{**asdict(m), "text": str(m)} for m in p.matched]}
            for p, plan in zip(prepared, plans, strict=True)
        ]
        print(json.dumps(shown, indent=1, ensure_ascii=False))
        return 0
    for p, plan in zip(prepared, plans, strict=True):
        print(f"model {p.cfg.model.path}" + (f", preset {p.cfg.preset}" if p.cfg.preset else ""))
        for text in (*map(str, p.matched), *_plan_lines(plan)):
            print(fill(text, 100, initial_indent="  ", subsequent_indent="    "))
    return 0


def _plan_lines(plan: Plan) -> Iterator[str]:
    """Yield the lines of a plan: each group, the sum, dtype, memory, notes, calibrations, and each method's cells."""
    from kvbench.report.render import size

    for group in plan.groups:
        yield from _planned(group)
    yield f"dtype {plan.dtype}"
    yield from _together(plan)
    yield f"memory for caches: {size(plan.memory)} (memory=GiB sets it)"
    yield from plan.notes
    yield from dict.fromkeys(f"computed first: calibration of {c}" for g in plan.groups for c in g.calibrations)
    methods: dict[str, list[str]] = {}
    for g in plan.groups:
        for method, cell in zip(g.methods, g.cells, strict=True):
            methods.setdefault(method, []).append(cell)
    count = sum(map(len, methods.values()))
    if count <= MOST_IDS:
        yield from (f"method {method}: cells {', '.join(cells)}" for method, cells in methods.items())
    else:
        yield f"{count} cells of {len(methods)} methods: {', '.join(methods)} (list runs has their ids, once begun)"


def _planned(g: GroupPlan) -> Iterator[str]:
    """Yield the lines of one group: answers done and left, memory and time, and the parts in which it runs."""
    from kvbench.report.render import size

    yield (
        f"{g.task}: {g.examples} of {g.of} examples x {len(g.methods)} methods; "
        f"{g.answers_done} answers done, {g.answers_to_do} to do in {g.prefills} prefills "
        f"({g.prefills_saved} saved by sharing)"
    )
    if not g.answers_to_do:
        return
    time = "" if g.seconds is None else f", about {_duration(g.seconds)}"
    yield f"  prompts of at most {g.prompt_tokens} tokens: caches of about {size(g.bytes)}{time}"
    if len(g.parts) > 1:
        named = "; ".join(", ".join(part) for part in g.parts)
        why = "methods of yours are read apart, and each has to fit into memory"
        yield f"  in {len(g.parts)} parts, of which each reads the prompts ({why}): {named}"
    if g.too_large:
        yield (
            f"  not within the memory for caches, even alone, and run all the same: {', '.join(g.too_large)}. Raise "
            "memory=, or shorten the prompts (max_length=)"
        )


def _together(plan: Plan) -> Iterator[str]:
    """Yield the line on all groups together, with their time or how to get one. No line if nothing is left to do."""
    todo = [g for g in plan.groups if g.answers_to_do]
    if not todo:
        return
    seconds = [g.seconds for g in todo if g.seconds is not None]
    known = len(seconds) == len(todo)
    time = f"about {_duration(sum(seconds))}" if known else "for a time measure a few first (limit=2), then ask again"
    yield (
        f"together: {sum(g.answers_to_do for g in todo)} answers in {sum(g.prefills for g in todo)} prefills "
        f"({sum(g.prefills_saved for g in todo)} saved by sharing); {time}"
    )


def _duration(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
