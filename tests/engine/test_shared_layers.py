"""Models whose last layers read the keys and values of an earlier layer: Gemma 3n, and Gemma 4 with uneven heads."""

import copy

import pytest
import torch
from support.families import SHARES_KEYS, WITH_SHARING, build, prompt
from support.own_model import check_full_is_the_model

import kvbench
from kvbench.audit.accounting import bytes_declared
from kvbench.audit.prompt_audit import audit
from kvbench.base.errors import UsageError
from kvbench.bench import layers as bench_layers
from kvbench.bench.sampling import lengthen
from kvbench.engine.step import build as batch_of
from kvbench.kv.model_shape import Shape, from_entry
from kvbench.methods.core.resolve import chain_of
from kvbench.models import traits
from kvbench.models.interface import cache_shape
from kvbench.plan.estimate import _count_dense_bytes

pytestmark = pytest.mark.skipif(not SHARES_KEYS, reason="this release of transformers shares keys in another way")
FAMILIES = tuple(WITH_SHARING)
EVICTING = {"method": "h2o", "kv_size": 20, "window": 8, "variant": "orig"}
BUDGET = {"method": "snapkv", "kv_size": 20, "window": 8, "decode_budget": 20, "decode_every": 4}
WINDOW, SHARING = 24, (5, 6, 7)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_full_cache_answers_as_generate_and_its_logits_are_the_models(family):
    check_full_is_the_model(build(family), prompt(70), atol=2e-5)


