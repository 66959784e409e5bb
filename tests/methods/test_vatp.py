"""VATP: the base's score times the norm of the value, sinks within the budget, at prefill and while decoding."""

import itertools

import pytest
import torch
from support import method_reference as ref
from support.families import build, prompt
from support.grids import grid

import kvbench
from kvbench.audit.prompt_audit import audit
from kvbench.base.errors import UsageError
from kvbench.engine.step import build as build_batch
from kvbench.engine.step import step
from kvbench.methods.core.contract import Capacity, with_sinks
from kvbench.methods.core.resolve import chain_of
from kvbench.methods.vatp import Vatp
from kvbench.models.interface import attached, cache_shape
from kvbench.storage.roles import Slots

N, SIZE, D = 26, 13, 8
SHAPES = {"mha": (3, 3), "gqa": (4, 2), "mqa": (4, 1)}
BASES = {
    "h2o": {"window": 4, "variant": "all"},
    "h2o-win": {"window": 4, "variant": "win"},
    "h2o-orig": {"variant": "orig"},
    "snapkv": {"window": 4, "kernel": 3, "pooling": "max"},
    "scissorhands-code": {"window": 8, "recent": 4, "variant": "code"},
    "scissorhands-paper": {"window": 8, "recent": 4, "variant": "paper"},
}


def values(heads, data):
    v = ref.grid(heads, N, D, seed=3)
    return v[:, torch.arange(N) % 5] if data == "ties" else v


def layer(shape, data, per, v=None):
    hq, hk = SHAPES[shape]
    q, k = ref.grid(hq, N, D, seed=1), ref.grid(hk, N, D, seed=2)
    if data == "ties":
        k = k[:, torch.arange(N) % 5]
    return q, k, *ref.make_layer(q, k, values(hk, data) if v is None else v, per=per)


def entry(base, **more):
    return {"method": f"vatp+{base.split('-')[0]}", "kv_size": SIZE, **BASES[base], **more}


def norm(vector, kind):
    return {"l1": sum(map(abs, vector)), "l2": sum(x * x for x in vector) ** 0.5, "linf": max(map(abs, vector))}[kind]


def base_scores(base, attn, heads):
    """Return the scores of the base for every prompt token, and its window."""
    if base == "h2o-orig":
        return ref.stored(ref.row_sums(attn, N), heads), SIZE - SIZE // 2
    scores = ref.stored(ref.row_sums(attn, {"h2o": N, "h2o-win": 4, "snapkv": 4}.get(base, 8)), heads)
    if base == "snapkv":
        scores = [[max(s[max(0, j - 1) : min(N - 4, j + 2)]) for j in range(N - 4)] for s in scores]
    return scores, 4


