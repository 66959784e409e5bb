"""UNComp-group: budgets per head, the ring of rows, heads that are not stored, against slow simulations."""

import math
from dataclasses import replace

import pytest
import torch
from support import calibrations
from support import decoding_reference as decoding
from support import method_reference as ref
from support.calibrations import bound, ready
from support.families import build, prompt
from support.grids import grid
from transformers import LlamaConfig, LlamaForCausalLM

import kvbench
from kvbench.audit.prompt_audit import audit
from kvbench.base.errors import Refused, UsageError
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.evicting import NO_LIMIT
from kvbench.methods.core.resolve import chain_of
from kvbench.methods.uncomp import UNCompGroup, interpolate_sizes
from kvbench.models.interface import cache_shape

LAYERS = 2


def stage(**knobs):
    return UNCompGroup(**knobs)


def slow_sizes(content, layer, heads, count, high, low):
    """Tokens per head, by sorting: counts decide for two groups, ranks for more, mean entropy of grouped heads."""
    values = content["counts" if count == 2 else "ranks"][layer].tolist()
    if heads < len(values):
        group = len(values) // heads
        entropies = content["entropy"][layer].tolist()
        values = [sum(entropies[h * group : (h + 1) * group]) / group for h in range(heads)]
    order = sorted(range(heads), key=lambda h: (-values[h], h))
    if count == 2:
        return [high if order.index(h) < heads // 2 else low for h in range(heads)]
    assert heads == count
    return [round(high - order.index(h) * (high - low) / (count - 1)) for h in range(heads)]


# spec 5, UNComp: budgets 256 / 512, mean 384; spec 2.11: the code's 3/2 and the paper's 96 / 32
def test_budgets_by_hand():
    assert stage(kv_size=384).compute_budgets(9000) == (512, 256, 384)
    assert stage(kv_size=384, scale=1.5).compute_budgets(9000) == (768, 384, 576)
    assert stage(high=96, low=32).compute_budgets(9000) == (96, 32, 64)
    assert stage(high=512, low=12).compute_budgets(9000) == (512, 12, 262)
    assert stage(kv_ratio=0.25).compute_budgets(1000) == (333, 167, 250)
    assert stage(kv_size=9).compute_budgets(1000) == (9, 9, 9)
    assert [interpolate_sizes(512, 256, m) for m in (1, 2, 3, 5)] == [
        [384],
        [512, 256],
        [512, 384, 256],
        [512, 448, 384, 320, 256],
    ]
    assert interpolate_sizes(512, 256, 4) == [512, 427, 341, 256]
    assert interpolate_sizes(736, 32, 3) == [736, 384, 32]


@grid("mean", [13, 60, 384, 385, 1001])
@grid("groups", [1, 2, 3, 4, 5, 8])
@grid("heads", [8, 32])
def test_the_mean_over_heads_is_the_budget(mean, groups, heads):
    content = calibrations.uncomp(LAYERS, heads)
    (calibrated,) = bound(Chain((stage(kv_size=mean, groups=groups),)), LAYERS, heads).stages
    for layer in range(LAYERS):
        sizes = calibrated.compute_head_sizes(10_000, layer, heads)
        assert sum(sizes) == mean * heads
        if groups == 2:
            high, low, _ = calibrated.compute_budgets(10_000)
            assert sizes == slow_sizes(content, layer, heads, 2, high, low)


def test_groups_of_grouped_heads_follow_the_mean_entropy():
    content = calibrations.uncomp(LAYERS, 8)
    (calibrated,) = bound(Chain((stage(high=90, low=30),)), LAYERS, 8).stages
    assert calibrated.compute_head_sizes(1000, 1, 4) == slow_sizes(content, 1, 4, 2, 90, 30)
    assert calibrated.compute_head_sizes(1000, 1, 8) == slow_sizes(content, 1, 8, 2, 90, 30)
    four = replace(calibrated, groups=8)
    assert four.compute_head_sizes(1000, 0, 8) == slow_sizes(content, 0, 8, 8, 90, 30)
    assert calibrated.compute_head_sizes(1000, 1, 1) == [60]


def test_reversed_turns_the_groups_and_random_needs_no_calibration():
    (calibrated,) = bound(Chain((stage(kv_size=384),)), LAYERS, 8).stages
    turned = replace(calibrated, grouping="reversed")
    for layer in range(LAYERS):
        pairs = zip(
            calibrated.compute_head_sizes(9000, layer, 8), turned.compute_head_sizes(9000, layer, 8), strict=True
        )
        assert {a + b for a, b in pairs} == {768}
    chance = stage(kv_size=384, grouping="random")
    assert chance.recipe() is None and not chance.unbound
    drawn = [tuple(chance.compute_head_sizes(9000, layer, 8)) for layer in range(12)]
    assert len(set(drawn)) > 6 and all(sorted(d) == [256] * 4 + [512] * 4 for d in drawn)
    assert drawn == [
        tuple(stage(kv_size=384, grouping="random").compute_head_sizes(9000, layer, 8)) for layer in range(12)
    ]
    other = stage(kv_size=384, grouping="random", seed=1)
    assert drawn != [tuple(other.compute_head_sizes(9000, layer, 8)) for layer in range(12)]


def slow_kept(attn, sizes, window, kernel):
    """Each head's best pooled tokens and its last ``window``."""
    n = len(attn[0])
    scores = ref.pooled_window(attn, len(sizes), window, kernel, "max")
    return [
        list(range(n)) if size >= n else ref.top(s, size - window) + list(range(n - window, n)) if size else []
        for s, size in zip(scores, sizes, strict=True)
    ]


@pytest.mark.parametrize("data", ["random", "ties"])
@pytest.mark.parametrize("per", ["kv_head", "query_head"])
@pytest.mark.parametrize(("hq", "hk"), [(4, 4), (4, 2), (4, 1)])
def test_the_prompt_keeps_what_a_slow_reference_keeps(hq, hk, per, data):
    n, window, kernel = 30, 4, 3
    q, k = ref.grid(hq, n, 8, seed=1), ref.grid(hk, n, 8, seed=2)
    if data == "ties":
        k = k[:, torch.arange(n) % 5]
    chain = bound(Chain((stage(kv_size=12, window=window, kernel=kernel),), per), LAYERS, hq)
    heads = hq if per == "query_head" else hk
    for layer in range(LAYERS):
        cache = chain.compress(*ref.make_layer(q, k, per=per, layer=layer))
        sizes = slow_sizes(calibrations.uncomp(LAYERS, hq), layer, heads, 2, 16, 8) if heads > 1 else [12]
        assert ref.kept(cache) == slow_kept(ref.attention(q, k), sizes, window, kernel)
        assert list(chain.expected(n, layer, LAYERS, heads).low) == sizes


def slow_leaves(window, kernel, sizes_of, group):
    """Return the token that leaves: the lowest by pooled sums of the last ``window`` rows, in order of position."""

    def leaves(attn, held, head, now):
        rows = [attn[h][i] for h in range(head * group, (head + 1) * group) for i in range(max(0, now - window), now)]
        old = sorted(j for j in held if j <= now - window)
        received = [sum(row[j] for row in rows) for j in old]
        half = kernel // 2
        pooled = [max(received[max(0, a - half) : a + half + 1]) for a in range(len(old))]
        order = sorted(range(len(old)), key=lambda a: (pooled[a], -old[a]))
        return {old[a] for a in order[: max(0, len(held) - (sizes_of(attn)[head] - 1))]}

    return leaves


@pytest.mark.parametrize("thin", [False, True])
@pytest.mark.parametrize("kernel", [1, 5])
def test_decoding_equals_a_slow_simulation_with_masks(kernel, thin):
    """With thin channels, too, of which a head that holds less has fewer tokens."""
    model, ids, window, new = build("llama"), prompt(24, 5), 4, 12
    knobs = {"kv_size": 12, "uncomp-group.window": window, "kernel": kernel}
    pruned = {"thinkv.ratio": 0.3, "value_ratio": 0.5, "recent": 3, "observed": 8} if thin else {}
    chain = ready(model, {"method": "uncomp-group+thinkv" if thin else "uncomp-group", **knobs, **pruned})
    stores = decoding.Thin("thinkv", 12, 8, 3) if thin else None
    (cache,) = kvbench.prefill(model, ids, [chain])
    audit(cache, cache_shape(model))
    content = calibrations.uncomp(3, 4)

    def sizes(attn):
        return slow_sizes(content, attn.layer, 2, 2, 16, 8)

    leaves = slow_leaves(window, kernel, sizes, 2)
    answer, kept_tokens = decoding.evicting(
        model, ids, new, lambda a: slow_kept(a, sizes(a), window, kernel), leaves, thin=stores
    )
    assert kvbench.generate(model, [cache], new) == [answer]
    longer = kvbench.extend(model, cache, torch.tensor(answer))
    assert [ref.kept(layer) for layer in longer.layers] == kept_tokens
    for i, layer in enumerate(longer.layers):
        assert [len(p) for p in ref.kept(layer)] == slow_sizes(content, i, 2, 2, 16, 8)


def mha():
    """Return a small Llama whose heads are not grouped."""
    torch.manual_seed(9)
    shape = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=4, head_dim=16)).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 2:
                p.normal_(std=0.35 if "q_proj" in name or "k_proj" in name else 0.15)
    return model


