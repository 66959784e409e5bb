"""The text that commands print about runs and reports, and the end of a run that a signal stops."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from textwrap import fill
from typing import TYPE_CHECKING

from kvbench.base.errors import notes
from kvbench.base.visible import describe_duration, say

if TYPE_CHECKING:
    from kvbench.plan.forecast import Forecast, GroupForecast
    from kvbench.plan.run_plan import RunPlan

MOST_IDS = 24
"""The most cells of a forecast whose ids are printed."""


def add_format_option(parser: argparse.ArgumentParser) -> None:
    """Add the option for the format of a table."""
    parser.add_argument("--format", choices=("text", "md", "csv", "latex"), default="text", help="format of the table")


@dataclass
class Stop:
    """The end of a run. ``status`` is the exit status if a signal ended it, else None."""

    status: int | None = None


@contextmanager
def stopping(prepared: Sequence[RunPlan], arguments: Sequence[str]) -> Iterator[Stop]:
    """While the context is open, SIGINT or SIGTERM ends the run once the measured answers are safe.

    The run's progress is printed then, and the command to continue with. The context yields a ``Stop``, whose status
    is set after a signal. A second signal ends the process at once, since a method's code may have caught the first.

    prepared: the runs whose answers are counted.
    arguments: the verb and the verb's arguments, for the command.
    """
    stop = Stop()
    signals: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        """Raise KeyboardInterrupt at the first signal. End the process at the second."""
        # a second signal: the default handler ends the process without running any more Python code
        if signals:
            say("ended at once; the answers that were stored are safe")
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        signals.append(number)
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        raise KeyboardInterrupt(f"stopped by {name}")

    previous_handlers = {}
    # Python lets only the main thread set handlers
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            previous_handlers[number] = signal.signal(number, interrupt)
    try:
        yield stop
    except KeyboardInterrupt as error:
        for note in notes(error):
            say(note)
        # a method's code may raise this error without a signal
        last_signal = signals[-1] if signals else signal.SIGINT
        # a shell's exit status for a process that a signal ended
        stop.status = 128 + last_signal
        _say_how_to_go_on(prepared, arguments)
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def _say_how_to_go_on(prepared: Sequence[RunPlan], arguments: Sequence[str]) -> None:
    """Print how many answers of interrupted runs are done, and the command that measures the others."""
    done, left = 0, 0
    for plan in prepared:
        for group in plan.todo():
            done += group.answers_done
            left += group.answers_to_do
    command = shlex.join(["kvbench"] + list(arguments))
    say(f"interrupted. {done} of {done + left} answers are done and safe; to go on:\n  {command}")


def print_plans(prepared: Sequence[RunPlan], as_json: bool) -> int:
    """Print the plans of runs, as text or as JSON, and measure nothing. Return exit status 0."""
    from kvbench.plan.forecast import forecast_run
    from kvbench.store.labels import explain_budgets

    forecasts = [forecast_run(run) for run in prepared]
    if as_json:
        records = []
        for run, forecast in zip(prepared, forecasts, strict=True):
            record: dict[str, object] = {"model": run.cfg.model.path, "preset": run.cfg.preset}
            record |= asdict(forecast)
            record["matched"] = [asdict(match) | {"text": str(match)} for match in run.matched]
            records.append(record)
        print(json.dumps(records, indent=1, ensure_ascii=False))
        return 0
    for run, forecast in zip(prepared, forecasts, strict=True):
        heading = f"model {run.cfg.model.path}"
        if run.cfg.preset:
            heading += f", preset {run.cfg.preset}"
        print(heading)
        lines = [str(match) for match in run.matched]
        lines += _describe_forecast(forecast)
        methods = []
        for group in forecast.groups:
            methods += group.methods
        lines += explain_budgets(methods)
        for line in lines:
            print(fill(line, 100, initial_indent="  ", subsequent_indent="    "))
    return 0


def _describe_forecast(forecast: Forecast) -> Iterator[str]:
    """Yield a forecast's lines: each group, dtype, the sum, memory, notes, calibrations, and each method's cells.

    If there are more than MOST_IDS cells, the methods alone are named.
    """
    from kvbench.base.formatting import format_size

    for group in forecast.groups:
        yield from _describe_group(group)
    yield f"dtype {forecast.dtype}"
    yield from _describe_total(forecast.groups)
    yield f"memory for caches: {format_size(forecast.memory)} (memory=GiB sets it)"
    yield from forecast.notes
    # several tasks may need the same calibration; it is computed once
    calibrations: list[str] = []
    for group in forecast.groups:
        calibrations += group.calibrations
    for calibration in dict.fromkeys(calibrations):
        yield f"computed first: calibration of {calibration}"
    # a method has a cell for each task
    cells_by_method: dict[str, list[str]] = {}
    for group in forecast.groups:
        for method, cell in zip(group.methods, group.cells, strict=True):
            cells_by_method.setdefault(method, []).append(cell)
    n_cells = sum(map(len, cells_by_method.values()))
    if n_cells <= MOST_IDS:
        for method, cells in cells_by_method.items():
            yield f"method {method}: results {', '.join(cells)}"
    else:
        methods = ", ".join(cells_by_method)
        yield f"{n_cells} results of {len(cells_by_method)} methods: {methods} (list runs has their ids, once begun)"


def _describe_group(group: GroupForecast) -> Iterator[str]:
    """Yield the lines of one group: answers done and left, memory and time, and the parts in which it runs."""
    from kvbench.base.formatting import format_size

    yield (
        f"{group.task}: {group.examples} of {group.of} examples x {len(group.methods)} methods; "
        f"{group.answers_done} answers done, {group.answers_to_do} to do in {group.prefills} prefills "
        f"({group.prefills_saved} saved by sharing)"
    )
    if not group.answers_to_do:
        return
    line = f"  prompts of at most {group.prompt_tokens} tokens: caches of about {format_size(group.bytes)}"
    # the time is known only after something similar was measured on this machine
    if group.seconds is not None:
        line += f", about {describe_duration(group.seconds)}"
    yield line
    if len(group.parts) > 1:
        methods = "; ".join(map(", ".join, group.parts))
        why = "methods of yours are read apart, and each has to fit into memory"
        yield f"  in {len(group.parts)} parts, of which each reads the prompts ({why}): {methods}"
    if group.too_large:
        yield (
            f"  not within the memory for caches, even alone, and run all the same: {', '.join(group.too_large)}. "
            "Raise memory=, or shorten the prompts (max_length=)"
        )


def _describe_total(groups: Sequence[GroupForecast]) -> Iterator[str]:
    """Yield the line on all groups together, with their time or how to get one. Yield nothing if no work is left."""
    todo = [group for group in groups if group.answers_to_do]
    if not todo:
        return
    seconds = [group.seconds for group in todo if group.seconds is not None]
    time = "for a time measure a few first (limit=2), then ask again"
    # a sum over only some of the groups would be too short
    if len(seconds) == len(todo):
        time = f"about {describe_duration(sum(seconds))}"
    yield (
        f"together: {sum(group.answers_to_do for group in todo)} answers in "
        f"{sum(group.prefills for group in todo)} prefills "
        f"({sum(group.prefills_saved for group in todo)} saved by sharing); {time}"
    )
