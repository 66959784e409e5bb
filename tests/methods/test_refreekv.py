"""ReFreeKV: the prompt decides how much each layer keeps, the audit holds it to that, and T = 0 keeps everything."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from support import method_reference as ref
from support.families import build, of_layers, prompt
from support.grids import grid

import kvbench
from kvbench.audit.prompt_audit import audit
from kvbench.base.errors import Refused, UsageError
from kvbench.kv import ops
from kvbench.kv.observation import Needs
from kvbench.methods.core.contract import Capacity
from kvbench.methods.core.resolve import chain_of
from kvbench.methods.core.statistics import window_rows, window_sums
from kvbench.methods.refreekv import ReFreeKV
from kvbench.models.interface import cache_shape

DEFAULTS = {"T": 0.01, "m": 4, "k": 1, "mode": "code", "reduce": "mean_heads", "order": "sinks_first"}
DEFAULTS["ranking"] = "position"


def with_rows(*rows):
    """Return a layer of one query head per row, all over one kv head, whose last query's attention is that row."""
    hq, n = len(rows), len(rows[0])
    q, k = torch.zeros(hq, n, hq), torch.zeros(1, n, hq)
    for h, row in enumerate(rows):
        q[h, -1, h] = 1
        k[0, :, h] = torch.tensor(row).log()
    return ref.make_layer(q, k, scale=1.0, layer=2, n_layers=4)


def count(stage, *rows):
    dense, obs = with_rows(*rows)
    return len(ref.kept(stage.compress(dense, obs))[0])


# spec 5, ReFreeKV: code mode, uniform row
@pytest.mark.parametrize("n", [5, 6, 30, 55, 104, 105, 300])
@pytest.mark.parametrize("m", [0, 1, 4])
def test_a_uniform_row_keeps_nearly_all(n, m):
    assert count(ReFreeKV(m=m), [1 / n] * n) == m + math.ceil(0.9801 * (n - m))


# spec 5, ReFreeKV: eq.1 mode, uniform row
@pytest.mark.parametrize("n", [5, 50, 51, 60, 100, 101, 250, 300])
def test_a_uniform_row_by_the_papers_equation(n):
    assert count(ReFreeKV(mode="eq1"), [1 / n] * n) == math.floor(0.9801 * n) + 1
    assert n != 100 or math.floor(0.9801 * n) + 1 == 99


# spec 5, ReFreeKV: a1 = .9, five others .02
def test_a_row_that_a_sink_dominates():
    row = [0.9, 0.02, 0.02, 0.02, 0.02, 0.02]
    assert count(ReFreeKV(mode="eq1"), row) == 1
    # the code leaves the first four out: of two equal candidates it needs both
    assert count(ReFreeKV(), row) == 6
    assert count(ReFreeKV(T=0.3), row) == 5
    # the paper's appendix B: exactly n - m
    assert count(ReFreeKV(mode="eq1", order="sinks_last"), row) == 2
    long = [0.9] + [0.1 / 95] * 95
    assert count(ReFreeKV(mode="eq1", order="sinks_last"), long) == 96 - 4


def test_a_loss_of_exactly_t_is_tolerated_by_the_code_and_not_by_the_papers_equation():
    attention = torch.tensor([[3.0, 4.0]], dtype=torch.float64)  # norms 3 and 5: the first alone loses 2/5
    assert ReFreeKV(T=0.4, m=0)._count_by_code(attention).tolist() == [1]
    assert ReFreeKV(T=0.4, m=0, mode="eq1")._count_by_equation(attention, 1).tolist() == [2]


# spec 5, ReFreeKV: the first m always stay
def test_the_newest_stay_and_the_first_m_always():
    row = [0.001] * 40
    row[0], row[30], row[39] = 0.5, 0.3, 0.163
    dense, obs = with_rows(row)
    assert ref.kept(ReFreeKV().compress(dense, obs)) == [[0, 1, 2, 3, *range(30, 40)]]
    assert ref.kept(ReFreeKV(m=1).compress(dense, obs)) == [[0, *range(30, 40)]]


