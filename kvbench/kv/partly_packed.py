"""Segments whose older tokens are packed and whose newest tokens are exact, and the rule that divides them.

Shapes: H stored heads, L tokens, D channels. Lk tokens are packed as keys, Lv tokens as values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvbench.kv.packed import Packed

FOREVER = 2**62
"""More tokens than any cache sees."""
Values = Tensor | Packed
"""Keys or values in one storage format: exact (Tensor) or packed."""


@dataclass(frozen=True)
class Residual:
    """The rule for how many of the newest tokens stay exact.

    The older tokens are packed in whole units, and tokens that do not fill a unit stay exact as well.

    keep: at least this many of the last tokens stay exact.
    block: tokens that do not fill a block of this many stay exact.
    unit: the fewest tokens that can be packed. It divides ``block``.
    """

    keep: int
    block: int
    unit: int

    def packed(self, tokens: int) -> int:
        """Return how many of ``tokens`` are packed. The number never falls as tokens are added."""
        exact = max(self.keep, tokens % self.block)
        return max(0, tokens - exact) // self.unit * self.unit

    @property
    def most(self) -> int:
        """The largest number of exact tokens at a time, after all tokens that can be packed have been packed."""
        # ``keep`` tokens stay, and at most unit - 1 more that do not fill a unit
        most_by_keep = self.keep + self.unit - 1
        # where tokens that do not fill a block are more than ``keep``, they are at most block - 1
        most_by_block = self.block - 1
        return max(most_by_keep, most_by_block)

    @classmethod
    def everything(cls) -> Residual:
        """Return the rule under which all tokens stay exact, however many come."""
        return cls(keep=FOREVER, block=1, unit=1)

    def at_least(self, keep: int) -> Residual:
        """Return the same rule with at least ``keep`` exact tokens."""
        return replace(self, keep=max(self.keep, keep))


@dataclass(frozen=True)
class Codes:
    """The packed tokens of a segment: the first Lk as keys [H, Lk, .], the first Lv as values [H, Lv, .].

    Ragged heads are stored one after the other. ``k_counts`` and ``v_counts`` are then each head's numbers of packed
    tokens. For heads of one length they are None.
    """

    k: Packed
    v: Packed
    k_counts: Tensor | None = None  # [H] int32
    v_counts: Tensor | None = None  # [H] int32

    def payload(self) -> Iterator[Tensor]:
        """Yield the tensors of the packed keys, then those of the packed values: codes and their scales."""
        yield from self.k.payload()
        yield from self.v.payload()

    def frozen(self) -> Iterator[Tensor]:
        """Yield the scales that heads settled once for all tokens: first those of keys, then those of values."""
        for packed in (self.k, self.v):
            if packed.frozen is not None:
                yield packed.frozen

    def head(self, h: int, k: Tensor, v: Tensor, start: int, end: int) -> tuple[Codes, Tensor, Tensor]:
        """Return (codes, exact keys, exact values) of head h, as views.

        k, v: the exact tokens of all heads.
        start, end: this head's tokens are ``start`` to ``end`` - 1 among the tokens of all heads, packed and exact.
        Only ragged heads, which lie one after the other, are found by these numbers.
        """
        if self.k_counts is None or self.v_counts is None:
            row = slice(h, h + 1)
            return Codes(self.k[row], self.v[row]), k[row], v[row]

        def slice_ragged(packed: Packed, counts: Tensor, exact: Tensor) -> tuple[Packed, Tensor]:
            """Return (codes, exact tokens) of head h, from the keys or the values of all ragged heads."""
            packed_end = int(counts[: h + 1].sum())
            packed_start = packed_end - int(counts[h])
            head_codes = packed.tokens(packed_start, packed_end).select_head(h)
            # earlier heads have ``start`` tokens, of which ``packed_start`` are packed and the others are exact
            exact_start = start - packed_start
            # up to this head there are ``end`` tokens, of which ``packed_end`` are packed
            exact_end = end - packed_end
            return head_codes, exact[:, exact_start:exact_end]

        k_codes, exact_k = slice_ragged(self.k, self.k_counts, k)
        v_codes, exact_v = slice_ragged(self.v, self.v_counts, v)
        return Codes(k_codes, v_codes), exact_k, exact_v


def pack_first_tokens(
    x: Tensor, pack: Callable[[Tensor], Packed], packed: int, channels: Tensor | None = None
) -> tuple[Packed, Tensor]:
    """Pack the first ``packed`` tokens of x [H, L, D], with all channels or only ``channels`` [H, C].

    Returns the codes [H, packed, C or D] and a copy [H, L - packed, D] of the exact tokens behind them.
    """
    oldest = x[:, :packed]
    if channels is not None:
        oldest = oldest.gather(2, channels.long()[:, None].expand(-1, packed, -1))
    return pack(oldest), x[:, packed:].clone(memory_format=torch.contiguous_format)


def join_heads(heads: Sequence[Packed]) -> tuple[Packed, Tensor]:
    """Join the packed tokens of single heads, and return (the joined tokens [1, N, .], each head's token count [H]).

    ``heads`` has the packed tokens [1, L_h, .] of each head h, all in one format. In the result they lie one head after
    the other.
    """
    payloads = [list(head.payload()) for head in heads]
    # zip puts the codes of all heads together, then their scales, and so on
    tensors = [torch.cat(same_kind, dim=1) for same_kind in zip(*payloads, strict=True)]
    counts = torch.tensor([head.shape[1] for head in heads], dtype=torch.int32, device=tensors[0].device)
    # in one format, either all heads have frozen scales or none
    scales = [head.frozen for head in heads if head.frozen is not None]
    frozen = torch.cat(scales) if scales else None
    return heads[0].holding(tensors, frozen), counts


def allocate_buffers(rows: Sequence[Packed], room: Callable[[Tensor], Tensor]) -> Packed:
    """Return buffers [B, H, ...] for the packed tokens of B ``rows``, all in one format, with each row's frozen scales.

    ``room`` is a function that takes a tensor of the first row and returns the buffer for this tensor in all rows.
    """
    # in one format, either all rows have frozen scales or none
    scales = [row.frozen for row in rows if row.frozen is not None]
    frozen = torch.stack(scales) if scales else None
    return rows[0].holding([room(t) for t in rows[0].payload()], frozen)


def map_tensors(x: Values, fn: Callable[[Tensor], Tensor]) -> Values:
    """Return exact keys or values with ``fn`` applied, or packed ones with ``fn`` applied to each of their tensors."""
    if isinstance(x, Packed):
        return x.map(fn)
    return fn(x)


def stored_tensors(x: Values) -> tuple[Tensor, ...]:
    """Return the tensors that hold keys or values: one if they are exact; codes, scale and low if they are packed."""
    if isinstance(x, Packed):
        return tuple(x.payload())
    return (x,)


def write_tokens(buffer: Values, slots: Tensor, new: Values) -> None:
    """Write T tokens, new [B, H, T, .], into ``slots`` [B, H, T] of buffer [B, H, S, .]. Both have the same format."""
    for target, tokens in zip(stored_tensors(buffer), stored_tensors(new), strict=True):
        # target[b, h, slots[b, h, t]] = tokens[b, h, t]
        target.scatter_(2, slots[..., None].expand(-1, -1, -1, target.shape[3]), tokens)
