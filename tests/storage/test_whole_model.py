"""A whole model over stored caches: answers and appended text are those of a dense reference, token by token."""

import functools
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from support import method_reference as ref
from support.families import build, prompt
from support.storage_reference import Layer, Storage
from transformers import AttentionInterface

import kvbench
from kvbench.audit.decode_audit import check_peak
from kvbench.audit.prompt_audit import audit
from kvbench.engine.decode import generate_rows
from kvbench.engine.likelihood import teacher_force
from kvbench.engine.stopping import Ending
from kvbench.kv.segment import storage_bytes
from kvbench.models.interface import cache_shape

pytestmark = pytest.mark.e2e("whole models decode, every chain")

N, NEW, D, SIZE = 45, 18, 16, 24
SMALL = {"recent": 5, "observed": 8, "ratio": 0.4, "group": 4, "residual": 8}
THIN = {"prune": "think", "keys": 10, "recent": 5}
THIN_BOTH = {"prune": "thinkv", "keys": 10, "values": 8, "recent": 5}
PACKED = {"group": 4, "residual": 8, "bits": 2}

CHAINS = {
    "think": Storage(**THIN),
    "thinkv": Storage(**THIN_BOTH),
    "kivi": Storage(quantiser="kivi", **PACKED),
    "thinkv+kivi": Storage(quantiser="kivi", **PACKED, **THIN_BOTH),
    "think+flexgen": Storage(quantiser="flexgen", bits=4, group=4, **THIN),
    "snapkv+think+kivi": Storage(quantiser="kivi", **PACKED, **THIN),
    "adakv+kivi": Storage(quantiser="kivi", **PACKED),
}


def entry(name):
    knobs = {"thinkv.value_ratio": 0.5} if "thinkv" in name else {}
    for part in name.split("+"):
        own_value = {"snapkv": ("kv_size", "window"), "adakv": ("kv_size", "window"), "kivi": ("group", "residual")}
        own_value |= {"think": ("recent", "observed", "ratio"), "flexgen": ("group",)}
        own_value["thinkv"] = own_value["think"]
        knobs |= {f"{part}.{k}": {**SMALL, "kv_size": SIZE, "window": 6}[k] for k in own_value[part]}
    return {"method": name, **knobs}


def retained(name, attn, heads):
    if name.startswith("snapkv"):
        return ref.snapkv(attn, heads, SIZE, 6, 7, "max")
    if name.startswith("adakv"):
        return ref.adakv(attn, heads, SIZE, 6, 7, "max", 0.2, "mixed")
    return [list(range(len(attn[0])))] * heads


def small():
    return build("llama", num_hidden_layers=2)


@contextmanager
def attended(model, attend):
    AttentionInterface.register("slow_storage", attend)
    before = model.config._attn_implementation
    model.set_attn_implementation("slow_storage")
    try:
        with torch.no_grad():
            yield
    finally:
        model.set_attn_implementation(before)


