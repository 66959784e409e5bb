"""Scissorhands: keep the tokens that recent queries attended to, as later ones will, too (arXiv 2305.17118, section 4).

No official code is at hand. The formula is that of VATP's paper (arXiv 2406.12335, equation 3) and of its code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbench.kv import ops
from kvbench.kv.observation import Needs, Observation
from kvbench.kv.segment import LayerCache
from kvbench.methods.core.contract import Capacity
from kvbench.methods.core.evicting import EvictingSelector
from kvbench.methods.core.knobs import Rule, at_least, knob, one_of
from kvbench.methods.core.statistics import (
    fold_ring,
    group_mean,
    group_rows,
    recent_slots,
    ring_of_rows,
    window_rows,
    window_sums,
)
from kvbench.storage.roles import Slots


@dataclass(frozen=True, kw_only=True)
class Scissorhands(EvictingSelector):
    """Score of token j = attention that it received, S[h, j] = sum over the last w queries i of A[h, i, j].

    A[h, i, j] is the attention weight of query i of head h on token j, and w is ``window``. The budget holds while
    decoding. The last ``recent`` tokens always stay, and the first tokens are not protected. Under ``per=kv_head`` S is
    averaged over the query heads of a group.

    variant: ``code`` is VATP's. S of the prompt is divided by w, even if the prompt is shorter, and the attention of
    every new query is added undivided. A new query therefore weighs as much as w queries of the prompt, and old ones
    never leave the sum. With ``paper`` the window slides: the weights of the last w queries are stored with each token,
    at 4 w bytes a slot.
    half_ratio: half of the budget as a fraction h of the prompt, which gives C = 2 floor(h n).
    """

    id: ClassVar[str] = "scissorhands"

    window: int = knob(400, at_least(1, "queries"))
    recent: int = knob(10, at_least(1, "tokens"))
    variant: str = knob("code", one_of("code", "paper"))
    half_ratio: float | None = knob(
        None, Rule("a fraction of the prompt, above 0 and at most 0.5", lambda x: 0 < x <= 0.5)
    )

    def check(self) -> None:
        super().check()
        if self.half_ratio is not None:
            self.require_one_budget("half_ratio")

    def window_size(self) -> int:
        return self.recent

    def needs(self, n: int) -> Needs:
        return Needs(last_q=self.window)

    def capacity(self, n: int) -> Capacity:
        tokens = super().capacity(n).tokens
        if self.half_ratio is not None:
            # C = 2 floor(h n), at least 2: one token to choose and one recent token;
            # 1e-9: a product that should be whole must not be cut to the number below
            tokens = max(2, 2 * int(self.half_ratio * n + 1e-9))
        if tokens > self.recent:
            return Capacity(tokens=min(tokens, n), sinks=0, window=self.recent)
        # without room for all recent tokens, they get half of the budget; a prompt within the budget loses none anyway
        return Capacity(tokens=min(tokens, n), sinks=0, window=tokens // 2, shrunk=tokens < n)

    def token_counts(self, n: int) -> Mapping[str, int]:
        # the answer fills a budget in tokens, so all recent tokens are protected even behind a short prompt
        if self.kv_size is not None:
            return {"recent": self.recent}
        return {"recent": self.capacity(n).window}

    def initial_state(self, cache: LayerCache, obs: Observation) -> Mapping[str, torch.Tensor]:
        if self.variant == "code":
            # S[h, j] = 1/w * sum over the last w queries i of A[h, i, j], also of a shorter prompt
            return {"mass": group_mean(window_sums(cache, obs, self.window), cache.heads) / self.window}
        rows = group_mean(window_rows(cache, obs, self.window), cache.heads)
        return {"ring": ring_of_rows(rows, obs.prompt_tokens, self.window)}

    @property
    def state_bytes(self) -> int:
        # a slot has S in fp32, or under ``paper`` the attention from each of w queries
        if self.variant == "code":
            return 4
        return 4 * self.window

    def scores(self, cache: LayerCache, obs: Observation, capacity: Capacity) -> torch.Tensor:
        return self._sum_received(ops.only_segment(cache).state)

    def keep_scores(self, slots: Slots) -> torch.Tensor:
        return self._sum_received(slots.state).masked_fill(recent_slots(slots, "recent"), torch.inf)

    def fold(self, slots: Slots, probs: torch.Tensor) -> Mapping[str, torch.Tensor]:
        if self.variant == "paper":
            return fold_ring(slots, probs, self.window)
        # S[h, j] += sum over the new queries i of A[h, i, j], not divided by w
        return {"mass": slots.state["mass"] + group_rows(probs, slots.positions.shape[1]).sum(dim=2)}

    def _sum_received(self, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return S, the attention that each token has received, from the variant's running ``state``.

        S is [heads, n] for the tokens of a prompt and [B, H, S] for slots.
        """
        if self.variant == "code":
            return state["mass"]
        # sum over the last w queries, each of which has one column of the ring
        return state["ring"].sum(dim=-1)
