"""Codecs: storage formats of single tokens. Each file has one family of formats, and NAMED maps names to codecs."""

from __future__ import annotations

from collections.abc import Mapping

from kvbench.kv.codecs.blocks import Blocks
from kvbench.kv.codecs.floating import Fp8Codec
from kvbench.kv.codecs.integer import CentredInt8, MinMaxInteger, SymmetricInteger, ZeroPointInt4
from kvbench.kv.codecs.lloyd_max import LloydMax
from kvbench.kv.codecs.microscaled import MicroscaledFp4
from kvbench.kv.coded import Codec

# the names come from the engines: vLLM (fp8, int8, int4, tq, nvfp4), SGLang (int8, fp4) and llama.cpp (q8_0, q4_0)
NAMED: Mapping[str, Codec] = {
    "fp8_e4m3": Fp8Codec(),
    "fp8_e5m2": Fp8Codec(kind="e5m2"),
    "fp8_e4m3_token": Fp8Codec(scale="token_head"),
    "int8": SymmetricInteger(),
    "int8_asymmetric": CentredInt8(),
    "int4": ZeroPointInt4(rotate="signed"),
    "int4_plain": ZeroPointInt4(),
    "int4_symmetric": SymmetricInteger(bits=4, half=True),
    "q8_0": Blocks(),
    # the suffix _h marks the Hadamard rotation that llama.cpp has added
    "q8_0_h": Blocks(rotate="hadamard"),
    "q4_0": Blocks(bits=4),
    "q4_0_h": Blocks(bits=4, rotate="hadamard"),
    "tq4": LloydMax(bits=4, normed=True, rotate="hadamard"),
    "tq3": LloydMax(bits=3, normed=True, rotate="hadamard"),
    "minmax4": MinMaxInteger(),
    "minmax3": MinMaxInteger(bits=3),
    "nvfp4": MicroscaledFp4(),
    "mxfp4": MicroscaledFp4(kind="ocp", group=32),
    "fp4_sglang": MicroscaledFp4(kind="sglang"),
}
"""The named formats, for keys or for values: ``NAMED["q4_0"].pack(x).dequantise(x.dtype)``."""
