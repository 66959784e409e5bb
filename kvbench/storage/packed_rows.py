"""Rows whose older tokens are packed while they decode: packed buffers that grow, and a ring of exact tokens.

A step writes its tokens into the ring, attends, and then packs what has left the residual. Keys and values are packed
at different moments, so their logits and weights meet in token order. Shapes: U rows (or single ragged heads), H stored
heads, T new tokens, S slots of a ring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.cache.packed import Packed
from kvbench.cache.partly_packed import Residual
from kvbench.cache.segment import Segment
from kvbench.storage import kernels
from kvbench.storage.attend import Masker, logits, rounded, spread, summed, weigh


class RowCoder(Protocol):
    """What packs tokens of a chain, and when."""

    @property
    def keys(self) -> Residual: ...

    @property
    def values(self) -> Residual: ...

    def pack_keys(self, x: Tensor) -> Packed: ...

    def pack_values(self, x: Tensor) -> Packed: ...


class PackedStore:
    """Keys, or values, of U rows: packed tokens first, then exact ones in a ring (token t in slot t mod S)."""

    def __init__(
        self,
        packed: Sequence[Packed],
        rest: Sequence[Tensor],
        channels: Sequence[Tensor | None],
        residual: Residual,
        pack: Callable[[Tensor], Packed],
        room: int,
        at_once: int,
    ) -> None:
        first, device = packed[0], rest[0].device
        self.residual, self.pack = residual, pack
        self.step = first.group if first.axis == "channel" else 1
        self.packed = [p.shape[1] for p in packed]
        self.total = [p.shape[1] + r.shape[1] for p, r in zip(packed, rest, strict=True)]
        most = max(residual.packed(t + room) for t in self.total) // self.step
        self.codes = first.map(lambda t: t.new_zeros(len(packed), t.shape[0], max(most, 1), *t.shape[2:]))
        # no ring is longer than all that will come, which is what a residual of everything needs
        most_exact = min(residual.most, max(self.total) + room)
        slots = max(most_exact, *(r.shape[1] for r in rest)) + at_once
        self.ring = rest[0].new_zeros(len(packed), rest[0].shape[0], slots, rest[0].shape[2])
        given = [c for c in channels if c is not None]
        self.channels = torch.stack(given).long().to(device) if given else None  # [U, H, C]
        for u, (p, r) in enumerate(zip(packed, rest, strict=True)):
            for mine, loaded in zip(self.codes.payload(), p.payload(), strict=True):
                mine[u, :, : loaded.shape[1]] = loaded
            self.ring[u, :, (torch.arange(r.shape[1], device=device) + p.shape[1]) % slots] = r

    @property
    def slots(self) -> int:
        return self.ring.shape[2]

    def add(self, x: Tensor) -> None:
        """Write x [U, Hk, T, D] behind what is there."""
        u, heads, t = x.shape[0], self.ring.shape[1], x.shape[2]
        wide = x if heads == x.shape[1] else x.repeat_interleave(heads // x.shape[1], dim=1)
        span = self._span(self.total, t)
        if span is not None:
            self.ring[:, :, span] = wide
        else:
            slot = (self._row(self.total)[:, None] + torch.arange(t, device=x.device)) % self.slots
            self.ring[torch.arange(u, device=x.device)[:, None], :, slot] = wide.transpose(1, 2)
        self.total = [n + t for n in self.total]

    def columns(self) -> Tensor:
        """The token of each ring slot [U, S]; the largest total where a slot holds none."""
        total, packed = self._row(self.total)[:, None], self._row(self.packed)[:, None]
        slot = torch.arange(self.slots, device=self.ring.device)
        token = total - 1 - (total - 1 - slot) % self.slots
        return token.masked_fill((token < packed) | (token < 0), max(self.total))

    def old(self) -> Packed:
        """The packed tokens [U, H, L, C], a view; what a row shorter than the longest has at its end means nothing."""
        return self.codes.tokens(0, max(self.packed))

    def settle(self) -> None:
        """Pack what has left the residual."""
        block = self.residual.unit
        while True:
            due = self._due()
            if not due:
                return
            span = self._span(self.packed, block) if len(due) == len(self.total) else None
            if span is not None:
                self._settle_together(span)
                continue
            rows = torch.tensor(due, device=self.ring.device)
            first = self._row([self.packed[u] for u in due])[:, None]
            slot = (first + torch.arange(block, device=rows.device)) % self.slots
            x = self.ring[rows[:, None], :, slot].transpose(1, 2)
            if self.channels is not None:
                x = x.gather(3, self.channels[rows][:, :, None].expand(-1, -1, block, -1))
            new = self.pack(x)
            at = first // self.step + torch.arange(block // self.step, device=rows.device)
            for mine, fresh in zip(self.codes.payload(), new.payload(), strict=True):
                mine[rows[:, None], :, at] = fresh.transpose(1, 2)
            for u in due:
                self.packed[u] += block

    def _due(self) -> Sequence[int]:
        """The rows of which tokens have left the residual."""
        if len(set(self.total)) == len(set(self.packed)) == 1:
            # rows of a batch are often alike, and a step has no time to ask hundreds of them in every layer
            return range(len(self.total)) if self.residual.packed(self.total[0]) > self.packed[0] else ()
        return [u for u, n in enumerate(self.total) if self.residual.packed(n) > self.packed[u]]

    def skip(self, tokens: int) -> None:
        """Hold ``tokens`` more without any being written or packed: what is stored for them is random."""
        before, self.total = min(self.packed), [n + tokens for n in self.total]
        self.packed = [max(p, self.residual.packed(n)) for p, n in zip(self.packed, self.total, strict=True)]
        codes, scale, low = self.codes.tokens(before, max(self.packed)).payload()
        codes.random_(0, 256)
        for numbers in (scale, low):
            numbers.uniform_(0.01, 0.1)
        self.ring.normal_()

    def _settle_together(self, span: slice) -> None:
        """Pack the tokens in the slots ``span``, which every row packs next: no index is made for it."""
        x = self.ring[:, :, span]
        if self.channels is not None:
            x = x.gather(3, self.channels[:, :, None].expand(-1, -1, x.shape[2], -1))
        at = self.packed[0] // self.step
        new = self.pack(x)
        for mine, fresh in zip(self.codes.payload(), new.payload(), strict=True):
            mine[:, :, at : at + fresh.shape[2]] = fresh
        self.packed = [n + x.shape[2] for n in self.packed]

    def _span(self, first: Sequence[int], count: int) -> slice | None:
        """The slots of each row's ``count`` tokens from ``first`` on, if all rows' are the same and in one piece."""
        start = first[0] % self.slots
        return slice(start, start + count) if len(set(first)) == 1 and start + count <= self.slots else None

    def keep(self, at: Tensor) -> None:
        """Go on with the rows ``at`` only."""
        self.codes, self.ring = self.codes.map(lambda t: t[at]), self.ring[at]
        self.channels = None if self.channels is None else self.channels[at]
        chosen = at.tolist()
        self.packed, self.total = [self.packed[u] for u in chosen], [self.total[u] for u in chosen]

    def held(self, u: int) -> tuple[Packed, Tensor]:
        """One row's packed [H, Lq, .] and exact tokens [H, L - Lq, D], copies."""
        most = self.packed[u] // self.step
        slot = torch.arange(self.packed[u], self.total[u], device=self.ring.device) % self.slots
        return self.codes.map(lambda t: t[u, :, :most].clone()), self.ring[u][:, slot]

    def _row(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, device=self.ring.device)


