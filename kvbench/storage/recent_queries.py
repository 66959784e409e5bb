"""The last queries of rows whose method chooses again while decoding, and the steps at which it chooses.

Shapes: B rows, Hq query heads, H stored heads, W queries, T new tokens, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvbench.base.errors import UsageError
from kvbench.kv.observation import Observation
from kvbench.kv.segment import LayerCache
from kvbench.storage.row_segments import take_entries


class RecentQueries:
    """The last W queries of each row of one layer, in a ring: the query of position p is in place p mod W.

    observed: each row's observation of its prompt.
    seen: how many tokens each row has read.
    prompts: how many of them are the row's prompt.
    known: how many queries of each row the ring holds.
    ring: [B, Hq, W, D]; None if the method reads no queries.
    """

    def __init__(self, caches: Sequence[LayerCache], size: int) -> None:
        """Load the last queries of the prompts of ``caches``, with W = ``size``."""
        self.observed = [cache.observed for cache in caches if cache.observed is not None]
        self.seen = [cache.seen for cache in caches]
        self.prompts = [cache.prompt_tokens for cache in caches]
        self.query_heads, self.size = caches[0].query_heads, size
        queries = []
        self.known = [0] * len(self.observed)
        for u, observed in enumerate(self.observed):
            if observed.last_q is not None:
                queries.append(observed.last_q)
                self.known[u] = observed.last_q.shape[1]
        self.ring: Tensor | None = None
        if size:
            self.ring = queries[0].new_zeros(len(queries), queries[0].shape[0], size, queries[0].shape[2])
            for u, q in enumerate(queries):
                self.ring[u, :, self._places(u, q.shape[1])] = q

    def _places(self, u: int, count: int) -> Tensor:
        """Return the places [count] of the last ``count`` queries of row ``u``, oldest first."""
        device = self.ring.device if self.ring is not None else None
        return torch.arange(self.seen[u] - count, self.seen[u], device=device) % self.size

    def due(self, new: int, every: int) -> list[int]:
        """Return the rows that choose again before ``new`` tokens come.

        Raises UsageError if a row would have to choose among these tokens.
        """
        answered = [seen - prompt for seen, prompt in zip(self.seen, self.prompts, strict=True)]
        if any(tokens % every + new > every for tokens in answered):
            raise UsageError(f"{new} tokens at once go past the next choice of decode_every={every}: lower chunk=")
        # right after the prompt there is nothing to choose, because the prompt has just been compressed
        return [u for u, tokens in enumerate(answered) if tokens and tokens % every == 0]

    def add(self, query: Tensor) -> None:
        """Record the queries [B, Hq, T, D] of the newest tokens."""
        self.seen = [seen + query.shape[2] for seen in self.seen]
        self.known = [min(self.size, known + query.shape[2]) for known in self.known]
        if self.ring is not None:
            t = min(query.shape[2], self.size)
            # places [B, t]: the query of position p goes to place p mod W
            positions = torch.tensor(self.seen)[:, None] - t + torch.arange(t)
            places = (positions % self.size).to(query.device)
            index = places[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3])
            self.ring.scatter_(2, index, query[:, :, -t:])

    def observation(self, u: int, positions: Tensor | None) -> Observation:
        """Return the observation for a choice of row ``u`` among tokens at ``positions`` [H, m], ascending.

        Without ``positions``, return the prompt's observation with the last queries.
        """
        observed, seen, count = self.observed[u], self.seen[u], self.known[u]
        if positions is not None:
            # attention rows name tokens by order: a query counts only if all heads hold its token and every later one
            m = positions.shape[1]
            is_newest = positions == torch.arange(seen - m, seen, device=positions.device)
            # counted from the newest token backwards, the product of 1s ends at the first 0
            unbroken = is_newest.flip(1).long().cumprod(1).sum(1)
            count = min(count, int(unbroken.min()))
        last_q: Tensor | None = None
        if self.ring is not None:
            last_q = self.ring[u, :, self._places(u, count)]
        if positions is None:
            return replace(observed, last_q=last_q)
        # each choice has random draws of its own and shares no results with an earlier choice
        return replace(
            observed, n=positions.shape[1], length=seen, last_q=last_q, prompt=observed.prompt + seen, scratch={}
        )

    def keep(self, at: Tensor) -> None:
        """Drop all rows except the indices ``at``."""
        rows = at.tolist()
        self.observed = [self.observed[u] for u in rows]
        self.seen = [self.seen[u] for u in rows]
        self.prompts = [self.prompts[u] for u in rows]
        self.known = [self.known[u] for u in rows]
        self.ring = take_entries(self.ring, at)
