"""The record of what is quantised: its slices and blocks are those of the whole, its bytes are the formula's."""

from dataclasses import replace

import pytest
import torch

from kvbench.kv.packed import (
    BITS,
    Packed,
    packed_bytes,
    quantise_channels,
    quantise_tokens,
    quantise_zero_point,
    run_bytes,
)
from kvbench.kv.segment import storage_bytes


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def records(n=64, d=20):
    x = random(2, n, d, seed=3)
    return [quantise_tokens(x, 4, 8), quantise_channels(x, 3, 8), quantise_zero_point(x, 2)]


def test_slices_of_tokens_equal_slices_of_the_whole():
    for q in records():
        dequantised = q.dequantise(torch.float32)
        for start, stop in ((0, 8), (8, 40), (56, None), (None, 16), (16, 16), (-8, None), (None, None), (16, 999)):
            part = q.tokens(start, stop).dequantise(torch.float32)
            assert torch.equal(part, dequantised[:, start:stop])
        assert q.tokens(8, 24).shape == (2, 16, 20)
        assert q.tokens(8, 24).codes.data_ptr() == (q.codes[:, 8:] if q.axis == "token" else q.codes[:, 1:]).data_ptr()
    with pytest.raises(ValueError, match=r"4\.\.16 are not whole groups of 8"):
        records()[1].tokens(4, 16)


def test_a_slice_reads_no_other_token():
    for q in records():
        first = 1 if q.axis == "channel" else 8
        scale = q.scale.clone()
        scale[:, first:] = torch.nan
        first_eight = [p.tokens(0, 8).dequantise(torch.float32) for p in (replace(q, scale=scale), q)]
        assert torch.equal(*first_eight)


def test_leading_axes_are_free():
    x = random(3, 2, 16, 12, seed=9)
    for make in (
        lambda t: quantise_tokens(t, 4, 5),
        lambda t: quantise_channels(t, 2, 8),
        lambda t: quantise_zero_point(t, 8),
    ):
        together = make(x)
        assert together.shape == x.shape
        assert torch.equal(
            together.dequantise(torch.float32), torch.stack([make(row).dequantise(torch.float32) for row in x])
        )


@pytest.mark.parametrize("elements", [1, 100, 8 * 20, 17 * 20, 64 * 20, 3 * 64 * 20, 10**6])
def test_blocks_cover_every_value_once(elements):
    for q in records():
        dequantised = q.dequantise(torch.float32)
        rows = q[torch.tensor([0, 1, 1, 0, 1])]
        for record, want in ((q, dequantised), (rows, dequantised[[0, 1, 1, 0, 1]])):
            got, times = torch.zeros_like(want), torch.zeros(want.shape[:2])
            for heads, tokens, part in record.blocks(elements):
                assert part.shape.numel() <= max(elements, (q.group if q.axis == "channel" else 1) * 20)
                got[heads, tokens] = part.dequantise(torch.float32)
                times[heads, tokens] += 1
            assert torch.equal(got, want)
            assert bool((times == 1).all())


def test_blocks_join_rows_and_heads():
    q = quantise_channels(random(3, 2, 16, 12, seed=9), 2, 8)
    parts = [part.dequantise(torch.float32) for _, _, part in q.blocks(2 * 16 * 12)]
    assert [p.shape for p in parts] == [(2, 16, 12)] * 3
    assert torch.equal(torch.cat(parts).view(3, 2, 16, 12), q.dequantise(torch.float32))
    assert list(quantise_tokens(torch.zeros(2, 0, 12), 4, 8).blocks()) == []


def test_entries_of_the_leading_axis():
    for q in records():
        dequantised = q.dequantise(torch.float32)
        assert torch.equal(q[torch.tensor([1, 0])].dequantise(torch.float32), dequantised[[1, 0]])
        assert torch.equal(q[1:].dequantise(torch.float32), dequantised[1:])


def test_no_tokens():
    x = torch.zeros(2, 0, 12)
    for q in (quantise_tokens(x, 4, 8), quantise_channels(x, 2, 8), quantise_zero_point(x, 4)):
        assert q.shape == q.dequantise(torch.float16).shape == (2, 0, 12)
        assert storage_bytes(q.payload()) == 0


@pytest.mark.parametrize("bits", BITS)
def test_bytes_held_equal_the_formula(bits):
    x = random(3, 32, 77)
    formulas = [
        (quantise_channels(x, bits, 32), 3 * 77 * (packed_bytes(32, bits) + 4)),
        (quantise_tokens(x, bits, 32), 3 * 32 * (packed_bytes(77, bits) + 4 * 3)),
        (quantise_zero_point(x, bits), 3 * 32 * (packed_bytes(77, bits) + 4)),
    ]
    for q, want in formulas:
        assert storage_bytes(q.payload()) == sum(t.nbytes for t in q.payload()) == want


def kivi_bytes(n, bits, group, recent, d, kept):
    """Storages of KIVI's keys (``kept`` channels where quantised) and values of one head, residuals fp16."""
    k, v = random(1, n, d, dtype=torch.float16), random(1, n, d, seed=1, dtype=torch.float16)
    flushed, old = n // recent * recent, max(n - recent, 0)
    keys = quantise_channels(k[:, :flushed, :kept], bits, group)
    values = quantise_tokens(v[:, :old], bits, group)
    stored: list[Packed | torch.Tensor] = [keys, k[:, flushed:].clone(), values, v[:, old:].clone()]
    sizes = [storage_bytes(t.payload() if isinstance(t, Packed) else [t]) for t in stored]
    return sizes[0] + sizes[1], sizes[2] + sizes[3]


@pytest.mark.parametrize(
    ("bits", "kept", "keys", "values"), [(2, 128, 69632, 74624), (4, 128, 98304, 102528), (2, 77, 52496, 74624)]
)
def test_kivi_bytes_of_a_thousand_tokens(bits, kept, keys, values):
    assert kivi_bytes(1000, bits, 32, 128, 128, kept) == (keys, values)


def test_flexgen_and_qhitter_bytes():
    # 77 channels in groups of 32 have three scales, the last of a shorter group
    assert run_bytes(77, 4, 32) == storage_bytes(quantise_tokens(random(1, 1, 77), 4, 32, 1.0).payload()) == 39 + 12
    assert run_bytes(64, 4, 64) == storage_bytes(quantise_tokens(random(1, 1, 64), 4, 64, 1.0).payload()) == 36
    # 4 bits at D = 128: a ratio of 3.76 to fp16
    held_bytes = storage_bytes(quantise_zero_point(random(1, 1, 128), 4).payload())
    assert held_bytes == run_bytes(128, 4, 128) == 68
    assert 256 / held_bytes == pytest.approx(3.76, abs=0.005)
