"""Groups of a batch's rows, or of single heads of them, that are attended together.

Shapes: B rows, U entries, Hq query heads, Hk kv heads, T new tokens, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvbench.kv.partly_packed import Codes, side_by_side
from kvbench.kv.segment import LayerCache, Segment
from kvbench.storage.format import StoredRow

PADDING_LIMIT = 1.25  # longest over shortest entry of a group


@dataclass(frozen=True)
class Entry:
    """One row of a group: row ``index`` of a batch, or one of that row's ``stored`` heads."""

    index: int
    row: StoredRow
    head: int | None = None
    stored: int = 0

    def by_head(self, sizes: Sequence[int] | None = None) -> list[Entry]:
        """Return the entry itself, or one entry per head if its heads hold different numbers of tokens.

        sizes: how many tokens each head goes on holding, where that differs; one with 0 has no entry.
        """
        segments, row = self.row.cache.segments, self.row
        if sizes is None and all(s.lengths is None for s in segments):
            return [self]
        stored = max(s.heads for s in segments)
        by_head: Sequence[int | None] = sizes or [None] * stored
        rows = [replace(row, cache=head_of(row.cache, h, stored), size=size) for h, size in enumerate(by_head)]
        return [Entry(self.index, head, h, stored) for h, head in enumerate(rows) if head.size != 0]


