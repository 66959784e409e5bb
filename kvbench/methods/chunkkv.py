"""ChunkKV: keep whole chunks of neighbouring tokens by the attention that they receive (arXiv 2502.00299)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F

from kvbench.base.numbers import ceil_div
from kvbench.kv import ops
from kvbench.kv.observation import Observation
from kvbench.kv.segment import LayerCache
from kvbench.methods.core.contract import Capacity, Expected, top_indices
from kvbench.methods.core.knobs import ODD, at_least, knob, one_of
from kvbench.methods.snapkv import SnapKV


@dataclass(frozen=True, kw_only=True)
class ChunkKV(SnapKV):
    """Score of a chunk = mean of its tokens' SnapKV scores over all heads. All heads keep the same chunks.

    A chunk is ``chunk`` consecutive tokens, and the last one may be shorter. In a prompt that is shorter than a chunk
    each token is a chunk of its own.

    variant ``fill``: the last w tokens (the window) and the best chunks before them. Where the next best chunk no
    longer fits, its first tokens stay, so that each head keeps exactly C tokens.
    variant ``paper``: the window and the best floor((C - w) / chunk) whole chunks before it. A shorter last chunk
    counts as one. Its score is divided by the length of a full chunk as well.
    variant ``code``: the best max(1, floor(chunks * C / n)) chunks of the whole prompt, as kvpress keeps them. The
    window has no place of its own, but its tokens get the highest score of all.
    reuse: groups of this many neighbouring layers keep the chunks of their first layer.
    """

    id: ClassVar[str] = "chunkkv"
    shared: ClassVar[bool] = True

    chunk: int = knob(10, at_least(1, "tokens"))
    kernel: int = knob(1, ODD)
    variant: str = knob("fill", one_of("fill", "paper", "code"))
    reuse: int = knob(1, at_least(1, "layers"))

    @property
    def rebalances(self) -> bool:  # type: ignore[override]
        # an attribute of the class elsewhere; here it follows from a knob
        return self.reuse > 1

    @property
    def whole(self) -> bool:
        """True if the variant keeps only whole chunks, so that a head may hold a few tokens more or fewer than C."""
        return self.variant != "fill"

    def window_size(self) -> int:
        # kvpress protects the window only through its scores
        return 0 if self.variant == "code" else self.window

    def chunk_length(self, n: int) -> int:
        """Return how many tokens a chunk has in a prompt of n tokens: ``chunk``, or 1 if the prompt is shorter."""
        return self.chunk if n >= self.chunk else 1

    def count_chunks(self, n: int) -> tuple[int, int]:
        """Return (chunks that stay, all chunks that compete) of a prompt of n tokens, for variants of whole chunks."""
        capacity, length = self.capacity(n), self.chunk_length(n)
        if self.variant == "paper":
            # floor((C - w) / chunk) of ceil((n - w) / chunk) chunks, beside the window
            staying = (capacity.tokens - capacity.window) // length
            return staying, ceil_div(n - capacity.window, length)
        # ``code``: max(1, floor(chunks * C / n)) of ceil(n / chunk) chunks
        total = ceil_div(n, length)
        share = self.kv_ratio
        if share is None:
            share = capacity.tokens / n
        # 1e-9: a product that should be whole must not be cut to the number below
        return max(1, int(share * total + 1e-9)), total

    def expected(self, n: int, layer: int, n_layers: int, heads: int) -> Expected | None:
        if not self.whole or self.budget(n, layer, n_layers) >= n:
            return super().expected(n, layer, n_layers, heads)
        staying, total = self.count_chunks(n)
        window, length = self.capacity(n).window, self.chunk_length(n)
        most = staying * length
        if not staying or (n - window) % length == 0:
            # no chunk stays, or all chunks are of one length
            return Expected.exactly(window + most, heads)
        # the last chunk lacks ``missing`` tokens, and its score decides whether it is among those that stay
        missing = total * length - (n - window)
        least = max(0, staying * length - missing)
        if staying == total:
            # all chunks stay, the last one included
            most = least
        return Expected(low=(window + least,) * heads, high=(window + most,) * heads)

    def scores(self, cache: LayerCache, obs: Observation, capacity: Capacity) -> torch.Tensor:
        token_scores = self._score_tokens(cache, obs, capacity)
        chunked = len(token_scores)
        length = self.chunk_length(obs.prompt_tokens)
        # the score of a chunk is the sum over its tokens / chunk length, with zeros padding the last chunk
        missing = -chunked % length
        sums = F.pad(token_scores, (0, missing)).view(-1, length).sum(dim=1)
        sizes = torch.full_like(sums, length)
        if self.variant != "paper":
            # only the paper divides a shorter last chunk by the full length as well
            sizes[-1] -= missing
        # each token gets the score of its chunk, and the window, which always stays, gets 0
        by_token = (sums / sizes).repeat_interleave(length)[:chunked]
        return F.pad(by_token, (0, obs.n - chunked))[None]

    def _score_tokens(self, cache: LayerCache, obs: Observation, capacity: Capacity) -> torch.Tensor:
        """Return SnapKV's scores of the tokens that are cut into chunks, averaged over heads.

        These tokens are all n under ``code``, and otherwise the n - w tokens before the window.
        """
        if self.variant != "code":
            received = super().scores(cache, obs, capacity)
            return received[:, : obs.n - capacity.window].mean(dim=0)
        # no window is protected here, but its queries score all the tokens before it, at least one
        window = min(self.window, obs.n - 1)
        # the clone is needed because other chains share SnapKV's scores, which are 0 for the window
        received = super().scores(cache, obs, replace(capacity, window=window)).clone()
        received[:, obs.n - window :] = received.max()
        return received.mean(dim=0)

    def pick(self, cache: LayerCache, scores: torch.Tensor, budget: int) -> LayerCache:
        if not self.whole:
            return super().pick(cache, scores, budget)
        n = scores.shape[1]
        # the window is at +inf; scores [1, n] have one row, as all heads keep the same chunks
        window = int(scores[0].isposinf().sum())
        length = self.chunk_length(n)
        count, _ = self.count_chunks(n)
        # every ``length``-th token is the first of a chunk, and carries the chunk's score
        chunk_scores = scores[:, : n - window : length]
        best_chunks = top_indices(chunk_scores, count)[0]
        chunk_of_token = torch.arange(n, device=scores.device) // length
        staying = torch.isin(chunk_of_token, best_chunks)
        # the window stays in any case; the last chunk's number may reach into it, which changes nothing
        staying[n - window :] = True
        index = staying.nonzero()[:, 0]
        return replace(ops.select(cache, index[None]), decided=(len(index),) * cache.heads)

    def compress(self, cache: LayerCache, obs: Observation) -> LayerCache:
        if self._find_leader(obs.layer) == obs.layer:
            return super().compress(cache, obs)
        # ``rebalance`` later gives this layer the chunks of its leader
        return cache

    def _find_leader(self, layer: int) -> int:
        """Return the layer whose chunks this layer keeps: the first of its group that is not frozen."""
        if layer in self.frozen_layers:
            return layer
        for earlier in range(layer - layer % self.reuse, layer):
            if earlier not in self.frozen_layers:
                return earlier
        return layer

    def rebalance(self, caches: Sequence[LayerCache], n_layers: int) -> list[LayerCache]:
        trimmed = list(caches)
        for i, cache in enumerate(caches):
            leader = caches[self._find_leader(i)]
            # a layer that has the chunks of its leader already, or is its own leader, holds equally many tokens
            if cache.tokens > leader.tokens:
                # this layer still holds the whole prompt, in which a token's index is its position
                index = ops.only_segment(leader).positions.long()
                trimmed[i] = replace(ops.select(cache, index), decided=leader.decided)
        return trimmed
