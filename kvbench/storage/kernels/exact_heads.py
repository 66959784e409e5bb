"""Tables of the addresses at which exact rows hold their tokens. A C function of kvbench-kernels reads tokens by them.

The function reads a row head by head, and a head in runs. A run is tokens of one head that lie one after the other in
memory. A head's runs are its part of each stored segment, and its new tokens in the batch's tail.
Shapes: B rows, U entries, Hq query heads, H stored heads, Hk kv heads, L slots, D head dimension.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.storage.entries import Entries
from kvbench.storage.row_segments import Ragged, RowSegment

MOST_CHANNELS = 512
"""The most channels of a key that the C functions read."""


class TokenRun(NamedTuple):
    """Tokens of one head that lie one after the other: the fields of the C functions' ``struct run``.

    keys, values: the addresses of the first token's key and value.
    tokens: the number of tokens.
    key_width: how many channels a stored key has.
    key_channels: the address of the list of these channels; 0 if keys have all channels.
    """

    keys: int
    values: int
    tokens: int
    key_width: int
    key_channels: int


class HeadRow(NamedTuple):
    """One stored head of one row: the fields of the C functions' ``struct head``.

    first_query: the index of its first query head among all B Hq.
    queries: how many query heads read it.
    first_run: the index of its first run.
    runs: the number of its runs.
    """

    first_query: int
    queries: int
    first_run: int
    runs: int


@dataclass
class HeadTable:
    """The N heads of a batch's entries, and the R runs in which their tokens lie.

    heads: int64 [N, 4]; a row is a ``HeadRow``.
    runs: int64 [R, 5]; a row is a ``TokenRun``.
    tail_runs: [N], the index in ``runs`` of each head's new tokens.
    tail_heads: [N], the kv head (of all B Hk) in the tail that each head reads.
    longest: the most stored tokens of a head.
    most_queries: the most query heads that read a stored head.
    stored_tokens: the number of stored tokens of each head.
    stored: the tensors to whose memory ``runs`` points. The table keeps them alive.
    stored_bytes: the bytes of these tensors.
    tail_tokens: the number of new tokens of each head.
    """

    heads: Tensor
    runs: Tensor
    tail_runs: Tensor
    tail_heads: Tensor
    longest: int
    most_queries: int
    stored_tokens: tuple[int, ...]
    stored: list[Tensor]
    stored_bytes: int
    tail_tokens: int = 0

    def point_to_tail(self, keys: Tensor, values: Tensor, used: int) -> None:
        """Set each head's last run, its new tokens, to the tokens that the batch's tail now holds.

        keys, values: the buffers [B, Hk, ., D] of the tail. Their memory may have moved since the previous step.
        used: how many tokens the tail holds.
        """
        head_bytes = keys.stride(1) * keys.element_size()
        self.runs[self.tail_runs, 0] = keys.data_ptr() + self.tail_heads * head_bytes
        self.runs[self.tail_runs, 1] = values.data_ptr() + self.tail_heads * head_bytes
        self.runs[self.tail_runs, 2] = used
        self.tail_tokens = used


@functools.lru_cache(maxsize=256)
def split_evenly(counts: tuple[int, ...], parts: int) -> tuple[tuple[int, int], ...]:
    """Return (first head, number of heads) of at most ``parts`` parts with about equally many tokens each.

    A part is heads one after the other. The answer is kept, since every step asks each layer's split again.

    counts: the number of tokens of each head.
    """
    total = sum(counts)
    bounds = [0]
    tokens = 0
    for head, count in enumerate(counts):
        # a head belongs to the part in which its middle token lies
        if tokens + count / 2 > total * len(bounds) / parts and head > bounds[-1]:
            bounds.append(head)
        tokens += count
    bounds.append(len(counts))
    return tuple((first, end - first) for first, end in itertools.pairwise(bounds))


def can_read(segment: RowSegment | Ragged, channels: int) -> bool:
    """Return True if the C functions can read a segment of a model whose heads have ``channels`` channels.

    They need keys and values in fp32, with a head's tokens one behind the other, and no heads that share logits. Keys
    may be thin, values may not.
    """
    k, v = segment.k, segment.v
    if segment.value_channels is not None or segment.shared is not None or v.shape[-1] != channels:
        return False
    if segment.key_channels is None and k.shape[-1] != channels:
        return False
    for t in (k, v):
        if t.dtype != torch.float32 or t.stride()[-2:] != (t.shape[-1], 1):
            return False
    return k.shape[-1] <= MOST_CHANNELS


def build_head_table(
    groups: Sequence[tuple[Entries, Sequence[RowSegment | Ragged]]], query_heads: int, kv_heads: int, channels: int
) -> HeadTable:
    """Return the table of the heads of all ``groups``, each a pair (entries, segments).

    Every segment must be one that the C functions can read (``can_read``).

    query_heads, kv_heads, channels: the numbers of a whole row, also for entries that are single heads.
    """
    heads: list[HeadRow] = []
    runs: list[TokenRun] = []
    tail_runs: list[int] = []
    tail_heads: list[int] = []
    stored_tokens: list[int] = []
    stored: list[Tensor] = []
    for entries, segments in groups:
        runs_by_segment = []
        for segment in segments:
            runs_of_segment, tensors = _runs_of(segment)
            runs_by_segment.append(runs_of_segment)
            stored += tensors
        # segments of a row may store different numbers of heads; the table has the heads of the segment with most
        heads_of_row = max([kv_heads] + [segment.heads for segment in segments])
        if entries.heads is not None:
            heads_of_row = entries.stored
        group = query_heads // heads_of_row
        for place, row in enumerate(entries.rows.tolist()):
            heads_of_entry = range(heads_of_row)
            if entries.heads is not None:
                only_head = int(entries.heads[place])
                heads_of_entry = range(only_head, only_head + 1)
            for head in heads_of_entry:
                first_run, tokens = len(runs), 0
                for segment, runs_of_segment in zip(segments, runs_by_segment, strict=True):
                    # an entry that is a single head has one stored head in each segment
                    segment_head = 0
                    if entries.heads is None:
                        segment_head = head // (heads_of_row // segment.heads)
                    run = runs_of_segment[place][segment_head]
                    if run.tokens:
                        runs.append(run)
                        tokens += run.tokens
                tail_runs.append(len(runs))
                # point_to_tail fills in this run at every step
                runs.append(TokenRun(keys=0, values=0, tokens=0, key_width=channels, key_channels=0))
                tail_heads.append(row * kv_heads + head // (heads_of_row // kv_heads))
                head_row = HeadRow(
                    first_query=row * query_heads + head * group,
                    queries=group,
                    first_run=first_run,
                    runs=len(runs) - first_run,
                )
                heads.append(head_row)
                stored_tokens.append(tokens)
    return HeadTable(
        heads=torch.tensor(heads),
        runs=torch.tensor(runs),
        tail_runs=torch.tensor(tail_runs),
        tail_heads=torch.tensor(tail_heads),
        longest=max(stored_tokens),
        most_queries=max(head_row.queries for head_row in heads),
        stored_tokens=tuple(stored_tokens),
        stored=stored,
        stored_bytes=sum(t.nbytes for t in stored),
    )


def _runs_of(segment: RowSegment | Ragged) -> tuple[list[list[TokenRun]], list[Tensor]]:
    """Return (runs, tensors) of a segment: the run of each entry's each stored head, and the tensors they point to."""
    k, v = segment.k, segment.v
    tensors = [k, v]
    channels: Tensor | None = None
    if segment.key_channels is not None:
        channels = segment.key_channels.contiguous()
        tensors.append(channels)
    # an offset is the index of a head's first number in the memory of keys or of values
    if isinstance(segment, Ragged):
        counts = segment.lengths.tolist()
        key_offsets = (segment.starts * k.stride(0)).tolist()
        value_offsets = (segment.starts * v.stride(0)).tolist()
    else:
        by_row = [segment.longest] * len(k)
        if segment.lengths is not None:
            by_row = segment.lengths.flatten().tolist()
        counts = [[count] * segment.heads for count in by_row]
        key_offsets = _head_offsets(k)
        value_offsets = _head_offsets(v)
    runs = []
    for entry, entry_counts in enumerate(counts):
        runs_of_entry = []
        for head, tokens in enumerate(entry_counts):
            run = TokenRun(
                keys=k.data_ptr() + key_offsets[entry][head] * k.element_size(),
                values=v.data_ptr() + value_offsets[entry][head] * v.element_size(),
                tokens=tokens,
                key_width=k.shape[-1],
                key_channels=0 if channels is None else channels[entry, head].data_ptr(),
            )
            runs_of_entry.append(run)
        runs.append(runs_of_entry)
    return runs, tensors


def _head_offsets(t: Tensor) -> list[list[int]]:
    """Return for each entry and head of t [U, H, L, C] the index of its first number in t's memory."""
    offsets = []
    for entry in range(t.shape[0]):
        offsets.append([entry * t.stride(0) + head * t.stride(1) for head in range(t.shape[1])])
    return offsets
