"""UNComp: heads with uncertain queries keep more tokens than the others, while decoding too (arXiv 2410.03090)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F

from kvbench.cache import ops
from kvbench.cache.observation import Needs, Observation
from kvbench.cache.segment import LayerCache, per_head
from kvbench.methods.base import Block, Capacity, Expected
from kvbench.methods.entropy import assign, measure
from kvbench.methods.evicting import EvictingSelector
from kvbench.methods.recipe import CalibrationRun, Recipe
from kvbench.methods.statistics import group_mean, pool, window_rows
from kvbench.storage.evicting_rows import Slots

if TYPE_CHECKING:
    pass

GROUPINGS = ("calibrated", "random", "reversed")
SIMILARITIES = ("paper", "code")
NO_LIMIT = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class UNCompGroup(EvictingSelector):
    """Score = attention summed over the last ``window`` queries, max-pooled over ``kernel`` neighbours, as in code.

    Of a mean budget C, the half of a layer's heads with the larger truncated matrix entropy of their queries keeps
    4/3 C tokens, the other half 2/3 C (512 and 256 at 384; at least window + 1), the last ``window`` included. Which
    half a head is in was measured before (calibration.entropy). Every head holds its number while decoding: the rows of
    the last ``window`` queries over the tokens held are kept with them, and the lowest pooled sum goes. A prompt of up
    to C tokens is kept whole; heads that hold less give way with the first new token. Under ``per=kv_head`` the mean
    entropy of a group's query heads decides, and their rows are averaged before pooling.

    window: last tokens, always kept, whose rows score the others. kernel: width of the max-pooling, odd.
    high: tokens of the high group, with low in place of a budget (the paper's remain-N is high=512 low=N).
    low: tokens of the low group, likewise.
    groups: groups of heads, their tokens falling linearly from the first to the last (appendix D.1; 11, 10 and 11 of 32
    heads); more than two are made by the sum of ranks over samples, two by how often a head was in the upper half.
    scale: all budgets times this; 1.5 is what released code does to its argument.
    grouping: calibrated; random draws the groups of each layer; reversed gives the high group the low budget (the
    ablations of appendix D). seed: of random.
    delete: heads of each layer that are not stored at all, those that rank lowest; all others keep C. While decoding,
    their attention output is that of the most similar head that is stored.
    similarity: cosine of what the last ``window`` queries attend to (paper) or of the last ``window`` keys (code).
    top: the k of truncated matrix entropy, eigenvalues that count. samples: windows of text that are measured (code;
    500 in the paper). tokens: of each window; null: 4096, as far as the context allows (tiny: 1024).
    """

    id: ClassVar[str] = "uncomp-group"

    window: int = 8
    kernel: int = 7
    high: int | None = None
    low: int | None = None
    groups: int = 2
    scale: float = 1.0
    grouping: str = "calibrated"
    seed: int = 0
    delete: int = 0
    similarity: str = "paper"
    top: int = 32
    samples: int = 100
    tokens: int | None = None

    def check(self) -> None:
        for knob in ("window", "groups", "top", "samples"):
            self.at_least(knob, 1)
        odd = self.kernel >= 1 and self.kernel % 2 == 1
        self.require("kernel", odd, "an odd whole number, 1 or more (1: no pooling)")
        self.at_least("delete", 0, "heads")
        self.at_least("tokens", 2)
        self.require("scale", self.scale >= 1, "a number, 1 or more")
        self.require("grouping", self.grouping in GROUPINGS, " or ".join(GROUPINGS))
        self.require("similarity", self.similarity in SIMILARITIES, " or ".join(SIMILARITIES))
        self.require("high", (self.high is None) == (self.low is None), "given together with low")
        if self.high is not None and self.low is not None:
            self.require("low", self.low > self.window, f"above the window {self.window}")
            self.require("high", self.high >= self.low, "a whole number, at least low")
            self.require("delete", self.delete == 0, "0 where high and low are given: heads that stay all keep kv_size")
        super().check()
        if self.high is not None:
            self.require_one_budget("high")

    def recipe(self) -> Recipe | None:
        if self.grouping == "random":
            return None
        return uncomp_recipe(self.top, self.samples, self.tokens)

    def calibrate(self, run: CalibrationRun) -> dict[str, torch.Tensor]:
        return measure_uncomp(run)

    def window_size(self) -> int:
        return self.window

    def needs(self, n: int) -> Needs:
        return Needs(last_q=self.window)

    def capacity(self, n: int) -> Capacity:
        if self.high is not None and self.low is not None:
            mean = (int(self.scale * self.high) + int(self.scale * self.low)) // 2
            return Capacity(min(mean, n), 0, self.window)
        found = super().capacity(n)
        return replace(found, tokens=min(int(self.scale * found.tokens), n))

    def extremes(self, n: int) -> tuple[int, int, int]:
        """(high, low, mean) tokens per head while decoding after a prompt of n tokens."""
        if self.high is not None and self.low is not None:
            high, low = int(self.scale * self.high), int(self.scale * self.low)
            return high, low, (high + low) // 2
        mean = int(self.scale * (self.kv_size if self.kv_size is not None else super().capacity(n).tokens))
        low = min(mean, max((2 * mean + 1) // 3, self.row(n)["window"] + 1))
        return 2 * mean - low, low, mean

    def held(self, n: int, layer: int, heads: int) -> list[int]:
        """Tokens that each stored head holds while decoding after a prompt of n tokens; 0: it is not stored."""
        if layer in self.frozen_layers:
            return [NO_LIMIT] * heads
        high, low, mean = self.extremes(n)
        if self.delete:
            gone = set(self.deleted(layer, heads))
            return [0 if h in gone else mean for h in range(heads)]
        count = min(self.groups, heads)
        sizes = interpolated(high, low, count)
        return [sizes[g] for g in self.assigned(layer, heads, count)]

    def after_prompt(self, n: int, layer: int, heads: int) -> list[int]:
        """Tokens that each stored head keeps of a prompt of n tokens."""
        whole = n <= self.extremes(n)[2]
        return [n if whole and size else min(n, size) for size in self.held(n, layer, heads)]

    def expected(self, n: int, layer: int, n_layers: int, heads: int) -> Expected | None:
        if self.unbound:
            # the sum over heads is known before it is known which head keeps how much
            return replace(self, grouping="random").between(n, layer, heads)
        sizes = tuple(self.after_prompt(n, layer, heads))
        return Expected(sizes, sizes, sum(sizes))

    def between(self, n: int, layer: int, heads: int) -> Expected:
        """What holds for any grouping: the bounds of every head, and the sum."""
        sizes = self.after_prompt(n, layer, heads)
        return Expected((min(sizes),) * heads, (max(sizes),) * heads, sum(sizes))

    def assigned(self, layer: int, heads: int, count: int) -> list[int]:
        """The group of each stored head, 0 for that which keeps most, ``count`` in all."""
        found = assign(self.standing(layer, heads, count), count)
        return [count - 1 - g for g in found] if self.grouping == "reversed" else found

    def deleted(self, layer: int, heads: int) -> list[int]:
        """The heads that are not stored."""
        order = self.standing(layer, heads, 2).sort(descending=True, stable=True).indices.tolist()
        return sorted(order[: self.delete] if self.grouping == "reversed" else order[heads - self.delete :])

    def standing(self, layer: int, heads: int, count: int) -> torch.Tensor:
        """What ranks the stored heads of a layer [heads], for ``count`` groups."""
        if self.grouping == "random":
            generator = torch.Generator().manual_seed(1_000_003 * self.seed + layer)
            return torch.randperm(heads, generator=generator).float()
        if self.calibration is None:
            raise ValueError("uncomp-group is used without its calibration")
        found = self.calibration.tensors
        if heads < found["entropy"].shape[1]:
            return group_mean(found["entropy"][layer], heads)
        return found["counts" if count == 2 else "ranks"][layer]

    def check_heads(self, stored: int, query_heads: int) -> None:
        self.require("delete", self.delete < stored, f"fewer than the {stored} heads that are stored")
        self.require(
            "delete",
            self.delete == 0 or stored == query_heads,
            "a head that is not stored copies another's attention output, and grouped query heads share what is "
            "stored: give per=query_head, or a model whose heads are not grouped",
        )

    def layout(self, blocks: list[Block], head_dim: int, itemsize: int) -> list[Block]:
        return [replace(b, slot_overhead=4 * self.window) for b in blocks]

    def compress(self, cache: LayerCache, obs: Observation) -> LayerCache:
        whole = ops.only_segment(cache)
        seen = window_rows(cache, obs, self.window)
        rows = group_mean(seen, cache.heads)
        ring = rows.new_zeros(rows.shape[0], obs.n, self.window)
        n = obs.prompt_tokens
        places = torch.arange(n - rows.shape[1], n, device=rows.device) % self.window
        ring[:, :, places] = rows.transpose(1, 2)
        cache = replace(cache, segments=(replace(whole, state={**whole.state, "ring": ring}),))
        sizes = torch.tensor(self.after_prompt(n, obs.layer, cache.heads), device=rows.device).clamp(max=obs.n)
        if self.delete and obs.layer not in self.frozen_layers:
            cache = replace(cache, copy_from=self.stand_ins(seen.sum(dim=1), whole.k, obs.layer))
        if int(sizes.min()) >= obs.n:
            return cache
        window = min(self.capacity(n).window, obs.n)
        prefix = pool(ring[:, : obs.n - window].sum(dim=-1), self.kernel, "max")
        scores = F.pad(prefix, (0, window), value=torch.inf)
        # each head's order by score, of which it keeps the first, ascending; what is not kept sorts behind
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        dropped = torch.arange(obs.n, device=order.device) >= sizes[:, None]
        index = order.masked_fill(dropped, obs.n).sort(dim=-1).values[:, : int(sizes.max())]
        return ops.select(cache, index.clamp(max=obs.n - 1), sizes)

    def stand_ins(self, received: torch.Tensor, keys: torch.Tensor, layer: int) -> torch.Tensor:
        """Of each head [H], that whose attention output it has: its own, or the most similar one's that is stored.

        ``received`` [H, n] is what the last queries attend to, ``keys`` [Hk, n, D].
        """
        heads = received.shape[0]
        recent = per_head(keys[:, -self.window :], heads).flatten(1).float()
        unit = F.normalize(received if self.similarity == "paper" else recent, dim=-1)
        gone = self.deleted(layer, heads)
        alike = unit @ unit.T
        alike[:, gone] = -torch.inf
        found = torch.arange(heads, device=alike.device)
        found[gone] = alike[gone].sort(dim=-1, descending=True, stable=True).indices[:, 0]
        return found.to(torch.int16)

    def decode_budget(self, n: int, layer: int) -> int:
        if layer in self.frozen_layers:
            return NO_LIMIT
        high, _, mean = self.extremes(n)
        return mean if self.delete or self.groups == 1 else high

    def at_once(self, n: int) -> int:
        _, low, mean = self.extremes(n)
        return NO_LIMIT if 0 in self.frozen_layers else mean if self.delete else low

    def shares(self, cache: LayerCache, layer: int) -> list[int]:
        return self.held(cache.prompt_tokens, layer, cache.heads)

    def row(self, n: int) -> Mapping[str, int]:
        # a short prompt is no reason to protect fewer of a budget that the answer fills
        fixed = self.kv_size is not None or self.high is not None
        return {"window": self.window if fixed else super().capacity(n).window}

    def keep_scores(self, slots: Slots) -> torch.Tensor:
        young = slots.positions > slots.now - slots.row["window"]
        order = slots.positions.masked_fill(~slots.valid, torch.iinfo(torch.int32).max).argsort(dim=-1, stable=True)
        sums = slots.state["ring"].sum(dim=-1).masked_fill(young | ~slots.valid, -torch.inf).gather(2, order)
        pooled = pool(sums.flatten(0, 1), self.kernel, "max").view_as(sums)
        return torch.empty_like(pooled).scatter_(2, order, pooled).masked_fill(young, torch.inf)

    def fold(self, slots: Slots, probs: torch.Tensor) -> Mapping[str, torch.Tensor]:
        b, heads, size = slots.positions.shape
        rows = probs.view(b, heads, -1, probs.shape[2], size).mean(dim=2)[:, :, -self.window :].transpose(2, 3)
        places = (slots.now - torch.arange(rows.shape[3] - 1, -1, -1, device=rows.device)) % self.window
        return {"ring": slots.state["ring"].scatter(3, places[:, :, None].expand_as(rows), rows)}


def uncomp_recipe(top: int, samples: int, tokens: int | None) -> Recipe:
    """The calibration by which UNComp groups heads and layers."""
    return Recipe("uncomp", 1, samples, tokens, knobs={"top": top})


def measure_uncomp(run: CalibrationRun) -> dict[str, torch.Tensor]:
    """What ``uncomp_recipe`` asks for."""
    c = run.model.config
    run.recipe.check(int(getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads), "head_dim")
    return measure(run, int(run.recipe.knobs["top"]))


def interpolated(high: int, low: int, count: int) -> list[int]:
    """``count`` whole numbers on the line from ``high`` to ``low``, so that their mean is that of the two."""
    if count == 1:
        return [(high + low) // 2]
    upper = [high - (i * (high - low) + (count - 1) // 2) // (count - 1) for i in range((count + 1) // 2)]
    if count % 2:
        upper[-1] = (high + low) // 2
    return upper + [high + low - x for x in reversed(upper[: count // 2])]
