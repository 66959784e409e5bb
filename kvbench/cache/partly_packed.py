"""Segments whose older tokens are packed and whose newest are exact, and what decides how many are which.

Shapes: H stored heads, L tokens, Lk and Lv of them packed as keys and as values, D channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvbench.cache.packed import Packed

FOREVER = 2**62  # tokens: more than any cache sees
Values = Tensor | Packed  # keys or values in one storage format


@dataclass(frozen=True)
class Residual:
    """How many of the newest tokens stay exact: the last ``keep`` and those that do not fill a ``block``, whichever are
    more, and what then does not fill a ``unit``, the fewest tokens that can be packed (a divisor of ``block``)."""

    keep: int
    block: int
    unit: int

    def packed(self, tokens: int) -> int:
        """Packed tokens of ``tokens`` in all; it never falls as tokens come in."""
        return max(0, tokens - max(self.keep, tokens % self.block)) // self.unit * self.unit

    @property
    def most(self) -> int:
        """Exact tokens at most, once packing is settled."""
        return max(self.keep + self.unit, self.block) - 1

    @classmethod
    def everything(cls) -> Residual:
        """All tokens stay exact, however many come."""
        return cls(FOREVER, 1, 1)

    def at_least(self, keep: int) -> Residual:
        """The same with no fewer than ``keep`` exact tokens."""
        return replace(self, keep=max(self.keep, keep))


@dataclass(frozen=True)
class Codes:
    """The packed tokens of a segment: the first Lk as keys [H, Lk, .], the first Lv as values [H, Lv, .].

    Ragged heads are stored one after the other; the counts then say how many tokens of each head are packed.
    """

    k: Packed
    v: Packed
    k_counts: Tensor | None = None  # [H] int32
    v_counts: Tensor | None = None  # [H] int32

    def payload(self) -> Iterator[Tensor]:
        """The tensors held."""
        yield from self.k.payload()
        yield from self.v.payload()

    def head(self, h: int, k: Tensor, v: Tensor, start: int, end: int) -> tuple[Codes, Tensor, Tensor]:
        """One head's codes and its share of the exact k and v, views; of ragged heads its tokens are start to end."""
        if self.k_counts is None or self.v_counts is None:
            one = slice(h, h + 1)
            return Codes(self.k.map(lambda t: t[one]), self.v.map(lambda t: t[one])), k[one], v[one]
        parts = []
        for packed, counts, rest in ((self.k, self.k_counts, k), (self.v, self.v_counts, v)):
            last = int(counts[: h + 1].sum())
            first = last - int(counts[h])
            parts.append((packed.tokens(first, last), rest[:, start - first : end - last]))
        (k_codes, k_rest), (v_codes, v_rest) = parts
        return Codes(k_codes, v_codes), k_rest, v_rest


def encode(
    x: Tensor, pack: Callable[[Tensor], Packed], packed: int, channels: Tensor | None = None
) -> tuple[Packed, Tensor]:
    """x [H, L, D] as its first ``packed`` tokens packed, of those only ``channels`` [H, C], and the exact others."""
    old = x[:, :packed]
    if channels is not None:
        old = old.gather(2, channels.long()[:, None].expand(-1, packed, -1))
    return pack(old), x[:, packed:].clone(memory_format=torch.contiguous_format)


def side_by_side(heads: Sequence[Packed]) -> tuple[Packed, Tensor]:
    """Packed tokens of single heads [1, L_h, .] one after the other, and their counts [H]."""
    codes, scale, low = (torch.cat(column, dim=1) for column in zip(*(tuple(h.payload()) for h in heads), strict=True))
    counts = torch.tensor([h.shape[1] for h in heads], dtype=torch.int32, device=codes.device)
    return replace(heads[0], codes=codes, scale=scale, low=low), counts


def each(x: Values, fn: Callable[[Tensor], Tensor]) -> Values:
    """``fn`` of keys or values, or of every tensor that they are packed into (see ``Packed.map``)."""
    return x.map(fn) if isinstance(x, Packed) else fn(x)


def parts(x: Values) -> tuple[Tensor, ...]:
    """The tensors that hold keys or values."""
    return tuple(x.payload()) if isinstance(x, Packed) else (x,)


def write(held: Values, slots: Tensor, new: Values) -> None:
    """Put T tokens, new [B, H, T, .], into ``slots`` [B, H, T] of held [B, H, S, .], in the same format."""
    for mine, fresh in zip(parts(held), parts(new), strict=True):
        mine.scatter_(2, slots[..., None].expand(-1, -1, -1, mine.shape[3]), fresh)
