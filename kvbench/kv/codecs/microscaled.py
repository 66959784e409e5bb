"""FP4 with a scale for each block: NVFP4, MXFP4 of OCP, and SGLang's fp4.

Every number is one of 0, .5, 1, 1.5, 2, 3, 4, 6 with a sign (E2M1), times its block's scale. MXFP4: OCP Microscaling
Formats 1.0, https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf. NVFP4:
https://developer.nvidia.com/blog/introducing-nvfp4-for-efficient-and-accurate-low-precision-inference/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kvbench.base.numbers import ceil_div
from kvbench.kv.coded import Codec, split_into_blocks
from kvbench.kv.packed import Levels, pack, packed_bytes, unpack

LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of codes 0 to 7."""
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""The numbers half-way between neighbouring magnitudes."""
LARGEST = 6.0
"""The largest magnitude."""
E4M3_MAX = 448.0
"""The largest block scale that NVFP4 can store."""


@cache
def _build_values_and_borders(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the values [16] of all codes, and the midpoints [7] between their magnitudes."""
    magnitudes = torch.tensor(LEVELS)
    # bit 3 of a code is the sign: codes 8 to 15 are the negative levels
    values = torch.cat([magnitudes, -magnitudes])
    return values.to(device), torch.tensor(MIDPOINTS).to(device)


def encode_e2m1(x: Tensor, ties_up: bool = False) -> Tensor:
    """Return the E2M1 codes of x as int64 in the shape of x. Bit 3 is the sign.

    Ties go to the even code, or to the larger magnitude if ``ties_up``.
    """
    _, borders = _build_values_and_borders(x.device)
    magnitude = x.abs().contiguous()
    # on a border, right=True takes the code above it and right=False the code below; elsewhere both are the same
    codes = torch.bucketize(magnitude, borders, right=True)
    if not ties_up:
        lower = torch.bucketize(magnitude, borders)
        # of the two codes beside a border one is even
        codes = torch.where(lower % 2 == 0, lower, codes)
    return codes + 8 * (x < 0)


