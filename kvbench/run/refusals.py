"""Why cells are refused: texts that a method cannot run on a model, and methods that change the model."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.base.errors import KvbenchError, UsageError
from kvbench.base.example import Example
from kvbench.engine.limits import check_turn, check_window
from kvbench.methods.core.shared_functions import replacing
from kvbench.plan.cells import Cell
from kvbench.run.host import Host
from kvbench.tasks.prompt import Encoded


class ModelChanged(KvbenchError):
    """The error for a method that changed the model itself, or functions that all methods compute with.

    All measurements after it would be meaningless. ``cells`` are the ids of the cells to refuse. ``replaced`` is the
    function concerned, '' where it is the model.
    """

    def __init__(self, cells: Sequence[Cell], replaced: str = "") -> None:
        names = " or ".join(dict.fromkeys(c.chain.name for c in cells))
        if replaced:
            super().__init__(str(replacing(names, replaced)))
        else:
            super().__init__(f"{names} changes the model (its weights, hooks or configuration) and leaves it changed")
        self.cells = {c.id for c in cells}


def unfit(host: Host, cell: Cell, encoded: Encoded, example: Example) -> str | None:
    """Return why a cell cannot run an example, whose prefill reads ``encoded``, or None if it can.

    Beyond a sliding window only the full cache can run. Beyond the model's context, texts to be scored
    (``example.tokens``) need rolled positions; prompts to be answered were cut to the context already.
    """
    tokens = len(example.tokens) or len(encoded) + example.max_new_tokens
    exceeds_context = bool(example.tokens) and host.context is not None and tokens > host.context
    if exceeds_context and not cell.chain.rolled:
        return (
            f"a text of {tokens} tokens exceeds the model's context of {host.context}: lower length=, or stream it "
            "with positions that roll (method=streamingllm mode=rolled)"
        )
    try:
        check_window(host.model, tokens, [cell.chain])
        check_turn(host.model, len(encoded.ids), tokens)
    except UsageError as error:
        return str(error)
    return None
