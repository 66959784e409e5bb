"""Twilight: attend the fewest tokens whose estimated weights reach a mass p (arXiv 2502.02770, section 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbench.methods.core.base import Mask
from kvbench.methods.core.knobs import Rule, knob

SUM_ROUNDS = 1e-3
"""The most by which rounding alone makes the sum of a query's weights differ from 1."""


@dataclass(frozen=True, kw_only=True)
class Twilight(Mask):
    """Attend, per decode step and query head, the smallest set of tokens with mass >= p, with exact attention over it.

    The weights of a query over all tokens are estimated as the softmax over keys that are quantised per token by their
    minimum and maximum. The mass of a set is the sum of its estimated weights. The set takes tokens from the largest
    weight down, and ties with its smallest weight are attended as well. Released code starts its threshold search at
    the first token's weight. Here sets are minimal.

    Twilight saves no bytes, because the cache is stored whole. Samples record the mean number of tokens that were
    ``attended``. No base selector chooses candidates first, unless one is chained (``snapkv+twilight``).

    p: mass that is kept, 0 < p <= 1. A mass of 1 attends every weight above 0. Released code sets 0.85. ReFreeKV
    compares with 0.85 on Mistral and 0.95 on LLaMA-3.
    bits: the bits of a number of the quantised keys.
    exempt_layers: the numbers of layers in which all tokens are attended.
    """

    id: ClassVar[str] = "twilight"

    p: float = knob(0.85, Rule("a mass above 0 and at most 1", lambda p: 0 < p <= 1))
    bits: int = knob(4, Rule("a whole number from 1 to 8", lambda bits: 1 <= bits <= 8))
    exempt_layers: tuple[int, ...] = (0, 1)

    def check(self) -> None:
        self.sort_layers("exempt_layers")

    def check_layers(self, n_layers: int) -> None:
        # the default stands for as many of the first two layers as the model has
        if self.exempt_layers != (0, 1):
            self.require_layers("exempt_layers", n_layers)

    def masks(self, layer: int) -> bool:
        return layer not in self.exempt_layers

    def estimate(self, keys: torch.Tensor) -> torch.Tensor:
        # codes = round((x - min) / step), step = (max - min) / (2^bits - 1), per token
        x = keys.float()
        low, high = x.aminmax(dim=-1, keepdim=True)
        step = (high - low) / (2**self.bits - 1)
        # a token of equal numbers has step 0 and codes 0, whatever it is divided by
        codes = ((x - low) / step.masked_fill(step == 0, 1)).round()
        return (low + codes * step).to(keys.dtype)

    def mask(self, weights: torch.Tensor) -> torch.Tensor:
        if self.p == 1:
            return weights > 0
        # the set takes the largest weights until their sum reaches p; its smallest weight is the threshold
        ordered = weights.sort(dim=-1, descending=True).values
        # without an attention sink the weights of tokens add up to 1 but for rounding; if a sink takes a part of them,
        # p is a share of what is left for tokens
        total = weights.sum(dim=-1, keepdim=True)
        has_sink = total < 1 - SUM_ROUNDS
        mass = torch.where(has_sink, self.p * total, torch.full_like(total, self.p))
        # entry i is True if the i + 1 largest weights do not reach the mass
        too_few = ordered.cumsum(dim=-1) < mass
        # the number of True entries is the place of the last weight that the set takes. Rounding may leave even the sum
        # of all weights below p: then the smallest of all weights is the threshold
        threshold_index = too_few.sum(dim=-1, keepdim=True).clamp(max=weights.shape[-1] - 1)
        threshold = ordered.gather(-1, threshold_index)
        return (weights >= threshold) & (weights > 0)