def test_the_code_averages_norms_over_heads_and_the_paper_averages_attention():
    rows = ([0.01] * 18 + [0.01, 0.81], [0.01] * 4 + [0.81] + [0.01] * 15)
    assert count(ReFreeKV(T=0.4, m=0), *rows) == 16
    by = {r: count(ReFreeKV(mode="eq1", m=0, T=0.4, reduce=r), *rows) for r in ("mean_heads", "max_heads")}
    assert by == {"mean_heads": 1, "max_heads": 16} or by == {"mean_heads": 16, "max_heads": 16}
    dense, obs = with_rows(*rows)
    alone = ReFreeKV(mode="eq1", m=0, T=0.4, reduce="per_head")
    lengths = [len(h) for h in ref.kept(alone.compress(replace(dense, heads=2), obs))]
    assert lengths == [1, 16]


# spec 5, ReFreeKV: T=0
@pytest.mark.parametrize(
    "knobs", [{}, {"mode": "eq1"}, {"mode": "eq1", "order": "sinks_last"}, {"ranking": "attention"}]
)
def test_no_tolerated_loss_keeps_everything(knobs):
    row = [0.4] + [1e-30] * 20 + [0.6]
    assert count(ReFreeKV(T=0.0, **knobs), row) == 22
    assert ReFreeKV(T=0, **knobs).expected(22, 2, 4, 2).low == (22, 22)


def test_candidates_without_any_attention_leave_the_newest():
    row = [0.25] * 4 + [0.0] * 8
    dense, obs = with_rows(row)
    assert ref.kept(ReFreeKV().compress(dense, obs)) == [[0, 1, 2, 3, 11]]


@pytest.mark.parametrize("n", [1, 3, 4])
def test_a_prompt_of_sinks_alone_is_kept(n):
    assert count(ReFreeKV(), [1 / n] * n) == n
    assert ReFreeKV().expected(n, 3, 4, 1).low == (n,)


MODES = [
    {"mode": "code"},
    *({"mode": "eq1", "reduce": r, "order": o} for r, o in itertools.product(
        ("mean_heads", "max_heads", "per_head"), ("sinks_first", "sinks_last")
    )),
]  # fmt: skip


@grid("data", ["random", "ties"])
@grid("ranking", ["position", "attention"])
@grid("mode", MODES, ids=lambda m: "-".join(m.values()))
@grid(("hq", "hk", "per"), [(3, 3, "kv_head"), (4, 2, "kv_head"), (4, 2, "query_head")])
@grid(("T", "k", "m"), [(0.01, 1, 4), (0.2, 1, 2), (0.05, 5, 4)])
def test_every_mode_keeps_the_tokens_of_its_reference(mode, ranking, data, hq, hk, per, T, k, m):
    q, keys = ref.grid(hq, 26, 8, seed=1), ref.grid(hk, 26, 8, seed=2)
    if data == "ties":
        keys = keys[:, torch.arange(26) % 5]
    dense, obs = ref.make_layer(q, keys, per=per, layer=2, n_layers=4)
    knobs = {**DEFAULTS, **mode, "ranking": ranking, "T": T, "k": k, "m": m}
    cache = chain_of({"method": "refreekv", "per": per, **knobs}).compress(dense, obs)
    wanted = ref.refreekv(ref.attention(q, keys), dense.heads, **knobs)
    assert ref.kept(cache) == wanted
    assert cache.decided == tuple(map(len, wanted))
    for h, tokens in enumerate(wanted):
        source = h // (dense.heads // hk)
        assert torch.equal(cache.segments[0].head(h).k[0], keys[source, tokens])


def test_query_counts_by_hand():
    assert [ReFreeKV(k=0.05).count_queries(n) for n in (10, 100, 219)] == [1, 5, 10]
    assert [ReFreeKV(k=7).count_queries(n) for n in (3, 100)] == [3, 7]
    assert ReFreeKV(k=0.1, ranking="attention").needs(200) == Needs(last_q=20, colsums=True)