def cosine(a, b):
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(sum(x * x for x in a)) / math.sqrt(sum(x * x for x in b))


def slow_stand_ins(vectors, gone):
    heads = range(len(vectors))
    best = [max((h for h in heads if h not in gone), key=lambda h: (cosine(vectors[g], vectors[h]), -h)) for g in heads]
    return [best[h] if h in gone else h for h in heads]


def slow_gone(content, layer, count):
    values = content["counts"][layer].tolist()
    return sorted(sorted(range(len(values)), key=lambda h: (-values[h], h))[len(values) - count :])


def test_deleted_heads_copy_their_stand_ins_as_in_a_slow_simulation():
    model, ids, window, new, size = mha(), prompt(22, 6), 4, 9, 12
    knobs = {"method": "uncomp-group", "kv_size": size, "window": window, "kernel": 3, "delete": 2}
    chain = ready(model, knobs)
    (cache,) = kvbench.prefill(model, ids, [chain])
    content = calibrations.uncomp(2, 4)

    def stand_ins(attn):
        return slow_stand_ins(ref.row_sums(attn, window), slow_gone(content, attn.layer, 2))

    def kept(attn):
        gone = slow_gone(content, attn.layer, 2)
        return slow_kept(attn, [0 if h in gone else size for h in range(4)], window, 3)

    leaves = slow_leaves(window, 3, lambda attn: [size] * 4, 1)
    answer, kept_tokens = decoding.evicting(model, ids, new, kept, leaves, stand_ins=stand_ins)
    assert kvbench.generate(model, [cache], new) == [answer]
    (full,) = kvbench.prefill(model, ids, ["full"])
    assert kvbench.generate(model, [cache, full], new) == [answer, kvbench.generate(model, [full], new)[0]]
    longer = kvbench.extend(model, cache, torch.tensor(answer))
    assert [ref.kept(layer) for layer in longer.layers] == kept_tokens


