"""CAKE: one budget over all layers, exact in sum, the same by cascade as at once, held while decoding."""

import itertools
import math
from dataclasses import replace
from statistics import fmean, variance

import pytest
import torch
from support import method_reference as ref
from support.families import build, prompt
from support.grids import grid

import kvbench
from kvbench.audit.prompt_audit import audit
from kvbench.base.errors import Refused, UsageError
from kvbench.engine.layer_by_layer import CompressedLayers
from kvbench.engine.step import build as build_batch
from kvbench.engine.step import step
from kvbench.kv import ops
from kvbench.kv.apportion import proportional_shares, round_shares
from kvbench.kv.exact_attention import causal_softmax
from kvbench.methods.cake import SLACK, Cake, compute_variance
from kvbench.methods.core.resolve import chain_of as resolved
from kvbench.models.interface import attached, cache_shape

N, D, W, LAYERS = 40, 8, 4, 5
SHAPES = {"mha": (3, 3), "gqa": (4, 2), "mqa": (4, 1)}


def layers(shape, per="kv_head", data="random", n=N):
    """Return (q, k, dense, obs) of every layer; queries grow with depth, so that layers attend ever more sharply."""
    hq, hk = SHAPES[shape]
    for i in range(LAYERS):
        q, k = ref.grid(hq, n, D, seed=i) * (i + 1) / 2, ref.grid(hk, n, D, seed=i + 50)
        if data == "ties":
            k = k[:, torch.arange(n) % 7]
        yield q, k, *ref.make_layer(q, k, per=per, layer=i, n_layers=LAYERS)


def chain_of(**knobs):
    return resolved({"method": "cake", "kv_size": 12, "window": W, **knobs})


def cascade(chain, made):
    collected = CompressedLayers(chain)
    for _, _, dense, obs in made:
        collected.add_layer(dense, obs)
    return collected.caches


def slow(attns, heads, size, w, gamma=200.0, kernel=5, tau1=1.0, tau2=1.0):
    """Kept tokens per layer and head by explicit loops; budgets by handing out one token's worth at a time."""
    n = len(attns[0][0])
    room, scores, preference = n - w, [], []
    for attn in attns:
        disp = -sum(a * math.log(a + 1e-10) for head in attn for row in head[-w:] for a in row[:room])
        columns = [[[row[j] for row in head[-w:]] for j in range(room)] for head in attn]
        var = sum(variance(c) for head in columns for c in head)
        preference.append(disp ** (1 / tau1) * var ** (1 / tau2))
        ours = ref.stored([[fmean(c) + gamma * variance(c) for c in head] for head in columns], heads)
        half = kernel // 2
        scores.append([[sum(s[max(0, j - half) : j + half + 1]) / kernel for j in range(room)] for s in ours])
    budgets = slow_budgets(preference, (size - w) * len(attns), room)
    return [
        [ref.top(s, b) + list(range(room, n)) for s in layer] for layer, b in zip(scores, budgets, strict=True)
    ], budgets


def slow_budgets(preference, total, room):
    full = set()
    while True:
        free = [i for i in range(len(preference)) if i not in full]
        mass = sum(preference[i] for i in free)
        exact = {i: (total - room * len(full)) * preference[i] / mass for i in free}
        over = {i for i in free if exact[i] >= room}
        if not over:
            break
        full |= over
    budgets = [room if i in full else int(exact[i]) for i in range(len(preference))]
    for i in sorted(free, key=lambda i: budgets[i] - exact[i])[: total - sum(budgets)]:
        budgets[i] += 1
    return budgets


@pytest.mark.parametrize("taus", [(1.0, 1.0), (1.6, 0.4)])
@pytest.mark.parametrize("data", ["random", "ties"])
@pytest.mark.parametrize("per", ["kv_head", "query_head"])
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_are_those_of_a_slow_loop(shape, per, data, taus):
    built = list(layers(shape, per, data))
    caches = cascade(chain_of(per=per, tau1=taus[0], tau2=taus[1]), built)
    attns = [ref.attention(q, k) for q, k, *_ in built]
    wanted, budgets = slow(attns, caches[0].heads, 12, W, tau1=taus[0], tau2=taus[1])
    assert [ref.kept(c) for c in caches] == wanted
    assert sum(budgets) == (12 - W) * LAYERS and len(set(budgets)) > 1


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [6, 12, 20, 34])
def test_the_cascade_equals_one_pass_at_the_end(shape, size):
    built = list(layers(shape))
    stage = Cake(kv_size=size, window=W)
    at_once = stage.rebalance([stage.compress(dense, obs) for _, _, dense, obs in built], LAYERS)
    caches = cascade(chain_of(kv_size=size), built)
    assert [ref.kept(c) for c in caches] == [ref.kept(c) for c in at_once]
    for a, b in zip(caches, at_once, strict=True):
        assert a.segments[0].state.keys() == {"row"} == b.segments[0].state.keys()
        assert torch.equal(a.segments[0].state["row"], b.segments[0].state["row"])


