"""Every method picks exactly the tokens and channels of its slow reference, ties included."""

import copy

import pytest
import torch
from support import method_reference as ref
from support.families import build, prompt
from support.grids import grid

import kvbench
from kvbench.methods.core.resolve import chain_of

N, SIZE, D = 26, 11, 8
KEPT_CHANNELS = 5  # of 8 at ratio 0.375, in both roundings; odd, so that it parts a pair of equal channels
SHAPES = {"mha": (3, 3), "gqa": (4, 2), "mqa": (4, 1)}
PER = ("kv_head", "query_head")
DATA = ("random", "ties")

SELECTORS = [
    ("snapkv", {"window": 4, "kernel": 3, "pooling": "max"}),
    ("snapkv", {"window": 4, "kernel": 5, "pooling": "avg"}),
    ("pyramidkv", {"window": 4, "kernel": 3, "pooling": "max", "beta": 5}),
    ("h2o", {"window": 4, "variant": "win"}),
    ("h2o", {"window": 4, "variant": "all"}),
    *(("h2o", {"window": 4, "variant": v, "score_bits": b}) for v in ("win", "all") for b in (8, 3, 2)),
    ("scissorhands", {"window": 7, "recent": 4, "variant": "code"}),
    ("scissorhands", {"window": 400, "recent": 4, "variant": "paper"}),
    ("tova", {"per_head": False}),
    ("tova", {"per_head": True}),
    ("keynorm", {"protect_recent": 0}),
    ("keynorm", {"protect_recent": 4}),
    ("streamingllm", {"sinks": 4}),
    ("keydiff", {}),
    ("keydiff", {"variant": "block", "block": 4}),
    ("keydiff", {"variant": "paper", "block": 4}),
    ("chunkkv", {"window": 4, "kernel": 1, "pooling": "avg", "chunk": 3, "variant": "fill"}),
    ("chunkkv", {"window": 4, "kernel": 3, "pooling": "avg", "chunk": 5, "variant": "paper"}),
    ("chunkkv", {"window": 4, "kernel": 3, "pooling": "avg", "chunk": 3, "variant": "code"}),
]
EXACT = [s for s in SELECTORS if s[0] in ("snapkv", "h2o") and "score_bits" not in s[1]]
PRUNERS = [("think", {"observed": 5}), ("l1", {}), ("l2", {})]


def tensors(shape, data):
    """q [Hq, N, D], k [Hk, N, D]; ``ties``: few distinct keys, and channels that repeat with the sign turned."""
    hq, hk = SHAPES[shape]
    q, k = ref.grid(hq, N, D, seed=1), ref.grid(hk, N, D, seed=2)
    if data == "ties":
        k = k[:, torch.arange(N) % 5]
        q[..., 4:], k[..., 4:] = q[..., :4].clone(), -k[..., :4]
    return q, k


def expected_tokens(method, knobs, q, k, heads):
    if method in ("keynorm", "keydiff"):
        return getattr(ref, method)(k, heads, SIZE, **knobs)
    if method == "streamingllm":
        return ref.streamingllm(N, heads, SIZE, **knobs)
    bits = knobs.get("score_bits")
    if bits:
        k, knobs = ref.rounded(k, bits), {name: v for name, v in knobs.items() if name != "score_bits"}
    return getattr(ref, method)(ref.attention(q, k), heads, SIZE, **knobs)


def expected_channels(method, q, k, tokens, count):
    if method == "think":
        return ref.think(q, k, tokens, count, observed=5)
    return ref.magnitude(k, tokens, count, p=int(method[1]))


@grid("data", DATA)
@grid("per", PER)
@grid("shape", SHAPES)
@grid(("method", "knobs"), SELECTORS)
def test_selectors_keep_the_tokens_of_their_reference(method, knobs, shape, per, data):
    q, k = tensors(shape, data)
    dense, obs = ref.make_layer(q, k, per=per, bits=(8, 3, 2))
    cache = chain_of({"method": method, "kv_size": SIZE, "per": per, **knobs}).compress(dense, obs)
    wanted = expected_tokens(method, knobs, q, k, dense.heads)
    assert ref.kept(cache) == wanted
    keys, values = dense.segments[0].k, dense.segments[0].v
    for h, tokens in enumerate(wanted):
        source = h // (dense.heads // k.shape[0])
        assert torch.equal(cache.segments[0].k[h], keys[source, tokens])
        assert torch.equal(cache.segments[0].v[h], values[source, tokens])


@grid("data", DATA)
@grid("per", PER)
@grid("shape", SHAPES)
@grid("first", [None, ("snapkv", {"window": 4, "kernel": 3, "pooling": "max"})])
@grid(("method", "knobs"), PRUNERS)
def test_pruners_keep_the_channels_of_their_reference(method, knobs, first, shape, per, data):
    q, k = tensors(shape, data)
    dense, obs = ref.make_layer(q, k, per=per)
    entry = {"method": method, "per": per, "ratio": 0.375, "recent": 3, **knobs}
    tokens = [list(range(N))] * dense.heads
    if first:
        entry.update(first[1], method=f"{first[0]}+{method}", kv_size=SIZE)
        tokens = expected_tokens(*first, q, k, dense.heads)
    cache = chain_of(entry).compress(dense, obs)
    wanted = expected_channels(method, q, k, tokens, KEPT_CHANNELS)
    thin, recent = cache.segments
    assert thin.key_channels.tolist() == wanted
    assert ref.kept(cache) == tokens
    for h, channels in enumerate(wanted):
        source = k[h // (dense.heads // k.shape[0])]
        assert torch.equal(thin.k[h], source[tokens[h][:-3]][:, channels])
        assert torch.equal(recent.k[h], source[tokens[h][-3:]])


def test_the_constructed_ties_decide_at_the_cut():
    """Otherwise the ties above would prove nothing about the order of equal scores."""
    q, k = tensors("gqa", "ties")
    norms = sorted(-sum(x * x for x in token) for token in k[0].tolist())[::-1]
    assert norms[SIZE - 1] == norms[SIZE]
    received = ref.row_sums(ref.attention(q, k), 4)
    ordered = sorted(ref.stored(received, 2)[0][: N - 4])[::-1]
    assert ordered[SIZE - 4 - 1] == ordered[SIZE - 4]
    columns = sorted(k[0].abs().sum(dim=0).tolist())[::-1]
    assert columns[KEPT_CHANNELS - 1] == columns[KEPT_CHANNELS]


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize(
    ("method", "knobs"), [s for s in SELECTORS if s[0] in ("snapkv", "h2o") and "score_bits" not in s[1]]
)
def test_selectors_agree_with_the_attention_that_transformers_reports(method, knobs, per, family):
    model, ids = build(family), prompt(40, 4)
    (cache,) = kvbench.prefill(model, ids, [{"method": method, "kv_size": SIZE, **knobs}], per=per)
    attentions = eager_attentions(model, ids)
    for layer, attn in zip(cache.layers, attentions, strict=True):
        assert ref.kept(layer) == getattr(ref, method)(attn, layer.heads, SIZE, **knobs)


def eager_attentions(model, ids):
    """Return A[h][i][j] of every layer, by a copy of the model: transformers leaves its recording hooks on it."""
    copied = copy.deepcopy(model)
    copied.set_attn_implementation("eager")
    with torch.inference_mode():
        return [a[0].double().tolist() for a in copied(ids[None], output_attentions=True).attentions]
