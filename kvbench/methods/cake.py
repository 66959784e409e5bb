"""CAKE: layers share one budget by how widely and changeably they attend (arXiv 2503.12491, section 4)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from kvbench.cache import ops
from kvbench.cache.apportion import shares, whole_shares
from kvbench.cache.observation import Needs, Observation
from kvbench.cache.segment import LayerCache
from kvbench.methods.base import Block, Expected, top_indices
from kvbench.methods.evicting import EvictingSelector
from kvbench.methods.statistics import group_mean, pool, window_rows
from kvbench.storage.roles import Slots

# shares are rounded up while layers come in: what float noise adds must not cost a layer its last token
NOISE = 1e-6


@dataclass(frozen=True, kw_only=True)
class Cake(EvictingSelector):
    """Layer l keeps its last w tokens and B_l others, with B_l in proportion to P_l = disp^(1/tau1) * var^(1/tau2).

    Over the attention A of the last w queries to the tokens before them, disp = -sum of A log(A) and var = sum over
    tokens of the variance over queries. The B_l add up to (C - w) L exactly: no layer gets more than its n - w tokens,
    the excess goes to the others in proportion, fractions to the largest remainders. Tokens score mean + gamma *
    variance of A over the window, pooled, averaged over a group. Prompts of up to C + w tokens are kept whole, as in
    released code.

    window: observation window w, always kept. kernel: width of the average pooling, odd. gamma: weight of the variance.
    tau1: temperature of the dispersion; tau2: that of the variance. Released code sets (tau1, tau2) per model, for
    C = 1024 and C = 128: LLaMA-3.1 (1.6, 0.4), (1.6, 0.6); LLaMA-2-7B (1.9, 1.8), (0.9, 2.3); LLaMA-2-13B (0.5, 0.4),
    (1.8, 2.0); Mistral-v0.3 (0.8, 0.5), (1.0, 0.8); Qwen2.5-7B (1.5, 0.6), (0.4, 0.6); any other model (1, 1).
    decode_evict: hold B_l + w tokens while decoding too, as released code does, where the current query's row alone,
    pooled in order of position, says what goes; a prompt that was kept whole may first grow to C + w tokens.
    """

    id: ClassVar[str] = "cake"
    revision: ClassVar[int] = 2
    rebalances: ClassVar[bool] = True

    window: int = 32
    kernel: int = 5
    gamma: float = 200.0
    tau1: float = 1.0
    tau2: float = 1.0
    decode_evict: bool = True

    def check(self) -> None:
        self.at_least("window", 2, "tokens")
        odd = self.kernel >= 1 and self.kernel % 2 == 1
        self.require("kernel", odd, "an odd whole number, 1 or more (1: no pooling)")
        self.require("gamma", self.gamma >= 0, "a number, 0 or more")
        for knob in ("tau1", "tau2"):
            self.require(knob, getattr(self, knob) > 0, "a number above 0")
        super().check()

    @property
    def evicts(self) -> bool:
        return self.decode_evict

    def window_size(self) -> int:
        return self.window

    def needs(self, n: int) -> Needs:
        return Needs(last_q=self.window)

    def trigger(self, n: int) -> int:
        """C + w: a prompt of more tokens is compressed."""
        capacity = self.capacity(n)
        return (self.kv_size if self.kv_size is not None else capacity.tokens) + capacity.window

    def whole(self, n: int, layer: int) -> bool:
        return layer in self.frozen_layers or n <= self.trigger(n)

    def expected(self, n: int, layer: int, n_layers: int, heads: int) -> Expected | None:
        if self.whole(n, layer):
            return Expected.exactly(n, heads)
        return Expected((self.capacity(n).window,) * heads, (n,) * heads)

    def expected_sum(self, n: int, n_layers: int, heads: int) -> int | None:
        return heads * sum(n if self.whole(n, i) else self.capacity(n).tokens for i in range(n_layers))

    def layout(self, blocks: list[Block], head_dim: int, itemsize: int) -> list[Block]:
        return [replace(b, slot_overhead=4) for b in blocks] if self.decode_evict else blocks

    def compress(self, cache: LayerCache, obs: Observation) -> LayerCache:
        held = ops.only_segment(cache)
        window = self.capacity(obs.n).window
        rows = window_rows(cache, obs, max(window, 1))
        state = {"row": group_mean(rows[:, -1], cache.heads).clone()} if self.decode_evict else {}
        weight = None
        if not self.whole(obs.n, obs.layer):
            seen = rows[:, :, : obs.n - window]
            spread = seen.var(dim=1) if window > 1 else torch.zeros_like(seen[:, 0])
            weight = self.preference(seen, spread)
            scores = pool(group_mean(seen.mean(dim=1) + self.gamma * spread, cache.heads), self.kernel, "avg")
            state["score"] = torch.nn.functional.pad(scores, (0, window), value=torch.inf)
        return replace(cache, segments=(replace(held, state=state),), weight=weight)

    def preference(self, rows: torch.Tensor, spread: torch.Tensor) -> float:
        """P of a layer with attention rows [Hq, w, m] and their variance over queries [Hq, m]."""
        dispersion = -(rows * (rows + 1e-10).log()).sum(dtype=torch.float64).clamp(max=0)
        found = float(dispersion) ** (1 / self.tau1) * float(spread.sum(dtype=torch.float64)) ** (1 / self.tau2)
        return found if math.isfinite(found) else 0.0

    def rebalance(self, caches: Sequence[LayerCache], n_layers: int) -> list[LayerCache]:
        shared = [i for i, c in enumerate(caches) if c.weight is not None]
        if not shared:
            return list(caches)
        last, n = len(caches) == n_layers, caches[shared[0]].seen
        capacity = self.capacity(n)
        to_come = sum(i not in self.frozen_layers for i in range(len(caches), n_layers))
        room, total = n - capacity.window, (capacity.tokens - capacity.window) * (len(shared) + to_come)
        wanted = shares([caches[i].weight or 0.0 for i in shared], total, room)
        # a share only falls as layers come in, so what it is now bounds what it will be
        sizes = whole_shares(wanted, total) if last else [min(room, math.ceil(x + NOISE)) for x in wanted]
        trimmed = list(caches)
        for i, size in zip(shared, sizes, strict=True):
            trimmed[i] = self._trim(caches[i], size + capacity.window, last)
        return trimmed

    def _trim(self, cache: LayerCache, size: int, last: bool) -> LayerCache:
        held = ops.only_segment(cache)
        if size < held.tokens:
            cache = ops.select(cache, top_indices(held.state["score"], size))
            held = cache.segments[0]
        if not last:
            return cache
        state = {name: t for name, t in held.state.items() if name != "score"}
        return replace(cache, segments=(replace(held, state=state),), decided=(held.tokens,) * cache.heads)

    def decode_budget(self, n: int, layer: int) -> int:
        if layer in self.frozen_layers or not self.whole(n, layer):
            return super().decode_budget(n, layer)
        return self.trigger(n)

    def hold(self, cache: LayerCache, layer: int) -> int:
        return super().hold(cache, layer) if self.whole(cache.prompt_tokens, layer) else cache.tokens

    def row(self, n: int) -> Mapping[str, int]:
        return {"window": self.window if self.kv_size is not None else self.capacity(n).window}

    def keep_scores(self, slots: Slots) -> torch.Tensor:
        young = slots.positions > slots.now - slots.row["window"]
        order = slots.positions.masked_fill(~slots.valid, torch.iinfo(torch.int32).max).argsort(dim=-1)
        # neighbouring sums share their large terms: in fp32 rounding would decide between them, batch by batch
        old = slots.state["row"].double().masked_fill(young | ~slots.valid, 0).gather(2, order)
        pooled = pool(old.flatten(0, 1), self.kernel, "avg").view_as(old)
        return torch.empty_like(pooled).scatter_(2, order, pooled).masked_fill(young, torch.inf)

    def fold(self, slots: Slots, probs: torch.Tensor) -> Mapping[str, torch.Tensor]:
        b, heads, size = slots.positions.shape
        return {"row": probs[:, :, -1].view(b, heads, -1, size).mean(dim=2)}
