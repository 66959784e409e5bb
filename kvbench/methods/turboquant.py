"""TurboQuant (arXiv 2504.19874) as vLLM ships it (https://github.com/vllm-project/vllm), and as the paper has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvbench.kv.codecs.floating import Fp8Codec
from kvbench.kv.codecs.integer import MinMaxInteger
from kvbench.kv.codecs.lloyd_max import LloydMax
from kvbench.kv.coded import Codec
from kvbench.methods.core.formats import ROTATE, StorageFormat
from kvbench.methods.core.knobs import knob, one_of

CODES = {"k8v4": (8, 4), "4bit_nc": (4, 4), "k3v4_nc": (3, 4), "3bit_nc": (3, 3)}
"""The values of ``codes``, each with (bits of keys, bits of values)."""


@dataclass(frozen=True, kw_only=True)
class TurboQuant(StorageFormat):
    """Keys k are stored as |k| and the codes of R k / |k|, each coordinate by the best quantiser for a Gaussian.

    R is an orthogonal matrix, and |k| the Euclidean norm. A code names the nearest of the 2^bits centroids that give a
    Gaussian coordinate the least squared error (Lloyd-Max). A key is read as |k| R^T y with the centroids y.

    codes: ``4bit_nc``, ``k3v4_nc`` and ``3bit_nc`` name the bits of keys and values. ``k8v4`` keeps keys as fp8 e4m3
    with scale one. ``nc`` is norm correction: the centroids y of a key are scaled to length 1.
    variant: in ``engine`` (vLLM) R is a plain Hadamard matrix, and values are coded by their minimum and maximum, not
    rotated. In ``mse`` (the paper) R is a random rotation, values are coded as keys are, and no norm is corrected.
    ``prod`` (the paper, for inner products) spends one bit of a key on signs of a Gaussian sketch of its error. This
    makes q.k unbiased. Values are those of ``mse``.
    rotate: another R than the variant's. Null keeps the variant's.

    vLLM also leaves the first two and the last two layers exact (``exact_layers=[0,1,28,29]`` of 30).
    """

    id: ClassVar[str] = "turboquant"

    codes: str = knob("4bit_nc", one_of(*CODES))
    variant: str = knob("engine", one_of("engine", "mse", "prod"))
    rotate: str | None = knob(None, ROTATE)

    def check(self) -> None:
        super().check()
        self.require("variant", self.variant == "engine" or self.codes != "k8v4", "engine where codes=k8v4")
        self.require("rotate", self.rotate is None or self.codes != "k8v4", "null where codes=k8v4, whose keys are fp8")

    def codecs(self) -> tuple[Codec, Codec]:
        key_bits, value_bits = CODES[self.codes]
        if self.codes == "k8v4":
            # keys: c = cast(k) to e4m3; values: c = round((v - min) / s), s = (max - min) / (2^bits - 1)
            return Fp8Codec(), MinMaxInteger(bits=value_bits)
        if self.variant == "engine":
            # keys: the nearest centroids of R k / |k|, normed to length 1, and |k|
            keys = LloydMax(bits=key_bits, normed=True, rotate=self.rotate or "hadamard")
            return keys, MinMaxInteger(bits=value_bits)
        # the paper's R is random, and ``prod`` spends one of the key's bits on the signs of a sketch of the key's error
        rotate = self.rotate or "haar"
        keys = LloydMax(bits=key_bits, inner=self.variant == "prod", rotate=rotate)
        return keys, LloydMax(bits=value_bits, rotate=rotate)
