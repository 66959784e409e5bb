"""Which rows of a batch, or single heads of them, are attended together.

Shapes: B rows, U entries, Hq query heads, Hk kv heads, T new tokens, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvbench.cache.partly_packed import Codes, side_by_side
from kvbench.cache.segment import LayerCache, Segment
from kvbench.storage.format import StoredRow

PADDING_LIMIT = 1.25


@dataclass(frozen=True)
class Entry:
    """What is attended as one row of a group: row ``index`` of a batch, or one of its ``stored`` heads."""

    index: int
    row: StoredRow
    head: int | None = None
    stored: int = 0

    def by_head(self) -> list[Entry]:
        """The entry itself, or its heads where they hold different numbers of tokens."""
        segments = self.row.cache.segments
        if all(s.lengths is None for s in segments):
            return [self]
        stored = max(s.heads for s in segments)
        heads = (head_of(self.row.cache, h, stored) for h in range(stored))
        return [Entry(self.index, replace(self.row, cache=c), h, stored) for h, c in enumerate(heads)]


@dataclass(frozen=True)
class Entries:
    """The entries of a group, as they lie in its batch. Of single heads ``heads`` names each, of ``stored`` in all."""

    rows: Tensor  # [U], ascending
    heads: Tensor | None  # [U]
    stored: int
    everything: bool  # whether these are all rows of the batch, so that nothing need be gathered

    @classmethod
    def of(cls, entries: Sequence[Entry], batch: int) -> Entries:
        """The place of ``entries``, which are sorted, in a batch of so many rows."""
        device = entries[0].row.cache.segments[0].k.device
        heads = [e.head for e in entries if e.head is not None]
        return cls(
            torch.tensor([e.index for e in entries], device=device),
            torch.tensor(heads, device=device) if heads else None,
            entries[0].stored,
            not heads and len(entries) == batch,
        )

    def of_rows(self, x: Tensor) -> Tensor:
        """Of x [B, ...] the rows of these entries [U, ...]."""
        return x if self.everything else x[self.rows]

    def query(self, x: Tensor) -> Tensor:
        """Of queries [B, Hq, T, D] those of these entries: [U, Hq, T, D], or [U, group, T, D] of single heads."""
        return self.of_rows(x) if self.heads is None else x.unflatten(1, (self.stored, -1))[self.rows, self.heads]

    def tokens(self, x: Tensor) -> Tensor:
        """Of keys, values or latents [B, ...] those that these entries read: [U, ...], of single heads [U, 1, ...]."""
        if self.heads is None:
            return self.of_rows(x)
        return x[self.rows, self.heads // (self.stored // x.shape[1])][:, None]

    def behind(self, rows: int) -> Entries:
        """The same entries in a larger batch, behind so many other rows."""
        return replace(self, rows=self.rows + rows, everything=False)

    def keep(self, places: Mapping[int, int]) -> tuple[Tensor, Entries]:
        """The entries [U'] that stay where old rows of the batch become new ones by ``places``, and theirs then."""
        rows = self.rows.tolist()
        at = [i for i, row in enumerate(rows) if row in places]
        index = torch.tensor(at, dtype=torch.int64, device=self.rows.device)
        new = torch.tensor([places[rows[i]] for i in at], dtype=torch.int64, device=self.rows.device)
        heads = None if self.heads is None else self.heads[index]
        return index, Entries(new, heads, self.stored, heads is None and len(at) == len(places))


def grouped(
    entries: Sequence[Entry], key: Callable[[StoredRow], Hashable], any_length: bool = False
) -> Iterator[list[Entry]]:
    """The entries by ``key`` of their rows, each group as it lies in the batch.

    Unless ``any_length``, groups are split so that padding to the longest keeps to PADDING_LIMIT.
    """
    by_key: dict[Hashable, list[Entry]] = {}
    for entry in entries:
        by_key.setdefault((key(entry.row), entry.stored), []).append(entry)
    for alike in by_key.values():
        alike.sort(key=lambda e: sum(s.tokens for s in e.row.cache.segments))
        groups: list[list[Entry]] = [[]]
        for entry in alike:
            if groups[-1] and not any_length and _longer(entry, groups[-1][0]):
                groups.append([])
            groups[-1].append(entry)
        yield from (sorted(group, key=lambda e: (e.index, e.head or 0)) for group in groups)


def _longer(entry: Entry, shortest: Entry) -> bool:
    """Whether a segment is so much longer than the shortest entry's that the two should not be padded alike."""
    pairs = zip(entry.row.cache.segments, shortest.row.cache.segments, strict=True)
    return any(s.lengths is None and s.tokens > PADDING_LIMIT * max(short.tokens, 1) for s, short in pairs)


def attend_groups(query: Tensor, groups: Sequence[tuple[Entries, Callable[[Tensor], Tensor]]]) -> Tensor:
    """What each group finds for its share of query [B, Hq, T, D], put together [B, Hq, T, D]."""
    if len(groups) == 1 and groups[0][0].everything:
        return groups[0][1](query)
    out = torch.empty_like(query)
    for entries, attend in groups:
        found = attend(entries.query(query))
        if entries.heads is None:
            out[entries.rows] = found
        else:
            out.unflatten(1, (entries.stored, -1))[entries.rows, entries.heads] = found
    return out


def mean_by_row(groups: Sequence[tuple[Entries, Tensor | None]], rows: int) -> Tensor | None:
    """Mean over the entries of each row [B], nan for rows that have none; None where no group has values [U]."""
    valued = [(entries, values) for entries, values in groups if values is not None]
    if not valued:
        return None
    if len(valued) == 1 and valued[0][0].everything:
        return valued[0][1]
    where, values = torch.cat([e.rows for e, _ in valued]), torch.cat([v for _, v in valued])
    sums, counts = values.new_zeros(2, rows)
    return sums.index_add(0, where, values) / counts.index_add(0, where, torch.ones_like(values))


def head_of(cache: LayerCache, head: int, stored: int) -> LayerCache:
    """One of the ``stored`` heads of a cache, views."""
    segments = tuple(s.head(head // (stored // s.heads)) for s in cache.segments)
    return replace(cache, segments=segments, heads=1, query_heads=cache.query_heads // stored)


def joined(old: Segment, heads: Sequence[Segment]) -> Segment:
    """The ragged segment ``old`` as its heads, each with tokens behind those it had, are now: one after the other."""
    k, v, positions = (torch.cat([getattr(s, name) for s in heads], dim=1) for name in ("k", "v", "positions"))
    lengths = torch.tensor([s.tokens for s in heads], dtype=torch.int32, device=positions.device)
    ragged = replace(old, k=k, v=v, positions=positions, lengths=lengths)
    codes = [s.codes for s in heads if s.codes is not None]
    if not codes:
        return ragged
    (k_codes, k_counts), (v_codes, v_counts) = (side_by_side([getattr(c, of) for c in codes]) for of in ("k", "v"))
    return replace(ragged, codes=Codes(k_codes, v_codes, k_counts, v_counts))
