"""KIVI alone and behind ThinK: what is packed when, what it costs, and how near the numbers stay."""

import pytest
import torch
from support import method_reference as ref

from kvbench.base.errors import UsageError
from kvbench.engine.decode_layer import RowLayer
from kvbench.kv.segment import storage_bytes
from kvbench.methods.core.resolve import chain_of
from kvbench.methods.kivi import Kivi
from kvbench.storage.format import Room, StoredRow

PER = ("kv_head", "query_head")


def layer(n, d, dtype=torch.float32, heads=(4, 2), per="kv_head", seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(h, n, d, generator=g).to(dtype) for h in (heads[0], heads[1], heads[1]))
    return ref.make_layer(q, k, v, per=per)


def packed(cache):
    """Tokens packed as keys and as values."""
    (s,) = cache.segments
    return s.codes.k.shape[1], s.codes.v.shape[1]


def bytes_of(segment):
    """Bytes of one layer's keys and of its values: codes, scales, minima and exact tokens."""
    return tuple(
        storage_bytes([*codes.payload(), exact])
        for codes, exact in ((segment.codes.k, segment.k), (segment.codes.v, segment.v))
    )


# spec 5, KIVI: values on 2^b equispaced levels exact
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_values_on_equispaced_levels_are_exact(bits, dtype):
    n, group = 2 * 2**bits, 2**bits
    levels = (torch.arange(group) * 0.25 - 1.5)[torch.randperm(group, generator=torch.Generator().manual_seed(0))]
    keys = levels.repeat(2)[None, :, None].expand(2, n, 3).contiguous().to(dtype)
    values = torch.stack([levels, levels.flip(0)]).flatten().expand(2, n, 2 * group).contiguous().to(dtype)
    stage = Kivi(bits=bits, group=group, residual=group)
    assert torch.equal(stage.pack_keys(keys).dequantise(dtype), keys)
    assert torch.equal(stage.pack_values(values).dequantise(dtype), values)


