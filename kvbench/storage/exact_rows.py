"""Rows of exact numbers that only grow: stored segments, whole or thin, and one dense tail of the new tokens.

Shapes: B rows, Hq query heads, Hk kv heads, T new tokens, t tokens of the tail, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvbench.kv import ops
from kvbench.kv.exact_attention import fusible
from kvbench.kv.segment import LayerCache, Segment
from kvbench.storage import kernels, split
from kvbench.storage.attend import attend
from kvbench.storage.entries import Entries, Entry, attend_groups, grouped, mean_by_row
from kvbench.storage.format import Format, Room, StoredRow
from kvbench.storage.row_segments import Ragged, RowSegment, flat, grown, per_place, roomy, stack


@dataclass
class ExactGroup:
    """Entries with segments of one format, attended together and padded to the longest.

    segments: the i-th segment of all entries as one batch, for each i.
    attended: the tokens that each entry attended in the last step.
    """

    entries: Entries
    segments: list[RowSegment | Ragged]
    attended: Tensor | None = None


class ExactRows(Format):
    """All exact rows under one masking method, or under none; entries of one segment format are attended at once.

    Where no kernel reads ragged heads, they are attended one by one: most of a padded batch would be padding. All
    groups share the tail [B, Hk, t, D].
    """

    takes_ragged = True

    def __init__(self, rows: Sequence[StoredRow], room: Room) -> None:
        self.masker, self.capacity, self.windowed = rows[0].masker, room.tokens, room.windowed
        device = rows[0].cache.segments[0].k.device
        entries = [Entry(i, row) for i, row in enumerate(rows)]
        if room.windowed or self.masker is not None or not kernels.serves(device):
            entries = [part for e in entries for part in e.by_head()]
        self.groups = [
            ExactGroup(Entries.of(part, len(rows)), _batch_segments(part, room.windowed))
            for part in grouped(entries, super().key)
        ]
        self.starts = torch.tensor([row.cache.seen for row in rows], device=device)
        self.most = torch.tensor([row.cache.tokens for row in rows], device=device)
        self.longest = max(row.cache.tokens for row in rows)
        self.keys: Tensor | None = None  # [B, Hk, at most capacity, D] once a token has come
        self.values: Tensor | None = None
        self.used, self.new = 0, 0
        segments = [s for g in self.groups for s in g.segments]
        self.splits = self.masker is None and not any(s.shared is not None for s in segments)
        if self.masker is not None:
            self.moves = "it decides in each step what is attended"
        elif any(s.shared is not None for s in segments):
            self.moves = "its heads share logits"
        elif any(s.positions is not None for s in segments):
            self.moves = "the text outgrows the model's sliding window"

    @classmethod
    def takes(cls, row: StoredRow) -> bool:
        return True

    @classmethod
    def key(cls, row: StoredRow) -> Hashable:
        return (row.masker,)

    def add(self, k: Tensor, v: Tensor, positions: Tensor) -> None:
        keys, values = self.room(k, v, k.shape[2])
        span = slice(self.used, self.used + k.shape[2])
        keys[:, :, span], values[:, :, span] = k, v
        self.grow(k.shape[2])

    def room(self, k: Tensor, v: Tensor, tokens: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the tail's buffers (keys, values) [B, Hk, ., D], with room for ``tokens`` more; None: for all to come.

        They are made to fit k and v, and grow by a share of the tokens held.
        """
        least = self.capacity if tokens is None else self.used + tokens
        if self.keys is None or self.values is None:
            self.keys, self.values = (x.new_empty(*x.shape[:2], 0, x.shape[3]) for x in (k, v))
        if self.keys.shape[2] < least:
            size = least if tokens is None else roomy(least, self.longest + self.used, self.capacity)
            self.keys, self.values = grown(self.keys, size), grown(self.values, size)
        return self.keys, self.values

    def grow(self, tokens: int) -> None:
        """Count ``tokens`` that were written behind the tail."""
        self.used, self.new = self.used + tokens, tokens

    def tail(self) -> tuple[Tensor, Tensor]:
        """Return (keys, values) [B, Hk, used, D] of the tokens added since the batch was built."""
        assert self.keys is not None and self.values is not None
        return self.keys[:, :, : self.used], self.values[:, :, : self.used]

    def attend(self, query: Tensor, scale: float, window: int | None) -> Tensor:
        if self.splits and window is None and fusible(query, scale) and not kernels.serves(query.device):
            return self._in_parts(query, scale)
        floor = None
        if window is not None and self.windowed:
            newest = torch.arange(self.used - self.new, self.used, device=query.device)
            floor = self.starts[:, None] + newest - window + 1

        def of_group(group: ExactGroup, query: Tensor) -> Tensor:
            entries, (k, v) = group.entries, self.tail()
            below = None if floor is None else entries.of_rows(floor)
            starts = None if floor is None else entries.of_rows(self.starts)
            tail = (entries.tokens(k), entries.tokens(v))
            out, group.attended = attend(query, group.segments, tail, scale, below, starts, self.masker)
            return out

        out = self.in_groups(query, of_group)
        self.attended = mean_by_row([(g.entries, g.attended) for g in self.groups], len(self.starts))
        return out

    def _in_parts(self, query: Tensor, scale: float) -> Tensor:
        """Return attention as ``attend`` does: over the tail of all rows at once, merged with that over segments."""
        tail = split.causal(query, *self.tail(), scale)
        out, lse = torch.empty_like(query), torch.empty_like(query[..., 0])
        for group in self.groups:
            part = split.over(group.entries.query(query), group.segments, scale)
            group.entries.put(out, part.out)
            group.entries.put(lse, part.lse)
        return split.merged(split.Part(out, lse), tail)

    def in_groups(self, query: Tensor, attend: Callable[[ExactGroup, Tensor], Tensor]) -> Tensor:
        """Return the outputs [B, Hq, T, D] of ``attend`` for each group and its share of query [B, Hq, T, D]."""
        return attend_groups(query, [(g.entries, partial(attend, g)) for g in self.groups])

    def keep(self, at: Tensor) -> None:
        places = {old: new for new, old in enumerate(at.tolist())}
        moved = [(*g.entries.keep(places), g.segments) for g in self.groups]
        self.groups = [ExactGroup(e, [s.rows(index) for s in segments]) for index, e, segments in moved if len(index)]
        self.starts, self.most = self.starts[at], self.most[at]
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[at], self.values[at]

    def tokens(self) -> Tensor:
        return self.most + self.used

    def payload(self) -> list[int]:
        token = 0
        if self.keys is not None and self.values is not None:
            token = sum(per_place(t, t.shape[0] * t.shape[2]) for t in (self.keys, self.values))
        sizes = [self.used * token] * len(self.starts)
        for group in self.groups:
            for segment in group.segments:
                for row, size in zip(group.entries.rows.tolist(), segment.payload(), strict=True):
                    sizes[row] += size
        return sizes

    def segments(self, u: int, cache: LayerCache) -> tuple[Segment, ...]:
        k, v = (t[u].clone() for t in self.tail())  # alone in its storage: the tail is of all rows
        return ops.append(cache, k, v).segments


def _batch_segments(entries: Sequence[Entry], positions: bool) -> list[RowSegment | Ragged]:
    """Return one batch for each i, of the i-th segment of all entries, whose segments are of one format.

    ``positions``: batches keep the positions of tokens, which a sliding window needs.
    """
    columns = zip(*(e.row.cache.segments for e in entries), strict=True)
    return [stack(column, positions) if column[0].lengths is None else flat(column) for column in columns]
