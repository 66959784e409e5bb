"""TOVA: keep the tokens that the newest query attends to, at every step anew (arXiv 2401.06104, section 3.2)."""

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
from kvbench.methods.core.statistics import group_rows, window_rows
from kvbench.storage.roles import Slots


@dataclass(frozen=True, kw_only=True)
class TOVA(EvictingSelector):
    """Score of token j = attention of the newest query to it. The lowest goes, after the prompt and at every step.

    s[j] = 1/Hq * sum over the heads h of A[h, n, j], with the weights A[h, n, :] of the newest query n. All heads of a
    layer keep the same tokens. The newest token always stays. In the paper the newest token competes, too, and
    practically always survives. The budget includes it, so that a step attends C tokens. No other token is protected,
    neither the first nor recent ones.

    per_head: true averages over the query heads of a group only, and each stored head keeps its own tokens.
    """

    id: ClassVar[str] = "tova"

    per_head: bool = False

    def window_size(self) -> int:
        return 1

    def needs(self, n: int) -> Needs:
        return Needs(last_q=1)

    def initial_state(self, cache: LayerCache, obs: Observation) -> Mapping[str, torch.Tensor]:
        # A[h, n, :], the attention of the prompt's last query; [None] makes the prompt a batch of one
        rows = window_rows(cache, obs, window=1)[None]
        return {"row": self._average_newest_row(rows, cache.heads)[0]}

    @property
    def state_bytes(self) -> int:
        # each slot has one fp32 number: its entry in the newest query's row
        return 4

    def scores(self, cache: LayerCache, obs: Observation, capacity: Capacity) -> torch.Tensor:
        return ops.only_segment(cache).state["row"]

    def keep_scores(self, slots: Slots) -> torch.Tensor:
        # the newest token always stays; -1 keeps a free slot's old position from passing for the newest
        positions = slots.positions.masked_fill(~slots.valid, -1)
        newest = positions == positions.amax(dim=-1, keepdim=True)
        return slots.state["row"].masked_fill(newest, torch.inf)

    def fold(self, slots: Slots, probs: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"row": self._average_newest_row(probs, slots.positions.shape[1])}

    def _average_newest_row(self, rows: torch.Tensor, heads: int) -> torch.Tensor:
        """Return the row [B, heads, S] of the newest query, the last of ``rows`` [B, Hq, T, S], for each stored head.

        It is the mean over all query heads of the layer, or under ``per_head`` over those that share a stored head.
        """
        # A[h, n, :], with the axis of queries kept for ``group_rows``
        newest_row = rows[:, :, -1:]
        if not self.per_head:
            # 1/Hq * sum over heads h of A[h, n, :], the same for all stored heads (section 3.2)
            return newest_row[:, :, 0].mean(dim=1, keepdim=True).repeat(1, heads, 1)
        return group_rows(newest_row, heads)[:, :, 0]
