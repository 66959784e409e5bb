"""Slow references of storage formats: loops over numbers in numpy's fp32, written from the formulas alone."""

import itertools
import math

import numpy as np
import torch

from kvbench.kv.codecs.blocks import Blocks
from kvbench.kv.codecs.floating import Fp8Codec
from kvbench.kv.codecs.integer import CentredInt8, MinMaxInteger, SymmetricInteger, ZeroPointInt4
from kvbench.kv.codecs.lloyd_max import LloydMax, draw_sketch
from kvbench.kv.codecs.microscaled import MicroscaledFp4
from kvbench.kv.rotation import make_basis

CASES = (
    Fp8Codec(),
    Fp8Codec(kind="e5m2"),
    Fp8Codec(scale="tensor"),
    Fp8Codec(scale="head"),
    Fp8Codec(scale="token_head"),
    SymmetricInteger(),
    SymmetricInteger(truncate=True),
    SymmetricInteger(bits=4, half=True),
    CentredInt8(),
    ZeroPointInt4(),
    ZeroPointInt4(rotate="signed"),
    MinMaxInteger(),
    MinMaxInteger(bits=3),
    Blocks(),
    Blocks(bits=4),
    LloydMax(bits=4, normed=True),
    LloydMax(bits=3, normed=True),
    LloydMax(bits=2),
    LloydMax(bits=4, inner=True),
    MicroscaledFp4(),
    MicroscaledFp4(four_over_six=True),
    MicroscaledFp4(kind="ocp", group=32),
    MicroscaledFp4(kind="sglang"),
)
f32 = np.float32
CENTROIDS = {
    2: [0.452780, 1.510418],
    3: [0.245094, 0.756005, 1.343909, 2.151946],
    4: [0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590],
}
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def floats(bits, bias, largest):
    """All numbers >= 0 of a float type with ``bits`` of mantissa, ascending: even places are even codes."""
    subnormal = [m * 2.0 ** (1 - bias - bits) for m in range(2**bits)]
    normal = [(1 + m / 2**bits) * 2.0 ** (e - bias) for e in range(1, 2**5) for m in range(2**bits)]
    return [x for x in subnormal + normal if x <= largest]


E4M3, E5M2 = floats(3, 7, 448.0), floats(2, 15, 57344.0)


def nearest(x, levels, up=False):
    """The level nearest to x, with its sign; ties to the even place, or up."""
    magnitude = min(abs(float(x)), levels[-1])
    i = min(range(len(levels)), key=lambda j: (abs(levels[j] - magnitude), -j if up else j % 2))
    return math.copysign(levels[i], float(x))


def half(x):
    return f32(np.float16(x))


def even(x):
    return f32(np.rint(x))


def away(x):
    return f32(math.copysign(math.floor(abs(float(x)) + 0.5), float(x)))


def clip(x, low, high):
    return min(max(x, f32(low)), f32(high))


def read_back(codec, x):
    """What every number of x [H, L, D] is read as, as nested lists."""
    tensor_max = max(abs(float(v)) for v in x.float().flatten())
    return [[token(codec, row, head, tensor_max) for row in head] for head in x]


def token(codec, row, head, tensor_max):
    dtype, channels = row.dtype, len(row)
    if isinstance(codec, ZeroPointInt4) and codec.rotate != "none":
        matrix = make_basis(channels, codec.rotate, codec.block, torch.device("cpu"))
        turned = ((row.float() @ matrix) * channels**0.5).to(dtype)
        return (torch.tensor(zero_point(numbers(turned))) / channels**0.5 @ matrix.T).tolist()
    values = numbers(row)
    if isinstance(codec, Fp8Codec):
        return fp8(codec, values, max(map(abs, numbers(head.flatten()))), f32(tensor_max))
    if isinstance(codec, SymmetricInteger):
        return symmetric(codec, values)
    if isinstance(codec, CentredInt8):
        return centred(values)
    if isinstance(codec, ZeroPointInt4):
        return zero_point(values)
    if isinstance(codec, MinMaxInteger):
        return min_max(codec.bits, values)
    if isinstance(codec, LloydMax):
        return lloyd_max(codec, values)
    split = [values[i : i + codec.group] for i in range(0, channels, codec.group)]
    block = q8_0 if isinstance(codec, Blocks) and codec.bits == 8 else q4_0
    if isinstance(codec, MicroscaledFp4):
        g = f32(tensor_max) / f32(6 * 448) or f32(1)
        return [v for part in split for v in fp4(codec, part, g)]
    return [v for part in split for v in block(part)]