def test_layers_shrink_as_others_come_in_and_dense_ones_go_at_once():
    chain, collected, sizes = chain_of(), None, []
    collected = CompressedLayers(chain)
    for _, _, dense, obs in layers("gqa"):
        collected.add_layer(dense, obs)
        sizes.append([c.tokens for c in collected.caches])
        bound = (12 - W) * LAYERS + W * len(sizes[-1]) + len(sizes[-1])
        assert sum(sizes[-1]) <= bound * (1 + SLACK)
    for before, after in itertools.pairwise(sizes):
        assert all(a >= b for a, b in zip(before, after, strict=False))
    assert sum(sizes[-1]) == 12 * LAYERS


@grid("seed", range(200))
def test_budgets_add_up_and_their_bounds_only_fall(seed):
    draw = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, 9, (), generator=draw))
    weights = (torch.randn(count, generator=draw) * 4).exp().double().tolist()
    if seed % 3 == 0:
        weights[0] = 0.0
    room = int(torch.randint(1, 60, (), generator=draw))
    total = int(torch.randint(0, room * count + 1, (), generator=draw))
    sizes = round_shares(proportional_shares(weights, total, room), total)
    assert sum(sizes) == total and all(0 <= b <= room for b in sizes)
    for i in range(1, count + 1):
        bounds = [min(room, math.ceil(x + 1e-6)) for x in proportional_shares(weights[:i], total, room)]
        assert all(b <= u for b, u in zip(sizes, bounds, strict=False))


@grid("seed", range(20))
def test_the_variance_over_queries_is_that_of_pytorch(seed):
    generator = torch.Generator().manual_seed(seed)
    rows = (torch.randn(3, 2 + seed, 65, generator=generator) * (1 + seed % 7)).softmax(dim=-1)[:, :, :60]
    assert torch.equal(compute_variance(rows), rows.var(dim=1))
    assert compute_variance(rows[:, :1]).eq(0).all()


def test_shares_by_hand():
    assert proportional_shares([1, 1, 2], 40, 100) == [10, 10, 20]
    assert proportional_shares([1, 1, 8], 40, 20) == [10, 10, 20]
    assert proportional_shares([0, 0, 0], 30, 20) == [10, 10, 10]
    assert proportional_shares([0, 5], 30, 20) == [10, 20]
    assert round_shares([3.5, 3.5, 3.0], 10) == [4, 3, 3]


# spec 5, CAKE: equal P
def test_equal_preferences_give_every_layer_the_same():
    _, _, dense, obs = next(layers("gqa"))
    same = [(None, None, dense, replace(obs, layer=i)) for i in range(LAYERS)]
    assert [c.tokens for c in cascade(chain_of(), same)] == [12] * LAYERS


# spec 5, CAKE: identical window rows
def test_identical_rows_have_no_variance_and_layers_share_equally():
    q, k = torch.zeros(2, N, D), torch.zeros(2, N, D)
    q[:, -W:, 0] = k[:, 5, 0] = 40
    built = [(q, k, *ref.make_layer(q, k, layer=i, n_layers=LAYERS)) for i in range(LAYERS)]
    assert Cake(window=W).compress(*built[0][2:]).weight == 0
    caches = cascade(chain_of(), built)
    assert [c.tokens for c in caches] == [12] * LAYERS
    assert all(5 in head for c in caches for head in ref.kept(c))


@pytest.mark.parametrize(("n", "kept"), [(13, 13), (16, 16), (17, 12)])
def test_prompts_up_to_budget_and_window_are_kept_whole(n, kept):
    caches = cascade(chain_of(), layers("gqa", n=n))
    assert fmean(c.tokens for c in caches) == kept


def test_frozen_layers_take_no_part():
    caches = cascade(chain_of(frozen_layers=[1, 3]), layers("gqa"))
    assert [caches[i].tokens for i in (1, 3)] == [N, N]
    assert sum(caches[i].tokens for i in (0, 2, 4)) == 36


# spec 5, CAKE: the budgets add up to (C - w) L
@pytest.mark.parametrize("per", ["kv_head", "query_head"])
@pytest.mark.parametrize("evict", [True, False])
def test_the_audit_holds_the_sum_over_layers(per, evict):
    model = build("llama")
    entry = {"method": "cake", "kv_size": 20, "window": 8, "decode_evict": evict}
    (cache,) = kvbench.prefill(model, prompt(70), [entry], per=per)
    measured = audit(cache, cache_shape(model))
    assert measured.kept == measured.nominal == 20
    heads = 4 if per == "query_head" else 2
    assert measured.overhead == 3 * heads * 20 * (8 if evict else 4)
    less = ops.select(cache.layers[0], torch.arange(1, cache.layers[0].tokens)[None])
    less = replace(less, decided=(less.tokens,) * heads)
    with pytest.raises(Refused, match="over all layers and heads"):
        audit(replace(cache, layers=(less, *cache.layers[1:])), cache_shape(model))


