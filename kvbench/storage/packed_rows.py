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
from kvbench.storage.row_segments import beside, grown, per_place, roomy


class PackedHalf:
    """Keys, or values, of U rows: packed tokens first, then exact ones in a ring (token t in slot t mod S)."""

    def __init__(
        self,
        rows: Sequence[tuple[Packed, Tensor, Tensor | None]],
        residual: Residual,
        pack: Callable[[Tensor], Packed],
        room: Room,
        grows: bool = True,
    ) -> None:
        # of each row: its packed tokens, its exact ones, and the channels kept if it is thin
        packed, rest, channels = zip(*rows, strict=True)
        first, device = packed[0], rest[0].device
        self.residual, self.pack, self.grows, self.step = residual, pack, grows, first.step
        self.packed = [p.shape[1] for p in packed]
        self.total = [p.shape[1] + r.shape[1] for p, r in zip(packed, rest, strict=True)]
        most_exact_now = max(r.shape[1] for r in rest)
        self.most = max([residual.packed(t + room.tokens) for t in self.total] if grows else self.packed) // self.step
        size = max(max(self.packed) // self.step, 1)
        self.codes = batched(packed, lambda t: t.new_zeros(len(packed), t.shape[0], size, *t.shape[2:]))
        # a residual of everything would be endless: no ring needs more slots than tokens can come
        most_exact = min(residual.most, max(self.total) + room.tokens) if grows else most_exact_now + room.tokens
        slots = max(most_exact, most_exact_now) + room.at_once
        self.ring = rest[0].new_zeros(len(packed), rest[0].shape[0], slots, rest[0].shape[2])
        self.channels = beside(channels)  # [U, H, C]
        self.seen: Tensor | None = None  # [U, 1, T, 1]: how many tokens are packed for each query, where that differs
        self.before = self.packed  # how many were before the newest step, where ``seen`` is
        for u, (p, r) in enumerate(zip(packed, rest, strict=True)):
            for codes, loaded in zip(self.codes.payload(), p.payload(), strict=True):
                codes[u, :, : loaded.shape[1]] = loaded
            self.ring[u, :, (torch.arange(r.shape[1], device=device) + p.shape[1]) % slots] = r

    @property
    def slots(self) -> int:
        return self.ring.shape[2]

    def add(self, x: Tensor) -> None:
        """Write new tokens x [U, Hk, T, D] into the ring, repeated for the H stored heads."""
        u, heads, t = x.shape[0], self.ring.shape[1], x.shape[2]
        wide = x if heads == x.shape[1] else x.repeat_interleave(heads // x.shape[1], dim=1)
        span = self._span(self.total, t)
        if span is not None:
            self.ring[:, :, span] = wide
        else:
            slot = (self.numbers(self.total)[:, None] + torch.arange(t, device=x.device)) % self.slots
            self.ring[torch.arange(u, device=x.device)[:, None], :, slot] = wide.transpose(1, 2)
        self.total = [n + t for n in self.total]

    def see(self, tokens: int, settles_first: bool) -> None:
        """Let each of the newest ``tokens`` see what was packed when it came, as if they had come one by one."""
        self.before = list(self.packed)
        # token i of them comes to n - tokens + i others, and is one itself where packing comes before attention
        come = range(settles_first - tokens, int(settles_first))
        seen = [
            [max(p, self.residual.packed(n + i)) if self.grows else p for i in come]
            for n, p in zip(self.total, self.packed, strict=True)
        ]
        self.seen = torch.tensor(seen, device=self.ring.device)[:, None, :, None]

    def columns(self) -> Tensor:
        """Return the token of each ring slot [U, S] that some query reads exactly; the largest total for others."""
        first = self.packed if self.seen is None else self.before
        total, packed = self.numbers(self.total)[:, None], self.numbers(first)[:, None]
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
        missing = count - tokens.shape[2]  # they begin again at the first slot
        return torch.cat([tokens, self.ring[:, :, :missing]], dim=2) if missing else tokens

    def old(self) -> Packed:
        """Return a view of the packed tokens [U, H, L, C]; behind a shorter row's last one they are undefined."""
        return self.codes.tokens(0, max(self.packed))

    def settle(self) -> None:
        """Pack the tokens that are no longer among the newest, which stay exact.

        Each pass packs equally many of every row that has any.
        """
        while due := self._due():
            block = min(self.residual.packed(self.total[u]) - self.packed[u] for u in due)
            span = self._span(self.packed, block) if len(due) == len(self.total) else None
            first = self.packed[0] // self.step
            channels = self.channels
            if span is not None:
                # every row packs the same slots next: no index is made for them
                x = self.ring[:, :, span]
            else:
                rows, packed = self.numbers(due)[:, None], self.numbers([self.packed[u] for u in due])[:, None]
                x = self.ring[rows, :, (packed + torch.arange(block, device=rows.device)) % self.slots].transpose(1, 2)
                groups = packed // self.step + torch.arange(block // self.step, device=rows.device)
                channels = None if channels is None else channels[rows[:, 0]]
            if channels is not None:
                x = x.gather(3, channels[:, :, None].expand(-1, -1, block, -1))
            coded = self.codes.more(x, self.pack, due if len(due) < len(self.total) else None)
            self._reserve((max(self.packed[u] for u in due) + block) // self.step)
            for codes, new in zip(self.codes.payload(), coded.payload(), strict=True):
                if span is not None:
                    codes[:, :, first : first + new.shape[2]] = new
                else:
                    codes[rows, :, groups] = new.transpose(1, 2)
            for u in due:
                self.packed[u] += block

    def _reserve(self, groups: int) -> None:
        """Make room for codes of ``groups`` times ``step`` tokens."""
        payload = [*self.codes.payload()]
        if payload[0].shape[2] < groups:
            size = roomy(groups, max(self.total) // self.step, self.most)
            self.codes = self.codes.holding([grown(t, size) for t in payload], self.codes.frozen)

    def _due(self) -> Sequence[int]:
        """Return the rows from which at least a unit of tokens has left the residual."""
        if not self.grows:
            return ()
        if len(set(self.total)) == len(set(self.packed)) == 1:
            # rows of a batch are often alike: one comparison, not one for each of hundreds of rows in every layer
            return range(len(self.total)) if self.residual.packed(self.total[0]) > self.packed[0] else ()
        return [u for u, n in enumerate(self.total) if self.residual.packed(n) > self.packed[u]]

    def skip(self, tokens: int) -> None:
        """Count ``tokens`` more in each row and fill their storage with random numbers instead of packing any."""
        first = min(self.packed)
        self.total = [n + tokens for n in self.total]
        if self.grows:
            self.packed = [max(p, self.residual.packed(n)) for p, n in zip(self.packed, self.total, strict=True)]
        self._reserve(max(self.packed) // self.step)
        for t in self.codes.tokens(first, max(self.packed)).payload():
            if t.is_floating_point():
                t.uniform_(0.01, 0.1)
            else:
                t.random_(0, 120)  # of 8 bits, read as floats these are finite
        self.ring.normal_()

    def _span(self, first: Sequence[int], count: int) -> slice | None:
        """Return the slice of the ring slots that hold ``count`` tokens of each row from its ``first`` on.

        Returns None if rows differ in ``first`` or the slots pass the ring's end.
        """
        start = first[0] % self.slots
        return slice(start, start + count) if len(set(first)) == 1 and start + count <= self.slots else None

    def keep(self, at: Tensor) -> None:
        """Drop all rows but those at the indices ``at``."""
        self.codes, self.ring = self.codes[at], self.ring[at]
        self.channels = None if self.channels is None else self.channels[at]
        chosen = at.tolist()
        self.packed, self.total = [self.packed[u] for u in chosen], [self.total[u] for u in chosen]

    def payload(self) -> list[int]:
        """Return how many bytes each row's tokens take."""
        codes = tuple(self.codes.payload())
        step = sum(per_place(t, codes[0].shape[0] * codes[0].shape[2]) for t in codes)
        token = per_place(self.ring, self.ring.shape[0] * self.slots)
        return [p // self.step * step + (n - p) * token for p, n in zip(self.packed, self.total, strict=True)]

    def held(self, u: int) -> tuple[Packed, Tensor]:
        """Return copies of row u's (packed tokens [H, Lq, .], exact tokens [H, L - Lq, D])."""
        most = self.packed[u] // self.step
        slot = torch.arange(self.packed[u], self.total[u], device=self.ring.device) % self.slots
        codes = self.codes[u]
        frozen = None if codes.frozen is None else codes.frozen.clone()
        return codes.holding([t[:, :most].clone() for t in codes.payload()], frozen), self.ring[u][:, slot]

    def numbers(self, numbers: Sequence[int]) -> Tensor:
        """Return one number for each row [U] as a tensor on the device."""
        return torch.tensor(numbers, device=self.ring.device)


class PackedRows(Format):
    """Entries packed in one format by one chain's quantiser, all under the same masking method or under none."""

    moves = "it packs tokens or keeps latents while decoding"

    def __init__(self, rows: Sequence[StoredRow], room: Room) -> None:
        coder, self.masker = rows[0].coder, rows[0].masker
        assert coder is not None
        loaded = [(s, s.codes) for row in rows for s in row.cache.segments if s.codes is not None]
        keys = [(codes.k, s.k, s.key_channels) for s, codes in loaded]
        values = [(codes.v, s.v, s.value_channels) for s, codes in loaded]
        self.k = PackedHalf(keys, coder.keys, coder.packer.pack_keys, room, coder.grows)
        self.v = PackedHalf(values, coder.values, coder.packer.pack_values, room, coder.grows)
        self.settles_first = not coder.packer.packs_after_step
        self.alone = room.alone

    @classmethod
    def takes(cls, row: StoredRow) -> bool:
        return row.coder is not None

    @classmethod
    def key(cls, row: StoredRow) -> Hashable:
        return (row.coder, super().key(row))

    def add(self, k: Tensor, v: Tensor, positions: Tensor) -> None:
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

        If the packer does not pack ``after_step``, ``add`` has packed them already.
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
        # one column more than there are tokens: empty ring slots write theirs there
        scores = query.new_full((*query.shape[:3], longest + 1), -torch.inf, dtype=torch.float32)
        most = max(store.packed)
        if most:
            scores[..., :most] = packed_logits(query, store.old(), scale, store.channels, estimate)
        where = store.columns()[:, None, None].expand(*query.shape[:3], -1)
        exact = scores if store.seen is None else torch.full_like(scores, -torch.inf)
        exact.scatter_(3, where, logits(query, estimate(store.ring), scale).float())
        if store.seen is not None:
            scores = torch.where(torch.arange(longest + 1, device=query.device) < store.seen, scores, exact)
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
        if t > 1:  # the new tokens are the last, and see each other causally
            future = torch.ones(t, t, dtype=torch.bool, device=query.device).triu(1)
            scores[..., -t:].masked_fill_(future, -torch.inf)
        return scores

    def _weigh(self, probs: Tensor) -> Tensor:
        """Return values [U, Hq, T, D] weighted by probs [U, Hq, T, L]."""
        store = self.v
        most = max(store.packed)
        if store.alike:
            out, old = weigh(probs[..., most:], store.exact()), probs[..., :most]
        else:
            where = store.columns()[:, None, None].expand(*probs.shape[:3], -1)
            packed = store.numbers(store.packed)[:, None, None, None] if store.seen is None else store.seen
            coded = torch.arange(probs.shape[3], device=probs.device) < packed
            exact = probs if store.seen is None else probs.masked_fill(coded, 0)
            out = weigh(F.pad(exact, (0, 1)).gather(3, where), store.ring)
            old = probs[..., :most].masked_fill(~coded[..., :most], 0)
        if most:
            part = packed_weigh(old, store.old())
            out = out + (part if store.channels is None else spread(part, store.channels, out.shape[3]))
        return out

    def keep(self, at: Tensor) -> None:
        self.k.keep(at)
        self.v.keep(at)

    def tokens(self) -> Tensor:
        return self.k.numbers(self.k.total)

    def payload(self) -> list[int]:
        return [k + v for k, v in zip(self.k.payload(), self.v.payload(), strict=True)]

    def segments(self, u: int, cache: LayerCache) -> tuple[Segment, ...]:
        (old,), (k_codes, k), (v_codes, v) = cache.segments, self.k.held(u), self.v.held(u)
        new = torch.arange(cache.seen, cache.seen + self.k.total[u] - cache.tokens, dtype=torch.int32, device=k.device)
        positions = torch.cat([old.positions, new.expand(old.positions.shape[0], -1)], dim=1)
        return (replace(old, k=k, v=v, positions=positions, codes=Codes(k_codes, v_codes)),)
