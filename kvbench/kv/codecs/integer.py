"""Integers of few bits with one scale for each token and head.

They are formats of vLLM (int8_per_token_head, int4_per_token_head, turboquant's values) and of SGLang (int8). The
engines' kernels define them: https://github.com/vllm-project/vllm, https://github.com/sgl-project/sglang.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.kv.coded import Codec
from kvbench.kv.packed import Levels, pack, packed_bytes, signed_levels, unpack

LEAST_SCALE = 1e-6
"""vLLM's least scale. A token of zeros is divided by it."""


@dataclass(frozen=True, kw_only=True)
class SymmetricInteger(Codec):
    """Store codes c = clip(round(x / s), -2^(bits-1), 2^(bits-1) - 1), read as c * s, s = absmax / (2^(bits-1) - 1).

    half: False stores the scale in fp32, at least 1e-6 (vLLM's int8, 4 bytes). True stores it in fp16 (2 bytes), and
    codes are computed with the rounded scale.
    truncate: True cuts x / s toward 0 instead of rounding it. A kernel that casts does the same.
    """

    bits: int = 8
    half: bool = False
    truncate: bool = False

    def token_bytes(self, channels: int) -> int:
        code_bytes = packed_bytes(self.coded_channels(channels), self.bits, "stream")
        # the scale is in fp16 or in fp32
        scale_bytes = 2 if self.half else 4
        return code_bytes + scale_bytes

    def encode(self, x: Tensor, frozen: Tensor | None) -> dict[str, Tensor]:
        """Return ``codes`` [..., L, C'] int8, packed if they have fewer than 8 bits, and ``scale`` [..., L, 1]."""
        half_range = 2 ** (self.bits - 1)
        absmax = x.abs().amax(dim=-1, keepdim=True)
        # s = absmax / (2^(bits-1) - 1)
        scale = absmax / (half_range - 1)
        if self.half:
            scale = scale.half()
        else:
            scale = scale.clamp(min=LEAST_SCALE)
        # codes are computed with the stored scale, because a reader multiplies by that one
        steps = x / _replace_zero_by_infinity(scale)
        steps = steps.trunc() if self.truncate else steps.round()
        codes = steps.clamp(-half_range, half_range - 1).to(torch.int8)
        if self.bits < 8:
            # packed codes are unsigned: code 2^(bits-1) stands for level 0
            codes = pack(codes + half_range, self.bits, layout="stream")
        return {"codes": codes, "scale": scale}

    def decode(self, tensors: Mapping[str, Tensor], channels: int, frozen: Tensor | None) -> Tensor:
        """Return the numbers c * s [..., L, C'] fp32."""
        codes, scale = tensors["codes"], tensors["scale"].float()
        # codes of 8 bits are stored as signed bytes and need no unpacking
        if self.bits < 8:
            codes = unpack(codes, self.bits, channels, layout="stream").to(torch.int8) - 2 ** (self.bits - 1)
        return codes.float() * scale

    def levels(self, tensors: Mapping[str, Tensor], channels: int, frozen: Tensor | None) -> Levels:
        table = signed_levels(self.bits, offset=self.bits < 8, device=tensors["codes"].device)
        return _build_levels(tensors["codes"], self.bits, channels, scale=tensors["scale"].float(), table=table)


