"""UNComp: heads with uncertain queries keep more tokens than the others, while decoding too (arXiv 2410.03090)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F

from kvbench.kv import ops
from kvbench.kv.observation import Needs, Observation
from kvbench.kv.segment import LayerCache, per_head
from kvbench.methods.core.contract import Capacity, Expected
from kvbench.methods.core.entropy import assign_groups, make_entropy_recipe, measure_entropy
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


class HeadBudgets(NamedTuple):
    """The tokens that the heads of a layer may hold.

    high: a head of the first group.
    low: a head of the last group.
    mean: the mean over heads, C in the paper.
    """

    high: int
    low: int
    mean: int


@dataclass(frozen=True, kw_only=True)
class UNCompGroup(EvictingSelector):
    """Score of token j = attention summed over the last ``window`` queries, max-pooled over ``kernel`` neighbours.

    The pooling is that of released code. The heads of a layer differ in their budgets. The half of them whose queries
    have the larger truncated matrix entropy keeps 4/3 C tokens of a mean budget C, and the other half 2/3 C: for
    example 512 and 256 at C = 384. Each number is at least window + 1 and includes the last ``window`` tokens. The
    entropies that divide the heads are measured beforehand (``methods.core.entropy``). Under ``per=kv_head`` the mean
    entropy of a group's query heads decides, and their attention is averaged before pooling.

    Every head holds its number of tokens while decoding. The attention of the last ``window`` queries is stored with
    each token, and the token with the lowest pooled sum goes. A prompt of up to C tokens is kept whole. Heads of
    smaller budgets then evict with the first new token.

    groups: the number of groups, whose tokens fall linearly from the first to the last (appendix D.1). Three groups
    have 11, 10 and 11 of 32 heads. Two groups are made by how often a head was in the upper half, more groups by the
    sum of its ranks over samples.
    grouping: ``calibrated`` is all of the above. Ablations of appendix D are ``random``, which draws the groups of each
    layer, and ``reversed``, which gives the high group the low budget.
    delete: the number of heads of each layer that are not stored at all: those that rank lowest. While decoding, such a
    head takes the attention output of the most similar head that is stored. All other heads keep C.
    similarity: the features by whose cosine heads are compared for ``delete``. ``paper`` takes the attention that
    tokens receive from the last ``window`` queries, ``code`` the last ``window`` keys.
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
        both_or_none = (self.high is None) == (self.low is None)
        self.require("high", both_or_none, "given together with low")
        if self.high is not None and self.low is not None:
            self.require("low", self.low > self.window, f"above the window {self.window}")
            self.require("high", self.high >= self.low, "a whole number, at least low")
            self.require("delete", self.delete == 0, "0 where high and low are given: heads that stay all keep kv_size")
        super().check()
        if self.high is not None:
            self.require_one_budget("high")

    def recipe(self) -> Recipe | None:
        # random groups need no entropy
        if self.grouping == "random":
            return None
        return make_entropy_recipe(self.top, self.samples, self.tokens)

    def calibrate(self, run: CalibrationRun) -> dict[str, torch.Tensor]:
        return measure_entropy(run)

    def window_size(self) -> int:
        return self.window

    def needs(self, n: int) -> Needs:
        return Needs(last_q=self.window)

    def capacity(self, n: int) -> Capacity:
        if self.high is not None and self.low is not None:
            mean = (int(self.scale * self.high) + int(self.scale * self.low)) // 2
            return Capacity(tokens=min(mean, n), sinks=0, window=self.window)
        capacity = super().capacity(n)
        return replace(capacity, tokens=min(int(self.scale * capacity.tokens), n))

    def compute_budgets(self, n: int) -> HeadBudgets:
        """Return the budgets while decoding of the first and the last group of heads, and their mean.

        n is the number of the prompt's tokens. With a single group, or with ``delete``, every stored head has the mean.
        """
        if self.high is not None and self.low is not None:
            high, low = int(self.scale * self.high), int(self.scale * self.low)
            return HeadBudgets(high=high, low=low, mean=(high + low) // 2)
        mean = int(self.scale * self.generation_budget(n))
        # low = 2/3 C, rounded to the nearest number, with at least one token beside the window where C has room for it
        two_thirds = (2 * mean + 1) // 3
        low = min(mean, max(two_thirds, self.token_counts(n)["window"] + 1))
        # high = 2 C - low = 4/3 C, so that their mean is C
        return HeadBudgets(high=2 * mean - low, low=low, mean=mean)

    def compute_head_sizes(self, n: int, layer: int, heads: int) -> list[int]:
        """Return how many tokens each head may hold while decoding after a prompt of n tokens; 0: it is not stored."""
        if layer in self.frozen_layers:
            return [NO_LIMIT] * heads
        budgets = self.compute_budgets(n)
        if self.delete:
            # all heads that are stored keep the mean budget
            head_sizes = [budgets.mean] * heads
            for head in self.find_deleted_heads(layer, heads):
                head_sizes[head] = 0
            return head_sizes
        count = min(self.groups, heads)
        size_of_group = interpolate_sizes(budgets.high, budgets.low, count)
        return [size_of_group[group] for group in self.assign_heads(layer, heads, count)]

    def compute_sizes_after_prompt(self, n: int, layer: int, heads: int) -> list[int]:
        """Return how many of a prompt's n tokens each head keeps; 0: the head is not stored."""
        sizes = self.compute_head_sizes(n, layer, heads)
        if n > self.compute_budgets(n).mean:
            return [min(n, size) for size in sizes]
        # a prompt of up to ``mean`` tokens is kept whole by all heads that are stored
        return [n if size > 0 else 0 for size in sizes]

    def expected(self, n: int, layer: int, n_layers: int, heads: int) -> Expected | None:
        if self.unbound:
            # any grouping gives the same bounds and the same sum, so they are known before the calibration
            sizes = tuple(replace(self, grouping="random").compute_sizes_after_prompt(n, layer, heads))
            return Expected(low=(min(sizes),) * heads, high=(max(sizes),) * heads, total=sum(sizes))
        sizes = tuple(self.compute_sizes_after_prompt(n, layer, heads))
        return Expected(low=sizes, high=sizes, total=sum(sizes))

    def assign_heads(self, layer: int, heads: int, count: int) -> list[int]:
        """Return the group of each stored head, out of ``count`` groups. Group 0 has the largest budget."""
        groups = assign_groups(self.rank_stored_heads(layer, heads, count), count)
        if self.grouping == "reversed":
            return [count - 1 - group for group in groups]
        return groups

    def find_deleted_heads(self, layer: int, heads: int) -> list[int]:
        """Return the indices of the heads that are not stored, ascending."""
        # the heads rank as for two groups
        order = self.rank_stored_heads(layer, heads, count=2).sort(descending=True, stable=True).indices.tolist()
        if self.grouping == "reversed":
            # under this ablation those that rank highest are deleted
            return sorted(order[: self.delete])
        return sorted(order[heads - self.delete :])

    def rank_stored_heads(self, layer: int, heads: int, count: int) -> torch.Tensor:
        """Return the numbers [heads] by which the stored heads of a layer rank for ``count`` groups, the largest first.

        Raises UsageError if the groups are to be calibrated and the stage is not.
        """
        if self.grouping == "random":
            # every layer has a draw of its own; the large factor keeps (seed, layer) pairs apart
            generator = torch.Generator().manual_seed(1_000_003 * self.seed + layer)
            return torch.randperm(heads, generator=generator).float()
        # each tensor is [L, Hq], see ``measure_entropy``
        measured = self.measured("the groups of its heads")
        if heads < measured["entropy"].shape[1]:
            # under per=kv_head, the mean H_k of the query heads that share a stored head
            return group_mean(measured["entropy"][layer], heads)
        if count == 2:
            return measured["counts"][layer]
        return measured["ranks"][layer]

    def check_heads(self, stored_heads: int, query_heads: int) -> None:
        self.require("delete", self.delete < stored_heads, f"fewer than the {stored_heads} heads that are stored")
        self.require(
            "delete",
            self.delete == 0 or stored_heads == query_heads,
            "a head that is not stored copies another's attention output, and grouped query heads share what is "
            "stored: give per=query_head, or a model whose heads are not grouped",
        )

    @property
    def state_bytes(self) -> int:
        # a slot has one fp32 number for each of w queries: the attention from that query
        return 4 * self.window

    def compress(self, cache: LayerCache, obs: Observation) -> LayerCache:
        keys = ops.only_segment(cache).k
        # A [Hq, w, n], the attention of the last w queries
        attention = window_rows(cache, obs, self.window)
        # decoding goes on from these rows, which are stored with the tokens
        ring = ring_of_rows(group_mean(attention, cache.heads), obs.prompt_tokens, self.window)
        cache = ops.with_state(cache, ring=ring)
        head_sizes = self.compute_sizes_after_prompt(obs.prompt_tokens, obs.layer, cache.heads)
        # budgets refer to the whole prompt, of which this layer may have read fewer tokens
        sizes = torch.tensor(head_sizes, device=ring.device).clamp(max=obs.n)
        if self.delete and obs.layer not in self.frozen_layers:
            received = attention.sum(dim=1)
            cache = replace(cache, copy_from=self.find_output_sources(received, keys, obs.layer))
        if int(sizes.min()) >= obs.n:
            return cache
        # score[h, j] = max over j's neighbours of (sum over the window queries i of A[h, i, .])
        window = min(self.capacity(obs.prompt_tokens).window, obs.n)
        sums = ring[:, : obs.n - window].sum(dim=-1)
        pooled = pool(sums, self.kernel, "max")
        # the window itself always stays
        scores = F.pad(pooled, (0, window), value=torch.inf)
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        return ops.select_first(cache, order, sizes)

    def find_output_sources(self, received: torch.Tensor, keys: torch.Tensor, layer: int) -> torch.Tensor:
        """Return, for each head, the head whose attention output it takes: [H] int16.

        A stored head takes its own. A deleted head takes that of the stored head with the most similar features
        (cosine, see ``similarity``).

        received: [H, n], the attention that tokens received from the last queries.
        keys: [Hk, n, D], the prompt's keys.
        """
        heads = received.shape[0]
        # heads are compared by the attention that tokens received (paper), or by their last keys (released code)
        if self.similarity == "paper":
            features = received
        else:
            features = per_head(keys[:, -self.window :], heads).flatten(1).float()
        unit = F.normalize(features, dim=-1)
        cosine = unit @ unit.T
        # a head that is not stored has no output to copy
        deleted = self.find_deleted_heads(layer, heads)
        cosine[:, deleted] = -torch.inf
        sources = torch.arange(heads, device=cosine.device)
        # of equally similar heads, the stable sort takes the lowest
        sources[deleted] = cosine[deleted].sort(dim=-1, descending=True, stable=True).indices[:, 0]
        return sources.to(torch.int16)

    def decode_limit(self, n: int, layer: int) -> int:
        if layer in self.frozen_layers:
            return NO_LIMIT
        budgets = self.compute_budgets(n)
        # with a single group, or with ``delete``, every stored head has the mean budget
        if self.delete or self.groups == 1:
            return budgets.mean
        return budgets.high

    def max_chunk(self, n: int, n_layers: int) -> int:
        if all(layer in self.frozen_layers for layer in range(n_layers)):
            return NO_LIMIT
        budgets = self.compute_budgets(n)
        if self.delete:
            return budgets.mean
        # a step must fit into the heads that hold fewest tokens
        return budgets.low

    def head_budgets(self, cache: LayerCache, layer: int) -> list[int]:
        return self.compute_head_sizes(cache.prompt_tokens, layer, cache.heads)

    def token_counts(self, n: int) -> Mapping[str, int]:
        return {"window": self.capacity(n).window}

    def keep_scores(self, slots: Slots) -> torch.Tensor:
        in_window = recent_slots(slots, "window")
        # sum over the last w queries i of A[h, i, j]; -inf keeps window and free slots out of their neighbours' maximum
        sums = slots.state["ring"].sum(dim=-1).masked_fill(in_window | ~slots.valid, -torch.inf)
        return pool_slots(sums, slots, self.kernel, "max").masked_fill(in_window, torch.inf)

    def fold(self, slots: Slots, probs: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return fold_ring(slots, probs, self.window)


def interpolate_sizes(high: int, low: int, count: int) -> list[int]:
    """Return ``count`` whole numbers on the line from ``high`` to ``low``. Their mean is that of ``high`` and ``low``.

    An odd ``count`` has a middle number, which is rounded down. The mean may then be less by a fraction.
    """
    if count == 1:
        return [(high + low) // 2]
    # the upper half: high - i (high - low) / (count - 1), rounded to the nearest number
    steps = count - 1
    upper = []
    for i in range(count // 2):
        fall = (i * (high - low) + steps // 2) // steps
        upper.append(high - fall)
    # an odd count has a middle number, half of high + low rounded down
    middle = [(high + low) // 2] if count % 2 else []
    # the lower half mirrors the upper one, so that each pair adds up to high + low whatever was rounded
    lower = [high + low - size for size in reversed(upper)]
    return upper + middle + lower
