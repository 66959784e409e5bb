"""H2O: heavy hitters by column sums over all or the last queries."""

from dataclasses import replace

import pytest
import torch
from support import decoding_reference as decoding
from support import method_reference as ref
from support.families import build, prompt

import kvbench
from kvbench.audit.prompt_audit import audit
from kvbench.base.errors import UsageError
from kvbench.engine.step import build as build_batch
from kvbench.engine.step import step
from kvbench.kv import ops
from kvbench.kv.observation import Needs, Observation
from kvbench.methods.core.contract import Capacity
from kvbench.methods.core.resolve import chain_of
from kvbench.methods.h2o import H2O
from kvbench.models.interface import attached, cache_shape


def layer_with_colsums(colsums, heads):
    """Return a layer whose column sums are given instead of observed."""
    hq, n = len(colsums), len(colsums[0])
    k = ref.grid(heads, n, 4)
    obs = Observation(layer=0, n_layers=1, n=n, scale=0.5, colsums=torch.tensor(colsums))
    return ops.dense(k, k.clone(), heads=heads, query_heads=hq), obs


def test_window_stays_and_the_rest_competes_by_column_sum():
    dense, obs = layer_with_colsums([[9.0, 1, 7, 3, 8, 2, 0, 0], [0.0, 5, 5, 5, 5, 5, 90, 0]], heads=2)
    cache = H2O(kv_size=5, window=2).compress(dense, obs)
    assert ref.kept(cache) == [[0, 2, 4, 6, 7], [1, 2, 3, 6, 7]]


def test_a_group_decides_by_its_mean_and_not_head_by_head():
    sums = [[6.0, 0, 4, 0, 0], [0.0, 6, 4, 0, 0]]
    together, obs = layer_with_colsums(sums, heads=1)
    assert ref.kept(H2O(kv_size=2, window=1).compress(together, obs)) == [[2, 4]]
    alone, obs = layer_with_colsums(sums, heads=2)
    assert ref.kept(H2O(kv_size=2, window=1).compress(alone, obs)) == [[0, 4], [1, 4]]


def test_early_tokens_weigh_more_because_more_queries_see_them():
    dense, obs = ref.make_layer(torch.zeros(2, 12, 8), ref.grid(2, 12, 8))
    assert ref.kept(H2O(kv_size=6, window=2).compress(dense, obs)) == [[0, 1, 2, 3, 10, 11]] * 2


# spec 5, H2O: win = SnapKV with kernel 1
@pytest.mark.parametrize("per", ["kv_head", "query_head"])
@pytest.mark.parametrize("seed", range(5))
def test_win_is_snapkv_without_pooling(per, seed):
    dense, obs = ref.make_layer(ref.grid(4, 40, 8, seed=seed), ref.grid(2, 40, 8, seed=seed + 50), per=per)
    common = {"per": per, "kv_size": 14, "window": 6}
    win = chain_of({"method": "h2o", "variant": "win", **common}).compress(dense, obs)
    snap = chain_of({"method": "snapkv", "kernel": 1, **common}).compress(dense, obs)
    pooled = chain_of({"method": "snapkv", "kernel": 7, **common}).compress(dense, obs)
    assert ref.kept(win) == ref.kept(snap) != ref.kept(pooled)


# spec 5, H2O: a scoring window of n
def test_a_window_of_all_queries_makes_win_equal_to_all():
    dense, obs = ref.make_layer(ref.grid(4, 40, 8, seed=1), ref.grid(2, 40, 8, seed=2))
    win, every = (H2O(variant=v).sum_received(dense, obs, 40) for v in ("win", "all"))
    torch.testing.assert_close(win, every)
    narrow = H2O(variant="win").sum_received(dense, obs, 8)
    assert not torch.allclose(narrow, every)


def test_each_variant_asks_only_for_what_it_reads():
    assert H2O().needs(100) == Needs(colsums=True)
    assert H2O(variant="win", window=8).needs(100) == Needs(last_q=8)
    assert H2O(score_bits=3).needs(100) == Needs(colsums_bits=frozenset({3}))
    assert H2O(variant="win", window=8, score_bits=3).needs(100) == Needs(last_q=8)
    merged = H2O(score_bits=3).needs(9) | H2O(score_bits=2, variant="orig").needs(9) | H2O().needs(9)
    assert merged == Needs(colsums=True, colsums_bits=frozenset({2, 3}))


def test_missing_column_sums_are_an_error():
    dense, obs = ref.make_layer(ref.grid(2, 20, 8), ref.grid(2, 20, 8))
    with pytest.raises(ValueError, match="column sums"):
        H2O(kv_size=8, window=2).compress(dense, replace(obs, colsums=None))