@dataclass(frozen=True, kw_only=True)
class CentredInt8(Codec):
    """Store codes c = round((x - z) / s), read as c * s + z. z = (min + max) / 2 and s = (max - min) / 255 are fp16.

    Codes are computed with s and z as rounded to fp16. Before codes are rounded, those of min and max are -127.5 and
    127.5, or beyond where rounding moved s or z: codes are clipped to -128 and 127.
    """

    def token_bytes(self, channels: int) -> int:
        # scale and centre take 2 bytes each
        return self.coded_channels(channels) + 4

    def encode(self, x: Tensor, frozen: Tensor | None) -> dict[str, Tensor]:
        """Return ``codes`` [..., L, C'] int8, and ``scale`` and ``centre`` [..., L, 1] fp16."""
        low, high = x.amin(dim=-1, keepdim=True), x.amax(dim=-1, keepdim=True)
        # z = (min + max) / 2
        centre = ((low + high) / 2).half()
        # s = (max - min) / 255
        scale = ((high - low) / 255).half()
        # c = round((x - z) / s)
        steps = (x - centre.float()) / _replace_zero_by_infinity(scale)
        codes = steps.round().clamp(-128, 127).to(torch.int8)
        return {"codes": codes, "scale": scale, "centre": centre}

    def decode(self, tensors: Mapping[str, Tensor], channels: int, frozen: Tensor | None) -> Tensor:
        return tensors["codes"].float() * tensors["scale"].float() + tensors["centre"].float()

    def levels(self, tensors: Mapping[str, Tensor], channels: int, frozen: Tensor | None) -> Levels:
        table = signed_levels(8, offset=False, device=tensors["codes"].device)
        scale, centre = tensors["scale"].float(), tensors["centre"].float()
        return _build_levels(tensors["codes"], 8, channels, scale=scale, low=centre, table=table)


@dataclass(frozen=True, kw_only=True)
class ZeroPointInt4(Codec):
    """Store codes c = clip(away(y / s + z), 0, 15), read as (c - z) s. The fp32 scale s also holds the zero point z.

    s = max((max - min) / 15, 1e-6) and z = clip(away(-min / s), 0, 15), where ``away`` rounds ties away from zero. The
    lowest 4 bits of the scale's mantissa are z. A token whose values all have one sign is clipped. Rotation makes such
    tokens rare.

    y is x without a rotation. vLLM's Hadamard matrix is not normalised: with it, y is sqrt(C') times x in the basis,
    rounded back to the model's type.
    """

    def token_bytes(self, channels: int) -> int:
        # the scale takes 4 bytes, and holds the zero point
        return packed_bytes(self.coded_channels(channels), 4, "stream") + 4

    def to_basis(self, x: Tensor) -> Tensor:
        """Return y [..., L, C'] fp32, which the codes stand for."""
        y = super().to_basis(x)
        if self.rotate == "none":
            return y
        # vLLM's matrix is not normalised: its result is sqrt(C') times that of the orthonormal basis
        return (y * y.shape[-1] ** 0.5).to(x.dtype).float()

    def encode(self, x: Tensor, frozen: Tensor | None) -> dict[str, Tensor]:
        """Return ``codes`` [..., L, C' / 2], two in a byte, and ``scale`` [..., L, 1] fp32 with the zero point."""
        low, high = x.amin(dim=-1, keepdim=True), x.amax(dim=-1, keepdim=True)
        # s = max((max - min) / 15, 1e-6)
        scale = ((high - low) / 15).clamp(min=LEAST_SCALE)
        # z = clip(away(-min / s), 0, 15): floor(a + 0.5) rounds positive ties away from zero, and negative numbers are
        # clipped to 0 anyway
        zero = (-low / scale + 0.5).floor().clamp(0, 15)
        # c = clip(away(y / s + z), 0, 15)
        codes = (x / scale + zero + 0.5).floor().clamp(0, 15)
        # the zero point takes the place of the lowest 4 bits of the mantissa
        bits = (scale.view(torch.int32) & ~15) | zero.to(torch.int32)
        return {"codes": pack(codes, 4, layout="stream"), "scale": bits.view(torch.float32)}

    def decode(self, tensors: Mapping[str, Tensor], channels: int, frozen: Tensor | None) -> Tensor:
        """Return the numbers in the orthonormal basis [..., L, C'] fp32, without the factor of ``to_basis``."""
        scale, zero = _split_scale_and_zero(tensors["scale"])
        codes = unpack(tensors["codes"], 4, channels, layout="stream").float()
        y = (codes - zero) * scale
        if self.rotate == "none":
            return y
        # undo the factor sqrt(C') of ``to_basis``
        return y / channels**0.5

    def levels(self, tensors: Mapping[str, Tensor], channels: int, frozen: Tensor | None) -> Levels:
        scale, zero = _split_scale_and_zero(tensors["scale"])
        if self.rotate != "none":
            # undo the factor sqrt(C') of ``to_basis``
            scale = scale / channels**0.5
        # (c - z) s = s c - z s
        return _build_levels(tensors["codes"], 4, channels, scale=scale, low=-zero * scale)


