"""Decoding from any storage equals attention over plain lists of the numbers that were kept, at every step."""

import math

import pytest
import torch
from support import method_reference as ref
from support.storage_reference import Layer, Storage

from kvbench.engine.decode_layer import RowLayer
from kvbench.methods.core.resolve import chain_of
from kvbench.methods.twilight import Twilight
from kvbench.storage.format import Room, StoredRow

pytestmark = pytest.mark.e2e("every chain in every storage, step by step")

D, SCALE = 10, 1 / math.sqrt(10)
SHAPES = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}
PER = ("kv_head", "query_head")
LENGTHS = (3, 24, 61)

THINK = {"ratio": 0.4, "recent": 5, "observed": 8}
THINKV = {"thinkv.ratio": 0.3, "value_ratio": 0.5, "recent": 5, "observed": 8}
KIVI = {"kivi.group": 4, "residual": 8}
FLEXGEN = {"flexgen.group": 4}
SNAPKV = {"kv_size": 20, "window": 6}
THIN = {"prune": "think", "keys": 6, "recent": 5}
THIN_BOTH = {"prune": "thinkv", "keys": 7, "values": 5, "recent": 5}


def kivi(bits, **more):
    return Storage(quantiser="kivi", bits=bits, **more)


def flexgen(bits, **more):
    return Storage(quantiser="flexgen", bits=bits, **more)


CHAINS = {
    "think": (THINK, Storage(**THIN)),
    "thinkv": (THINKV, Storage(**THIN_BOTH)),
    "thinkv recent=0": ({**THINKV, "recent": 0}, Storage(**{**THIN_BOTH, "recent": 0})),
    "thinkv ratio=0": ({**THINKV, "thinkv.ratio": 0.0}, Storage(**{**THIN_BOTH, "keys": D})),
    "l1": ({"ratio": 0.4, "recent": 5}, Storage(prune="l1", keys=6, recent=5)),
    "l2": ({"ratio": 0.4, "recent": 5}, Storage(prune="l2", keys=6, recent=5)),
    **{f"kivi {b}": ({**KIVI, "bits": b}, kivi(b)) for b in (2, 3, 4, 8)},
    "kivi one": ({"kivi.group": 1, "residual": 1, "bits": 2}, kivi(2, group=1, residual=1)),
    "kivi wide": ({"kivi.group": 16, "residual": 16, "bits": 2}, kivi(2, group=16, residual=16)),
    **{f"flexgen {b}": ({**FLEXGEN, "bits": b}, flexgen(b)) for b in (2, 4, 8)},
    "flexgen wide": ({"flexgen.group": 64}, flexgen(4, group=64)),
    "think+kivi": ({**THINK, **KIVI, "bits": 2}, kivi(2, **THIN)),
    "think+kivi recent=20": ({**THINK, **KIVI, "recent": 20}, kivi(2, **{**THIN, "recent": 20})),
    "l1+kivi": ({"ratio": 0.4, "recent": 0, **KIVI}, kivi(2, prune="l1", keys=6)),
    "thinkv+kivi": ({**THINKV, **KIVI, "bits": 4}, kivi(4, **THIN_BOTH)),
    "think+flexgen": ({**THINK, **FLEXGEN}, flexgen(4, **THIN)),
    "thinkv+flexgen": ({**THINKV, **FLEXGEN, "recent": 0}, flexgen(4, **{**THIN_BOTH, "recent": 0})),
    "snapkv+think+kivi": ({**SNAPKV, **THINK, **KIVI}, kivi(2, **THIN)),
    "adakv+kivi": ({**SNAPKV, **KIVI}, kivi(2)),
    "adakv+thinkv": ({**SNAPKV, **THINKV}, Storage(**THIN_BOTH)),
    "adakv+thinkv+kivi": ({**SNAPKV, **THINKV, **KIVI}, kivi(2, **THIN_BOTH)),
    "refreekv+kivi": ({"T": 0.3, "mode": "eq1", "reduce": "per_head", **KIVI}, kivi(2)),
    "streamingllm+flexgen": ({"kv_size": 20, **FLEXGEN}, flexgen(4)),
    "cake+kivi": ({"kv_size": 20, "cake.window": 6, "decode_evict": False, **KIVI}, kivi(2)),
    "pyramidkv+think": ({**SNAPKV, **THINK}, Storage(**THIN)),
}


