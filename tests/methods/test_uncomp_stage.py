"""UNComp's stage: its schedules as printed, its prompts against a slow reference, and every selector behind it."""

import itertools

import pytest
import torch
from support import method_reference as ref
from support import prefill_reference as slow
from support.calibrations import ready
from support.families import WHOLE, build, hooks, prompt
from support.grids import grid

import kvbench
from kvbench.audit.prompt_audit import audit
from kvbench.base.errors import UsageError
from kvbench.kv.observation import Observation
from kvbench.methods.core import registry
from kvbench.methods.core.base import Selector, TokenSelector
from kvbench.methods.core.recipe import Calibration, digest
from kvbench.methods.core.resolve import chain_of
from kvbench.methods.uncomp import UNCompGroup
from kvbench.methods.uncomp_stage import UncompStage
from kvbench.models.interface import cache_shape, decoder_layers

SMALL = {"kv_size": 20, "snapkv.window": 4, "window": 4, "recent": 4, "T": 0.6, "sinks": 2}
SELECTORS = [
    m
    for m in registry.available()
    if m not in ("full", "cake", "kvzip") and isinstance(registry.make_stage(m, registry.defaults(m)), TokenSelector)
]


def behind(selector):
    own_knobs = {k: v for k, v in SMALL.items() if k in registry.knob_names(selector)}
    return {"method": f"uncomp-stage+{selector}", **{f"{selector}.{k}": v for k, v in own_knobs.items()}}


# arXiv 2410.03090, A.3: groups, reserved sizes; table 3: 63.09 % (S_min = 512); 73.63 % with 1536
def test_the_papers_sizes_of_32_layers():
    sizes = UncompStage(schedule="paper").sizes(4096, 32)
    assert sizes == [4096] * 2 + [3456] * 13 + [2816] * 11 + [2176] * 5 + [1536]
    assert sum(sizes) == 96512 and round(100 * sum(sizes) / (32 * 4096), 2) == 73.63
    extreme = UncompStage(schedule="paper", least_size=512).sizes(4096, 32)
    assert extreme == [4096] * 2 + [3200] * 13 + [2304] * 11 + [1408] * 5 + [512]
    assert sum(extreme) == 82688 and round(100 * sum(extreme) / (32 * 4096), 2) == 63.09
    assert {a - b for a, b in itertools.pairwise(sizes)} == {0, 640}
    assert UncompStage(schedule="code").sizes(4096, 32) == sizes


def test_the_papers_and_the_codes_sizes_of_llama_3():
    paper = UncompStage(schedule="paper", most=8096).count_group_tokens(8192, 5)
    assert paper == [8096, 6456, 4816, 3176, 1536]
    assert UncompStage(schedule="code", most=8192).count_group_tokens(8192, 5) == [8192, 6528, 4864, 3200, 1536]
    assert {a - b for a, b in itertools.pairwise(paper)} == {1640}


def test_the_papers_and_the_codes_sizes_of_40_layers():
    printed = [4096, 3731, 3366, 3001, 2636, 2271, 1906, 1536]
    layers = [1, 2, 12, 8, 8, 4, 2, 3]
    sizes = UncompStage(schedule="paper").sizes(4096, 40)
    assert sizes == [s for s, count in zip(printed, layers, strict=True) for _ in range(count)]
    code = UncompStage(schedule="code").count_group_tokens(4096, 8)
    assert code == [4096, *(s - 5 for s in printed[1:7]), 1536]


def test_absolute_sizes_leave_a_short_prompt_alone_and_cut_a_long_one_from_layer_1_on():
    stage = UncompStage(schedule="paper")
    assert stage.sizes(1536, 32) == [1536] * 32
    assert stage.sizes(2000, 32) == [2000] * 31 + [1536]
    assert stage.sizes(12000, 32)[:3] == [12000, 4096, 3456]


