"""Tables of the addresses of exact rows' tokens, by which kvbench-kernels' C function reads them head by head, in runs.

A run is tokens of one head that lie one after the other. A head's runs are its part of each stored segment, and its new
tokens in the batch's tail.
Shapes: B rows, U entries, Hq query heads, H stored heads, Hk kv heads, L slots, D head dimension.
"""

from __future__ import annotations

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

    keys, values, key_channels: addresses. key_channels is 0 where keys have all channels.
    """

    keys: int
    values: int
    tokens: int
    key_width: int
    key_channels: int


@dataclass
class HeadTable:
    """The heads of a batch's entries and the runs that are their tokens.

    heads: int64 [N, 4], the C functions' ``struct head``: first query head (of all B Hq), query heads, first run, runs.
    runs: int64 [R, 5], ``struct run``; see ``TokenRun``.
    tail_runs: [N], the index in ``runs`` of each head's new tokens.
    tail_heads: [N], the kv head (of all B Hk) in the tail that each head reads.
    longest: the most stored tokens of a head.
    most_queries: the most query heads that read a stored head.
    stored: the tensors whose memory ``runs`` names. The table keeps them alive.
    stored_bytes: the bytes of these tensors.
    tail_tokens: the number of new tokens of each head.
    """

    heads: Tensor
    runs: Tensor
    tail_runs: Tensor
    tail_heads: Tensor
    longest: int
    most_queries: int
    stored: list[Tensor]
    stored_bytes: int
    tail_tokens: int = 0

    def point_to_tail(self, keys: Tensor, values: Tensor, used: int) -> None:
        """Let each head's last run be the first ``used`` tokens of its kv head in keys and values [B, Hk, ., D]."""
        head_bytes = keys.stride(1) * keys.element_size()
        self.runs[self.tail_runs, 0] = keys.data_ptr() + self.tail_heads * head_bytes
        self.runs[self.tail_runs, 1] = values.data_ptr() + self.tail_heads * head_bytes
        self.runs[self.tail_runs, 2] = used
        self.tail_tokens = used


def can_read(segment: RowSegment | Ragged, channels: int) -> bool:
    """Return True if the C functions read a segment of heads of ``channels`` channels.

    It then has keys and values in fp32, token behind token, and no logits that heads share. Keys may be thin.
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
    """Return the table of the entries of ``groups``. The C functions read their segments (``can_read``).

    query_heads, kv_heads, channels: those of a row, also for entries that are single heads.
    """
    heads: list[tuple[int, int, int, int]] = []
    runs: list[TokenRun] = []
    tail_runs: list[int] = []
    tail_heads: list[int] = []
    longest = 0
    stored: list[Tensor] = []
    for entries, segments in groups:
        runs_by_segment = []
        for segment in segments:
            runs_of_segment, tensors = _runs_of(segment)
            runs_by_segment.append(runs_of_segment)
            stored += tensors
        # the heads that a row stores in the finest of its segments
        of_row = max([kv_heads] + [segment.heads for segment in segments])
        if entries.heads is not None:
            of_row = entries.stored
        group = query_heads // of_row
        for place, row in enumerate(entries.rows.tolist()):
            numbers = range(of_row)
            if entries.heads is not None:
                head = int(entries.heads[place])
                numbers = range(head, head + 1)
            for number in numbers:
                first_run, tokens = len(runs), 0
                for segment, runs_of_segment in zip(segments, runs_by_segment, strict=True):
                    # an entry that is a single head has one stored head in each segment
                    of_segment = 0
                    if entries.heads is None:
                        of_segment = number // (of_row // segment.heads)
                    run = runs_of_segment[place][of_segment]
                    if run.tokens:
                        runs.append(run)
                        tokens += run.tokens
                tail_runs.append(len(runs))
                runs.append(TokenRun(keys=0, values=0, tokens=0, key_width=channels, key_channels=0))
                tail_heads.append(row * kv_heads + number // (of_row // kv_heads))
                heads.append((row * query_heads + number * group, group, first_run, len(runs) - first_run))
                longest = max(longest, tokens)
    return HeadTable(
        heads=torch.tensor(heads),
        runs=torch.tensor(runs),
        tail_runs=torch.tensor(tail_runs),
        tail_heads=torch.tensor(tail_heads),
        longest=longest,
        most_queries=max(queries for _, queries, _, _ in heads),
        stored=stored,
        stored_bytes=sum(t.nbytes for t in stored),
    )


def _runs_of(segment: RowSegment | Ragged) -> tuple[list[list[TokenRun]], list[Tensor]]:
    """Return the run of each entry and stored head, and the tensors whose memory the runs name."""
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
        of_entry = []
        for head, tokens in enumerate(entry_counts):
            run = TokenRun(
                keys=k.data_ptr() + key_offsets[entry][head] * k.element_size(),
                values=v.data_ptr() + value_offsets[entry][head] * v.element_size(),
                tokens=tokens,
                key_width=k.shape[-1],
                key_channels=0 if channels is None else channels[entry, head].data_ptr(),
            )
            of_entry.append(run)
        runs.append(of_entry)
    return runs, tensors


def _head_offsets(t: Tensor) -> list[list[int]]:
    """Return for each entry and head of t [U, H, L, C] the index of its first number in t's memory."""
    offsets = []
    for entry in range(t.shape[0]):
        offsets.append([entry * t.stride(0) + head * t.stride(1) for head in range(t.shape[1])])
    return offsets
