"""Every storage format keeps to the error that its formula allows: |x - decode(encode(x))| of any numbers."""

import pkgutil
from dataclasses import fields, replace
from functools import cache
from importlib import import_module
from inspect import isabstract

import pytest
import torch
from support import codec_reference as ref
from support.codec_bounds import BOUNDS, STAGE_BOUNDS, codec_bound, errors, mean_error, stage_bound
from support.passthrough import packing

from kvbench.base.errors import KvbenchError
from kvbench.kv import codecs
from kvbench.kv.codecs import NAMED
from kvbench.kv.codecs.integer import MinMaxInteger, SymmetricInteger
from kvbench.kv.codecs.lloyd_max import LloydMax
from kvbench.kv.coded import Codec, Coded
from kvbench.kv.packed import MinMax
from kvbench.methods.core import registry

HALVES = ("keys", "values")


def subclasses(cls):
    below = {c for direct in cls.__subclasses__() for c in subclasses(direct)}
    return below | ({cls} if not isabstract(cls) else set())


def registered_classes():
    """The classes of codecs in kvbench/kv/codecs."""
    for module in pkgutil.iter_modules(codecs.__path__):
        import_module(f"{codecs.__name__}.{module.name}")
    return {c for c in subclasses(Codec) if c.__module__.startswith(codecs.__name__)}


def stages():
    """Every method that packs, with its defaults and with each switch and each other number of bits by itself."""
    for cls in packing(registry.available()):
        stage = registry.make_stage(cls.id, registry.defaults(cls.id))
        yield stage
        for f in fields(stage):
            values = {"bits": (2, 3, 8), "codes": ("k8v4", "k3v4_nc", "3bit_nc"), "variant": ("mse", "prod", "sglang")}
            values |= {"type": ("e5m2",), "scale": ("tensor", "head", "token_head"), "symmetric": (True, False)}
            values |= {"round": ("trunc",), "rotate": ("none", "hadamard", "signed", "haar"), "values": tuple(NAMED)}
            values |= {"four_over_six": (True,), "group": (16, 32)}
            for value in values.get(f.name, ()):
                try:
                    yield replace(stage, **{f.name: value})
                except KvbenchError:  # a value of another method's knob of that name
                    continue


def codecs_of_stages():
    for stage in stages():
        if hasattr(stage, "codec"):
            yield from (stage.codec(half) for half in ("k", "v"))


WIDE = [cls(bits=bits) for cls in (MinMaxInteger, SymmetricInteger) for bits in (5, 6, 7)]
ALL = dict.fromkeys([*NAMED.values(), *ref.CASES, *codecs_of_stages(), *WIDE])
CODECS = [*ALL, *(cls() for cls in sorted(registered_classes() - {type(c) for c in ALL}, key=str))]
PACKERS = list(dict.fromkeys(s for s in stages() if not isinstance(s.pack_keys(torch.zeros(1, 32, 64)), Coded)))


@cache
def data(channels, dtype):
    """Numbers x [2, 32, C] of each kind, by its name."""
    g = torch.Generator().manual_seed(channels)
    normal = torch.randn(2, 32, channels, generator=g)
    outliers = normal.clone()
    outliers[..., 3 % channels] *= 50
    outliers[0, 5] *= 200
    outliers[1, 2, 1 % channels] = -300
    constant = (
        torch.tensor([0.0, 0.75, -0.75, 1.0, -3.1, 1e-3]).repeat(11)[:64].reshape(2, 32, 1).repeat(1, 1, channels)
    )
    kinds = {
        "normal": normal,
        "constant": constant,
        "all zero": torch.zeros(2, 32, channels),
        "outliers": outliers,
        "one sign": normal.abs() + 2.0,
        "one number a token": torch.nn.functional.one_hot(torch.arange(64) % channels, channels).reshape(2, 32, -1)
        * -2.5,
        "halves": (normal * 4).round() / 2,
        "large": normal * 500,
        "tiny": normal * 1e-6,
        "huge": normal * (1e30 if dtype != torch.float16 else 1.5e4),
    }
    return {kind: x.to(dtype) for kind, x in kinds.items()}


def hold(pack, bound_of, channels, dtype):
    """Raise AssertionError unless what is packed comes back within its bound. Only what is huge may be refused."""
    for kind, x in data(channels, dtype).items():
        try:
            packed = pack(x)
        except KvbenchError:
            assert kind == "huge"
            continue
        bound = bound_of(x)
        assert bound.isfinite().all()
        error = errors(x, packed, bound)
        worst = (error / bound.clamp(min=1e-300)).max().item()
        assert (error <= bound).all(), f"{kind}, {channels} channels, {dtype}: {worst:.3f} times the largest error"


