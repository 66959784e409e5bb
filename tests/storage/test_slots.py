"""Decode-time eviction: against a loop that recomputes everything, flat in memory, alone as in a batch."""

import functools

import pytest
import torch
from support import decoding_reference as decoding
from support import method_reference as ref
from support.families import build, prompt

import kvbench
from kvbench.base.errors import UsageError
from kvbench.engine.step import build as build_batch
from kvbench.engine.step import find_rotaries, step
from kvbench.kv.segment import Segment
from kvbench.storage.evicting_store import Thin
from kvbench.storage.roles import Rotary

RULES = {
    "h2o": {"method": "h2o", "variant": "orig", "kv_size": 12},
    "mask": {"method": "streamingllm", "mode": "mask", "kv_size": 12},
    "rolled": {"method": "streamingllm", "mode": "rolled", "kv_size": 12},
}


@functools.cache
def that_evict_nothing(family):
    """Caches that lose no token while decoding, and what each answers alone."""
    knobs = {"kv_size": 10, "recent": 4, "snapkv.window": 4}
    caches = kvbench.prefill(build(family), prompt(33, 1), ["full", "snapkv+think"], **knobs)
    return caches, [kvbench.generate(build(family), [c], 18)[0] for c in caches]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_budget_holds_and_batched_equals_alone(rule, family):
    model = build(family)
    caches = [kvbench.prefill(model, prompt(n, n), [RULES[rule]])[0] for n in (40, 9, 25)]
    others, answers_of_others = that_evict_nothing(family)
    together = kvbench.generate(model, [*caches, *others], 18)
    assert together == [kvbench.generate(model, [c], 18)[0] for c in caches] + answers_of_others
    batch = build_batch(model, caches, 30)
    with torch.no_grad():
        from kvbench.models.interface import attached

        tokens = torch.tensor([[5]] * 3)
        seen = torch.tensor([c.seen for c in caches])
        with attached(model):
            for t in range(20):
                step(model, batch, tokens, (seen + t)[:, None])
                for layer in batch.with_keys:
                    stored = layer.formats[0][1].held()
                    want = torch.minimum(torch.tensor(12), torch.tensor([12, 9, 12]) + t + 1)
                    assert (stored == want[:, None]).all()


@pytest.mark.parametrize("rule", ["h2o", "mask"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "opt"])
def test_enough_budget_gives_the_full_caches_answers(rule, family):
    model, ids = build(family), prompt(30, 2)
    full, small = kvbench.prefill(model, ids, ["full", {**RULES[rule], "kv_size": 30 + 16}])
    answers = kvbench.generate(model, [full, small], 16)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("code_mask", [False, True])
def test_h2o_orig_equals_a_slow_simulation_with_masks(code_mask):
    model, ids = build("llama"), prompt(26, 8)
    (cache,) = kvbench.prefill(
        model, ids, [{"method": "h2o", "variant": "orig", "kv_size": 10, "code_mask": code_mask}]
    )
    answer, kept_tokens = decoding.h2o_decoding(model, ids, 14, 5, 5, code_mask=code_mask)
    assert [len(h) for h in kept_tokens[0]] == [11 if code_mask else 10] * 2
    assert kvbench.generate(model, [cache], 14) == [answer]
    longer = kvbench.extend(model, cache, torch.tensor(answer))
    assert [ref.kept(layer) for layer in longer.layers] == kept_tokens


def test_h2o_that_evicts_after_a_step_equals_a_slow_simulation():
    """A step attends C + 1 tokens, and the attention of that very step decides which C stay."""
    model, ids = build("llama"), prompt(26, 8)
    entries = [{"method": "h2o", "variant": "orig", "kv_size": 10, "evict_after": after} for after in (None, True)]
    before, cache = kvbench.prefill(model, ids, entries)
    assert [ref.kept(layer) for layer in cache.layers] == [ref.kept(layer) for layer in before.layers]
    answer, kept_tokens = decoding.h2o_decoding(model, ids, 14, 5, 5, after=True)
    assert [len(h) for h in kept_tokens[0]] == [11] * 2
    assert kvbench.generate(model, [cache], 14) == [answer]
    longer = kvbench.extend(model, cache, torch.tensor(answer))
    assert [ref.kept(layer) for layer in longer.layers] == kept_tokens


