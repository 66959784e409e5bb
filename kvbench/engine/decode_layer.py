"""One layer of a decode batch: its rows in their storage formats, all of one format attended at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvbench.kv.segment import LayerCache, storage_bytes
from kvbench.models.interface import KvbenchLayer
from kvbench.storage import registry
from kvbench.storage.entries import attend_groups, head_of, joined, mean_by_row
from kvbench.storage.format import Room, StoredRow


class RowLayer(KvbenchLayer):
    """One layer of a decode batch of B rows.

    attended: [B], the mean number of tokens that the last step attended in rows whose method masks, and nan in others;
    None if no row's method masks.
    next: [B], the position of each row's next token.
    used: how many tokens have come since the layer was built.
    local: whether the layer holds a window that methods leave alone.
    sources: of each row the head [Hq] whose output each query head takes; None if all take their own.
    """

    def __init__(self, rows: Sequence[StoredRow], room: Room) -> None:
        super().__init__()
        self.formats = registry.load(rows, room)
        self.next = torch.tensor([row.cache.seen for row in rows], device=rows[0].cache.segments[0].k.device)
        self.seen, self.used = max(row.cache.seen for row in rows), 0
        self.lift, self.local = rows[0].lift, rows[0].cache.window is not None
        sources = [row.cache.copy_from for row in rows]
        self.sources = [None if s is None else s.long() for s in sources]
        self.attended: Tensor | None = None

    def add(self, k: Tensor, v: Tensor) -> None:
        t = k.shape[2]
        positions = self.next[:, None] + torch.arange(t, device=k.device)
        if self.lift is not None:
            k, v = self.lift.new()
        for entries, rows in self.formats:
            rows.add(entries.tokens(k), entries.tokens(v), entries.of_rows(positions))
        self.grow(t)

    def grow(self, tokens: int) -> None:
        """Count ``tokens`` new tokens of every row."""
        self.next = self.next + tokens
        self.used, self.seen = self.used + tokens, self.seen + tokens

    def join(self, other: RowLayer) -> None:
        """Append the rows of another layer; no storage of either is moved."""
        offset = len(self.next)
        self.formats = [(entries.behind(0), stored) for entries, stored in self.formats]
        self.formats += [(entries.behind(offset), stored) for entries, stored in other.formats]
        self.next, self.seen = torch.cat([self.next, other.next]), max(self.seen, other.seen)
        self.sources += other.sources

    def attend(self, query: Tensor, scale: float, window: int | None) -> Tensor:
        parts = [(entries, partial(rows.attend, scale=scale, window=window)) for entries, rows in self.formats]
        out = attend_groups(query, parts)
        for b, source in enumerate(self.sources):
            if source is not None:
                out[b] = out[b, source]
        self.attended = mean_by_row([(entries, rows.attended) for entries, rows in self.formats], len(query))
        return out

    def held(self) -> Tensor:
        """Return the most tokens that any head of each row has held so far [B]."""
        most = torch.zeros_like(self.next)
        for entries, rows in self.formats:
            most.scatter_reduce_(0, entries.rows, rows.tokens(), "amax")
        return most

    def payload(self) -> list[int]:
        """Return the bytes of keys and values that each row's tokens take."""
        sizes = [0] * len(self.next)
        for entries, rows in self.formats:
            for row, size in zip(entries.rows.tolist(), rows.payload(), strict=True):
                sizes[row] += size
        return sizes

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but ``rows`` (ascending)."""
        rows = rows.to(self.next.device)
        self.next = self.next[rows]
        places = {row: place for place, row in enumerate(rows.tolist())}
        self.sources = [self.sources[row] for row in places]
        formats, self.formats = self.formats, []
        for entries, stored in formats:
            index, staying = entries.keep(places)
            if 0 < len(index) < len(entries.rows):
                stored.keep(index)
            if len(index):
                self.formats.append((staying, stored))

    def continued(self, cache: LayerCache, row: int = 0) -> LayerCache:
        """Return ``cache``, from which a row was loaded, with the tokens added since."""
        seen = cache.seen + self.used
        heads = {}
        for entries, stored in self.formats:
            for u in (entries.rows == row).nonzero().flatten().tolist():
                if entries.heads is None:
                    return replace(cache, segments=stored.segments(u, cache), seen=seen, observed=stored.observation(u))
                head = int(entries.heads[u])
                (heads[head],) = stored.segments(u, head_of(cache, head, entries.stored))
        (old,) = cache.segments
        # a head that is not stored has no entry, and nothing
        parts = [heads[h] if h in heads else old.head(h) for h in range(old.heads)]
        return replace(cache, segments=(joined(old, parts),), seen=seen)


def compressed(layers: Sequence[RowLayer]) -> list[RowLayer]:
    """Return the layers of a decode batch that methods compress: those of ``Cache.layers``, in order."""
    return [layer for layer in layers if not layer.local]


def allocated(layers: Sequence[RowLayer]) -> int:
    """Return all storage of a decode batch in bytes, with padding, free slots, positions and room for new tokens."""
    return storage_bytes(t for layer in layers for t in _behind(layer.formats))


def _behind(x: Any) -> Iterator[Tensor]:
    """Yield the tensors in x, its containers and its objects of kvbench's classes, so that the model is left out."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for item in x:
            yield from _behind(item)
    elif isinstance(x, Mapping):
        yield from _behind(list(x.values()))
    elif type(x).__module__.startswith(("kvbench.kv.", "kvbench.storage.")):
        yield from _behind(list(vars(x).values()))
