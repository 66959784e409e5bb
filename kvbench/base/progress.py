"""The progress of long work on stderr: bars with an ETA on a terminal, else a plain line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from kvbench.base.visible import say

PLAIN_EVERY_S = 15.0
"""The seconds between two plain lines."""
UNKNOWN = "-:--:--"
"""The text in place of a time left that nobody knows."""
Tick = Callable[[str, int], None]
"""``tick(name, n)`` reports that n more pieces of the work ``name`` are done."""


@contextmanager
def progress(
    totals: Mapping[str, int],
    quiet: bool = False,
    unit: str = "answers",
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Tick]:
    """While the context is open, show the progress of work. Yield the function that the work calls as it gets on.

    totals: the number of pieces to do, by the name of the work. The work reports only names with at least one piece.
    quiet: True shows nothing.
    unit: the word for the pieces in the plain lines.
    clock: a function that returns the present time in seconds.
    """
    total = sum(totals.values())
    if quiet or not total:
        yield _ignore
    elif sys.stderr.isatty():
        with make_bars("", Console(stderr=True)) as bars:
            # finished work has no bar
            tasks = {name: bars.add_task(name, total=n) for name, n in totals.items() if n}

            def advance(name: str, n: int) -> None:
                bars.advance(tasks[name], n)

            yield advance
    else:
        yield _PlainLines(total, unit, clock).tick


def _ignore(name: str, n: int) -> None:
    """Take a report of progress and show nothing."""


class _Estimate(NamedTuple):
    """The time that a task needs, estimated when the task was last advanced.

    completed: the number of its pieces that were done then.
    elapsed: the seconds that had passed.
    left: the seconds left; None if nobody knows.
    """

    completed: float
    elapsed: float
    left: float | None


class Left(ProgressColumn):
    """The time left at the mean rate so far. rich's own estimate mistakes the burst in which a batch ends for the rate.

    A task's field ``left`` states the seconds left when the task was last advanced, or None if nobody knows.
    """

    def __init__(self) -> None:
        super().__init__()
        self._estimates: dict[TaskID, _Estimate] = {}

    def render(self, task: Task) -> Text:
        """Return the column's text, counted down since the task was last advanced."""
        # rich may ask before the task has begun, and without a finished piece there is no rate
        if not task.completed or task.total is None or task.elapsed is None:
            return Text(UNKNOWN, style="progress.remaining")
        estimate = self._estimates.get(task.id)
        # a new estimate is made only when a piece is finished; until then the old one is counted down
        if estimate is None or estimate.completed != task.completed:
            # seconds per piece so far, times the pieces left
            by_rate = task.elapsed / task.completed * (task.total - task.completed)
            estimate = _Estimate(task.completed, task.elapsed, task.fields.get("left", by_rate))
            self._estimates[task.id] = estimate
        if estimate.left is None:
            return Text(UNKNOWN, style="progress.remaining")
        # an estimate that was too short stands at 0
        seconds_left = max(0.0, estimate.left - (task.elapsed - estimate.elapsed))
        return Text(str(timedelta(seconds=round(seconds_left))), style="progress.remaining")


def make_bars(extra_column: str, console: Console) -> Progress:
    """Return progress bars on a terminal, which disappear when they are closed.

    extra_column: rich's template of a further column of text, such as ``{task.fields[task_name]}``; '' leaves it
        empty.
    console: the terminal.
    """
    columns = (
        # a description may hold brackets that are not markup
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=10),
        MofNCompleteColumn(),
        TextColumn(extra_column),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        Left(),
    )
    return Progress(*columns, console=console, transient=True)


class _PlainLines:
    """A plain line every PLAIN_EVERY_S seconds, and one at the end of work that took longer than that."""

    def __init__(self, total: int, unit: str, clock: Callable[[], float]) -> None:
        """Begin to count pieces.

        total: the number of all pieces, of all works together.
        unit: the word for the pieces.
        clock: a function that returns the present time in seconds.
        """
        self.clock = clock
        self.total = total
        self.done = 0
        self.unit = unit
        # ``last`` is the time of the last line, at first that of the start
        self.start = self.last = clock()

    def tick(self, name: str, n: int) -> None:
        """Count ``n`` more pieces as done, and print a line if it is time for one.

        All works are counted together, so ``name``, which says whose pieces they are, is not used.
        """
        self.done += n
        now = self.clock()
        # short work has printed no line so far, and gets none at its end
        is_end_of_long_work = self.done >= self.total and self.last > self.start
        if now - self.last < PLAIN_EVERY_S and not is_end_of_long_work:
            return
        self.last = now
        elapsed = now - self.start
        seconds_left = elapsed / self.done * (self.total - self.done)
        line = f"{self.done} of {self.total} {self.unit}, {elapsed:.0f} s"
        if seconds_left:
            line += f", about {seconds_left:.0f} s left"
        say(line)
