"""Q-Hitter: attention and friendliness to quantisation choose, and everything is stored packed."""

import math
from dataclasses import replace

import pytest
import torch
from support import method_reference as ref
from support import qhitter_reference as slow
from support.families import build, prompt
from support.grids import grid

import kvbench
from kvbench.audit.prompt_audit import audit
from kvbench.base.errors import UsageError
from kvbench.engine.step import build as build_batch
from kvbench.engine.step import step
from kvbench.kv import ops
from kvbench.kv.observation import Needs, Observation
from kvbench.kv.segment import storage_bytes
from kvbench.methods.core.resolve import chain_of
from kvbench.methods.qhitter import QHitter
from kvbench.models.interface import attached, cache_shape

RATIOS = {"heavy_ratio": 0.15, "recent_ratio": 0.05}


def values(cache):
    """Keys and values [H, L, D] of the only segment, unpacked."""
    (s,) = cache.segments
    assert s.k.shape[1] == s.v.shape[1] == 0
    return s.codes.k.dequantise(torch.float32), s.codes.v.dequantise(torch.float32)


def at(x, positions, heads):
    """Return x [Hk, n, D] at each stored head's positions."""
    return torch.stack([x[h // (heads // len(x)), p] for h, p in enumerate(positions)])


# spec 5, Q-Hitter: n=1000
def test_sizes_are_rounded_down_one_by_one():
    assert QHitter(**RATIOS).parts(1000) == (70, 79, 50)
    assert QHitter(**RATIOS).decode_limit(1000, 0) == QHitter(**RATIOS).nominal(1000) == 199
    assert QHitter(variant="paper", **RATIOS).parts(1000) == (0, 150, 50)
    assert QHitter(first_ratio=0.0, **RATIOS).parts(1000) == (0, 150, 50)


@pytest.mark.parametrize(
    ("knobs", "n", "parts"),
    [
        ({"kv_ratio": 0.2}, 1000, (70, 80, 50)),
        ({"kv_ratio": 0.4}, 1000, (70, 230, 100)),
        ({"kv_ratio": 0.5}, 1000, (70, 305, 125)),
        ({"kv_ratio": 0.1}, 1000, (35, 40, 25)),
        ({"kv_size": 128}, 4096, (44, 52, 32)),
        ({"kv_size": 2}, 100, (0, 1, 1)),
        ({"kv_size": 128, "variant": "paper"}, 4096, (0, 96, 32)),
        ({"kv_size": 100, "first_ratio": 0.5}, 1000, (75, 0, 25)),
    ],
)
def test_a_budget_is_three_parts_of_heavy_hitters_and_one_of_recent_tokens(knobs, n, parts):
    assert QHitter(**knobs).parts(n) == parts


# spec 5, Q-Hitter: zero vector, constant vector, [1, 1.5, 2]
def test_what_the_zero_point_loses():
    stage = QHitter(bits=4)
    assert stage.pack_keys(torch.zeros(1, 1, 8)).dequantise(torch.float32).eq(0).all()
    for c in (3.0, -0.5):
        x = torch.full((1, 1, 1, 64), c)
        assert float(stage.new_token_state(x, x)["friendly"]) == 1  # alone, so that its normalised errors are 0
        (loss,) = QHitter(variant="paper").new_token_state(x, x)["k_loss"].flatten().tolist()
        assert loss == pytest.approx(abs(c) * math.sqrt(64), rel=1e-3)
    back = stage.pack_values(torch.tensor([[[1.0, 1.5, 2.0]]])).dequantise(torch.float32)
    torch.testing.assert_close(back, torch.ones(1, 1, 3), atol=1e-3, rtol=1e-3)


CASES = [(per, hk, variant) for per in ("kv_head", "query_head") for hk in (2, 4) for variant in ("code", "paper")]


@grid(("per", "hk", "variant"), CASES)
@grid("lam", [0.0, 0.3, 1])
@grid("bits", [4, 2])
def test_tokens_are_those_of_a_slow_reference(per, hk, variant, lam, bits):
    n, q, k = 48, ref.grid(4, 48, 8, seed=hk), ref.grid(hk, 48, 8, seed=hk + 9)
    v = ref.grid(hk, n, 8, seed=7)
    dense, obs = ref.make_layer(q, k, v, per=per)
    entry = {"method": "qhitter", "kv_size": 20, "variant": variant, "lam": lam, "bits": bits, "per": per}
    calibrated = chain_of(entry)
    cache = calibrated.compress(dense, obs)
    heads = calibrated.heads(hk, 4)
    mass = ref.stored(ref.row_sums(ref.attention(q, k), n), heads)
    wide = [[e[h // (heads // hk)] for h in range(heads)] for e in (slow.losses(k, bits), slow.losses(v, bits))]
    parts = calibrated.selector.parts(n)
    chosen = slow.choose(mass, *wide, [set(range(n))] * heads, n, parts, 20, n - 1, lam, variant)
    positions = [sorted(h) for h in chosen]
    assert ref.kept(cache) == positions and parts[2] == 5
    actual = values(cache)
    torch.testing.assert_close(actual[0], ref.rounded(at(k, positions, heads), bits))
    torch.testing.assert_close(actual[1], ref.rounded(at(v, positions, heads), bits))


def layer_of(kinds, sums):
    """One head whose token j has the vector of kind kinds[j] as key and value, and attention sums[j]."""
    vectors = torch.tensor([[1.0, -1, 0, 0], [1.0, 1.4, 1.8, 2.9], [0.3, 1.0, -0.7, 0.1]])
    k = vectors[kinds][None]
    obs = Observation(layer=0, n_layers=1, n=len(kinds), scale=0.5, colsums=torch.tensor([sums]))
    return ops.dense(k, k.clone(), heads=1, query_heads=1), obs


@pytest.mark.parametrize("variant", ["code", "paper"])
@pytest.mark.parametrize("lam", [0.5, 1.0])
def test_ties_go_to_the_lower_index(variant, lam):
    generator = torch.Generator().manual_seed(3)
    kinds = torch.randint(0, 3, (30,), generator=generator).tolist()
    sums = torch.randint(0, 3, (30,), generator=generator).float().tolist()
    dense, obs = layer_of(kinds, sums)
    stage = QHitter(kv_size=13, bits=4, variant=variant, lam=lam)
    loss = slow.losses(dense.segments[0].k, 4)
    (chosen,) = slow.choose([sums], loss, loss, [set(range(30))], 30, stage.parts(30), 13, 29, lam, variant)
    assert ref.kept(stage.compress(dense, obs)) == [sorted(chosen)]
    (flat,) = ref.kept(QHitter(kv_size=13, variant=variant, lam=lam).compress(*layer_of([0] * 30, [1.0] * 30)))
    assert flat == [*range(9), *range(26, 30)]


def test_tokens_that_are_hard_to_quantise_leave_and_the_first_share_is_safe():
    """A constant vector is lost by the zero point, so that attention alone must save it."""
    kinds, sums = [0, 1, 0, 1, 0, 0, 0, 0, 0, 0], [1.0, 9, 2, 8, 3, 2, 2, 2, 0, 0]
    dense, obs = layer_of(kinds, sums)
    friendly = QHitter(heavy_ratio=0.4, recent_ratio=0.1, first_ratio=0.0, lam=0.1)
    assert ref.kept(friendly.compress(dense, obs)) == [[2, 4, 5, 6, 9]]
    saved = QHitter(heavy_ratio=0.4, recent_ratio=0.1, first_ratio=0.1, lam=0.1)
    assert saved.parts(10) == (1, 3, 1)
    assert ref.kept(saved.compress(dense, obs)) == [[1, 2, 4, 5, 9]]
    heavy = QHitter(heavy_ratio=0.4, recent_ratio=0.1, first_ratio=0.0, lam=1)
    assert ref.kept(heavy.compress(dense, obs)) == [[1, 2, 3, 4, 9]]


# spec 5, Q-Hitter: lam = 1 is H2O+Q
@pytest.mark.parametrize("per", ["kv_head", "query_head"])
@pytest.mark.parametrize("method", ["qhitter", "h2o+quant"])
def test_attention_alone_is_h2o_with_quantised_tokens(per, method):
    n = 1000
    dense, obs = ref.make_layer(ref.grid(4, n, 8, seed=1), ref.grid(2, n, 8, seed=2), per=per)
    lam = {"lam": 1} if method == "qhitter" else {}
    packed = chain_of({"method": method, "per": per, **RATIOS, **lam}).compress(dense, obs)
    h2o = {"method": "h2o", "variant": "orig", "heavy_ratio": 0.149, "recent_ratio": 0.05, "per": per}
    exact = chain_of(h2o).compress(dense, obs)
    assert ref.kept(packed) == ref.kept(exact) and len(ref.kept(packed)[0]) == 199
    torch.testing.assert_close(values(packed)[0], ref.rounded(exact.segments[0].k, 4))
    torch.testing.assert_close(values(packed)[1], ref.rounded(exact.segments[0].v, 4))


DECODES = [(v, lam, b) for v in ("code", "paper") for lam, b in ((0.5, 4), (0.2, 2), (1.0, 3))]


@pytest.mark.parametrize(("variant", "lam", "bits"), DECODES)
def test_decoding_equals_a_slow_simulation(variant, lam, bits):
    model, ids = build("llama"), prompt(26, 8)
    entry = {"method": "qhitter", "kv_size": 12, "variant": variant, "lam": lam, "bits": bits}
    (cache,) = kvbench.prefill(model, ids, [entry])
    parts = cache.chain.selector.parts(26)
    answer, kept_tokens = slow.decoding(
        model, ids, 10, lambda x: ref.rounded(x, bits), slow.qhitter(26, bits, parts, lam, variant)
    )
    assert kvbench.generate(model, [cache], 10) == [answer]
    longer = kvbench.extend(model, cache, torch.tensor(answer))
    assert [ref.kept(layer) for layer in longer.layers] == kept_tokens
    start = [ref.kept(layer) for layer in cache.layers]
    assert any(
        set(a) - {*range(26)} != set() and set(a) - set(b) for a, b in zip(kept_tokens[0], start[0], strict=True)
    )


@pytest.mark.parametrize("variant", ["code", "paper"])
def test_evicting_after_a_step_equals_a_slow_simulation(variant):
    model, ids = build("llama"), prompt(26, 8)
    (cache,) = kvbench.prefill(
        model, ids, [{"method": "qhitter", "kv_size": 12, "variant": variant, "evict_after": True}]
    )
    decide = slow.qhitter(26, 4, cache.chain.selector.parts(26), 0.5, variant, after=True)
    answer, kept_tokens = slow.decoding(model, ids, 10, lambda x: ref.rounded(x, 4), decide)
    assert kvbench.generate(model, [cache], 10) == [answer]
    longer = kvbench.extend(model, cache, torch.tensor(answer))
    assert [ref.kept(layer) for layer in longer.layers] == kept_tokens and len(kept_tokens[0][0]) == 13


@pytest.mark.parametrize("family", ["gpt_neox", "opt"])
def test_decoding_without_grouped_heads_equals_a_slow_simulation(family):
    model, ids = build(family), prompt(24, 5)
    (cache,) = kvbench.prefill(model, ids, [{"method": "qhitter", "kv_size": 12, "bits": 3}])
    decide = slow.qhitter(24, 3, cache.chain.selector.parts(24), 0.5, "code")
    answer, kept_tokens = slow.decoding(model, ids, 8, lambda x: ref.rounded(x, 3), decide, heads=4)
    assert kvbench.generate(model, [cache], 8) == [answer]
    longer = kvbench.extend(model, cache, torch.tensor(answer))
    assert [ref.kept(layer) for layer in longer.layers] == kept_tokens


@pytest.mark.parametrize("variant", ["code", "paper"])
def test_new_tokens_that_come_together_start_as_if_they_came_alone(variant):
    stage, k, v = QHitter(variant=variant), ref.grid(2, 4, 3, 8, seed=1), ref.grid(2, 4, 3, 8, seed=2)
    together = stage.new_token_state(k, v)
    assert set(together) == ({"friendly"} if variant == "code" else {"k_loss", "v_loss"})
    for t in range(3):
        alone = stage.new_token_state(k[:, :, t : t + 1], v[:, :, t : t + 1])
        assert all(torch.equal(alone[name][..., 0], x[..., t]) for name, x in together.items())


@pytest.mark.parametrize("variant", ["code", "paper"])
def test_a_short_prompt_fills_its_budget_while_decoding(variant):
    model, ids = build("llama"), prompt(6, 2)
    (cache,) = kvbench.prefill(model, ids, [{"method": "qhitter", "kv_size": 10, "variant": variant}])
    decide = slow.qhitter(6, 4, cache.chain.selector.parts(6), 0.5, variant)
    answer, kept_tokens = slow.decoding(model, ids, 12, lambda x: ref.rounded(x, 4), decide)
    assert kvbench.generate(model, [cache], 12) == [answer]
    longer = kvbench.extend(model, cache, torch.tensor(answer))
    assert [ref.kept(layer) for layer in longer.layers] == kept_tokens and len(kept_tokens[0][0]) == 10


@pytest.mark.parametrize("variant", ["code", "paper"])
def test_free_slots_of_a_smaller_budget_set_no_scale(variant):
    """Rows of a batch hold different budgets: what is chosen in each is what it chooses alone."""
    model = build("llama")
    entry = {"method": "qhitter", "kv_ratio": 0.3, "variant": variant, "bits": 2, "lam": 0.4}
    caches = [kvbench.prefill(model, prompt(n, n), [entry])[0] for n in (40, 100, 64)]
    states = [held_after(model, [c], 16)[0] for c in caches]
    assert held_after(model, caches, 16) == states


def held_after(model, caches, steps):
    """Positions held per row, layer and head after feeding ``steps`` fixed tokens to all."""
    batch, tokens = build_batch(model, caches, steps), prompt(steps, 5)
    seen = torch.tensor([c.seen for c in caches])
    with torch.no_grad(), attached(model):
        for t in range(steps):
            step(model, batch, tokens[t].expand(len(caches), 1), (seen + t)[:, None])
    rows = [layer.formats[0][1] for layer in batch.with_keys]
    return [[r.segments(i, None)[0].positions.tolist() for r in rows] for i in range(len(caches))]


@pytest.mark.parametrize("seed", [8, 9])
def test_flexgen_behind_h2o_packs_a_token_after_its_own_step(seed):
    model, ids = build("llama"), prompt(26, seed)
    (cache,) = kvbench.prefill(model, ids, [{"method": "h2o+flexgen", "variant": "orig", "kv_size": 12, "bits": 2}])
    audit(cache, cache_shape(model))
    answer, kept_tokens = slow.decoding(model, ids, 10, lambda x: slow.min_max(x, 2), slow.h2o(26, 6, 6), late=True)
    assert kvbench.generate(model, [cache], 10) == [answer]
    longer = kvbench.extend(model, cache, torch.tensor(answer))
    assert [ref.kept(layer) for layer in longer.layers] == kept_tokens
    at_once, _ = slow.decoding(model, ids, 10, lambda x: slow.min_max(x, 2), slow.h2o(26, 6, 6))
    assert at_once != answer


def test_bytes_at_head_dimension_128():
    """Spec 2.17: 4 bits are 3.76 times smaller, with the running scores 3.56 times, not 4 times."""
    full = 2 * 128 * 2
    for bits, payload in ((8, 264), (4, 136), (3, 104), (2, 72)):
        (block,) = chain_of({"method": "qhitter", "bits": bits}).layout(1, 128, 2)
        assert block.key_bytes == block.value_bytes == 128 * bits / 8 + 4
        assert (block.key_bytes + block.value_bytes, block.slot_overhead) == (payload, 8)
    (four,) = chain_of("qhitter").layout(1, 128, 2)
    assert full / (four.key_bytes + four.value_bytes) == pytest.approx(3.76, abs=0.005)
    assert full / (four.key_bytes + four.value_bytes + four.slot_overhead) == pytest.approx(3.56, abs=0.005)
    (paper,) = chain_of({"method": "qhitter", "variant": "paper"}).layout(1, 128, 2)
    assert paper.slot_overhead == 12


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_bytes_held_are_those_of_the_formula_before_and_after_decoding(bits):
    k = torch.randn(2, 60, 128, generator=torch.Generator().manual_seed(bits)).half()
    dense, obs = ref.make_layer(k.repeat_interleave(2, 0).float(), k, k.flip(1))
    (s,) = chain_of({"method": "qhitter", "kv_size": 20, "bits": bits}).compress(dense, obs).segments
    assert storage_bytes(s.payload()) == 2 * 2 * 20 * (128 * bits // 8 + 4)
    assert storage_bytes(s.state.values()) == 8 * 2 * 20
    model = build("llama")
    (cache,) = kvbench.prefill(model, prompt(50, 3), [{"method": "qhitter", "kv_size": 20, "bits": bits}])
    measured = audit(cache, cache_shape(model))
    assert measured.payload == 3 * 2 * 2 * 20 * (16 * bits // 8 + 4)
    assert measured.overhead == 3 * 2 * 20 * (4 + 8)
    assert kvbench.extend(model, cache, prompt(9, 4)).nbytes() == cache.nbytes()


def test_slots_hold_codes_and_never_the_whole_cache_dequantised(monkeypatch):
    from kvbench.kv import packed

    # plain PyTorch: the C functions dequantise a block at a time in memory of their own
    monkeypatch.setenv("KVBENCH_KERNELS", "off")
    model, largest = build("llama"), []
    (cache,) = kvbench.prefill(model, prompt(50, 3), [{"method": "qhitter", "kv_size": 40}])
    batch = build_batch(model, [cache], 5)
    stores = [layer.formats[0][1].store for layer in batch.with_keys]
    assert all(isinstance(x, packed.Packed) for store in stores for x in (store.k, store.v))
    real, blocks = packed.MinMax.dequantise, packed.MinMax.blocks
    monkeypatch.setattr(packed.MinMax, "blocks", lambda self: blocks(self, 8 * 16))

    def watched(self, *rest, **more):
        largest.append(self.shape.numel())
        return real(self, *rest, **more)

    monkeypatch.setattr(packed.MinMax, "dequantise", watched)
    with torch.no_grad(), attached(model):
        step(model, batch, torch.tensor([[5]]), torch.tensor([[50]]))
    assert len(largest) > 3 * 2 * 2 * 4 and max(largest) == 8 * 16


def test_only_column_sums_are_asked_for():
    assert QHitter().needs(100) == Needs(colsums=True)
    dense, obs = ref.make_layer(ref.grid(2, 20, 8), ref.grid(2, 20, 8))
    with pytest.raises(ValueError, match="column sums"):
        QHitter(kv_size=8).compress(dense, replace(obs, colsums=None))


@pytest.mark.parametrize("other", ["think", "l1", "kivi", "flexgen"])
@pytest.mark.parametrize("method", ["qhitter", "h2o+quant"])
def test_nothing_else_can_pack_or_prune_its_tokens(method, other):
    with pytest.raises(UsageError, match=rf"qhitter.* itself quantises every token.*{other}"):
        chain_of(f"{method}+{other}")


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("h2o+kivi", "kivi quantises tokens together"),
        ("h2o+think+flexgen", "think then leaves new tokens whole"),
        ("h2o+twilight", "masks caches"),
    ],
)
def test_what_cannot_stand_behind_eviction_says_why(method, why):
    with pytest.raises(UsageError, match=f"h2o evicts tokens while decoding.*{why}"):
        chain_of({"method": method, "variant": "orig"})


@pytest.mark.parametrize(
    ("knobs", "why"),
    [
        ({"bits": 5}, "bits=5"),
        ({"bits": 1}, "bits=1"),
        ({"lam": 1.5}, "lam=1.5"),
        ({"variant": "repo"}, "variant='repo'"),
        ({"heavy_ratio": 0.2}, "heavy_ratio=0.2.*together with recent_ratio"),
        ({"heavy_ratio": 0.05, "recent_ratio": 0.05}, "heavy_ratio=0.05.*at least first_ratio=0.07"),
        ({"heavy_ratio": 0.6, "recent_ratio": 0.5}, "recent_ratio=0.5"),
        ({"first_ratio": 1}, "first_ratio=1"),
        ({"v_alias": "yes"}, "v_alias='yes'"),
        ({"kv_size": 1}, "kv_size=1"),
    ],
)
def test_impossible_knobs_are_refused(knobs, why):
    with pytest.raises(UsageError, match=rf"method\.qhitter\.{why}"):
        chain_of({"method": "qhitter", **knobs})
