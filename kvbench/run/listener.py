"""Listeners follow a run while it measures: a progress display, a logger. A run depends on none of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from kvbench.base.visible import say
from kvbench.plan.run_plan import RunPlan
from kvbench.store.cell import Cell
from kvbench.store.results import CellSummary, Sample


class Listener(Protocol):
    """The events of a run, called in this order. A listener that raises is reported once and called no more."""

    def begin(self, prepared: RunPlan) -> None:
        """Handle the start, after all checks. Called before the first prompt is read, even if no work is left."""

    def reading(self, column: str) -> None:
        """Handle that a prompt of the task ``column`` is about to be read. The model is loaded and calibrated."""

    def stored(self, cell: Cell, sample: Sample) -> None:
        """Handle a new ``sample`` of ``cell``, which is on disk now."""

    def ended(self, cell: Cell, status: str, summary: CellSummary | None, reason: str | None) -> None:
        """Handle the end of ``cell``. Called once per cell of the run, with the summary of all its samples.

        ``status`` is complete, done, refused, failed or interrupted.
        """

    def close(self) -> None:
        """Handle the end of the run, also after an interrupt or an error. Called once."""


class Listeners:
    """Several listeners as one. One that fails is dropped with a warning on stderr and never costs a sample."""

    def __init__(self, listeners: Iterable[Listener] = ()) -> None:
        self._listeners = list(listeners)

    def begin(self, prepared: RunPlan) -> None:
        """Tell all listeners that the run begins."""
        self._tell("begin", prepared)

    def reading(self, column: str) -> None:
        """Tell all listeners that a prompt of a task is about to be read."""
        self._tell("reading", column)

    def stored(self, cell: Cell, sample: Sample) -> None:
        """Tell all listeners that a cell has a new sample on disk."""
        self._tell("stored", cell, sample)

    def ended(self, cell: Cell, status: str, summary: CellSummary | None, reason: str | None) -> None:
        """Tell all listeners that a cell has ended."""
        self._tell("ended", cell, status, summary, reason)

    def close(self) -> None:
        """Tell all listeners that the run has ended."""
        self._tell("close")

    def _tell(self, event: str, *args: Any) -> None:
        """Call the method ``event`` of every listener with ``args``. A listener that raises an error is left out."""
        # walk through a copy, since a listener that fails is removed from the list
        for listener in list(self._listeners):
            try:
                getattr(listener, event)(*args)
            # an error in a listener must not lose a measurement; an interrupt still passes through
            except Exception as error:
                # remove it after its first error: later calls would rely on a state that it may not have reached
                self._listeners.remove(listener)
                say(
                    f"{type(listener).__name__} failed ({type(error).__name__}: {error}) and is left out from "
                    "here on; measuring goes on",
                )