class CodedRows:
    """Rows of one storage format of one chain's quantiser in one layer."""

    def __init__(self, segments: Sequence[Segment], coder: RowCoder, room: int, at_once: int = 1) -> None:
        codes = [s.codes for s in segments]
        assert all(c is not None for c in codes)
        k, v = [c.k for c in codes if c], [c.v for c in codes if c]
        k_channels, v_channels = [s.key_channels for s in segments], [s.value_channels for s in segments]
        self.k = PackedStore(k, [s.k for s in segments], k_channels, coder.keys, coder.pack_keys, room, at_once)
        self.v = PackedStore(v, [s.v for s in segments], v_channels, coder.values, coder.pack_values, room, at_once)

    def add(self, k: Tensor, v: Tensor) -> None:
        """Take k, v [U, Hk, T, D] of T new tokens."""
        self.k.add(k)
        self.v.add(v)

    def skip(self, tokens: int) -> None:
        """Hold ``tokens`` more, random ones, at once: for who asks what a step costs, not what it says."""
        self.k.skip(tokens)
        self.v.skip(tokens)

    def attend(
        self, query: Tensor, scale: float, masker: Masker | None = None, sizes: list[Tensor] | None = None
    ) -> Tensor:
        """Attention of query [U, Hq, T, D] of the tokens just added over all; then the residual is settled."""
        out = self._at_once(query, scale) if masker is None else None
        if out is None:
            found = self._logits(query, scale, exact)
            if masker is not None:
                seen = masker.mask(self._logits(query, scale, masker.estimate).softmax(dim=-1)) & ~found.isneginf()
                found = found.masked_fill(~seen, -torch.inf)
                if sizes is not None:
                    sizes.append(seen.sum(dim=-1).float().mean(dim=(1, 2)))
            out = rounded(found.softmax(dim=-1), query.dtype, self._weigh)
        self.k.settle()
        self.v.settle()
        return out

    def _at_once(self, query: Tensor, scale: float) -> Tensor | None:
        """The attention by kernels, which a step of few tokens needs: dozens of small operations cost more."""
        k, v = self.k, self.v
        counts = (k.total, k.packed, v.packed)
        exact_tokens, channels = (k.ring, v.ring), (k.channels, v.channels)
        return kernels.attend_packed(query, scale, (k.old(), v.old()), exact_tokens, channels, counts)

    def _logits(self, query: Tensor, scale: float, estimate: Callable[[Tensor], Tensor]) -> Tensor:
        """Logits [U, Hq, T, L] fp32 in token order; -inf where there is no token or it comes later."""
        store, t = self.k, query.shape[2]
        longest = max(store.total)
        found = query.new_full((*query.shape[:3], longest + 1), -torch.inf, dtype=torch.float32)
        most = max(store.packed)
        if most:
            found[..., :most] = packed_logits(query, store.old(), scale, store.channels, estimate)
        where = store.columns()[:, None, None].expand(*query.shape[:3], -1)
        found.scatter_(3, where, logits(query, estimate(store.ring), scale).float())
        last = store._row(store.total)[:, None] - t + torch.arange(t, device=query.device)
        hidden = torch.arange(longest, device=query.device) > last[:, None, :, None]
        return found[..., :longest].masked_fill(hidden, -torch.inf)

    def _weigh(self, probs: Tensor) -> Tensor:
        """Weighted values of probs [U, Hq, T, L] -> [U, Hq, T, D]."""
        store = self.v
        where = store.columns()[:, None, None].expand(*probs.shape[:3], -1)
        out = weigh(F.pad(probs, (0, 1)).gather(3, where), store.ring)
        packed = store._row(store.packed)[:, None, None, None]
        most = max(store.packed)
        if most:
            old = probs[..., :most].masked_fill(torch.arange(most, device=probs.device) >= packed, 0)
            part = packed_weigh(old, store.old())
            out = out + (part if store.channels is None else spread(part, store.channels, out.shape[3]))
        return out

    def keep(self, at: Tensor) -> None:
        """Go on with the rows ``at`` only."""
        self.k.keep(at)
        self.v.keep(at)


