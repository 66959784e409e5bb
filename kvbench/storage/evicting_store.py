"""Keys and values in slots that are reused while decoding (see storage.evicting_rows).

Either all tokens have one format (``OneFormat``), or the prompt's are thin and new ones are whole (``Thin``).

storage.evicting_rows decides which slot holds which token, and for how long. A thin token keeps some channels, a whole
token all of them.
Shapes: B rows, Hq query heads, H stored heads, S slots, T new tokens, W places for the other channels of whole tokens,
C kept channels, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvbench.kv.ops import only_segment, select
from kvbench.kv.own_values import values_or_keys
from kvbench.kv.packed import Packed
from kvbench.kv.partly_packed import Values, allocate_buffers, map_tensors, stored_tensors, write_tokens
from kvbench.kv.scale import capped
from kvbench.kv.segment import LayerCache, Segment, per_head
from kvbench.storage.attend import Estimate, as_they_are, compute_logits, compute_packed_logits, weigh, weigh_packed
from kvbench.storage.channels import pick_channels, spread_channels
from kvbench.storage.roles import Packer
from kvbench.storage.row_segments import per_place, stack_channels, take_entries

Read = Estimate | None  # maps stored keys [..., D] to the keys that attention reads; None: the stored keys


class OneFormat:
    """Slots whose tokens are all exact, or all packed by ``packer``.

    k, v: the keys and values [B, H, S, D], or their codes.
    none: an empty tensor [H, 0, D], the exact keys or values of a segment whose tokens are all packed.
    fresh: the newest slots [B, H, T] and their exact k, v [B, H, T, D], if the packer packs after the step; else None.
    """

    def __init__(self, segments: Sequence[Segment], size: int, packer: Packer | None) -> None:
        """Make room for ``size`` slots per head of each row. Load nothing.

        ``segments`` has one segment of each row, all of one format. They show which buffers are needed.
        """
        first, self.packer = segments[0], packer

        def make_buffer(t: Tensor) -> Tensor:
            """Return a buffer of zeros [B, H, S, ...] for tensors like t [H, L, ...] of one row."""
            return t.new_zeros(len(segments), first.heads, size, *t.shape[2:])

        def make_buffers(rows: Sequence[Values]) -> Values:
            packed = [row for row in rows if isinstance(row, Packed)]
            if packed:
                # each row's frozen scales are kept, because new tokens are coded with them
                return allocate_buffers(packed, make_buffer)
            return map_tensors(rows[0], make_buffer)

        keys, values = zip(*(s.stored() for s in segments), strict=True)
        self.k, self.v = make_buffers(keys), make_buffers(values)
        self.none = first.k.new_zeros(first.heads, 0, keys[0].shape[2])
        self.fresh: tuple[Tensor, Tensor, Tensor] | None = None

    def load(self, row: int, head: Tensor, slot: Tensor, segment: Segment) -> None:
        """Put a segment's N tokens, one head after the other, into slots of one row.

        Token i goes into slot ``slot[i]`` of head ``head[i]``.
        """
        for buffer, stored in zip((self.k, self.v), segment.stored(), strict=True):
            for target, tokens in zip(stored_tensors(buffer), stored_tensors(stored), strict=True):
                target[row, head, slot] = list_tokens(tokens, segment)

    def add(self, slots: Tensor, k: Tensor, v: Tensor, held: Tensor) -> None:
        """Write new tokens k, v [B, H, T, D] into ``slots`` [B, H, T]. ``held`` [B, H, S] marks other used slots."""
        packer = self.packer
        new_keys: Values = k
        new_values: Values = v
        self.fresh = None
        if packer is not None:
            if isinstance(self.k, Packed):
                new_keys = self.k.pack_more(k, packer.pack_keys)
            if isinstance(self.v, Packed):
                new_values = self.v.pack_more(v, packer.pack_values)
            if packer.packs_after_step:
                self.fresh = (slots, k, v)
        write_tokens(self.k, slots, new_keys)
        write_tokens(self.v, slots, new_values)

    def compute_logits(self, query: Tensor, scale: float, read: Read) -> Tensor:
        """Return scaled logits [B, Hq, T, S] of query [B, Hq, T, D] and the keys. Free slots get undefined logits.

        ``read`` maps stored keys to the keys that are multiplied, for methods that attend estimated keys.
        """
        estimate = read or as_they_are
        if not isinstance(self.k, Packed):
            return compute_logits(query, estimate(self.k), scale)
        scores = compute_packed_logits(query, self.k, scale, channels=None, estimate=estimate)
        if self.fresh is None:
            return scores
        # the newest tokens are packed only after this step, so their exact logits replace the logits of their codes
        slots, k, _ = self.fresh
        exact = compute_logits(query, estimate(k), scale).to(scores.dtype)
        return scores.scatter(3, _repeat_for_queries(slots, query), exact)

    def weigh(self, probs: Tensor) -> Tensor:
        """Return values [B, Hq, T, D] fp32 weighted by probs [B, Hq, T, S]."""
        values = values_or_keys(self.k, self.v)
        if not isinstance(values, Packed):
            return weigh(probs, values)
        if self.fresh is None:
            return weigh_packed(probs, values)
        # the codes of the newest tokens get weight 0, and their exact values get the weight instead
        slots, k, v = self.fresh
        index = _repeat_for_queries(slots, probs)
        packed_out = weigh_packed(probs.scatter(3, index, 0.0), values)
        return packed_out + weigh(probs.gather(3, index), values_or_keys(k, v))

    def keep(self, rows: Tensor) -> None:
        """Drop all rows except the indices ``rows``."""
        self.k, self.v = self.k[rows], self.v[rows]

    def payload(self, held: Tensor) -> list[int]:
        """Return how many bytes each row's tokens take. ``held`` [B, H, S] marks the slots in use."""
        slot_bytes = _count_slot_bytes(stored_tensors(self.k) + stored_tensors(self.v))
        return [count * slot_bytes for count in held.sum(dim=(1, 2)).tolist()]

    def tokens_of_row(self, row: int) -> tuple[Tensor, Tensor]:
        """Return one row's keys and values [H, S, D] as attention reads them."""

        def read_row(buffer: Values) -> Tensor:
            if isinstance(buffer, Packed):
                return buffer[row].dequantise(self.none.dtype)
            return buffer[row]

        return read_row(self.k), read_row(self.v)

    def segments(self, row: int, slots: Segment, held: Tensor) -> tuple[Segment, ...]:
        """Return one row's segments, each ascending in position; ragged if heads hold different numbers of tokens.

        ``slots`` has the positions and state [H, S, ...] of the slots. ``held`` [H, S] marks the slots in use.
        """
        segment = replace(slots, k=self.none, v=self.none).holding(self.k[row], self.v[row])
        return (sort_by_position(segment, held),)


