"""INT4 caches with a scale per token and head: vLLM's int4_per_token_head (https://github.com/vllm-project/vllm)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvbench.kv.codecs.integer import SymmetricInteger, ZeroPointInt4
from kvbench.kv.coded import Codec
from kvbench.methods.core.formats import ROTATE, StorageFormat
from kvbench.methods.core.knobs import knob


@dataclass(frozen=True, kw_only=True)
class Int4(StorageFormat):
    """Codes c = clip(round(y / s + z), 0, 15), read as (c - z) * s, with s = max((max - min) / 15, 1e-6) in fp32.

    y is x, a token's key or value of a head, under random signs and a Hadamard matrix. max and min are those of y.
    z = clip(round(-min / s), 0, 15) is stored in the lowest 4 bits of the scale. Both roundings send ties away from
    zero. Attention rotates its query likewise, and turns its output back.

    symmetric: true takes c = clip(round(x / s), -8, 7), read as c * s, with s = absmax / 7 in fp16.
    """

    id: ClassVar[str] = "int4"

    symmetric: bool = False
    rotate: str = knob("signed", ROTATE)

    def codecs(self) -> tuple[Codec, Codec]:
        if self.symmetric:
            # c = clip(round(x / s), -8, 7), s = absmax / 7
            symmetric = SymmetricInteger(bits=4, half=True, rotate=self.rotate)
            return symmetric, symmetric
        # c = clip(round(y / s + z), 0, 15), s = (max - min) / 15, z = clip(round(-min / s), 0, 15)
        zero_point = ZeroPointInt4(rotate=self.rotate)
        return zero_point, zero_point