@dataclass(frozen=True)
class Entries:
    """The places of a group's entries in their batch.

    rows: each entry's row.
    heads: each entry's head where entries are single heads, else None.
    stored: how many heads each row stores, where entries are single heads.
    """

    rows: Tensor  # [U], ascending
    heads: Tensor | None  # [U]
    stored: int
    everything: bool  # True if these are all rows of the batch, so that nothing need be gathered

    @classmethod
    def of(cls, entries: Sequence[Entry], batch: int) -> Entries:
        """Return the places of ``entries``, which are in the order of the batch, in a batch of ``batch`` rows."""
        device = entries[0].row.cache.segments[0].k.device
        heads = [e.head for e in entries if e.head is not None]
        return cls(
            torch.tensor([e.index for e in entries], device=device),
            torch.tensor(heads, device=device) if heads else None,
            entries[0].stored,
            not heads and len(entries) == batch,
        )

    def of_rows(self, x: Tensor) -> Tensor:
        """Return the rows of x [B, ...] that belong to these entries [U, ...]."""
        return x if self.everything else x[self.rows]

    def query(self, x: Tensor) -> Tensor:
        """Return these entries' queries of x [B, Hq, T, D]: [U, Hq, T, D], or [U, group, T, D] of single heads."""
        return self.of_rows(x) if self.heads is None else x.unflatten(1, (self.stored, -1))[self.rows, self.heads]

    def tokens(self, x: Tensor) -> Tensor:
        """Return these entries' keys, values or latents of x [B, ...]: [U, ...], or [U, 1, ...] of single heads."""
        if self.heads is None:
            return self.of_rows(x)
        return x[self.rows, self.heads // (self.stored // x.shape[1])][:, None]

    def put(self, x: Tensor, part: Tensor) -> None:
        """Write the part [U, Hq, T, ...], or [U, group, T, ...] of single heads, to its places in x [B, Hq, T, ...]."""
        if self.everything:
            x.copy_(part)
        elif self.heads is None:
            x[self.rows] = part
        else:
            x.unflatten(1, (self.stored, -1))[self.rows, self.heads] = part

    def behind(self, rows: int) -> Entries:
        """Return the same entries in a larger batch, behind ``rows`` other rows."""
        return replace(self, rows=self.rows + rows, everything=False)

    def keep(self, places: Mapping[int, int]) -> tuple[Tensor, Entries]:
        """Return the indices [U'] of the entries that stay, and their places in the new batch.

        ``places`` maps old rows of the batch to new ones; rows that are not in it leave.
        """
        rows = self.rows.tolist()
        staying = [i for i, row in enumerate(rows) if row in places]
        index = torch.tensor(staying, dtype=torch.int64, device=self.rows.device)
        new = torch.tensor([places[rows[i]] for i in staying], dtype=torch.int64, device=self.rows.device)
        heads = None if self.heads is None else self.heads[index]
        return index, Entries(new, heads, self.stored, heads is None and len(staying) == len(places))


def grouped(
    entries: Sequence[Entry], key: Callable[[StoredRow], Hashable], any_length: bool = False
) -> Iterator[list[Entry]]:
    """Yield groups of entries whose rows have the same ``key`` and number of stored heads, in the order of the batch.

    Groups are split so that no entry is longer than PADDING_LIMIT times the shortest, by what single heads go on
    holding where that differs. ``any_length``: not by what entries hold now.
    """
    by_key: dict[Hashable, list[Entry]] = {}
    for entry in entries:
        by_key.setdefault((key(entry.row), entry.stored), []).append(entry)
    for alike in by_key.values():
        alike.sort(key=lambda e: e.row.size or sum(s.tokens for s in e.row.cache.segments))
        groups: list[list[Entry]] = [[]]
        for entry in alike:
            if groups[-1] and (entry.row.size or not any_length) and _longer(entry, groups[-1][0]):
                groups.append([])
            groups[-1].append(entry)
        yield from (sorted(group, key=lambda e: (e.index, e.head or 0)) for group in groups)


def _longer(entry: Entry, shortest: Entry) -> bool:
    """Return True if a segment is more than PADDING_LIMIT times as long as that of the shortest entry, or will be."""
    if entry.row.size and shortest.row.size:
        return entry.row.size > PADDING_LIMIT * shortest.row.size
    pairs = zip(entry.row.cache.segments, shortest.row.cache.segments, strict=True)
    return any(s.lengths is None and s.tokens > PADDING_LIMIT * max(short.tokens, 1) for s, short in pairs)


def attend_groups(query: Tensor, groups: Sequence[tuple[Entries, Callable[[Tensor], Tensor]]]) -> Tensor:
    """Return attention [B, Hq, T, D], put together from groups: (entries, function from their query to attention)."""
    if len(groups) == 1 and groups[0][0].everything:
        return groups[0][1](query)
    out = torch.empty_like(query)
    for entries, attend in groups:
        entries.put(out, attend(entries.query(query)))
    return out


def mean_by_row(groups: Sequence[tuple[Entries, Tensor | None]], rows: int) -> Tensor | None:
    """Return the mean over each row's entries [B] of the groups' values [U]; nan for a row without values.

    Returns None if no group has values.
    """
    valued = [(entries, values) for entries, values in groups if values is not None]
    if not valued:
        return None
    if len(valued) == 1 and valued[0][0].everything:
        return valued[0][1]
    row, values = torch.cat([e.rows for e, _ in valued]), torch.cat([v for _, v in valued])
    sums, counts = values.new_zeros(2, rows)
    return sums.index_add(0, row, values) / counts.index_add(0, row, torch.ones_like(values))


def head_of(cache: LayerCache, head: int, stored: int) -> LayerCache:
    """Return the cache of one of its ``stored`` heads, as views."""
    segments = tuple(s.head(head // (stored // s.heads)) for s in cache.segments)
    return replace(cache, segments=segments, heads=1, query_heads=cache.query_heads // stored)


def joined(old: Segment, heads: Sequence[Segment]) -> Segment:
    """Return the ragged segment ``old`` with its heads replaced by ``heads``, which may have grown."""
    k, v, positions = (torch.cat([getattr(s, name) for s in heads], dim=1) for name in ("k", "v", "positions"))
    lengths = torch.tensor([s.tokens for s in heads], dtype=torch.int32, device=positions.device)
    state = {name: torch.cat([s.state[name] for s in heads], dim=1) for name in heads[0].state}
    ragged = replace(old, k=k, v=v, positions=positions, lengths=lengths, state=state)
    codes = [s.codes for s in heads if s.codes is not None]
    if not codes:
        return ragged
    (k_codes, k_counts), (v_codes, v_counts) = (side_by_side([getattr(c, name) for c in codes]) for name in ("k", "v"))
    return replace(ragged, codes=Codes(k_codes, v_codes, k_counts, v_counts))
