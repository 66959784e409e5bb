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
    prompts: the length of each row's prompt.
    known: how many queries of each row the ring holds.
    query_heads: Hq.
    size: the number W of queries that the ring has room for; 0 if the method reads no queries.
    ring: the queries [B, Hq, W, D]; None if W is 0.
    """

    def __init__(self, caches: Sequence[LayerCache], size: int) -> None:
        """Load the last queries of each row's prompt. ``caches`` has the layer of each row, and W is ``size``."""
        # every cache of a method that chooses again has an observation, so the filter leaves none out
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

    def list_due(self, new: int, every: int) -> list[int]:
        """Return the rows that must choose again before the next step.

        Raises UsageError if a row would have to choose in the middle of that step.

        new: how many tokens the step adds to each row.
        every: a row chooses again whenever it has read this many more tokens after its prompt.
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
        """Return the observation by which row ``u`` chooses among its tokens: the prompt's, with the last queries.

        positions: [H, m], ascending, the positions of the tokens among which the row chooses. The observation then
            counts these m tokens, and its queries are those whose tokens every head still holds. None: the
            observation keeps the prompt's numbers.
        """
        observed, seen, count = self.observed[u], self.seen[u], self.known[u]
        if positions is not None:
            # attention rows name tokens by order: a query counts only if all heads hold its token and every later one
            count = min(count, _count_newest(positions, seen))
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


def _count_newest(positions: Tensor, seen: int) -> int:
    """Return how many of the last tokens read every head holds, without a gap up to the newest token.

    positions: [H, m], ascending, the positions of the tokens that each head holds.
    seen: how many tokens were read.
    """
    m = positions.shape[1]
    # a head that holds the last m tokens has them at the positions seen - m .. seen - 1
    is_newest = positions == torch.arange(seen - m, seen, device=positions.device)
    # counted from the newest token backwards, the product of 1s becomes 0 at the first gap
    unbroken = is_newest.flip(1).long().cumprod(1).sum(1)
    return int(unbroken.min())
