"""Rows of a local layer: a layer that attends only the last tokens. A new token takes the oldest token's slot.

Shapes: U rows, S slots, Hq query heads, Hk kv heads, T new tokens, D head dimension.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from kvbench.kv.segment import LayerCache, Segment
from kvbench.storage.attend import Estimate, attend_by_logits, compute_logits, weigh
from kvbench.storage.format import Format, Room, StoredRow
from kvbench.storage.row_segments import per_place


class LocalRows(Format):
    """All rows of a local layer, whatever their methods: methods leave local layers alone.

    The slots are a ring. The token at position p is in slot p mod S.

    window: how many of the last tokens are attended; if ``chunked``, how many tokens a chunk has.
    chunked: True if a token attends the tokens of its own chunk of the text, not the last ones.
    k, v: the keys and values [U, Hk, S, D] of the slots.
    positions: [U, S], the position of each slot's token. In a free slot it lies before every window.
    newest: [U, T], the positions of the tokens added last.
    """

    takes_ragged = True
    moves = "it has local layers, whose windows move"

    def __init__(self, rows: Sequence[StoredRow], room: Room) -> None:
        caches = [row.cache for row in rows]
        # ``takes`` accepts only caches with a window, and ``key`` puts caches of one window together
        assert caches[0].window is not None
        self.window = caches[0].window
        self.chunked = caches[0].chunked
        # of several tokens that come at once, the first still sees the whole window before it
        slots = min(self.window + room.at_once - 1, max(cache.seen for cache in caches) + room.tokens)
        segments = [cache.segments[0] for cache in caches]
        k, v = segments[0].k, segments[0].v
        self.k = k.new_zeros(len(rows), k.shape[0], slots, k.shape[2])
        self.v = v.new_zeros(len(rows), v.shape[0], slots, v.shape[2])
        # a free slot gets a position before everything that the first token sees
        self.positions = torch.full((len(rows), slots), -self.window, dtype=torch.int64, device=self.k.device)
        for u, s in enumerate(segments):
            self._write(torch.tensor([u], device=self.k.device), s.k[None], s.v[None], s.positions.long())
        self.newest = self.positions[:, -1:]  # [U, 1], a placeholder until ``add``

    @classmethod
    def takes(cls, row: StoredRow) -> bool:
        return row.cache.window is not None

    @classmethod
    def key(cls, row: StoredRow) -> Hashable:
        return row.cache.window, row.cache.chunked

    def _write(self, rows: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Write tokens of the rows with indices ``rows`` [U'] into their slots.

        k, v: the tokens' keys and values [U', Hk, T, D].
        positions: [U', T], which decide the slots.
        """
        slots = positions % self.positions.shape[1]
        index = (rows[:, None], slots)
        self.positions[index] = positions
        # in [U, S, Hk, D] rows and slots are neighbours, as in the index
        self.k.transpose(1, 2)[index] = k.transpose(1, 2)
        self.v.transpose(1, 2)[index] = v.transpose(1, 2)

    def add(self, k: Tensor, v: Tensor, positions: Tensor) -> None:
        self._write(torch.arange(len(k), device=k.device), k, v, positions)
        self.newest = positions

    def attend(self, query: Tensor, scale: float, window: int | None) -> Tensor:
        """Return the attention over the last tokens, or over those of the chunk. ``window`` is not read."""
        token_at, query_at = self.positions[:, None], self.newest[:, :, None]
        # a query at position p sees positions p - window + 1 to p, or those of its chunk up to p: [U, 1, T, S]
        if self.chunked:
            first_seen = query_at // self.window * self.window
        else:
            first_seen = query_at - self.window + 1
        hidden = ((token_at > query_at) | (token_at < first_seen))[:, None]

        def logits_of(estimate: Estimate) -> Tensor:
            """Return the logits [U, Hq, T, S] of all slots; -inf for free slots and tokens that are not attended."""
            return compute_logits(query, estimate(self.k), scale).masked_fill(hidden, -torch.inf)

        def weigh_values(probs: Tensor) -> Tensor:
            """Return the sum of the values of all slots, weighted by probs [U, Hq, T, S]."""
            return weigh(probs, self.v)

        out, _ = attend_by_logits(logits_of, weigh_values, query.dtype, masker=None, scale=scale)
        return out

    def keep(self, at: Tensor) -> None:
        self.k, self.v = self.k[at], self.v[at]
        self.positions, self.newest = self.positions[at], self.newest[at]

    def _find_slots_in_window(self) -> Tensor:
        """Return a mask [U, S] of the slots within the window of the newest token."""
        newest = self.positions.amax(dim=1, keepdim=True)
        return (self.positions > newest - self.window) & (self.positions >= 0)

    def tokens(self) -> Tensor:
        return self._find_slots_in_window().sum(dim=1)

    def payload(self) -> list[int]:
        """Return how many bytes of keys and values each row holds within the window of its newest token."""
        places = self.positions.numel()
        token_bytes = per_place(self.k, places) + per_place(self.v, places)
        return [count * token_bytes for count in self.tokens().tolist()]

    def segments(self, u: int, cache: LayerCache) -> tuple[Segment, ...]:
        """Return the tokens of row ``u`` within the window as its only segment, ascending in position."""
        slots = self._find_slots_in_window()[u].nonzero()[:, 0]
        # the ring may begin in any slot, so slots are sorted by position
        slots = slots[self.positions[u, slots].argsort()]
        positions = self.positions[u, slots].to(torch.int32)[None]
        return (Segment(self.k[u][:, slots], self.v[u][:, slots], positions),)
