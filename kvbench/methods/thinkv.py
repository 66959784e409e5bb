"""ThinK-V: drop value channels, too, those that hardly reach the output (arXiv 2407.21018, appendix D)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbench.kv import ops
from kvbench.kv.observation import Observation
from kvbench.kv.scale import capped
from kvbench.kv.segment import LayerCache
from kvbench.methods.core.knobs import knob
from kvbench.methods.core.pruner import head_lengths, pad_heads, removed_fraction
from kvbench.methods.think import Think


@dataclass(frozen=True, kw_only=True)
class ThinkV(Think):
    """Score of value channel j = ||A V[:, j]||_2, its share of the last queries' outputs (eq. 3). Keys are as in ThinK.

    A holds the attention rows of the last ``observed`` queries over the retained tokens that they see, with all
    channels of the keys. Under GQA the rows of a group are stacked. No code was released. To select tokens first, to
    keep A causal and to score only the values that a quantiser packs are our choices.
    """

    id: ClassVar[str] = "thinkv"

    ratio: float = 0.3
    value_ratio: float = knob(0.3, removed_fraction("value"))

    def kept_values(self, head_dim: int) -> int:
        return self.count_channels(self.value_ratio, head_dim)

    def value_scores(self, cache: LayerCache, obs: Observation, counted: torch.Tensor) -> torch.Tensor:
        s = ops.only_segment(cache)
        heads, q = cache.heads, obs.queries(self.observed)
        keys, values, positions = (pad_heads(t, s.lengths, heads) for t in (s.k, s.v, s.positions))
        slots = torch.arange(keys.shape[1], device=keys.device)
        filled = slots < torch.tensor(head_lengths(cache), device=keys.device)[:, None]
        query_positions = obs.token_positions(keys.device)[obs.n - q.shape[1] :]
        visible = (positions[:, None] <= query_positions[:, None]) & filled[:, None]  # [H, w, L]
        # A = softmax(q k^T) over the tokens seen
        scaled = (q.float() * obs.scale).reshape(heads, -1, q.shape[2])
        logits = capped(scaled @ keys.float().transpose(1, 2), obs.scale)
        probs = logits.view(heads, -1, *visible.shape[1:]).masked_fill(~visible[:, None], -torch.inf).softmax(dim=-1)
        # also clears the rows of queries that see no retained token
        probs = probs.masked_fill(~(visible & counted[:, None])[:, None], 0)
        # ||A V[:, j]||_2, eq. 3
        return (probs.flatten(1, 2) @ values.float()).norm(dim=1)
