"""KVzip: keep the keys and values that the model needs to repeat its prompt (arXiv 2505.23416, section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar

import torch

from kvbench.kv import ops
from kvbench.kv.observation import Observation
from kvbench.kv.segment import LayerCache
from kvbench.methods.core.contract import Capacity, Expected
from kvbench.methods.core.knobs import at_least, knob, one_of
from kvbench.methods.core.replaying import Replay, ReplayingSelector


@dataclass(frozen=True, kw_only=True)
class KVzip(ReplayingSelector):
    """Score of a key = max attention to it while the model reads the prompt again, behind the prompt's whole cache.

    The prompt is repeated chunk by chunk, one pass for each chunk. The maximum is over all queries of the pass that
    repeats the key's chunk, and over the query heads of its group. The softmax is over the first tokens, the chunk's
    cached keys and the pass's own keys. The question plays no part, so that one compression serves many questions. All
    layers stay dense until the passes are over. The passes cost about one more prefill and count as time of
    compression.

    A pair is the key and value of one token in one head of one layer. Of all N = L H n pairs of L layers and H heads
    the fraction r stays. It is kv_ratio, or C / n if the budget is in tokens.

    level ``pair``: the best pairs stay, whatever their layers and heads.
    level ``layer``: each layer keeps equally many (kvpress's ``layerwise``). ``uniform``: each head keeps equally many.
    level ``head``: the floor(r L H) heads with the highest score of any token keep all, others the first tokens only.
    count ``exact``: floor(r N) pairs stay, those of the first tokens among them.
    count ``paper``: the first tokens always stay and are not counted, as in released code. Of the N' other pairs those
    stay that score strictly higher than the pair at rank max(floor(r N') - 1, 0), counted from 0. All pairs that score
    the same as that one are lost.
    count ``code``: all but floor((1 - r) N) pairs stay, as in kvpress.
    """

    id: ClassVar[str] = "kvzip"
    rebalances: ClassVar[bool] = True
    ragged: ClassVar[bool] = True

    sinks: int = knob(4, at_least(1, "tokens"))
    chunk: int = knob(2048, at_least(1, "tokens"))
    instruction: str = knob("none", one_of("none", "plain", "chat"))
    level: str = knob("pair", one_of("pair", "layer", "uniform", "head"))
    count: str = knob("exact", one_of("exact", "paper", "code"))

    def check(self) -> None:
        super().check()
        self.require("count", self.level == "pair" or self.count == "exact", "exact, unless level=pair")

    def sink_size(self) -> int:
        return self.sinks

    def replay(self, n: int) -> Replay | None:
        if self.capacity(n).tokens >= n:
            return None
        return Replay(chunk=self.chunk, sinks=self.sinks, instruction=self.instruction)

    def count_staying(self, pairs: int, n: int) -> int:
        """Return how many of ``pairs`` competing pairs stay, for a prompt of n tokens.

        Under ``level=head`` whole heads compete, and ``pairs`` is the number of heads.
        """
        capacity = self.capacity(n)
        # share is r, the fraction of pairs that stays
        if self.kv_ratio is not None and not capacity.shrunk:
            # the decimal that was typed, which a float only comes near
            share = Fraction(str(self.kv_ratio))
        else:
            # the budget is in tokens, or the fraction was too small for sinks and one token more
            share = Fraction(capacity.tokens, n)
        if self.count == "code":
            # N - int(N c), as kvpress computes it with the float c = 1 - r that its user types
            return pairs - int(pairs * float(1 - share))
        # floor(r N)
        return int(share * pairs)

    def expected(self, n: int, layer: int, n_layers: int, heads: int) -> Expected | None:
        size = self.budget(n, layer, n_layers)
        if size >= n:
            return Expected.exactly(n, heads)
        if self.level == "uniform":
            return Expected.exactly(size, heads)
        # a head may keep any number of tokens between its sinks and all n
        sinks = self.capacity(n).sinks
        # only ``layer`` fixes the sum over heads; a budget must at least hold the sinks of the heads
        total = None
        if self.level == "layer":
            total = max(self.count_staying(heads * n, n), heads * sinks)
        return Expected(low=(sinks,) * heads, high=(n,) * heads, total=total)

    def expected_sum(self, n: int, n_layers: int, heads: int) -> int | None:
        frozen = sum(i < n_layers for i in self.frozen_layers)
        sharing = n_layers - frozen
        # where every layer keeps all tokens, ``expected`` fixes them; under count=paper they depend on equal scores
        if self.capacity(n).tokens >= n or not sharing or self.count == "paper":
            return None
        sinks = self.capacity(n).sinks
        frozen_tokens = frozen * heads * n
        sharing_heads = sharing * heads
        sink_tokens = sharing_heads * sinks
        if self.level == "head":
            # some heads keep all n tokens, and the others keep only their sinks
            full_heads = self.count_staying(sharing_heads, n)
            return frozen_tokens + sink_tokens + full_heads * (n - sinks)
        if self.level == "pair":
            return frozen_tokens + max(self.count_staying(sharing_heads * n, n), sink_tokens)
        # under the levels ``layer`` and ``uniform``, ``expected`` fixes the tokens of each layer
        return None

    def compress(self, cache: LayerCache, obs: Observation) -> LayerCache:
        # ``rebalance`` chooses, once the passes of ``replay`` have scored all layers
        return cache

    def rebalance(self, caches: Sequence[LayerCache], n_layers: int) -> list[LayerCache]:
        # the layers that the passes of ``replay`` have scored; a prompt within the budget needs no passes
        scored = [i for i, cache in enumerate(caches) if "score" in ops.only_segment(cache).state]
        # scores are final after the passes of ``replay``, and pairs compete over all layers
        if not scored or len(caches) < n_layers:
            return list(caches)
        # nothing reads the scores after this choice
        without_scores = []
        for cache in caches:
            segment = replace(ops.only_segment(cache), state={})
            without_scores.append(replace(cache, segments=(segment,)))
        sharing = [i for i in scored if i not in self.frozen_layers]
        if not sharing:
            return without_scores
        capacity = self.capacity(caches[0].prompt_tokens)
        # scores are [L, H, n] over the L layers that share the budget
        scores = torch.stack([ops.only_segment(caches[i]).state["score"] for i in sharing])
        trimmed = list(without_scores)
        for i, staying in zip(sharing, self.mark_staying(scores, capacity), strict=True):
            # the staying pairs of a head come first, in order of position
            order = (~staying).int().sort(dim=-1, stable=True).indices
            trimmed[i] = ops.select_first(without_scores[i], order, staying.sum(dim=-1))
        return trimmed

    def mark_staying(self, scores: torch.Tensor, capacity: Capacity) -> torch.Tensor:
        """Return a mask [L, H, n] of the pairs that stay, by their scores [L, H, n] over the L layers that compress."""
        # the sinks always stay; the caller's scores are left as they are
        scores = scores.clone()
        scores[..., : capacity.sinks] = torch.inf
        if self.count == "paper":
            return self._mark_above_threshold(scores, capacity.sinks)
        if self.level == "head":
            return self._mark_best_heads(scores, capacity.sinks)
        return self._mark_best_pairs(scores, capacity)

    def _mark_above_threshold(self, scores: torch.Tensor, sinks: int) -> torch.Tensor:
        """Return the mask [L, H, n] under ``count=paper``: the pairs that score above a threshold.

        scores: [L, H, n], with +inf for the first ``sinks`` tokens.
        """
        # of the N' pairs behind the sinks, those strictly above the pair of rank max(floor(r N') - 1, 0) stay
        ranked = scores[..., sinks:].flatten().sort(descending=True).values
        rank = max(self.count_staying(len(ranked), n=scores.shape[2]) - 1, 0)
        return scores > ranked[rank]

    def _mark_best_heads(self, scores: torch.Tensor, sinks: int) -> torch.Tensor:
        """Return the mask [L, H, n] under ``level=head``: all pairs of the best heads, and the sinks of the others.

        scores: [L, H, n], with +inf for the first ``sinks`` tokens.
        """
        layers, heads, n = scores.shape
        # a head's score is the highest score of its tokens; the floor(r L H) best heads keep all tokens
        head_scores = scores[..., sinks:].amax(dim=-1).flatten()
        by_score = head_scores.sort(descending=True, stable=True).indices
        best_heads = by_score[: self.count_staying(layers * heads, n)]
        keeps_all = torch.zeros_like(by_score, dtype=torch.bool)
        keeps_all[best_heads] = True
        return keeps_all.view(layers, heads, 1) | scores.isposinf()

    def _mark_best_pairs(self, scores: torch.Tensor, capacity: Capacity) -> torch.Tensor:
        """Return the mask [L, H, n] under the other levels: the best of the pairs that compete for each budget.

        scores: [L, H, n], with +inf for the sinks of ``capacity``.
        """
        layers, heads, n = scores.shape
        # each row has the pairs that compete for one budget: all pairs, a layer's pairs, or a head's pairs
        rows = {"pair": 1, "layer": layers, "uniform": layers * heads}[self.level]
        competing = scores.view(rows, -1)
        if self.level == "uniform":
            budget = capacity.tokens
        else:
            budget = self.count_staying(competing.shape[1], n)
        # a budget must at least hold the sinks of the heads that share it
        heads_per_row = layers * heads // rows
        budget = max(budget, heads_per_row * capacity.sinks)
        best = competing.sort(dim=-1, descending=True, stable=True).indices[:, :budget]
        return torch.zeros_like(competing, dtype=torch.bool).scatter_(1, best, True).view_as(scores)