def test_blockwise_sums_of_rows_are_those_of_the_rows():
    dense, obs = ref.make_layer(ref.grid(4, 50, 8, seed=1), ref.grid(2, 50, 8, seed=2))
    for window, block in itertools.product((1, 7, 50), (1, 3, 64)):
        wanted = window_rows(dense, obs, window).sum(dim=1)
        torch.testing.assert_close(window_sums(dense, obs, window, block), wanted)


@pytest.mark.parametrize("mode", [{}, {"mode": "eq1", "reduce": "per_head"}])
@pytest.mark.parametrize("per", ["kv_head", "query_head"])
def test_it_decodes_in_a_batch_as_alone_and_passes_the_audit(mode, per):
    model = build("llama")
    chains = [{"method": "refreekv", "T": 0.2, **mode}, {"method": "refreekv+think", "T": 0.2, "recent": 4, **mode}]
    caches = [c for n in (60, 33) for c in kvbench.prefill(model, prompt(n, n), [*chains, "full"], per=per)]
    for cache in caches:
        measured = audit(cache, cache_shape(model))
        if cache.chain.name != "full":
            n = cache.prompt_tokens
            assert [min(map(len, ref.kept(layer))) for layer in cache.layers[:2]] == [n, n]
            assert min(cache.layers[2].decided) < n
            assert measured.nominal is None and measured.kept < n
    together = kvbench.generate(model, caches, 8)
    assert together == [kvbench.generate(model, [c], 8)[0] for c in caches]


@pytest.mark.parametrize(
    ("decided", "reason"), [(None, "does not record"), ((9, 9), "decided to keep 9"), ((1, 2), "decided to keep")]
)
def test_a_cache_that_does_not_hold_what_was_decided_is_refused(decided, reason):
    model = build("llama")
    (cache,) = kvbench.prefill(model, prompt(60, 1), [{"method": "refreekv", "T": 0.2}])
    false = replace(cache, layers=(*cache.layers[:2], replace(cache.layers[2], decided=decided)))
    with pytest.raises(Refused, match=reason):
        audit(false, cache_shape(model))


def test_a_cache_with_fewer_tokens_than_decided_is_refused():
    model = build("llama")
    (cache,) = kvbench.prefill(model, prompt(60, 1), [{"method": "refreekv", "T": 0.2}])
    layer = cache.layers[2]
    cut = ops.select(layer, torch.arange(layer.tokens - 1)[None])
    with pytest.raises(Refused, match="but decided to keep"):
        audit(replace(cache, layers=(*cache.layers[:2], cut)), cache_shape(model))


def test_frozen_layers_stand_for_those_that_the_model_has():
    chain = chain_of("refreekv")
    chain.check_model(of_layers(1))
    chain_of({"method": "refreekv", "frozen_layers": []}).check_model(of_layers(1))
    with pytest.raises(UsageError, match="layers 0 to 2"):
        chain_of({"method": "refreekv", "frozen_layers": [0, 3]}).check_model(of_layers(3))


def test_it_has_no_budget():
    assert ReFreeKV().capacity(70) == Capacity(70, 0, 0)
    for knob in ("kv_size", "kv_ratio"):
        with pytest.raises(UsageError, match=rf"{knob}.*no budget"):
            kvbench.prefill(build("llama"), prompt(30), ["refreekv"], **{knob: 1})
    caches = kvbench.prefill(build("llama"), prompt(30), ["refreekv", "snapkv"], kv_ratio=0.5, window=4)
    assert len(caches) == 2


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        ({"T": -0.1}, "T"),
        ({"T": 1.0}, "T"),
        ({"T": "1%"}, "T"),
        ({"m": -1}, "m"),
        ({"k": 0}, "k"),
        ({"k": 1.5}, "k"),
        ({"mode": "paper"}, "mode"),
        ({"mode": "eq1", "reduce": "sum"}, "reduce"),
        ({"reduce": "per_head"}, "reduce"),
        ({"order": "sinks_last"}, "order"),
        ({"ranking": "random"}, "ranking"),
        ({"frozen_layers": [-1]}, "frozen_layers"),
    ],
)
def test_impossible_knobs_are_refused(knobs, named):
    with pytest.raises(UsageError, match=rf"method\.refreekv\.{named}="):
        chain_of({"method": "refreekv", **knobs})
