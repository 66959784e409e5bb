"""Codecs of storage formats: worked examples, a slow reference, bytes, errors, rotations and degenerate rows."""

import math

import pytest
import torch
from support import codec_reference as ref

from kvbench.base.errors import KvbenchError
from kvbench.kv.codecs import NAMED
from kvbench.kv.codecs.blocks import Blocks
from kvbench.kv.codecs.floating import Fp8Codec
from kvbench.kv.codecs.integer import CentredInt8, MinMaxInteger, SymmetricInteger, ZeroPointInt4
from kvbench.kv.codecs.lloyd_max import POSITIVE, LloydMax
from kvbench.kv.codecs.microscaled import MicroscaledFp4
from kvbench.kv.packed import pack, unpack
from kvbench.kv.rotation import basis_width, make_basis

ODD, EVEN = (0.3, -1.2, 2.4, 0.9), (0.315, -1.205, 2.54, 0.935)
HALF_STEP = 2**-11  # of a number: the rounding of fp16
CPU = torch.device("cpu")


def coded(codec, row, width=None):
    """One token of one head, zeros behind ``row``, as (the packed token, its first numbers read back)."""
    x = torch.zeros(1, 1, width or len(row))
    x[0, 0, : len(row)] = torch.tensor(row)
    packed = codec.pack(x)
    return packed, packed.dequantise(torch.float32)[0, 0, : len(row)].tolist()


# formats.md 2.2 to 2.7
@pytest.mark.parametrize(
    ("codec", "row", "width", "back", "rel"),
    [
        (Fp8Codec(), ODD, None, (0.3125, -1.25, 2.5, 0.875), 0),
        (Fp8Codec(kind="e5m2"), ODD, None, (0.3125, -1.25, 2.5, 0.875), 0),
        (Fp8Codec(), (465, 0.00098, 0.0009), None, (448, 2**-9, 0), 0),
        (Fp8Codec(scale="token_head"), ODD, None, (0.3, -1.2, 2.4, 0.857143), 1e-6),
        (SymmetricInteger(), EVEN, None, (0.32, -1.20, 2.54, 0.94), 1e-6),
        (SymmetricInteger(truncate=True), EVEN, None, (0.30, -1.20, 2.54, 0.92), 1e-6),
        (ZeroPointInt4(), ODD, None, (0.24, -1.2, 2.4, 0.96), 2e-6),
        (SymmetricInteger(bits=4, half=True), ODD, None, (0.342857, -1.371429, 2.4, 1.028571), HALF_STEP),
        (Blocks(bits=4), ODD, 32, (0.300049, -1.200195, 2.400391, 0.900146), 1e-6),
        (Blocks(), (0.30, -1.21, 2.4, 0.9), 32, (0.302246, -1.208984, 2.399078, 0.906738), 1e-6),
        (LloydMax(bits=2, rotate="hadamard"), (3, 1, 1, 1), None, (2.484417, 0.915941, 0.915941, 0.915941), 2.2e-4),
        (
            LloydMax(bits=2, normed=True, rotate="hadamard"),
            (3, 1, 1, 1),
            None,
            (2.919617, 1.076388, 1.076388, 1.076388),
            2.2e-4,  # a norm in fp16 scales by 1.000214
        ),
    ],
)
def test_worked_examples(codec, row, width, back, rel):
    assert coded(codec, row, width)[1] == pytest.approx(back, rel=rel, abs=1e-9)


@pytest.mark.parametrize(
    ("codec", "row", "width", "codes"),
    [
        (Fp8Codec(scale="token_head"), ODD, None, (56, -224, 448, 160)),
        (SymmetricInteger(), EVEN, None, (16, -60, 127, 47)),
        (SymmetricInteger(truncate=True), EVEN, None, (15, -60, 127, 46)),
        (ZeroPointInt4(), ODD, None, (6, 0, 15, 9)),
        (SymmetricInteger(bits=4, half=True), ODD, None, (1, -4, 7, 3)),
        (Blocks(bits=4), ODD, 32, (7, 12, 0, 5, *[8] * 28)),
        (Blocks(), (0.30, -1.21, 2.4, 0.9), 32, (16, -64, 127, 48, *[0] * 28)),
        (LloydMax(bits=2, rotate="hadamard"), (3, 1, 1, 1), None, (3, 2, 2, 2)),
    ],
)
def test_codes_of_the_worked_examples(codec, row, width, codes):
    stored = coded(codec, row, width)[0].tensors["codes"][0, 0]
    if isinstance(codec, Fp8Codec):
        stored = stored.view(torch.float8_e4m3fn).float()
    elif isinstance(codec, Blocks) and codec.bits == 4:
        stored = unpack(stored, 4, 32)  # j and j + 16 in one byte
        assert coded(codec, row, width)[0].tensors["codes"][0, 0, 0] == 7 | 8 << 4
    elif isinstance(codec, LloydMax):
        stored = unpack(stored, codec.bits, len(codes), layout="stream")
    elif stored.dtype == torch.uint8:
        stored = unpack(stored, 4, len(codes), layout="stream")
        stored = stored.int() - 8 if isinstance(codec, SymmetricInteger) else stored
    assert tuple(stored.tolist()) == codes


