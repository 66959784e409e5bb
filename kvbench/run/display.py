"""The progress of a run on stderr: on a terminal a bar per group with rate, tokens kept and ETA, else plain lines."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from rich.progress import Progress, TaskID

from kvbench.errors import say
from kvbench.progress import PLAIN_EVERY_S, bars_of
from kvbench.run.plan import Cell
from kvbench.run.results import CellSummary, Sample
from kvbench.run.run_plan import RunPlan


@dataclass
class Count:
    """The answers of one group so far.

    total, done: answers to come in all, and those that have come.
    prompts, read: prompts to read in all, and those begun.
    pure, pure_s: how many were read with no answer until the next was begun, and how long that took.
    began: when the newest prompt was begun; None once an answer has come since.
    kept: the sum over answers of the fraction of the prompt's tokens kept.
    start: the time when the group's first prompt was about to be read.
    last: the time of the last plain line.
    said: ``done`` in the last plain line.
    line: the group's bar on a terminal.
    """

    total: int
    prompts: int = 0
    done: int = 0
    read: int = 0
    pure: int = 0
    pure_s: float = 0.0
    began: float | None = None
    kept: float = 0.0
    start: float | None = None
    last: float = 0.0
    said: int = 0
    line: TaskID | None = None

    def reading(self, now: float) -> None:
        """Count a prompt that is about to be read."""
        if self.began is not None:
            self.pure, self.pure_s = self.pure + 1, self.pure_s + now - self.began
        self.read, self.began = self.read + 1, now

    def left(self, now: float) -> float:
        """Return the seconds left: prompts are read before answers come, often many before the first.

        Prompts to come take the mean of those that were read, answers the mean of what else has passed.
        """
        each = self.pure_s / self.pure if self.pure else 0.0
        answering = max(now - (self.start or now) - each * self.read, 0.0)
        return each * max(self.prompts - self.read, 0) + answering / self.done * (self.total - self.done)

    def text(self, now: float) -> str:
        """Return as text the answers per second, or seconds per answer if slow, and the mean share of tokens kept."""
        elapsed = max(now - (self.start or now), 1e-9)  # not 0, which the rate is divided by
        rate = self.done / elapsed
        pace = f"{rate:.1f} answers/s" if rate >= 0.05 or not self.done else f"{1 / rate:.0f} s per answer"
        return f"{pace}, mean kept {100 * self.kept / max(1, self.done):.0f} %"


class Display:
    """A listener that shows the progress of a run's groups."""

    def __init__(self) -> None:
        self.counts: dict[str, Count] = {}
        self.bars: Progress | None = None

    def begin(self, prepared: RunPlan) -> None:
        todo = prepared.todo()
        self.counts = {
            t.task: Count(t.answers_to_do, -(-t.answers_to_do // len(t.cells))) for t in todo if t.answers_to_do
        }
        for note in prepared.advice() if self.counts else ():
            say(note)
        if self.counts and sys.stderr.isatty():
            self.bars = bars_of("{task.fields[rate]}")
            for name, count in self.counts.items():
                count.line = self.bars.add_task(name, total=count.total, start=False, rate="")

    def reading(self, column: str) -> None:
        count = self.counts.get(column)
        if count is None:
            return
        now = time.monotonic()
        count.reading(now)
        if count.start is None:
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
        count.done, count.began = count.done + 1, None
        count.kept += sample.kept / max(1, sample.n)
        now = time.monotonic()
        if self.bars is not None and count.line is not None:
            self.bars.update(count.line, advance=1, rate=count.text(now), left=count.left(now))
        elif now - count.last >= PLAIN_EVERY_S or count.done == count.total:
            count.last = now
            self._print_line(cell.column, count, now)

    def ended(self, cell: Cell, status: str, summary: CellSummary | None, reason: str | None) -> None:
        count = self.counts.get(cell.column)
        if self.bars is None and count is not None and count.said < count.done:
            self._print_line(cell.column, count, time.monotonic(), ended=True)

    def close(self) -> None:
        if self.bars is not None:
            self.bars.stop()

    def _print_line(self, name: str, count: Count, now: float, ended: bool = False) -> None:
        """Print a plain line on a group's progress, with the time left unless the group has ended."""
        if not count.done:
            say(f"{name}: 0 of {count.total} answers, reading prompts since {now - (count.start or now):.0f} s")
            return
        seconds_left = count.left(now)
        count.said = count.done
        remaining = "" if ended or not seconds_left else f", about {seconds_left:.0f} s left"
        say(f"{name}: {count.done} of {count.total} answers, {count.text(now)}{remaining}")
