"""PyramidKV: SnapKV with more tokens in lower layers, where attention is spread (arXiv 2406.02069, section 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvbench.methods.core.knobs import Rule, knob
from kvbench.methods.snapkv import SnapKV


@dataclass(frozen=True, kw_only=True)
class PyramidKV(SnapKV):
    """SnapKV's scores under budgets that fall linearly from the first to the last layer that compresses.

    Each layer keeps its window of w tokens. Beside it, layer i of the L layers that compress (i = 0 .. L - 1) keeps
    high - i (high - low) / (L - 1) tokens, with low = (C - w) / beta and high = 2 (C - w) - low, so that the mean is
    C - w. No layer gets more than the n - w tokens before the window. A prompt shorter than twice C - w, and a model of
    one layer, get C everywhere.

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
        # the mean number of tokens that a layer keeps beside its window, C - w
        mean = capacity.tokens - capacity.window
        # frozen layers are no part of the pyramid: L and i count the layers that compress
        compressing = n_layers - sum(frozen < n_layers for frozen in self.frozen_layers)
        # prompts near the budget get C everywhere, as in KVCache-Factory; a single layer has no line to lie on
        if capacity.tokens >= n or n < 2 * mean or compressing == 1:
            return capacity.tokens
        # high = 2 (C - w) - (C - w) / beta (section 4), but no more than the tokens before the window
        high = min(2 * mean - mean // self.beta, n - capacity.window)
        # high and low have the mean C - w
        low = 2 * mean - high
        i = layer - sum(frozen < layer for frozen in self.frozen_layers)
        steps = compressing - 1
        if self.exact_total:
            return capacity.window + _round_on_line(high, low, i, steps)
        # w + high - i * floor((high - low) / (L - 1)), as KVCache-Factory rounds
        step = (high - low) // steps
        return capacity.window + high - i * step


def _round_on_line(high: int, low: int, place: int, steps: int) -> int:
    """Return the number at ``place`` on a line from ``high`` (place 0) to ``low`` (place ``steps``), as a whole number.

    Each number is rounded down first. The units that the sum over all places then lacks go to the places with the
    largest fractions, the lower place first among equals.
    """
    # at place i the line is high - i (high - low) / steps; times ``steps`` it is a whole number
    whole_and_fractions = [divmod(high * steps - i * (high - low), steps) for i in range(steps + 1)]
    # fractions are in units of 1 / steps, and their sum is a whole number of ones
    fractions = [fraction for _, fraction in whole_and_fractions]
    lacking = sum(fractions) // steps
    by_fraction = sorted(range(steps + 1), key=lambda i: -fractions[i])
    rounded_down, _ = whole_and_fractions[place]
    if place in by_fraction[:lacking]:
        return rounded_down + 1
    return rounded_down
