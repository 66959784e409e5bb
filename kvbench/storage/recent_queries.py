"""The last queries of rows whose method chooses again while decoding, and when it does.

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


class RecentQueries:
    """The last W queries of each row of one layer, the query of position p in place p mod W.

    seen: how many tokens each row has read.
    """

    def __init__(self, caches: Sequence[LayerCache], size: int) -> None:
        observed = [c.observed for c in caches]
        self.observed = [o for o in observed if o is not None]
        self.seen, self.prompts = [c.seen for c in caches], [c.prompt_tokens for c in caches]
        self.query_heads, self.size = caches[0].query_heads, size
        self.known = [0 if o.last_q is None else o.last_q.shape[1] for o in self.observed]
        self.ring: Tensor | None = None  # [B, Hq, W, D]
        if size:
            rows = [o.last_q for o in self.observed if o.last_q is not None]
            self.ring = rows[0].new_zeros(len(rows), rows[0].shape[0], size, rows[0].shape[2])
            for u, q in enumerate(rows):
                self.ring[u, :, self._places(u, q.shape[1])] = q

    def _places(self, u: int, count: int) -> Tensor:
        """Return the places [count] of the last ``count`` queries of row ``u``, oldest first."""
        device = self.ring.device if self.ring is not None else None
        return torch.arange(self.seen[u] - count, self.seen[u], device=device) % self.size

    def due(self, new: int, every: int) -> list[int]:
        """Return the rows that choose before ``new`` tokens come. Raises UsageError if one must choose among these."""
        since = [seen - prompt for seen, prompt in zip(self.seen, self.prompts, strict=True)]
        if any(s % every + new > every for s in since):
            raise UsageError(f"{new} tokens at once go past the next choice of decode_every={every}: lower chunk=")
        return [u for u, s in enumerate(since) if s and s % every == 0]

    def add(self, query: Tensor) -> None:
        """Note the queries [B, Hq, T, D] of the tokens that have come last."""
        self.seen = [seen + query.shape[2] for seen in self.seen]
        self.known = [min(self.size, known + query.shape[2]) for known in self.known]
        if self.ring is not None:
            t = min(query.shape[2], self.size)
            places = torch.tensor([[p % self.size for p in range(seen - t, seen)] for seen in self.seen])
            index = places.to(query.device)[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3])
            self.ring.scatter_(2, index, query[:, :, -t:])

    def observation(self, u: int, positions: Tensor | None) -> Observation:
        """Return what the method of row ``u`` reads of tokens at ``positions`` [H, m], ascending; None: of a prompt."""
        observed, seen, count = self.observed[u], self.seen[u], self.known[u]
        if positions is not None:
            # a query counts where every head holds its token, as attention rows name tokens by their order
            m = positions.shape[1]
            own = positions == torch.arange(seen - m, seen, device=positions.device)
            count = min(count, int(own.flip(1).long().cumprod(1).sum(1).min()))
        last_q = None if self.ring is None else self.ring[u, :, self._places(u, count)]
        if positions is None:
            return replace(observed, last_q=last_q)
        return replace(
            observed, n=positions.shape[1], length=seen, last_q=last_q, prompt=observed.prompt + seen, scratch={}
        )

    def keep(self, at: Tensor) -> None:
        """Drop all rows but those at the indices ``at``."""
        rows = at.tolist()
        self.observed, self.seen, self.prompts, self.known = (
            [values[i] for i in rows] for values in (self.observed, self.seen, self.prompts, self.known)
        )
        self.ring = None if self.ring is None else self.ring[at]