# spec 5, VATP: the first F always stay
@grid("kind", ["l1", "l2", "linf"])
@grid("data", ["random", "ties"])
@grid("per", ["kv_head", "query_head"])
@grid("shape", SHAPES)
@grid("base", BASES)
def test_tokens_are_those_of_a_slow_loop(base, shape, per, data, kind):
    q, k, dense, obs = layer(shape, data, per)
    v = dense.segments[0].v.tolist()
    cache = chain_of(entry(base, per=per, norm=kind, sinks=3)).compress(dense, obs)
    scores, window = base_scores(base, ref.attention(q, k), dense.heads)
    for h, kept_positions in enumerate(ref.kept(cache)):
        ours = v[h // (dense.heads // len(v))]
        weighed = [s * norm(x, kind) for s, x in zip(scores[h][: N - window], ours, strict=False)]
        chosen = ref.top(weighed[3:], SIZE - window - 3)
        assert kept_positions == [0, 1, 2, *(j + 3 for j in chosen), *range(N - window, N)]


# spec 5, VATP: constant norms and F=0
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("per", ["kv_head", "query_head"])
def test_constant_norms_without_sinks_change_nothing(base, per):
    signs = ref.grid(2, N, D, seed=9).sign() + (ref.grid(2, N, D, seed=9) == 0)
    _, _, dense, obs = layer("gqa", "random", per, v=signs / 2)
    plain = {**entry(base, per=per), "method": base.split("-")[0]}
    assert ref.kept(chain_of(entry(base, per=per, sinks=0)).compress(dense, obs)) == ref.kept(
        chain_of(plain).compress(dense, obs)
    )


# spec 5, VATP: all v scaled by c
@pytest.mark.parametrize("base", BASES)
def test_scaling_all_values_leaves_the_choice(base):
    _, _, dense, obs = layer("gqa", "random", "kv_head")
    _, _, larger, _ = layer("gqa", "random", "kv_head", v=4 * values(2, "random"))
    chain = chain_of(entry(base))
    assert ref.kept(chain.compress(dense, obs)) == ref.kept(chain.compress(larger, obs))


@pytest.mark.parametrize("order", itertools.permutations(["vatp", "h2o", "think"]))
def test_any_order_is_one_chain(order):
    chain = chain_of("+".join(order))
    assert [s.id for s in chain.stages] == ["h2o", "vatp", "think"]
    assert chain.identity() == chain_of("h2o+vatp+think").identity()


@pytest.mark.parametrize(
    ("capacity", "sinks", "wanted"),
    [
        (Capacity(20, 0, 8), 4, Capacity(20, 4, 8)),
        (Capacity(20, 6, 8), 4, Capacity(20, 6, 8)),
        (Capacity(10, 0, 5), 20, Capacity(10, 5, 5, shrunk=True)),
        (Capacity(20, 0, 18), 4, Capacity(20, 4, 16, shrunk=True)),
        (Capacity(100, 0, 8), 4, Capacity(100, 4, 8)),
    ],
)
def test_sinks_count_inside_the_budget(capacity, sinks, wanted):
    assert with_sinks(capacity, Vatp(sinks=sinks).sink_size(), 100) == wanted


def test_the_papers_budgets_keep_its_sinks_inside_the_heavy_half():
    chain = chain_of(
        {
            "method": "vatp+h2o",
            "variant": "orig",
            "heavy_ratio": 0.25,
            "recent_ratio": 0.25,
            "sinks": 20,
        }
    )
    assert chain.capacity(1001) == Capacity(500, 20, 250)


@pytest.mark.parametrize(
    ("knobs", "match"),
    [
        ({"norm": "l3"}, r"method\.vatp\.norm"),
        ({"sinks": -1}, r"method\.vatp\.sinks"),
        ({"sinks": 2.5}, r"method\.vatp\.sinks"),
        ({"sinks": 16, "kv_size": 24, "window": 8}, r"method\.vatp\.sinks=16.*fewer than the 16 tokens"),
        ({"sinks": 6, "kv_size": 12, "variant": "orig"}, r"method\.vatp\.sinks=6.*fewer than the 6"),
    ],
)
def test_impossible_knobs_are_refused(knobs, match):
    with pytest.raises(UsageError, match=match):
        chain_of({"method": "vatp+h2o", **knobs})


def test_it_decorates_attention_scores_only():
    for base in ("keynorm", "streamingllm", "random"):
        with pytest.raises(UsageError, match=f"not those of {base}"):
            chain_of(f"{base}+vatp")


ORIG = {"method": "h2o+vatp", "variant": "orig", "kv_size": 12, "sinks": 3}
EVICTING = {
    "h2o": ORIG,
    "code": {**ORIG, "method": "scissorhands+vatp", "variant": "code", "window": 8, "recent": 6},
    "paper": {**ORIG, "method": "scissorhands+vatp", "variant": "paper", "window": 8, "recent": 6},
}


@pytest.mark.parametrize("per", ["kv_head", "query_head"])
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.parametrize("entry", EVICTING.values(), ids=EVICTING)
def test_while_decoding_the_mass_is_weighed_by_the_norms_of_the_values_held(entry, family, per):
    """Each step against a copy of the slots: what goes is the lowest mass * norm that is neither sink nor recent."""
    model = build(family)
    caches = [kvbench.prefill(model, prompt(n, n), [entry], per=per)[0] for n in (40, 7, 25)]
    for cache in caches:
        audit(cache, cache_shape(model))
    batch = build_batch(model, caches, 30)
    tokens, seen = torch.tensor([[5]] * 3), torch.tensor([c.seen for c in caches])
    evicted = 0
    with torch.no_grad(), attached(model):
        for t in range(20):
            before = [snapshot(b.formats[0][1]) for b in batch.with_keys]
            step(model, batch, tokens, (seen + t)[:, None])
            for old, new in zip(before, batch.with_keys, strict=True):
                after = snapshot(new.formats[0][1])
                for b, h in itertools.product(range(3), range(len(old[0]))):
                    now, wanted = int(seen[b]) + t, dict(old[b][h])
                    while len(wanted) > 11:
                        free = [j for j in wanted if 3 <= j <= now - 6]
                        del wanted[min(free, key=lambda j: (wanted[j], -j))]
                        evicted += 1
                    assert set(after[b][h]) == {*wanted, now}
    assert evicted > 100


def snapshot(slots):
    """Return {position: mass * norm of the value held} per row and head."""
    norms = slots.store.v.abs().sum(dim=-1)
    torch.testing.assert_close(slots.state["norm"][slots.valid], norms[slots.valid])
    mass = slots.state["mass"] if "mass" in slots.state else slots.state["ring"].sum(dim=-1)
    score = (mass * slots.state["norm"]).tolist()
    where, valid = slots.positions.tolist(), slots.valid.tolist()
    return [
        [{p: s for p, s, ok in zip(*head, strict=True) if ok} for head in zip(*row, strict=True)]
        for row in zip(where, score, valid, strict=True)
    ]


def test_scores_that_stay_for_ever_are_not_weighed():
    state = {"norm": torch.tensor([[[0.0, 2.0, 0.5]]])}
    at = torch.zeros(1, 1, 1)
    slots = Slots(torch.zeros(1, 1, 3, dtype=torch.int32), torch.ones(1, 1, 3, dtype=torch.bool), state, at, at)
    assert Vatp().reweigh(torch.tensor([[[torch.inf, 3.0, 4.0]]]), slots).tolist() == [[[torch.inf, 6.0, 2.0]]]


def test_norms_cost_one_element_in_twice_the_head_dimension():
    model = build("llama", torch.bfloat16)
    plain = {"method": "h2o", "variant": "orig", "kv_size": 12}
    base, caches = kvbench.prefill(model, prompt(60), [plain, ORIG])
    a, b = (audit(c, cache_shape(model)) for c in (base, caches))
    assert a.payload == b.payload and b.overhead - a.overhead == a.payload / (2 * 16)


def test_snapkv_with_vatp_needs_nothing_while_decoding():
    (cache,) = kvbench.prefill(build("llama"), prompt(60), [{**entry("snapkv"), "kv_size": 20}])
    assert all(not s.state for layer in cache.layers for s in layer.segments)


def test_batched_equals_alone_beside_the_plain_base():
    model = build("llama")
    cache = [
        kvbench.prefill(model, prompt(n, n), [ORIG, {"method": "h2o", "variant": "orig", "kv_size": 12}])
        for n in (40, 9)
    ]
    caches = [c for pair in cache for c in pair]
    assert kvbench.generate(model, caches, 20) == [kvbench.generate(model, [c], 20)[0] for c in caches]