def test_scales_of_the_worked_examples():
    packed, _ = coded(ZeroPointInt4(), ODD)
    bits = packed.tensors["scale"].view(torch.int32)
    assert (bits & 15).item() == 5 and packed.tensors["scale"].item() == pytest.approx(0.24, rel=2e-6)
    assert coded(Blocks(bits=4), ODD, 32)[0].tensors["scale"].item() == pytest.approx(-0.300049, abs=1e-6)
    assert coded(Blocks(), (0.30, -1.21, 2.4, 0.9), 32)[0].tensors["scale"].item() == pytest.approx(0.0188904, abs=1e-7)


def test_nvfp4_worked_example():
    x = torch.zeros(1, 1, 32)
    x[0, 0, :4], x[0, 0, 16:20] = torch.tensor([0.32, -1.2, 2.4, 0.9]), torch.tensor([0.32, -0.6, 0.14, 0.44])
    packed = MicroscaledFp4().pack(x)
    assert packed.frozen.item() == pytest.approx(8.92857e-4, rel=1e-6)
    assert packed.tensors["scale"].view(torch.float8_e4m3fn).float().flatten().tolist() == [448, 112]
    back = packed.dequantise(torch.float32)[0, 0]
    assert back[:4].tolist() == pytest.approx([0.4, -1.2, 2.4, 0.8], rel=1e-6)
    assert back[16:20].tolist() == pytest.approx([0.3, -0.6, 0.15, 0.4], rel=1e-6)


def test_the_inner_product_variant_is_unbiased():
    k, q = torch.tensor([3.0, 1, 1, 1]), torch.tensor([1.0, 2, -1, 0.5])
    y = k @ make_basis(4, "hadamard", 4, CPU) / k.norm()
    assert y.sign().tolist() == [1, 1, 1, 1]
    centroids = 0.797885 / 2 * y.sign() @ make_basis(4, "hadamard", 4, CPU).T
    r = k / k.norm() - centroids
    assert r.tolist() == pytest.approx([0.068140, 0.288675, 0.288675, 0.288675], abs=1e-6)
    assert (r.norm().item(), (q @ r).item()) == pytest.approx((0.504622, 0.501153), abs=1e-6)
    s = torch.randn(40_000, 4, 4, generator=torch.Generator().manual_seed(0))
    estimates = math.sqrt(math.pi / 2) / 4 * r.norm() * torch.einsum("i,nji,nj->n", q, s, (s @ r).sign())
    assert estimates.mean().item() == pytest.approx(0.501153, abs=0.012)
    assert estimates.var().item() == pytest.approx(0.56, abs=0.02)
    # the codec: over many keys errors of q * k have no trend, which the quantiser alone has
    keys = torch.randn(1, 20_000, 64, generator=torch.Generator().manual_seed(1))
    slopes = {}
    for inner in (False, True):
        read = LloydMax(bits=2, inner=inner, rotate="haar").pack(keys).dequantise(torch.float32)
        slopes[inner] = ((read * keys).sum() / keys.square().sum()).item()
    assert abs(slopes[True] - 1) < 5e-3 < abs(slopes[False] - 1)


@pytest.fixture(scope="module")
def normal():
    return torch.randn(1, 4096, 128, generator=torch.Generator().manual_seed(0))


