"""AdaKV: the heads of a layer share one budget, wide ones keep more than sharp ones (arXiv 2407.11550, section 3)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from kvbench.cache import ops
from kvbench.cache.apportion import whole_shares
from kvbench.cache.segment import LayerCache
from kvbench.methods.base import Expected, top_indices
from kvbench.methods.snapkv import SnapKV

FLOORS = ("mixed", "safe")


@dataclass(frozen=True, kw_only=True)
class AdaKV(SnapKV):
    """SnapKV's scores, but the C tokens per head are a mean: the H heads of a layer keep C * H of them together.

    Of the B = C - w tokens per head beside the window, head h would get B_h, its tokens among the B * H best of the
    layer (ties to the lower head, then the lower position). Heads are stored one after the other, without padding.

    floor: fraction of an even share that every head keeps, 0 to 1; 1 is SnapKV.
    floor_rule: ``mixed`` gives head h (1 - floor) * B_h + floor * B, as the paper (algorithm 2) and its released code,
    here in whole tokens whose sum is exact; ``safe`` keeps each head's floor * C best and lets all others compete, as
    kvpress does.
    """

    id: ClassVar[str] = "adakv"

    floor: float = 0.2
    floor_rule: str = "mixed"

    def check(self) -> None:
        self.require("floor", 0 <= self.floor <= 1, "a fraction of an even share, 0 to 1 (1: even shares)")
        self.require("floor_rule", self.floor_rule in FLOORS, " or ".join(FLOORS))
        super().check()

    def expected(self, n: int, layer: int, n_layers: int, heads: int) -> Expected | None:
        size = self.budget(n, layer, n_layers)
        if size >= n:
            return Expected.exactly(n, heads)
        window = self.capacity(n).window
        least = int(self.floor * size) if self.floor_rule == "safe" else window + int(self.floor * (size - window))
        most = min(n, window + (size - window) * heads)
        return Expected((max(least, window),) * heads, (most,) * heads, size * heads)

    def pick(self, cache: LayerCache, scores: torch.Tensor, budget: int) -> LayerCache:
        sizes = self._sizes(scores, budget)
        # each head's order by score, of which it keeps the first, ascending; what is not kept sorts behind
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        dropped = torch.arange(scores.shape[1], device=scores.device) >= sizes[:, None]
        index = order.masked_fill(dropped, scores.shape[1]).sort(dim=-1).values[:, : int(sizes.max())]
        kept = ops.select(cache, index.clamp(max=scores.shape[1] - 1), sizes)
        return replace(kept, decided=tuple(sizes.tolist()))

    def _sizes(self, scores: torch.Tensor, budget: int) -> torch.Tensor:
        """Tokens that each head keeps, ``budget`` on average, by scores [H, n] with +inf for the protected."""
        heads, n = scores.shape
        protected = int(scores[0].isposinf().sum())
        if self.floor_rule == "safe":
            scores = scores.scatter(-1, top_indices(scores, int(self.floor * budget)), torch.inf)
        joint = scores.flatten().sort(descending=True, stable=True).indices[: budget * heads]
        counts = torch.bincount(joint // n, minlength=heads)
        if self.floor_rule == "safe":
            return counts
        free = budget - protected
        wanted = [(1 - self.floor) * (c - protected) + self.floor * free for c in counts.tolist()]
        return protected + torch.tensor(whole_shares(wanted, free * heads), device=scores.device)
