"""q4_0 of llama.cpp: blocks of 32 channels, 4 bits and an fp16 scale (https://github.com/ggml-org/llama.cpp)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvbench.methods.q8_0 import Q8


@dataclass(frozen=True, kw_only=True)
class Q4(Q8):
    """Codes c = min(15, trunc(x / d + 8.5)) in blocks of channels, read as (c - 8) * fp16(d).

    d = m / -8, where m is the signed value of the largest magnitude in a block. m itself is exact up to fp16, and -m
    clips to 7/8 of its magnitude. A head must hold whole blocks.

    rotate: ``hadamard`` is llama.cpp's rotation since its pull request 21038 (2026-04). ``method=q4_0_h`` sets it.
    group: the channels of a block.
    """

    id: ClassVar[str] = "q4_0"
    # ``Blocks`` takes the formula above for 4 bits
    bits: ClassVar[int] = 4
