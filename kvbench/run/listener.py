"""What follows a run while it measures: a progress display, a logger. A run does not depend on any of them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Literal, Protocol

from kvbench.run.plan import Cell
from kvbench.run.results import CellSummary, Sample
from kvbench.run.run_plan import RunPlan

Status = Literal["complete", "partial", "refused", "failed", "interrupted"]


class Listener(Protocol):
    """Told what happens, in this order. What it raises is reported once and it is told nothing more."""

    def begin(self, prepared: RunPlan) -> None:
        """Everything was checked; called before the first prompt is read, also where nothing is left to do."""

    def stored(self, cell: Cell, sample: Sample) -> None:
        """``sample`` is on disk, a new one of ``cell``."""

    def ended(self, cell: Cell, status: Status, summary: CellSummary | None, reason: str | None) -> None:
        """The run is through with ``cell``: once per cell of the run, with the summary of all its samples."""

    def close(self) -> None:
        """The run is over, also after an interrupt or an error. Called once."""


class Listeners:
    """Several as one. A listener that fails is warned about on stderr and dropped: it never costs a sample."""

    def __init__(self, listeners: Iterable[Listener] = ()) -> None:
        self._listeners = list(listeners)

    def begin(self, prepared: RunPlan) -> None:
        self._tell("begin", prepared)

    def stored(self, cell: Cell, sample: Sample) -> None:
        self._tell("stored", cell, sample)

    def ended(self, cell: Cell, status: Status, summary: CellSummary | None, reason: str | None) -> None:
        self._tell("ended", cell, status, summary, reason)

    def close(self) -> None:
        self._tell("close")

    def _tell(self, what: str, *args: Any) -> None:
        for listener in list(self._listeners):
            try:
                getattr(listener, what)(*args)
            except Exception as error:
                self._listeners.remove(listener)
                print(
                    f"kvbench: {type(listener).__name__} failed ({type(error).__name__}: {error}) and is left out from "
                    "here on; measuring goes on",
                    file=sys.stderr,
                )