@pytest.mark.parametrize("similarity", ["paper", "code"])
def test_the_stand_in_is_the_most_similar_head_that_is_stored(similarity):
    q, k = ref.grid(6, 20, 8, seed=3), ref.grid(6, 20, 8, seed=4)
    chain = bound(Chain((stage(kv_size=12, delete=3, similarity=similarity),)), LAYERS, 6)
    for layer in range(LAYERS):
        cache = chain.compress(*ref.make_layer(q, k, layer=layer))
        vectors = ref.row_sums(ref.attention(q, k), 8)
        if similarity == "code":
            vectors = [[x for token in head[-8:] for x in token] for head in k.tolist()]
        gone = slow_gone(calibrations.uncomp(LAYERS, 6), layer, 3)
        assert cache.copy_from.tolist() == slow_stand_ins(vectors, gone)
        assert [len(p) for p in ref.kept(cache)] == [0 if h in gone else 12 for h in range(6)]


def test_bytes_are_those_of_what_is_held():
    model = mha()
    for knobs, stored in (({"high": 20, "low": 10}, [20, 20, 10, 10]), ({"kv_size": 15, "delete": 1}, [15] * 3)):
        (cache,) = kvbench.prefill(model, prompt(40), [ready(model, {"method": "uncomp-group", **knobs})])
        measured = audit(cache, cache_shape(model))
        assert measured.payload == 2 * sum(stored) * 2 * 16 * 4
        copies = 2 * 4 if "delete" in knobs else 0
        assert measured.overhead == 2 * (sum(stored) * (4 + 4 * 8) + 4 * 4 + copies)
        assert measured.payload + measured.overhead == cache.nbytes()
        assert measured.kept == sum(stored) / 4


def test_a_head_without_tokens_is_refused_unless_it_copies_another():
    model = mha()
    (cache,) = kvbench.prefill(
        model, prompt(40), [ready(model, {"method": "uncomp-group", "kv_size": 15, "delete": 1})]
    )
    arguments = [replace(layer, copy_from=torch.arange(4).to(torch.int16)) for layer in cache.layers]
    with pytest.raises(Refused, match="holds no token at all"):
        audit(replace(cache, layers=tuple(arguments)), cache_shape(model))
    with pytest.raises(Refused, match="holds no token at all"):
        audit(replace(cache, layers=tuple(replace(layer, copy_from=None) for layer in arguments)), cache_shape(model))


def test_no_head_ever_holds_more_than_its_own_budget():
    model = build("llama")
    (cache,) = kvbench.prefill(model, prompt(30), [ready(model, {"method": "uncomp-group", "high": 20, "low": 10})])
    for token in prompt(25, 3).split(1):
        cache = kvbench.extend(model, cache, token)
        assert all(sorted(len(p) for p in ref.kept(layer)) == [10, 20] for layer in cache.layers)
        assert all(p[-8:] == list(range(cache.seen - 8, cache.seen)) for la in cache.layers for p in ref.kept(la))


