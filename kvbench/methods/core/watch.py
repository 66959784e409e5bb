"""A watch on methods that do not return: a line names the method that has been running for long."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvbench.base.visible import say

SILENT_S = 60.0
"""Seconds without progress after which a line names the method that is running."""


class _Watch:
    """A thread that prints a line with the name of the running method if it takes long.

    names: the methods that are running, the innermost last, with None for code that may take long.
    since: the time of the last progress.
    said: whether a line has named the method since then.
    """

    def __init__(self) -> None:
        """Make the watch without starting its thread."""
        self.names: list[str | None] = []
        self.since = time.monotonic()
        self.said = False
        self.thread: threading.Thread | None = None

    def note_progress(self) -> None:
        """Note progress: a method has returned, or has come to another step."""
        self.since, self.said = time.monotonic(), False

    def start(self) -> None:
        """Start the thread unless it is running."""
        # a forked process has the object, but not its thread
        if self.thread is None or not self.thread.is_alive():
            self.thread = threading.Thread(target=self._look, name="kvbench-watch", daemon=True)
            self.thread.start()

    def _look(self) -> None:
        """Print a line whenever one is due, for as long as the process lives."""
        while True:
            # often enough that the line is not late by much, even with a SILENT_S of less than a second
            time.sleep(min(1.0, SILENT_S / 4))
            name = self.names[-1] if self.names else None
            seconds = time.monotonic() - self.since
            # one line is enough until there is progress again
            if name is not None and seconds > SILENT_S and not self.said:
                self.said = True
                say(f"{name} has not come back for {seconds:.0f} s; Ctrl-C ends the run and keeps what is finished")


_WATCH = _Watch()


def note_progress() -> None:
    """Note that the running method has made progress, so that its seconds of silence are counted anew."""
    _WATCH.note_progress()


@contextmanager
def watch(name: str | None) -> Iterator[None]:
    """While the context is open, print a line with the method's name if it makes no progress for SILENT_S seconds.

    None as ``name`` prints no line. It is for code that may take long.
    """
    _WATCH.start()
    _WATCH.names.append(name)
    _WATCH.note_progress()
    try:
        yield
    finally:
        _WATCH.names.pop()
        _WATCH.note_progress()
