"""Rows whose older tokens are packed while decoding: packed buffers that grow, and a ring of exact tokens.

A step writes its tokens into the ring, attends, and then packs the tokens that must not stay exact. A token's key and
its value may be packed at different moments, so logits are put in token order before values are weighted.
Shapes: U rows (or single ragged heads), H stored heads, T new tokens, S slots of a ring.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.kv.partly_packed import Codes
from kvbench.kv.scale import is_plain
from kvbench.kv.segment import LayerCache, Segment
from kvbench.storage import kernels
from kvbench.storage.attend import (
    Estimate,
    attend_by_logits,
    compute_logits,
    compute_packed_logits,
    weigh,
    weigh_packed,
)
from kvbench.storage.channels import spread_channels
from kvbench.storage.format import Format, Room, StoredRow
from kvbench.storage.packed_half import PackedHalf, StoredHalf


class PackedRows(Format):
    """Entries whose older tokens are packed. One chain's quantiser packs all of them, in one format.

    masker: the method that restricts the attention of all entries; None: every token is attended.
    k, v: the keys and values of all entries.
    settles_first: True if tokens are packed before their own step attends, False if after it.
    alone: True if the tokens of one step are read and packed as if each came in a step of its own.
    """

    moves = "it quantises tokens or keeps latents while decoding"

    def __init__(self, rows: Sequence[StoredRow], room: Room) -> None:
        # all rows have one coder and one masker (``key``), and ``takes`` accepts only rows with a coder
        coder, self.masker = rows[0].coder, rows[0].masker
        assert coder is not None
        keys, values = [], []
        for row in rows:
            for s in row.cache.segments:
                if s.codes is not None:
                    keys.append(StoredHalf(s.codes.k, exact=s.k, channels=s.key_channels))
                    values.append(StoredHalf(s.codes.v, exact=s.v, channels=s.value_channels))
        self.k = PackedHalf(keys, coder.keys, coder.packer.pack_keys, room=room, grows=coder.grows)
        self.v = PackedHalf(values, coder.values, coder.packer.pack_values, room=room, grows=coder.grows)
        self.settles_first = not coder.packer.packs_after_step
        self.alone = room.alone

    @classmethod
    def takes(cls, row: StoredRow) -> bool:
        return row.coder is not None

    @classmethod
    def key(cls, row: StoredRow) -> Hashable:
        return (row.coder, cls.segment_key(row))

    def add(self, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Write new tokens k, v [U, Hk, T, D] into the rings, and pack the tokens that must no longer stay exact."""
        # first pack the tokens that the previous step still read exactly and that must not stay exact
        self.settle()
        # tokens of one step must see the same packed tokens that each would see in a step of its own
        several = self.alone and k.shape[2] > 1
        for half, x in ((self.k, k), (self.v, v)):
            half.add(x)
            # the numbers of the previous step do not hold for the new tokens
            half.seen = None
            if several:
                half.set_seen(k.shape[2], self.settles_first)
        if self.settles_first or several:
            self.settle()

    def settle(self) -> None:
        """Pack the keys and values that their rules no longer keep exact."""
        self.k.settle()
        self.v.settle()

    def skip(self, tokens: int) -> None:
        """Add ``tokens`` random tokens at once, for benchmarks, which measure a step's cost and not its result."""
        self.settle()
        self.k.skip(tokens)
        self.v.skip(tokens)

    def attend(self, query: Tensor, scale: float, window: int | None) -> Tensor:
        """Return attention [U, Hq, T, D] of the newest T tokens, query [U, Hq, T, D]. Pack nothing.

        If the packer ``packs_after_step``, the tokens that must not stay exact are packed later, before anything else
        reads the rows. Another layer may share these tokens, and must still attend them exactly in the same step.
        """
        out = None
        # kernels know no masks, no queries that see different packed tokens, no caps or sinks, and need stored values
        kernels_can_read = self.masker is None and self.k.seen is None and is_plain(scale) and self.v.stored
        if kernels_can_read:
            # one kernel call replaces dozens of small operations
            out = kernels.attend_packed(query, scale, self.k, self.v)
        if out is None:
            logits_of = partial(self._compute_logits, query, scale)
            out, self.attended = attend_by_logits(logits_of, self._weigh, query.dtype, self.masker, scale)
        return out

    def _compute_logits(self, query: Tensor, scale: float, estimate: Estimate) -> Tensor:
        """Return logits [U, Hq, T, L] fp32 of query [U, Hq, T, D] in token order.

        Tokens later than the query's, and tokens that a shorter row lacks, have -inf.

        estimate: maps stored keys to the keys that are multiplied by the query.
        """
        half, new_tokens = self.k, query.shape[2]
        if half.alike:
            return self._compute_logits_alike(query, scale, estimate)
        longest = max(half.total)
        # column i has the logits of token i; the extra last column takes those of ring slots without an exact token
        scores = query.new_full((*query.shape[:3], longest + 1), -torch.inf, dtype=torch.float32)
        most_packed = max(half.packed)
        if most_packed:
            scores[..., :most_packed] = compute_packed_logits(query, half.old(), scale, half.channels, estimate)
        columns = half.list_columns()[:, None, None].expand(*query.shape[:3], -1)
        ring_logits = compute_logits(query, estimate(half.ring), scale).float()
        if half.seen is None:
            scores.scatter_(3, columns, ring_logits)
        else:
            # a token may be packed for one query and exact for another, so each query picks its own logit
            exact = torch.full_like(scores, -torch.inf).scatter_(3, columns, ring_logits)
            is_packed = torch.arange(longest + 1, device=query.device) < half.seen
            scores = torch.where(is_packed, scores, exact)
        # new token i of T is token total - T + i of its row, and sees no later token
        last_seen = half.as_tensor(half.total)[:, None] - new_tokens + torch.arange(new_tokens, device=query.device)
        is_later = torch.arange(longest, device=query.device) > last_seen[:, None, :, None]
        return scores[..., :longest].masked_fill(is_later, -torch.inf)

    def _compute_logits_alike(self, query: Tensor, scale: float, estimate: Estimate) -> Tensor:
        """Return logits [U, Hq, T, L] fp32 of query [U, Hq, T, D] in token order, for rows that are ``alike``.

        All rows hold equally many packed and exact tokens, each in order, so the two parts only have to be joined.

        estimate: maps stored keys to the keys that are multiplied by the query.
        """
        half, new_tokens = self.k, query.shape[2]
        scores = compute_logits(query, estimate(half.read_exact()), scale).float()
        if half.packed[0]:
            packed = compute_packed_logits(query, half.old(), scale, half.channels, estimate)
            scores = torch.cat([packed, scores], dim=3)
        if new_tokens > 1:
            # the new tokens come last and see each other causally
            is_later = torch.ones(new_tokens, new_tokens, dtype=torch.bool, device=query.device).triu(1)
            scores[..., -new_tokens:].masked_fill_(is_later, -torch.inf)
        return scores

    def _weigh(self, probs: Tensor) -> Tensor:
        """Return values [U, Hq, T, D] fp32 weighted by probs [U, Hq, T, L]."""
        half = self.v
        if not half.stored:
            # the keys are their own values
            half = self.k
        most_packed = max(half.packed)
        if half.alike:
            # all rows hold their packed tokens first, then the exact ones
            packed_probs = probs[..., :most_packed]
            out = weigh(probs[..., most_packed:], half.read_exact())
        else:
            packed_probs, ring_probs = _split_probs(half, probs)
            out = weigh(ring_probs, half.ring)
        if most_packed:
            packed_out = weigh_packed(packed_probs, half.old())
            if half.channels is not None:
                packed_out = spread_channels(packed_out, half.channels, out.shape[3])
            out = out + packed_out
        return out

    def keep(self, at: Tensor) -> None:
        """Drop all entries except the ascending indices ``at``."""
        self.settle()
        self.k.keep(at)
        self.v.keep(at)

    def tokens(self) -> Tensor:
        return self.k.as_tensor(self.k.total)

    def payload(self) -> list[int]:
        self.settle()
        return [k + v for k, v in zip(self.k.payload(), self.v.payload(), strict=True)]

    def segments(self, u: int, cache: LayerCache) -> tuple[Segment, ...]:
        """Return the only segment of entry ``u``, with the tokens read since it was loaded from ``cache``."""
        self.settle()
        (loaded,) = cache.segments
        k_codes, k = self.k.held(u)
        v_codes, v = self.v.held(u)
        # packed rows drop no tokens: the tokens that the row holds beyond those of ``cache`` are the ones read since
        end = cache.seen + self.k.total[u] - cache.tokens
        new_positions = torch.arange(cache.seen, end, dtype=torch.int32, device=k.device)
        positions = torch.cat([loaded.positions, new_positions.expand(loaded.positions.shape[0], -1)], dim=1)
        return (replace(loaded, k=k, v=v, positions=positions, codes=Codes(k_codes, v_codes)),)


def _split_probs(half: PackedHalf, probs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights (of packed tokens [U, Hq, T, Lq], of the ring's slots [U, Hq, T, S]) out of probs.

    probs: [U, Hq, T, L], the weights in token order. A token's weight goes to its codes or to its slot, as each query
        sees it.
    """
    packed_counts = half.seen
    if packed_counts is None:
        packed_counts = half.as_tensor(half.packed)[:, None, None, None]
    is_packed = torch.arange(probs.shape[3], device=probs.device) < packed_counts
    exact_probs = probs
    if half.seen is not None:
        # a token in the ring may be packed for this query, and then its exact value gets weight 0
        exact_probs = probs.masked_fill(is_packed, 0)
    # ring slots without an exact token read the extra column behind the last token, whose weight is 0
    columns = half.list_columns()[:, None, None].expand(*probs.shape[:3], -1)
    ring_probs = F.pad(exact_probs, (0, 1)).gather(3, columns)
    most_packed = max(half.packed)
    packed_probs = probs[..., :most_packed].masked_fill(~is_packed[..., :most_packed], 0)
    return packed_probs, ring_probs