def numbers(row):
    return [f32(v) for v in row.float().tolist()]


def fp8(codec, values, head_max, tensor_max):
    levels = E4M3 if codec.kind == "e4m3" else E5M2
    absmax = {"one": None, "tensor": tensor_max, "head": head_max, "token_head": max(map(abs, values))}[codec.scale]
    s = f32(1) if absmax is None else f32(absmax) / f32(levels[-1]) or f32(1)
    return [f32(nearest(v / s, levels)) * s for v in values]


def symmetric(codec, values):
    top = 2 ** (codec.bits - 1)
    s = max(map(abs, values)) / f32(top - 1)
    s = half(s) if codec.half else max(s, f32(1e-6))
    rounding = np.trunc if codec.truncate else even
    return [clip(rounding(v / s), -top, top - 1) * s if s else f32(0) for v in values]


def centred(values):
    z, s = half((min(values) + max(values)) / f32(2)), half((max(values) - min(values)) / f32(255))
    return [(clip(even((v - z) / s), -128, 127) if s else f32(0)) * s + z for v in values]


def zero_point(values):
    s = max((max(values) - min(values)) / f32(15), f32(1e-6))
    z = clip(away(-min(values) / s), 0, 15)
    stored = (np.array(s, dtype=f32).view(np.int32) & ~15).view(f32)
    return [(clip(away(v / s + z), 0, 15) - z) * f32(stored) for v in values]


def min_max(bits, values):
    low, top = min(values), 2**bits - 1
    s = max((max(values) - low) / f32(top), f32(1e-8))
    return [clip(np.trunc((v - low) / s + f32(0.5)), 0, top) * half(s) + half(low) for v in values]


def q8_0(values):
    d = max(map(abs, values)) / f32(127)
    return [even(v * (f32(1) / d)) * half(d) if d else f32(0) for v in values]


def q4_0(values):
    m = max(values, key=abs)
    d = m / f32(-8)
    inverse = f32(1) / d if d else f32(0)
    return [(min(f32(15), np.trunc(v * inverse + f32(8.5))) - 8) * half(d) for v in values]


def lloyd_max(codec, values):
    bits, d = codec.bits - codec.inner, len(values)
    table = [-c for c in CENTROIDS[bits][::-1]] + CENTROIDS[bits]
    norm = f32(math.sqrt(sum(float(v) ** 2 for v in values)))
    y = [float(v) / (float(norm) + 1e-8) for v in values]
    borders = [(a + b) / 2 for a, b in itertools.pairwise(table)]
    centroids = [table[sum(v >= b / math.sqrt(d) for b in borders)] / math.sqrt(d) for v in y]
    read = list(centroids)
    if codec.normed:
        length = math.sqrt(sum(c * c for c in centroids) + 1e-16)
        read = [c / length for c in centroids]
    if codec.inner:
        r = [a - b for a, b in zip(y, centroids, strict=True)]
        s = draw_sketch(d, torch.device("cpu")).double().tolist()
        signs = [1.0 if sum(a * b for a, b in zip(row, r, strict=True)) >= 0 else -1.0 for row in s]
        length = float(half(math.sqrt(sum(a * a for a in r))))
        back = [sum(signs[i] * s[i][j] for i in range(d)) for j in range(d)]
        read = [c + math.sqrt(math.pi / 2) / d * length * b for c, b in zip(read, back, strict=True)]
    return [f32(float(half(norm)) * c) for c in read]


def fp4(codec, values, g):
    absmax = max(map(abs, values))
    if codec.kind == "nv":

        def at(most):
            b = f32(nearest(absmax / (f32(most) * g), E4M3))
            return [f32(nearest(v / (b * g), FP4)) * (b * g) if b else f32(0) for v in values]

        def error(read):
            return sum((float(a) - float(b)) ** 2 for a, b in zip(read, values, strict=True))

        return min((at(m) for m in ((6, 4) if codec.four_over_six else (6,))), key=error)
    if not absmax:
        return [f32(0)] * len(values)
    if codec.kind == "ocp":
        scale = 2.0 ** (math.floor(math.log2(absmax)) - 2)
        return [f32(nearest(v / scale, FP4) * scale) for v in values]
    scale = 2.0 ** math.ceil(math.log2(max(absmax / f32(6), 1e-10)))
    return [f32(nearest(v / scale, FP4, up=True) * scale) for v in values]
