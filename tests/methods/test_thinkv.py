"""ThinK-V: value channels by what they add to the last outputs, and what a chain with both kinds costs."""

import math

import pytest
import torch
from support import method_reference as ref
from support.storage_reference import value_scores

from kvbench.base.errors import UsageError
from kvbench.kv.segment import storage_bytes
from kvbench.methods.core.resolve import chain_of, chains_of
from kvbench.methods.think import Think
from kvbench.methods.thinkv import ThinkV
from kvbench.plan import config, words

N, D = 24, 8
SHAPES = {"mha": (3, 3), "gqa": (4, 2), "mqa": (4, 1)}
PER = ("kv_head", "query_head")
SNAPKV = {"kv_size": 11, "window": 4}


def tensors(shape="gqa", seed=1):
    hq, hk = SHAPES[shape]
    return ref.grid(hq, N, D, seed=seed), ref.grid(hk, N, D, seed=seed + 1), ref.grid(hk, N, D, seed=seed + 2)


def compress(method, qkv, per="kv_head", **knobs):
    dense, obs = ref.make_layer(*qkv, per=per)
    return chain_of({"method": method, "per": per, **knobs}).compress(dense, obs)


def slow_channels(qkv, tokens, count, observed):
    """Value channels of every stored head over its retained ``tokens``, by loops."""
    q, k, v = qkv
    heads, result = len(tokens), []
    for h, stored in enumerate(tokens):
        ours = q[h * len(q) // heads : (h + 1) * len(q) // heads, -observed:]
        source = h * len(k) // heads
        result.append(ref.top(value_scores(ours, k[source], v[source], stored, len(stored), N, 0.5), count))
    return result


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("base", "knobs"),
    [("", {}), ("snapkv+", SNAPKV), ("adakv+", {"kv_size": 9, "window": 2}), ("refreekv+", {"T": 0.3, "m": 2})],
)
def test_channels_are_those_of_the_slow_reference(base, knobs, shape, per):
    qkv = tensors(shape)
    cache = compress(f"{base}thinkv", qkv, per, ratio=0.5, value_ratio=0.375, recent=3, observed=5, **knobs)
    kept_positions = ref.kept(cache)
    assert cache.segments[0].value_channels.tolist() == slow_channels(qkv, kept_positions, 5, 5)
    assert cache.segments[0].key_channels.tolist() == ref.think(*qkv[:2], kept_positions, 4, 5)


@pytest.mark.parametrize("per", PER)
def test_what_is_stored_are_the_chosen_channels_of_older_tokens(per):
    q, k, v = tensors()
    thin, recent = compress("snapkv+thinkv", (q, k, v), per, ratio=0.5, value_ratio=0.375, recent=3, **SNAPKV).segments
    for h in range(thin.heads):
        source = h // (thin.heads // 2)
        old, new = (s.positions[h].long() for s in (thin, recent))
        assert torch.equal(thin.k[h], k[source][old][:, thin.key_channels[h].long()])
        assert torch.equal(thin.v[h], v[source][old][:, thin.value_channels[h].long()])
        assert torch.equal(recent.k[h], k[source][new]) and torch.equal(recent.v[h], v[source][new])
    assert recent.key_channels is None and recent.value_channels is None


def test_equal_columns_go_to_the_lower_index():
    q, k, v = tensors()
    v[..., 4:] = -v[..., :4]
    cache = compress("thinkv", (q, k, v), ratio=0.0, value_ratio=0.375, recent=3, observed=5)
    channels = cache.segments[0].value_channels.tolist()
    assert channels == slow_channels((q, k, v), ref.kept(cache), 5, 5)
    # five of four pairs: the fifth is the lower one of the third pair
    for chosen in channels:
        pairs = [c % 4 for c in chosen]
        (alone,) = [c for c in chosen if pairs.count(c % 4) == 1]
        assert alone < 4


# spec 5, ThinK-V: V column zero -> pruned first
@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("method", ["thinkv", "snapkv+thinkv", "thinkv+kivi", "thinkv+flexgen"])
def test_a_column_of_zeros_is_pruned_first(method, per):
    for column in range(D):
        q, k, v = tensors(seed=column)
        v[..., column] = 0
        knobs = SNAPKV if "snapkv" in method else {}
        knobs = {**knobs, **({"kivi.group": 4, "residual": 4} if "kivi" in method else {})}
        cache = compress(method, (q, k, v), per, ratio=0.25, value_ratio=0.125, recent=3, **knobs)
        for channels in cache.segments[0].value_channels.tolist():
            assert channels == [c for c in range(D) if c != column]