@pytest.mark.parametrize("per", ["kv_head", "query_head"])
def test_later_stages_run_once_the_layers_are_balanced(per):
    model = build("llama")
    knobs = {"kv_size": 20, "cake.window": 8, "decode_evict": False}
    plain, thin = (
        kvbench.prefill(model, prompt(70), [{"method": m, **knobs, **more}], per=per)[0]
        for m, more in (("cake", {}), ("think+cake", {"recent": 4}))
    )
    audit(thin, cache_shape(model))
    for a, b in zip(plain.layers, thin.layers, strict=True):
        assert ref.kept(a) == ref.kept(b)
        assert b.segments[0].key_channels is not None
    with pytest.raises(UsageError, match="evicts tokens while decoding"):
        resolved("cake+think+kivi")


@pytest.mark.parametrize("per", ["kv_head", "query_head"])
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_while_decoding_each_layer_holds_its_budget_by_the_current_row(family, per):
    """Each step against loops over the slots: what goes has the lowest pooled attention of the query before."""
    model = build(family)
    entry = {"method": "cake", "kv_size": 16, "window": 6}
    caches = [kvbench.prefill(model, prompt(n, n), [entry], per=per)[0] for n in (60, 9, 35)]
    batch = build_batch(model, caches, 30)
    tokens, seen = torch.tensor([[5]] * 3), torch.tensor([c.seen for c in caches])
    evicted = 0
    with torch.no_grad(), attached(model):
        for t in range(20):
            before = [snapshot(b.formats[0][1]) for b in batch.with_keys]
            step(model, batch, tokens, (seen + t)[:, None])
            for i, (old, new) in enumerate(zip(before, batch.with_keys, strict=True)):
                after = snapshot(new.formats[0][1])
                for b, h in itertools.product(range(3), range(len(old[0]))):
                    now, budget = int(seen[b]) + t, 22 if b == 1 else caches[b].layers[i].tokens
                    wanted = pooled_choice(old[b][h], now, budget - 1, 6)
                    evicted += len(old[b][h]) - len(wanted)
                    assert set(after[b][h]) == {*wanted, now}
    assert evicted > 100
    assert batch.with_keys[0].keys is None


def pooled_choice(held, now, count, w):
    order = sorted(held)
    old = [p for p in order if p <= now - w]
    score = {p: math.fsum(held[o] for o in old[max(0, i - 2) : i + 3]) / 5 for i, p in enumerate(old)}
    young = [p for p in order if p > now - w]
    return {*young, *sorted(old, key=lambda p: (-score[p], p))[: count - len(young)]}


def snapshot(slots):
    """Return {position: attention of the last query} per row and head."""
    rows = zip(slots.positions.tolist(), slots.state["row"].tolist(), slots.valid.tolist(), strict=True)
    return [[{p: s for p, s, ok in zip(*head, strict=True) if ok} for head in zip(*row, strict=True)] for row in rows]


def test_the_first_row_is_that_of_the_last_prompt_token():
    q, k, dense, obs = next(layers("gqa"))
    row = Cake(kv_size=12, window=W).compress(dense, obs).segments[0].state["row"]
    torch.testing.assert_close(row, causal_softmax(q, k, 0.5)[:, -1].view(2, 2, N).mean(dim=1))


@pytest.mark.parametrize("n", [9, 60])
def test_extending_goes_on_with_the_same_budgets(n):
    model = build("llama")
    (cache,) = kvbench.prefill(model, prompt(n), [{"method": "cake", "kv_size": 16, "window": 6}])
    longer = kvbench.extend(model, cache, prompt(30, 5))
    for old, new in zip(cache.layers, longer.layers, strict=True):
        assert new.tokens == (22 if n == 9 else old.tokens)
    again = kvbench.extend(model, longer, prompt(5, 6))
    assert [c.tokens for c in again.layers] == [c.tokens for c in longer.layers]


@pytest.mark.parametrize(
    ("knob", "value"),
    [("window", 1), ("kernel", 4), ("gamma", -1), ("tau1", 0), ("tau2", -0.5), ("decode_evict", "maybe")],
)
def test_impossible_knobs_are_refused(knob, value):
    with pytest.raises(UsageError, match=rf"method\.cake\.{knob}"):
        resolved({"method": "cake", knob: value})