class Thin:
    """Slots of thin and whole tokens, with the interface of ``OneFormat``.

    Older tokens hold some channels, recent and new tokens all of them. Every slot has room for the kept channels. A
    whole token also takes one of W places for its other channels, wherever its slot is. A new token can therefore
    reuse the slot of a thin token. W is at most the number of a head's slots.

    slot: [B, H, W], the slot of the token in each place.
    whole: [B, H, W], True for places that are in use.
    """

    def __init__(self, rows: Sequence[Sequence[Segment]], size: int, places: int) -> None:
        """Make room for ``size`` slots and ``places`` places per head of each row. Load nothing.

        ``rows`` has the segments of each row. The first of them is thin and shows which channels are kept.
        """
        thin = [segments[0] for segments in rows]
        self.k = StoredPart([(s.k, s.key_channels) for s in thin], thin[0].heads, size, places)
        self.v = StoredPart([(s.v, s.value_channels) for s in thin], thin[0].heads, size, places)
        shape = (len(rows), thin[0].heads, places)
        self.slot = torch.zeros(shape, dtype=torch.int64, device=thin[0].k.device)
        self.whole = torch.zeros(shape, dtype=torch.bool, device=thin[0].k.device)

    def load(self, row: int, head: Tensor, slot: Tensor, segment: Segment) -> None:
        """Put a segment's N tokens into slots of one row. All of them are thin, or all of them are whole.

        head, slot: [N], the head of each token, ascending, and the slot that it gets.
        """
        k, v = list_tokens(segment.k, segment), list_tokens(segment.v, segment)
        if segment.key_channels is not None or segment.value_channels is not None:
            self.k.kept[row, head, slot], self.v.kept[row, head, slot] = k, v
            return
        # head is ascending: an entry's index minus the index of its head's first entry counts within the head
        place = torch.arange(len(head), device=head.device) - torch.searchsorted(head, head)
        self.slot[row, head, place], self.whole[row, head, place] = slot, True
        for part, tokens in ((self.k, k), (self.v, v)):
            part.open(tokens.shape[1])
            # ``split`` takes [B, H, T, D]: the N tokens are passed as one row of N heads with a token each
            order = part.order
            if order is not None:
                order = order[row, head][None]
            kept, others = part.split(tokens[None, :, None], order)
            part.kept[row, head, slot] = kept[0, :, 0]
            if others is not None and part.others is not None:
                part.others[row, head, place] = others[0, :, 0]

    def add(self, slots: Tensor, k: Tensor, v: Tensor, held: Tensor) -> None:
        """Write new tokens k, v [B, H, T, D] into ``slots`` [B, H, T]. ``held`` [B, H, S] marks other used slots."""
        # evicted tokens free their places
        self.whole &= held.gather(2, self.slot)
        # the sort puts free places first
        places = (~self.whole).int().sort(dim=-1, descending=True, stable=True).indices[..., : slots.shape[2]]
        self.slot.scatter_(2, places, slots)
        self.whole.scatter_(2, places, True)
        for part, new in ((self.k, k), (self.v, v)):
            part.open(new.shape[3])
            kept, others = part.split(new, part.order)
            write_tokens(part.kept, slots, kept)
            if others is not None and part.others is not None:
                write_tokens(part.others, places, others)

    def compute_logits(self, query: Tensor, scale: float, read: Read) -> Tensor:
        """Return scaled logits [B, Hq, T, S] of query [B, Hq, T, D] and the keys. Free slots get undefined logits.

        ``scale`` and ``read`` are those of ``OneFormat.compute_logits``.
        """
        estimate = read or as_they_are
        kept = self.k.kept
        others = self.k.others
        order = self.k.order
        if order is None or others is None:
            return compute_logits(query, estimate(kept), scale)
        # the cap applies to the sum of both parts; float() removes it from the factor of each part
        channels, factor = kept.shape[3], float(scale)
        scores = compute_logits(query, estimate(kept), factor, order[..., :channels])
        slot = _repeat_for_queries(self.slot, query)
        if read is None:
            # a whole token's q.k is the sum over its kept channels and over its other channels
            more = compute_logits(query, others, factor, order[..., channels:])
        else:
            # an estimate is made of whole keys: its logit replaces the logit over the kept channels
            whole_logits = compute_logits(query, read(self.k.join_channels(self.slot)), factor, order)
            more = whole_logits - scores.gather(3, slot)
        # free places add nothing
        more = more.masked_fill(~_repeat_for_queries(self.whole, query), 0)
        return capped(scores.scatter_add(3, slot, more), scale)

    def weigh(self, probs: Tensor) -> Tensor:
        """Return values [B, Hq, T, D] fp32 weighted by probs [B, Hq, T, S]."""
        kept, others, order = self.v.kept, self.v.others, self.v.order
        out = weigh(probs, kept)
        if order is None or others is None:
            return out
        in_use = _repeat_for_queries(self.whole, probs)
        whole_probs = probs.gather(3, _repeat_for_queries(self.slot, probs)).masked_fill(~in_use, 0)
        # the kept channels and then the others, which is the order of ``order``
        both = torch.cat([out, weigh(whole_probs, others)], dim=3)
        return spread_channels(both, order, order.shape[2])

    def keep(self, rows: Tensor) -> None:
        """Drop all rows except the indices ``rows``."""
        self.slot, self.whole = self.slot[rows], self.whole[rows]
        self.k.keep(rows)
        self.v.keep(rows)

    def payload(self, held: Tensor) -> list[int]:
        """Return how many bytes each row's tokens take. ``held`` [B, H, S] marks the slots in use."""
        tokens = held.sum(dim=(1, 2)).tolist()
        # only places whose token is still held have bytes that count
        whole_tokens = (self.whole & held.gather(2, self.slot)).sum(dim=(1, 2)).tolist()
        kept_bytes = _count_slot_bytes([self.k.kept, self.v.kept])
        other_bytes = _count_slot_bytes([t for t in (self.k.others, self.v.others) if t is not None])
        sizes = []
        for count, whole_count in zip(tokens, whole_tokens, strict=True):
            sizes.append(count * kept_bytes + whole_count * other_bytes)
        return sizes

    def tokens_of_row(self, row: int) -> tuple[Tensor, Tensor]:
        """Return one row's keys and values [H, S, D], with zeros for dropped channels."""
        return self.k.tokens_of_row(row, self.slot, self.whole), self.v.tokens_of_row(row, self.slot, self.whole)

    def segments(self, row: int, slots: Segment, held: Tensor) -> tuple[Segment, ...]:
        """Return one row's segment of thin tokens, if there are any, and its segment of whole tokens.

        Arguments are those of ``OneFormat.segments``.
        """
        slot = self.slot[row]
        whole = self.whole[row] & held.gather(1, slot)
        # a token is thin if no used place belongs to it; several free places may name one slot, so places are summed
        places_of_slot = torch.zeros_like(held, dtype=torch.int32).scatter_add(1, slot, whole.int())
        thin = held & ~places_of_slot.bool()

        # this segment has a token for each of the W places, and the next step takes those in use
        in_places = replace(
            slots,
            k=self.k.sort_channels(self.slot)[row],
            v=self.v.sort_channels(self.slot)[row],
            positions=gather_slots(slots.positions, slot),
            state={name: gather_slots(t, slot) for name, t in slots.state.items()},
        )
        whole_segment = sort_by_position(in_places, whole)
        if not bool(thin.any()):
            return (whole_segment,)
        thin_slots = replace(slots, k=self.k.kept[row], v=self.v.kept[row])
        thin_segment = replace(
            sort_by_position(thin_slots, thin),
            key_channels=self.k.list_channels(row),
            value_channels=self.v.list_channels(row),
        )
        return (thin_segment, whole_segment)


