"""KVzip: keep the keys and values that the model needs to repeat its prompt (arXiv 2505.23416, section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from kvbench.kv import ops
from kvbench.kv.observation import Observation
from kvbench.kv.segment import LayerCache
from kvbench.methods.core.base import Capacity, Expected
from kvbench.methods.core.knobs import at_least, knob, one_of
from kvbench.methods.core.replaying import Replay, ReplayingSelector


@dataclass(frozen=True, kw_only=True)
class KVzip(ReplayingSelector):
    """Score of a key = max attention to it while the model reads the prompt again, behind the prompt's whole cache.

    The maximum is over all queries of the pass that repeats the key's chunk and over the query heads of its group; the
    softmax is over the first tokens, the chunk's cached keys and those of the pass itself. The question plays no part,
    so that one compression serves many. All layers stay dense until the passes are over, which cost about one more
    prefill and count as time of compression.

    level ``pair``: the best of all N = L H n pairs of keys and values, whatever their layers and heads.
    level ``layer``: each layer keeps as many (kvpress's ``layerwise``); ``uniform``: each head.
    level ``head``: the floor(r L H) heads with the highest score of any token keep all, others the first tokens only.
    count ``exact``: floor(r N) pairs, the first tokens among them; r = C / n where the budget is in tokens.
    count ``paper``: as the released code, pairs strictly above that of rank max(floor(r N') - 1, 0), with ties all
        lost, of the N' pairs behind the first tokens, which are not counted.
    count ``code``: as kvpress, all but floor((1 - r) N) pairs.
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
        return None if self.capacity(n).tokens >= n else Replay(self.chunk, self.sinks, self.instruction)

    def kept_of(self, pairs: int, n: int) -> int:
        """Return how many of ``pairs`` stay of a prompt of n tokens."""
        capacity = self.capacity(n)
        share = capacity.tokens / n if self.kv_ratio is None or capacity.shrunk else self.kv_ratio
        if self.count == "code":
            return pairs - int(pairs * (1 - share))
        return int(share * pairs + 1e-9)  # 1e-9: a product that should be whole

    def expected(self, n: int, layer: int, n_layers: int, heads: int) -> Expected | None:
        size = self.budget(n, layer, n_layers)
        if size >= n:
            return Expected.exactly(n, heads)
        if self.level == "uniform":
            return Expected.exactly(size, heads)
        total = max(self.kept_of(heads * n, n), heads * self.capacity(n).sinks) if self.level == "layer" else None
        return Expected((self.capacity(n).sinks,) * heads, (n,) * heads, total)

    def expected_sum(self, n: int, n_layers: int, heads: int) -> int | None:
        frozen = sum(i < n_layers for i in self.frozen_layers)
        sharing = n_layers - frozen
        if self.capacity(n).tokens >= n or not sharing or self.count == "paper":
            return None
        least = sharing * heads * self.capacity(n).sinks
        if self.level == "head":
            whole = self.kept_of(sharing * heads, n)
            return frozen * heads * n + least + whole * (n - self.capacity(n).sinks)
        return None if self.level != "pair" else frozen * heads * n + max(self.kept_of(sharing * heads * n, n), least)

    def compress(self, cache: LayerCache, obs: Observation) -> LayerCache:
        return cache

    def rebalance(self, caches: Sequence[LayerCache], n_layers: int) -> list[LayerCache]:
        sharing = [i for i, c in enumerate(caches) if "score" in ops.only_segment(c).state]
        if not sharing or len(caches) < n_layers:
            return list(caches)
        plain = [replace(c, segments=(replace(ops.only_segment(c), state={}),)) for c in caches]
        sharing = [i for i in sharing if i not in self.frozen_layers]
        n = caches[0].prompt_tokens
        capacity = self.capacity(n)
        scores = torch.stack([ops.only_segment(caches[i]).state["score"] for i in sharing]) if sharing else None
        for i, kept in zip(sharing, () if scores is None else self.kept(scores, capacity), strict=True):
            order = (~kept).int().sort(dim=-1, stable=True).indices
            plain[i] = ops.select_first(plain[i], order, kept.sum(dim=-1))
        return plain

    def kept(self, scores: torch.Tensor, capacity: Capacity) -> torch.Tensor:
        """Return which pairs [L, H, n] stay, by their scores [L, H, n]."""
        layers, heads, n = scores.shape
        scores = scores.clone()
        scores[..., : capacity.sinks] = torch.inf
        if self.count == "paper":
            ranked = scores[..., capacity.sinks :].flatten().sort(descending=True).values
            return scores > ranked[max(self.kept_of(len(ranked), n) - 1, 0)]
        if self.level == "head":
            best = scores[..., capacity.sinks :].amax(dim=-1).flatten().sort(descending=True, stable=True).indices
            whole = torch.zeros_like(best, dtype=torch.bool).scatter_(0, best[: self.kept_of(len(best), n)], True)
            return whole.view(layers, heads, 1) | scores.isposinf()
        # the pairs that compete with each other, one row for each budget
        rows = {"pair": 1, "layer": layers, "uniform": layers * heads}[self.level]
        competing = scores.view(rows, -1)
        total = capacity.tokens if self.level == "uniform" else self.kept_of(competing.shape[1], n)
        total = max(total, layers * heads // rows * capacity.sinks)
        best = competing.sort(dim=-1, descending=True, stable=True).indices[:, :total]
        return torch.zeros_like(competing, dtype=torch.bool).scatter_(1, best, True).view_as(scores)