@dataclass(frozen=True, kw_only=True)
class MinMaxInteger(Codec):
    """Store codes c = clip(trunc((x - min) / s + 0.5), 0, 2^bits - 1), read as c * fp16(s) + fp16(min).

    turboquant stores values in this format. s = max((max - min) / (2^bits - 1), 1e-8). Codes are computed with s and
    min in fp32, before they are rounded to fp16.
    """

    bits: int = 4

    def token_bytes(self, channels: int) -> int:
        # scale and minimum take 2 bytes each
        return packed_bytes(self.coded_channels(channels), self.bits, "stream") + 4

    def encode(self, x: Tensor, frozen: Tensor | None) -> dict[str, Tensor]:
        """Return ``codes`` [..., L, bytes], and ``scale`` and ``low`` (the minimum) [..., L, 1] fp16."""
        low, high = x.amin(dim=-1, keepdim=True), x.amax(dim=-1, keepdim=True)
        top = 2**self.bits - 1
        # s = max((max - min) / (2^bits - 1), 1e-8)
        scale = ((high - low) / top).clamp(min=1e-8)
        # c = clip(trunc((x - min) / s + 0.5), 0, 2^bits - 1)
        codes = ((x - low) / scale + 0.5).trunc().clamp(0, top)
        return {"codes": pack(codes, self.bits, layout="stream"), "scale": scale.half(), "low": low.half()}

    def decode(self, tensors: Mapping[str, Tensor], channels: int, frozen: Tensor | None) -> Tensor:
        codes = unpack(tensors["codes"], self.bits, channels, layout="stream").float()
        return codes * tensors["scale"].float() + tensors["low"].float()

    def levels(self, tensors: Mapping[str, Tensor], channels: int, frozen: Tensor | None) -> Levels:
        scale, low = tensors["scale"].float(), tensors["low"].float()
        return _build_levels(tensors["codes"], self.bits, channels, scale=scale, low=low)


def _split_scale_and_zero(stored: Tensor) -> tuple[Tensor, Tensor]:
    """Return (scale, zero point), both fp32, from scales as ``ZeroPointInt4`` stores them.

    The lowest 4 bits of a stored scale are the zero point.
    """
    bits = stored.contiguous().view(torch.int32)
    scale = (bits & ~15).view(torch.float32)
    zero = (bits & 15).float()
    return scale, zero


def _build_levels(
    codes: Tensor, bits: int, channels: int, *, scale: Tensor, low: Tensor | None = None, table: Tensor | None = None
) -> Levels:
    """Return as ``Levels`` the codes of a format that packs each token as one stream under one scale.

    codes: [..., L, bytes]. Each token has C = ``channels`` codes of ``bits`` bits.
    scale: [..., L, 1] fp32.
    low: [..., L, 1] fp32; None stands for 0.
    table: [2^bits] fp32, the number of each code; None if a code is its own number.
    """
    return Levels(
        codes=codes.view(torch.uint8),
        scale=scale,
        low=low,
        table=table,
        bits=bits,
        run=channels,
        group=channels,
        channels=channels,
        layout="stream",
    )


def _replace_zero_by_infinity(scale: Tensor) -> Tensor:
    """Return the scale as fp32, with infinity for 0: a value divided by it is then 0, not NaN."""
    divisor = scale.float()
    return divisor.masked_fill(divisor == 0, torch.inf)
