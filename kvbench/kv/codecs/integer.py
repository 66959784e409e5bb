"""Integers of few bits with one scale for each token and head: int8 and int4 of vLLM, int8 of SGLang, and min-max.

Formats of vLLM (int8_per_token_head, int4_per_token_head, turboquant's values) and SGLang, read in their kernels:
https://github.com/vllm-project/vllm, https://github.com/sgl-project/sglang.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.kv.coded import Codec, bit_bytes, pack_bits, unpack_bits

LEAST_SCALE = 1e-6


@dataclass(frozen=True, kw_only=True)
class SymmetricInteger(Codec):
    """Codes c = clip(round(x / s), -2^(bits-1), 2^(bits-1) - 1), read as c * s, with s = absmax / (2^(bits-1) - 1).

    The scale is at least 1e-6 in fp32 (vLLM's int8, 4 bytes). In fp16 (``half``, 2 bytes) codes are of the rounded one.
    truncate: x / s is cut toward 0 instead of rounded, as in a kernel that casts.
    """

    bits: int = 8
    half: bool = False
    truncate: bool = False

    def token_bytes(self, channels: int) -> int:
        return bit_bytes(self.coded_channels(channels), self.bits) + (2 if self.half else 4)

    def encode(self, x: Tensor, frozen: Tensor | None) -> dict[str, Tensor]:
        top = 2 ** (self.bits - 1)
        scale = x.abs().amax(dim=-1, keepdim=True) / (top - 1)
        scale = scale.half() if self.half else scale.clamp(min=LEAST_SCALE)
        step = scale.float()
        steps = x / step.masked_fill(step == 0, torch.inf)
        codes = (steps.trunc() if self.truncate else steps.round()).clamp(-top, top - 1).to(torch.int8)
        return {"codes": codes if self.bits == 8 else pack_bits(codes + top, self.bits), "scale": scale}

    def decode(self, tensors: Mapping[str, Tensor], channels: int, frozen: Tensor | None) -> Tensor:
        codes, scale = tensors["codes"], tensors["scale"].float()
        if self.bits < 8:
            codes = unpack_bits(codes, self.bits, channels).to(torch.int8) - 2 ** (self.bits - 1)
        return codes.float() * scale


@dataclass(frozen=True, kw_only=True)
class CentredInt8(Codec):
    """Codes c = round((x - z) / s) with z = (min + max) / 2 and s = (max - min) / 255, both fp16, read as c * s + z.

    Codes are of the rounded s and z. The ends of the range are ties at +-127.5: they are clipped to -128 and 127.
    """

    def token_bytes(self, channels: int) -> int:
        return self.coded_channels(channels) + 4

    def encode(self, x: Tensor, frozen: Tensor | None) -> dict[str, Tensor]:
        low, high = x.amin(dim=-1, keepdim=True), x.amax(dim=-1, keepdim=True)
        centre, scale = ((low + high) / 2).half(), ((high - low) / 255).half()
        step = scale.float()
        steps = (x - centre.float()) / step.masked_fill(step == 0, torch.inf)
        return {"codes": steps.round().clamp(-128, 127).to(torch.int8), "scale": scale, "centre": centre}

    def decode(self, tensors: Mapping[str, Tensor], channels: int, frozen: Tensor | None) -> Tensor:
        return tensors["codes"].float() * tensors["scale"].float() + tensors["centre"].float()


@dataclass(frozen=True, kw_only=True)
class ZeroPointInt4(Codec):
    """Codes c = clip(away(y / s + z), 0, 15), read as (c - z) s, with the zero point z inside the fp32 scale.

    s = max((max - min) / 15, 1e-6) and z = clip(away(-min / s), 0, 15), where ``away`` rounds ties away from zero. The
    lowest 4 bits of the scale's mantissa are z. A token whose values are all of one sign is clipped: rotation makes
    that rare. A rotated y is sqrt(C') times x in the basis, and rounded back to the model's type, as in vLLM, whose
    Hadamard matrix is not normalised.
    """

    def token_bytes(self, channels: int) -> int:
        return bit_bytes(self.coded_channels(channels), 4) + 4

    def turned(self, x: Tensor) -> Tensor:
        y = super().turned(x)
        return y if self.rotate == "none" else (y * y.shape[-1] ** 0.5).to(x.dtype).float()

    def encode(self, x: Tensor, frozen: Tensor | None) -> dict[str, Tensor]:
        low, high = x.amin(dim=-1, keepdim=True), x.amax(dim=-1, keepdim=True)
        scale = ((high - low) / 15).clamp(min=LEAST_SCALE)
        # ties away from zero: what is below 0 is clipped anyway
        zero = (-low / scale + 0.5).floor().clamp(0, 15)
        codes = (x / scale + zero + 0.5).floor().clamp(0, 15)
        bits = (scale.view(torch.int32) & ~15) | zero.to(torch.int32)
        return {"codes": pack_bits(codes, 4), "scale": bits.view(torch.float32)}

    def decode(self, tensors: Mapping[str, Tensor], channels: int, frozen: Tensor | None) -> Tensor:
        bits = tensors["scale"].contiguous().view(torch.int32)
        scale, zero = (bits & ~15).view(torch.float32), (bits & 15).float()
        y = (unpack_bits(tensors["codes"], 4, channels).float() - zero) * scale
        return y if self.rotate == "none" else y / channels**0.5


@dataclass(frozen=True, kw_only=True)
class MinMaxInteger(Codec):
    """Codes c = clip(trunc((x - min) / s + .5), 0, 2^bits - 1), read as c * fp16(s) + fp16(min): turboquant's values.

    s = max((max - min) / (2^bits - 1), 1e-8). Codes are of the scale and the minimum before rounding.
    """

    bits: int = 4

    def token_bytes(self, channels: int) -> int:
        return bit_bytes(self.coded_channels(channels), self.bits) + 4

    def encode(self, x: Tensor, frozen: Tensor | None) -> dict[str, Tensor]:
        low, high = x.amin(dim=-1, keepdim=True), x.amax(dim=-1, keepdim=True)
        top = 2**self.bits - 1
        scale = ((high - low) / top).clamp(min=1e-8)
        codes = ((x - low) / scale + 0.5).trunc().clamp(0, top)
        return {"codes": pack_bits(codes, self.bits), "scale": scale.half(), "low": low.half()}

    def decode(self, tensors: Mapping[str, Tensor], channels: int, frozen: Tensor | None) -> Tensor:
        codes = unpack_bits(tensors["codes"], self.bits, channels).float()
        return codes * tensors["scale"].float() + tensors["low"].float()
