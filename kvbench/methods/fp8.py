"""FP8 caches of vLLM and SGLang (https://docs.vllm.ai, quantized KV cache; OCP 8-bit floating point, revision 1.0)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from kvbench.kv.codecs.floating import SCALES, TYPES, Fp8Codec
from kvbench.kv.coded import Codec
from kvbench.methods.core.formats import StorageFormat
from kvbench.methods.core.knobs import knob, one_of


@dataclass(frozen=True, kw_only=True)
class Fp8(StorageFormat):
    """Store x as the 8-bit float c nearest to clip(x / s, -max, max), ties to even, read as c * s.

    type: ``e4m3`` (max 448, 3 bits of mantissa) or ``e5m2`` (max 57344, 2 bits).
    scale: ``one`` is s = 1, the engines' default without a calibration file. ``tensor`` and ``head`` take absmax / max
    of the prompt's keys or values, over a layer or a head. That scale is frozen afterwards, so that larger values to
    come saturate. ``token_head`` takes absmax / max of each token and head, at 4 bytes more.
    headroom: ``vllm`` takes absmax / 200 for keys and absmax / 100 for values, as vLLM's scales on the fly do. ``none``
    takes absmax / max.
    """

    id: ClassVar[str] = "fp8"

    type: str = knob("e4m3", one_of(*TYPES))
    scale: str = knob("one", one_of(*SCALES))
    headroom: str = knob("none", one_of("none", "vllm"))

    def check(self) -> None:
        super().check()
        self.require("headroom", self.headroom == "none" or self.scale != "one", "none where scale=one")

    def codecs(self) -> tuple[Codec, Codec]:
        codec = Fp8Codec(kind=self.type, scale=self.scale)
        if self.headroom == "vllm":
            # s = absmax / 200 for keys and absmax / 100 for values, instead of absmax / max
            return replace(codec, reach=200.0), replace(codec, reach=100.0)
        # c = cast(clip(x / s, -max, max)), read as c * s
        return codec, codec
