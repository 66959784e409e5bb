"""q8_0 and q4_0 of llama.cpp: blocks of 32 channels with an fp16 scale each (https://github.com/ggml-org/llama.cpp).

Since its pull request 21038 keys and values are rotated first (``rotate=hadamard``): published numbers from before and
after it are of two formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.kv.coded import Codec, in_blocks
from kvbench.kv.packed import pack, unpack


@dataclass(frozen=True, kw_only=True)
class Blocks(Codec):
    """Codes of each block, computed with the fp32 scale and read with the fp16 one, d.

    8 bits: d = absmax / 127, c = round(x / d), read as c * d. 4 bits: m is the signed value of the largest magnitude,
    the first on ties, d = m / -8, c = min(15, trunc(x / d + 8.5)), read as (c - 8) d; the first half of a block is in
    the low nibbles. There is no level +8: m is exact up to fp16, and its opposite clips to 7/8 of it.
    """

    bits: int = 8
    group: int = 32

    def token_bytes(self, channels: int) -> int:
        return -(-self.coded_channels(channels) // self.group) * (self.group * self.bits // 8 + 2)

    def refusal(self, channels: int) -> str:
        return f"channels in whole blocks of {self.group}" if channels % self.group else ""

    def encode(self, x: Tensor, frozen: Tensor | None) -> dict[str, Tensor]:
        x = in_blocks(x, self.group)
        at = x.abs().argmax(dim=-1, keepdim=True)
        extreme = x.gather(-1, at)
        scale = extreme.abs() / 127 if self.bits == 8 else extreme / -8
        inverse = torch.where(scale == 0, 0.0, 1 / scale)
        if self.bits == 8:
            codes = (x * inverse).round().to(torch.int8)
        else:
            codes = pack((x * inverse + 8.5).trunc().clamp(max=15).to(torch.uint8), 4)
        return {"codes": codes.flatten(-2), "scale": scale[..., 0].half()}

    def decode(self, tensors: Mapping[str, Tensor], channels: int, frozen: Tensor | None) -> Tensor:
        scale = tensors["scale"].float()[..., None]
        codes = tensors["codes"].unflatten(-1, (scale.shape[-2], -1))
        steps = codes.float() if self.bits == 8 else unpack(codes, 4, self.group).float() - 8
        return (steps * scale).flatten(-2)[..., :channels]
