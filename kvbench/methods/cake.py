"""CAKE: layers share one budget by how widely and changeably they attend (arXiv 2503.12491, section 4)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from kvbench.kv import ops
from kvbench.kv.apportion import proportional_shares, round_shares
from kvbench.kv.observation import Needs, Observation
from kvbench.kv.segment import LayerCache
from kvbench.methods.core.base import Expected, top_indices
from kvbench.methods.core.evicting import EvictingSelector
from kvbench.methods.core.knobs import ODD, Rule, at_least, knob
from kvbench.methods.core.statistics import group_mean, group_rows, pool, pool_slots, recent_slots, window_rows
from kvbench.storage.roles import Slots

# shares are rounded up while layers come in: float noise must not cost a layer its last token
NOISE = 1e-6
# a preference to the power of a larger 1 / tau is beyond all numbers
TEMPERATURE = Rule("a number, 0.05 or more", lambda x: x >= 0.05)
# until all layers are there, one may hold this share above its own: cutting all whenever one comes in costs much time
SLACK = 1 / 8


@dataclass(frozen=True, kw_only=True)
class Cake(EvictingSelector):
    """Layer l keeps its last w tokens and B_l others, with B_l in proportion to P_l = disp^(1/tau1) * var^(1/tau2).

    With the attention A of the last w queries to the tokens before them, disp = -sum of A log(A), and var = sum over
    tokens of the variance over queries. The B_l add up to (C - w) L exactly. No layer gets more than its n - w tokens;
    the excess goes to the others in proportion, and fractions to the largest remainders. A token's score is mean +
    gamma * variance of A over the window, averaged over a group of heads and pooled. Prompts of up to C + w tokens are
    kept whole, as in released code.

    tau2: temperature of the variance. Released code sets (tau1, tau2) per model, for C = 1024 and C = 128:
    LLaMA-3.1 (1.6, 0.4), (1.6, 0.6); LLaMA-2-7B (1.9, 1.8), (0.9, 2.3); LLaMA-2-13B (0.5, 0.4), (1.8, 2.0);
    Mistral-v0.3 (0.8, 0.5), (1.0, 0.8); Qwen2.5-7B (1.5, 0.6), (0.4, 0.6); any other model (1, 1).
    decode_evict: hold B_l + w tokens while decoding too, as released code does. Scores are then the row of the current
    query alone, pooled in order of position. A prompt that was kept whole may first grow to C + w tokens.
    """

    id: ClassVar[str] = "cake"
    revision: ClassVar[int] = 2
    rebalances: ClassVar[bool] = True

    window: int = knob(32, at_least(2, "tokens"))
    kernel: int = knob(5, ODD)
    gamma: float = knob(200.0, Rule("a number, 0 to 1e9", lambda x: 0 <= x <= 1e9))
    tau1: float = knob(1.0, TEMPERATURE)
    tau2: float = knob(1.0, TEMPERATURE)
    decode_evict: bool = True

    @property
    def evicts(self) -> bool:
        return self.decode_evict

    def window_size(self) -> int:
        return self.window

    def needs(self, n: int) -> Needs:
        return Needs(last_q=self.window)

    def trigger(self, n: int) -> int:
        """Return C + w: a prompt of more tokens is compressed."""
        return self.generation_budget(n) + self.capacity(n).window

    def keeps_all(self, n: int, layer: int) -> bool:
        """Tell whether the layer keeps all n tokens of the prompt."""
        return layer in self.frozen_layers or n <= self.trigger(n)

    def expected(self, n: int, layer: int, n_layers: int, heads: int) -> Expected | None:
        if self.keeps_all(n, layer):
            return Expected.exactly(n, heads)
        return Expected((self.capacity(n).window,) * heads, (n,) * heads)

    def expected_sum(self, n: int, n_layers: int, heads: int) -> int | None:
        return heads * sum(n if self.keeps_all(n, i) else self.capacity(n).tokens for i in range(n_layers))

    @property
    def state_bytes(self) -> int:
        return 4 if self.decode_evict else 0

    def compress(self, cache: LayerCache, obs: Observation) -> LayerCache:
        window = self.capacity(obs.n).window
        rows = window_rows(cache, obs, max(window, 1))
        state = {"row": group_mean(rows[:, -1], cache.heads).clone()} if self.decode_evict else {}
        weight = None
        if not self.keeps_all(obs.n, obs.layer):
            earlier_rows = rows[:, :, : obs.n - window]
            variance = variance_over_queries(earlier_rows)
            weight = self.preference(earlier_rows, variance)
            # score = mean + gamma * variance of A over the window; the window itself always stays
            mixed = group_mean(earlier_rows.mean(dim=1) + self.gamma * variance, cache.heads)
            state["score"] = torch.nn.functional.pad(pool(mixed, self.kernel, "avg"), (0, window), value=torch.inf)
        segment = replace(ops.only_segment(cache), state=state)
        return replace(cache, segments=(segment,), weight=weight)

    def preference(self, rows: torch.Tensor, variance: torch.Tensor) -> float:
        """Return P of a layer with attention rows [Hq, w, m] and their variance over queries [Hq, m]."""
        # disp = -sum of A log(A), P = disp^(1/tau1) * var^(1/tau2)
        dispersion = -(rows * (rows + 1e-10).log()).sum(dtype=torch.float64).clamp(max=0)
        product = float(dispersion) ** (1 / self.tau1) * float(variance.sum(dtype=torch.float64)) ** (1 / self.tau2)
        return product if math.isfinite(product) else 0.0

    def rebalance(self, caches: Sequence[LayerCache], n_layers: int) -> list[LayerCache]:
        sharing = [i for i, c in enumerate(caches) if c.weight is not None]
        if not sharing:
            return list(caches)
        complete, n = len(caches) == n_layers, caches[sharing[0]].seen
        capacity = self.capacity(n)
        to_come = sum(i not in self.frozen_layers for i in range(len(caches), n_layers))
        # B_l = (C - w) L * P_l / sum of P, at most n - w
        most, total = n - capacity.window, (capacity.tokens - capacity.window) * (len(sharing) + to_come)
        shares = proportional_shares([caches[i].weight or 0.0 for i in sharing], total, most)
        # a share only falls as layers come in, so that its present value bounds its last
        sizes = round_shares(shares, total) if complete else [min(most, math.ceil(x + NOISE)) for x in shares]
        trimmed = list(caches)
        for i, size in zip(sharing, sizes, strict=True):
            trimmed[i] = self._trim(caches[i], size + capacity.window, complete)
        return trimmed

    def _trim(self, cache: LayerCache, size: int, complete: bool) -> LayerCache:
        segment = ops.only_segment(cache)
        if segment.tokens > (size if complete else size * (1 + SLACK)):
            cache = ops.select(cache, top_indices(segment.state["score"], size))
            segment = cache.segments[0]
        if not complete:
            return cache
        state = {name: t for name, t in segment.state.items() if name != "score"}
        return replace(cache, segments=(replace(segment, state=state),), decided=(segment.tokens,) * cache.heads)

    def decode_limit(self, n: int, layer: int) -> int:
        if layer in self.frozen_layers or not self.keeps_all(n, layer):
            return super().decode_limit(n, layer)
        return self.trigger(n)

    def layer_budget(self, cache: LayerCache, layer: int) -> int:
        return super().layer_budget(cache, layer) if self.keeps_all(cache.prompt_tokens, layer) else cache.tokens

    def token_counts(self, n: int) -> Mapping[str, int]:
        return {"window": self.window if self.kv_size is not None else self.capacity(n).window}

    def keep_scores(self, slots: Slots) -> torch.Tensor:
        young = recent_slots(slots, "window")
        # neighbouring sums share their large terms: in fp32 rounding would decide between them, batch by batch
        older_rows = slots.state["row"].double().masked_fill(young | ~slots.valid, 0)
        return pool_slots(older_rows, slots, self.kernel, "avg").masked_fill(young, torch.inf)

    def fold(self, slots: Slots, probs: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"row": group_rows(probs[:, :, -1:], slots.positions.shape[1])[:, :, 0]}


def variance_over_queries(rows: torch.Tensor) -> torch.Tensor:
    """Return the unbiased variance [H, m] of rows [H, w, m] over their queries; 0 for a single query.

    It equals ``rows.var(dim=1)``, which takes more than ten times as long on a CPU.
    """
    x = rows.double()
    return x.sub_(x.mean(dim=1, keepdim=True)).square_().sum(dim=1).div_(max(1, rows.shape[1] - 1)).float()