# formats.md 2.8
ERRORS = {
    "fp8_e4m3": 7.06e-4,
    "fp8_e5m2": 2.79e-3,
    "fp8_e4m3_token": 6.61e-4,
    "int8": 4.19e-5,
    "q8_0": 2.86e-5,
    "nvfp4": 9.06e-3,
    "int4_symmetric": 1.38e-2,
    "int4_plain": 9.96e-3,
    "int4": 1.01e-2,
    "q4_0": 7.39e-3,
    "q4_0_h": 7.39e-3,
    "tq4": 9.18e-3,
    "tq3": 3.38e-2,
    "mxfp4": 1.32e-2,
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_of_normal_numbers(name, normal):
    back = NAMED[name].pack(normal).dequantise(torch.float32)
    error = ((back - normal).square().sum() / normal.square().sum()).item()
    assert error == pytest.approx(ERRORS[name], rel=0.03)


def test_truncation_and_fewer_bits_cost(normal):
    def error(codec):
        return (codec.pack(normal).dequantise(torch.float32) - normal).square().sum() / normal.square().sum()

    assert error(SymmetricInteger(truncate=True)).item() == pytest.approx(1.67e-4, rel=0.03)
    errors = [error(LloydMax(bits=bits, rotate="haar")).item() for bits in (1, 2, 3, 4)]
    # a head has 128 channels, so coordinates are a little less spread than a Gaussian's
    assert errors == pytest.approx([0.3634, 0.1175, 0.03455, 0.0095], rel=0.04)
    assert error(MicroscaledFp4(four_over_six=True)) < error(MicroscaledFp4())


def test_rotation_spreads_outliers(normal):
    x = normal.clone()
    x[..., 3] *= 20
    x[..., 70] *= 10
    others = [c for c in range(128) if c not in (3, 70)]
    for plain, rotated, least, most in (("int4_plain", "int4", 0.241, 0.029), ("q4_0", "q4_0_h", 0.120, 0.023)):
        for name, expected in ((plain, least), (rotated, most)):
            error = (NAMED[name].pack(x).dequantise(torch.float32) - x)[..., others].square().mean().item()
            assert error == pytest.approx(expected, rel=0.08), name


# formats.md 2.1
@pytest.mark.parametrize(
    ("codec", "formula"),
    [
        (Fp8Codec(), lambda d: d),
        (Fp8Codec(scale="head"), lambda d: d),
        (Fp8Codec(scale="token_head"), lambda d: d + 4),
        (SymmetricInteger(), lambda d: d + 4),
        (CentredInt8(), lambda d: d + 4),
        (ZeroPointInt4(), lambda d: d // 2 + 4),
        (SymmetricInteger(bits=4, half=True), lambda d: d // 2 + 2),
        (Blocks(), lambda d: 34 * d // 32),
        (Blocks(bits=4), lambda d: 18 * d // 32),
        (MicroscaledFp4(), lambda d: 9 * d // 16),
        (MicroscaledFp4(kind="sglang"), lambda d: 9 * d // 16),
        (MicroscaledFp4(kind="ocp", group=32), lambda d: 17 * d // 32),
        (LloydMax(normed=True), lambda d: d // 2 + 2),
        (LloydMax(bits=3, normed=True), lambda d: -(-3 * d // 8) + 2),
        (LloydMax(bits=4, inner=True), lambda d: -(-3 * d // 8) + -(-d // 8) + 4),
        (MinMaxInteger(), lambda d: d // 2 + 4),
        (MinMaxInteger(bits=3), lambda d: -(-3 * d // 8) + 4),
    ],
    ids=lambda value: None if callable(value) else str(value),
)
def test_bytes_are_those_of_the_formula(codec, formula):
    for d in (64, 80, 96, 128, 77, 10, 1):
        packed = codec.pack(torch.randn(2, 5, d, generator=torch.Generator().manual_seed(d)))
        held = sum(t.untyped_storage().nbytes() for t in packed.payload())
        assert held == 2 * 5 * codec.token_bytes(d) and packed.shape == (2, 5, d)
        if not codec.allowed_channels(d) and d % 2 == 0:
            assert codec.token_bytes(d) == formula(d)
    assert bool(codec.allowed_channels(80)) == (isinstance(codec, (Blocks, MicroscaledFp4)) and codec.group == 32)


@pytest.mark.parametrize("codec", ref.CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_equals_a_slow_reference(codec, dtype):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(2, 6, 64, generator=g)
    x[0, 0], x[0, 1], x[1, 2, 5], x[1, 3] = 0, 1.5, 40.0, x[1, 3].round()
    x = x.to(dtype)
    packed = codec.pack(x)
    expected = torch.tensor(ref.read_back(codec, x))
    torch.testing.assert_close(packed.dequantise(torch.float32), expected, rtol=2e-5, atol=2e-6)
    for some, whole in ((x, packed), (x[:, :0], packed.tokens(0, 0))):
        in_parts = codec.pack(some, packed.frozen, part_elements=4 * 2 * 64)  # four tokens, then two
        assert in_parts.shape == some.shape
        assert all(torch.equal(a, b) for a, b in zip(in_parts.payload(), whole.payload(), strict=True))


@pytest.mark.parametrize("name", NAMED)
def test_degenerate_rows_decode_to_the_constant_and_bad_numbers_are_refused(name):
    codec, x = NAMED[name], torch.zeros(1, 3, 64)
    assert codec.pack(x).dequantise(torch.float32).eq(0).all()
    x[0, 1] = 0.75
    back = codec.pack(x).dequantise(torch.float32)
    assert back.isfinite().all() and back[0, 0].eq(0).all()
    if name not in ("int4", "int4_plain", "tq3", "tq4"):  # a row of one sign is clipped; centroids know no constant
        assert back[0, 1].sub(0.75).abs().max() < 0.1
    for bad in (math.inf, math.nan):
        x[0, 2, 7] = bad
        with pytest.raises(KvbenchError, match="infinite or not a number"):
            codec.pack(x)
    x[0, 2, 7] = 1e30
    if name in ("q4_0", "q8_0", "minmax4", "int8_asymmetric", "int4_symmetric"):
        with pytest.raises(KvbenchError, match="exceeds float16"):
            codec.pack(x)


@pytest.mark.parametrize("name", NAMED)
def test_what_was_read_back_is_stored_alike(name, normal):
    codec = NAMED[name]
    once = codec.pack(normal[:, :64])
    twice = codec.pack(once.dequantise(torch.float32))
    gap = (twice.dequantise(torch.float32) - once.dequantise(torch.float32)).abs()
    if name.startswith(("fp8", "mxfp4", "fp4")):
        # scales and codes are their own images; of a token scale to its rounding
        assert gap.max() <= (2e-6 if name.endswith("token") else 0)
    else:
        error = (once.dequantise(torch.float32) - normal[:, :64]).abs().max()
        assert gap.max() <= 2.1 * error  # one step


def test_bits_are_packed_as_engines_do():
    assert pack(torch.tensor([1, 2, 3]), 4, layout="stream").tolist() == [0x21, 0x03]
    word = sum(c << (3 * i) for i, c in enumerate(range(8)))
    assert pack(torch.arange(8), 3, layout="stream").tolist() == list(word.to_bytes(3, "little"))


@pytest.mark.parametrize("kind", ["hadamard", "signed", "haar"])
@pytest.mark.parametrize("channels", [64, 80, 96, 128, 77, 16, 10])
def test_rotations_keep_lengths_and_products(kind, channels):
    r = make_basis(channels, kind, 2**30, CPU)
    assert r.shape == (channels, basis_width(channels, kind))
    torch.testing.assert_close(r @ r.T, torch.eye(channels), atol=1e-5, rtol=0)
    q, k = torch.randn(2, 5, channels, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close((q @ r) @ (k @ r).T, q @ k.T, atol=2e-5, rtol=1e-5)


def test_rotation_blocks():
    assert make_basis(128, "hadamard", 64, CPU)[:64, 64:].eq(0).all()
    assert make_basis(96, "hadamard", 2**30, CPU)[:32, 32:].eq(0).all()  # 32 is the largest power of 2 in 96
    assert make_basis(4, "hadamard", 4, CPU).mul(2).tolist() == [
        [1, 1, 1, 1],
        [1, -1, 1, -1],
        [1, 1, -1, -1],
        [1, -1, -1, 1],
    ]
    assert not torch.equal(make_basis(64, "signed", 64, CPU), make_basis(64, "hadamard", 64, CPU))


@pytest.mark.parametrize("bits", POSITIVE)
def test_centroids_are_the_means_of_their_cells(bits):
    """Lloyd's condition for N(0, 1): a centroid is the mean between its borders."""
    positive = torch.tensor(POSITIVE[bits], dtype=torch.float64)
    borders = torch.cat([torch.zeros(1, dtype=torch.float64), (positive[1:] + positive[:-1]) / 2])
    borders = torch.cat([borders, torch.tensor([math.inf], dtype=torch.float64)])
    density = torch.exp(-borders.square() / 2) / math.sqrt(2 * math.pi)
    mass = torch.special.ndtr(borders).diff()
    torch.testing.assert_close(-density.diff() / mass, positive, atol=2e-6, rtol=0)


def test_scales_settled_by_the_prompt_saturate_later_values():
    x = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(0))
    for codec in (Fp8Codec(scale="tensor"), Fp8Codec(scale="head"), MicroscaledFp4()):
        packed = codec.pack(x)
        assert packed.frozen.shape == (2, 1, 1)
        assert (packed.frozen[0] == packed.frozen[1]).item() == (codec.settles == "tensor")
        later = codec.pack(100 * x, packed.frozen)
        assert torch.equal(later.frozen, packed.frozen)
        # nothing is read back as larger than what the prompt had, but for fp4's blocks of their own scale
        assert later.dequantise(torch.float32).abs().max() <= 1.001 * x.abs().max()
    e4m3 = Fp8Codec(scale="tensor", reach=200.0).pack(x)
    assert e4m3.frozen.flatten().tolist() == pytest.approx([x.abs().max().item() / 200] * 2)
