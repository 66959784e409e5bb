"""Bytes and tokens by formula, by hand, where no cache that is held would tell."""

import pytest
from support import method_reference as ref

from kvbench.audit.accounting import (
    bytes_after_decoding,
    bytes_declared,
    layer_counts,
    nominal_payload,
    overhead_bytes,
)
from kvbench.kv.model_shape import CacheShape, Shape
from kvbench.methods.core.contract import Block
from kvbench.methods.core.resolve import chain_of

SHAPE = Shape(2, 4, 2, 64)  # layers, query heads, kv heads, channels
DENSE = 64 * 2  # bytes of a key or of a value at 16 bits
HEADS = CacheShape(kv_heads=2, head_dim=8, itemsize=4)


def test_a_nominal_payload_leaves_channels_out_of_older_tokens_alone():
    knobs = {"method": "snapkv+think", "kv_size": 100, "ratio": 0.5, "recent": 32}
    assert nominal_payload(chain_of(knobs), SHAPE, 300, 2) == 4 * (2 * 100 * DENSE - 0.5 * 68 * DENSE)
    values_too = chain_of({**knobs, "method": "snapkv+thinkv", "value_ratio": 0.25})
    assert nominal_payload(values_too, SHAPE, 300, 2) == 4 * (2 * 100 * DENSE - 0.75 * 68 * DENSE)
    # fewer tokens than stay whole
    assert nominal_payload(chain_of({**knobs, "kv_size": 40, "recent": 64}), SHAPE, 300, 2) == 4 * 2 * 40 * DENSE


def test_a_nominal_payload_of_packed_tokens_has_the_share_of_their_channels():
    knobs = {"method": "snapkv+think+kivi", "kv_size": 100, "ratio": 0.25, "recent": 32}
    chain = chain_of({**knobs, "kivi.bits": 4, "kivi.group": 4, "kivi.residual": 32})
    # packed: 68 keys by channel, 68 values by token, each in groups of 4 with two fp16 numbers
    keys = 68 // 4 * 64 * (2 + 4)
    values = 68 * (32 + 4 * 16)
    assert nominal_payload(chain, SHAPE, 300, 2) == 4 * (0.75 * keys + values + 2 * 32 * DENSE)


def test_what_frozen_layers_hold_is_not_shared_out_again():
    chain = chain_of({"method": "kvzip", "kv_ratio": 0.5, "frozen_layers": [0], "level": "pair"})
    assert sorted(sizes for _, sizes, *_ in layer_counts(chain, SHAPE, 100)) == [(50, 50), (100, 100)]
    assert bytes_declared(chain, SHAPE, 100, 2).tokens == 75


def test_every_head_has_the_fixed_overhead_of_the_head_with_most_blocks():
    one, two = Block(10, 0, 0, fixed_overhead=3, slot_overhead=1), Block(5, 0, 0, fixed_overhead=7)
    held = overhead_bytes([[one], [one, two]], shared=False, count_tensors=1)
    # positions of 25 slots, lengths of two heads, a byte of state for each of 20 slots, and 3 + 7 for both heads
    assert held == 4 * 25 + 4 * 2 + 20 + 2 * 10
    assert overhead_bytes([[one], [one]], shared=True, count_tensors=0, named_heads=3) == 4 * 10 + 2 * 3 + 20 + 2 * 3


@pytest.mark.parametrize("n", [100, 101])
def test_a_mean_of_tokens_is_over_heads_and_layers(n):
    declared = bytes_declared(chain_of({"method": "snapkv", "kv_size": 64}), SHAPE, n, 2)
    assert (declared.tokens, declared.payload) == (64, 2 * 2 * 64 * 2 * DENSE)


def test_after_decoding_each_new_token_is_held_by_every_head():
    chain = chain_of({"method": "snapkv", "kv_size": 12, "window": 4})
    layer = chain.compress(*ref.make_layer(ref.grid(4, 40, 8), ref.grid(2, 40, 8)))
    for new in (0, 1, 5):
        held = 2 * (12 + new) * 2 * 8 * 4
        assert bytes_after_decoding(chain, layer, 0, new, HEADS) == (held, held)


def test_after_evicting_among_thin_tokens_the_new_ones_may_all_have_stayed():
    chain = chain_of({"method": "h2o+think", "variant": "orig", "kv_size": 20, "ratio": 0.5, "think.recent": 8})
    layer = chain.compress(*ref.make_layer(ref.grid(4, 40, 8), ref.grid(2, 40, 8)))
    assert [s.tokens for s in layer.segments] == [12, 8]
    thin, dense = (4 + 8) * 4, 2 * 8 * 4
    for new, whole in ((0, 8), (3, 11), (30, 20)):
        least, most = bytes_after_decoding(chain, layer, 0, new, HEADS)
        assert (least, most) == (2 * 20 * thin, 2 * 20 * thin + 2 * whole * (dense - thin))
