"""FP8: every number is a float of 8 bits times a scale.

The scale is 1, or one for each tensor, head, or token of a head. vLLM and SGLang use 1 by default, without a
calibration file (https://docs.vllm.ai, quantized KV cache).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kvbench.kv.coded import Codec
from kvbench.kv.packed import Levels

TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
"""The values of ``kind``, each with PyTorch's type."""
SCALES = ("one", "tensor", "head", "token_head")
"""The values of ``scale``."""


@dataclass(frozen=True, kw_only=True)
class Fp8Codec(Codec):
    """Store codes c = cast(clip(x / s, -max, max)), read as c * s. The cast rounds to nearest, ties to even.

    ``max`` is 448 (e4m3) or 57344 (e5m2).

    kind: ``e4m3`` or ``e5m2``.
    scale: ``one`` is s = 1. The others are s = absmax / ``reach``. ``tensor`` and ``head`` take absmax over the prompt
    and freeze s. ``token_head`` takes absmax for each token of a head.
    reach: the number to which absmax is scaled; 0 stands for the type's largest. vLLM's scales that are computed while
    it runs leave headroom, with 200 for keys and 100 for values.
    """

    kind: str = "e4m3"
    scale: str = "one"
    reach: float = 0.0

    @property
    def settles(self) -> str:  # type: ignore[override]
        if self.scale in ("tensor", "head"):
            return self.scale
        return ""

    def token_bytes(self, channels: int) -> int:
        if self.scale == "token_head":
            # each token also has a scale of 4 bytes, in fp32
            return self.coded_channels(channels) + 4
        return self.coded_channels(channels)

    @property
    def largest(self) -> float:
        """The largest finite number of the type."""
        return torch.finfo(TYPES[self.kind]).max

    def settle(self, absmax: Tensor) -> Tensor:
        scale = absmax / (self.reach or self.largest)
        # values that are all 0 come back as 0 under any scale but 0
        return scale.masked_fill(scale == 0, 1.0)

    def encode(self, x: Tensor, frozen: Tensor | None) -> dict[str, Tensor]:
        """Return ``codes`` [..., L, C'] as bytes and, under ``token_head``, each token's ``scale`` [..., L, 1] fp32."""
        tensors: dict[str, Tensor] = {}
        if self.scale == "token_head":
            # each token's scale follows from its absmax as a settled scale does from the prompt's
            absmax = x.abs().amax(dim=-1, keepdim=True)
            scale = self.settle(absmax)
            x = x / scale
            tensors["scale"] = scale
        elif frozen is not None:
            x = x / frozen
        # c = cast(clip(x / s, -max, max)): without the clip, numbers beyond the range would become NaN or infinity
        codes = x.clamp(-self.largest, self.largest).to(TYPES[self.kind])
        # codes are viewed as bytes, as few PyTorch operations support the 8-bit float types
        return {"codes": codes.view(torch.uint8)} | tensors

    def decode(self, tensors: Mapping[str, Tensor], channels: int, frozen: Tensor | None) -> Tensor:
        """Return the numbers c * s [..., L, C'] fp32."""
        # each token's own scale, or the one that the prompt settled; None stands for 1
        scale = tensors.get("scale", frozen)
        x = tensors["codes"].view(TYPES[self.kind]).float()
        if scale is None:
            return x
        return x * scale

    def levels(self, tensors: Mapping[str, Tensor], channels: int, frozen: Tensor | None) -> Levels:
        codes = tensors["codes"]
        scale = tensors.get("scale", frozen)
        if scale is None:
            scale = torch.ones((), device=codes.device)
        return Levels(
            codes=codes,
            # one scale for each token: [..., L, 1]
            scale=scale.expand(*codes.shape[:-1], 1),
            bits=8,
            run=channels,
            group=channels,
            channels=channels,
            table=_tabulate_bytes(self.kind, codes.device),
        )


@cache
def _tabulate_bytes(kind: str, device: torch.device) -> Tensor:
    """Return the table [256] fp32 of the numbers that the 256 bytes stand for in the FP8 type ``kind``."""
    return torch.arange(256, dtype=torch.uint8, device=device).view(TYPES[kind]).float()