def test_relative_sizes_fall_linearly_to_the_least_fraction():
    assert UncompStage().sizes(1000, 8) == [1000, 1000, 791, 791, 583, 583, 375, 375]
    assert UncompStage().sizes(80, 3) == [80, 55, 30]
    assert UncompStage(groups=2, least=0.5).sizes(100, 5) == [100, 100, 100, 50, 50]
    assert UncompStage(starts=(0, 1, 4), least=0.5).sizes(100, 6) == [100, 75, 75, 75, 50, 50]
    assert UncompStage(least=1.0).sizes(100, 6) == [100] * 6
    assert UncompStage(groups=1).sizes(100, 3) == [100] * 3
    assert UncompStage().sizes(100, 1) == [100]
    assert UncompStage(least=0.01).sizes(100, 4)[-1] == 8
    assert UncompStage(least=0.01).sizes(5, 4) == [5] * 4


@pytest.mark.parametrize("knobs", [{}, {"least": 0.1}, {"schedule": "paper"}, {"schedule": "code", "most": 3000}])
@pytest.mark.parametrize("n", [1, 7, 9, 100, 4097, 9999])
def test_no_layer_reads_more_than_the_one_before(knobs, n):
    sizes = UncompStage(**knobs).sizes(n, 40)
    assert sizes[0] == n and sizes == sorted(sizes, reverse=True) and sizes[-1] >= min(n, 8)


@pytest.mark.parametrize(
    ("knobs", "what"),
    [
        ({"schedule": "linear"}, "relative or paper or code"),
        ({"groups": 0}, "groups=0"),
        ({"starts": [1, 2]}, "starts with 0"),
        ({"starts": [0, 2, 2]}, "ascending"),
        ({"starts": [0, 2], "schedule": "paper"}, "relative only"),
        ({"epsilon": 1.0, "starts": [0, 1]}, "instead of starts"),
        ({"epsilon": 1.0, "schedule": "code"}, "schedule=relative"),
        ({"least": 0.0}, "above 0"),
        ({"last": 0}, "1 or more"),
        ({"least_size": 5000}, "at most most=4096"),
    ],
)
def test_impossible_knobs_are_refused(knobs, what):
    with pytest.raises(UsageError, match=what):
        chain_of({"method": "uncomp-stage", **knobs})


def test_a_model_without_the_schedules_layers_is_refused():
    with pytest.raises(UsageError, match=r"has 3 layers.*32 and 40.*relative"):
        kvbench.prefill(build("llama"), prompt(40), [{"method": "uncomp-stage", "schedule": "paper"}])
    with pytest.raises(UsageError, match="layers 0 to 2"):
        kvbench.prefill(build("llama"), prompt(40), [{"method": "uncomp-stage", "starts": [0, 3]}])


def test_ties_go_to_the_lower_index_and_the_last_tokens_stay_whatever_they_receive():
    stage = UncompStage(least=0.5, groups=2, last=3, window=2)
    even = Observation(0, 2, 12, 1.0, last_q=torch.zeros(2, 2, 4), length=12)
    # columns that both rows see receive the same; the last column is seen by one row only
    assert stage.keep_hidden(torch.ones(1, 12, 4), even).tolist() == [0, 1, 2, 9, 10, 11]
    keys = torch.zeros(1, 12, 4)
    keys[0, 5:8] = 9.0
    seen = Observation(0, 2, 12, 1.0, last_q=torch.ones(2, 2, 4), length=12)
    assert stage.keep_hidden(keys, seen).tolist() == [5, 6, 7, 9, 10, 11]


