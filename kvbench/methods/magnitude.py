"""l1, l2: drop the key channels of smallest magnitude, whatever the queries are (arXiv 2407.21018, section 3.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbench.kv.observation import Observation
from kvbench.kv.segment import LayerCache
from kvbench.methods.core.pruner import ChannelPruner


@dataclass(frozen=True, kw_only=True)
class Magnitude(ChannelPruner):
    """Score of channel j = ||K[:, j]||_p over the retained tokens (section 3.1, eq. 1). All else is as in ThinK.

    rounding: ``paper`` by default, because the paper keeps floor((1 - ratio) * D) channels and released no code
    for this criterion.
    """

    # subclasses set the order of the norm
    p: ClassVar[int]

    rounding: str = "paper"

    def channel_scores(self, keys: torch.Tensor, cache: LayerCache, obs: Observation) -> torch.Tensor:
        # ||K[:, j]||_p over the L tokens of keys [H, L, D], eq. 1
        return torch.linalg.vector_norm(keys, ord=self.p, dim=1)


@dataclass(frozen=True, kw_only=True)
class L1(Magnitude):
    """Sum of absolute key entries per channel (arXiv 2407.21018, eq. 1 with p = 1)."""

    id: ClassVar[str] = "l1"
    p: ClassVar[int] = 1


@dataclass(frozen=True, kw_only=True)
class L2(Magnitude):
    """Euclidean norm of the key entries per channel (arXiv 2407.21018, eq. 1 with p = 2)."""

    id: ClassVar[str] = "l2"
    p: ClassVar[int] = 2
