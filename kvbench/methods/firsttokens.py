"""The first tokens alone: a negative control that every useful method must beat.

It has no paper: it is StreamingLLM (arXiv 2309.17453) with sinks and without recent tokens. A prompt's question and
most of its text are gone, so a score that this control reaches was not earned by what a cache holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbench.kv.observation import Observation
from kvbench.kv.segment import LayerCache
from kvbench.methods.core.base import Selector
from kvbench.methods.core.contract import Capacity


@dataclass(frozen=True, kw_only=True)
class FirstTokens(Selector):
    """Keep the first C tokens of the prompt, the same in every head: score_j = -j for the token at position j."""

    id: ClassVar[str] = "firsttokens"
    shared: ClassVar[bool] = True

    def scores(self, cache: LayerCache, obs: Observation, capacity: Capacity) -> torch.Tensor:
        """Return the scores [1, n], one row for all heads."""
        return -torch.arange(obs.n, device=cache.segments[0].k.device)[None]
