"""INT8 caches with a scale for each token and head: vLLM's int8_per_token_head (https://github.com/vllm-project/vllm)
and SGLang's asymmetric one (https://github.com/sgl-project/sglang)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvbench.kv.codecs.integer import CentredInt8, SymmetricInteger
from kvbench.kv.coded import Codec
from kvbench.methods.core.formats import ROTATE, StorageFormat
from kvbench.methods.core.knobs import knob, one_of


@dataclass(frozen=True, kw_only=True)
class Int8(StorageFormat):
    """Codes c = clip(round(x / s), -128, 127) with s = max(absmax / 127, 1e-6) in fp32, read as c * s (vLLM).

    absmax is the largest magnitude of a token's key or value of a head.

    symmetric: false takes SGLang's c = round((x - z) / s), read as c * s + z. z = (min + max) / 2 and
    s = (max - min) / 255 are both in fp16.
    round: ``trunc`` cuts toward zero, as vLLM's kernel was read to do, at four times the squared error.
    """

    id: ClassVar[str] = "int8"

    symmetric: bool = True
    round: str = knob("nearest", one_of("nearest", "trunc"))
    rotate: str = knob("none", ROTATE)

    def check(self) -> None:
        super().check()
        self.require("round", self.symmetric or self.round == "nearest", "nearest where symmetric=false")

    def codecs(self) -> tuple[Codec, Codec]:
        if not self.symmetric:
            # c = round((x - z) / s), z = (min + max) / 2, s = (max - min) / 255
            centred = CentredInt8(rotate=self.rotate)
            return centred, centred
        # c = clip(round(x / s), -128, 127), s = absmax / 127
        symmetric = SymmetricInteger(truncate=self.round == "trunc", rotate=self.rotate)
        return symmetric, symmetric
