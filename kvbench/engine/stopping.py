"""The choice of an answer's tokens from logits, and the end of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ending:
    """The rules that choose one row's tokens and end its answer.

    limit: the most tokens of an answer.
    stop: tokens that end an answer.
    min_new_tokens: how many other tokens an answer has before ``stop`` tokens can come.
    forbid_first: tokens that cannot come first.
    temperature: 0 takes the likeliest token. Otherwise tokens are drawn from the softmax of logits / temperature.
    top_p: tokens are drawn from the smallest set of likeliest tokens that has this probability together.
    seed: the seed of the row's own random generator, so that its draws do not depend on the batch.
    """

    limit: int
    stop: frozenset[int] = frozenset()
    min_new_tokens: int = 0
    forbid_first: frozenset[int] = frozenset()
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def is_over(self, tokens: Sequence[int]) -> bool:
        """Return True if an answer of these ``tokens`` has ended."""
        return len(tokens) >= self.limit or bool(tokens and tokens[-1] in self.stop)

    def list_forbidden(self, count: int) -> frozenset[int]:
        """Return the tokens that may not follow the first ``count`` tokens of an answer."""
        forbidden: frozenset[int] = frozenset()
        if count < self.min_new_tokens:
            forbidden |= self.stop
        if count == 0:
            forbidden |= self.forbid_first
        return forbidden


def draw_token(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """Return a token drawn by logits [V], from the smallest set of likeliest tokens that has the mass ``top_p``.

    The probabilities are softmax(logits / temperature).
    """
    probs, order = (logits.float() / temperature).softmax(dim=-1).cpu().sort(descending=True, stable=True)
    # mass[i] is the probability of the i + 1 likeliest tokens together
    mass = probs.cumsum(dim=-1)
    # the smallest set with the mass top_p ends with the first token whose mass reaches top_p; rounding may leave even
    # the mass of all tokens below top_p
    count = min(int((mass < top_p).sum()) + 1, len(mass))
    # inversion: a uniform point in the set's mass falls on each token with the token's probability
    point = torch.rand((), generator=generator) * mass[count - 1]
    place = min(int((mass < point).sum()), count - 1)
    return int(order[place])


def forbid_tokens(logits: Tensor, forbidden: Sequence[frozenset[int]]) -> Tensor:
    """Return logits [B, V] with -inf for the tokens that each row must not produce now."""
    if any(forbidden):
        logits = logits.clone()
        for row, ids in enumerate(forbidden):
            logits[row, sorted(ids)] = -torch.inf
    return logits
