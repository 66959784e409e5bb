"""The progress of a run on stderr: on a terminal a bar per group with tokens kept and ETA, else plain lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from statistics import fmean

from rich.console import Console
from rich.progress import Progress, TaskID

from kvbench.base.progress import PLAIN_EVERY_S, bars_of
from kvbench.base.visible import say
from kvbench.plan.cells import Group
from kvbench.plan.run_plan import RunPlan
from kvbench.run.time_left import TaskTime, TimeLeft
from kvbench.store.cell import Cell
from kvbench.store.results import CellSummary, Sample


@dataclass
class Count:
    """What is shown of one group.

    time: its work, and what it has taken.
    cells: how many of its cells have not ended.
    kept: the sum over answers of the fraction of the prompt's tokens kept.
    start: the time when the group's first prompt was about to be read.
    last: the time of the last plain line.
    said: the answers in the last plain line.
    line: the group's bar on a terminal.
    """

    time: TaskTime
    cells: int
    kept: float = 0.0
    start: float | None = None
    last: float = 0.0
    said: int = 0
    line: TaskID | None = None

    def text(self) -> str:
        """Return as text the mean share of tokens kept."""
        return f"mean kept {100 * self.kept / max(1, self.time.done):.0f} %"


class Display:
    """A listener that shows the progress of a run's groups.

    console: where bars are drawn; None for stderr, if that is a terminal.
    clock: tells the seconds since some moment.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.console, self.clock = console, clock
        self.counts: dict[str, Count] = {}
        self.left = TimeLeft({})
        self.bars: Progress | None = None

    def begin(self, prepared: RunPlan) -> None:
        times = {}
        for group, todo in zip(prepared.groups, prepared.todo(), strict=True):
            if todo.answers_to_do:
                # a group that is answered already has no line, and its time tells nothing of this run
                times[group.column] = _work(prepared, group, todo.answers_to_do)
                self.counts[group.column] = Count(times[group.column], len(group.cells))
        self.left = TimeLeft(times)
        if not self.counts:
            return  # all is measured: its notes stand below the table
        for note in prepared.advice() + prepared.cuts():
            say(note)
        # a log file would be filled by bars that redraw themselves
        if self.console is None and sys.stderr.isatty():
            self.console = Console(stderr=True)
        if self.console is not None:
            self.bars = bars_of("{task.fields[rate]}", self.console)
            for name, count in self.counts.items():
                count.line = self.bars.add_task(name, total=count.time.answers, start=False, rate="", left=None)

    def reading(self, column: str) -> None:
        count = self.counts.get(column)
        if count is None:
            return
        now = self.clock()
        self.left.reading(column, now)
        if count.start is None:
            # the clock begins with the first prompt, not with the loading of the model
            count.start = count.last = now
            if self.bars is not None and count.line is not None:
                self.bars.start()
                self.bars.start_task(count.line)
        elif self.bars is None and now - count.last >= PLAIN_EVERY_S:
            count.last = now
            self._print_line(column, count, now)

    def stored(self, cell: Cell, sample: Sample) -> None:
        count = self.counts.get(cell.column)
        if count is None:
            return
        now = self.clock()
        self.left.answered(cell.column, now)
        # the share of the prompt's tokens that is kept, kept / n, summed over answers
        count.kept += sample.kept / max(1, sample.n)
        if self.bars is not None and count.line is not None:
            here, whole = self._estimates(cell.column)
            rate = count.text()
            if whole is not None:
                rate += f", {_clock(whole)} in all"
            self.bars.update(count.line, advance=1, rate=rate, left=here)
        elif now - count.last >= PLAIN_EVERY_S or count.time.done == count.time.answers:
            count.last = now
            self._print_line(cell.column, count, now)

    def ended(self, cell: Cell, status: str, summary: CellSummary | None, reason: str | None) -> None:
        count = self.counts.get(cell.column)
        if count is None:
            return
        count.cells -= 1
        if count.cells:
            return  # others of its cells are measured in a later round
        total = count.time.answers
        self.left.ended(cell.column)
        # the last answers may have come within PLAIN_EVERY_S of the last line
        if self.bars is None and count.said < count.time.done:
            self._print_line(cell.column, count, self.clock(), total)

    def close(self) -> None:
        if self.bars is not None:
            self.bars.stop()

    def _estimates(self, column: str) -> tuple[float | None, float | None]:
        """Return the seconds left of a group and of the run; None where they are not known well enough.

        The run has none of its own where no other group is left.
        """
        here, whole = self.left.of_task(column), self.left.of_run()
        # the last group's own estimate is that of the run
        alone = all(c.time.done == c.time.answers for name, c in self.counts.items() if name != column)
        here_s, whole_s = None, None
        if here is not None:
            here_s = here.estimate()
        if whole is not None and not alone:
            whole_s = whole.estimate()
        return here_s, whole_s

    def _print_line(self, name: str, count: Count, now: float, total: int | None = None) -> None:
        """Print a plain line on a group's progress: of ``total`` answers if it has ended, else with the time left."""
        elapsed, work = now - (count.start or now), count.time
        if not work.done:
            say(f"{name}: 0 of {work.answers} answers, reading prompts since {elapsed:.0f} s")
            return
        count.said = work.done
        words = [f"{name}: {work.done} of {total or work.answers} answers in {elapsed:.0f} s", count.text()]
        here, whole = self._estimates(name)
        if here is not None and round(here):
            words.append(f"about {here:.0f} s left")
        if whole is not None and round(whole):
            words.append(f"about {whole:.0f} s left of the whole run")
        say(", ".join(words))


def _work(prepared: RunPlan, group: Group, answers: int) -> TaskTime:
    """Return the work of a group, with what tells how it compares to others."""
    # prompts with a stored answer are not read again, and would make the mean length a wrong one
    waiting = prepared.left(group)
    examples = [e for e in group.examples if e.id in waiting]
    length = fmean(len(e.tokens) or len(e.prompt) for e in examples)
    return TaskTime(answers, len(examples), length, max(e.max_new_tokens for e in examples))


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
