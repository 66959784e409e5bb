"""Packing loses no code and no byte; quantisers keep their bounds, against references written as loops."""

import math

import pytest
import torch
from support.grids import grid

from kvbench.base.errors import KvbenchError
from kvbench.kv.packed import (
    BITS,
    pack,
    packed_bytes,
    quantise_channels,
    quantise_tokens,
    quantise_zero_point,
    unpack,
)
from kvbench.kv.segment import storage_bytes

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def random(*shape, seed=0, dtype=torch.float32, scale=1.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def half(value):
    """A number as fp16 stores it."""
    return torch.tensor(value, dtype=torch.float64).half().double().item()


# the planes of a run, as (lowest bit, bits)
PLANES = {
    1: [(0, 1)],
    2: [(0, 2)],
    3: [(0, 2), (2, 1)],
    4: [(0, 4)],
    5: [(0, 4), (4, 1)],
    6: [(0, 4), (4, 2)],
    7: [(0, 4), (4, 2), (6, 1)],
    8: [(0, 8)],
}


def slow_pack(codes, bits, layout="runs"):
    """The documented layouts, code by code."""
    if layout == "stream":
        number = sum(code << (bits * i) for i, code in enumerate(codes))
        return list(number.to_bytes(math.ceil(len(codes) * bits / 8), "little"))
    out = []
    for below, part in PLANES[bits]:
        width = math.ceil(len(codes) * part / 8)
        stored = [0] * width
        for i, code in enumerate(codes):
            stored[i % width] += (code >> below) % 2**part << (i // width * part)
        out += stored
    return out


def slow_group(values, bits, constant_scale=0.0):
    """One group's codes, scale and minimum, each as stored."""
    low = half(min(values))
    reach = max(max(values) - low, 0.0) if max(values) > min(values) else 0.0
    scale = half(reach / (2**bits - 1))
    if scale == 0:
        return [0] * len(values), constant_scale, low
    return [min(max(round((v - low) / scale), 0), 2**bits - 1) for v in values], scale, low


@grid("layout", ["runs", "stream"])
@grid("bits", range(1, 9))
@grid("dim", [-1, -2, -3])
def test_codes_of_every_width_come_back_for_every_length(layout, bits, dim):
    generator = torch.Generator().manual_seed(bits)
    for m in [*range(1, 40), 77, 128, 129]:
        shape = [2, 3, 5]
        shape[dim] = m
        codes = torch.randint(0, 2**bits, shape, dtype=torch.uint8, generator=generator)
        packed = pack(codes, bits, dim, layout)
        size = packed_bytes(m, bits, layout)
        assert packed.shape[dim] == size
        assert storage_bytes([packed]) == packed.nbytes == size * codes.numel() // m
        assert torch.equal(unpack(packed, bits, m, dim, layout), codes)


@grid("layout", ["runs", "stream"])
@grid("bits", range(1, 9))
@grid("m", [1, 7, 8, 13, 64, 77, 300])
def test_bytes_of_every_width_are_the_documented_ones(layout, bits, m):
    codes = torch.randint(0, 2**bits, (2, m), dtype=torch.uint8, generator=torch.Generator().manual_seed(m))
    codes[1] = 2**bits - 1  # all bits are set, among them the sign of a word
    packed = pack(codes, bits, layout=layout)
    assert packed.tolist() == [slow_pack(row, bits, layout) for row in codes.tolist()]
    assert torch.equal(unpack(packed, bits, m, layout=layout), codes)
    for kind in (torch.int64, torch.float32):
        assert torch.equal(pack(codes.to(kind), bits, layout=layout), packed)


@grid("layout", ["runs", "stream"])
@grid("bits", [0, 9])
def test_codes_of_other_widths_are_refused(layout, bits):
    for attempt in (
        lambda: pack(torch.zeros(8), bits, layout=layout),
        lambda: unpack(torch.zeros(9).byte(), bits, 8, layout=layout),
        lambda: packed_bytes(8, bits, layout),
    ):
        with pytest.raises(ValueError, match=f"codes of {bits} bits: must be 1 to 8"):
            attempt()


def test_packing_by_hand():
    codes = torch.tensor([1, 2, 3, 0, 2], dtype=torch.uint8)
    assert pack(codes, 4).tolist() == [0x01, 0x22, 0x03]
    assert pack(codes, 2).tolist() == [1 | 3 << 2 | 2 << 4, 2 | 0 << 2]
    assert pack(codes + 3, 3).tolist() == [(4 & 3) | (6 & 3) << 2 | (5 & 3) << 4, (5 & 3) | 3 << 2, 0b10111]


def test_packing_uncontiguous_codes_and_owning_the_result():
    codes = torch.randint(0, 16, (6, 10), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(unpack(pack(codes.t(), 4), 4, 6), codes.t())
    packed = pack(codes[:1, :5], 8)
    assert storage_bytes([packed]) == 5


def test_packed_bytes_waste_less_than_two_bytes():
    assert [packed_bytes(128, b) for b in BITS] == [16, 32, 48, 64, 128]
    assert [packed_bytes(77, b) for b in BITS] == [10, 20, 30, 39, 77]
    for m in range(1, 300):
        for bits in BITS:
            assert 0 <= packed_bytes(m, bits) - m * bits / 8 < (2 if bits == 3 else 1)
        for bits in range(1, 9):
            assert packed_bytes(m, bits, "stream") == math.ceil(m * bits / 8)


@grid("bits", BITS)
@grid("dtype", DTYPES)
@grid(("size", "group"), [(16, 4), (13, 4), (5, 8), (80, 64)])
def test_tokens_equal_the_slow_reference(bits, dtype, size, group):
    x = random(2, 3, size, seed=size, dtype=dtype, scale=3)
    q = quantise_tokens(x, bits, group, constant_scale=1.0)
    codes, value = unpack(q.codes, bits, size), q.dequantise(torch.float32)
    assert q.shape == x.shape
    for h in range(2):
        for t in range(3):
            for g in range(math.ceil(size / group)):
                at = slice(g * group, min((g + 1) * group, size))
                want, scale, low = slow_group(x[h, t, at].tolist(), bits, 1.0)
                assert codes[h, t, at].tolist() == want
                assert (q.scale[h, t, g].item(), q.low[h, t, g].item()) == (scale, low)
                assert value[h, t, at].tolist() == pytest.approx([scale * c + low for c in want], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_channels_are_tokens_of_the_transpose(bits, dtype):
    x = random(2, 24, 7, seed=bits, dtype=dtype, scale=3)
    q, turned = quantise_channels(x, bits, 8), quantise_tokens(x.transpose(1, 2), bits, 8)
    assert q.shape == x.shape
    assert torch.equal(q.scale, turned.scale.transpose(1, 2))
    assert torch.equal(q.low, turned.low.transpose(1, 2))
    assert torch.equal(q.dequantise(torch.float32), turned.dequantise(torch.float32).transpose(1, 2))
    assert [pack(c, bits).tolist() for c in unpack(q.codes, bits, 8, -2)[0, 0].t()] == q.codes[0, 0].t().tolist()


@grid("bits", BITS)
@grid("dtype", DTYPES)
@grid("size", [1e-6, 1e-3, 1.0, 100.0])
@grid("offset", [0.0, -7.3, 1000.7])
def test_error_bound(bits, dtype, size, offset):
    x = (random(4, 64, 48, seed=bits, scale=size) + offset).to(dtype)
    for q, dim in ((quantise_tokens(x, bits, 16), -1), (quantise_channels(x, bits, 16), -2)):
        wide = x.double().unflatten(dim, (-1, 16))
        low = wide.amin(dim=dim)
        slack = 2.0 ** (bits - 25) + 2.0**-22 * x.abs().max().item()
        rounded = torch.zeros_like(low) if dtype == torch.float16 else 2.0**-11 * low.abs()
        bound = torch.maximum(q.scale.double() / 2, rounded) + slack
        error = (q.dequantise(torch.float32).double() - x.double()).abs().unflatten(dim, (-1, 16)).amax(dim=dim)
        assert bool((error <= bound).all())
        # and no scale is larger than the range asks for
        reach = wide.amax(dim=dim) - low
        assert bool((q.scale.double() * (2**bits - 1) <= (reach + rounded) * (1 + 2.0**-10) + slack).all())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equispaced_levels_are_exact(bits, dtype):
    # 256 levels fill the 8 significant bits of bf16: no room for an offset
    levels = 0.125 * torch.arange(2.0**bits) - (0.0 if bits == 8 else 1.5)
    order = torch.randperm(2**bits, generator=torch.Generator().manual_seed(1))
    x = torch.stack([levels, levels[order], levels.flip(0)])[None].to(dtype)
    assert torch.equal(quantise_tokens(x, bits, 2**bits).dequantise(dtype), x)
    turned = x.transpose(1, 2)
    assert torch.equal(quantise_channels(turned, bits, 2**bits).dequantise(dtype), turned)


def test_groups_of_one_value():
    x = torch.tensor([[[0.5, 0.5, -3.0, -3.0, 0.0, 0.0, 0.25, 0.75]]])
    for scale in (0.0, 1.0):
        q = quantise_tokens(x, 4, 2, constant_scale=scale)
        assert q.scale[0, 0, :3].tolist() == [scale] * 3
        assert unpack(q.codes, 4, 8)[0, 0].tolist() == [0] * 6 + [0, 15]
        assert torch.equal(q.dequantise(torch.float32)[..., :7], x[..., :7])
    # not an fp16 number: the nearest one, and still code 0 although the rounding exceeds half of scale 1
    q = quantise_tokens(torch.full((1, 1, 4), 60013.0), 4, 4, constant_scale=1.0)
    assert q.codes.count_nonzero() == 0
    assert q.dequantise(torch.float32).unique().tolist() == [60000.0]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_zero_point_equals_the_slow_reference(bits):
    x = random(2, 5, 12, seed=bits) + torch.tensor([0.0, 0.5, 2.0, -2.0, -0.5])[:, None]
    q = quantise_zero_point(x, bits)
    codes, value, top = unpack(q.codes, bits, 12), q.dequantise(torch.float32), 2**bits - 1
    for h in range(2):
        for t in range(5):
            values = x[h, t].tolist()
            scale = half(max((max(values) - min(values)) / top, 1e-5))
            zero = min(max(round(-min(values) / scale), 0), top)
            want = [min(max(round(v / scale) + zero, 0), top) for v in values]
            assert codes[h, t].tolist() == want
            assert (q.scale[h, t, 0].item(), q.low[h, t, 0].item()) == (scale, zero)
            assert value[h, t].tolist() == pytest.approx([scale * (c - zero) for c in want], rel=1e-6)


def test_zero_point_by_hand():
    clamped = quantise_zero_point(torch.tensor([[1.0, 1.5, 2.0]]), 4)
    # a range without 0: the zero point clamps and all values meet; 15 times the fp16 of 1 / 15
    assert (
        clamped.dequantise(torch.float32).tolist() == [[15 * half(1 / 15)] * 3] == [[pytest.approx(1, abs=2**-11)] * 3]
    )
    nothing = quantise_zero_point(torch.zeros(2, 3, 8), 4)
    assert nothing.scale.unique().tolist() == [half(1e-5)]
    assert nothing.dequantise(torch.float32).count_nonzero() == 0
    for c in (0.7, -3.0):
        x = torch.full((1, 1, 64), c)
        error = (quantise_zero_point(x, 4).dequantise(torch.float32) - x).norm().item()
        assert error == pytest.approx(abs(c) * 8, rel=1e-3)
    across = torch.tensor([[-1.0, 0.0, 0.5, 2.75]])
    assert torch.equal(quantise_zero_point(across, 4).dequantise(torch.float32), across)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_minimum_makes_both_kinds_one_formula(bits):
    x = random(2, 6, 16, seed=5)
    for q in (quantise_zero_point(x, bits), quantise_tokens(x, bits, 16)):
        value = q.scale.float() * unpack(q.codes, bits, 16) + q.minimum()
        assert torch.equal(value, q.dequantise(torch.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantising_rounds_once(dtype):
    for q in (quantise_tokens(random(2, 8, 10), 4, 4), quantise_channels(random(2, 8, 10), 2, 4)):
        assert torch.equal(q.dequantise(dtype), q.dequantise(torch.float32).to(dtype))


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_are_refused(bad, dtype):
    x = random(2, 8, 12, dtype=dtype)
    x[1, 3, 5] = bad
    for make in (
        lambda: quantise_tokens(x, 4, 6),
        lambda: quantise_channels(x, 2, 4),
        lambda: quantise_zero_point(x, 4),
    ):
        with pytest.raises(KvbenchError, match="infinite or not a number"):
            make()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_fp16_cannot_store_is_refused(dtype):
    distant = torch.tensor([[[-1e5, 0.0, 1.0, 2.0]]], dtype=dtype)
    with pytest.raises(KvbenchError, match="exceeds fp16"):
        quantise_tokens(distant, 4, 4)
    with pytest.raises(KvbenchError, match="exceeds fp16"):
        quantise_channels(distant.transpose(1, 2), 4, 4)
    with pytest.raises(KvbenchError, match="exceeds fp16"):
        quantise_zero_point(distant * 100, 2)
    # a large maximum alone is fine: only minimum and scale are stored
    high = torch.tensor([[[0.0, 1e5]]], dtype=dtype)
    value = quantise_tokens(high, 4, 2).dequantise(torch.float32)
    assert value[0, 0, 1].item() == pytest.approx(high[0, 0, 1].item(), rel=2**-11)


def test_channels_need_whole_groups():
    with pytest.raises(ValueError, match="33 tokens are not whole groups of 32"):
        quantise_channels(torch.zeros(1, 33, 4), 2, 32)
