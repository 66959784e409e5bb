"""ReFreeKV: drop tokens as long as their share of the attention is small, no budget (arXiv 2502.16886, section 2.2).

The published code is the default, as the paper leaves some steps open. Readings of the paper are knobs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbench.kv import ops
from kvbench.kv.observation import Needs, Observation
from kvbench.kv.segment import LayerCache
from kvbench.methods.core.base import TokenSelector
from kvbench.methods.core.contract import Expected
from kvbench.methods.core.knobs import Rule, at_least, knob, one_of
from kvbench.methods.core.statistics import group_mean, window_sums


@dataclass(frozen=True, kw_only=True)
class ReFreeKV(TokenSelector):
    """Rank tokens, and keep the shortest beginning of the ranking that loses at most T of the attention's norm.

    The first m tokens rank first, then the newest token and so on back to token m. a is the attention that each token
    received from the last ``k`` queries, in the order of the ranking: the mean over those of them that see the token.
    Keeping the first i tokens loses 1 - ||a_1..i||_2 / ||a||_2 of its norm. The number of tokens kept therefore
    depends on the prompt, layer by layer.

    mode: with ``code``, the first m tokens always stay and are left out of both norms. Each norm is the mean over all
    query heads, and one number of tokens holds for the layer. ``eq1`` is the paper's equations: the first m compete
    with the others, and the loss is strictly below T.
    reduce: with ``eq1``, how the heads of a layer agree on a number. ``mean_heads`` takes the mean of their attention,
    ``max_heads`` the number of the head that keeps most. With ``per_head`` each stored head has its own number.
    order: with ``eq1``, ``sinks_last`` moves the first m tokens to the end of the sum. The number kept is then the
    place, counted from 0, at which the sum suffices. This gives the n - m tokens of the paper's appendix B.
    ranking: ``attention`` ranks the tokens after the first m by the mean attention that they received from all queries.
    """

    id: ClassVar[str] = "refreekv"

    T: float = knob(0.01, Rule("a tolerated loss, 0 or more and below 1 (0 keeps everything)", lambda x: 0 <= x < 1))
    m: int = knob(4, at_least(0, "tokens"))
    k: int | float = 1
    mode: str = knob("code", one_of("code", "eq1"))
    reduce: str = knob("mean_heads", one_of("mean_heads", "max_heads", "per_head"))
    order: str = knob("sinks_first", one_of("sinks_first", "sinks_last"))
    ranking: str = knob("position", one_of("position", "attention"))
    frozen_layers: tuple[int, ...] = (0, 1)

    def check(self) -> None:
        is_count = isinstance(self.k, int) and self.k >= 1
        is_fraction = isinstance(self.k, float) and 0 < self.k < 1
        allowed = "a whole number of queries, 1 or more, or a fraction of the prompt below 1"
        self.require("k", is_count or is_fraction, allowed)
        self.require("reduce", self.mode == "eq1" or self.reduce == "mean_heads", "an option of mode=eq1 only")
        self.require("order", self.mode == "eq1" or self.order == "sinks_first", "an option of mode=eq1 only")
        super().check()

    def check_layers(self, n_layers: int) -> None:
        # the default names the first two layers, of which a small model may have only one
        if self.frozen_layers != (0, 1):
            super().check_layers(n_layers)

    def count_queries(self, n: int) -> int:
        """Return how many last queries of a prompt of n tokens have their attention averaged."""
        if isinstance(self.k, int):
            return min(n, self.k)
        # floor(k n), at least 1; 1e-9: a product that should be whole must not be cut to the number below
        return max(1, int(self.k * n + 1e-9))

    def needs(self, n: int) -> Needs:
        return Needs(last_q=self.count_queries(n), colsums=self.ranking == "attention")

    def keeps_all(self, n: int, layer: int) -> bool:
        """Return True if the layer keeps all n tokens whatever their attention.

        This is so in a frozen layer, for prompts of at most m tokens, and with the threshold T = 0.
        """
        return layer in self.frozen_layers or n <= self.m or self.T == 0

    def expected(self, n: int, layer: int, n_layers: int, heads: int) -> Expected | None:
        if self.keeps_all(n, layer):
            return Expected.exactly(n, heads)
        # ``code`` always keeps the first m tokens and one more; under eq. 1 the first m compete
        least = self.m + 1 if self.mode == "code" else 1
        return Expected(low=(least,) * heads, high=(n,) * heads)

    def compress(self, cache: LayerCache, obs: Observation) -> LayerCache:
        if self.keeps_all(obs.n, obs.layer):
            return cache
        count = self.count_queries(obs.n)
        order = self._rank_tokens(obs, ops.only_segment(cache).k.device)
        # the queries j .. n - 1 see token j, and the last ``count`` of them are read
        seen_by = torch.arange(obs.n, 0, -1, device=order.device).clamp(max=count)
        # a[h, j] = mean over these queries i of A[h, i, j]
        attention = window_sums(cache, obs, count) / seen_by
        attention = attention[:, order].double()
        if self.mode == "code":
            counts = self._count_by_code(attention)
        else:
            counts = self._count_by_equation(attention, cache.heads)
        # one order for all heads; a single count keeps the same tokens in all of them
        return ops.select_first(cache, order.expand(len(counts), -1), counts)

    def _rank_tokens(self, obs: Observation, device: torch.device) -> torch.Tensor:
        """Return the indices [n] of all tokens in the order of the ranking. Those that come first are kept first."""
        if self.ranking == "position":
            # from the newest token back to token m
            after_first = torch.arange(obs.n - 1, self.m - 1, -1, device=device)
        else:
            # the attention that token j received, as the mean over all heads and over the n - j queries that see it
            seen_by = torch.arange(obs.n, 0, -1, device=device)
            received = obs.received().mean(dim=0) / seen_by
            after_first = self.m + received[self.m :].sort(descending=True, stable=True).indices
        return torch.cat([torch.arange(self.m, device=device), after_first])

    def _count_by_code(self, attention: torch.Tensor) -> torch.Tensor:
        """Return how many tokens are kept under mode ``code``: one number for the layer [1].

        attention: [Hq, n], in the order of the ranking, with n above m.
        """
        # norms[i - 1] = ||a_1..i||_2 of the first i tokens behind the first m, the mean over heads
        norms = attention[:, self.m :].square().cumsum(dim=1).sqrt().mean(dim=0)
        # i tokens are too few while their loss (||a||_2 - ||a_1..i||_2) / ||a||_2 is above T
        losses = (norms[-1] - norms) / norms[-1]
        too_few = losses > self.T
        # losses fall with i, so the sum is the largest number that is too few; beside the first m, one more stays
        return self.m + 1 + too_few.sum()[None]

    def _count_by_equation(self, attention: torch.Tensor, heads: int) -> torch.Tensor:
        """Return how many tokens are kept under mode ``eq1``: one number for the layer [1], or one a head [heads].

        attention: [Hq, n], in the order of the ranking, with n above m.
        heads: the number of stored heads.
        """
        n = attention.shape[1]
        if self.reduce == "mean_heads":
            attention = attention.mean(dim=0, keepdim=True)
        elif self.reduce == "per_head":
            attention = group_mean(attention, heads)
        if self.order == "sinks_last":
            # the first m tokens move behind all others
            attention = attention.roll(-self.m, dims=1)
        # squared_norms[i - 1] = ||a_1..i||_2^2 of the first i tokens
        squared_norms = attention.square().cumsum(dim=1)
        # i tokens are too few unless 1 - ||a_1..i||_2 / ||a||_2 < T, eq. 1
        losses = 1 - (squared_norms / squared_norms[:, -1:]).sqrt()
        too_few = losses >= self.T
        # losses fall with i, so the sum is the largest number that is too few, and the place of the last token needed
        counts = too_few.sum(dim=1)
        if self.order == "sinks_first":
            # the number of tokens is one more than the place of the last of them
            counts = counts + 1
        # ``sinks_last`` may count 0, but at least one token stays
        counts = counts.clamp(1, n)
        if self.reduce == "max_heads":
            return counts.amax(dim=0, keepdim=True)
        return counts