@pytest.mark.parametrize("per", ["kv_head", "query_head"])
def test_a_quarter_of_heavy_hitters_and_a_quarter_of_recent_tokens(per):
    """Spec 5, H2O: n = 1001, 0.25 / 0.25 -> 250 + 250."""
    n, knobs = 1001, {"variant": "orig", "heavy_ratio": 0.25, "recent_ratio": 0.25}
    dense, obs = ref.make_layer(ref.grid(4, n, 8, seed=1), ref.grid(2, n, 8, seed=2), per=per)
    cache = chain_of({"method": "h2o", "per": per, **knobs}).compress(dense, obs)
    sums = obs.colsums if per == "query_head" else obs.colsums.view(2, 2, n).mean(dim=1)
    for scores, kept_positions in zip(sums.tolist(), ref.kept(cache), strict=True):
        assert kept_positions == ref.top(scores[: n - 250], 250) + list(range(n - 250, n))


@pytest.mark.parametrize("variant", ["orig", "uncomp"])
def test_scores_of_evicted_tokens_stay_0(variant):
    """Spec 5, H2O: what left never returns, free slots gather nothing, and a new token starts from nothing."""
    size = 12 if variant == "orig" else 130
    model, n = build("llama"), size + 20
    entry = {"method": "h2o", "variant": variant, "kv_size": size}
    caches = [kvbench.prefill(model, prompt(m, m), [entry])[0] for m in (n, 5)]
    batch = build_batch(model, caches, 20)
    gone = [[[set() for _ in range(2)] for _ in caches] for _ in batch.with_keys]
    kept_positions = [[[set(p) for p in ref.kept(c.layers[i])] for c in caches] for i in range(len(batch.with_keys))]
    with torch.no_grad(), attached(model):
        for t in range(20):
            step(model, batch, torch.tensor([[5], [6]]), torch.tensor([[n + t], [5 + t]]))
            for i, layer in enumerate(batch.with_keys):
                slots = layer.formats[0][1]
                mass, valid, positions = slots.state["mass"], slots.valid, slots.positions
                assert (mass[~valid] == 0).all()
                newest = positions == torch.tensor([n + t, 5 + t])[:, None, None]
                # its own row alone, averaged over a group
                assert ((newest & valid).sum(dim=-1) == 1).all() and (mass[newest & valid] <= 1).all()
                for b in range(2):
                    for h in range(2):
                        now = set(positions[b, h][valid[b, h]].tolist())
                        gone[i][b][h] |= kept_positions[i][b][h] - now
                        assert not now & gone[i][b][h]
                        kept_positions[i][b][h] = now
    assert all(len(gone[i][0][h]) == 20 for i in range(len(batch.with_keys)) for h in range(2))


@pytest.mark.parametrize(
    ("size", "parts"), [(384, (3, 381)), (512, (4, 508)), (128, (1, 127)), (130, (1, 128)), (2048, (16, 2032))]
)
def test_uncomps_baseline_keeps_few_heavy_hitters(size, parts):
    stage = H2O(variant="uncomp", kv_size=size)
    assert stage.parts(5000) == parts
    assert stage.capacity(5000) == Capacity(sum(parts), 0, parts[1])
    assert stage.decode_limit(5000, 0) == sum(parts) and stage.evicts


def test_of_an_odd_budget_the_recent_tokens_have_one_more():
    assert H2O(variant="orig", kv_size=7).parts(100) == (3, 4)


def test_uncomps_baseline_by_hand():
    dense, obs = layer_with_colsums([[float(j) for j in range(200)]], heads=1)
    (kept_positions,) = ref.kept(H2O(kv_size=130, variant="uncomp").compress(dense, obs))
    assert kept_positions == [71, *range(72, 200)]
    dense, obs = layer_with_colsums([[200.0 - j for j in range(200)]], heads=1)
    (kept_positions,) = ref.kept(H2O(kv_size=130, variant="uncomp").compress(dense, obs))
    assert kept_positions == [0, *range(72, 200)]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_uncomps_baseline_decodes_as_a_slow_simulation_with_masks(family):
    model, ids = build(family), prompt(150, 8)
    (cache,) = kvbench.prefill(model, ids, [{"method": "h2o", "variant": "uncomp", "kv_size": 130}])
    assert audit(cache, cache_shape(model)).kept == 129
    answer, kept_tokens = decoding.h2o_decoding(model, ids, 6, 1, 128)
    assert kvbench.generate(model, [cache], 6) == [answer]
    longer = kvbench.extend(model, cache, torch.tensor(answer))
    assert [ref.kept(layer) for layer in longer.layers] == kept_tokens


def test_uncomps_baseline_needs_room_for_a_heavy_hitter():
    with pytest.raises(UsageError, match=r"method\.h2o\.kv_size=127 .*at least 128 with variant=uncomp"):
        H2O(variant="uncomp", kv_size=127)
    with pytest.raises(UsageError, match=r"method\.h2o\.heavy_ratio=0\.25 .*variant=orig only"):
        H2O(variant="uncomp", heavy_ratio=0.25, recent_ratio=0.25)
    short = H2O(variant="uncomp", kv_ratio=0.25)
    assert short.capacity(200) == Capacity(49, 0, 49, shrunk=True)
    assert short.capacity(512) == Capacity(128, 0, 127)
    (kept_positions,) = ref.kept(short.compress(*layer_with_colsums([[1.0] * 200], heads=1)))
    assert kept_positions == list(range(151, 200))


