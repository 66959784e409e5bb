"""A watch on methods that do not return: a line names the one that is being asked for long."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvbench.base.errors import say

SILENT_S = 60.0
"""Seconds without progress after which a line names the method that is being asked."""


class _Watch:
    """A thread that says which method is being asked where that takes long."""

    def __init__(self) -> None:
        self.asked: list[str | None] = []
        self.since = time.monotonic()
        self.said = False
        self.thread: threading.Thread | None = None

    def note_progress(self) -> None:
        """Note that something has come back."""
        self.since, self.said = time.monotonic(), False

    def start(self) -> None:
        if self.thread is None or not self.thread.is_alive():
            self.thread = threading.Thread(target=self._look, name="kvbench-watch", daemon=True)
            self.thread.start()

    def _look(self) -> None:
        while True:
            time.sleep(min(1.0, SILENT_S / 4))
            name = self.asked[-1] if self.asked else None
            seconds = time.monotonic() - self.since
            if name is not None and seconds > SILENT_S and not self.said:
                self.said = True
                say(f"{name} has not come back for {seconds:.0f} s; Ctrl-C ends the run and keeps what is finished")


_WATCH = _Watch()


def note_progress() -> None:
    """Note that the method which is being asked has come as far as another step."""
    _WATCH.note_progress()


@contextmanager
def watch(name: str | None) -> Iterator[None]:
    """Have a line name the method if it does not return; None for code that may take long."""
    _WATCH.start()
    _WATCH.asked.append(name)
    _WATCH.note_progress()
    try:
        yield
    finally:
        _WATCH.asked.pop()
        _WATCH.note_progress()
