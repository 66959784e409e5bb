"""AdaKV: the heads of a layer share one budget, wide ones keep more than sharp ones (arXiv 2407.11550, section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbench.kv import ops
from kvbench.kv.apportion import round_shares
from kvbench.kv.segment import LayerCache
from kvbench.methods.core.contract import Expected, top_indices
from kvbench.methods.core.knobs import Rule, knob, one_of
from kvbench.methods.snapkv import SnapKV


@dataclass(frozen=True, kw_only=True)
class AdaKV(SnapKV):
    """SnapKV's scores under a budget that the H heads of a layer share: C * H tokens together, C per head on average.

    Every head keeps the window, its last w tokens. The heads share B * H other tokens, B = C - w for each on average.
    The tokens of all heads are ranked together by their scores. B_h is the number of tokens of head h among the B * H
    best. Ties go to the lower head, then to the lower position. Heads are stored one after the other, without
    padding.

    floor: the fraction of an even share that every head gets in any case.
    floor_rule: ``mixed`` gives head h, beside its window, (1 - floor) * B_h + floor * B tokens. The paper (algorithm 2)
    and its released code do so. Numbers are rounded to whole tokens, and their sum is exact. ``safe`` keeps each head's
    floor * C best tokens and lets all other tokens compete, as kvpress does.
    """

    id: ClassVar[str] = "adakv"

    floor: float = knob(0.2, Rule("a fraction of an even share, 0 to 1 (1: even shares)", lambda x: 0 <= x <= 1))
    floor_rule: str = knob("mixed", one_of("mixed", "safe"))

    def expected(self, n: int, layer: int, n_layers: int, heads: int) -> Expected | None:
        size = self.budget(n, layer, n_layers)
        if size >= n:
            return Expected.exactly(n, heads)
        window = self.capacity(n).window
        if self.floor_rule == "mixed":
            # each head gets its window and floor * B other tokens
            least = window + int(self.floor * (size - window))
        else:
            # each head gets floor * C tokens in all, and its window even if that is more
            least = max(window, int(self.floor * size))
        # at most, one head wins all B * H tokens that the heads share
        most = min(n, window + (size - window) * heads)
        return Expected(low=(least,) * heads, high=(most,) * heads, total=size * heads)

    def pick(self, cache: LayerCache, scores: torch.Tensor, budget: int) -> LayerCache:
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        return ops.select_first(cache, order, self._count_tokens(scores, budget))

    def _count_tokens(self, scores: torch.Tensor, budget: int) -> torch.Tensor:
        """Return how many tokens each head keeps [H]. The mean over heads is ``budget``.

        scores [H, n] are +inf for the tokens of the window, which always stay.
        """
        heads, n = scores.shape
        # every head has the same window, so the first head tells its size
        window = int(scores[0].isposinf().sum())
        if self.floor_rule == "safe":
            # each head's floor * C best tokens stay, whatever the scores of other heads
            safe_tokens = top_indices(scores, int(self.floor * budget))
            scores = scores.scatter(-1, safe_tokens, torch.inf)
        # the C * H best tokens of the layer: entry h n + j of the flattened scores is token j of head h
        best_of_layer = scores.flatten().sort(descending=True, stable=True).indices[: budget * heads]
        # among them head h has B_h + w, its window included
        counts = torch.bincount(best_of_layer // n, minlength=heads)
        if self.floor_rule == "safe":
            return counts
        # algorithm 2: head h gets (1 - floor) * B_h + floor * B tokens beside its window, with B = C - w
        mean_beside_window = budget - window
        shares = []
        for count in counts.tolist():
            won_beside_window = count - window
            shares.append((1 - self.floor) * won_beside_window + self.floor * mean_beside_window)
        return window + torch.tensor(round_shares(shares, mean_beside_window * heads), device=scores.device)
