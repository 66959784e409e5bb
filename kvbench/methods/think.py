"""ThinK: drop the key channels that the recent queries hardly use (arXiv 2407.21018, section 3)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from kvbench.cache import ops
from kvbench.methods.base import Block, Role, Stage, top_indices
from kvbench.types import LayerCache, Needs, Observation, per_head


@dataclass(frozen=True, kw_only=True)
class ChannelPruner(Stage):
    """A stage that keeps T of D key channels of all tokens but the last ``recent``. Knobs:

    ratio: fraction of channels removed, 0 <= ratio < 1. recent: last tokens whose keys stay whole.
    rounding: ``code`` keeps T = D - int(ratio * D) as released code does, ``paper`` floor((1 - ratio) * D).
    """

    role: ClassVar[Role] = "prune"

    ratio: float = 0.4
    recent: int = 32
    rounding: str = "code"

    def __post_init__(self) -> None:
        ok = isinstance(self.ratio, (int, float)) and 0 <= self.ratio < 1
        self.require("ratio", ok, "a fraction of the key channels removed, at least 0 and below 1")
        self.require("recent", isinstance(self.recent, int) and self.recent >= 0, "a whole number of tokens, 0 or more")
        self.require("rounding", self.rounding in ("code", "paper"), "code or paper")

    def kept_channels(self, head_dim: int) -> int:
        """T, the key channels that stay (at least one)."""
        exact = (1 - self.ratio) * head_dim
        kept = int(exact + 1e-9) if self.rounding == "paper" else head_dim - int(self.ratio * head_dim)
        return max(1, kept)

    def layout(self, blocks: list[Block], head_dim: int, itemsize: int) -> list[Block]:
        (whole,) = blocks
        kept = self.kept_channels(head_dim)
        if kept == head_dim or whole.slots <= self.recent:
            return blocks
        thin = replace(whole, slots=whole.slots - self.recent, key_bytes=kept * itemsize, fixed_overhead=2 * kept)
        return [thin, *([replace(whole, slots=self.recent)] if self.recent else [])]

    def channel_scores(self, keys: torch.Tensor, cache: LayerCache, obs: Observation) -> torch.Tensor:
        """How much each key channel matters, [H, D]; keys [H, L, D] fp32 with zeros in padding."""
        raise TypeError(f"{type(self).__name__} does not say how it scores channels")

    def compress(self, cache: LayerCache, obs: Observation) -> LayerCache:
        segment = ops.only_segment(cache)
        kept = self.kept_channels(segment.k.shape[2])
        if kept == segment.k.shape[2] or segment.tokens <= self.recent:
            return cache
        lengths = segment.lengths
        keys = (per_head(segment.k, cache.heads) if lengths is None else ops.by_head(segment.k, lengths)).float()
        channels = top_indices(self.channel_scores(keys, cache, obs), kept)
        return ops.prune_keys(cache, channels, self.recent)


@dataclass(frozen=True, kw_only=True)
class Think(ChannelPruner):
    """Score of channel j = norm of the last queries' j-th entries times norm of the retained keys' j-th entries.

    That is the Frobenius norm of the channel's share of the logits (section 3.2). Under GQA the queries of a
    group are stacked. observed: last queries that are read, the paper's S_obs.
    """

    id: ClassVar[str] = "think"

    observed: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("observed", isinstance(self.observed, int) and self.observed >= 1, "a whole number, 1 or more")

    def needs(self, n: int) -> Needs:
        return Needs(last_q=self.observed)

    def channel_scores(self, keys: torch.Tensor, cache: LayerCache, obs: Observation) -> torch.Tensor:
        q = obs.queries(self.observed).float()
        stacked = q.reshape(cache.heads, -1, q.shape[-1])
        return stacked.norm(dim=1) * keys.norm(dim=1)
