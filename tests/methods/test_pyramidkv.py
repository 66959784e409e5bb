"""PyramidKV: SnapKV's choice under budgets that fall with depth."""

import pytest
from support import method_reference as ref
from support.families import build, prompt
from support.grids import grid

import kvbench
from kvbench.audit.prompt_audit import audit
from kvbench.base.errors import UsageError
from kvbench.methods.core.resolve import chain_of
from kvbench.methods.pyramidkv import PyramidKV
from kvbench.methods.snapkv import SnapKV
from kvbench.models.interface import cache_shape


def budgets(n, layers, **knobs):
    stage = PyramidKV(**knobs)
    return [stage.budget(n, i, layers) for i in range(layers)]


# spec 5, PyramidKV: the schedules of 2.6
@pytest.mark.parametrize(
    ("size", "window", "first", "last", "mean"), [(2048, 32, 3964, 151, 2057.5), (128, 8, 242, 25, 133.5)]
)
def test_the_schedule_of_the_code_by_hand(size, window, first, last, mean):
    stored = budgets(8000, 32, kv_size=size, window=window, exact_total=False)
    assert (stored[0], stored[-1], sum(stored) / 32) == (first, last, mean)


# spec 5, PyramidKV: n=200, C=128, w=8 -> uniform
@pytest.mark.parametrize("exact_total", [False, True])
def test_prompts_near_the_budget_get_it_everywhere(exact_total):
    knobs = {"kv_size": 128, "window": 8, "exact_total": exact_total}
    assert budgets(200, 32, **knobs) == [128] * 32
    assert budgets(239, 32, **knobs) == [128] * 32
    assert len(set(budgets(240, 32, **knobs))) > 1
    assert budgets(128, 32, **knobs) == [128] * 32
    assert budgets(100, 32, **knobs) == [100] * 32
    assert budgets(5000, 1, **knobs) == [128]


@grid("layers", [2, 3, 12, 32, 40])
@grid("size", [9, 31, 128, 513])
@grid("n", [60, 241, 500, 1030, 9000])
@grid("beta", [1, 3, 20])
def test_the_code_is_met_to_the_token_and_exact_totals_are_exact(layers, size, n, beta):
    knobs = {"kv_size": size, "window": 8, "beta": beta}
    assert budgets(n, layers, **knobs, exact_total=False) == ref.pyramid(n, size, 8, beta, layers)
    stored = budgets(n, layers, **knobs)
    assert sum(stored) == layers * min(size, n)
    assert stored == sorted(stored)[::-1] and stored[-1] >= 8 and stored[0] <= n


def test_whole_tokens_are_dealt_out_by_hand():
    # C - w = 10, beta 5: from 18 down to 2 in three steps of 5 1/3: 18, 12 2/3, 7 1/3, 2
    assert budgets(100, 4, kv_size=12, window=2, beta=5) == [20, 15, 9, 4]
    assert budgets(100, 4, kv_size=12, window=2, beta=5, exact_total=False) == [20, 15, 10, 5]


def test_a_small_fraction_shrinks_the_window_and_keeps_the_mean():
    stored = budgets(1000, 4, kv_ratio=0.02, window=32)
    assert sum(stored) == 80 and stored[-1] >= 10
    assert PyramidKV(kv_ratio=0.02).capacity(1000).shrunk


def test_frozen_layers_keep_everything_and_the_pyramid_spans_the_others():
    stored = budgets(100, 6, kv_size=12, window=2, beta=5, frozen_layers=[0, 3])
    assert stored == [100, 20, 15, 100, 9, 4]
    assert budgets(100, 3, kv_size=12, window=2, frozen_layers=[0, 2]) == [100, 12, 100]


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("per", ["kv_head", "query_head"])
@pytest.mark.parametrize("exact_total", [False, True])
def test_every_layer_holds_snapkvs_choice_at_its_own_budget(layer, per, exact_total):
    q, k = ref.grid(4, 40, 8, seed=1), ref.grid(2, 40, 8, seed=2)
    dense, obs = ref.make_layer(q, k, per=per, layer=layer, n_layers=4)
    knobs = {"window": 4, "kernel": 3}
    stage = PyramidKV(kv_size=12, beta=6, exact_total=exact_total, **knobs)
    size = stage.budget(40, layer, 4)
    kept_positions = ref.kept(stage.compress(dense, obs))
    assert kept_positions == ref.snapkv(ref.attention(q, k), dense.heads, size, 4, 3, "max")
    if not exact_total:
        wanted = ref.pyramidkv(ref.attention(q, k), dense.heads, 12, 4, 3, "max", 6, layer, 4)
        assert kept_positions == wanted


def test_the_audit_finds_the_mean_that_was_asked_for():
    model = build("llama")
    (cache,) = kvbench.prefill(model, prompt(90), ["pyramidkv"], kv_size=20, window=6)
    measured = audit(cache, cache_shape(model))
    assert measured.kept == measured.nominal == 20
    counts = [layer.tokens for layer in cache.layers]
    assert counts == [34, 20, 6]


def test_a_steepness_of_one_is_snapkv():
    layer = ref.make_layer(ref.grid(4, 40, 8, seed=3), ref.grid(2, 40, 8, seed=4))
    knobs = {"kv_size": 14, "window": 4}
    assert ref.kept(PyramidKV(beta=1, **knobs).compress(*layer)) == ref.kept(SnapKV(**knobs).compress(*layer))


@pytest.mark.parametrize(("knob", "value"), [("beta", 0), ("beta", 2.5), ("exact_total", "yes"), ("kernel", 4)])
def test_impossible_knobs_are_refused(knob, value):
    with pytest.raises(UsageError, match=rf"method\.pyramidkv\.{knob}"):
        chain_of({"method": "pyramidkv", knob: value})


def test_a_size_within_the_window_is_refused_before_any_model_is_there():
    with pytest.raises(UsageError, match=r"method\.pyramidkv\.kv_size=32 .*above 32"):
        chain_of({"method": "pyramidkv", "kv_size": 32})