@pytest.mark.parametrize("bits", [8, 3, 2])
@pytest.mark.parametrize("per", ["kv_head", "query_head"])
def test_quantised_keys_decide_and_exact_ones_are_stored_and_attended(bits, per):
    """Spec 2.3, ``score_bits``: from a real prefill, where every width is observed in one pass."""
    model, ids = build("llama"), prompt(60, 3)
    entries = [
        {"method": "h2o", "kv_size": 20, "window": 4, "variant": v, "score_bits": b}
        for v in ("all", "win")
        for b in (bits, None, 2)
    ]
    full, *together = kvbench.prefill(model, ids, ["full", *entries], per=per)
    for i in (0, 3):
        built, exact = together[i : i + 2]
        (alone,) = kvbench.prefill(model, ids, [entries[i]], per=per)
        kept_positions = [ref.kept(layer) for layer in built.layers]
        assert kept_positions == [ref.kept(layer) for layer in alone.layers]
        assert kept_positions != [ref.kept(layer) for layer in exact.layers] or bits == 8
        audit(built, cache_shape(model))
        for layer, complete in zip(built.layers, full.layers, strict=True):
            (a,), (b,) = layer.segments, complete.segments
            for h, positions in enumerate(ref.kept(layer)):
                source = h // (len(a.k) // len(b.k))
                assert torch.equal(a.k[h], b.k[source, positions]) and torch.equal(a.v[h], b.v[source, positions])


@pytest.mark.parametrize(("bits", "seed"), [(8, 8), (3, 8), (2, 8), (2, 9)])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_decoding_by_quantised_keys_equals_a_slow_simulation(bits, seed, family):
    model, ids = build(family), prompt(26, seed)
    (cache,) = kvbench.prefill(model, ids, [{"method": "h2o", "variant": "orig", "kv_size": 10, "score_bits": bits}])
    answer, kept_tokens = decoding.h2o_decoding(model, ids, 12, 5, 5, bits)
    assert kvbench.generate(model, [cache], 12) == [answer]
    longer = kvbench.extend(model, cache, torch.tensor(answer))
    assert [ref.kept(layer) for layer in longer.layers] == kept_tokens
    if bits != 8:
        assert kept_tokens != decoding.h2o_decoding(model, ids, 12, 5, 5)[1]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_long_answer_is_decided_by_quantised_keys_of_its_own(family):
    """The prompt's part in the scores is small here: what decoding adds up must be that of quantised keys, too."""
    model, ids = build(family), prompt(10, 8)
    (cache,) = kvbench.prefill(model, ids, [{"method": "h2o", "variant": "orig", "kv_size": 8, "score_bits": 2}])
    answer, kept_tokens = decoding.h2o_decoding(model, ids, 36, 4, 4, 2)
    assert kvbench.generate(model, [cache], 36) == [answer]
    longer = kvbench.extend(model, cache, torch.tensor(answer))
    assert [ref.kept(layer) for layer in longer.layers] == kept_tokens


def test_under_vatp_quantised_keys_decide_too():
    model = build("llama")
    entries = [{"method": "vatp+h2o", "variant": "orig", "kv_size": 12, "score_bits": b} for b in (None, 2)]
    exact, coarse = kvbench.prefill(model, prompt(60, 3), entries)
    new = prompt(20, 4)
    kept_positions = [[ref.kept(x) for x in kvbench.extend(model, c, new).layers] for c in (exact, coarse)]
    assert kept_positions[0] != kept_positions[1] and all(len(h) == 12 for x in kept_positions[1] for h in x)


def test_an_unset_width_is_not_part_of_what_a_result_is_stored_under():
    (plain,) = chain_of("h2o").identity()["stages"]
    assert "score_bits" not in plain["knobs"] and plain["revision"] == 1
    (set_,) = chain_of({"method": "h2o", "score_bits": 3}).identity()["stages"]
    assert set_["knobs"] == {**plain["knobs"], "score_bits": 3}


def test_column_sums_of_another_width_are_an_error():
    dense, obs = ref.make_layer(ref.grid(2, 20, 8), ref.grid(2, 20, 8), bits=(3,))
    with pytest.raises(ValueError, match="column sums"):
        H2O(kv_size=8, window=2, score_bits=2).compress(dense, obs)


@pytest.mark.parametrize(
    ("knob", "value"), [("variant", "half"), ("window", 0), ("window", 2.5), ("score_bits", 4), ("score_bits", "two")]
)
def test_impossible_knobs_are_refused(knob, value):
    with pytest.raises(UsageError, match=rf"method\.h2o\.{knob}"):
        chain_of({"method": "h2o", knob: value})
