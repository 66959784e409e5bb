"""q8_0 and q4_0 of llama.cpp: blocks of 32 channels with an fp16 scale each (https://github.com/ggml-org/llama.cpp).

Since its pull request 21038, llama.cpp rotates keys and values first (``rotate=hadamard``). Numbers published before
and after that request belong to two formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.base.numbers import ceil_div
from kvbench.kv.coded import Codec, split_into_blocks
from kvbench.kv.packed import Levels, pack, signed_levels, unpack


@dataclass(frozen=True, kw_only=True)
class Blocks(Codec):
    """Store codes in blocks of ``group`` channels. Codes are computed with the fp32 scale d and read with d in fp16.

    8 bits: d = absmax / 127, c = round(x / d), read as c * d.

    4 bits: m is the signed value of the largest magnitude, the first on ties. d = m / -8, c = min(15, trunc(x / d +
    8.5)), read as (c - 8) d. The first half of a block is in the low nibbles. No code stands for +8: m is exact up to
    fp16, but -m is clipped to 7/8 of its magnitude.
    """

    bits: int = 8
    group: int = 32

    def token_bytes(self, channels: int) -> int:
        blocks = ceil_div(self.coded_channels(channels), self.group)
        # a block has its codes and one fp16 scale of 2 bytes
        return blocks * (self.group * self.bits // 8 + 2)

    def allowed_channels(self, channels: int) -> str:
        if channels % self.group:
            return f"channels in whole blocks of {self.group}"
        return ""

    def encode(self, x: Tensor, frozen: Tensor | None) -> dict[str, Tensor]:
        """Return ``codes`` [..., L, bytes], int8 for 8 bits and packed for 4, and ``scale`` [..., L, blocks] fp16."""
        x = split_into_blocks(x, self.group)
        # m, the value of the largest magnitude in each block, with its sign
        index_of_largest = x.abs().argmax(dim=-1, keepdim=True)
        extreme = x.gather(-1, index_of_largest)
        if self.bits == 8:
            # d = |m| / 127, c = round(x / d)
            scale = extreme.abs() / 127
            codes = (x * _invert(scale)).round().to(torch.int8)
        else:
            # d = m / -8, c = min(15, trunc(x / d + 8.5)): m gets code 0, as that end of the range has one level more
            scale = extreme / -8
            codes = (x * _invert(scale) + 8.5).trunc().clamp(max=15).to(torch.uint8)
            # the layout ``runs`` puts codes j and j + 16 into byte j of a block
            codes = pack(codes, 4)
        return {"codes": codes.flatten(-2), "scale": scale[..., 0].half()}

    def decode(self, tensors: Mapping[str, Tensor], channels: int, frozen: Tensor | None) -> Tensor:
        """Return the numbers c * d, or (c - 8) d for 4 bits, as [..., L, C'] fp32."""
        # [..., blocks, 1]
        scale = tensors["scale"].float()[..., None]
        codes = tensors["codes"].unflatten(-1, (scale.shape[-2], -1))
        if self.bits == 4:
            # code 8 stands for the level 0
            codes = unpack(codes, 4, self.group).to(torch.int8) - 8
        return (codes.float() * scale).flatten(-2)[..., :channels]

    def levels(self, tensors: Mapping[str, Tensor], channels: int, frozen: Tensor | None) -> Levels:
        return Levels(
            # codes of 8 bits are stored as int8
            codes=tensors["codes"].view(torch.uint8),
            scale=tensors["scale"],
            bits=self.bits,
            run=self.group,
            group=self.group,
            channels=channels,
            table=signed_levels(self.bits, offset=self.bits < 8, device=tensors["codes"].device),
        )


def _invert(scale: Tensor) -> Tensor:
    """Return 1 / scale, or 0 where the scale is 0. A block of zeros then gets the codes of level 0."""
    return torch.where(scale == 0, 0.0, 1 / scale)
