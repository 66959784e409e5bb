"""The progress of long work on stderr: bars with an ETA on a terminal, else a plain line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

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

from kvbench.base.errors import say

PLAIN_EVERY_S = 15.0
UNKNOWN = "-:--:--"
Tick = Callable[[str, int], None]


@contextmanager
def progress(totals: Mapping[str, int], quiet: bool = False, unit: str = "answers") -> Iterator[Tick]:
    """Yield a function to call with (name, number done). ``totals`` are the numbers still to do, by name.

    ``unit`` names what is counted, for the plain lines.
    """
    if quiet or not sum(totals.values()):
        yield lambda name, n: None
    elif sys.stderr.isatty():
        with bars_of("") as bars:
            tasks = {m: bars.add_task(m, total=n) for m, n in totals.items() if n}
            yield lambda name, n: bars.advance(tasks[name], n)
    else:
        yield _Plain(sum(totals.values()), unit).tick


class Left(ProgressColumn):
    """The time left at the mean rate so far. rich's own estimate takes the burst in which a batch ends for the rate.

    A task with the field ``left`` has had that many seconds left when it was last advanced, None where nobody knows.
    """

    def __init__(self) -> None:
        super().__init__()
        # (completed, seconds passed and left when it came to that)
        self._last: dict[TaskID, tuple[float, float, float | None]] = {}

    def render(self, task: Task) -> Text:
        if not task.completed or task.total is None or task.elapsed is None:
            return Text(UNKNOWN, style="progress.remaining")
        if self._last.get(task.id, (0.0,))[0] != task.completed:
            by_rate = task.elapsed / task.completed * (task.total - task.completed)
            self._last[task.id] = task.completed, task.elapsed, task.fields.get("left", by_rate)
        _, elapsed, left = self._last[task.id]
        if left is None:
            return Text(UNKNOWN, style="progress.remaining")
        seconds_left = max(0.0, left - (task.elapsed - elapsed))
        return Text(str(timedelta(seconds=round(seconds_left))), style="progress.remaining")


def bars_of(more: str) -> Progress:
    """Return bars for a terminal, with an added column of the text ``more``."""
    what = TextColumn("{task.description}", markup=False)
    bar = [what, BarColumn(bar_width=10), MofNCompleteColumn(), TextColumn(more)]
    times = [TimeElapsedColumn(), TextColumn("ETA"), Left()]
    return Progress(*bar, *times, console=Console(stderr=True), transient=True)


class _Plain:
    """A plain line every PLAIN_EVERY_S seconds, and one at the end of work that took longer than that."""

    def __init__(self, total: int, unit: str) -> None:
        self.total, self.done, self.unit = total, 0, unit
        self.start = self.last = time.monotonic()

    def tick(self, name: str, n: int) -> None:
        self.done += n
        now = time.monotonic()
        ends = self.done >= self.total and self.last > self.start
        if now - self.last < PLAIN_EVERY_S and not ends:
            return
        self.last = now
        elapsed = now - self.start
        seconds_left = elapsed / self.done * (self.total - self.done)
        remaining = f", about {seconds_left:.0f} s left" if seconds_left else ""
        say(f"{self.done} of {self.total} {self.unit}, {elapsed:.0f} s{remaining}")
