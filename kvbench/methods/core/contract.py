"""A stage's promises about one prompt: the tokens that heads hold, their bytes, and the budget behind both.

The audit compares these promises with the cache that the stage makes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Expected:
    """The numbers of tokens that the stored heads of a layer must hold after prefill.

    low, high: the least and the most tokens of each head. Equal bounds are an exact promise.
    total: the sum over heads. It may be fixed even if the bounds leave single heads open.
    """

    low: tuple[int, ...]
    high: tuple[int, ...]
    total: int | None = None

    @classmethod
    def exactly(cls, tokens: int, heads: int) -> Expected:
        """Return the promise that each of ``heads`` heads holds exactly ``tokens``."""
        # equal bounds leave no choice, so the sum follows from them
        by_head = (tokens,) * heads
        return cls(low=by_head, high=by_head, total=tokens * heads)

    def within(self, rows: int) -> Expected:
        """Return the same promise for a layer that reads only ``rows`` tokens, so that no head can hold more."""
        high = tuple(min(tokens, rows) for tokens in self.high)
        low = tuple(min(tokens, rows) for tokens in self.low)
        if self.total is None:
            return Expected(low, high)
        most_of_all = sum(high)
        total = min(self.total, most_of_all)
        # if the sum is as large as the upper bounds allow, every head must hold its upper bound
        if total == most_of_all:
            return Expected(low=high, high=high, total=total)
        return Expected(low, high, total)


@dataclass(frozen=True)
class Block:
    """The size of one segment of one stored head.

    slots: the number of tokens that it can hold.
    key_bytes, value_bytes: the bytes of all its keys, and of all its values.
    fixed_overhead: bytes per head, such as channel ids.
    slot_overhead: bytes per slot, such as running scores. Positions are not included, because the audit adds them.
    """

    slots: int
    key_bytes: int
    value_bytes: int
    fixed_overhead: int = 0
    slot_overhead: int = 0


@dataclass(frozen=True)
class Capacity:
    """A selector's budget for one prompt, in tokens. The first ``sinks`` and the last ``window`` are always kept.

    shrunk: True if the budget had no room for sinks, window and one token more. Sinks and window are then smaller.
    """

    tokens: int
    sinks: int
    window: int
    shrunk: bool = False


def with_sinks(capacity: Capacity, least: int, n: int) -> Capacity:
    """Return the capacity with at least ``least`` sinks, for a prompt of n tokens.

    Nothing else changes if a token is left to choose beside sinks and window, or if all n tokens stay. Otherwise sinks
    get the room beside the window or half of the budget, whichever is more, and the window gets what they leave. No
    token is then left to choose, and the capacity is marked as ``shrunk``.
    """
    sinks = max(capacity.sinks, least)
    if sinks == capacity.sinks:
        return capacity
    room_beside_window = capacity.tokens - capacity.window
    leaves_a_choice = sinks < room_beside_window
    keeps_all = capacity.tokens >= n
    if leaves_a_choice or keeps_all:
        return replace(capacity, sinks=sinks)
    sinks = min(sinks, max(room_beside_window, capacity.tokens // 2))
    window = min(capacity.window, capacity.tokens - sinks)
    return replace(capacity, sinks=sinks, window=window, shrunk=True)


def top_indices(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Return the indices [H, k], ascending, of the k largest of scores [H, n]. Ties go to the lower index."""
    heads, n = scores.shape
    # on a CPU a threshold is faster than a sort; on a GPU the test below would make the program wait for the device
    if not scores.is_cuda and 0 < k < n:
        # the k-th largest of n is the (n - k + 1)-th smallest
        is_chosen = scores >= scores.kthvalue(n - k + 1, dim=-1, keepdim=True).values
        # if other scores equal the k-th, more than k are chosen: then a stable sort must decide by index
        if bool((is_chosen.sum(dim=-1) == k).all()):
            # nonzero lists (head, index) pairs, head by head and ascending
            return is_chosen.nonzero()[:, 1].view(heads, k)
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :k]
    return order.sort(dim=-1).values
