"""Progress of a run: bars with an ETA on a terminal, a plain line now and then elsewhere. Always on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvbench.runner import Tick

PLAIN_EVERY_S = 15.0


@contextmanager
def progress(totals: Mapping[str, int], quiet: bool = False, unit: str = "answers") -> Iterator[Tick]:
    """A function to call with (method, examples done); ``totals`` are the examples still to do per method.

    ``unit`` is what an example is, for the plain lines.
    """
    if quiet or not sum(totals.values()):
        yield lambda method, n: None
    elif sys.stderr.isatty():
        with _bars() as bars:
            tasks = {m: bars.add_task(m, total=n) for m, n in totals.items() if n}
            yield lambda method, n: bars.advance(tasks[method], n)
    else:
        yield _Plain(sum(totals.values()), unit).tick


def _bars() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)


class _Plain:
    """One line every PLAIN_EVERY_S seconds, and one at the end."""

    def __init__(self, total: int, unit: str) -> None:
        self.total, self.done, self.unit = total, 0, unit
        self.start = self.last = time.monotonic()

    def tick(self, method: str, n: int) -> None:
        self.done += n
        now = time.monotonic()
        if now - self.last < PLAIN_EVERY_S and self.done < self.total:
            return
        self.last = now
        elapsed = now - self.start
        left = elapsed / self.done * (self.total - self.done)
        print(
            f"kvbench: {self.done} of {self.total} {self.unit}, {elapsed:.0f} s, about {left:.0f} s left",
            file=sys.stderr,
            flush=True,
        )