# spec 5, ThinK-V: lambda_v=0 identity
@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("base", ["", "snapkv+"])
@pytest.mark.parametrize("rest", ["", "+kivi", "+flexgen"])
def test_without_value_channels_it_is_think_and_without_any_the_base(base, rest, per):
    qkv = tensors()
    knobs = {**(SNAPKV if base else {}), **({"kivi.group": 4, "residual": 8} if "kivi" in rest else {})}
    pruning = {"recent": 3, "ratio": 0.4}
    for ratio in (0.4, 0.0):
        pruning["ratio"] = ratio
        got = compress(f"{base}thinkv{rest}", qkv, per, value_ratio=0.0, **pruning, **knobs)
        want = compress(f"{base}think{rest}", qkv, per, **pruning, **knobs)
        assert len(got.segments) == len(want.segments)
        for a, b in zip(got.segments, want.segments, strict=True):
            assert a.value_channels is None and (a.key_channels is None) == (b.key_channels is None)
            for x, y in zip((*a.payload(), *a.overhead()), (*b.payload(), *b.overhead()), strict=True):
                assert torch.equal(x, y)


def test_values_alone_leave_keys_whole():
    (thin, recent) = compress("thinkv", tensors(), ratio=0.0, value_ratio=0.5, recent=3).segments
    assert thin.key_channels is None and thin.k.shape == (2, N - 3, D) and thin.v.shape == (2, N - 3, 4)
    assert recent.v.shape == (2, 3, D)


@pytest.mark.parametrize("value_ratio", [0.25, 0.5, 0.8])
def test_the_output_lost_is_the_root_of_the_squared_scores_of_the_pruned_channels(value_ratio):
    q, k, v = tensors("mha")
    dense, obs = ref.make_layer(q, k, v)
    stage = ThinkV(ratio=0.0, value_ratio=value_ratio, recent=0, observed=6)
    channels = stage.compress(dense, obs).segments[0].value_channels.long()
    scores = stage.value_scores(dense, obs, torch.ones(3, N, dtype=torch.bool))
    attn = torch.tensor(ref.attention(q, k))[:, -6:]
    for h in range(3):
        gone = torch.ones(D).index_fill(0, channels[h], 0.0)
        torch.testing.assert_close((attn[h] @ (v[h] * gone)).norm(), (scores[h] * gone).norm(), atol=1e-5, rtol=1e-5)
        assert (scores[h] * gone).max() <= scores[h][channels[h]].min()


@pytest.mark.parametrize("size", [1, 2])
def test_queries_that_see_no_retained_token_do_not_count(size):
    qkv = tensors()
    knobs = {"kv_size": size + 1, "ratio": 0.0, "value_ratio": 0.5, "recent": 0, "observed": N}
    cache = compress("keynorm+thinkv", qkv, **knobs)
    assert any(kept_positions[0] > 0 for kept_positions in ref.kept(cache))
    assert cache.segments[0].value_channels.tolist() == slow_channels(qkv, ref.kept(cache), 4, N)


def test_only_the_packed_values_score_where_a_quantiser_follows():
    q, k, v = tensors()
    quantised = {"kivi.group": 4, "residual": 8, "ratio": 0.0, "value_ratio": 0.5, "recent": 0}
    before = compress("thinkv+kivi", (q, k, v), **quantised).segments[0].value_channels.tolist()
    exact = compress("thinkv", (q, k, v), ratio=0.0, value_ratio=0.5, recent=0).segments[0].value_channels.tolist()
    loud = v.clone()
    loud[:, -8:, 7] = 100.0
    assert compress("thinkv+kivi", (q, k, loud), **quantised).segments[0].value_channels.tolist() == before
    louder = compress("thinkv", (q, k, loud), ratio=0.0, value_ratio=0.5, recent=0).segments[0].value_channels.tolist()
    assert exact != louder and all(7 in channels for channels in louder)


