"""AdaKV: heads share a layer's budget, what they keep is stored without padding, and the floor holds."""

import itertools
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from support import method_reference as ref
from support.families import build, prompt
from support.grids import grid

import kvbench
from kvbench.audit.prompt_audit import audit
from kvbench.base.errors import Refused, UsageError
from kvbench.kv import ops
from kvbench.kv.segment import Segment
from kvbench.methods.adakv import AdaKV
from kvbench.methods.core import registry
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.resolve import chain_of
from kvbench.models.interface import cache_shape

N, W, SIZE = 26, 4, 11
SHAPES = {"mha": (3, 3), "gqa": (4, 2), "mqa": (4, 1)}


def parse(**knobs):
    return chain_of({"method": "adakv", "window": W, "kernel": 3, "kv_size": SIZE, **knobs})


def layer(shape, per, ties=False):
    hq, hk = SHAPES[shape]
    q, k = ref.grid(hq, N, 8, seed=1), ref.grid(hk, N, 8, seed=2)
    if ties:
        k = k[:, torch.arange(N) % 5]
    return q, k, *ref.make_layer(q, k, per=per)


@grid("ties", [False, True])
@grid("per", ["kv_head", "query_head"])
@grid("shape", SHAPES)
@grid(("floor", "rule"), [*itertools.product((0.0, 0.2, 0.55), ("mixed", "safe"))])
def test_tokens_are_those_of_a_slow_joint_ranking(shape, per, ties, floor, rule):
    q, k, dense, obs = layer(shape, per, ties)
    cache = parse(floor=floor, floor_rule=rule, per=per).compress(dense, obs)
    wanted = ref.adakv(ref.attention(q, k), dense.heads, SIZE, W, 3, "max", floor, rule)
    assert ref.kept(cache) == wanted
    assert cache.decided == tuple(map(len, wanted)) and sum(cache.decided) == SIZE * dense.heads
    keys, values = dense.segments[0].k, dense.segments[0].v
    for h, tokens in enumerate(wanted):
        source = h // (dense.heads // k.shape[0])
        stored = cache.segments[0].head(h)
        assert torch.equal(stored.k[0], keys[source, tokens]) and torch.equal(stored.v[0], values[source, tokens])


@pytest.mark.parametrize("per", ["kv_head", "query_head"])
def test_a_whole_floor_is_snapkv(per):
    *_, dense, obs = layer("gqa", per)
    snap = chain_of({"method": "snapkv", "window": W, "kernel": 3, "kv_size": SIZE, "per": per})
    for rule in ("mixed", "safe"):
        same = parse(floor=1.0, floor_rule=rule, per=per).compress(dense, obs)
        assert ref.kept(same) == ref.kept(snap.compress(dense, obs))
        assert same.segments[0].lengths is None


def test_a_head_that_attends_widely_takes_from_one_that_attends_one_token():
    q, k = torch.zeros(2, 30, 8), torch.zeros(2, 30, 8)
    q[0, -W:, 0], k[0, 5, 0] = 20, 20  # head 0: everything on token 5; head 1: evenly on all
    dense, obs = ref.make_layer(q, k)
    calibrated = chain_of({"method": "adakv", "window": W, "kernel": 1, "kv_size": W + 10, "floor": 0.2})
    sharp, wide = ref.kept(calibrated.compress(dense, obs))
    assert 5 in sharp and len(sharp) == W + 3 and len(wide) == W + 17  # 0.8 * 1 + 0.2 * 10, 0.8 * 19 + 0.2 * 10


def test_ragged_heads_hold_no_padding():
    model = build("llama")
    entry = {"method": "adakv", "kv_size": 24, "window": 8, "floor": 0.0}
    (cache,) = kvbench.prefill(model, prompt(90), [entry])
    lengths = [layer.segments[0].lengths for layer in cache.layers]
    assert any(s is not None and len(set(s.tolist())) > 1 for s in lengths)
    payload = sum(s.k.nbytes + s.v.nbytes for layer in cache.layers for s in layer.segments)
    assert payload == len(cache.layers) * 2 * 24 * 2 * 16 * 4
    assert audit(cache, cache_shape(model)).payload == payload


@pytest.mark.parametrize("chain", ["adakv", "adakv+think", "adakv+thinkv", "adakv+kivi"])
@pytest.mark.parametrize("per", ["kv_head", "query_head"])
def test_text_read_after_the_prompt_is_seen_by_the_heads_that_it_belongs_to(chain, per):
    """An appended tail has kv heads, where ragged segments may have query heads."""
    model, more = build("llama"), prompt(21, 4)
    own_value = {k: v for m in chain.split("+") for k, v in {"recent": 6, "group": 4, "residual": 8}.items()}
    knobs = {k: v for k, v in own_value.items() if any(k in registry.knob_names(m) for m in chain.split("+"))}
    (cache,) = kvbench.prefill(model, prompt(80), [{"method": chain, "kv_size": 30, "window": 8, **knobs}], per=per)
    at_once, pieces = kvbench.extend(model, cache, more), cache
    for piece in more.split([1, 7, 12, 1]):
        pieces = kvbench.extend(model, pieces, piece)
    torch.testing.assert_close(pieces.logits, at_once.logits, atol=1e-3, rtol=1e-3)


@dataclass(frozen=True, kw_only=True)
class Padded(AdaKV):
    """Stores ragged heads side by side, as long as the longest."""

    id: ClassVar[str] = "adakv"

    def pick(self, cache, scores, budget):
        kept_tokens = super().pick(cache, scores, budget)
        (s,) = kept_tokens.segments
        if s.lengths is None:
            return kept_tokens
        k, v, positions = (ops.pad_heads(t, s.lengths) for t in (s.k, s.v, s.positions))
        return replace(kept_tokens, segments=(Segment(k, v, positions),))


def test_a_cache_that_pads_is_refused():
    chain = Chain((Padded(kv_size=24, window=8, floor=0.0),))
    (cache,) = kvbench.prefill(build("llama"), prompt(90), [chain])
    with pytest.raises(Refused):
        audit(cache, cache_shape(build("llama")))


@pytest.mark.parametrize(("knob", "value"), [("floor", -0.1), ("floor", 1.5), ("floor_rule", "even")])
def test_impossible_knobs_are_refused(knob, value):
    with pytest.raises(UsageError, match=rf"method\.adakv\.{knob}"):
        parse(**{knob: value})
