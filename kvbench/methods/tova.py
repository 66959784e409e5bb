"""TOVA: keep the tokens that the newest query attends to, at every step anew (arXiv 2401.06104, section 3.2)."""

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
from kvbench.methods.statistics import window_rows
from kvbench.storage.roles import Slots


@dataclass(frozen=True, kw_only=True)
class TOVA(EvictingSelector):
    """Score of token j = attention of the newest query to it; the lowest goes, after the prompt and at every step.

    Attention is averaged over all heads of a layer, which keep the same tokens. The newest token always stays: the
    paper lets it compete, which it practically always survives. The budget includes it, so that a step attends C
    tokens. Nothing else is protected, neither the first tokens nor recent ones.
    per_head: each stored head decides by its own attention (the mean over its query heads), the paper's ablation.
    """

    id: ClassVar[str] = "tova"

    per_head: bool = False

    def window_size(self) -> int:
        return 1

    def needs(self, n: int) -> Needs:
        return Needs(last_q=1)

    def carry(self, cache: LayerCache, obs: Observation) -> Mapping[str, torch.Tensor]:
        return {"row": self._decisive(window_rows(cache, obs, 1)[None], cache.heads)[0]}

    def layout(self, blocks: list[Block], head_dim: int, itemsize: int) -> list[Block]:
        return [replace(b, slot_overhead=4) for b in blocks]

    def scores(self, cache: LayerCache, obs: Observation, capacity: Capacity) -> torch.Tensor:
        return ops.only_segment(cache).state["row"]

    def keep_scores(self, slots: Slots) -> torch.Tensor:
        held = slots.positions.masked_fill(~slots.valid, -1)
        return slots.state["row"].masked_fill(held == held.amax(dim=-1, keepdim=True), torch.inf)

    def fold(self, slots: Slots, probs: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"row": self._decisive(probs, slots.positions.shape[1])}

    def _decisive(self, rows: torch.Tensor, heads: int) -> torch.Tensor:
        """The last of attention rows [B, Hq, T, S] as stored heads see it, [B, heads, S]."""
        last = rows[:, :, -1]
        if not self.per_head:
            return last.mean(dim=1, keepdim=True).repeat(1, heads, 1)
        return last.reshape(last.shape[0], heads, -1, last.shape[2]).mean(dim=2)