@dataclass(frozen=True, kw_only=True)
class MicroscaledFp4(Codec):
    """Store codes e2m1(x / scale) of blocks, read as code * scale. A scale takes one byte.

    Numbers beyond 6 scales are clipped.

    kind ``nv``: the scale is b * g. The byte stores b = e4m3(absmax of the block / (6 g)). g = absmax / (6 * 448) is
    taken over all of the prompt's keys, or values, in a layer, and is frozen afterwards.
    kind ``ocp``: the scale is 2^(floor(log2 absmax) - 2).
    kind ``sglang``: the scale is 2^ceil(log2 max(absmax / 6, 1e-10)) and never clips. Ties go up.
    four_over_six: True tries, under ``nv``, the scales by absmax / 6 and by absmax / 4. Each block takes the scale with
    the smaller squared error.
    """

    kind: str = "nv"
    group: int = 16
    four_over_six: bool = False

    @property
    def settles(self) -> str:  # type: ignore[override]
        if self.kind == "nv":
            return "tensor"
        return ""

    def token_bytes(self, channels: int) -> int:
        blocks = ceil_div(self.coded_channels(channels), self.group)
        # codes of 4 bits, and one byte of scale for each block
        return packed_bytes(blocks * self.group, 4, "stream") + blocks

    def allowed_channels(self, channels: int) -> str:
        if channels % self.group:
            return f"channels in whole blocks of {self.group}"
        return ""

    def settle(self, absmax: Tensor) -> Tensor:
        g = absmax / (LARGEST * E4M3_MAX)
        # values that are all 0 come back as 0 under any scale but 0
        return g.masked_fill(g == 0, 1.0)

    def encode(self, x: Tensor, frozen: Tensor | None) -> dict[str, Tensor]:
        """Return ``codes`` [..., L, bytes], two in a byte, and each block's ``scale`` [..., L, blocks] as a byte."""
        x = split_into_blocks(x, self.group)
        absmax = x.abs().amax(dim=-1, keepdim=True)
        if self.kind == "nv":
            # this kind settles a scale on the prompt (``settles``)
            assert frozen is not None
            codes, scale_bytes = self._encode_under_shared_scale(x, absmax, g=frozen[..., None])
        else:
            codes, scale_bytes = self._encode_under_powers_of_two(x, absmax)
        return {"codes": pack(codes.flatten(-2), 4, layout="stream"), "scale": scale_bytes[..., 0]}

    def _encode_under_shared_scale(self, x: Tensor, absmax: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Return (codes, bytes of the e4m3 scales) under ``nv`` for blocks x [..., blocks, group].

        absmax: [..., blocks, 1], the largest magnitude of each block.
        g: the scale of the whole tensor, which all blocks share.
        """
        # b = e4m3(absmax / (6 g)) puts the largest value of a block on level 6
        scale = _round_to_e4m3(absmax / (LARGEST * g))
        if self.four_over_six:
            # absmax / 4 puts it on level 4, and avoids the wide gap between levels 4 and 6
            larger = _round_to_e4m3(absmax / (4 * g))
            larger_is_better = _measure_squared_error(x, larger, g) < _measure_squared_error(x, scale, g)
            # few PyTorch operations support the 8-bit float types, so the choice is made in fp32
            scale = torch.where(larger_is_better, larger.float(), scale.float()).to(torch.float8_e4m3fn)
        return _encode_under_scale(x, scale, g), scale.view(torch.uint8)

    def _encode_under_powers_of_two(self, x: Tensor, absmax: Tensor) -> tuple[Tensor, Tensor]:
        """Return (codes, biased exponents) under ``ocp`` or ``sglang`` for blocks x [..., blocks, group].

        absmax: [..., blocks, 1], the largest magnitude of each block. A byte holds the exponent plus 127.
        """
        # frexp gives absmax = mantissa * 2^exponent with a mantissa in [0.5, 1)
        if self.kind == "ocp":
            # floor(log2 absmax) is exponent - 1; the 2 is the exponent of the largest level, 6 = 1.5 * 2^2
            exponent = torch.frexp(absmax).exponent - 1 - 2
        else:
            mantissa, power = torch.frexp((absmax / LARGEST).clamp(min=1e-10))
            # for ceil(log2), a power of two is its own ceiling: its mantissa is 0.5
            exponent = power - (mantissa == 0.5).to(power.dtype)
        # the byte holds exponents from -127 on; a block of zeros takes the least
        exponent = exponent.masked_fill(absmax == 0, -127).clamp(-127, 127)
        # 2^-127 is below fp32's normal range, so the division runs in fp64
        scale = torch.exp2(exponent.double())
        codes = encode_e2m1((x / scale).float(), ties_up=self.kind == "sglang")
        return codes, (exponent + 127).to(torch.uint8)

    def decode(self, tensors: Mapping[str, Tensor], channels: int, frozen: Tensor | None) -> Tensor:
        """Return the numbers [..., L, C'] fp32: each code's level times the scale of its block."""
        # [..., blocks]
        scale = self._read_block_scale(tensors["scale"], frozen)
        padded_channels = scale.shape[-1] * self.group
        codes = unpack(tensors["codes"], 4, padded_channels, layout="stream")
        # [..., blocks, group]
        levels = _look_up_levels(codes).unflatten(-1, (-1, self.group))
        return (levels * scale[..., None]).flatten(-2)[..., :channels]

    def levels(self, tensors: Mapping[str, Tensor], channels: int, frozen: Tensor | None) -> Levels:
        table, _ = _build_values_and_borders(tensors["codes"].device)
        return Levels(
            codes=tensors["codes"],
            scale=self._read_block_scale(tensors["scale"], frozen),
            table=table,
            bits=4,
            run=channels,
            group=self.group,
            channels=channels,
            layout="stream",
        )

    def _read_block_scale(self, stored: Tensor, frozen: Tensor | None) -> Tensor:
        """Return the scale of each block [..., blocks] in fp32, from the bytes ``stored`` [..., blocks].

        ``frozen`` is the scale g of the whole tensor under ``nv``.
        """
        if self.kind == "nv":
            # ``encode`` had the scale as well
            assert frozen is not None
            return stored.view(torch.float8_e4m3fn).float() * frozen
        return torch.exp2(stored.float() - 127)


def _round_to_e4m3(scale: Tensor) -> Tensor:
    """Return block scales rounded to e4m3. The type has no infinity, so larger scales are clipped."""
    return scale.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)


def _encode_under_scale(x: Tensor, block_scale: Tensor, g: Tensor) -> Tensor:
    """Return the codes of x / (b g), for block scales b and the scale g of all blocks, or 0 where b g is 0."""
    scale = block_scale.float() * g
    # a number divided by infinity is 0
    return encode_e2m1(x / scale.masked_fill(scale == 0, torch.inf))


def _measure_squared_error(x: Tensor, block_scale: Tensor, g: Tensor) -> Tensor:
    """Return the squared error [..., blocks, 1] of each block of x [..., blocks, group] when coded under its scale b g.

    b is the block's ``block_scale``, and g the scale of all blocks.
    """
    read_back = _look_up_levels(_encode_under_scale(x, block_scale, g)) * block_scale.float() * g
    return (read_back - x).square().sum(dim=-1, keepdim=True)


def _look_up_levels(codes: Tensor) -> Tensor:
    """Return the fp32 levels that codes 0 to 15 stand for."""
    levels, _ = _build_values_and_borders(codes.device)
    return levels[codes.long()]