def exact(keys: Tensor) -> Tensor:
    """Keys as they are: what attention reads where no method puts stand-ins in their place."""
    return keys


def unpacked(packed: Packed, dtype: torch.dtype) -> Iterator[tuple[slice, slice, Tensor]]:
    """The blocks of ``packed`` as numbers, one at a time: each is gone when the next one comes."""
    scratch: Tensor | None = None
    for heads, tokens, part in packed.blocks():
        if scratch is None or scratch.numel() < part.shape.numel():
            scratch = torch.empty(part.shape.numel(), device=packed.device)
        yield heads, tokens, part.dequantise(dtype, scratch=scratch)


def packed_logits(
    query: Tensor, keys: Packed, scale: float, channels: Tensor | None, estimate: Callable[[Tensor], Tensor]
) -> Tensor:
    """Scaled q.k of query [U, Hq, T, D] with packed keys [U, H, L, C] -> fp32 [U, Hq, T, L], never unpacked as a whole.

    Keys are rounded to the query's dtype, logits are not: see attend.logits.
    """
    u, hq, t, _ = query.shape
    h, length = keys.shape[1:3]
    whole = query.dtype == torch.float32
    q = (query * scale if whole else query).reshape(u, h, hq // h * t, -1)
    if channels is not None:
        q = q.gather(3, channels[:, :, None].expand(-1, -1, q.shape[2], -1))
    flat, found = q.flatten(0, 1), query.new_empty(u * h, hq // h * t, length, dtype=torch.float32)
    for heads, tokens, part in unpacked(keys, query.dtype):
        found[heads, :, tokens] = summed(flat[heads], estimate(part).transpose(1, 2))
    return (found if whole else found.mul_(scale)).view(u, hq, t, length)


def packed_weigh(probs: Tensor, values: Packed) -> Tensor:
    """Weighted packed values: probs [U, Hq, T, L] with [U, H, L, C] -> [U, Hq, T, C]."""
    u, hq, t, length = probs.shape
    h, c = values.shape[1], values.shape[3]
    flat = probs.reshape(u * h, hq // h * t, length)
    out = flat.new_zeros(u * h, hq // h * t, c, dtype=torch.float32)
    for heads, tokens, part in unpacked(values, probs.dtype):
        out[heads] += weigh(flat[heads, None, :, tokens], part[:, None])[:, 0]
    return out.view(u, hq, t, c)
