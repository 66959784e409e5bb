"""MXFP4: FP4 numbers in blocks of 32 with a power of 2 each.

OCP Microscaling Formats 1.0,
https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvbench.kv.codecs.microscaled import MicroscaledFp4
from kvbench.kv.coded import Codec
from kvbench.methods.core.formats import ROTATE, StorageFormat
from kvbench.methods.core.knobs import EVEN, knob, one_of


@dataclass(frozen=True, kw_only=True)
class MxFp4(StorageFormat):
    """Codes c = e2m1(x / 2^e) in blocks of channels, read as c * 2^e. A block has one exponent e.

    e2m1 rounds to the nearest of 0, 0.5, 1, 1.5, 2, 3, 4 and 6, with a sign.

    variant: ``ocp`` has e = floor(log2 absmax) - 2 in blocks of 32. Numbers above 6 * 2^e clip. ``sglang`` is the fp4
    of https://github.com/sgl-project/sglang, with e = ceil(log2 max(absmax / 6, 1e-10)) in blocks of 16. Nothing clips.
    group: the channels of a block. Null takes the variant's number. Heads hold whole blocks.
    """

    id: ClassVar[str] = "mxfp4"

    variant: str = knob("ocp", one_of("ocp", "sglang"))
    group: int | None = knob(None, EVEN)
    rotate: str = knob("none", ROTATE)

    def codecs(self) -> tuple[Codec, Codec]:
        # e = floor(log2 absmax) - 2 of a block of 32 (OCP), or ceil(log2(absmax / 6)) of a block of 16 (SGLang)
        block = 32 if self.variant == "ocp" else 16
        # c = e2m1(x / 2^e), read as c * 2^e
        codec = MicroscaledFp4(kind=self.variant, group=self.group or block, rotate=self.rotate)
        return codec, codec