# spec 5, KIVI: error <= scale/2
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("per", PER)
def test_no_number_is_off_by_more_than_half_a_step(bits, per):
    dense, obs = layer(70, 20, torch.float16, per=per)
    (s,) = (
        chain_of({"method": "kivi", "bits": bits, "group": 8, "residual": 16, "per": per}).compress(dense, obs).segments
    )
    k, v = (t.repeat_interleave(dense.heads // 2, dim=0).float() for t in (dense.segments[0].k, dense.segments[0].v))
    error = (s.codes.k.dequantise(torch.float32) - k[:, :64]).abs()
    assert bool((error <= s.codes.k.scale.float().repeat_interleave(8, dim=1) / 2 * (1 + 1e-5)).all())
    error = (s.codes.v.dequantise(torch.float32) - v[:, :54]).abs()
    # 20 channels are groups of 8, 8 and 4
    assert bool((error <= s.codes.v.scale.float().repeat_interleave(8, dim=2)[..., :20] / 2 * (1 + 1e-5)).all())
    assert torch.equal(s.k.float(), k[:, 64:]) and torch.equal(s.v.float(), v[:, 54:])


# spec 5, KIVI: n=1000, b=2, G=32, R=128, D=128: K 69 632 B, V 74 624 B per head (4-bit 98 304 / 102 528)
# spec 5, ThinK+KIVI: same, T=77: K 52 496 B
@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("entry", "keys", "values"),
    [
        ({"method": "kivi", "bits": 2}, 69_632, 74_624),
        ({"method": "kivi", "bits": 4}, 98_304, 102_528),
        ({"method": "think+kivi", "bits": 2, "ratio": 0.4}, 52_496, 74_624),
    ],
)
def test_bytes_of_a_thousand_tokens_in_a_real_cache(entry, keys, values, dtype, per):
    dense, obs = layer(1000, 128, dtype, per=per)
    chain = chain_of({**entry, "kivi.group": 32, "residual": 128, "per": per})
    cache = chain.compress(dense, obs)
    assert bytes_of(cache.segments[0]) == (dense.heads * keys, dense.heads * values)
    (block,) = chain.layout(1000, 128, 2)
    assert (block.key_bytes, block.value_bytes) == (keys, values)
    assert packed(cache) == (896, 872)


@pytest.mark.parametrize(
    ("n", "keys", "values"), [(1, 0, 0), (15, 0, 0), (16, 16, 0), (17, 16, 1), (31, 16, 15), (32, 32, 16), (77, 64, 61)]
)
def test_tokens_packed_of_a_prompt(n, keys, values):
    cache = chain_of({"method": "kivi", "group": 8, "residual": 16}).compress(*layer(n, 12))
    assert packed(cache) == (keys, values)
    assert cache.segments[0].k.shape[1] == n - keys and cache.segments[0].v.shape[1] == n - values
    assert ref.kept(cache) == [list(range(n))] * 2


@pytest.mark.parametrize("n", [3, 16, 29])
def test_keys_are_packed_by_blocks_and_values_one_by_one_while_decoding(n):
    chain = chain_of({"method": "kivi", "group": 8, "residual": 16})
    cache = chain.compress(*layer(n, 12))
    rows = RowLayer([StoredRow(cache=cache, coder=chain.coder)], Room(tokens=60))
    ((_, packed),) = rows.formats
    for total in range(n + 1, n + 61):
        new = torch.randn(1, 2, 1, 12)
        rows.add(new, new)
        assert packed.k.total == packed.v.total == [total]
        # the step reads what leaves the residual with it
        assert packed.k.packed == [(total - 1) // 16 * 16]
        assert packed.v.packed == [max(0, total - 1 - 16)]
        rows.attend(torch.randn(1, 4, 1, 12), 0.3, None)
        packed.settle()
        assert packed.k.packed == [total // 16 * 16]
        assert packed.v.packed == [max(0, total - 16)]


@pytest.mark.parametrize(
    ("recent", "keys", "values"), [(0, 64, 61), (13, 64, 61), (16, 56, 61), (30, 40, 47), (77, 0, 0)]
)
def test_the_residual_behind_a_pruner_is_the_larger_one(recent, keys, values):
    chain = chain_of({"method": "think+kivi", "kivi.group": 8, "residual": 16, "recent": recent})
    cache = chain.compress(*layer(77, 12))
    assert packed(cache) == (keys, values)
    assert cache.segments[0].k.shape[2] == 12, "the residual keeps all channels"
    assert cache.segments[0].codes.k.shape[2] == 8


@pytest.mark.parametrize("per", PER)
def test_channels_are_scored_on_the_keys_that_are_packed(per):
    q, k = ref.grid(4, 40, 8, seed=1), ref.grid(2, 40, 8, seed=2)
    entry = {"method": "think+kivi", "kivi.group": 4, "residual": 16, "recent": 4, "ratio": 0.375, "per": per}
    dense, obs = ref.make_layer(q, k, per=per)
    actual = chain_of(entry).compress(dense, obs).segments[0].key_channels.tolist()
    assert actual == ref.think(q, k, [list(range(32))] * dense.heads, 5, 32)
    loud = k.clone()
    loud[:, 32:, actual[0][0]] = 0.0
    loud[:, 32:, next(c for c in range(8) if c not in actual[0])] = 50.0
    dense, obs = ref.make_layer(q, loud, per=per)
    assert chain_of(entry).compress(dense, obs).segments[0].key_channels.tolist() == actual


def test_a_prompt_within_the_residual_settles_the_channels_of_what_decoding_packs():
    q, k = ref.grid(4, 10, 8, seed=1), ref.grid(2, 10, 8, seed=2)
    chain = chain_of({"method": "think+kivi", "kivi.group": 4, "residual": 16, "recent": 4, "ratio": 0.375})
    cache = chain.compress(*ref.make_layer(q, k))
    assert packed(cache) == (0, 0)
    assert cache.segments[0].key_channels.tolist() == ref.think(q, k, [list(range(10))] * 2, 5, 32)


@pytest.mark.parametrize("group", [5, 7, 13])
@pytest.mark.parametrize("d", [10, 12, 77])
def test_groups_need_not_divide_the_channels(group, d):
    chain = chain_of({"method": "kivi", "bits": 3, "group": group, "residual": group})
    cache = chain.compress(*layer(3 * group + 2, d))
    s = cache.segments[0]
    assert s.codes.v.scale.shape == (2, 2 * group + 2, -(-d // group))
    (block,) = chain.layout(3 * group + 2, d, 4)
    assert bytes_of(s) == (2 * block.key_bytes, 2 * block.value_bytes)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"bits": 1}, "bits=1 is not possible: 2, 3, 4 or 8"),
        ({"bits": 16}, "bits=16"),
        ({"group": 0}, "group=0"),
        ({"residual": 0}, "residual=0"),
        ({"residual": 100}, "residual=100 is not possible: a multiple of group=32"),
    ],
)
def test_impossible_knobs_are_refused(knobs, message):
    with pytest.raises(UsageError, match=rf"method\.kivi\.{message}"):
        chain_of({"method": "kivi", **knobs})
