"""Rows whose older tokens are packed while they decode: packed buffers that grow, and a ring of exact tokens.

A step writes its tokens into the ring, attends, and then packs what has left the residual. Keys and values are packed
at different moments, so logits and weights are put in token order in between.
Shapes: U rows (or single ragged heads), H stored heads, T new tokens, S slots of a ring.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.kv.packed import Packed
from kvbench.kv.partly_packed import Codes, Residual, batched
from kvbench.kv.scale import cap_of
from kvbench.kv.segment import LayerCache, Segment
from kvbench.storage import kernels
from kvbench.storage.attend import Estimate, logits, masked_softmax, spread, weigh
from kvbench.storage.format import Format, Room, StoredRow
from kvbench.storage.packed_products import packed_logits, packed_weigh
from kvbench.storage.row_segments import beside, grown, per_place, roomy, take


class PackedHalf:
    """Keys, or values, of U rows: packed tokens first, then exact ones in a ring.

    A ring of S slots holds token t of a row in slot t mod S.

    codes: the packed tokens [U, H, ., C] of all rows, with room for more.
    ring: the exact tokens [U, H, S, D].
    packed, total: of each row, the number of packed tokens and of all tokens.
    channels: [U, H, C], the channels that packed tokens keep; None: all.
    most: the most steps of tokens that can be packed before the batch ends.
    seen: [U, 1, T, 1], how many tokens each new query sees as packed, where queries differ in that; else None.
    before: of each row, how many tokens were packed before the newest step, where ``seen`` is set.
    """

    def __init__(
        self,
        rows: Sequence[tuple[Packed, Tensor, Tensor | None]],
        residual: Residual,
        pack: Callable[[Tensor], Packed],
        room: Room,
        grows: bool = True,
    ) -> None:
        # a row: its packed tokens [H, Lq, .], its exact tokens [H, L - Lq, D], and, if it is thin, its channels [H, C]
        packed, exact, channels = zip(*rows, strict=True)
        self.residual, self.pack, self.grows, self.step = residual, pack, grows, packed[0].step
        self.packed = [row.shape[1] for row in packed]
        self.total = [old.shape[1] + new.shape[1] for old, new in zip(packed, exact, strict=True)]
        exact_now = max(row.shape[1] for row in exact)
        if grows:
            most_packed = max(residual.packed(total + room.tokens) for total in self.total)
            # a residual of everything would be endless: no ring needs more slots than tokens can come
            most_exact = min(residual.most, max(self.total) + room.tokens)
        else:
            most_packed = max(self.packed)
            most_exact = exact_now + room.tokens
        self.most = most_packed // self.step
        size = max(max(self.packed) // self.step, 1)

        def make_buffer(t: Tensor) -> Tensor:
            # axis 1 of a packed tensor counts steps of tokens: single tokens, or groups that are coded together
            return t.new_zeros(len(packed), t.shape[0], size, *t.shape[2:])

        self.codes = batched(packed, make_buffer)
        # a step writes its tokens before the oldest ones leave
        slots = max(most_exact, exact_now) + room.at_once
        self.ring = exact[0].new_zeros(len(packed), exact[0].shape[0], slots, exact[0].shape[2])
        self.channels = beside(channels)
        self.seen: Tensor | None = None
        self.before = self.packed
        for u, (old, new) in enumerate(zip(packed, exact, strict=True)):
            for buffer, codes in zip(self.codes.payload(), old.payload(), strict=True):
                buffer[u, :, : codes.shape[1]] = codes
            slot = (torch.arange(new.shape[1], device=new.device) + old.shape[1]) % slots
            self.ring[u, :, slot] = new

    @property
    def slots(self) -> int:
        return self.ring.shape[2]

    def add(self, x: Tensor) -> None:
        """Write new tokens x [U, Hk, T, D] into the ring, repeated for the H stored heads."""
        u, heads, t = x.shape[0], self.ring.shape[1], x.shape[2]
        if heads != x.shape[1]:
            x = x.repeat_interleave(heads // x.shape[1], dim=1)
        span = self._ring_span(self.total, t)
        if span is not None:
            self.ring[:, :, span] = x
        else:
            slot = (self.numbers(self.total)[:, None] + torch.arange(t, device=x.device)) % self.slots
            # the two index tensors [U, T] come first: [U, T, H, D]
            self.ring[torch.arange(u, device=x.device)[:, None], :, slot] = x.transpose(1, 2)
        self.total = [total + t for total in self.total]

    def see(self, tokens: int, settles_first: bool) -> None:
        """Let each of the newest ``tokens`` see what was packed when it came, as if they had come one by one."""
        self.before = list(self.packed)
        # token i of them comes after total - tokens + i others, and counts itself where packing precedes attention
        end = 1 if settles_first else 0
        offsets = range(end - tokens, end)
        packed_for_queries = []
        for total, packed in zip(self.total, self.packed, strict=True):
            if self.grows:
                packed_for_queries.append([max(packed, self.residual.packed(total + offset)) for offset in offsets])
            else:
                packed_for_queries.append([packed] * tokens)
        self.seen = torch.tensor(packed_for_queries, device=self.ring.device)[:, None, :, None]

    def columns(self) -> Tensor:
        """Return the token of each ring slot [U, S] that some query reads exactly; the largest total for others."""
        first_exact = self.packed if self.seen is None else self.before
        total, packed = self.numbers(self.total)[:, None], self.numbers(first_exact)[:, None]
        slot = torch.arange(self.slots, device=self.ring.device)
        # the newest token t with t mod S = slot
        token = total - 1 - (total - 1 - slot) % self.slots
        return token.masked_fill((token < packed) | (token < 0), max(self.total))

    @property
    def alike(self) -> bool:
        """True if all rows hold as many tokens, packed and in all, and every query sees the same ones as packed."""
        return self.seen is None and len(set(self.total)) == len(set(self.packed)) == 1

    def exact(self) -> Tensor:
        """Return the exact tokens [U, H, L - Lq, D] in their order, of rows that are ``alike``."""
        start, count = self.packed[0] % self.slots, self.total[0] - self.packed[0]
        tokens = self.ring[:, :, start : start + count]
        missing = count - tokens.shape[2]
        if missing == 0:
            return tokens
        # behind the ring's last slot the tokens go on in its first one
        return torch.cat([tokens, self.ring[:, :, :missing]], dim=2)

    def old(self) -> Packed:
        """Return a view of the packed tokens [U, H, L, C]; behind a shorter row's last one they are undefined."""
        return self.codes.tokens(0, max(self.packed))

    def settle(self) -> None:
        """Pack the tokens that are no longer among the newest, which stay exact."""
        rows = self._rows_to_pack()
        while rows:
            self._pack_block(rows)
            rows = self._rows_to_pack()

    def _rows_to_pack(self) -> Sequence[int]:
        """Return the rows from which at least a unit of tokens has left the residual."""
        if not self.grows:
            return ()
        if len(set(self.total)) == len(set(self.packed)) == 1:
            # rows of a batch are often alike: one comparison, not one for each of hundreds of rows in every layer
            if self.residual.packed(self.total[0]) > self.packed[0]:
                return range(len(self.total))
            return ()
        return [u for u, total in enumerate(self.total) if self.residual.packed(total) > self.packed[u]]

    def _pack_block(self, rows: Sequence[int]) -> None:
        """Pack the oldest exact tokens of ``rows``, equally many of each: the most that all of them can pack."""
        block = min(self.residual.packed(self.total[u]) - self.packed[u] for u in rows)
        all_rows = len(rows) == len(self.total)
        span = self._ring_span(self.packed, block) if all_rows else None
        channels = self.channels
        if span is not None:
            # every row packs the same slots next: no index is made for them
            x = self.ring[:, :, span]
        else:
            row, packed = self.numbers(rows)[:, None], self.numbers([self.packed[u] for u in rows])[:, None]
            slot = (packed + torch.arange(block, device=row.device)) % self.slots
            x = self.ring[row, :, slot].transpose(1, 2)
            place = packed // self.step + torch.arange(block // self.step, device=row.device)
            channels = take(channels, row[:, 0])
        if channels is not None:
            x = x.gather(3, channels[:, :, None].expand(-1, -1, block, -1))
        coded = self.codes.more(x, self.pack, None if all_rows else rows)
        self._reserve((max(self.packed[u] for u in rows) + block) // self.step)
        for buffer, codes in zip(self.codes.payload(), coded.payload(), strict=True):
            if span is not None:
                first = self.packed[0] // self.step
                buffer[:, :, first : first + codes.shape[2]] = codes
            else:
                buffer[row, :, place] = codes.transpose(1, 2)
        for u in rows:
            self.packed[u] += block

    def _reserve(self, steps: int) -> None:
        """Make room for codes of ``steps`` times ``step`` tokens."""
        payload = list(self.codes.payload())
        if payload[0].shape[2] < steps:
            size = roomy(steps, max(self.total) // self.step, self.most)
            self.codes = self.codes.holding([grown(t, size) for t in payload], self.codes.frozen)

    def skip(self, tokens: int) -> None:
        """Count ``tokens`` more in each row and fill their storage with random numbers instead of packing any."""
        first = min(self.packed)
        self.total = [total + tokens for total in self.total]
        if self.grows:
            pairs = zip(self.packed, self.total, strict=True)
            self.packed = [max(packed, self.residual.packed(total)) for packed, total in pairs]
        self._reserve(max(self.packed) // self.step)
        for t in self.codes.tokens(first, max(self.packed)).payload():
            if t.is_floating_point():
                t.uniform_(0.01, 0.1)
            else:
                t.random_(0, 120)  # bytes below 120 are finite numbers where a format reads them as 8-bit floats
        self.ring.normal_()

    def _ring_span(self, first: Sequence[int], count: int) -> slice | None:
        """Return the slice of the ring slots that hold ``count`` tokens of each row from its ``first`` on.

        Returns None if rows differ in ``first`` or the slots pass the ring's end.
        """
        start = first[0] % self.slots
        if len(set(first)) > 1 or start + count > self.slots:
            return None
        return slice(start, start + count)

    def keep(self, at: Tensor) -> None:
        """Drop all rows but those at the indices ``at``."""
        self.codes, self.ring = self.codes[at], self.ring[at]
        self.channels = take(self.channels, at)
        rows = at.tolist()
        self.packed, self.total = [self.packed[u] for u in rows], [self.total[u] for u in rows]

    def payload(self) -> list[int]:
        """Return how many bytes each row's tokens take."""
        codes = tuple(self.codes.payload())
        step_bytes = sum(per_place(t, codes[0].shape[0] * codes[0].shape[2]) for t in codes)
        token_bytes = per_place(self.ring, self.ring.shape[0] * self.slots)
        sizes = []
        for packed, total in zip(self.packed, self.total, strict=True):
            sizes.append(packed // self.step * step_bytes + (total - packed) * token_bytes)
        return sizes

    def held(self, u: int) -> tuple[Packed, Tensor]:
        """Return copies of row u's (packed tokens [H, Lq, .], exact tokens [H, L - Lq, D])."""
        steps = self.packed[u] // self.step
        codes = self.codes[u]
        frozen = codes.frozen
        if frozen is not None:
            frozen = frozen.clone()
        slot = torch.arange(self.packed[u], self.total[u], device=self.ring.device) % self.slots
        return codes.holding([t[:, :steps].clone() for t in codes.payload()], frozen), self.ring[u][:, slot]

    def numbers(self, numbers: Sequence[int]) -> Tensor:
        """Return one number for each row [U] as a tensor on the device."""
        return torch.tensor(numbers, device=self.ring.device)


class PackedRows(Format):
    """Entries packed in one format by one chain's quantiser, all under the same masking method or under none."""

    moves = "it packs tokens or keeps latents while decoding"

    def __init__(self, rows: Sequence[StoredRow], room: Room) -> None:
        coder, self.masker = rows[0].coder, rows[0].masker
        assert coder is not None
        keys, values = [], []
        for row in rows:
            for s in row.cache.segments:
                if s.codes is not None:
                    keys.append((s.codes.k, s.k, s.key_channels))
                    values.append((s.codes.v, s.v, s.value_channels))
        self.k = PackedHalf(keys, coder.keys, coder.packer.pack_keys, room=room, grows=coder.grows)
        self.v = PackedHalf(values, coder.values, coder.packer.pack_values, room=room, grows=coder.grows)
        # True: a token is packed before its own step attends; False: after it
        self.settles_first = not coder.packer.packs_after_step
        self.alone = room.alone

    @classmethod
    def takes(cls, row: StoredRow) -> bool:
        return row.coder is not None

    @classmethod
    def key(cls, row: StoredRow) -> Hashable:
        return (row.coder, super().key(row))

    def add(self, k: Tensor, v: Tensor, positions: Tensor) -> None:
        # tokens that come together must see what each would see alone
        several = self.alone and k.shape[2] > 1
        for half, x in ((self.k, k), (self.v, v)):
            half.add(x)
            half.seen = None
            if several:
                half.see(k.shape[2], self.settles_first)
        if self.settles_first or several:
            self._settle()

    def _settle(self) -> None:
        self.k.settle()
        self.v.settle()

    def skip(self, tokens: int) -> None:
        """Add ``tokens`` random ones at once, for benchmarks, which measure a step's cost and not its result."""
        self.k.skip(tokens)
        self.v.skip(tokens)

    def attend(self, query: Tensor, scale: float, window: int | None) -> Tensor:
        """Return attention as ``Format.attend`` does, then pack the tokens that are no longer among the newest.

        ``add`` has packed them already, unless the packer ``packs_after_step``.
        """
        out = None
        if self.masker is None and self.k.seen is None and cap_of(scale) is None:
            # where kernels serve, one call replaces dozens of small operations
            out = kernels.attend_packed(query, scale, self.k, self.v)
        if out is None:
            logits_of = partial(self._logits, query, scale)
            out, self.attended = masked_softmax(logits_of, self._weigh, query.dtype, self.masker)
        self._settle()
        return out

    def _logits(self, query: Tensor, scale: float, estimate: Estimate) -> Tensor:
        """Return logits [U, Hq, T, L] fp32 in token order; -inf where there is no token or it comes later."""
        store, t = self.k, query.shape[2]
        if store.alike:
            return self._logits_alike(query, scale, estimate)
        longest = max(store.total)
        # one column more than there are tokens: ring slots that hold no exact token write their logits there
        scores = query.new_full((*query.shape[:3], longest + 1), -torch.inf, dtype=torch.float32)
        most = max(store.packed)
        if most:
            scores[..., :most] = packed_logits(query, store.old(), scale, store.channels, estimate)
        where = store.columns()[:, None, None].expand(*query.shape[:3], -1)
        ring_logits = logits(query, estimate(store.ring), scale).float()
        if store.seen is None:
            scores.scatter_(3, where, ring_logits)
        else:
            # some tokens are packed for one query and exact for another: each query takes its own of both logits
            exact = torch.full_like(scores, -torch.inf).scatter_(3, where, ring_logits)
            is_packed = torch.arange(longest + 1, device=query.device) < store.seen
            scores = torch.where(is_packed, scores, exact)
        # new token i of T is token total - T + i, and sees none that comes after it
        last = store.numbers(store.total)[:, None] - t + torch.arange(t, device=query.device)
        hidden = torch.arange(longest, device=query.device) > last[:, None, :, None]
        return scores[..., :longest].masked_fill(hidden, -torch.inf)

    def _logits_alike(self, query: Tensor, scale: float, estimate: Estimate) -> Tensor:
        """Return logits as ``_logits`` does, of rows that are alike: their tokens are in order already."""
        store, t = self.k, query.shape[2]
        scores = logits(query, estimate(store.exact()), scale).float()
        if store.packed[0]:
            packed = packed_logits(query, store.old(), scale, store.channels, estimate)
            scores = torch.cat([packed, scores], dim=3)
        if t > 1:
            # the new tokens are the last, and see each other causally
            future = torch.ones(t, t, dtype=torch.bool, device=query.device).triu(1)
            scores[..., -t:].masked_fill_(future, -torch.inf)
        return scores

    def _weigh(self, probs: Tensor) -> Tensor:
        """Return values [U, Hq, T, D] weighted by probs [U, Hq, T, L]."""
        store = self.v
        most = max(store.packed)
        if store.alike:
            out, old_probs = weigh(probs[..., most:], store.exact()), probs[..., :most]
        else:
            where = store.columns()[:, None, None].expand(*probs.shape[:3], -1)
            packed = store.seen
            if packed is None:
                packed = store.numbers(store.packed)[:, None, None, None]
            is_packed = torch.arange(probs.shape[3], device=probs.device) < packed
            exact_probs = probs
            if store.seen is not None:
                # a token in the ring may be packed for this query
                exact_probs = probs.masked_fill(is_packed, 0)
            # the column of weight 0 behind the last token is that of ring slots without an exact token
            out = weigh(F.pad(exact_probs, (0, 1)).gather(3, where), store.ring)
            old_probs = probs[..., :most].masked_fill(~is_packed[..., :most], 0)
        if most:
            part = packed_weigh(old_probs, store.old())
            if store.channels is not None:
                part = spread(part, store.channels, out.shape[3])
            out = out + part
        return out

    def keep(self, at: Tensor) -> None:
        self.k.keep(at)
        self.v.keep(at)

    def tokens(self) -> Tensor:
        return self.k.numbers(self.k.total)

    def payload(self) -> list[int]:
        return [k + v for k, v in zip(self.k.payload(), self.v.payload(), strict=True)]

    def segments(self, u: int, cache: LayerCache) -> tuple[Segment, ...]:
        (old,) = cache.segments
        k_codes, k = self.k.held(u)
        v_codes, v = self.v.held(u)
        # the row has read as many tokens since as it holds more than ``cache``
        end = cache.seen + self.k.total[u] - cache.tokens
        new = torch.arange(cache.seen, end, dtype=torch.int32, device=k.device)
        positions = torch.cat([old.positions, new.expand(old.positions.shape[0], -1)], dim=1)
        return (replace(old, k=k, v=v, positions=positions, codes=Codes(k_codes, v_codes)),)
