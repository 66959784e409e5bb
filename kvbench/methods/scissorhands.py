"""Scissorhands: keep what recent queries attended to, trusting that they will again (arXiv 2305.17118, section 4).

No official code is at hand; the formula is that of VATP's paper (arXiv 2406.12335, equation 3) and of its code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from kvbench.cache import ops
from kvbench.cache.observation import Needs, Observation
from kvbench.cache.segment import LayerCache
from kvbench.methods.base import Block, Capacity
from kvbench.methods.evicting import EvictingSelector
from kvbench.methods.statistics import group_mean, window_rows, window_sums
from kvbench.storage.roles import Slots

VARIANTS = ("code", "paper")


@dataclass(frozen=True, kw_only=True)
class Scissorhands(EvictingSelector):
    """Score of token j = attention that it received from the last ``window`` queries; the budget holds while decoding.

    The first tokens are not protected. Under ``per=kv_head`` a group's query heads are averaged.
    window: queries w that count. recent: last tokens, always kept.
    variant: ``code`` is VATP's: the prompt's score is divided by w, even if the prompt is shorter, and every new row is
    added whole, so that it weighs as much as w rows of the prompt and old rows never leave; ``paper`` slides: the last
    w rows are kept with each token, at 4 w bytes a slot.
    half_ratio: the budget as VATP's code computes it, 2 * floor(half_ratio * n), instead of kv_size or kv_ratio.
    """

    id: ClassVar[str] = "scissorhands"

    window: int = 400
    recent: int = 10
    variant: str = "code"
    half_ratio: float | None = None

    def check(self) -> None:
        self.at_least("window", 1, "queries")
        self.at_least("recent", 1, "tokens")
        self.require("variant", self.variant in VARIANTS, " or ".join(VARIANTS))
        if self.half_ratio is not None:
            self.require("half_ratio", 0 < self.half_ratio <= 0.5, "a fraction of the prompt, above 0 and at most 0.5")
        super().check()
        if self.half_ratio is not None:
            self.require_one_budget("half_ratio")

    def window_size(self) -> int:
        return self.recent

    def needs(self, n: int) -> Needs:
        return Needs(last_q=self.window)

    def capacity(self, n: int) -> Capacity:
        if self.half_ratio is None:
            found = super().capacity(n)
            tokens = found.tokens
        else:
            tokens = max(2, 2 * int(self.half_ratio * n + 1e-9))
        window = self.recent if tokens > self.recent else tokens // 2
        return Capacity(min(tokens, n), 0, window, shrunk=tokens <= self.recent and tokens < n)

    def row(self, n: int) -> Mapping[str, int]:
        # a short prompt is no reason to protect fewer of a budget that the answer fills
        return {"recent": self.recent if self.kv_size is not None else self.capacity(n).window}

    def carry(self, cache: LayerCache, obs: Observation) -> Mapping[str, torch.Tensor]:
        if self.variant == "code":
            return {"mass": group_mean(window_sums(cache, obs, self.window), cache.heads) / self.window}
        rows = group_mean(window_rows(cache, obs, self.window), cache.heads)
        seen = rows.shape[1]
        ring = rows.new_zeros(rows.shape[0], obs.n, self.window)
        # the ring counts rows, of which none may fall on another where the layer read fewer tokens than the prompt has
        places = torch.arange(obs.prompt_tokens - seen, obs.prompt_tokens, device=rows.device) % self.window
        ring[:, :, places] = rows.transpose(1, 2)
        return {"ring": ring}

    def layout(self, blocks: list[Block], head_dim: int, itemsize: int) -> list[Block]:
        return [replace(b, slot_overhead=4 * (1 if self.variant == "code" else self.window)) for b in blocks]

    def scores(self, cache: LayerCache, obs: Observation, capacity: Capacity) -> torch.Tensor:
        return self._received(ops.only_segment(cache).state)

    def keep_scores(self, slots: Slots) -> torch.Tensor:
        young = slots.positions > slots.now - slots.row["recent"]
        return self._received(slots.state).masked_fill(young, torch.inf)

    def fold(self, slots: Slots, probs: torch.Tensor) -> Mapping[str, torch.Tensor]:
        b, heads, size = slots.positions.shape
        rows = probs.view(b, heads, -1, probs.shape[2], size).mean(dim=2)
        if self.variant == "code":
            return {"mass": slots.state["mass"] + rows.sum(dim=2)}
        rows = rows[:, :, -self.window :].transpose(2, 3)
        places = (slots.now - torch.arange(rows.shape[3] - 1, -1, -1, device=rows.device)) % self.window
        return {"ring": slots.state["ring"].scatter(3, places[:, :, None].expand_as(rows), rows)}

    def _received(self, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return state["mass"] if self.variant == "code" else state["ring"].sum(dim=-1)
