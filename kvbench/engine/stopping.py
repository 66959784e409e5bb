"""How an answer's tokens are chosen from logits, and when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ending:
    """How one row's tokens are chosen and when its answer ends.

    It ends after ``limit`` tokens, or with the first of ``stop``, which cannot come before ``min_new_tokens`` others;
    ``forbid_first`` cannot be the first token. ``temperature`` 0 is greedy; else tokens are drawn from the smallest
    set with mass ``top_p``, by a generator of the row's own, so that the draw does not depend on the batch.
    """

    limit: int
    stop: frozenset[int] = frozenset()
    min_new_tokens: int = 0
    forbid_first: frozenset[int] = frozenset()
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def over(self, tokens: Sequence[int]) -> bool:
        """Whether an answer of these tokens is finished."""
        return len(tokens) >= self.limit or bool(tokens and tokens[-1] in self.stop)

    def forbidden(self, count: int) -> frozenset[int]:
        """Tokens that cannot come after ``count`` others."""
        early = self.stop if count < self.min_new_tokens else frozenset()
        return early | self.forbid_first if count == 0 else early


def sample(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """One token of logits [V]: softmax at ``temperature``, cut to the smallest set with mass ``top_p``, one draw."""
    probs, order = (logits.float() / temperature).softmax(dim=-1).cpu().sort(descending=True, stable=True)
    mass = probs.cumsum(dim=-1)
    kept = int((mass < top_p).sum()) + 1
    point = torch.rand((), generator=generator) * mass[min(kept, len(mass)) - 1]
    return int(order[min(int((mass < point).sum()), kept - 1, len(order) - 1)])


def without(logits: Tensor, forbidden: Sequence[frozenset[int]]) -> Tensor:
    """Logits [B, V] without the tokens that a row cannot produce now."""
    if any(forbidden):
        logits = logits.clone()
        for row, ids in enumerate(forbidden):
            logits[row, sorted(ids)] = -torch.inf
    return logits
