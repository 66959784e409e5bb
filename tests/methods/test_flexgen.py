"""FlexGen: 4-bit groups of every token, packed after the step that made it."""

import pytest
import torch
from support import method_reference as ref

from kvbench.base.errors import UsageError
from kvbench.engine.decode_layer import RowLayer
from kvbench.kv.packed import unpack
from kvbench.kv.segment import storage_bytes
from kvbench.methods.core.resolve import chain_of
from kvbench.methods.flexgen import FlexGen
from kvbench.storage.format import Room, StoredRow

PER = ("kv_head", "query_head")


def layer(n, d, dtype=torch.float32, per="kv_head"):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(h, n, d, generator=g).to(dtype) for h in (4, 2, 2))
    return ref.make_layer(q, k, v, per=per)


# spec 5, FlexGen: 36 B per 64 values
@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("d", [64, 128])
def test_64_values_take_36_bytes(d, dtype, per):
    dense, obs = layer(50, d, dtype, per)
    chain = chain_of({"method": "flexgen", "per": per})
    (s,) = chain.compress(dense, obs).segments
    assert storage_bytes(s.payload()) == 2 * dense.heads * 50 * (d // 64) * 36
    (block,) = chain.layout(50, d, dtype.itemsize)
    assert block.key_bytes == block.value_bytes == 50 * (d // 64) * 36


@pytest.mark.parametrize(
    ("d", "group", "bits", "token"),
    [(16, 64, 4, 8 + 4), (20, 64, 4, 10 + 4), (128, 32, 4, 64 + 16), (80, 64, 4, 40 + 8), (13, 5, 2, 4 + 12)],
)
def test_bytes_of_a_token_where_groups_and_heads_do_not_match(d, group, bits, token):
    chain = chain_of({"method": "flexgen", "group": group, "bits": bits})
    (s,) = chain.compress(*layer(9, d)).segments
    assert storage_bytes(s.payload()) == 2 * 2 * 9 * token
    assert sum(b.key_bytes + b.value_bytes for b in chain.layout(9, d, 4)) == 2 * 9 * token


def test_a_constant_group_stores_scale_one_and_codes_zero():
    x = torch.tensor([[[0.75] * 64 + [-2.0, 1.0] * 32]])
    q = FlexGen().pack_keys(x)
    assert q.scale.tolist()[0][0][0] == 1.0 and q.low.tolist()[0][0] == [0.75, -2.0]
    assert unpack(q.codes, 4, 128)[0, 0].tolist() == [0] * 64 + [0, 15] * 32
    assert torch.equal(q.dequantise(torch.float32)[..., :64], x[..., :64])


@pytest.mark.parametrize("n", [1, 7])
def test_every_token_is_packed_after_the_step_that_made_it(n):
    chain = chain_of("flexgen")
    cache = chain.compress(*layer(n, 12))
    assert cache.segments[0].k.shape[1] == cache.segments[0].v.shape[1] == 0
    rows = RowLayer([StoredRow(cache=cache, coder=chain.coder)], Room(tokens=5))
    ((_, packed),) = rows.formats
    for total in range(n + 1, n + 6):
        new = torch.randn(1, 2, 1, 12)
        rows.add(new, new)
        assert packed.k.packed == packed.v.packed == [total - 1]
        rows.attend(torch.randn(1, 4, 1, 12), 0.3, None)
        packed.settle()
        assert packed.k.packed == packed.v.packed == [total]


@pytest.mark.parametrize("per", PER)
def test_recent_tokens_of_a_pruner_stay_exact(per):
    dense, obs = layer(30, 20, per=per)
    chain = chain_of({"method": "think+flexgen", "ratio": 0.4, "recent": 6, "per": per})
    (s,) = chain.compress(dense, obs).segments
    k = dense.segments[0].k.repeat_interleave(dense.heads // 2, dim=0)
    assert torch.equal(s.k, k[:, -6:]) and s.codes.k.shape == (dense.heads, 24, 12)
    thin = k[:, :24].gather(2, s.key_channels.long()[:, None].expand(-1, 24, -1))
    error = (s.codes.k.dequantise(torch.float32) - thin).abs()
    assert bool((error <= s.codes.k.scale.float() / 2 * (1 + 1e-2)).all()) and error.max() > 0


@pytest.mark.parametrize(("knob", "value"), [("bits", 1), ("bits", 5), ("group", 0), ("group", 2.5)])
def test_impossible_knobs_are_refused(knob, value):
    with pytest.raises(UsageError, match=rf"method\.flexgen\.{knob}={value}"):
        chain_of({"method": "flexgen", knob: value})
