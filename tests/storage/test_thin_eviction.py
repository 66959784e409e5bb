"""Thin tokens behind selectors that evict while decoding: against whole passes with explicit masks and zeros."""

import functools

import pytest
import torch
from support import decoding_reference as decoding
from support import method_reference as ref
from support.families import build, generated, prompt

import kvbench
from kvbench.audit.decode_audit import check_peak
from kvbench.audit.prompt_audit import audit
from kvbench.base.errors import UsageError
from kvbench.engine.decode import generate_rows, step
from kvbench.engine.step import build as build_batch
from kvbench.engine.stopping import Ending
from kvbench.methods.core.resolve import chain_of
from kvbench.models.interface import attached, cache_shape

pytestmark = pytest.mark.e2e("whole models decode beside a slow reference")

N, NEW, SIZE = 34, 14, 16
PER = {"kv_head": 2, "query_head": 4}
STORED = {
    "think": ({"ratio": 0.4}, {"keys": 10, "values": 16}),
    "thinkv": ({"ratio": 0.3, "value_ratio": 0.5}, {"keys": 12, "values": 8}),
    "l1": ({"ratio": 0.5}, {"keys": 8, "values": 16}),
    "l2": ({"ratio": 0.5}, {"keys": 8, "values": 16}),
}


def small():
    return build("llama", num_hidden_layers=2)


def entry(method, recent=5, **more):
    pruner = next(p for p in STORED if p in method.split("+"))
    knobs = {**STORED[pruner][0], "recent": recent, **({"observed": 8} if "think" in pruner else {})}
    return {"method": method, "kv_size": SIZE, **{f"{pruner}.{k}": v for k, v in knobs.items()}, **more}


def thin(pruner, recent=5):
    return decoding.Thin(pruner, **STORED[pruner][1], recent=recent)


def check(model, ids, made, per, answer, held):
    """The answer, and what is held at its end, are those of the reference; what is held is what is declared."""
    (cache,) = kvbench.prefill(model, ids, [made], per=per)
    audit(cache, cache_shape(model))
    assert cache.layers[0].segments[0].key_channels is not None
    (actual,) = generate_rows(model, [cache], [Ending(len(answer))])
    assert actual.tokens == answer
    check_peak(cache, actual.held, len(answer) - 1)
    longer = kvbench.extend(model, cache, torch.tensor(answer))
    assert [ref.kept(layer) for layer in longer.layers] == held
    return cache, longer


@functools.cache
def without_pruner(bits, mask, heads):
    """The answers of H2O where every token holds all channels."""
    return decoding.h2o_decoding(small(), prompt(N, 8), NEW, 8, 8, bits, mask, None, heads)[0]


KNOBS = {"plain": {}, "code_mask": {"code_mask": True}, "score_bits": {"score_bits": 3}}


# each pair of pruner, knobs and kind of heads
@pytest.mark.parametrize(
    ("pruner", "knobs", "per"),
    [(p, k, list(PER)[(i + j) % len(PER)]) for i, p in enumerate(STORED) for j, k in enumerate(KNOBS)],
)
def test_h2o_drops_thin_and_whole_tokens_alike(pruner, knobs, per):
    knobs = KNOBS[knobs]
    model, ids = small(), prompt(N, 8)
    built = entry(f"h2o+{pruner}", **{"variant": "orig", **knobs})
    bits, mask = knobs.get("score_bits"), knobs.get("code_mask", False)
    stores = thin(pruner)
    answer, kept_tokens = decoding.h2o_decoding(model, ids, NEW, 8, 8, bits, mask, stores, PER[per])
    cache, _ = check(model, ids, built, per, answer, kept_tokens)
    dropped = [
        set(layer.segments[0].positions[h].tolist()) - set(tokens)
        for i, layer in enumerate(cache.layers)
        for h, tokens in enumerate(kept_tokens[i])
    ]
    kept_positions = [
        set(stores.old[i][h]) & set(tokens) for i, layer in enumerate(kept_tokens) for h, tokens in enumerate(layer)
    ]
    assert any(dropped) and any(kept_positions), "some thin tokens went and some stayed"
    assert without_pruner(bits, mask, PER[per]) != answer


@pytest.mark.parametrize("pruner", STORED)
@pytest.mark.parametrize("recent", [0, 3, 15])
def test_a_sliding_window_drops_the_oldest_whatever_they_hold(pruner, recent):
    model, ids = small(), prompt(N, 3)
    sinks = 4

    def kept(attn):
        return [[*range(sinks), *range(N - SIZE + sinks, N)]] * 2

    def leaves(attn, held, head, now):
        return set(sorted(held - set(range(sinks)))[: len(held) - SIZE + 1])

    answer, held = decoding.evicting(model, ids, NEW, kept, leaves, thin=thin(pruner, recent))
    _, longer = check(model, ids, entry(f"{pruner}+streamingllm", recent, mode="mask"), "kv_head", answer, held)
    # of the prompt only sinks are left, thin ones
    assert [ref.kept(layer)[0][:4] for layer in longer.layers] == [[0, 1, 2, 3]] * 2
    assert all(layer.segments[0].tokens == min(4, SIZE - recent) for layer in longer.layers)


