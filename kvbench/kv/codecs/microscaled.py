"""FP4 with a scale for each block: NVFP4, MXFP4 of OCP, and SGLang's fp4.

Every number is one of 0, .5, 1, 1.5, 2, 3, 4, 6 with a sign (E2M1), times its block's scale. OCP Microscaling Formats
1.0, https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf; NVFP4 in
https://developer.nvidia.com/blog/introducing-nvfp4-for-efficient-and-accurate-low-precision-inference/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kvbench.kv.coded import Codec, bit_bytes, in_blocks, pack_bits, unpack_bits

LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
LARGEST = 6.0
E4M3_MAX = 448.0


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the values of the 16 codes, and the midpoints between magnitudes."""
    return torch.tensor([*LEVELS, *(-x for x in LEVELS)]).to(device), torch.tensor(MIDPOINTS).to(device)


def e2m1(x: Tensor, ties_up: bool = False) -> Tensor:
    """Return the codes of x, bit 3 the sign. Ties go to the even code, or to the larger magnitude."""
    borders, magnitude = _tables(x.device)[1], x.abs().contiguous()
    upper = torch.bucketize(magnitude, borders, right=True)
    if not ties_up:
        lower = torch.bucketize(magnitude, borders)
        upper = torch.where(lower % 2 == 0, lower, upper)
    return upper + 8 * (x < 0)


@dataclass(frozen=True, kw_only=True)
class MicroscaledFp4(Codec):
    """Codes e2m1(x / scale) of blocks, read as code * scale; beyond 6 scales they are clipped.

    kind: ``nv``, scale b * g with b = e4m3(absmax of the block / (6 g)), a byte, and g = absmax / (6 * 448) of all that
    the prompt has in a layer as keys or as values, frozen afterwards; ``ocp``, 2^(floor(log2 absmax) - 2), a byte;
    ``sglang``, 2^ceil(log2 max(absmax / 6, 1e-10)), a byte, which never clips, with ties up.
    four_over_six: of ``nv`` scales by absmax / 6 and absmax / 4, the one with the smaller squared error of its block.
    """

    kind: str = "nv"
    group: int = 16
    four_over_six: bool = False

    @property
    def settles(self) -> str:  # type: ignore[override]
        return "tensor" if self.kind == "nv" else ""

    def token_bytes(self, channels: int) -> int:
        blocks = -(-self.coded_channels(channels) // self.group)
        return bit_bytes(blocks * self.group, 4) + blocks

    def refusal(self, channels: int) -> str:
        return f"channels in whole blocks of {self.group}" if channels % self.group else ""

    def settle(self, absmax: Tensor) -> Tensor:
        g = absmax / (LARGEST * E4M3_MAX)
        return g.masked_fill(g == 0, 1.0)

    def encode(self, x: Tensor, frozen: Tensor | None) -> dict[str, Tensor]:
        x = in_blocks(x, self.group)
        absmax = x.abs().amax(dim=-1, keepdim=True)
        if self.kind == "nv":
            assert frozen is not None
            g = frozen[..., None]
            scale = self._block_scale(absmax / (LARGEST * g))
            if self.four_over_six:
                larger = self._block_scale(absmax / (4 * g))
                errors = [(_levels(_codes(x, s, g)) * s.float() * g - x).square() for s in (scale, larger)]
                better = errors[1].sum(dim=-1, keepdim=True) < errors[0].sum(dim=-1, keepdim=True)
                scale = torch.where(better, larger.float(), scale.float()).to(torch.float8_e4m3fn)
            codes, stored = _codes(x, scale, g), scale.view(torch.uint8)
        else:
            if self.kind == "ocp":
                exponent = torch.frexp(absmax).exponent - 1 - 2  # floor(log2 absmax) - 2
            else:
                mantissa, power = torch.frexp((absmax / LARGEST).clamp(min=1e-10))
                exponent = power - (mantissa == 0.5).to(power.dtype)  # ceil(log2)
            exponent = exponent.masked_fill(absmax == 0, -127).clamp(-127, 127)
            codes = e2m1((x / torch.exp2(exponent.double())).float(), ties_up=self.kind == "sglang")
            stored = (exponent + 127).to(torch.uint8)
        return {"codes": pack_bits(codes.flatten(-2), 4), "scale": stored[..., 0]}

    @staticmethod
    def _block_scale(x: Tensor) -> Tensor:
        return x.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)

    def decode(self, tensors: Mapping[str, Tensor], channels: int, frozen: Tensor | None) -> Tensor:
        stored = tensors["scale"]
        if self.kind == "nv":
            assert frozen is not None
            scale = stored.view(torch.float8_e4m3fn).float() * frozen
        else:
            scale = torch.exp2(stored.float() - 127)
        codes = unpack_bits(tensors["codes"], 4, stored.shape[-1] * self.group)
        return (_levels(codes).unflatten(-1, (-1, self.group)) * scale[..., None]).flatten(-2)[..., :channels]


def _codes(x: Tensor, block_scale: Tensor, g: Tensor) -> Tensor:
    step = block_scale.float() * g
    return e2m1(x / step.masked_fill(step == 0, torch.inf))


def _levels(codes: Tensor) -> Tensor:
    return _tables(codes.device)[0][codes.long()]