def test_turning_keys_equals_rotating_them_at_their_new_position():
    model = build("llama")
    inv = find_rotaries(model)[0].inv_freq
    k = torch.randn(2, 5, 2 * len(inv) + 3)
    rotary = Rotary(inv)
    at = torch.arange(5).expand(2, 5)
    once = rotary.turn(k, 0, at + 7)
    torch.testing.assert_close(rotary.turn(rotary.turn(k, 0, at), at, at + 7), once)
    torch.testing.assert_close(rotary.turn(once, at + 7, 0), k)
    assert torch.equal(once[..., 2 * len(inv) :], k[..., 2 * len(inv) :])


@pytest.mark.parametrize("far", [5_000, 50_000, 4_000_000])
def test_turning_back_undoes_what_the_model_did_at_far_positions(far):
    model = build("llama")
    inner = next(m for m in model.modules() if hasattr(m, "inv_freq"))
    x = torch.randn(1, 6, 16, generator=torch.Generator().manual_seed(0))
    at = far + torch.arange(6)[None]
    cos, sin = inner(x, at)
    half = torch.cat((-x[..., 8:], x[..., :8]), dim=-1)
    near_cos, near_sin = inner(x, torch.arange(100, 106)[None])
    turned = find_rotaries(model)[0].turn(x * cos + half * sin, at, torch.arange(100, 106)[None])
    torch.testing.assert_close(turned, x * near_cos + half * near_sin, atol=2e-6, rtol=0)


# spec 5, StreamingLLM: rolled
def test_rolled_first_layer_attends_as_a_fresh_pass_over_the_kept_tokens():
    """In layer 0 a key depends on its token and position alone: rolled attention is that of the kept text alone."""
    model, ids = build("llama"), prompt(40, 3)
    (cache,) = kvbench.prefill(model, ids, [{"method": "streamingllm", "mode": "rolled", "kv_size": 10}])
    (answer,) = kvbench.generate(model, [cache], 2)
    batch = build_batch(model, [cache], 4)
    outputs = []
    hook = model.model.layers[0].self_attn.register_forward_hook(lambda m, a, o: outputs.append(o[0]))
    from kvbench.models.interface import attached

    with torch.no_grad(), attached(model):
        step(model, batch, torch.tensor([[answer[0]]]), torch.tensor([[40]]))
    text = torch.cat([ids[:4], ids[35:], torch.tensor(answer[:1])])
    assert len(text) == 10
    with torch.no_grad():
        model(text[None])
    hook.remove()
    torch.testing.assert_close(outputs[0][0, -1], outputs[1][0, -1], atol=1e-5, rtol=1e-4)


def test_extend_in_chunks_keeps_the_budget_and_feeds_causally():
    model, ids = build("llama"), prompt(40, 3)
    (cache,) = kvbench.prefill(model, ids, [RULES["mask"]])
    longer = kvbench.extend(model, cache, prompt(6, 9))
    for layer in longer.layers:
        for positions in layer.kept_positions():
            assert positions.tolist() == [0, 1, 2, 3, *range(38, 46)]
    assert longer.seen == 46
    one = cache
    for token in prompt(6, 9):
        one = kvbench.extend(model, one, token[None])
    assert one.layers[0].kept_positions()[0].tolist() == longer.layers[0].kept_positions()[0].tolist()


