"""ChunkKV: neighbouring tokens stay together."""

import pytest
import torch
from support import method_reference as ref
from support.families import build, prompt

import kvbench
from kvbench.audit.prompt_audit import audit
from kvbench.base.errors import UsageError
from kvbench.methods.chunkkv import ChunkKV
from kvbench.methods.core.resolve import chain_of
from kvbench.models.interface import cache_shape


def layer_with(scores):
    """Return a layer whose last query attends token j in proportion to scores[j], and itself like the last of them."""
    q, k = torch.zeros(1, len(scores), 4), torch.zeros(1, len(scores), 4)
    q[0, -1, 0] = 2.0  # times the scale of 1/2
    k[0, :, 0] = torch.tensor(scores).log()
    return ref.make_layer(q, k)


def test_the_specifications_example_by_hand():
    """Scores 1 0 5 1 1 1 in chunks of 2, one chunk to keep: {2, 3}; the window of one token is behind them."""
    layer = layer_with([1, 1e-9, 5, 1, 1, 1, 1])
    for variant, tokens in (("fill", [2, 3, 6]), ("paper", [2, 3, 6])):
        assert ref.kept(ChunkKV(kv_size=3, window=1, chunk=2, variant=variant).compress(*layer)) == [tokens]
    # one token more: the next best chunk is the first of those that tie, {4, 5}, and gives its first
    assert ref.kept(ChunkKV(kv_size=4, window=1, chunk=2).compress(*layer)) == [[2, 3, 4, 6]]
    assert ref.kept(ChunkKV(kv_size=4, window=1, chunk=2, variant="paper").compress(*layer)) == [[2, 3, 6]]


def test_kvpresss_chunks_by_hand():
    """The window's tokens have the highest score, 5: of four chunks {6} has 5, {2, 3} 3, {4, 5} 1 and {0, 1} 1/2."""
    layer = layer_with([1, 1e-9, 5, 1, 1, 1, 1])
    for size, tokens in ((2, [6]), (4, [2, 3, 6]), (6, [2, 3, 4, 5, 6])):
        cache = ChunkKV(kv_size=size, window=1, chunk=2, variant="code").compress(*layer)
        assert ref.kept(cache) == [tokens] and cache.decided == (len(tokens),)


# specification C7, and its rule max(1, floor(chunks (1 - r)))
@pytest.mark.parametrize(
    ("n", "knobs", "tokens"),
    [
        *((1000, {"kv_ratio": r}, t) for r, t in ((0.75, 740), (0.5, 500), (0.25, 240), (0.125, 120), (0.2, 200))),
        *((1000, {"kv_size": c}, t) for c, t in ((199, 180), (99, 80))),  # int(1000 (1 - .8)) and (1 - .9)
        (101, {"kv_ratio": 0.5}, (41, 60)),  # 3 of 6 chunks, of which the last has one token
        (101, {"kv_ratio": 0.999}, (81, 100)),
        (39, {"kv_ratio": 0.1}, (19, 20)),
    ],
)
def test_numbers_of_whole_chunks(n, knobs, tokens):
    least, most = tokens if isinstance(tokens, tuple) else (tokens, tokens)
    expected = ChunkKV(variant="code", chunk=20, **knobs).expected(n, 0, 4, 2)
    assert (expected.low, expected.high) == ((least,) * 2, (most,) * 2)


@pytest.mark.parametrize("variant", ["fill", "paper", "code"])
@pytest.mark.parametrize("per", ["kv_head", "query_head"])
@pytest.mark.parametrize("n", [67, 100])
def test_all_heads_hold_the_same_tokens_as_declared(variant, per, n):
    model = build("llama")
    entry = {"method": "chunkkv", "kv_size": 35, "window": 7, "chunk": 6, "variant": variant}
    (cache,) = kvbench.prefill(model, prompt(n), [entry], per=per)
    measured = audit(cache, cache_shape(model))
    for layer in cache.layers:
        (positions, *others) = ref.kept(layer)
        assert all(p == positions for p in others)
        assert layer.segments[0].positions.shape[0] == 1  # once for all heads
        body = [p for p in positions if p < n - 7]
        if variant == "fill":
            assert len(positions) == 35
        elif variant == "paper":
            ends = [p for p in body if p % 6 == 5 or p == n - 8]
            assert positions[-7:] == list(range(n - 7, n)) and len(ends) == 4
        else:
            assert len({p // 6 for p in positions}) == 35 * -(-n // 6) // n
    assert measured.overhead == sum(4 * layer.tokens for layer in cache.layers)


@pytest.mark.parametrize("variant", ["fill", "paper", "code"])
def test_layers_of_a_group_keep_the_chunks_of_their_first(variant):
    model, knobs = build("llama"), {"method": "chunkkv", "kv_size": 35, "window": 7, "chunk": 6, "variant": variant}
    entries = [knobs, {**knobs, "reuse": 2}, {**knobs, "reuse": 3}, {**knobs, "reuse": 3, "frozen_layers": [0]}]
    alone, pairs, triples, frozen = kvbench.prefill(model, prompt(90), entries)
    own = [ref.kept(layer) for layer in alone.layers]
    assert own[0] != own[1]
    assert [ref.kept(layer) for layer in pairs.layers] == [own[0], own[0], own[2]]
    assert [ref.kept(layer) for layer in triples.layers] == [own[0]] * 3
    assert [ref.kept(layer) for layer in frozen.layers] == [[list(range(90))] * 2, own[1], own[1]]
    for cache in (alone, pairs, triples, frozen):
        audit(cache, cache_shape(model))
    assert kvbench.generate(model, [pairs, frozen], 5) == [kvbench.generate(model, [c], 5)[0] for c in (pairs, frozen)]


def test_a_group_of_layers_stands_before_a_quantiser():
    (cache,) = kvbench.prefill(build("llama"), prompt(90), [{"method": "chunkkv+fp8", "kv_size": 40, "reuse": 2}])
    audit(cache, cache_shape(build("llama")))
    assert len(kvbench.generate(build("llama"), [cache], 3)[0]) == 3


def test_a_prompt_of_less_than_a_chunk_is_chosen_by_single_tokens():
    layer = layer_with([1, 2, 9, 3, 8, 1])
    for variant, tokens in (("fill", [2, 4, 5]), ("paper", [2, 4, 5]), ("code", [2, 4, 5])):
        stage = ChunkKV(kv_size=3, window=1, chunk=7, variant=variant)
        assert ref.kept(stage.compress(*layer)) == [tokens]
        assert stage.expected(6, 0, 2, 1).low == (3,)


def test_impossible_requests_are_refused():
    for knob, value in (("chunk", 0), ("variant", "best"), ("reuse", 0)):
        with pytest.raises(UsageError, match=rf"method\.chunkkv\.{knob}"):
            chain_of({"method": "chunkkv", knob: value})
    with pytest.raises(UsageError, match="variant=fill"):
        chain_of({"method": "uncomp-stage+chunkkv", "chunkkv.variant": "paper"})
    with pytest.raises(UsageError, match="all read the whole prompt"):
        chain_of({"method": "uncomp-stage+chunkkv", "chunkkv.reuse": 2})
    assert chain_of("uncomp-stage+chunkkv").name == "uncomp-stage+chunkkv"