def hold_codec(codec, pack, channels, dtype):
    """Raise AssertionError unless a codec keeps to its bound; TurboQuant's, of whole tokens, to its mean error, too."""
    hold(pack, lambda x: codec_bound(codec, x), channels, dtype)
    if isinstance(codec, LloydMax):
        x = torch.randn(1, 2048, 128, generator=torch.Generator().manual_seed(1)).to(dtype)
        lost = (pack(x).dequantise(torch.float32) - x).square().sum() / x.square().sum()
        times = lost.item() / mean_error(codec)
        assert times <= 1, f"normal, 128 channels, {dtype}: {times:.3f} times the largest error on the mean"


SHAPES = ((64, torch.float32), (128, torch.float16), (80, torch.bfloat16), (77, torch.float32))


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_codec_keeps_to_its_bound(codec):
    for channels, dtype in SHAPES:
        hold_codec(codec, codec.pack, channels, dtype)


@pytest.mark.parametrize("stage", PACKERS, ids=lambda s: f"{s.id} bits={s.bits} group={getattr(s, 'group', None)}")
@pytest.mark.parametrize("half", HALVES)
def test_a_method_that_packs_keeps_to_its_bound(stage, half):
    pack = stage.pack_keys if half == "keys" else stage.pack_values
    for channels, dtype in SHAPES:
        hold(pack, lambda x: stage_bound(stage, half, x), channels, dtype)


def test_every_codec_and_every_method_that_packs_is_held_to_a_bound():
    for codec in CODECS:
        codec_bound(codec, torch.zeros(1, 1, 64))
    for stage in PACKERS:
        stage_bound(stage, "keys", torch.zeros(1, 32, 64))
    assert registered_classes() <= {type(c) for c in CODECS} == set(BOUNDS)
    assert {s.id for s in PACKERS} == set(STAGE_BOUNDS)


def test_a_format_without_a_bound_says_what_to_add():
    class Unstated(SymmetricInteger):
        pass

    class Stage:
        id = "unstated"

    with pytest.raises(AssertionError, match=r"Unstated states no bound .*codec_bounds.py .* name it in BOUNDS"):
        codec_bound(Unstated(), torch.zeros(1, 1, 4))
    with pytest.raises(AssertionError, match=r"unstated packs without a codec .* name it in STAGE_BOUNDS"):
        stage_bound(Stage(), "keys", torch.zeros(1, 1, 4))


def flipped(packed):
    """The same with the lowest bit of every byte of codes turned over: one code of each is its neighbour."""
    codes = {id(t): t ^ 1 for t in packed.codes_only()}
    return packed.holding([codes.get(id(t), t) for t in packed.payload()], packed.frozen)


READ = {
    "twice as large": lambda x: x * 2,
    "half as large": lambda x: x / 2,
    "the sign lost": lambda x: x.abs(),
    "the other sign": lambda x: -x,
    "a channel off": lambda x: x.roll(1, -1),
    "a token off": lambda x: x.roll(1, -2),
    "all zero": lambda x: x * 0,
    "the last quarter lost": lambda x: x * (torch.arange(x.shape[-1]) < x.shape[-1] * 3 // 4),
}


def assert_all_break():
    for codec in (c for c in CODECS if type(c) in BOUNDS):
        with pytest.raises(AssertionError, match="times the largest error"):
            hold_codec(codec, codec.pack, 64, torch.float32)
    for stage in (s for s in PACKERS if s.id in STAGE_BOUNDS):
        with pytest.raises(AssertionError, match="times the largest error"):
            hold(stage.pack_values, lambda x, stage=stage: stage_bound(stage, "values", x), 64, torch.float32)


@pytest.mark.parametrize("broken", READ)
def test_what_is_read_wrongly_breaks_the_law(broken, monkeypatch):
    for cls in (Coded, MinMax):
        whole = cls.dequantise
        monkeypatch.setattr(cls, "dequantise", lambda self, dtype, whole=whole: READ[broken](whole(self, dtype)))
    assert_all_break()


def test_codes_that_are_one_off_break_the_law(monkeypatch):
    for cls in (Coded, MinMax):
        whole = cls.dequantise
        monkeypatch.setattr(cls, "dequantise", lambda self, dtype, whole=whole: whole(flipped(self), dtype))
    assert_all_break()
