"""ThinK: drop the key channels that the recent queries hardly use (arXiv 2407.21018, section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbench.kv.observation import Needs, Observation
from kvbench.kv.segment import LayerCache
from kvbench.methods.core.knobs import at_least, knob
from kvbench.methods.core.pruner import ChannelPruner


@dataclass(frozen=True, kw_only=True)
class Think(ChannelPruner):
    """Score of channel j = ||Q[:, j]||_2 * ||K[:, j]||_2 for the last ``observed`` queries Q and the retained keys K.

    The logits Q K^T are the sum over channels of Q[:, j] K[:, j]^T. The score is the Frobenius norm of this share
    (section 3.2). Channels with the smallest scores are dropped. Under GQA the queries of a group are stacked in Q.

    observed: the number of last queries.
    """

    id: ClassVar[str] = "think"

    observed: int = knob(32, at_least(1, "queries"))

    def needs(self, n: int) -> Needs:
        return Needs(last_q=self.observed)

    def channel_scores(self, keys: torch.Tensor, cache: LayerCache, obs: Observation) -> torch.Tensor:
        q = obs.queries(self.observed).float()
        # the queries of a group are stacked: [H, group * w, D]
        stacked = q.reshape(cache.heads, -1, q.shape[-1])
        # ||Q[:, j] K[:, j]^T||_F = ||Q[:, j]||_2 ||K[:, j]||_2
        return stacked.norm(dim=1) * keys.norm(dim=1)
