"""Rows whose low-rank latents are cached, while they decode: buffers that grow, keys rebuilt a block at a time.

Shapes: U rows, S slots, R latents of keys or of values, Hq query heads, Hk kv heads, T new tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvbench.cache.segment import Segment
from kvbench.storage.attend import Masker, logits, rounded, weigh

BLOCK = 2**20  # elements of keys rebuilt at once


class Projection(Protocol):
    """The half of a low-rank projection that a cache of its latents needs."""

    @property
    def ups(self) -> tuple[Tensor | None, ...]:
        """Of each group [its heads * D, r]; None: the identity."""
        ...

    @property
    def ranks(self) -> tuple[int, ...]: ...

    @property
    def bias(self) -> Tensor | None:
        """[Hk * D]."""
        ...


class Lift(Protocol):
    """How a layer's latents become keys and values."""

    @property
    def heads(self) -> int: ...

    @property
    def v(self) -> Projection: ...

    def keys(self, latent: Tensor, positions: Tensor) -> Tensor:
        """Rotated keys [U, Hk, L, D] of latents [U, L, R] at positions [U, L]."""
        ...

    def new(self) -> tuple[Tensor, Tensor]:
        """Latents [B, T, R] of keys and of values of the tokens that the model has just read."""
        ...


class LatentRows:
    """Rows of one storage format of one layer. A row's slots hold its tokens in order, the newest last."""

    def __init__(self, segments: Sequence[Segment], lift: Lift, room: int) -> None:
        self.lift = lift
        self.total = [s.tokens for s in segments]
        first, slots = segments[0], max(self.total) + room
        self.k, self.v = (t.new_zeros(len(segments), slots, t.shape[2]) for t in (first.k, first.v))
        self.positions = first.positions.new_zeros(len(segments), slots)
        for u, s in enumerate(segments):
            self.k[u, : s.tokens], self.v[u, : s.tokens], self.positions[u, : s.tokens] = s.k[0], s.v[0], s.positions[0]

    def add(self, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Take the latents k, v [U, T, R] of new tokens at positions [U, T]."""
        t, row = k.shape[1], torch.arange(len(k), device=k.device)[:, None]
        slot = torch.tensor(self.total, device=k.device)[:, None] + torch.arange(t, device=k.device)
        self.k[row, slot], self.v[row, slot] = k, v
        self.positions[row, slot] = positions.to(self.positions.dtype)
        self.total = [n + t for n in self.total]

    def attend(
        self, query: Tensor, scale: float, masker: Masker | None = None, sizes: list[Tensor] | None = None
    ) -> Tensor:
        """Attention of query [U, Hq, T, D] of the tokens just added over all -> [U, Hq, T, D]."""
        exact = self._logits(query, scale, lambda keys: keys)
        if masker is not None:
            estimated = self._logits(query, scale, masker.estimate)
            seen = masker.mask(estimated.softmax(dim=-1)) & ~exact.isneginf()
            exact = exact.masked_fill(~seen, -torch.inf)
            if sizes is not None:
                sizes.append(seen.sum(dim=-1).float().mean(dim=(1, 2)))
        return rounded(exact.softmax(dim=-1), query.dtype, self._weigh)

    def _logits(self, query: Tensor, scale: float, estimate: Callable[[Tensor], Tensor]) -> Tensor:
        """Logits [U, Hq, T, L] fp32 in token order; -inf where there is no token or it comes later."""
        longest, t = max(self.total), query.shape[2]
        found = query.new_empty((*query.shape[:3], longest), dtype=torch.float32)
        block = max(1, BLOCK // (len(query) * self.lift.heads * query.shape[3]))
        for start in range(0, longest, block):
            at = slice(start, min(start + block, longest))
            keys = self.lift.keys(self.k[:, at], self.positions[:, at])
            found[..., at] = logits(query, estimate(keys), scale).float()
        total = torch.tensor(self.total, device=query.device)[:, None]
        last = total - t + torch.arange(t, device=query.device)
        hidden = torch.arange(longest, device=query.device) > last[:, None, :, None]
        return found.masked_fill_(hidden, -torch.inf)

    def _weigh(self, probs: Tensor) -> Tensor:
        """Weighted values of probs [U, Hq, T, L] -> [U, Hq, T, D] fp32: of latents first, then lifted once."""
        u, hq, t, longest = probs.shape
        own, values = self.lift.v, self.v[:, :longest].split(self.lift.v.ranks, dim=-1)
        per = hq // self.lift.heads
        of_group = self.lift.heads // len(values)
        found = []
        for part, latent, up in zip(probs.split(of_group * per, dim=1), values, own.ups, strict=True):
            mixed = weigh(part, latent[:, None]).view(u, of_group, per * t, -1)
            if up is None:
                # the latents are all outputs of the group's heads: each head reads its own
                rows = mixed.unflatten(-1, (of_group, -1))
                lifted = torch.stack([rows[:, h, :, h] for h in range(of_group)], dim=1)
            else:
                lifted = mixed @ up.float().unflatten(0, (of_group, -1)).transpose(1, 2)
            found.append(lifted.view(u, of_group * per, t, -1))
        out = torch.cat(found, dim=1)
        if own.bias is None:
            return out
        return out + own.bias.float().view(self.lift.heads, 1, -1).repeat_interleave(per, dim=0)

    def keep(self, at: Tensor) -> None:
        """Go on with the rows ``at`` only."""
        self.k, self.v, self.positions = self.k[at], self.v[at], self.positions[at]
        self.total = [self.total[u] for u in at.tolist()]

    def segment(self, u: int) -> Segment:
        """One row's tokens, copies."""
        n = self.total[u]
        k, v, positions = (t[u, :n].clone()[None] for t in (self.k, self.v, self.positions))
        return Segment(k, v, positions, latent=True)