@functools.cache
def read_prompt(seed):
    """q, k, v, their scale and attention by layer, and the last logits of N tokens: every method reads them so."""
    layers = []

    def attend(module, query, key, value, mask, scaling, **_):
        q, k, v = query[0], key[0], value[0]
        attn = ref.attention(q, k, scaling)
        layers.append((q, k, v, scaling, attn))
        mixed = torch.stack([torch.tensor(a) @ v[h // 2] for h, a in enumerate(attn)])
        return mixed.transpose(0, 1)[None], None

    with attended(small(), attend):
        logits = small()(prompt(N, seed)[None], use_cache=False).logits[0, -1]
    return layers, logits


class Dense:
    """A small Llama that reads a prompt at once and then tokens one by one, over plain lists of what is stored."""

    def __init__(self, name, seed, per, storage=None):
        self.read, heads = N, 4 if per == "query_head" else 2
        layers, self.logits = read_prompt(seed)
        self.layers = [
            Layer(storage or CHAINS[name], q, k, v, retained(name, attn, heads), scale)
            for q, k, v, scale, attn in layers
        ]

    def attend(self, module, query, key, value, mask, scaling, **_):
        return self.layers[module.layer_idx].step(query[0], key[0], value[0]).transpose(0, 1)[None], None

    def feed(self, ids):
        """Logits after ``ids``."""
        positions = torch.arange(self.read, self.read + len(ids))[None]
        self.read += len(ids)
        with attended(small(), self.attend):
            return small()(ids[None], position_ids=positions, use_cache=False).logits[0, -1]

    def answer(self, new):
        tokens = [int(self.logits.argmax())]
        while len(tokens) < new:
            self.logits = self.feed(torch.tensor(tokens[-1:]))
            tokens.append(int(self.logits.argmax()))
        return tokens


def close(a, b, name):
    """Numbers that differ by fp32 rounding can be next to each other in fp16, where scales and minima are stored."""
    near = 2e-2 if CHAINS[name].quantiser else 2e-4
    torch.testing.assert_close(a, b, atol=near, rtol=near)


@pytest.mark.parametrize("per", ["kv_head", "query_head"])
def test_answers_and_logits_are_those_of_the_reference(per):
    model, ids = small(), prompt(N, 5)
    caches = kvbench.prefill(model, ids, [entry(name) for name in CHAINS], per=per)
    answers = generate_rows(model, caches, [Ending(NEW)] * len(caches))
    for name, cache, answer in zip(CHAINS, caches, answers, strict=True):
        check_peak(cache, answer.held, NEW - 1)
        audit(cache, cache_shape(model))
        slow = Dense(name, 5, per)
        close(cache.logits, slow.logits, name)
        for layer, head in zip(cache.layers, slow.layers, strict=True):
            assert [len(t) for t in ref.kept(layer)] == [len(h.k) for h in head.heads]
        assert answer.tokens == slow.answer(NEW), name
        # what the cache read to say this, appended: the same logits
        close(kvbench.extend(model, cache, torch.tensor(answer.tokens[:-1])).logits, slow.logits, name)


@pytest.mark.parametrize("per", ["kv_head", "query_head"])
@pytest.mark.parametrize("name", CHAINS)
def test_text_appended_in_pieces_is_stored_as_if_it_were_generated(name, per):
    model, ids, more = small(), prompt(N, 6), prompt(20, 7)
    (cache,) = kvbench.prefill(model, ids, [entry(name)], per=per)
    slow, at_once, pieces = Dense(name, 6, per), kvbench.extend(model, cache, more), cache
    for piece in more.split([1, 9, 3, 7]):
        pieces = kvbench.extend(model, pieces, piece)
        for token in piece.split(1):
            wanted = slow.feed(token)
        close(pieces.logits, wanted, name)
    close(at_once.logits, pieces.logits, name)
    for a, b in zip(at_once.layers, pieces.layers, strict=True):
        assert ref.kept(a) == ref.kept(b)
        held_bytes = [storage_bytes(t for s in layer.segments for t in s.payload()) for layer in (a, b)]
        assert held_bytes[0] == held_bytes[1]
        if CHAINS[name].quantiser:
            blocks = [block for tokens in ref.kept(a) for block in cache.chain.layout(len(tokens), D, 4)]
            assert held_bytes[0] == sum(block.key_bytes + block.value_bytes for block in blocks)
    answers = kvbench.generate(model, [pieces, at_once], 12)
    assert answers[0] == answers[1]


def test_a_text_that_is_scored_token_by_token_is_stored_likewise():
    model, ids, text = small(), prompt(N, 8), prompt(20, 9)
    caches = kvbench.prefill(model, ids, [entry(name) for name in CHAINS])
    for name, forced in zip(CHAINS, teacher_force(model, caches, text, 1), strict=True):
        slow = Dense(name, 8, "kv_head")
        wanted = []
        for token in text.split(1):
            wanted.append(-slow.logits.log_softmax(0)[int(token)])
            slow.logits = slow.feed(token)
        close(forced.losses, torch.stack(wanted), name)


@pytest.mark.parametrize("chunk", [7, 16])
def test_a_chunk_of_scored_text_is_read_as_if_its_tokens_were_exact(chunk):
    """One step reads all of its own tokens exactly: with a residual that holds them all, chunks change nothing."""
    model, ids, text = small(), prompt(20, 8), prompt(30, 9)
    wide = {"method": "kivi", "group": 4, "residual": 64}
    (cache,) = kvbench.prefill(model, ids, [wide])
    one, many = (teacher_force(model, [cache], text, c)[0].losses for c in (1, chunk))
    torch.testing.assert_close(one, many, atol=2e-4, rtol=2e-4)


@functools.cache
def said(**other):
    """The logits of each of some tokens under the rules of a chain, or under others."""
    dense = Dense("thinkv+kivi", 6, "kv_head", replace(CHAINS["thinkv+kivi"], **other))
    return torch.stack([dense.feed(token) for token in prompt(20, 7).split(1)])


@pytest.mark.parametrize(
    "other", [{"residual": 12}, {"residual": 4}, {"group": 8}, {"recent": 9}, {"recent": 0}, {"bits": 3}]
)
def test_another_rule_of_storage_would_be_seen(other):
    """Otherwise the tolerance above would hide what it is to find."""
    assert (said() - said(**other)).abs().max() > 0.2
