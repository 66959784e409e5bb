"""Keys or values stored in a format, each token of a head by itself: a codec makes named tensors of them, and back.

A codec is pure: it knows one tensor, no cache and no method. ``kvbench.kv.codecs`` has one file a family of formats.
Shapes: H heads, L tokens, C channels (D, or T after pruning), C' channels that are coded (C, or C and padding).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from kvbench.base.errors import KvbenchError
from kvbench.kv.packed import Packed
from kvbench.kv.rotation import basis, width

FROZEN_BYTES = 4  # of a head: a scale that was settled once, fp32
PART = 2**18  # elements coded together


@dataclass(frozen=True, kw_only=True)
class Codec(ABC):
    """A storage format of single tokens. Arithmetic is fp32, and rounding to nearest with ties to even, unless said.

    rotate: the orthogonal basis in which values are coded, or ``none``: see ``rotation.basis``.
    block: the most channels that are rotated together.
    """

    settles: ClassVar[Literal["", "tensor", "head"]] = ""
    """What has a scale of its own that is settled once, by ``settle``: all heads of a layer, or each; '': nothing."""

    rotate: str = "none"
    block: int = 2**30

    def __str__(self) -> str:
        set_fields = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in set_fields.items())})"

    @abstractmethod
    def token_bytes(self, channels: int) -> int:
        """Return the bytes of one token of one head."""

    @abstractmethod
    def encode(self, x: Tensor, frozen: Tensor | None) -> dict[str, Tensor]:
        """Return the tensors [..., L, m] of x [..., L, C'] fp32, of which ``codes...`` have codes and others scales."""

    @abstractmethod
    def decode(self, tensors: Mapping[str, Tensor], channels: int, frozen: Tensor | None) -> Tensor:
        """Return the numbers [..., L, C'] fp32 that ``tensors`` stand for; C' is ``channels``."""

    def settle(self, absmax: Tensor) -> Tensor:
        """Return the scale that is settled where ``absmax`` is the largest magnitude."""
        raise TypeError(f"{type(self).__name__} settles no scale")

    def turned(self, x: Tensor) -> Tensor:
        """Return x [..., L, C] as it is coded [..., L, C'] fp32: rotated if the codec says so."""
        rotation = self.rotation(x.shape[-1], x.device)
        return x.float() if rotation is None else x.float() @ rotation

    def rotation(self, channels: int, device: torch.device) -> Tensor | None:
        """Return the basis [C, C'] of what is coded, or None."""
        return None if self.rotate == "none" else basis(channels, self.rotate, self.block, device)

    def coded_channels(self, channels: int) -> int:
        """Return C': as many channels as ``channels``, and what a rotation pads."""
        return channels if self.rotate == "none" else width(channels, self.rotate)

    def refusal(self, channels: int) -> str:
        """Return why heads of so many channels cannot be coded, or ''."""
        return ""

    def pack(self, x: Tensor, frozen: Tensor | None = None) -> Coded:
        """Return x [..., H, L, C] coded. Scales that are settled once are those of x, unless ``frozen`` has them.

        Raises KvbenchError if a value is not finite.
        """
        if not bool(x.isfinite().all()):
            raise KvbenchError(f"cannot store as {self}: a key or value is infinite or not a number")
        turned = self.turned(x)
        frozen = self.settled(turned) if frozen is None else frozen
        # each token is coded by itself, and codes in the making take many times their bytes
        parts = turned.split(max(1, PART * turned.shape[-2] // max(1, turned.numel())), dim=-2)
        encoded = [self.encode(part, frozen) for part in parts]
        tensors = encoded[0] if len(encoded) == 1 else {n: torch.cat([e[n] for e in encoded], -2) for n in encoded[0]}
        for name, t in tensors.items():
            if t.is_floating_point() and not bool(t.isfinite().all()):
                raise KvbenchError(f"cannot store as {self}: a {name} exceeds {str(t.dtype).removeprefix('torch.')}")
        return Coded(self, tensors, x.shape[-1], frozen)

    def settled(self, turned: Tensor, lengths: Tensor | None = None) -> Tensor | None:
        """Return the scales [..., H, 1, 1] fp32 that values [..., H, L, C'] settle, one for each head; None if none.

        ``lengths`` [H] are the tokens of ragged heads, which lie one after the other in [1, N, C'].
        """
        if not self.settles:
            return None
        if lengths is None:
            absmax = turned.abs().amax(dim=(-2, -1), keepdim=True)
        else:
            absmax = torch.stack([t.abs().amax() for t in turned[0].split(lengths.tolist())])[:, None, None]
        if self.settles == "tensor":
            absmax = absmax.amax(dim=-3, keepdim=True).expand_as(absmax)
        return self.settle(absmax).clone()


@dataclass(frozen=True)
class Coded(Packed):
    """Keys or values [..., L, C] as ``codec`` stores them, in ``tensors`` [..., L, m]; ``size`` is C."""

    codec: Codec
    tensors: Mapping[str, Tensor]
    size: int
    frozen: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*next(self.payload()).shape[:-1], self.size))

    @property
    def format(self) -> tuple[object, ...]:
        return (self.codec, self.size)

    @property
    def rotation(self) -> Tensor | None:  # type: ignore[override]
        return self.codec.rotation(self.size, self.device)

    def payload(self) -> Iterator[Tensor]:
        yield from self.tensors.values()

    def codes_only(self) -> Iterator[Tensor]:
        yield from (t for name, t in self.tensors.items() if name.startswith("codes"))

    def holding(self, tensors: Sequence[Tensor], frozen: Tensor | None) -> Self:
        return replace(self, tensors=dict(zip(self.tensors, tensors, strict=True)), frozen=frozen)

    def tokens(self, start: int | None = None, stop: int | None = None) -> Self:
        return self.map(lambda t: t[..., start:stop, :])

    def flat(self) -> Self:
        frozen = None if self.frozen is None else self.frozen.flatten(0, -3)
        return self.holding([t.flatten(0, -3) for t in self.payload()], frozen)

    def more(self, x: Tensor, pack: Callable[..., Packed], rows: Sequence[int] | None = None) -> Packed:
        if self.frozen is None:
            return pack(x)
        return pack(x, frozen=self.frozen if rows is None else self.frozen[list(rows)])

    def rotated(self, dtype: torch.dtype, scratch: Tensor | None = None) -> Tensor:
        return self.codec.decode(self.tensors, self.codec.coded_channels(self.size), self.frozen).to(dtype)

    def dequantise(self, dtype: torch.dtype, scratch: Tensor | None = None) -> Tensor:
        rotation = self.rotation
        if rotation is None:
            return self.rotated(dtype)
        return (self.rotated(torch.float32) @ rotation.T).to(dtype)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Return codes [..., m] below 2^bits, at most 8, as bytes [..., ceil(m bits / 8)], the first in the lowest bits.

    That is pairs of nibbles for 4 bits, and eight codes in 24 bits, little-endian, for 3: the layout of the engines
    whose formats these are. ``kvbench.kv.packed.pack`` lays codes out in runs: its bytes are another format.
    """
    _check_bits(bits)
    m = codes.shape[-1]
    codes = torch.nn.functional.pad(codes.to(torch.int64), (0, -m % 8)).unflatten(-1, (-1, 8))
    word = (codes << (bits * torch.arange(8, device=codes.device))).sum(dim=-1, keepdim=True)
    parts = (word >> (8 * torch.arange(bits, device=codes.device))) & 255
    return parts.to(torch.uint8).flatten(-2)[..., : bit_bytes(m, bits)].clone(memory_format=torch.contiguous_format)


def unpack_bits(packed: Tensor, bits: int, m: int) -> Tensor:
    """Return the m codes [..., m] uint8 that ``pack_bits`` put into bytes."""
    _check_bits(bits)
    if bits == 8:
        return packed
    if bits == 4:
        return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)[..., :m]
    missing = -packed.shape[-1] % bits
    # eight codes are a word of 8 bits times ``bits``, of which an int32 holds three bytes without its sign
    word_type = torch.int32 if bits <= 3 else torch.int64
    parts = torch.nn.functional.pad(packed, (0, missing)).unflatten(-1, (-1, bits)).to(word_type)
    word = (parts << (8 * torch.arange(bits, device=packed.device, dtype=word_type))).sum(dim=-1, keepdim=True)
    shifts = bits * torch.arange(8, device=packed.device)
    return ((word >> shifts) & (2**bits - 1)).to(torch.uint8).flatten(-2)[..., :m]


def _check_bits(bits: int) -> None:
    if not 1 <= bits <= 8:
        raise ValueError(f"codes of {bits} bits: must be 1 to 8")


def bit_bytes(m: int, bits: int) -> int:
    """Return the bytes of m codes of ``bits`` bits."""
    return -(-m * bits // 8)


def in_blocks(x: Tensor, group: int) -> Tensor:
    """Return x [..., C] as [..., blocks, group], the last block filled with zeros."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % group)).unflatten(-1, (-1, group))