@pytest.mark.parametrize(
    ("value_ratio", "code", "paper"), [(0.1, 116, 115), (0.3, 90, 89), (0.4, 77, 76), (0, 128, 128)]
)
def test_kept_value_channels_of_128_in_both_roundings(value_ratio, code, paper):
    assert ThinkV(value_ratio=value_ratio).kept_values(128) == code
    assert ThinkV(value_ratio=value_ratio, rounding="paper").kept_values(128) == paper
    assert ThinkV(ratio=value_ratio).kept_keys(128) == code


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize(("ratio", "value_ratio"), [(0.3, 0.3), (0.4, 0.4), (0.3, 0.1), (0.0, 0.3), (0.3, 0.0)])
def test_bytes_of_a_layer(ratio, value_ratio, per):
    n, d, recent, heads = 100, 128, 32, 4 if per == "query_head" else 2
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(h, n, d, generator=g).bfloat16() for h in (4, 2, 2))
    cache = compress("thinkv", (q, k, v), per, ratio=ratio, value_ratio=value_ratio, recent=recent)
    kept_tokens = [d - math.floor(r * d) for r in (ratio, value_ratio)]
    held_bytes = storage_bytes(t for s in cache.segments for t in s.payload())
    assert held_bytes == 2 * heads * ((n - recent) * sum(kept_tokens) + 2 * recent * d)
    ids = 2 * heads * sum(t for t in kept_tokens if t < d)
    assert storage_bytes(t for s in cache.segments for t in s.overhead()) == ids + 4 * n
    layout = chain_of({"method": "thinkv", "ratio": ratio, "value_ratio": value_ratio}).layout(n, d, 2)
    assert heads * sum(b.key_bytes + b.value_bytes for b in layout) == held_bytes
    assert heads * sum(b.fixed_overhead for b in layout) == ids


@pytest.mark.parametrize(
    ("knob", "value"), [("value_ratio", 1), ("value_ratio", -0.1), ("value_ratio", True), ("ratio", 1), ("observed", 0)]
)
def test_impossible_knobs_are_refused(knob, value):
    with pytest.raises(UsageError, match=rf"method\.thinkv\.{knob}"):
        chain_of({"method": "thinkv", knob: value})


@pytest.mark.parametrize("other", ["think", "l1", "l2"])
def test_it_is_the_only_pruning_stage_of_a_chain(other):
    with pytest.raises(UsageError, match=r"thinkv.*at most one pruning method"):
        chain_of(f"snapkv+{other}+thinkv")


def parsed(line):
    (overrides,) = words.read(line.split())
    return config.parse(overrides).chains


def test_bare_knobs_reach_the_stages_that_own_them():
    think, both = chains_of(["think", "thinkv"], {"ratio": 0.5, "value_ratio": 0.25})
    assert isinstance(think.stages[0], Think) and think.stages[0].ratio == 0.5
    assert (both.stages[0].ratio, both.stages[0].value_ratio) == (0.5, 0.25)
    with pytest.raises(UsageError, match="value_ratio"):
        chains_of(["think"], {"value_ratio": 0.25})


def test_a_grid_of_value_ratios_multiplies_only_chains_that_have_them():
    chains = [c.chain for c in parsed("method=snapkv+think,thinkv ratio=0.4,0.5 value_ratio=0.1,0.3")]
    knobs = [c.stages[-1].knobs() for c in chains]
    assert [k["ratio"] for k in knobs if "value_ratio" not in k] == [0.4, 0.5]
    assert [(k["ratio"], k["value_ratio"]) for k in knobs if "value_ratio" in k] == [
        (0.4, 0.1),
        (0.4, 0.3),
        (0.5, 0.1),
        (0.5, 0.3),
    ]


def test_both_ratios_are_shown_even_at_their_defaults():
    (cell,) = parsed("method=thinkv")
    assert cell.label == "thinkv ratio=0.3 value_ratio=0.3"


def test_the_preset_prunes_both_as_the_papers_first_setting():
    (cell,) = parsed("preset=think method=snapkv+thinkv kv_size=128")
    knobs = cell.chain.stages[-1].knobs()
    assert (knobs["ratio"], knobs["value_ratio"], knobs["recent"], knobs["observed"]) == (0.3, 0.3, 32, 32)
    assert cell.chain.per == "query_head"
