"""UNComp: heads with uncertain queries keep more tokens than the others, while decoding too (arXiv 2410.03090)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F

from kvbench.kv import ops
from kvbench.kv.observation import Needs, Observation
from kvbench.kv.segment import LayerCache, per_head
from kvbench.methods.core.base import Capacity, Expected
from kvbench.methods.core.entropy import assign, entropy_recipe, measure_entropy
from kvbench.methods.core.evicting import NO_LIMIT, EvictingSelector
from kvbench.methods.core.knobs import ODD, Rule, at_least, knob, one_of
from kvbench.methods.core.recipe import CalibrationRun, Recipe
from kvbench.methods.core.statistics import (
    fold_ring,
    group_mean,
    pool,
    pool_slots,
    recent_slots,
    ring_of_rows,
    window_rows,
)
from kvbench.storage.roles import Slots


@dataclass(frozen=True, kw_only=True)
class UNCompGroup(EvictingSelector):
    """Score = attention summed over the last ``window`` queries, max-pooled over ``kernel`` neighbours, as in code.

    Of a mean budget C, the half of a layer's heads whose queries have the larger truncated matrix entropy keeps 4/3 C
    tokens, the other half 2/3 C (512 and 256 at 384; at least window + 1), the last ``window`` included. The half of
    each head is measured beforehand (methods.entropy). Every head holds its number of tokens while decoding: the rows
    of the last ``window`` queries are stored with the tokens, and the token of the lowest pooled sum goes. A prompt of
    up to C tokens is kept whole; heads of smaller budgets then evict with the first new token. Under ``per=kv_head``
    the mean entropy of a group's query heads decides, and their rows are averaged before pooling.

    groups: the number of groups, whose tokens fall linearly from the first to the last (appendix D.1; 11, 10 and 11 of
    32 heads). Two groups are made by how often a head was in the upper half, more by the sum of its ranks over samples.
    grouping: ``calibrated`` is all of the above. Ablations of appendix D are ``random``, which draws the groups of each
    layer, and ``reversed``, which gives the high group the low budget.
    delete: the number of heads of each layer that are not stored at all. They are those that rank lowest, and take the
    attention output of the most similar head that is stored while decoding. All other heads keep C.
    """

    id: ClassVar[str] = "uncomp-group"

    window: int = knob(8, at_least(1))
    kernel: int = knob(7, ODD)
    high: int | None = None
    low: int | None = None
    groups: int = knob(2, at_least(1))
    scale: float = knob(1.0, Rule("a number, 1 or more", lambda x: x >= 1))
    grouping: str = knob("calibrated", one_of("calibrated", "random", "reversed"))
    seed: int = 0
    delete: int = knob(0, at_least(0, "heads"))
    similarity: str = knob("paper", one_of("paper", "code"))
    top: int = knob(32, at_least(1))
    samples: int = knob(100, at_least(1))
    tokens: int | None = knob(None, at_least(2, null=True))

    def check(self) -> None:
        self.require("high", (self.high is None) == (self.low is None), "given together with low")
        if self.high is not None and self.low is not None:
            self.require("low", self.low > self.window, f"above the window {self.window}")
            self.require("high", self.high >= self.low, "a whole number, at least low")
            self.require("delete", self.delete == 0, "0 where high and low are given: heads that stay all keep kv_size")
        super().check()
        if self.high is not None:
            self.require_one_budget("high")

    def recipe(self) -> Recipe | None:
        return None if self.grouping == "random" else entropy_recipe(self.top, self.samples, self.tokens)

    def calibrate(self, run: CalibrationRun) -> dict[str, torch.Tensor]:
        return measure_entropy(run)

    def window_size(self) -> int:
        return self.window

    def needs(self, n: int) -> Needs:
        return Needs(last_q=self.window)

    def capacity(self, n: int) -> Capacity:
        if self.high is not None and self.low is not None:
            mean = (int(self.scale * self.high) + int(self.scale * self.low)) // 2
            return Capacity(min(mean, n), 0, self.window)
        capacity = super().capacity(n)
        return replace(capacity, tokens=min(int(self.scale * capacity.tokens), n))

    def extremes(self, n: int) -> tuple[int, int, int]:
        """Return (high, low, mean): how many tokens a head holds while decoding after a prompt of n tokens."""
        if self.high is not None and self.low is not None:
            high, low = int(self.scale * self.high), int(self.scale * self.low)
            return high, low, (high + low) // 2
        mean = int(self.scale * self.generation_budget(n))
        # low = 2/3 C, high = 4/3 C, so that their mean is C
        low = min(mean, max((2 * mean + 1) // 3, self.token_counts(n)["window"] + 1))
        return 2 * mean - low, low, mean

    def head_sizes(self, n: int, layer: int, heads: int) -> list[int]:
        """Return how many tokens each head holds while decoding after a prompt of n: 0 if it is not stored."""
        if layer in self.frozen_layers:
            return [NO_LIMIT] * heads
        high, low, mean = self.extremes(n)
        if self.delete:
            deleted = set(self.deleted(layer, heads))
            return [0 if h in deleted else mean for h in range(heads)]
        count = min(self.groups, heads)
        sizes = interpolated(high, low, count)
        return [sizes[g] for g in self.assigned(layer, heads, count)]

    def after_prompt(self, n: int, layer: int, heads: int) -> list[int]:
        """Return how many tokens of a prompt of n each stored head keeps."""
        keeps_all = n <= self.extremes(n)[2]
        return [n if keeps_all and size else min(n, size) for size in self.head_sizes(n, layer, heads)]

    def expected(self, n: int, layer: int, n_layers: int, heads: int) -> Expected | None:
        if self.unbound:
            # bounds and sum hold for any grouping, and are known before the groups of the heads are
            sizes = tuple(replace(self, grouping="random").after_prompt(n, layer, heads))
            return Expected((min(sizes),) * heads, (max(sizes),) * heads, sum(sizes))
        sizes = tuple(self.after_prompt(n, layer, heads))
        return Expected(sizes, sizes, sum(sizes))

    def assigned(self, layer: int, heads: int, count: int) -> list[int]:
        """Return the group of each stored head, 0 for the one that keeps most, of ``count`` groups."""
        groups = assign(self.head_rank(layer, heads, count), count)
        return [count - 1 - g for g in groups] if self.grouping == "reversed" else groups

    def deleted(self, layer: int, heads: int) -> list[int]:
        """Return the indices of the heads that are not stored, ascending."""
        order = self.head_rank(layer, heads, 2).sort(descending=True, stable=True).indices.tolist()
        return sorted(order[: self.delete] if self.grouping == "reversed" else order[heads - self.delete :])

    def head_rank(self, layer: int, heads: int, count: int) -> torch.Tensor:
        """Return the numbers [heads] by which the stored heads of a layer are ranked into ``count`` groups."""
        if self.grouping == "random":
            generator = torch.Generator().manual_seed(1_000_003 * self.seed + layer)
            return torch.randperm(heads, generator=generator).float()
        measured = self.measured("the groups of its heads")
        if heads < measured["entropy"].shape[1]:
            return group_mean(measured["entropy"][layer], heads)
        return measured["counts" if count == 2 else "ranks"][layer]

    def check_heads(self, stored: int, query_heads: int) -> None:
        self.require("delete", self.delete < stored, f"fewer than the {stored} heads that are stored")
        self.require(
            "delete",
            self.delete == 0 or stored == query_heads,
            "a head that is not stored copies another's attention output, and grouped query heads share what is "
            "stored: give per=query_head, or a model whose heads are not grouped",
        )

    @property
    def state_bytes(self) -> int:
        return 4 * self.window

    def compress(self, cache: LayerCache, obs: Observation) -> LayerCache:
        keys = ops.only_segment(cache).k
        attention = window_rows(cache, obs, self.window)
        ring = ring_of_rows(group_mean(attention, cache.heads), obs.prompt_tokens, self.window)
        cache = ops.with_state(cache, ring=ring)
        sizes = torch.tensor(self.after_prompt(obs.prompt_tokens, obs.layer, cache.heads), device=ring.device)
        sizes = sizes.clamp(max=obs.n)
        if self.delete and obs.layer not in self.frozen_layers:
            cache = replace(cache, copy_from=self.output_sources(attention.sum(dim=1), keys, obs.layer))
        if int(sizes.min()) >= obs.n:
            return cache
        # score = max-pooled sum of A over the window queries; the window itself always stays
        window = min(self.capacity(obs.prompt_tokens).window, obs.n)
        pooled = pool(ring[:, : obs.n - window].sum(dim=-1), self.kernel, "max")
        order = F.pad(pooled, (0, window), value=torch.inf).sort(dim=-1, descending=True, stable=True).indices
        return ops.select_first(cache, order, sizes)

    def output_sources(self, received: torch.Tensor, keys: torch.Tensor, layer: int) -> torch.Tensor:
        """Return for each head [H] the one whose attention output it has: itself, or the most similar stored head.

        ``received`` [H, n] is the attention from the last queries, ``keys`` [Hk, n, D].
        """
        heads = received.shape[0]
        recent = per_head(keys[:, -self.window :], heads).flatten(1).float()
        unit = F.normalize(received if self.similarity == "paper" else recent, dim=-1)
        deleted = self.deleted(layer, heads)
        cosine = unit @ unit.T
        cosine[:, deleted] = -torch.inf
        sources = torch.arange(heads, device=cosine.device)
        sources[deleted] = cosine[deleted].sort(dim=-1, descending=True, stable=True).indices[:, 0]
        return sources.to(torch.int16)

    def decode_limit(self, n: int, layer: int) -> int:
        if layer in self.frozen_layers:
            return NO_LIMIT
        high, _, mean = self.extremes(n)
        return mean if self.delete or self.groups == 1 else high

    def max_chunk(self, n: int) -> int:
        _, low, mean = self.extremes(n)
        return NO_LIMIT if 0 in self.frozen_layers else mean if self.delete else low

    def head_budgets(self, cache: LayerCache, layer: int) -> list[int]:
        return self.head_sizes(cache.prompt_tokens, layer, cache.heads)

    def token_counts(self, n: int) -> Mapping[str, int]:
        # a short prompt is no reason to protect fewer of a budget that the answer fills
        fixed = self.kv_size is not None or self.high is not None
        return {"window": self.window if fixed else super().capacity(n).window}

    def keep_scores(self, slots: Slots) -> torch.Tensor:
        young = recent_slots(slots, "window")
        sums = slots.state["ring"].sum(dim=-1).masked_fill(young | ~slots.valid, -torch.inf)
        return pool_slots(sums, slots, self.kernel, "max").masked_fill(young, torch.inf)

    def fold(self, slots: Slots, probs: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return fold_ring(slots, probs, self.window)


def interpolated(high: int, low: int, count: int) -> list[int]:
    """Return ``count`` whole numbers on the line from ``high`` to ``low``, whose mean is that of the two."""
    if count == 1:
        return [(high + low) // 2]
    upper = [high - (i * (high - low) + (count - 1) // 2) // (count - 1) for i in range((count + 1) // 2)]
    if count % 2:
        upper[-1] = (high + low) // 2
    return upper + [high + low - x for x in reversed(upper[: count // 2])]
