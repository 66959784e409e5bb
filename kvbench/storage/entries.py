"""Groups of a batch's entries that are attended together. An entry is a whole row, or a single head of a row.

Shapes: B rows, U entries, Hq query heads, Hk kv heads, T new tokens, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvbench.kv.partly_packed import Codes, join_heads
from kvbench.kv.scale import LogitScale, cap_of, sinks_of
from kvbench.kv.segment import LayerCache, Segment
from kvbench.storage.format import StoredRow

PADDING_LIMIT = 1.25  # the longest entry of a group is at most this many times as long as the shortest


@dataclass(frozen=True)
class Entry:
    """A row of a batch, or a single head of a row, as a group stores and attends it.

    index: the row's index in the batch.
    row: the cache of the whole row, or of that head alone, with the roles that method and model play.
    head: the number of the head, out of the ``stored`` heads of the row; None for a whole row.
    stored: how many heads the row stores; 0 for a whole row.
    """

    index: int
    row: StoredRow
    head: int | None = None
    stored: int = 0

    def split_heads(self, sizes: Sequence[int] | None = None) -> list[Entry]:
        """Return the entry itself, or one entry per head if the heads hold different numbers of tokens.

        sizes: how many tokens each head will hold, if heads will differ in that number. A head with size 0 gets no
            entry.
        """
        segments, row = self.row.cache.segments, self.row
        if sizes is None and all(s.lengths is None for s in segments):
            return [self]
        stored = max(s.heads for s in segments)
        size_by_head: Sequence[int | None] = sizes or [None] * stored
        entries = []
        for head, size in enumerate(size_by_head):
            # None: the size is not known, and the head has an entry
            if size != 0:
                head_row = replace(row, cache=select_head(row.cache, head, stored), size=size)
                entries.append(Entry(self.index, head_row, head=head, stored=stored))
        return entries


@dataclass(frozen=True)
class Entries:
    """The places of a group's entries in their batch: which row, or which head of which row, each entry is.

    rows: each entry's row.
    heads: each entry's head if entries are single heads; None if they are whole rows.
    stored: how many heads each row stores, if entries are single heads.
    everything: True if the entries are all rows of the batch. Tensors of the batch are then read without gathering.
    """

    rows: Tensor  # [U], ascending
    heads: Tensor | None  # [U]
    stored: int
    everything: bool

    @classmethod
    def of(cls, entries: Sequence[Entry], batch: int) -> Entries:
        """Return the places of ``entries``, the entries of a group, in a batch of ``batch`` rows.

        They must come in the batch's order.
        """
        device = entries[0].row.cache.segments[0].k.device
        rows = torch.tensor([entry.index for entry in entries], device=device)
        # a group's entries are all whole rows, or all single heads
        heads = [entry.head for entry in entries if entry.head is not None]
        if heads:
            return cls(rows, torch.tensor(heads, device=device), stored=entries[0].stored, everything=False)
        return cls(rows, heads=None, stored=entries[0].stored, everything=len(entries) == batch)

    def select_rows(self, x: Tensor) -> Tensor:
        """Return from x [B, ...], which has an item for each row of the batch, these entries' items [U, ...]."""
        if self.everything:
            return x
        return x[self.rows]

    def select_queries(self, x: Tensor) -> Tensor:
        """Return these entries' part of queries x [B, Hq, T, D].

        The result is [U, Hq, T, D], or [U, group, T, D] for single heads.
        """
        if self.heads is None:
            return self.select_rows(x)
        # a stored head's group are the query heads that read it: [B, stored, group, T, D]
        return x.unflatten(1, (self.stored, -1))[self.rows, self.heads]

    def select_scale(self, scale: float) -> float:
        """Return ``scale``, the factor of q.k, for these entries.

        A scale that carries sinks then carries only those of the entries' query heads.
        """
        sinks = sinks_of(scale)
        if sinks is None:
            return scale
        if sinks.dim() == 4:
            # [B, Hq, 1, 1]: each row of the batch has sinks of its own
            chosen = self.select_queries(sinks)
        elif self.heads is None:
            return scale  # [Hq, 1, 1], the same for all rows
        else:
            chosen = sinks.unflatten(0, (self.stored, -1))[self.heads]
        return LogitScale.of(float(scale), cap_of(scale), chosen)

    def select_tokens(self, x: Tensor) -> Tensor:
        """Return these entries' part of keys, values or latents x [B, ...].

        The result is [U, ...], or [U, 1, ...] for single heads.
        """
        if self.heads is None:
            return self.select_rows(x)
        # under ``per=query_head`` several stored heads read one kv head
        kv_heads = self.heads // (self.stored // x.shape[1])
        return x[self.rows, kv_heads][:, None]

    def write(self, x: Tensor, part: Tensor) -> None:
        """Write the entries' results to their places in x [B, Hq, T, ...], a result of the whole batch.

        ``part`` has these results: [U, Hq, T, ...], or [U, group, T, ...] for single heads.
        """
        if self.everything:
            x.copy_(part)
        elif self.heads is None:
            x[self.rows] = part
        else:
            x.unflatten(1, (self.stored, -1))[self.rows, self.heads] = part

    def behind(self, rows: int) -> Entries:
        """Return the same entries in a larger batch that has ``rows`` other rows in front."""
        return replace(self, rows=self.rows + rows, everything=False)

    def keep(self, places: Mapping[int, int]) -> tuple[Tensor, Entries]:
        """Return the indices [U'] of the entries that stay when rows leave, and their places in the new batch.

        ``places`` maps each row that stays to its new row. All other rows leave.
        """
        staying, new_rows = [], []
        for i, row in enumerate(self.rows.tolist()):
            if row in places:
                staying.append(i)
                new_rows.append(places[row])
        index = torch.tensor(staying, dtype=torch.int64, device=self.rows.device)
        rows = torch.tensor(new_rows, dtype=torch.int64, device=self.rows.device)
        if self.heads is None:
            return index, Entries(rows, heads=None, stored=self.stored, everything=len(staying) == len(places))
        return index, Entries(rows, self.heads[index], stored=self.stored, everything=False)


