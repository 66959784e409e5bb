"""Keys or values in a format that stores each token of a head by itself.

A codec turns numbers into named tensors and back. It is pure: it knows one tensor, no cache and no method.
``kvbench.kv.codecs`` has one file for each family of formats.
Shapes: H heads, L tokens, C channels (D, or T after pruning), C' coded channels (C, or C and padding), m numbers of a
token in one of the named tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from kvbench.base.errors import KvbenchError
from kvbench.kv.packed import Levels, Packed, defined_together
from kvbench.kv.rotation import basis_width, make_basis

FROZEN_BYTES = 4
"""The bytes of a head's frozen scale, one fp32 number."""
PART = 2**18
"""The number of elements that ``Codec.pack`` codes together."""


@dataclass(frozen=True, kw_only=True)
class Codec(ABC):
    """A storage format of single tokens.

    Unless a codec says otherwise, arithmetic is fp32, and numbers are rounded to nearest with ties to even.

    rotate: the orthogonal basis in which values are coded (see ``rotation.make_basis``), or ``none``.
    block: the most channels that are rotated together.
    """

    settles: ClassVar[Literal["", "tensor", "head"]] = ""
    """Which scale the prompt settles for later tokens: ``tensor`` one per layer, ``head`` one per head, '' none."""

    rotate: str = "none"
    block: int = 2**30

    def __str__(self) -> str:
        # error messages name a codec by the settings that differ from its defaults
        settings = []
        for setting in fields(self):
            value = getattr(self, setting.name)
            if value != setting.default:
                settings.append(f"{setting.name}={value}")
        return f"{type(self).__name__}({', '.join(settings)})"

    @abstractmethod
    def token_bytes(self, channels: int) -> int:
        """Return the bytes that a codec stores for one token of one head with ``channels`` channels C."""

    @abstractmethod
    def encode(self, x: Tensor, frozen: Tensor | None) -> dict[str, Tensor]:
        """Encode x [..., L, C'] fp32 as named tensors [..., L, m].

        A tensor whose name begins with ``codes`` holds codes. The other tensors hold scales. ``frozen`` are the scales
        [..., H, 1, 1] that the prompt settled, or None.
        """

    @abstractmethod
    def decode(self, tensors: Mapping[str, Tensor], channels: int, frozen: Tensor | None) -> Tensor:
        """Return the numbers [..., L, C'] fp32 that ``tensors`` encode. C' is ``channels``.

        ``frozen`` are the scales under which they were encoded.
        """

    def levels(self, tensors: Mapping[str, Tensor], channels: int, frozen: Tensor | None) -> Levels | None:
        """Return as ``Levels`` the numbers that ``decode`` returns, or None if the codec has another form."""
        return None

    def settle(self, absmax: Tensor) -> Tensor:
        """Return the scale that lets the codec represent magnitudes up to ``absmax``, for each element of ``absmax``.

        Only codecs with ``settles`` have such scales. They are found on the prompt and used for all later tokens. Other
        codecs raise TypeError.
        """
        raise TypeError(f"{type(self).__name__} settles no scale")

    def to_basis(self, x: Tensor) -> Tensor:
        """Return x [..., L, C] as fp32 [..., L, C'], in the codec's basis if the codec rotates, else unchanged.

        C' is the number of coded channels (``coded_channels``).
        """
        rotation = self.rotation(x.shape[-1], x.device)
        if rotation is None:
            return x.float()
        return x.float() @ rotation

    def rotation(self, channels: int, device: torch.device) -> Tensor | None:
        """Return the basis [C, C'] in which values are coded, or None if the codec does not rotate."""
        if self.rotate == "none":
            return None
        return make_basis(channels, self.rotate, self.block, device)

    def coded_channels(self, channels: int) -> int:
        """Return C', the number of coded channels: ``channels`` and the padding that the rotation adds."""
        if self.rotate == "none":
            return channels
        return basis_width(channels, self.rotate)

    def allowed_channels(self, channels: int) -> str:
        """Return in words which numbers of channels the codec takes; '' if ``channels`` is one of them."""
        return ""

    def pack(self, x: Tensor, frozen: Tensor | None = None, part_elements: int = PART) -> Coded:
        """Return x [..., H, L, C] encoded, with the scales under which it was encoded.

        ``frozen`` are the scales that the prompt settled. Without them x settles its own. ``part_elements`` is
        the number of elements that are coded at a time. It bounds memory and changes no code.

        Raises KvbenchError if a value is not finite, or a scale exceeds the type in which it is stored.
        """
        if not bool(x.isfinite().all()):
            raise KvbenchError(f"cannot store as {self}: a key or value is infinite or not a number")
        rotated = self.to_basis(x)
        if frozen is None:
            # the prompt comes first and settles the scales of all later tokens
            frozen = self.find_settled_scales(rotated)
        tensors = self._encode_in_parts(rotated, frozen, part_elements)
        for name, t in tensors.items():
            if t.is_floating_point() and not bool(t.isfinite().all()):
                raise KvbenchError(f"cannot store as {self}: a {name} exceeds {str(t.dtype).removeprefix('torch.')}")
        return Coded(self, tensors, x.shape[-1], frozen)

    def _encode_in_parts(self, x: Tensor, frozen: Tensor | None, part_elements: int) -> dict[str, Tensor]:
        """Return ``encode`` of x [..., L, C'], computed for about ``part_elements`` elements at a time."""
        # each token is coded by itself, so x can be coded in parts; encoding takes many times the memory of the codes
        tokens = max(1, x.shape[-2])
        elements_per_token = max(1, x.numel() // tokens)
        part_tokens = max(1, part_elements // elements_per_token)
        encoded_parts = [self.encode(part, frozen) for part in x.split(part_tokens, dim=-2)]
        if len(encoded_parts) == 1:
            return encoded_parts[0]
        tensors = {}
        for name in encoded_parts[0]:
            tensors[name] = torch.cat([encoded[name] for encoded in encoded_parts], dim=-2)
        return tensors

    def find_settled_scales(self, x: Tensor, lengths: Tensor | None = None) -> Tensor | None:
        """Return the scales [..., H, 1, 1] fp32 that x [..., H, L, C'] settles; None if the codec settles no scales.

        ``lengths`` [H] are the token counts of ragged heads, whose tokens x [1, N, C'] holds one head after the other.
        """
        if not self.settles:
            return None
        if lengths is None:
            absmax = x.abs().amax(dim=(-2, -1), keepdim=True)
        else:
            values_by_head = x[0].split(lengths.tolist())
            # [H, 1, 1], as for heads of one length
            absmax = torch.stack([values.abs().amax() for values in values_by_head])[:, None, None]
        if self.settles == "tensor":
            # all heads of the layer have the same scale, and each head stores it
            absmax = absmax.amax(dim=-3, keepdim=True).expand_as(absmax)
        return self.settle(absmax).clone()


@dataclass(frozen=True)
class Coded(Packed):
    """Keys or values [..., L, C] as ``codec`` stores them.

    codec: the storage format.
    tensors: the named tensors [..., L, m] that ``codec.encode`` returns.
    size: C.
    frozen: the scales [..., H, 1, 1] that the prompt settled; None if the codec settles none.
    """

    codec: Codec
    tensors: Mapping[str, Tensor]
    size: int
    frozen: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        # all tensors have the same axes but the last, so any of them shows the others
        sizes = list(next(self.payload()).shape)
        sizes[-1] = self.size
        return torch.Size(sizes)

    @property
    def format(self) -> tuple[object, ...]:
        return (self.codec, self.size)

    @property
    def rotation(self) -> Tensor | None:  # type: ignore[override]
        return self.codec.rotation(self.size, self.device)

    def payload(self) -> Iterator[Tensor]:
        yield from self.tensors.values()

    def codes_only(self) -> Iterator[Tensor]:
        for name, t in self.tensors.items():
            if name.startswith("codes"):
                yield t

    def holding(self, tensors: Sequence[Tensor], frozen: Tensor | None) -> Self:
        return replace(self, tensors=dict(zip(self.tensors, tensors, strict=True)), frozen=frozen)

    def tokens(self, start: int | None = None, stop: int | None = None) -> Self:
        return self.map(lambda t: t[..., start:stop, :])

    def flat(self) -> Self:
        frozen = self.frozen
        if frozen is not None:
            frozen = frozen.flatten(0, -3)
        return self.holding([t.flatten(0, -3) for t in self.payload()], frozen)

    def pack_more(self, x: Tensor, pack: Callable[..., Packed], rows: Sequence[int] | None = None) -> Packed:
        """Return new tokens x packed like these, under the frozen scales of their rows."""
        frozen = self.frozen
        if frozen is None:
            return pack(x)
        # new tokens are coded under the scales that their own row has settled; x may have only some of the rows
        if rows is not None:
            frozen = frozen[list(rows)]
        return pack(x, frozen=frozen)

    def levels(self) -> Levels | None:
        # a codec with a ``decode`` of its own stores other numbers than an inherited ``levels`` says
        if not defined_together(type(self.codec), "levels", "decode"):
            return None
        return self.codec.levels(self.tensors, self.codec.coded_channels(self.size), self.frozen)

    def rotated(self, dtype: torch.dtype, scratch: Tensor | None = None) -> Tensor:
        return self.codec.decode(self.tensors, self.codec.coded_channels(self.size), self.frozen).to(dtype)

    def dequantise(self, dtype: torch.dtype, scratch: Tensor | None = None) -> Tensor:
        """Return the values [..., L, C] in ``dtype``, rotated back out of the codec's basis."""
        rotation = self.rotation
        if rotation is None:
            return self.rotated(dtype)
        # the basis has orthonormal rows, so its transpose undoes the rotation; the product is in fp32 and rounded once
        return (self.rotated(torch.float32) @ rotation.T).to(dtype)


def split_into_blocks(x: Tensor, group: int) -> Tensor:
    """Return x [..., C] as [..., blocks, group], with zeros behind the last channel if ``group`` does not divide C."""
    # -C mod group: the channels that C lacks to a multiple of group
    missing = -x.shape[-1] % group
    return torch.nn.functional.pad(x, (0, missing)).unflatten(-1, (-1, group))
