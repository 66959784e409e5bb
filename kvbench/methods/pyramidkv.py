"""PyramidKV: SnapKV with more tokens in lower layers, where attention is spread (arXiv 2406.02069, section 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvbench.methods.core.knobs import Rule, knob
from kvbench.methods.snapkv import SnapKV


@dataclass(frozen=True, kw_only=True)
class PyramidKV(SnapKV):
    """SnapKV's scores under budgets that fall linearly from the first to the last layer that compresses.

    Of C - w tokens on average, the last layer gets a share of 1 / beta, and the first layer the number that makes the
    mean right. A prompt shorter than twice C - w, and a model of one layer, get C everywhere.

    exact_total: deal out whole tokens so that the mean over layers is exactly C. False is KVCache-Factory's schedule,
    whose rounded step keeps more than C on average (2057.5 for C=2048, w=32 and 32 layers).
    """

    id: ClassVar[str] = "pyramidkv"

    beta: int = knob(20, Rule("a whole number, 1 or more (1: the same budget everywhere)", lambda x: x >= 1))
    exact_total: bool = True

    def budget(self, n: int, layer: int, n_layers: int) -> int:
        if layer in self.frozen_layers:
            return n
        capacity = self.capacity(n)
        chosen = capacity.tokens - capacity.window
        steps = n_layers - 1 - sum(i < n_layers for i in self.frozen_layers)
        if capacity.tokens >= n or n < 2 * chosen or steps == 0:
            return capacity.tokens
        # from high in the first layer to low in the last, with high + low = 2 (C - w)
        low = chosen // self.beta
        high = min(2 * chosen - low, n - capacity.window)
        low = 2 * chosen - high
        rank = layer - sum(i < layer for i in self.frozen_layers)
        if self.exact_total:
            return capacity.window + _rounded_step(high, low, rank, steps)
        return capacity.window + high - rank * ((high - low) // steps)


def _rounded_step(high: int, low: int, rank: int, steps: int) -> int:
    """Return the whole number at ``rank`` of a line from ``high`` (rank 0) to ``low`` (rank ``steps``), its sum kept.

    All are rounded down, and the rest goes to the largest fractions, the lower layer first among equals.
    """
    fractions = [(high * steps - i * (high - low)) % steps for i in range(steps + 1)]
    order = sorted(range(steps + 1), key=lambda i: -fractions[i])
    rounded_up = order[: sum(fractions) // steps]
    return (high * steps - rank * (high - low)) // steps + (rank in rounded_up)