def group_entries(
    entries: Sequence[Entry], key: Callable[[StoredRow], Hashable], any_length: bool = False
) -> Iterator[list[Entry]]:
    """Yield groups of entries that can be attended together, each group in the order of the batch.

    The entries of a group have equal ``key(row)``, and their rows store equally many heads. A group is padded to its
    longest entry, so none may be longer than PADDING_LIMIT times the shortest: otherwise the group is split. A single
    head with a ``size`` counts as ``size`` tokens long. With ``any_length`` only groups of heads with a size are split.
    """
    by_key: dict[Hashable, list[Entry]] = {}
    for entry in entries:
        by_key.setdefault((key(entry.row), entry.stored), []).append(entry)
    for members in by_key.values():
        members.sort(key=_count_tokens)
        # entries are sorted by length, so the first entry of a group is its shortest
        groups = [[members[0]]]
        for entry in members[1:]:
            shortest = groups[-1][0]
            length_matters = entry.row.size or not any_length
            if length_matters and _needs_padding(entry, shortest):
                groups.append([])
            groups[-1].append(entry)
        for group in groups:
            yield sorted(group, key=_find_place)


def _count_tokens(entry: Entry) -> int:
    return entry.row.size or sum(s.tokens for s in entry.row.cache.segments)


def _find_place(entry: Entry) -> tuple[int, int]:
    """Return an entry's (row, head). Sorting by this key puts entries into the order of the batch."""
    # a whole row is the only entry of its row, so any number serves as its head
    return (entry.index, entry.head or 0)


def _needs_padding(entry: Entry, shortest: Entry) -> bool:
    """Return True if an entry is too long for a group whose shortest entry is ``shortest``.

    An entry may be at most PADDING_LIMIT times as long as ``shortest``. Sizes are compared if both have one, otherwise
    their segments one by one.
    """
    if entry.row.size and shortest.row.size:
        return entry.row.size > PADDING_LIMIT * shortest.row.size
    for segment, short in zip(entry.row.cache.segments, shortest.row.cache.segments, strict=True):
        # ragged segments are batched without padding and may have any length
        if segment.lengths is None and segment.tokens > PADDING_LIMIT * max(short.tokens, 1):
            return True
    return False


def attend_groups(query: Tensor, groups: Sequence[tuple[Entries, Callable[[Tensor], Tensor]]]) -> Tensor:
    """Return the attention [B, Hq, T, D] of query [B, Hq, T, D], computed group by group.

    ``groups`` are pairs (entries, attend). ``attend`` maps the entries' queries [U, Hq, T, D], or [U, group, T, D] for
    single heads, to their attention, which has the same shape.
    """
    if len(groups) == 1:
        entries, attend = groups[0]
        if entries.everything:
            # the entries are all rows in order, so their outputs need not be copied to their places
            return attend(query)
    out = torch.empty_like(query)
    for entries, attend in groups:
        entries.write(out, attend(entries.select_queries(query)))
    return out


def mean_by_row(groups: Sequence[tuple[Entries, Tensor | None]], rows: int) -> Tensor | None:
    """Return for each row of a batch the mean of its entries' values [B]; None if no group has values.

    groups: pairs (entries, values [U] or None).
    rows: the number B of rows. A row without values gets nan.
    """
    with_values = [(entries, values) for entries, values in groups if values is not None]
    if not with_values:
        return None
    if len(with_values) == 1:
        entries, values = with_values[0]
        if entries.everything:
            # there is already exactly one value for each row of the batch
            return values
    row = torch.cat([entries.rows for entries, _ in with_values])
    all_values = torch.cat([values for _, values in with_values])
    zeros = all_values.new_zeros(rows)
    sums = zeros.index_add(0, row, all_values)
    counts = zeros.index_add(0, row, torch.ones_like(all_values))
    # a row without values divides 0 by 0 and gets nan
    return sums / counts


def select_head(cache: LayerCache, head: int, stored: int) -> LayerCache:
    """Return a cache of head ``head`` alone, as views of ``cache``, which stores ``stored`` heads."""
    # a segment with fewer heads has one head for several neighbours among the ``stored`` heads
    segments = tuple(s.head(head // (stored // s.heads)) for s in cache.segments)
    return replace(cache, segments=segments, heads=1, query_heads=cache.query_heads // stored)


def replace_heads(old: Segment, heads: Sequence[Segment]) -> Segment:
    """Return the ragged segment ``old`` with its heads replaced by ``heads``, put side by side.

    heads: one segment [1, L, ...] for each head. L may differ between heads, and may exceed the old head's tokens.
    """
    positions = torch.cat([s.positions for s in heads], dim=1)
    state = {}
    for name in heads[0].state:
        state[name] = torch.cat([s.state[name] for s in heads], dim=1)
    ragged = replace(
        old,
        k=torch.cat([s.k for s in heads], dim=1),
        v=torch.cat([s.v for s in heads], dim=1),
        positions=positions,
        lengths=torch.tensor([s.tokens for s in heads], dtype=torch.int32, device=positions.device),
        state=state,
    )
    codes = [s.codes for s in heads if s.codes is not None]
    if not codes:
        return ragged
    k_codes, k_counts = join_heads([head_codes.k for head_codes in codes])
    v_codes, v_counts = join_heads([head_codes.v for head_codes in codes])
    return replace(ragged, codes=Codes(k_codes, v_codes, k_counts=k_counts, v_counts=v_counts))
