"""What a stage promises about one prompt: tokens held, bytes of one head, the budget."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Expected:
    """Tokens per stored head that a layer must hold after prefill: between ``low`` and ``high``, ``total`` in sum.

    Equal bounds are an exact promise. ``total`` is the sum over heads where only that is fixed.
    """

    low: tuple[int, ...]
    high: tuple[int, ...]
    total: int | None = None

    @classmethod
    def exactly(cls, tokens: int, heads: int) -> Expected:
        return cls((tokens,) * heads, (tokens,) * heads, tokens * heads)


@dataclass(frozen=True)
class Block:
    """What one stored head holds of one segment: slots, bytes of keys and of values in all, and overhead.

    ``fixed_overhead`` is per head (channel ids), ``slot_overhead`` per slot (state such as running scores); positions
    are added by the audit.
    """

    slots: int
    key_bytes: int
    value_bytes: int
    fixed_overhead: int = 0
    slot_overhead: int = 0


@dataclass(frozen=True)
class Capacity:
    """A selector's budget for one prompt: tokens kept, of which the first ``sinks`` and last ``window`` always."""

    tokens: int
    sinks: int
    window: int
    shrunk: bool = False  # the fraction left no room for sinks and window, which were cut to fit
