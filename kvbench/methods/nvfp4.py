"""NVFP4: FP4 numbers in blocks of 16 with an FP8 scale each.

https://developer.nvidia.com/blog/introducing-nvfp4-for-efficient-and-accurate-low-precision-inference/
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvbench.kv.codecs.microscaled import MicroscaledFp4
from kvbench.kv.coded import Codec
from kvbench.methods.core.formats import ROTATE, StorageFormat
from kvbench.methods.core.knobs import EVEN, knob


@dataclass(frozen=True, kw_only=True)
class NvFp4(StorageFormat):
    """Codes c = e2m1(x / (b * g)) in blocks of channels, read as c * b * g. Heads hold whole blocks.

    e2m1 rounds to the nearest of 0, 0.5, 1, 1.5, 2, 3, 4 and 6, with a sign. Each block has a scale
    b = e4m3(absmax of the block / (6 g)). g = absmax / (6 * 448) is taken over the prompt's keys, or values, of a layer
    in fp32, and is frozen afterwards.

    group: the channels of a block.
    four_over_six: true gives each block the better of two scales, which map its absmax to 6 and to 4. The better one
    has the smaller squared error.
    """

    id: ClassVar[str] = "nvfp4"

    group: int = knob(16, EVEN)
    four_over_six: bool = False
    rotate: str = knob("none", ROTATE)

    def codecs(self) -> tuple[Codec, Codec]:
        # c = e2m1(x / (b g)) with b = e4m3(absmax of the block / (6 g)) and g = absmax of the prompt / (6 * 448),
        # read as c * b * g
        codec = MicroscaledFp4(group=self.group, four_over_six=self.four_over_six, rotate=self.rotate)
        return codec, codec