@pytest.mark.parametrize("family", WHOLE)
@pytest.mark.parametrize("knobs", [{}, {"starts": [0, 1], "least": 0.3, "last": 2, "window": 5}])
def test_prompt_and_decoding_are_those_of_a_slow_reference(family, knobs):
    model, n, new = build(family), 50, prompt(4, 9)
    stage = UncompStage(**{k: tuple(v) if isinstance(v, list) else v for k, v in knobs.items()})
    attend, alive = slow.staged(n, stage.sizes(n, 3), stage.window, stage.last)
    wanted = slow.logits(model, torch.cat([prompt(n, 4), new]), attend)
    (cache,) = kvbench.prefill(model, prompt(n, 4), [{"method": "uncomp-stage", **knobs}])
    for layer, stored in zip(cache.layers, alive, strict=True):
        assert ref.kept(layer) == [stored] * layer.heads
    torch.testing.assert_close(cache.logits, wanted[n - 1], atol=1e-4, rtol=1e-4)
    for t in range(len(new)):
        cache = kvbench.extend(model, cache, new[t : t + 1])
        torch.testing.assert_close(cache.logits, wanted[n + t], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", WHOLE)
def test_later_layers_compute_fewer_rows_and_the_final_token_is_always_among_them(family):
    model, n = build(family), 64
    rows = []

    def count(module, args, output):
        rows.append((output[0] if isinstance(output, tuple) else output).shape[1])

    handles = [m.register_forward_hook(count) for m in decoder_layers(model)]
    try:
        (cache,) = kvbench.prefill(model, prompt(n, 2), [{"method": "uncomp-stage", "least": 0.2}])
    finally:
        for h in handles:
            h.remove()
    sizes = UncompStage(least=0.2).sizes(n, 3)
    assert rows == sizes == [64, 38, 12]
    for layer in cache.layers:
        assert all(p[-8:] == list(range(n - 8, n)) for p in ref.kept(layer))
        assert layer.seen == n and layer.prompt_tokens == n


def test_groups_by_a_calibration_are_not_guessed_without_one():
    with pytest.raises(UsageError, match=r"not calibrated.*epsilon=1.0"):
        UncompStage(epsilon=1.0).sizes(100, 4)


def test_a_prompt_shorter_than_the_forced_tokens_is_read_whole():
    model = build("llama")
    cache, full = kvbench.prefill(model, prompt(6), [{"method": "uncomp-stage", "least": 0.1}, "full"])
    assert torch.equal(cache.logits, full.logits)


def test_prompts_that_are_computed_otherwise_share_no_prefill():
    model, ids = build("llama"), prompt(60, 1)
    entries = [
        "full",
        "uncomp-stage",
        {"method": "uncomp-stage", "least": 0.5},
        "snapkv",
        "uncomp-stage+snapkv",
        "chai",
        {"method": "chai", "share": 0.5},
    ]
    together = kvbench.prefill(model, ids, entries)
    keys = [c.chain.prefill_key for c in together]
    assert keys[0] == keys[3] == "" and keys[1] == keys[4] and len(set(keys)) == 5
    for entry, cache in zip(entries, together, strict=True):
        (alone,) = kvbench.prefill(model, ids, [entry])
        assert torch.equal(alone.logits, cache.logits)
        assert [ref.kept(x) for x in alone.layers] == [ref.kept(x) for x in cache.layers]
    assert torch.equal(together[0].logits, together[3].logits) and torch.equal(together[1].logits, together[4].logits)
    different = [together[i].logits for i in (0, 1, 2, 5, 6)]
    assert all(not torch.equal(a, b) for i, a in enumerate(different) for b in different[:i])


@pytest.mark.e2e("reads prompts with every selector")
@grid("family", ["llama", "gpt_neox", "opt"])
@grid("per", ["kv_head", "query_head"])
def test_every_selector_chooses_among_the_tokens_that_its_layer_read(family, per):
    model, n = build(family), 60
    rotating = [m for m in SELECTORS if registry.make_stage(m, registry.defaults(m)).rotates]
    selectors = [m for m in SELECTORS if not (family == "opt" and m in rotating)]
    entries = [ready(model, e, per) for e in ("uncomp-stage", *map(behind, selectors))]
    staged, *chosen = kvbench.prefill(model, prompt(n, 3), entries)
    for selector, both in zip(selectors, chosen, strict=True):
        audit(both, cache_shape(model))
        assert torch.equal(staged.logits, both.logits), selector
        chain = both.chain
        for i, (read, kept_tokens) in enumerate(zip(staged.layers, both.layers, strict=True)):
            rows = UncompStage().sizes(n, 3)[i]
            assert read.tokens == rows
            for kept_positions in ref.kept(kept_tokens):
                assert set(kept_positions) <= set(ref.kept(read)[0]), selector
            if type(chain.selector).expected is Selector.expected:
                budget = chain.selector.budget(n, i, 3)
                assert [len(p) for p in ref.kept(kept_tokens)] == [min(rows, budget)] * kept_tokens.heads, selector
            capacity = chain.capacity(n)
            if kept_tokens.tokens < rows and not chain.evicts and selector != "refreekv":
                must = {*ref.kept(read)[0][: capacity.sinks], *ref.kept(read)[0][rows - capacity.window :]}
                assert all(must <= set(kept_positions) for kept_positions in ref.kept(kept_tokens)), selector
    for selector, both, answer in zip(selectors, chosen, kvbench.generate(model, chosen, 5), strict=True):
        assert kvbench.generate(model, [both], 5) == [answer], selector
    (alone,) = kvbench.generate(model, [staged], 5)
    assert kvbench.generate(model, [*chosen[:1], staged], 5)[1] == alone


@pytest.mark.parametrize("variant", [{"variant": "orig"}, {"variant": "orig", "positions": "rolled"}])
def test_slots_behind_the_stage_hold_the_budget_of_the_whole_prompt(variant):
    model = build("llama")
    entry = {"method": "uncomp-stage+h2o", "kv_ratio": 0.5, **variant}
    (cache,) = kvbench.prefill(model, prompt(60, 3), [entry])
    assert [layer.tokens for layer in cache.layers] == [30, 30, 22]
    longer = kvbench.extend(model, cache, prompt(20, 5))
    assert [layer.tokens for layer in longer.layers] == [30] * 3


def test_snapkv_behind_the_stage_scores_what_the_layer_read():
    """The same choice as on a layer of just these tokens."""
    q, k = ref.grid(4, 40, 8, seed=1), ref.grid(2, 40, 8, seed=2)
    chain = chain_of(behind("snapkv"))
    where = torch.arange(0, 80, 2)
    dense, obs = ref.make_layer(q, k, layer=1, length=80, positions=where)
    stored = kvbench.kv.ops.dense(k, dense.segments[0].v, heads=2, query_heads=4, positions=where, length=80)
    wanted = ref.snapkv(ref.attention(q, k), 2, 20, 4, 7, "max")
    assert ref.kept(chain.compress(stored, obs)) == [[2 * j for j in head] for head in wanted]


@pytest.mark.parametrize("per", ["kv_head", "query_head"])
def test_value_channels_behind_the_stage_are_those_of_the_tokens_that_the_layer_read(per):
    """Positions with gaps: which query sees which token goes by position, not by place."""
    q, k, v = (ref.grid(h, 30, 8, seed=h) for h in (4, 2, 2))
    where = torch.arange(30) * 3
    chain = chain_of({"method": "thinkv", "ratio": 0.0, "value_ratio": 0.5, "recent": 4, "per": per})
    dense, obs = ref.make_layer(q, k, v, per=per)
    _, later = ref.make_layer(q, k, v, per=per, layer=1, length=90, positions=where)
    gaps = kvbench.kv.ops.dense(k, v, heads=dense.heads, query_heads=4, positions=where, length=90)
    a, b = (chain.compress(*x).segments[0].value_channels for x in ((dense, obs), (gaps, later)))
    assert torch.equal(a, b)


def test_expected_attention_behind_the_stage_undoes_the_rotation_of_the_true_positions():
    """Tokens at positions 2j under half the frequencies are rotated as those at j."""
    q, k, v = (ref.grid(h, 30, 8, seed=h) for h in (4, 2, 2))
    freq = torch.tensor([10_000 ** (-2 * i / 8) for i in range(4)])
    knobs = {"kv_size": 12, "sinks": 2, "future": 1}
    chain = chain_of({"method": "expectedattention", **knobs})
    dense, obs = ref.make_layer(q, k, v, inv_freq=freq)
    where = torch.arange(30) * 2
    _, later = ref.make_layer(q, k, v, layer=1, length=60, positions=where, inv_freq=freq / 2)
    gaps = kvbench.kv.ops.dense(k, v, heads=2, query_heads=4, positions=where, length=60)
    wanted = [[2 * j for j in head] for head in ref.kept(chain.compress(dense, obs))]
    assert ref.kept(chain.compress(gaps, later)) == wanted


@pytest.mark.parametrize(
    ("eranks", "epsilon", "starts"),
    [
        ([5.0, 5.5, 4.0, 3.5, 2.0, 2.0], 1.0, (0, 2, 4)),
        ([5.0, 5.5, 4.0, 3.5, 2.0, 2.0], 0.4, (0, 2, 3, 4)),
        ([5.0, 5.5, 4.0, 3.5, 2.0, 2.0], 2.0, (0,)),
    ],
)
def test_groups_begin_where_the_effective_rank_of_the_queries_falls(eranks, epsilon, starts):
    tensors = {"erank_k": torch.tensor([eranks, [9.0, 0.0] * 3, [0.0, 9.0] * 3])}
    stage = UncompStage(epsilon=epsilon).calibrated(Calibration("uncomp", digest(tensors), "none", tensors))
    assert stage.find_first_layers(6) == starts
    assert stage.sizes(100, 6) == UncompStage(starts=starts).sizes(100, 6)
    assert UncompStage().recipe() is None and UncompStage(epsilon=1.0).unbound


# spec 5, UNComp: drops at 2, 15, 26, 31 -> the groups of appendix A.3
def test_an_effective_rank_that_falls_as_llama_2s_makes_the_papers_schedule():
    falls = {2: 1.3, 15: 2.0, 26: 1.25, 31: 6.0}
    eranks, now = [], 12.0
    for layer in range(32):
        now += 0.2 - falls.get(layer, 0.0)
        eranks.append(now)
    tensors = {"erank_k": torch.tensor([eranks] * 3)}
    stage = UncompStage(epsilon=1.0, least=0.375).calibrated(Calibration("uncomp", digest(tensors), "none", tensors))
    assert stage.find_first_layers(32) == UncompStage(schedule="paper").find_first_layers(32) == (0, 2, 15, 26, 31)
    # 0.375 of 4096 tokens are the paper's 1536
    assert stage.sizes(4096, 32) == UncompStage(schedule="paper").sizes(4096, 32)


def test_the_stage_reads_the_calibration_of_uncomp_group():
    knobs = {"samples": 7, "top": 5, "tokens": 64}
    assert UncompStage(epsilon=1.0, **knobs).recipe() == UNCompGroup(**knobs).recipe()
    model, n = build("llama"), 40
    (cache,) = kvbench.prefill(model, prompt(n), [ready(model, {"method": "uncomp-stage", "epsilon": 0.0})])
    audit(cache, cache_shape(model))
    assert cache.chain.stages[0].calibration.sha256 in cache.chain.prefill_key


def test_a_scissorhands_ring_behind_the_stage_loses_no_row():
    q, k = ref.grid(2, 30, 8, seed=1), ref.grid(2, 30, 8, seed=2)
    where = torch.tensor([*range(0, 40, 2), *range(40, 50)])
    _, obs = ref.make_layer(q, k, layer=1, length=50, positions=where)
    stored = kvbench.kv.ops.dense(k, k, heads=2, query_heads=2, positions=where, length=50)
    chain = chain_of({"method": "scissorhands", "kv_size": 20, "window": 16, "recent": 4, "variant": "paper"})
    wanted = ref.scissorhands(ref.attention(q, k), 2, 20, 16, 4, "paper")
    assert ref.kept(chain.compress(stored, obs)) == [[int(where[j]) for j in head] for head in wanted]


@pytest.mark.parametrize(
    ("method", "why"), [("uncomp-stage+cake", "one budget over layers"), ("uncomp-stage+chai", "written alone")]
)
def test_chains_that_cannot_be_are_refused(method, why):
    with pytest.raises(UsageError, match=why):
        chain_of(method)


@pytest.mark.parametrize("family", WHOLE)
def test_hooks_go_even_if_a_layer_fails(family, monkeypatch):
    model = build(family)
    there = hooks(model)

    def fail(self, keys, obs):
        raise ArithmeticError("in the middle of a prefill")

    monkeypatch.setattr(UncompStage, "keep_hidden", fail)
    with pytest.raises(ArithmeticError):
        kvbench.prefill(model, prompt(40), ["uncomp-stage"])
    assert hooks(model) == there