def masks(n, new, kept):
    """Masks by type of layer: new tokens of full layers see ``kept`` of the first n tokens and each other."""
    total = n + new
    causal = torch.ones(total, total, dtype=torch.bool).tril()
    full, local = causal.clone(), causal.triu(1 - WINDOW)
    dropped = torch.ones(n, dtype=torch.bool)
    dropped[kept] = False
    full[n:, :n] &= ~dropped
    as_bias = {True: 0.0, False: torch.finfo(torch.float32).min}
    return {
        name: torch.where(mask, as_bias[True], as_bias[False])[None, None]
        for name, mask in (("full_attention", full), ("sliding_attention", local))
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_that_shares_reads_what_the_owners_method_keeps(family):
    model, ids, more = build(family), prompt(70), prompt(9, 4)
    (cache,) = kvbench.prefill(model, ids, [{"method": "streamingllm", "kv_size": 20}])
    (kept,) = {tuple(positions.tolist()) for layer in cache.layers for positions in layer.kept_positions()}
    own = copy.deepcopy(model)
    own.set_attn_implementation("eager")
    with torch.no_grad():
        text = torch.cat([ids, more])[None]
        logits = own(text, attention_mask=masks(70, 9, list(kept)), use_cache=False).logits[0, -1]
    torch.testing.assert_close(kvbench.extend(model, cache, more).logits, logits, atol=1e-4, rtol=1e-4)
    one_by_one = cache
    for token in more:
        one_by_one = kvbench.extend(model, one_by_one, token[None])
    torch.testing.assert_close(one_by_one.logits, logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("entry", [EVICTING, BUDGET])
@pytest.mark.parametrize("family", FAMILIES)
def test_methods_choose_by_the_queries_of_the_layer_that_holds_keys(family, entry):
    model = build(family)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for layer in SHARING:
            other.model.layers[layer].self_attn.q_proj.weight.neg_()
    ends = []
    for read_by in (model, other):
        (cache,) = kvbench.prefill(read_by, prompt(70), [entry])
        ends.append(kvbench.extend(read_by, cache, prompt(15, 4)))
    one, two = ends
    assert not torch.allclose(one.logits, two.logits, atol=1e-3)
    for a, b in zip(one.layers, two.layers, strict=True):
        assert [p.tolist() for p in a.kept_positions()] == [p.tolist() for p in b.kept_positions()]
        for s, t in zip(a.segments, b.segments, strict=True):
            assert all(torch.equal(s.state[name], t.state[name]) for name in s.state)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_in_a_batch_answer_as_alone(family):
    model = build(family)
    entries = ["full", EVICTING, BUDGET, "kivi", {"method": "snapkv+q4_0", "kv_size": 20, "window": 8, "group": 16}]
    caches = [c for n in (70, 31) for c in kvbench.prefill(model, prompt(n), entries)]
    assert kvbench.generate(model, caches, 8) == [kvbench.generate(model, [cache], 8)[0] for cache in caches]


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_that_share_count_nothing_and_local_layers_their_own_heads(family):
    model = build(family)
    shape = traits.of_model(model).shape
    head_dim = {"gemma3n_text": 16, "gemma4_text": 32}[family]
    assert (shape.layers, shape.local_layers, shape.sharing_layers, shape.all_layers) == (3, 2, 3, 8)
    assert (shape.head_dim, shape.local_heads) == (head_dim, (2, 16))
    assert from_entry(vars(shape)) == shape == traits.of_config(model.config).shape
    for entry, tokens in (("full", 70), ({"method": "snapkv", "kv_size": 20, "window": 8}, 20)):
        (cache,) = kvbench.prefill(model, prompt(70), [entry])
        measured = audit(cache, cache_shape(model))
        local = 2 * 2 * 2 * WINDOW * 16 * 4  # keys and values of two heads in two layers
        assert measured.payload == 3 * 2 * 2 * tokens * head_dim * 4 + local
        assert measured.payload + measured.overhead == cache.nbytes()
        assert measured.full_bytes == shape.full_bytes(70, 4)
        declared = bytes_declared(cache.chain, shape, 70, 4)
        assert declared is not None and declared.total == cache.nbytes()
        built = bench_layers.measure_bytes(cache.chain, shape, 70, torch.float32)
        assert built.off == 0 and built.held.total == cache.nbytes()


@pytest.mark.parametrize("entry", ["full", {"method": "kivi", "residual": 8, "group": 8}, "flexgen", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_that_shares_reads_what_its_owner_reads_in_the_same_step(family, entry):
    """KIVI packs tokens after their step: read at once or one by one, each is exact in its own step for all layers."""
    model, more = build(family), prompt(9, 4)
    (cache,) = kvbench.prefill(model, prompt(40), [entry])
    one_by_one = cache
    for token in more:
        one_by_one = kvbench.extend(model, one_by_one, token[None])
    torch.testing.assert_close(one_by_one.logits, kvbench.extend(model, cache, more).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_of_a_prompt_are_attended_by_layers_that_share(family):
    model = build(family)
    (cache,) = kvbench.prefill(model, prompt(70), [{"method": "keydiff", "variant": "paper", "kv_size": 20}])
    assert cache.logits.isfinite().all() and len(kvbench.generate(model, [cache], 4)[0]) == 4


@pytest.mark.parametrize("family", FAMILIES)
def test_random_tokens_of_a_benchmark_have_the_heads_of_each_layer(family):
    model = build(family)
    caches = kvbench.prefill(model, prompt(30), ["full", "int8"])
    for cache in caches:
        batch = batch_of(model, [cache], 12)
        lengthen(model, batch, 8)
        assert batch.used == 8


@pytest.mark.parametrize("method", ["chai", "kvzip", "uncomp-stage"])
def test_what_reaches_into_layers_is_refused_where_layers_share(method):
    """Without local layers as well, which are a reason of their own."""
    shape = Shape(5, 4, 2, 16, sharing_layers=3)
    with pytest.raises(UsageError, match=f"method {method} is not possible on this model: 3 of its 8 layers read"):
        chain_of(method).check_shape(shape)


def test_a_forecast_holds_the_layers_that_later_ones_share():
    uneven = Shape(5, 16, 2, 512, local_layers=25, window=1024, local_kv_heads=8, local_head_dim=256)
    # a local layer is the larger one while all of its tokens are there: 2 x 8 x 256 numbers a token
    assert _count_dense_bytes(uneven, 100, 2) == 2 * 8 * 256 * 100 * 2
    sharing = Shape(4, 8, 2, 256, local_layers=16, window=512, sharing_layers=15)
    # the layer that is read now, and the last of each kind
    assert _count_dense_bytes(sharing, 100, 2) == 3 * 2 * 2 * 256 * 100 * 2
    assert _count_dense_bytes(Shape(32, 32, 8, 128), 100, 2) == 2 * 8 * 128 * 100 * 2


def test_the_table_says_which_layers_hold_nothing_and_shapes_are_checked():
    model_traits = traits.of_model(build("gemma4_text"))
    assert model_traits.shape.note is not None
    assert "3 of 8 layers hold nothing: each reads the cache of an earlier layer" in model_traits.shape.note
    assert "concern the other 3" in model_traits.shape.note
    with pytest.raises(UsageError, match="local_kv_heads=3 and local_head_dim=7 are not possible without local_layers"):
        Shape(3, 4, 2, 16, local_kv_heads=3, local_head_dim=7)
    with pytest.raises(UsageError, match="query_heads=4 is not possible: a multiple of local_kv_heads=3"):
        Shape(3, 4, 2, 16, local_layers=1, window=4, local_kv_heads=3)
    with pytest.raises(UsageError, match="sharing_layers='3'"):
        Shape(3, 4, 2, 16, sharing_layers="3")  # type: ignore[arg-type]
