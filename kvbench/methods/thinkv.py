"""ThinK-V: drop value channels, too, those that hardly reach the output (arXiv 2407.21018, appendix D)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbench.kv import ops
from kvbench.kv.observation import Observation
from kvbench.kv.scale import capped, sinks_of, softmax
from kvbench.kv.segment import LayerCache
from kvbench.methods.core.knobs import knob, make_fraction_rule
from kvbench.methods.core.pruner import count_head_tokens, pad_heads
from kvbench.methods.think import Think


@dataclass(frozen=True, kw_only=True)
class ThinkV(Think):
    """Score of value channel j = ||A V[:, j]||_2, its share of the last queries' outputs (eq. 3). Keys are as in ThinK.

    A holds the attention rows of the last ``observed`` queries over the retained tokens that they see, computed with
    all channels of the keys. V holds the values of these tokens. Value channels with the smallest scores are dropped.
    Under GQA the rows of a group are stacked in A. No code was released. Our choices are to select tokens first, to
    keep A causal, and to score only the values that a quantiser packs.

    value_ratio: the fraction of value channels removed, as ``ratio`` is of key channels.
    """

    id: ClassVar[str] = "thinkv"

    ratio: float = 0.3
    value_ratio: float = knob(0.3, make_fraction_rule("value"))

    def kept_values(self, head_dim: int) -> int:
        return self.count_channels(self.value_ratio, head_dim)

    def value_scores(self, cache: LayerCache, obs: Observation, counted: torch.Tensor) -> torch.Tensor:
        segment, heads = ops.only_segment(cache), cache.heads
        v = pad_heads(segment.v, segment.lengths, heads)
        visible = self._mark_visible(cache, obs)
        # A [H, group, w, L], of which only the tokens ``counted`` have a weight; this also clears the NaN of queries
        # that see no retained token
        attention = self._compute_attention(cache, obs, visible)
        attention = attention.masked_fill(~(visible & counted[:, None])[:, None], 0)
        # ||A V[:, j]||_2, eq. 3, with the queries of a group stacked: [H, group * w, D]
        outputs = attention.flatten(1, 2) @ v.float()
        return outputs.norm(dim=1)

    def _mark_visible(self, cache: LayerCache, obs: Observation) -> torch.Tensor:
        """Return a mask [H, w, L] of the retained tokens that each of the last w queries sees: none after its own."""
        segment = ops.only_segment(cache)
        positions = pad_heads(segment.positions, segment.lengths, cache.heads)
        # filled [H, L]: slots behind the last token of a ragged head are padding
        slots = torch.arange(positions.shape[1], device=positions.device)
        token_counts = torch.tensor(count_head_tokens(cache), device=positions.device)
        filled = slots < token_counts[:, None]
        # the queries are those of the layer's last w tokens
        w = obs.queries(self.observed).shape[1]
        query_positions = obs.token_positions(positions.device)[obs.n - w :]
        return (positions[:, None] <= query_positions[:, None]) & filled[:, None]

    def _compute_attention(self, cache: LayerCache, obs: Observation, visible: torch.Tensor) -> torch.Tensor:
        """Return the attention rows A [H, group, w, L] of the last w queries over the tokens that they see.

        A query that sees no token has a row of NaN.

        visible: [H, w, L], the tokens that each query sees.
        """
        segment, heads = ops.only_segment(cache), cache.heads
        q = obs.queries(self.observed)
        k = pad_heads(segment.k, segment.lengths, heads)
        # A = softmax(scale q k^T) over the tokens seen, [H, group, w, L]
        scaled = (q.float() * obs.scale).reshape(heads, -1, q.shape[2])
        logits = capped(scaled @ k.float().transpose(1, 2), obs.scale).view(heads, -1, *visible.shape[1:])
        masked_logits = logits.masked_fill(~visible[:, None], -torch.inf)
        # [H, group, w, L] becomes [Hq, w, L], because each query head has its own sink
        return softmax(masked_logits.flatten(0, 1), sinks_of(obs.scale)).view(masked_logits.shape)