class StoredPart:
    """The keys, or the values, of ``Thin``: the kept channels of all tokens, and the other channels of whole tokens.

    kept: [B, H, S, C], the kept channels of every token.
    others: [B, H, W, D - C], the other channels of whole tokens.
    channels: [B, H, C], the kept channels; None if all are kept.
    order: [B, H, D], the kept channels and then the others, both ascending.

    ``others`` and ``order`` are None if all channels are kept. Otherwise they are None until the first whole token,
    because only a whole token shows D.
    """

    def __init__(self, thin: Sequence[tuple[Tensor, Tensor | None]], heads: int, size: int, places: int) -> None:
        """Make room for ``size`` slots and ``places`` places per head. Load nothing.

        ``thin`` has (thin tokens, their channels [H, C] or None for all) of each row.
        """
        # the rows have one format, so the first shows the dtype and the number of kept channels
        first, _ = thin[0]
        self.kept = first.new_zeros(len(thin), heads, size, first.shape[2])
        self.channels = stack_channels([channels for _, channels in thin])
        self.places = places
        self.order: Tensor | None = None
        self.others: Tensor | None = None

    def open(self, head_dim: int) -> None:
        """Make room for the other channels of whole tokens with ``head_dim`` channels. Later calls do nothing."""
        if self.channels is None or self.order is not None:
            return
        b, h, c = self.channels.shape
        is_other = torch.ones(b, h, head_dim, dtype=torch.bool, device=self.channels.device)
        is_other.scatter_(2, self.channels, False)
        # nonzero lists the D - C other channels of every head, head by head and ascending
        other_channels = is_other.nonzero()[:, 2].view(b, h, head_dim - c)
        self.order = torch.cat([self.channels, other_channels], dim=2)
        self.others = self.kept.new_zeros(b, h, self.places, head_dim - c)

    def split(self, x: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Split whole tokens x [B, H, T, D] into (kept channels, other channels).

        ``order`` [B, H, D] lists the kept channels of each head and then the others. None: all channels are kept, and
        the result is (x, None).
        """
        if order is None:
            return x, None
        kept_channels = self.kept.shape[3]
        reordered = pick_channels(x, order)
        return reordered[..., :kept_channels], reordered[..., kept_channels:]

    def join_channels(self, slot: Tensor) -> Tensor:
        """Return the whole token of each place [B, H, W, D], with channels in the order of ``self.order``.

        ``slot`` [B, H, W] is the slot of each place's token.
        """
        kept = self.kept.gather(2, slot[..., None].expand(-1, -1, -1, self.kept.shape[3]))
        if self.others is None:
            return kept
        return torch.cat([kept, self.others], dim=3)

    def sort_channels(self, slot: Tensor) -> Tensor:
        """Return the whole tokens of ``join_channels`` with their channels in ascending order."""
        tokens = self.join_channels(slot)
        if self.order is None:
            return tokens
        # scatter puts entry i of ``order`` back to channel order[i]
        return torch.empty_like(tokens).scatter_(3, self.order[:, :, None].expand_as(tokens), tokens)

    def tokens_of_row(self, row: int, slot: Tensor, whole: Tensor) -> Tensor:
        """Return one row's slots as tokens [H, S, D]: whole tokens, and thin ones with zeros for dropped channels.

        ``slot`` and ``whole`` [B, H, W] are the fields of ``Thin``.
        """
        kept = self.kept[row]
        if self.channels is None or self.order is None:
            return kept
        h, size = kept.shape[:2]
        # unused places write into one extra slot, which is cut off again
        tokens = kept.new_zeros(h, size + 1, self.order.shape[2])
        index = self.channels[row][:, None].expand(-1, size, -1)
        tokens[:, :size].scatter_(2, index, kept)
        places = slot[row].masked_fill(~whole[row], size)[..., None].expand(-1, -1, tokens.shape[2])
        return tokens.scatter_(1, places, self.sort_channels(slot)[row])[:, :size]

    def list_channels(self, row: int) -> Tensor | None:
        """Return the channels [H, C] that one row keeps as int16, the dtype of a segment's channels; None: all."""
        if self.channels is None:
            return None
        return self.channels[row].to(torch.int16)

    def keep(self, rows: Tensor) -> None:
        """Drop all rows except the indices ``rows``."""
        self.kept = self.kept[rows]
        self.channels = take_entries(self.channels, rows)
        self.order = take_entries(self.order, rows)
        self.others = take_entries(self.others, rows)


def list_tokens(t: Tensor, segment: Segment) -> Tensor:
    """Return a segment's tensor t as [N, ...]: the items of all tokens, one head after the other.

    t is [H or 1, L, ...], or [1, N, ...] for ragged heads.
    """
    if segment.lengths is not None:
        return t[0]
    return per_head(t, segment.heads).flatten(0, 1)


def expand_slots(slots: Tensor, t: Tensor) -> Tensor:
    """Return ``slots`` [..., L] as the index with which ``gather`` or ``scatter`` reads or writes t [..., S, ...]."""
    # the trailing axes of t repeat the index of their slot
    trailing = t.shape[slots.dim() :]
    ones = [1] * len(trailing)
    return slots.reshape(*slots.shape, *ones).expand(*slots.shape, *trailing)


def gather_slots(t: Tensor, slots: Tensor) -> Tensor:
    """Return the entries [H, L, ...] of t [H, S, ...] in ``slots`` [H, L]."""
    return t.gather(1, expand_slots(slots, t))


def sort_by_position(slots: Segment, held: Tensor) -> Segment:
    """Return the tokens of the slots that ``held`` [H, S] marks as a segment in order of position.

    The segment is ragged if heads hold different numbers of tokens.
    """
    counts = held.sum(dim=-1)
    # the largest int32 sorts free slots behind all positions
    hidden = slots.positions.masked_fill(~held, torch.iinfo(torch.int32).max)
    index = hidden.sort(dim=-1, stable=True).indices[:, : int(counts.max())]
    # ``select`` takes a whole cache, but does not read how many tokens it has seen
    cache = LayerCache((slots,), seen=0, heads=slots.heads, query_heads=slots.heads)
    return only_segment(select(cache, index, counts))


def _count_slot_bytes(tensors: Sequence[Tensor]) -> int:
    """Return how many bytes tensors [B, H, S, ...] take for one slot of one head."""
    return sum(per_place(t, t.shape[:3].numel()) for t in tensors)


def _repeat_for_queries(t: Tensor, query: Tensor) -> Tensor:
    """Return t [B, H, m], which has m items a stored head, repeated for each query head and token: [B, Hq, T, m].

    query: [B, Hq, T, .].
    """
    group = query.shape[1] // t.shape[1]
    return t.repeat_interleave(group, dim=1)[:, :, None].expand(-1, -1, query.shape[2], -1)