def test_a_prompt_within_the_mean_is_whole_and_gives_way_with_the_first_new_token():
    model = build("llama")
    (cache,) = kvbench.prefill(model, prompt(18), [ready(model, {"method": "uncomp-group", "kv_size": 18})])
    assert [len(p) for p in ref.kept(cache.layers[0])] == [18, 18]
    cache = kvbench.extend(model, cache, prompt(1))
    assert sorted(len(p) for p in ref.kept(cache.layers[0])) == [12, 19]


@pytest.mark.parametrize("delete", [1, 3])
@pytest.mark.parametrize("n", [1, 3, 7, 8, 9, 15, 16])
def test_heads_are_deleted_from_prompts_shorter_than_the_window_too(n, delete):
    model = mha()
    entry = {"method": "uncomp-group", "kv_size": 15, "delete": delete}
    (cache,) = kvbench.prefill(model, prompt(n, 2), [ready(model, entry)])
    content = calibrations.uncomp(2, 4)
    for i, layer in enumerate(cache.layers):
        gone = slow_gone(content, i, delete)
        assert [len(p) for p in ref.kept(layer)] == [0 if h in gone else min(n, 15) for h in range(4)]
        assert all(p[-1] == n - 1 for p in ref.kept(layer) if p)
    audit(cache, cache_shape(model))
    assert len(kvbench.generate(model, [cache], 10)[0]) == 10


def test_heads_are_deleted_where_the_stage_leaves_fewer_tokens_than_the_window():
    model = mha()
    knobs = {"uncomp-stage.least": 0.1, "uncomp-stage.last": 2, "uncomp-group.delete": 1}
    entry = {"method": "uncomp-stage+uncomp-group", "kv_size": 15, **knobs}
    (cache,) = kvbench.prefill(model, prompt(20, 2), [ready(model, entry)])
    assert [sorted(len(p) for p in ref.kept(layer)) for layer in cache.layers] == [[0, 15, 15, 15], [0, 2, 2, 2]]
    audit(cache, cache_shape(model))


REFUSED = {
    "high=64": "method.uncomp-group.high=64 is not possible: given together with low",
    "high=64 low=8": "method.uncomp-group.low=8 is not possible: above the window 8",
    "high=32 low=64": "method.uncomp-group.high=32 is not possible: a whole number, at least low",
    "high=64 low=32 kv_size=48": "method.uncomp-group.high=64 is not possible: a budget of its own",
    "high=64 low=32 kv_ratio=0.5": "method.uncomp-group.high=64 is not possible: a budget of its own",
    "high=64 low=32 delete=1": "method.uncomp-group.delete=1 is not possible: 0 where high and low",
    "grouping=best": "calibrated or random or reversed",
    "scale=0.5": "a number, 1 or more",
    "groups=0": "a whole number, 1 or more",
    "tokens=1": "2 or more, or null",
    "delete=2": "grouped query heads share what is stored: give per=query_head",
    "delete=8 per=query_head": "fewer than the 8 heads that are stored",
}


@pytest.mark.parametrize("line", REFUSED)
def test_impossible_requests_are_refused_before_a_model_loads(line, capsys, tmp_path, monkeypatch):
    from kvbench.cli.main import main

    monkeypatch.chdir(tmp_path)
    assert main(["run", "method=uncomp-group", *line.split()]) == 2
    assert REFUSED[line] in capsys.readouterr().err


def test_a_preset_uses_the_papers_numbers_and_an_explicit_pair_replaces_the_budget():
    (plain,) = chain_of({"method": "uncomp-group", "kv_size": 384}).stages
    assert plain.capacity(5000).tokens == 384
    (pair,) = chain_of({"method": "uncomp-group", "high": 512, "low": 16}).stages
    assert pair.capacity(5000).tokens == 264
    with pytest.raises(UsageError, match="two ways"):
        chain_of({"method": "uncomp-group", "kv_size": 64, "kv_ratio": 0.5})


def test_what_holds_before_calibration_is_the_sum_and_the_bounds():
    (loose,) = chain_of({"method": "uncomp-group", "high": 90, "low": 30}).stages
    (calibrated,) = bound(Chain((loose,)), LAYERS, 8).stages
    before, after = (s.expected(200, 1, LAYERS, 8) for s in (loose, calibrated))
    assert (set(before.low), set(before.high), before.total) == ({30}, {90}, 480)
    assert after.low == after.high == tuple(calibrated.compute_head_sizes(200, 1, 8)) and after.total == before.total
    assert loose.max_chunk(200, LAYERS) == 30
    assert replace(loose, frozen_layers=(0,)).max_chunk(200, LAYERS) == 30
    assert replace(loose, frozen_layers=tuple(range(LAYERS))).max_chunk(200, LAYERS) == NO_LIMIT
