"""The error for a method that changed what all methods of a run share."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.base.errors import KvbenchError
from kvbench.methods.core.shared_functions import build_refusal
from kvbench.store.cell import Cell


class ModelChanged(KvbenchError):
    """The error for a method that changed the model, or functions that all methods compute with.

    No measurement after such a change means anything.

    cells: the ids of the cells to refuse.
    """

    def __init__(self, cells: Sequence[Cell], replaced: str = "") -> None:
        """Write the message. ``replaced`` names the changed function, or is '' if the model changed."""
        names = " or ".join(dict.fromkeys(c.chain.name for c in cells))
        if replaced:
            super().__init__(str(build_refusal(names, replaced)))
        else:
            super().__init__(f"{names} changes the model (its weights, hooks or configuration) and leaves it changed")
        self.cells = {c.id for c in cells}
