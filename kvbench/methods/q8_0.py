"""q8_0 of llama.cpp: blocks of 32 channels, 8 bits and an fp16 scale (https://github.com/ggml-org/llama.cpp)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from kvbench.kv.codecs.blocks import Blocks
from kvbench.kv.coded import Codec
from kvbench.methods.core.formats import ROTATE, StorageFormat
from kvbench.methods.core.knobs import EVEN, knob

# llama.cpp rotates 64 channels of values together; of keys, as many as a power of 2 allows
VALUE_BLOCK = 64


@dataclass(frozen=True, kw_only=True)
class Q8(StorageFormat):
    """Codes c = round(x / d) in blocks of channels, with d = absmax / 127 of a block, read as c * fp16(d).

    A head must hold whole blocks.

    rotate: ``hadamard`` is llama.cpp's rotation since its pull request 21038 (2026-04). ``method=q8_0_h`` sets it.
    group: the channels of a block.
    """

    id: ClassVar[str] = "q8_0"
    bits: ClassVar[int] = 8

    group: int = knob(32, EVEN)
    rotate: str = knob("none", ROTATE)

    def codecs(self) -> tuple[Codec, Codec]:
        # c = round(x / d) with d = absmax / 127 of a block, read as c * fp16(d); with 4 bits see ``Q4``
        codec = Blocks(bits=self.bits, group=self.group, rotate=self.rotate)
        return codec, replace(codec, block=VALUE_BLOCK)
