"""Rows of exact numbers that only grow: stored segments, whole or thin, and one dense tail of new tokens.

Shapes: B rows, Hq query heads, Hk kv heads, T new tokens, t tokens of the tail, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvbench.kv import ops
from kvbench.kv.exact_attention import can_fuse
from kvbench.kv.segment import LayerCache, Segment
from kvbench.storage import kernels, split
from kvbench.storage.attend import attend
from kvbench.storage.entries import Entries, Entry, attend_groups, group_entries, mean_by_row
from kvbench.storage.format import Format, Room, StoredRow
from kvbench.storage.kernels import exact_heads, on_cpu
from kvbench.storage.row_segments import (
    Ragged,
    RowSegment,
    flatten_rows,
    per_place,
    size_with_room,
    stack_rows,
    take_entries,
    with_more_room,
)


@dataclass
class ExactGroup:
    """Entries of one segment format, which are attended together, padded to the longest.

    entries: the places of the entries in the batch.
    segments: for each i, the i-th segments of all entries as one batch.
    attended: [U], the number of tokens that each entry attended in the most recent step; None without a masker.
    """

    entries: Entries
    segments: list[RowSegment | Ragged]
    attended: Tensor | None = None


class ExactRows(Format):
    """All exact rows under one masking method, or without masking. Entries of one segment format are attended together.

    Only kernels read ragged heads side by side. Elsewhere single heads are attended, because most of a padded batch
    would be padding.

    masker: the masking method that all rows share; None: all tokens are attended.
    windowed: True if rows attend through a sliding window.
    groups: the entries and their stored segments, which do not change.
    keys, values: the tail of new tokens [B, Hk, at most ``capacity``, D], shared by all groups; None before the first.
    used, new: how many tokens the tail holds, and how many of them came last.
    starts: [B], the position of the tail's first token.
    most: [B], the number of tokens with which each row was loaded.
    longest: the largest of ``most``.
    located: the groups whose tokens kvbench-kernels reads, as a table of addresses, and the other groups; None before
        the first step.
    splits: True if attention over parts of the tokens may be merged: no mask, and no heads that share logits.
    """

    takes_ragged = True

    def __init__(self, rows: Sequence[StoredRow], room: Room) -> None:
        self.masker = rows[0].masker
        self.capacity = room.tokens
        self.windowed = room.windowed
        device = rows[0].cache.segments[0].k.device
        # only kernels read ragged heads side by side, and kernels know neither masks nor windows
        kernels_attend = not room.windowed and self.masker is None and kernels.serves(device)
        entries: list[Entry] = []
        for i, row in enumerate(rows):
            entry = Entry(i, row)
            if kernels_attend:
                entries.append(entry)
            else:
                entries.extend(entry.split_heads())
        self.located: tuple[exact_heads.HeadTable | None, list[ExactGroup]] | None = None
        self.groups = []
        for members in group_entries(entries, self.segment_key):
            segments = _batch_segments(members, room.windowed)
            self.groups.append(ExactGroup(Entries.of(members, len(rows)), segments))
        self.starts = torch.tensor([row.cache.seen for row in rows], device=device)
        self.most = torch.tensor([row.cache.tokens for row in rows], device=device)
        self.longest = max(row.cache.tokens for row in rows)
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.used, self.new = 0, 0
        stored = [s for group in self.groups for s in group.segments]
        shares_logits = any(s.shared is not None for s in stored)
        keeps_positions = any(s.positions is not None for s in stored)
        self.splits = self.masker is None and not shares_logits
        if self.masker is not None:
            self.moves = "it decides in each step what is attended"
        elif shares_logits:
            self.moves = "its heads share logits"
        elif keeps_positions:
            self.moves = "the text outgrows the model's sliding window"

    @classmethod
    def takes(cls, row: StoredRow) -> bool:
        return True

    @classmethod
    def key(cls, row: StoredRow) -> Hashable:
        # rows of all formats and lengths share a batch, so that they share one tail
        return (row.masker,)

    def add(self, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Write new tokens k, v [B, Hk, T, D] into the tail. Their positions follow from ``starts``."""
        keys, values = self.room(k, v, tokens=k.shape[2])
        span = slice(self.used, self.used + k.shape[2])
        # the step's tokens follow the earlier ones directly
        keys[:, :, span], values[:, :, span] = k, v
        self.grow(k.shape[2])

    def room(self, k: Tensor, v: Tensor, tokens: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the tail's buffers (keys, values), each [B, Hk, ., D], with room for ``tokens`` more tokens.

        tokens: None makes room for all tokens to come.
        k, v: new tokens [B, Hk, ., D], which show the heads, channels and dtype of the first buffers.

        Full buffers grow by a share of the tokens held, so that they are copied only now and then.
        """
        if self.keys is None or self.values is None:
            self.keys = k.new_empty(*k.shape[:2], 0, k.shape[3])
            self.values = v.new_empty(*v.shape[:2], 0, v.shape[3])
        if tokens is None:
            least, size = self.capacity, self.capacity
        else:
            least = self.used + tokens
            size = size_with_room(least, self.longest + self.used, self.capacity)
        if self.keys.shape[2] < least:
            self.keys, self.values = with_more_room(self.keys, size), with_more_room(self.values, size)
        return self.keys, self.values

    def grow(self, tokens: int) -> None:
        """Count ``tokens`` more tokens in the tail, after they were written there."""
        self.used, self.new = self.used + tokens, tokens

    def tail(self) -> tuple[Tensor, Tensor]:
        """Return (keys, values) [B, Hk, used, D] of the tokens added since the batch was built."""
        # the first ``add`` has allocated the buffers
        assert self.keys is not None and self.values is not None
        return self.keys[:, :, : self.used], self.values[:, :, : self.used]

    def attend(self, query: Tensor, scale: float, window: int | None) -> Tensor:
        """Return attention [B, Hq, T, D] of the newest T tokens over segments and tail, and set ``attended``."""
        # fp32 on a CPU is attended in parts, unless Triton's interpreter runs the kernels of a GPU there
        if self.splits and window is None and can_fuse(query, scale) and not kernels.serves(query.device):
            return self._attend_in_parts(query, scale)
        floor: Tensor | None = None
        if window is not None and self.windowed:
            # floor [B, T]: the query at position p sees positions p - window + 1 to p
            newest = torch.arange(self.used - self.new, self.used, device=query.device)
            floor = self.starts[:, None] + newest - window + 1

        def attend_group(group: ExactGroup, query: Tensor) -> Tensor:
            """Return the attention of a group's queries over its segments and its part of the tail."""
            entries = group.entries
            k, v = self.tail()
            group_floor, group_starts = None, None
            if floor is not None:
                group_floor = entries.select_rows(floor)
                group_starts = entries.select_rows(self.starts)
            out, group.attended = attend(
                query,
                group.segments,
                (entries.select_tokens(k), entries.select_tokens(v)),
                scale=entries.select_scale(scale),
                floor=group_floor,
                tail_start=group_starts,
                masker=self.masker,
            )
            return out

        out = self.attend_by_group(query, attend_group)
        self.attended = mean_by_row([(g.entries, g.attended) for g in self.groups], len(self.starts))
        return out

    def _attend_in_parts(self, query: Tensor, scale: float) -> Tensor:
        """Return attention [B, Hq, T, D] of query [B, Hq, T, D], in fp32 on a CPU, over stored segments and tail.

        One call of kvbench-kernels computes it if the package is installed and there is one new token. Otherwise one
        part attends the tail of all rows, another part the stored segments group by group, and both are merged.
        """
        if on_cpu.reads_exact(query):
            return self._attend_by_kernels(query, scale)
        tail = split.attend_causally(query, *self.tail(), scale)
        # a group has some rows, or single heads of some rows, so each group writes its part into its places
        out, lse = torch.empty_like(query), torch.empty_like(query[..., 0])
        for group in self.groups:
            part = split.attend_segments(group.entries.select_queries(query), group.segments, scale)
            group.entries.write(out, part.out)
            group.entries.write(lse, part.lse)
        return split.merge_outputs(split.Part(out, lse), tail)

    def _attend_by_kernels(self, query: Tensor, scale: float) -> Tensor:
        """Return attention [B, Hq, 1, D] of query [B, Hq, 1, D]. One call of a C function attends most groups.

        It attends all groups that it can read. The other groups are attended by PyTorch, each over its segments and its
        part of the tail.
        """
        # ``add`` has made the tail before anything attends
        assert self.keys is not None and self.values is not None
        # stored segments do not change, so their addresses are tabulated once, until rows leave
        if self.located is None:
            self.located = self._locate_groups(query, kv_heads=self.keys.shape[1])
        table, others = self.located
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        if table is not None:
            table.point_to_tail(self.keys, self.values, self.used)
            on_cpu.attend_exact(query, scale, table, out)
        for group in others:
            group_query = group.entries.select_queries(query)
            stored = split.attend_segments(group_query, group.segments, scale)
            new_keys, new_values = self.tail()
            tail = split.attend_causally(
                group_query, group.entries.select_tokens(new_keys), group.entries.select_tokens(new_values), scale
            )
            group.entries.write(out, split.merge_outputs(stored, tail))
        return out

    def _locate_groups(self, query: Tensor, kv_heads: int) -> tuple[exact_heads.HeadTable | None, list[ExactGroup]]:
        """Return (table of addresses of the groups that kvbench-kernels can read, the other groups).

        The table is None if there are no such groups. ``query`` [B, Hq, T, D] shows the query heads and channels.
        """
        _, query_heads, _, channels = query.shape
        readable, others = [], []
        for group in self.groups:
            if all(exact_heads.can_read(s, channels) for s in group.segments):
                readable.append((group.entries, group.segments))
            else:
                others.append(group)
        if not readable:
            return None, others
        return exact_heads.build_head_table(readable, query_heads, kv_heads, channels), others

    def attend_by_group(self, query: Tensor, attend: Callable[[ExactGroup, Tensor], Tensor]) -> Tensor:
        """Return the outputs [B, Hq, T, D] of all groups.

        attend: maps a group and its part of ``query`` [B, Hq, T, D] to the group's outputs.
        """
        return attend_groups(query, [(g.entries, partial(attend, g)) for g in self.groups])

    def keep(self, at: Tensor) -> None:
        """Drop all rows except the ascending indices ``at``, and groups without a row."""
        new_row_of = {old_row: new_row for new_row, old_row in enumerate(at.tolist())}
        groups = []
        for group in self.groups:
            # staying has the indices of the group's entries that stay, and entries has their new places
            staying, entries = group.entries.keep(new_row_of)
            if len(staying):
                groups.append(ExactGroup(entries, [s.rows(staying) for s in group.segments]))
        self.groups, self.located = groups, None
        self.starts, self.most = self.starts[at], self.most[at]
        self.keys, self.values = take_entries(self.keys, at), take_entries(self.values, at)

    def tokens(self) -> Tensor:
        # exact tokens are never dropped
        return self.most + self.used

    def payload(self) -> list[int]:
        """Return how many bytes the keys and values of each row take, those in segments and those in the tail."""
        token_bytes = 0
        for t in (self.keys, self.values):
            if t is not None:
                token_bytes += per_place(t, t.shape[0] * t.shape[2])
        sizes = [self.used * token_bytes] * len(self.starts)
        # an entry may be one head of a row, so a row's bytes are summed over its entries
        for group in self.groups:
            for segment in group.segments:
                for row, size in zip(group.entries.rows.tolist(), segment.payload(), strict=True):
                    sizes[row] += size
        return sizes

    def segments(self, u: int, cache: LayerCache) -> tuple[Segment, ...]:
        """Return the segments with which row ``u`` was loaded from ``cache``, and one of its tokens in the tail."""
        k, v = self.tail()
        # the clones free the batch's tail: views would keep the tail of all rows alive
        return ops.append(cache, k[u].clone(), v[u].clone()).segments


def _batch_segments(entries: Sequence[Entry], positions: bool) -> list[RowSegment | Ragged]:
    """Return a list whose item i holds the i-th segments of all entries as one batch. These have one format.

    With ``positions`` the batches keep the positions of tokens, because a sliding window needs them.
    """
    batches: list[RowSegment | Ragged] = []
    for same_place in zip(*(entry.row.cache.segments for entry in entries), strict=True):
        if same_place[0].lengths is None:
            batches.append(stack_rows(same_place, positions))
        else:
            batches.append(flatten_rows(same_place))
    return batches
