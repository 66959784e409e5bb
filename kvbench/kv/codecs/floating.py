"""FP8: every number a float of 8 bits, under one scale, or one for a tensor, a head, or each token of a head.

Scale one is the default of vLLM and SGLang without a calibration file (https://docs.vllm.ai, quantized KV cache).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.kv.coded import Codec

TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
SCALES = ("one", "tensor", "head", "token_head")


@dataclass(frozen=True, kw_only=True)
class Fp8Codec(Codec):
    """Codes c = cast(clip(x / s, -max, max)) to nearest even, read as c * s; ``max`` is 448 (e4m3) or 57344 (e5m2).

    kind: ``e4m3`` or ``e5m2``.
    scale: s is 1, or absmax over ``reach``: of the prompt's tensor or head, frozen afterwards, or of each token.
    reach: the number that absmax becomes; 0: the type's largest. vLLM's on-the-fly scales leave headroom: 200 and 100.
    """

    kind: str = "e4m3"
    scale: str = "one"
    reach: float = 0.0

    @property
    def settles(self) -> str:  # type: ignore[override]
        return self.scale if self.scale in ("tensor", "head") else ""

    def token_bytes(self, channels: int) -> int:
        return self.coded_channels(channels) + 4 * (self.scale == "token_head")

    @property
    def largest(self) -> float:
        return torch.finfo(TYPES[self.kind]).max

    def settle(self, absmax: Tensor) -> Tensor:
        scale = absmax / (self.reach or self.largest)
        return scale.masked_fill(scale == 0, 1.0)  # all zeros: any scale gives zeros

    def encode(self, x: Tensor, frozen: Tensor | None) -> dict[str, Tensor]:
        scale = self.settle(x.abs().amax(dim=-1, keepdim=True)) if self.scale == "token_head" else frozen
        scaled = x if scale is None else x / scale
        codes = scaled.clamp(-self.largest, self.largest).to(TYPES[self.kind]).view(torch.uint8)
        return {"codes": codes} if scale is None or scale is frozen else {"codes": codes, "scale": scale}

    def decode(self, tensors: Mapping[str, Tensor], channels: int, frozen: Tensor | None) -> Tensor:
        scale = tensors.get("scale", frozen)
        x = tensors["codes"].view(TYPES[self.kind]).float()
        return x if scale is None else x * scale
