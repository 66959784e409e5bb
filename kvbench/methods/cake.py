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
from kvbench.methods.core.contract import Expected, top_indices
from kvbench.methods.core.evicting import EvictingSelector
from kvbench.methods.core.knobs import ODD, TEMPERATURE, Rule, at_least, knob
from kvbench.methods.core.statistics import group_mean, group_rows, pool, pool_slots, recent_slots, window_rows
from kvbench.storage.roles import Slots

NOISE = 1e-6
"""Added to shares before they are rounded up: float noise must not cost a layer its last token."""
SLACK = 1 / 8
"""Until the last layer has been read, a layer may hold up to (1 + SLACK) times its share.

Trimming all layers exactly for each new layer would take much time.
"""


@dataclass(frozen=True, kw_only=True)
class Cake(EvictingSelector):
    """Keep in layer l the last w tokens and B_l others, with B_l in proportion to P_l = disp^(1/tau1) * var^(1/tau2).

    A[h, i, j] is the attention of the last w queries i, the window, to the tokens j before them. disp = -sum of
    A log(A) over heads, queries and tokens. var = sum over heads and tokens of the variance of A over the queries. The
    B_l of the L layers add up to (C - w) L exactly. No layer gets more than its n - w tokens. The excess goes to the
    other layers in proportion, and fractions go to the largest remainders.

    Within a layer the score of token j is mean + gamma * variance of A[h, i, j] over the queries i. It is averaged over
    the query heads of a group, then over ``kernel`` neighbouring tokens. Prompts of up to C + w tokens are kept whole,
    as in released code.

    tau1: temperature of the dispersion disp.
    tau2: temperature of the variance var. Released code sets (tau1, tau2) for each model, first for C = 1024, then for
    C = 128. LLaMA-3.1 has (1.6, 0.4) and (1.6, 0.6), LLaMA-2-7B (1.9, 1.8) and (0.9, 2.3). LLaMA-2-13B has (0.5, 0.4)
    and (1.8, 2.0), Mistral-v0.3 (0.8, 0.5) and (1.0, 0.8). Qwen2.5-7B has (1.5, 0.6) and (0.4, 0.6), any other model
    (1, 1).
    decode_evict: True holds B_l + w tokens while decoding as well, as released code does. The scores are then the
    current query's row alone, pooled in order of position. A prompt that was kept whole may first grow to C + w tokens.
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

    def longest_kept_whole(self, n: int) -> int:
        """Return C + w for a prompt of n tokens, which is kept whole unless it is longer (as in released code)."""
        return self.generation_budget(n) + self.capacity(n).window

    def keeps_all(self, n: int, layer: int) -> bool:
        """Return True if the layer keeps all n tokens of the prompt."""
        return layer in self.frozen_layers or n <= self.longest_kept_whole(n)

    def expected(self, n: int, layer: int, n_layers: int, heads: int) -> Expected | None:
        if self.keeps_all(n, layer):
            return Expected.exactly(n, heads)
        # B_l may be anything from 0 to n - w, and is the same for all heads
        return Expected(low=(self.capacity(n).window,) * heads, high=(n,) * heads)

    def expected_sum(self, n: int, n_layers: int, heads: int) -> int | None:
        tokens = 0
        for layer in range(n_layers):
            if self.keeps_all(n, layer):
                tokens += n
            else:
                # layers that share the budget hold C tokens on average
                tokens += self.capacity(n).tokens
        return heads * tokens

    @property
    def state_bytes(self) -> int:
        # each slot has one fp32 number: its entry in the current query's row
        return 4 if self.decode_evict else 0

    def compress(self, cache: LayerCache, obs: Observation) -> LayerCache:
        window = self.capacity(obs.n).window
        # A [Hq, w, n], the attention of the last w queries
        rows = window_rows(cache, obs, window)
        # numbers that are stored with the tokens: the newest row for decoding, the scores for ``rebalance``
        state: dict[str, torch.Tensor] = {}
        if self.decode_evict:
            # the row of the prompt's last query; a view of it would keep all rows in memory
            state["row"] = group_mean(rows[:, -1], cache.heads).clone()
        # a layer without a weight takes no part in the division of the budget
        weight = None
        if not self.keeps_all(obs.n, obs.layer):
            # [Hq, w, m]: the window's attention to the m = n - w tokens before it
            earlier_rows = rows[:, :, : obs.n - window]
            variance = compute_variance(earlier_rows)
            weight = self.compute_preference(earlier_rows, variance)
            # mean_i A[h, i, j] + gamma * var_i A[h, i, j], over the queries i of the window
            by_query_head = earlier_rows.mean(dim=1) + self.gamma * variance
            pooled = pool(group_mean(by_query_head, cache.heads), self.kernel, "avg")
            # the window itself always stays
            state["score"] = torch.nn.functional.pad(pooled, (0, window), value=torch.inf)
        segment = replace(ops.only_segment(cache), state=state)
        # all tokens stay until ``rebalance`` knows the weights of the other layers
        return replace(cache, segments=(segment,), weight=weight)

    def compute_preference(self, rows: torch.Tensor, variance: torch.Tensor) -> float:
        """Return the preference P = disp^(1/tau1) * var^(1/tau2) of a layer. A P that is not finite counts as 0.

        rows: [Hq, w, m], the attention of the window to the m tokens before it.
        variance: [Hq, m], the variance of ``rows`` over the queries.
        """
        # 1e-10 keeps log(0) finite, as in released code
        weighted_logs = rows * (rows + 1e-10).log()
        # disp = -sum_hij A[h, i, j] log A[h, i, j]; a weight that rounding puts above 1 must not make it negative,
        # because its powers would not be real
        dispersion = float(-weighted_logs.sum(dtype=torch.float64).clamp(max=0))
        # var = sum_hj var_i A[h, i, j]
        total_variance = float(variance.sum(dtype=torch.float64))
        # P = disp^(1/tau1) * var^(1/tau2)
        preference = dispersion ** (1 / self.tau1) * total_variance ** (1 / self.tau2)
        return preference if math.isfinite(preference) else 0.0

    def rebalance(self, caches: Sequence[LayerCache], n_layers: int) -> list[LayerCache]:
        # the layers that share the budget, each with its preference
        weights = {i: c.weight for i, c in enumerate(caches) if c.weight is not None}
        if not weights:
            return list(caches)
        # this runs after each layer, with the caches of all layers so far
        is_last_call = len(caches) == n_layers
        n = caches[0].prompt_tokens
        capacity = self.capacity(n)
        # L, the layers that share the budget: those so far, and those to come that are not frozen
        sharing = len(weights) + sum(i not in self.frozen_layers for i in range(len(caches), n_layers))
        # B_l = (C - w) L * P_l / (sum of P), at most n - w; P_l is the weight of layer l
        most = n - capacity.window
        total = (capacity.tokens - capacity.window) * sharing
        shares = proportional_shares(list(weights.values()), total, most)
        if is_last_call:
            sizes = round_shares(shares, total)
        else:
            # a share only falls as more layers come in, so its present value is an upper bound
            sizes = [min(most, math.ceil(share + NOISE)) for share in shares]
        trimmed = list(caches)
        for i, size in zip(weights, sizes, strict=True):
            trimmed[i] = self._trim(caches[i], size + capacity.window, is_last_call)
        return trimmed

    def _trim(self, cache: LayerCache, size: int, is_last_call: bool) -> LayerCache:
        """Return the cache of one layer with its ``size`` best tokens.

        Before the last call, a cache with at most (1 + SLACK) * size tokens is left unchanged. The last call also drops
        the scores.
        """
        segment = ops.only_segment(cache)
        most: float = size if is_last_call else size * (1 + SLACK)
        if segment.tokens > most:
            cache = ops.select(cache, top_indices(segment.state["score"], size))
            segment = cache.segments[0]
        if not is_last_call:
            return cache
        # the prompt's scores are no longer needed: decoding scores by the current query alone
        state = {name: t for name, t in segment.state.items() if name != "score"}
        return replace(cache, segments=(replace(segment, state=state),), decided=(segment.tokens,) * cache.heads)

    def decode_limit(self, n: int, layer: int) -> int:
        if layer in self.frozen_layers or not self.keeps_all(n, layer):
            return super().decode_limit(n, layer)
        # a prompt that was kept whole may grow to C + w tokens
        return self.longest_kept_whole(n)

    def layer_budget(self, cache: LayerCache, layer: int) -> int:
        if self.keeps_all(cache.prompt_tokens, layer):
            return super().layer_budget(cache, layer)
        # the layer has held B_l + w tokens since the last ``rebalance``
        return cache.tokens

    def token_counts(self, n: int) -> Mapping[str, int]:
        return {"window": self.capacity(n).window}

    def keep_scores(self, slots: Slots) -> torch.Tensor:
        in_window = recent_slots(slots, "window")
        # fp64, because neighbouring means share their large terms: fp32 rounding would decide between them, differently
        # in each batch. The window and free slots add nothing to their neighbours' means, as after the prompt
        older_row = slots.state["row"].double().masked_fill(in_window | ~slots.valid, 0)
        return pool_slots(older_row, slots, self.kernel, "avg").masked_fill(in_window, torch.inf)

    def fold(self, slots: Slots, probs: torch.Tensor) -> Mapping[str, torch.Tensor]:
        # the current query's row A[h, n, :] replaces the row of the query before it
        return {"row": group_rows(probs[:, :, -1:], slots.positions.shape[1])[:, :, 0]}


def compute_variance(rows: torch.Tensor) -> torch.Tensor:
    """Return the unbiased variance [H, m] of fp32 rows [H, w, m] over their queries, or 0 for a single query.

    It equals ``rows.var(dim=1)``, which takes more than ten times as long on a CPU.
    """
    # var[j] = sum_i (A[i, j] - mean_i A[i, j])^2 / (w - 1), in place because the fp64 copy belongs to this function
    weights = rows.double()
    deviations = weights.sub_(weights.mean(dim=1, keepdim=True))
    squares = deviations.square_().sum(dim=1)
    return squares.div_(max(1, rows.shape[1] - 1)).float()
