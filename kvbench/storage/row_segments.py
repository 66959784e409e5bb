"""Segments of many rows side by side, in the form that one batched attention reads.

Shapes: B rows, Hq query heads, H stored heads, L slots, N tokens of all heads, C kept key channels, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from kvbench.kv.segment import Segment

GROWTH = 16  # storage that is full grows by a sixteenth of the tokens held
FEWEST = 8  # but by at least this many tokens


@dataclass(frozen=True)
class Shared:
    """Which query heads share logits. Logits are computed for leading heads alone, and other heads take them.

    leading: the query heads whose logits are computed.
    key_rows: for each leading head, the stored keys that it reads.
    place: for each query head, the index in ``leading`` of the head whose logits it takes.
    """

    leading: Tensor  # [B, C] int64, ascending
    key_rows: Tensor | None  # [B, C] int64; None if the c-th leading head reads the c-th stored keys
    place: Tensor  # [B, Hq] int64

    def rows(self, index: Tensor) -> Shared:
        """Return the sharing in the rows ``index`` of the batch only."""
        return Shared(self.leading[index], take_entries(self.key_rows, index), self.place[index])

    def over(self, heads: int) -> Shared:
        """Return the same sharing for keys of all ``heads`` kv heads, also of those that no leading head reads."""
        group = self.place.shape[1] // heads
        return Shared(self.leading, key_rows=self.leading // group, place=self.place)


def find_shared(leads: Sequence[Tensor], stored: int) -> Shared:
    """Return the sharing of rows, given ``leads``, which has for each row every query head's leading head [Hq].

    Every row has equally many leading heads. ``stored`` is the number of kv heads whose values are stored. Keys that no
    leading head reads are not stored.
    """
    leading_by_row, place_by_row = [], []
    for row in leads:
        # the leading heads, ascending, and for each query head the index of its leading head among these
        leading_heads, index = torch.unique(row.long(), return_inverse=True)
        leading_by_row.append(leading_heads)
        place_by_row.append(index)
    leading, place = torch.stack(leading_by_row), torch.stack(place_by_row)
    # a leading query head reads kv head lead // group; only the kv heads that are read are stored, in order
    kv_heads = leading // (place.shape[1] // stored)
    key_rows = torch.stack([torch.unique(row, return_inverse=True)[1] for row in kv_heads])
    in_order = torch.arange(key_rows.shape[1], device=key_rows.device).expand_as(key_rows)
    if torch.equal(key_rows, in_order):
        return Shared(leading, key_rows=None, place=place)
    return Shared(leading, key_rows=key_rows, place=place)


@dataclass(frozen=True)
class RowSegment:
    """Segments of one format from B rows, padded to the longest, for one batched attention."""

    k: Tensor  # [B, H, L, D or C]
    v: Tensor  # [B, H, L, D]
    valid: Tensor | None = None  # [B, H or 1, L] bool; None if no slot is padding
    key_channels: Tensor | None = None  # [B, H, C] int64
    value_channels: Tensor | None = None  # [B, H, C] int64
    positions: Tensor | None = None  # [B, H or 1, L] int32; kept only if a sliding window needs them
    shared: Shared | None = None  # set where query heads share logits; k then holds only the heads that it names
    lengths: Tensor | None = None  # [B, 1] int32, how many slots are valid; None if all are
    starts: ClassVar[None] = None

    @property
    def heads(self) -> int:
        """The number H of stored heads."""
        return self.v.shape[1]

    @property
    def longest(self) -> int:
        """The number L of slots, that is, the tokens of the longest row."""
        return self.v.shape[2]

    def rows(self, index: Tensor) -> RowSegment:
        """Return the same segment for the rows ``index`` only."""
        return RowSegment(
            self.k[index],
            self.v[index],
            valid=take_entries(self.valid, index),
            key_channels=take_entries(self.key_channels, index),
            value_channels=take_entries(self.value_channels, index),
            positions=take_entries(self.positions, index),
            shared=None if self.shared is None else self.shared.rows(index),
            lengths=take_entries(self.lengths, index),
        )

    def padded(self) -> RowSegment:
        """Return the segment itself, because it is padded already."""
        return self

    def payload(self) -> list[int]:
        """Return the bytes of keys and values of each row."""
        rows, length = self.v.shape[0], self.v.shape[2]
        counts = [length] * rows
        if self.valid is not None:
            # ``stack_rows`` gives [B, 1, L], because all heads of a row hold equally many tokens
            counts = self.valid.sum(dim=(1, 2)).tolist()
        token_bytes = per_place(self.k, rows * length) + per_place(self.v, rows * length)
        return [count * token_bytes for count in counts]


@dataclass(frozen=True)
class Ragged:
    """Segments of one format with ragged heads from B rows, stored one head after the other without padding.

    Kernels read this form. Plain PyTorch reads ``padded``.

    lengths: how many tokens each head holds.
    starts: the index in k and v of each head's first token.
    longest: the most tokens of a head.
    """

    k: Tensor  # [N, D or C]
    v: Tensor  # [N, D or C]
    lengths: Tensor  # [B, H] int32
    starts: Tensor  # [B, H] int64
    longest: int
    key_channels: Tensor | None = None  # [B, H, C] int64
    value_channels: Tensor | None = None  # [B, H, C] int64
    shared: ClassVar[None] = None
    positions: ClassVar[None] = None

    @property
    def heads(self) -> int:
        """The number H of stored heads."""
        return self.lengths.shape[1]

    def rows(self, index: Tensor) -> Ragged:
        """Return the same segment for the rows ``index`` only."""
        lengths, starts = self.lengths[index], self.starts[index]
        counts, new_starts = lengths.flatten().long(), _find_head_starts(lengths)
        # ``tokens`` has the old place of each token in the new order: place i of a head comes from its old start +
        # (i - its new start)
        tokens = torch.arange(int(counts.sum()), device=counts.device)
        tokens += (starts - new_starts).flatten().repeat_interleave(counts)
        return Ragged(
            self.k[tokens],
            self.v[tokens],
            lengths,
            starts=new_starts,
            longest=int(lengths.max()),
            key_channels=take_entries(self.key_channels, index),
            value_channels=take_entries(self.value_channels, index),
        )

    def padded(self) -> RowSegment:
        """Return the segment with every head padded to the longest."""
        slot = torch.arange(self.longest, device=self.k.device)
        valid = slot < self.lengths[..., None]
        # padding repeats token 0, and ``valid`` hides it
        index = (self.starts[..., None] + slot).masked_fill(~valid, 0)
        return RowSegment(
            self.k[index],
            self.v[index],
            valid=valid,
            key_channels=self.key_channels,
            value_channels=self.value_channels,
        )

    def payload(self) -> list[int]:
        """Return the bytes of keys and values of each row."""
        token_bytes = per_place(self.k, len(self.k)) + per_place(self.v, len(self.v))
        return [count * token_bytes for count in self.lengths.sum(dim=1).tolist()]


def take_entries(t: Tensor | None, index: Tensor) -> Tensor | None:
    """Return the entries ``index`` of t [B, ...]; None if there is no t."""
    if t is None:
        return None
    return t[index]


def size_with_room(least: int, held: int, most: int) -> int:
    """Return the number of tokens for which to make room when storage is full.

    Storage grows by a share of the tokens held. It is therefore never much larger than they are, and seldom copied.

    least: how many tokens must fit now.
    held: how many tokens a row holds now.
    most: the most tokens that will ever be stored.
    """
    return max(least, min(most, least + max(held // GROWTH, FEWEST)))


def with_more_room(t: Tensor, size: int) -> Tensor:
    """Return a tensor [B, H, size, ...] that begins with t [B, H, ., ...].

    The rest is 0 and not left undefined, because a weight of 0 times NaN would be NaN.
    """
    larger = t.new_zeros(*t.shape[:2], size, *t.shape[3:])
    larger[:, :, : t.shape[2]] = t
    return larger


def per_place(t: Tensor, places: int) -> int:
    """Return how many bytes tensor t takes for each of its ``places`` (tokens or slots); 0 if it has no places."""
    if places == 0:
        return 0
    return t.nbytes // places


def stack_channels(channels: Sequence[Tensor | None]) -> Tensor | None:
    """Return each row's kept channels [H, C] as one tensor [B, H, C] int64; None if the rows keep all channels.

    The rows have one format: all of them keep C channels, or all of them are None.
    """
    by_row = [row for row in channels if row is not None]
    if not by_row:
        return None
    return torch.stack(by_row).long()


def flatten_rows(segments: Sequence[Segment]) -> Ragged:
    """Return segments with ragged heads, one of each row, as one ragged batch.

    The segments have one format. The batch of a single row is a view.
    """
    # all segments are ragged, so the filter leaves none out
    lengths_by_row = [s.lengths for s in segments if s.lengths is not None]
    lengths = torch.stack(lengths_by_row).to(torch.int32)
    if len(segments) == 1:
        k, v = segments[0].k[0], segments[0].v[0]
    else:
        k = torch.cat([s.k[0] for s in segments])
        v = torch.cat([s.v[0] for s in segments])
    return Ragged(
        k,
        v,
        lengths,
        starts=_find_head_starts(lengths),
        longest=max(s.tokens for s in segments),
        key_channels=stack_channels([s.key_channels for s in segments]),
        value_channels=stack_channels([s.value_channels for s in segments]),
    )


def stack_rows(segments: Sequence[Segment], positions: bool = False) -> RowSegment:
    """Return segments, one of each row, as one batch that is padded to the longest.

    The segments have one format, and all heads of a segment hold equally many tokens. The batch of a single row is a
    view. With ``positions``, the batch keeps the tokens' positions, because a sliding window needs them.
    """
    longest = max(s.tokens for s in segments)
    # segments of equal length need no padding, and then no mask
    valid, lengths = None, None
    if any(s.tokens < longest for s in segments):
        lengths = torch.tensor([[s.tokens] for s in segments], dtype=torch.int32, device=segments[0].k.device)
        valid = (torch.arange(longest, device=lengths.device) < lengths)[:, None]
    padded_positions = None
    if positions:
        padded_positions = torch.stack([F.pad(s.positions, (0, longest - s.positions.shape[1])) for s in segments])
    # segments of one format all have leads, or all have none
    leads = [s.leads for s in segments if s.leads is not None]
    return RowSegment(
        _pad_stack([s.k for s in segments], longest),
        _pad_stack([s.v for s in segments], longest),
        valid=valid,
        key_channels=stack_channels([s.key_channels for s in segments]),
        value_channels=stack_channels([s.value_channels for s in segments]),
        positions=padded_positions,
        shared=find_shared(leads, segments[0].v.shape[0]) if leads else None,
        lengths=lengths,
    )


def describe_format(segment: Segment) -> tuple[object, ...]:
    """Return a segment's format: the sizes and kinds of its tensors, which do not depend on its number of tokens.

    Segments with equal formats can be attended in one batch.
    """
    codes: tuple[object, ...] | None = None
    if segment.codes is not None:
        codes = (segment.codes.k.format, segment.codes.v.format)
    sharing: tuple[int, int] | None = None
    if segment.leads is not None:
        # a batch needs equally many stored keys and leading heads in every row
        sharing = (segment.k.shape[0], len(segment.leads.unique()))
    return (
        segment.heads,
        segment.k.shape[2],
        segment.v.shape[2],
        segment.key_channels is not None,
        segment.value_channels is not None,
        segment.lengths is not None,
        segment.k.dtype,
        codes,
        segment.latent,
        sharing,
    )


def _find_head_starts(lengths: Tensor) -> Tensor:
    """Return the index [B, H] of each head's first token, if heads of ``lengths`` [B, H] tokens are concatenated."""
    counts = lengths.flatten().long()
    return (counts.cumsum(0) - counts).view(lengths.shape)


def _pad_stack(tensors: Sequence[Tensor], longest: int) -> Tensor:
    """Stack tensors [H, L, .], one per row, into [B, H, longest, .], padded with zeros.

    longest: the largest L.
    """
    # a single tensor is the longest, needs no padding and stays a view
    if len(tensors) == 1:
        return tensors[0][None]
    padded = []
    for t in tensors:
        missing = longest - t.shape[1]
        # F.pad copies even if nothing is missing
        if missing:
            t = F.pad(t, (0, 0, 0, missing))
        padded.append(t)
    return torch.stack(padded)