@pytest.mark.parametrize("pruner", ["think", "thinkv"])
def test_tova_asks_the_newest_query_over_thin_tokens(pruner):
    model, ids = small(), prompt(N, 5)

    def leaves(attn, held, head, now):
        row = ref.stored([a[-1] for a in attn], 1)[0]
        old = sorted(held - {now - 1}, key=lambda j: (row[j], -j))
        return set(old[: len(held) - (SIZE - 1)])

    answer, held = decoding.evicting(
        model, ids, NEW, lambda attn: ref.tova(attn, 2, SIZE, False), leaves, thin=thin(pruner)
    )
    check(model, ids, entry(f"tova+{pruner}"), "kv_head", answer, held)


MIXED = {
    "h2o+think": {"variant": "orig"},
    "scissorhands+l2": {"scissorhands.recent": 6, "l2.recent": 5},
    "streamingllm+thinkv": {"mode": "mask"},
    "vatp+h2o+l1": {"variant": "orig", "sinks": 2},
    "tova+think": {},
    "cake+thinkv": {"cake.window": 4, "decode_evict": True},
}


def mixed(model, lengths=(N, 20, 9)):
    """Every chain on prompts of unequal lengths, one shorter than what stays whole."""
    knobs = {m: {k: v for k, v in {**entry(m), **own_value}.items() if k != "recent"} for m, own_value in MIXED.items()}
    return [kvbench.prefill(model, prompt(n, n), [e])[0] for e in knobs.values() for n in lengths]


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_rows_answer_in_company_as_alone_while_others_leave(family):
    model = build(family, num_hidden_layers=2)
    rows = [*mixed(model), *kvbench.prefill(model, prompt(21, 4), ["full", "kivi"])]
    endings = [Ending(4 + 3 * (i % 5)) for i in range(len(rows))]
    together = generated(model, rows, endings)
    assert together == [generated(model, [r], [e])[0] for r, e in zip(rows, endings, strict=True)]


def test_text_appended_in_pieces_is_held_as_if_it_came_at_once():
    model, more, pairs = small(), prompt(SIZE - 2, 7), []
    for cache in mixed(model, (N, 9)):
        at_once, pieces = kvbench.extend(model, cache, more), cache
        for piece in more.split([1, 5, 3, 5]):
            pieces = kvbench.extend(model, pieces, piece)
        pairs.append((at_once, pieces))
        torch.testing.assert_close(pieces.logits, at_once.logits, atol=2e-4, rtol=2e-4)
        for a, b in zip(at_once.layers, pieces.layers, strict=True):
            assert ref.kept(a) == ref.kept(b)
            assert a.tokens == max(map(len, ref.kept(a))) == b.tokens
            for x, y in zip(a.segments, b.segments, strict=True):
                torch.testing.assert_close(x.k, y.k, atol=2e-4, rtol=2e-4)
                torch.testing.assert_close(x.v, y.v, atol=2e-4, rtol=2e-4)
    at_once, pieces = (generated(model, caches, [Ending(8)] * len(pairs)) for caches in zip(*pairs, strict=True))
    assert pieces == at_once


def test_slots_of_thin_tokens_are_filled_again_and_memory_is_flat():
    """A head has room for the channels kept of SIZE tokens, and for the others of as many as can be whole."""
    model = small()
    (cache,) = kvbench.prefill(model, prompt(N, 8), [entry("h2o+thinkv", variant="orig")])

    def shapes(new):
        store = build_batch(model, [cache], new).with_keys[0].formats[0][1].store
        parts = (store.k.kept, store.k.others, store.v.kept, store.v.others)
        return [tuple(t.shape[2:]) for t in parts]

    assert shapes(3) == [(SIZE, 12), (8, 4), (SIZE, 8), (8, 8)]
    assert shapes(2000) == shapes(SIZE) == [(SIZE, 12), (SIZE, 4), (SIZE, 8), (SIZE, 8)]
    batch = build_batch(model, [cache], 60)
    (layer, *_) = batch.with_keys
    store, complete = layer.formats[0][1].store, []
    before = [t.data_ptr() for t in (store.k.kept, store.k.others, store.v.kept, store.v.others)]
    with torch.no_grad(), attached(model):
        for t in range(60):
            step(model, batch, torch.tensor([[5 + t]]), torch.tensor([[N + t]]))
            stored = layer.formats[0][1].valid.gather(2, store.slot)
            complete.append((store.whole & stored).sum(dim=-1)[0].tolist())
            # a place belongs to one token, and every token that came has one
            for h in range(2):
                chosen = store.slot[0, h][store.whole[0, h]].tolist()
                assert len(set(chosen)) == len(chosen)
    assert complete[0] == [6, 6] and complete[-1] > complete[0] and max(map(max, complete)) <= SIZE
    assert before == [t.data_ptr() for t in (store.k.kept, store.k.others, store.v.kept, store.v.others)]
    assert len(layer.formats) == 1, "no dense tail beside the slots"


def test_what_cannot_be_is_refused_with_the_reason():
    with pytest.raises(UsageError, match=r"mode=rolled turns stored keys .* without some of the channels"):
        chain_of({"method": "l2+streamingllm", "mode": "rolled"})
    with pytest.raises(UsageError, match=r"positions=rolled turns stored keys .* without some of the channels"):
        chain_of({"method": "tova+think", "positions": "rolled"})
    with pytest.raises(UsageError, match="flexgen would have to quantise them at another width"):
        chain_of({"method": "think+h2o+flexgen", "variant": "orig"})
    assert chain_of({"method": "think+tova"}).name == "tova+think"