def steps_of(name):
    """Enough new tokens that the shortest prompt packs 16, in rings that wrap twice."""
    return 34 if "wide" in name or "recent=20" in name else 21


def made(name, per="kv_head"):
    """(chain, its storage as the reference has it)"""
    knobs, storage = CHAINS[name]
    return chain_of({"method": name.split()[0], "per": per, **knobs}), storage


def random(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Row:
    """One prompt under one chain: compressed, and as the reference stores it."""

    def __init__(self, name, per, shape, n, seed, dtype=torch.float32):
        self.chain, storage = made(name, per)
        hq, hk = SHAPES[shape]
        q, k, v = (random(h, n, D, seed=seed + i).to(dtype) for i, h in enumerate((hq, hk, hk)))
        dense, obs = ref.make_layer(q, k, v, per=per, scale=SCALE)
        self.cache = self.chain.compress(dense, obs)
        self.slow = Layer(storage, q.float(), k.float(), v.float(), ref.kept(self.cache), SCALE)

    def check_channels(self):
        for segment in self.cache.segments:
            for actual, wanted in (
                (segment.key_channels, [h.key_channels for h in self.slow.heads]),
                (segment.value_channels, [h.value_channels for h in self.slow.heads]),
            ):
                assert actual is None or actual.tolist() == wanted


def batch(rows, room, at_once=1, maskers=()):
    masking = maskers or [None] * len(rows)
    stored = [StoredRow(cache=r.cache, coder=r.chain.coder, masker=m) for r, m in zip(rows, masking, strict=True)]
    return RowLayer(stored, Room(tokens=room, at_once=at_once))


def feed(layer, rows, shape, steps, chunk=1, masses=None, estimate=torch.clone, seed=0):
    """Random new tokens through the batch and through every row's reference; every output is compared."""
    hq, hk = SHAPES[shape]
    for step in range(steps):
        q = random(len(rows), hq, chunk, D, seed=seed + 7 * step)
        k, v = (random(len(rows), hk, chunk, D, seed=seed + 7 * step + i) for i in (1, 2))
        layer.add(k, v)
        out = layer.attend(q, SCALE, None)
        by_row = masses or [None] * len(rows)
        wanted = [row.slow.step(q[i], k[i], v[i], by_row[i], estimate) for i, row in enumerate(rows)]
        torch.testing.assert_close(out, torch.stack(wanted), atol=1e-5, rtol=1e-5, msg=lambda m, s=step: f"{s}: {m}")


@pytest.mark.parametrize(
    ("name", "shape", "per"),
    [(n, "gqa", per) for n in CHAINS for per in PER] + [(n, "mha", "kv_head") for n in [*CHAINS][::2]],
)
def test_rows_of_unequal_lengths_read_what_the_reference_reads(name, per, shape):
    rows = [Row(name, per, shape, n, seed=10 * n) for n in LENGTHS]
    for row in rows:
        row.check_channels()
    feed(batch(rows, steps_of(name)), rows, shape, steps_of(name))
    packed = [h.old_k for row in rows for h in row.slow.heads]
    assert ("kivi" not in name and "flexgen" not in name) or min(packed) >= 16, "nothing was packed while decoding"


PACKED = [name for name in CHAINS if "kivi" in name or "flexgen" in name]


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("name", PACKED)
def test_rows_that_are_alike_read_what_the_reference_reads(name, chunk):
    """Their tokens need no sorting; over prompts shorter and longer than a residual, and steps that wrap its ring."""
    for n in (3, 61):
        rows = [Row(name, "kv_head", "gqa", n, seed=10 * i) for i in range(2)]
        steps = steps_of(name)
        layer = batch(rows, steps, at_once=chunk)
        halves = [half for _, stored in layer.formats for half in (stored.k, stored.v)]
        assert name.startswith(("adakv", "refreekv")) or all(half.alike for half in halves)
        feed(layer, rows, "gqa", steps // chunk, chunk)


@pytest.mark.parametrize(("shape", "per"), [("gqa", "kv_head"), ("gqa", "query_head"), ("mqa", "kv_head")])
def test_all_chains_in_one_batch_while_rows_leave(shape, per):
    # every chain twice, so that a group of rows loses one of its own
    rows = [Row(name, per, shape, 24 + 7 * i % 30, seed=100 * i) for i, name in enumerate([*CHAINS, *CHAINS])]
    layer = batch(rows, 18)
    for start in range(3):
        feed(layer, rows, shape, 6, seed=1000 * start)
        stay = [i for i in range(len(rows)) if (i + start) % 3]
        layer.keep(torch.tensor(stay))
        rows = [rows[i] for i in stay]


@pytest.mark.parametrize("chunk", [3, 19])
@pytest.mark.parametrize("per", PER)
def test_several_tokens_at_once_are_read_exactly_and_packed_after(per, chunk):
    rows = [Row(name, per, "gqa", n, seed=10 * n) for name in CHAINS for n in (3, 33)]
    feed(batch(rows, 2 * chunk + 20, at_once=chunk), rows, "gqa", 2 + 20 // chunk, chunk)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["thinkv", "kivi 2", "flexgen 4", "adakv+thinkv+kivi"])
def test_half_precision_reads_the_same_numbers(name, dtype):
    rows = [Row(name, "kv_head", "gqa", n, seed=10 * n, dtype=dtype) for n in (3, 40)]
    layer = batch(rows, 24)
    for step in range(24):
        q, k, v = (random(2, h, 1, D, seed=7 * step + i).to(dtype) for i, h in enumerate((4, 2, 2)))
        layer.add(k, v)
        out = layer.attend(q, SCALE, None)
        assert out.dtype == dtype
        wanted = torch.stack([r.slow.step(*(t[i].float() for t in (q, k, v))) for i, r in enumerate(rows)])
        torch.testing.assert_close(out.float(), wanted, atol=2e-2 if dtype == torch.bfloat16 else 3e-3, rtol=0)


class Exact(Twilight):
    def estimate(self, keys):
        return keys


def coarse(keys, bits=4):
    """Keys [m, D] as Twilight's documentation rounds each."""
    low = keys.amin(1, keepdim=True)
    step = (keys.amax(1, keepdim=True) - low) / (2**bits - 1)
    return low + ((keys - low) / step).round() * step


MASKED = ["kivi 4", "think+kivi", "adakv+thinkv+kivi", "flexgen 4", "think+flexgen", "refreekv+kivi", "thinkv"]


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize(("masker", "estimate"), [(Exact(p=0.8), torch.clone), (Twilight(p=0.7), coarse)])
def test_twilight_masks_packed_caches(masker, estimate, per):
    rows = [Row(name, per, "gqa", 24, seed=100 * i) for i, name in enumerate(MASKED)]
    masked = [i % 4 != 3 for i in range(len(rows))]
    layer = batch(rows, 24, maskers=[masker if m else None for m in masked])
    feed(layer, rows, "gqa", 24, masses=[masker.p if m else None for m in masked], estimate=estimate)
    assert layer.attended is not None
    assert [not math.isnan(x) for x in layer.attended.tolist()] == masked


def test_the_reference_loses_what_it_should():
    """Otherwise storage that keeps everything would pass: each chain's output differs from the full cache's."""
    for name in CHAINS:
        row = Row(name, "kv_head", "gqa", 61, seed=3)
        q, k, v = (random(h, 1, D, seed=i) for i, h in enumerate((4, 2, 2)))
        complete = (random(h, 61, D, seed=3 + i) for i, h in enumerate((4, 2, 2)))
        full = Layer(Storage(), *complete, [list(range(61))] * 2, SCALE).step(q, k, v)
        assert (row.slow.step(q, k, v) - full).abs().max() > (
            1e-4 if name in ("kivi 8", "kivi one", "flexgen 8") else 1e-3
        ), name