def test_rolled_is_refused_for_learned_positions_and_storage_stages():
    with pytest.raises(UsageError, match="learns its positions"):
        kvbench.generate(build("opt"), kvbench.prefill(build("opt"), prompt(30), [RULES["rolled"]]), 3)
    with pytest.raises(UsageError, match="think stores them without some of the channels that turn together"):
        kvbench.prefill(build("llama"), prompt(30), [{**RULES["rolled"], "method": "streamingllm+think"}])
    with pytest.raises(UsageError, match="together with recent_ratio"):
        kvbench.prefill(build("llama"), prompt(30), [{"method": "h2o", "variant": "orig", "heavy_ratio": 0.25}])


def test_memory_of_the_slots_is_flat_over_many_tokens():
    model = build("llama")
    (cache,) = kvbench.prefill(model, prompt(40), [RULES["h2o"]])
    (layer, *_) = build_batch(model, [cache], 2000).with_keys
    slots = layer.formats[0][1]
    assert slots.store.k.shape[2] == 12
    assert len(layer.formats) == 1, "no dense tail beside the slots"


@pytest.mark.parametrize("new", [1, 2])
def test_a_place_for_whole_tokens_is_used_again_once_its_token_is_evicted(new):
    """Four thin tokens with channels 1 and 3 of 4, then whole ones in their slots: each slot reads as what it holds."""
    heads, size, kept = 2, 6, torch.tensor([[1, 3], [0, 1]], dtype=torch.int16)
    draw = torch.Generator().manual_seed(3)
    k, v = (torch.rand(heads, 4, d, generator=draw) for d in (2, 4))
    thin = Segment(k, v, torch.arange(4)[None].expand(heads, -1), key_channels=kept)
    store = Thin([[thin]], size=size, places=size)
    index = torch.arange(heads).repeat_interleave(4), torch.arange(4).repeat(heads)
    store.load(0, *index, thin)
    want = torch.zeros(1, heads, size, 4)
    want[0, :, :4].scatter_(2, kept.long()[:, None].expand(-1, 4, -1), k)
    held = (torch.arange(size) < 4).expand(1, heads, size).clone()
    for _ in range(20):
        # at random, each head frees as many slots as it needs for the new tokens
        slots = torch.stack([torch.randperm(size, generator=draw)[:new] for _ in range(heads)])[None]
        held.scatter_(2, slots, False)
        tokens = torch.rand(1, heads, new, 4, generator=draw)
        store.add(slots, tokens, tokens, held)
        held.scatter_(2, slots, True)
        want.scatter_(2, slots[..., None].expand_as(tokens), tokens)
        query = torch.rand(1, heads, 1, 4, generator=draw)
        logits = store.compute_logits(query, 1.0, None)
        torch.testing.assert_close(logits[held[:, :, None]], (query @ want.mT)[held[:, :, None]])
        torch.testing.assert_close(store.tokens_of_row(0)[0][held[0]], want[0][held[0]])


# spec 5, H2O: n=1001
def test_h2o_parts_by_hand():
    from kvbench.methods.h2o import H2O

    stage = H2O(variant="orig", heavy_ratio=0.25, recent_ratio=0.25)
    assert stage.parts(1001) == (250, 250)
    assert H2O(variant="orig", kv_size=9).parts(100) == (4, 5)


def test_a_chunk_larger_than_the_budget_is_refused_and_smaller_ones_run():
    from kvbench.engine.likelihood import teacher_force

    model, ids = build("llama"), prompt(80, 3)
    (cache,) = kvbench.prefill(model, ids[:40], [RULES["mask"]])
    with pytest.raises(UsageError, match="lower chunk="):
        teacher_force(model, [cache], ids[40:], 13)
    loss = teacher_force(model, [cache], ids[40:], 4)[0].losses
    assert loss.shape == (40,)
    steps = teacher_force(model, [cache], ids[40:], 1)[0].losses
    (answer,) = kvbench.generate(model, [cache], 2)
    assert float(steps[0]) >= float(-cache.logits.log_softmax(-1)[answer[0]])
