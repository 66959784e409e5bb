"""SnapKV: keep the tokens that the last queries attend to, smoothed over neighbours (arXiv 2404.14469, section 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbench.kv.observation import Needs, Observation
from kvbench.kv.segment import LayerCache
from kvbench.methods.core.base import Selector
from kvbench.methods.core.contract import Capacity
from kvbench.methods.core.knobs import ODD, at_least, knob, one_of
from kvbench.methods.core.statistics import group_mean, pool, window_rows


@dataclass(frozen=True, kw_only=True)
class SnapKV(Selector):
    """Score of token j = attention summed over the last ``window`` queries, pooled over ``kernel`` neighbours.

    A[h, i, j] is the attention weight of query i of head h on token j. S[h, j] = sum over the w queries i of the window
    of A[h, i, j], averaged over the query heads of a group. The score is the maximum of S[h, l] over the neighbours
    |l - j| <= kernel // 2, or their mean with ``pooling=avg``. The window, the last w tokens, always stays.
    """

    id: ClassVar[str] = "snapkv"

    window: int = knob(32, at_least(1, "tokens"))
    kernel: int = knob(7, ODD)
    pooling: str = knob("max", one_of("max", "avg"))

    def window_size(self) -> int:
        return self.window

    def needs(self, n: int) -> Needs:
        return Needs(last_q=self.window)

    def scores(self, cache: LayerCache, obs: Observation, capacity: Capacity) -> torch.Tensor:
        def score_tokens() -> torch.Tensor:
            """Return the scores [heads, n], with 0 for the window."""
            # S[h, j] = sum over the w window queries i of A[h, i, j], for the tokens before the window
            received = window_rows(cache, obs, capacity.window).sum(dim=1)[:, : obs.n - capacity.window]
            smooth = pool(group_mean(received, cache.heads), self.kernel, self.pooling)
            return torch.nn.functional.pad(smooth, (0, capacity.window))

        # chains of other budgets share the scores, which depend on nothing but the layer and this key
        return obs.once((SnapKV, capacity.window, self.kernel, self.pooling, cache.heads), score_tokens)
