"""H2O: keep the tokens that received most attention, the heavy hitters (arXiv 2306.14048, section 4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbench.base.numbers import ceil_div
from kvbench.kv.observation import Needs, Observation
from kvbench.kv.packed import quantise_zero_point
from kvbench.kv.segment import LayerCache
from kvbench.methods.core.contract import Capacity
from kvbench.methods.core.evicting import EvictingSelector
from kvbench.methods.core.knobs import Rule, at_least, knob, one_of
from kvbench.methods.core.statistics import group_mean, group_rows, recent_slots, window_rows
from kvbench.storage.roles import Slots

# the parts of variant=uncomp: of 512 tokens, 4 are heavy hitters and 508 are recent ones
UNCOMP_HEAVY, UNCOMP_RECENT, UNCOMP_TOTAL = 4, 508, 512


@dataclass(frozen=True, kw_only=True)
class H2O(EvictingSelector):
    """Score of token j = attention it received, S[h, j] = sum over queries i >= j of A[h, i, j], without pooling.

    A[h, i, j] is the attention weight of query i of head h on token j. Under ``per=kv_head`` S is averaged over the
    query heads of a group before tokens are chosen.

    variant ``all``: sums over all n queries and evicts once, after the prompt.
    variant ``win``: sums over the last ``window`` queries only (SnapKV without pooling), as in ThinK's and ReFreeKV's
        code, and evicts once.
    variant ``orig``: the paper's. All queries count, and every decode step adds the new query's attention to S. The
        budget holds while decoding, half of it heavy hitters (the tokens of the largest S) and half recent tokens.
    variant ``uncomp``: UNComp's baseline (its released code, arXiv 2410.03090). It is ``orig`` with floor(4 C / 512)
        heavy hitters and floor(508 C / 512) recent tokens of a budget C, nearly a sliding window. Below C = 128 there
        is no heavy hitter. Such a ``kv_size`` is refused, and a ``kv_ratio`` of so few tokens keeps recent ones only.
    heavy_ratio, recent_ratio: both parts as fractions of the prompt, for ``orig``. None gives each half the budget.
    positions: ``true`` keeps each token's position in the text; ``rolled`` gives a cached key the position of its slot.
    score_bits: the attention in S is computed over keys quantised to this many bits, while stored keys stay exact.
    code_mask: for ``orig``: when a token leaves the recent ones, no query attends it for one step (the mask of
        FMInference's code).
    evict_after: for ``orig``: a step attends one token more than the budget, and evicts afterwards (Q-Hitter's code).
    """

    id: ClassVar[str] = "h2o"

    window: int = knob(32, at_least(1, "tokens"))
    variant: str = knob("all", one_of("all", "win", "orig", "uncomp"))
    heavy_ratio: float | None = None
    recent_ratio: float | None = None
    positions: str | None = "true"
    score_bits: int | None = knob(None, Rule("null, 8, 3 or 2", lambda bits: bits in (8, 3, 2)))
    code_mask: bool | None = None
    evict_after: bool | None = None

    def check(self) -> None:
        both_or_none = (self.heavy_ratio is None) == (self.recent_ratio is None)
        self.require("heavy_ratio", both_or_none, "given together with recent_ratio")
        if self.heavy_ratio is not None and self.recent_ratio is not None:
            self.require("heavy_ratio", self.variant == "orig", "an option of variant=orig only")
            self.require("heavy_ratio", 0 <= self.heavy_ratio <= 1, "a fraction of the prompt")
            fits = 0 < self.recent_ratio <= 1 - self.heavy_ratio
            self.require("recent_ratio", fits, "a fraction of the prompt, above 0, at most 1 together with heavy_ratio")
        self.require("code_mask", not self.code_mask or self.variant == "orig", "an option of variant=orig only")
        self.require("evict_after", not self.evict_after or self.variant == "orig", "an option of variant=orig only")
        self.require("evict_after", not (self.evict_after and self.code_mask), "not together with code_mask")
        # this fills in a default kv_ratio, which ``require_one_budget`` then takes back
        super().check()
        if self.heavy_ratio is not None:
            self.require_one_budget("heavy_ratio")
        if self.variant == "uncomp" and self.kv_size is not None:
            # floor(4 C / 512) >= 1 from C = 512 / 4 on
            least = ceil_div(UNCOMP_TOTAL, UNCOMP_HEAVY)
            self.require("kv_size", self.kv_size >= least, f"at least {least} with variant=uncomp, for a heavy hitter")

    @property
    def evicts(self) -> bool:
        return self.variant in ("orig", "uncomp")

    def window_size(self) -> int:
        # the evicting variants divide their budget by ``parts``: at least one of its tokens is recent
        return 1 if self.evicts else self.window

    def needs(self, n: int) -> Needs:
        if self.variant == "win":
            return Needs(last_q=self.window)
        if self.score_bits is None:
            return Needs(colsums=True)
        return Needs(colsums_bits=frozenset({self.score_bits}))

    def capacity(self, n: int) -> Capacity:
        if not self.evicts:
            return super().capacity(n)
        heavy, recent = self.parts(n)
        # without heavy hitters nothing is left to choose: only recent tokens stay, as in a budget that was too small
        no_choice = self.variant == "uncomp" and heavy == 0 and recent < n
        return Capacity(tokens=min(heavy + recent, n), sinks=0, window=min(recent, n), shrunk=no_choice)

    def parts(self, n: int) -> tuple[int, int]:
        """Return (heavy hitters, recent tokens) held while decoding after a prompt of n tokens."""
        if self.heavy_ratio is not None and self.recent_ratio is not None:
            # the newest token is always a recent one
            return int(self.heavy_ratio * n), max(1, int(self.recent_ratio * n))
        total = self.generation_budget(n)
        if self.variant == "uncomp":
            # floor(4 C / 512) heavy hitters beside floor(508 C / 512) recent tokens
            return total * UNCOMP_HEAVY // UNCOMP_TOTAL, total * UNCOMP_RECENT // UNCOMP_TOTAL
        # half of the budget each; of an odd budget the recent tokens have one more
        return total // 2, total - total // 2

    def count_competing(self, n: int) -> int:
        return sum(self.parts(n))

    @property
    def spare(self) -> int:
        # under both knobs the newest token competes one step late
        return 1 if self.code_mask or self.evict_after else 0

    def initial_state(self, cache: LayerCache, obs: Observation) -> Mapping[str, torch.Tensor]:
        if not self.evicts:
            return {}
        # S[h, j] = sum over all queries i >= j of the prompt of A[h, i, j]
        return {"mass": group_mean(self.sum_received(cache, obs, obs.n), cache.heads)}

    def token_counts(self, n: int) -> Mapping[str, int]:
        _, recent = self.parts(n)
        # under evict_after or code_mask one more token is stored: the newest one competes a step late
        return {"recent": recent + self.spare}

    def unattended_distance(self, n: int) -> int | None:
        if not self.code_mask:
            return None
        # for one step no query attends the token that has just left the recent ones
        _, recent = self.parts(n)
        return recent

    @property
    def state_bytes(self) -> int:
        # each slot has one fp32 number, its S
        return 4 if self.evicts else 0

    def keep_scores(self, slots: Slots) -> torch.Tensor:
        return slots.state["mass"].masked_fill(recent_slots(slots, "recent"), torch.inf)

    @property
    def estimates(self) -> bool:
        return self.score_bits is not None

    def estimate(self, keys: torch.Tensor) -> torch.Tensor:
        if self.score_bits is None:
            return keys
        return quantise_zero_point(keys, self.score_bits).dequantise(torch.float32)

    def fold(self, slots: Slots, probs: torch.Tensor) -> Mapping[str, torch.Tensor]:
        # S[h, j] += sum over the new queries i of A[h, i, j]
        return {"mass": slots.state["mass"] + group_rows(probs, slots.positions.shape[1]).sum(dim=2)}

    def scores(self, cache: LayerCache, obs: Observation, capacity: Capacity) -> torch.Tensor:
        return group_mean(self.sum_received(cache, obs, capacity.window), cache.heads)

    def sum_received(self, cache: LayerCache, obs: Observation, window: int) -> torch.Tensor:
        """Return S [Hq, n], the attention that each token received from the queries that the variant counts.

        ``win`` counts the last ``window`` queries. All other variants count all queries.
        """
        if self.variant == "win":
            # S[h, j] = sum over the last w queries i of A[h, i, j]
            return window_rows(cache, obs, window, self.estimate).sum(dim=1)
        # S[h, j] = sum over all queries i of A[h, i, j], which the prompt's own pass has summed up
        return obs.received(self.score_bits)
