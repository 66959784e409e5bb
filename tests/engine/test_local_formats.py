"""Formats code the tokens of local layers as they code all others, as inference engines do."""

from dataclasses import replace

import pytest
import torch
from support import method_reference as ref
from support.families import build, prompt
from transformers import DynamicCache

import kvbench
from kvbench.audit.accounting import bytes_declared
from kvbench.audit.prompt_audit import audit
from kvbench.engine.step import build as batch_of
from kvbench.kv.model_shape import from_config, key_layers, local_layers
from kvbench.methods.core.resolve import chain_of
from kvbench.models.interface import cache_shape
from kvbench.models.releases import named_cache

WINDOW, N = 24, 70
FAMILIES = ("gemma2", "gemma3_text", "gpt_oss")
FORMATS = [
    {"method": "q4_0", "group": 16},
    {"method": "q4_0", "group": 16, "rotate": "hadamard"},
    {"method": "fp8", "scale": "token_head"},
    {"method": "turboquant"},
    {"method": "int4", "only": "keys"},
    {"method": "int8", "only": "values"},
    {"method": "q8_0", "group": 16, "decode": "exact"},
    {"method": "q4_0", "group": 16, "residual": 5},
    {"method": "q4_0", "group": 16, "values": "fp8_e4m3", "residual": 3},
]


class Rounded:
    """Keys or values of one layer in transformers' own cache: the codes' numbers, then the exact ones behind them."""

    def __init__(self, exact, pack, residual, grows, first):
        self.exact, self.pack, self.residual, self.grows = exact, pack, residual, grows
        # a local layer's rule counts the tokens of its window, which begins at ``first``
        self.coded = first + residual.packed(exact.shape[2] - first)

    def append(self, x):
        self.exact = torch.cat([self.exact, x], dim=2)
        if self.grows:
            self.coded += self.residual.packed(self.exact.shape[2] - self.coded)

    def read(self):
        packed = self.pack(self.exact[:, :, : self.coded]).dequantise(torch.float32)
        return torch.cat([packed, self.exact[:, :, self.coded :]], dim=2)


def reference(model, ids, entry, new):
    """The answer of transformers' own attention over a cache whose every layer holds coded keys and values."""
    chain, cache = chain_of(entry), DynamicCache()
    coder, packer = chain.coder_at(0), chain.quantiser
    with torch.no_grad():
        logits = model(ids[None], **named_cache(cache), logits_to_keep=1).logits[0, -1]
    local = local_layers(model.config)
    for i, layer in enumerate(cache.layers):
        first = len(ids) - WINDOW if i in local else 0
        keys = Rounded(layer.keys, packer.pack_keys, coder.keys, coder.grows, first)
        values = Rounded(layer.values, packer.pack_values, coder.values, coder.grows, first)

        def update(k, v, *_, keys=keys, values=values, layer=layer, **__):
            keys.append(k)
            values.append(v)
            layer.keys, layer.values = keys.read(), values.read()
            return layer.keys, layer.values

        layer.update = update
    answer = [int(logits.argmax())]
    while len(answer) < new:
        with torch.no_grad():
            at = torch.tensor([[cache.get_seq_length()]])
            out = model(torch.tensor([[answer[-1]]]), position_ids=at, **named_cache(cache), logits_to_keep=1)
        answer.append(int(out.logits[0, -1].argmax()))
    return answer


@pytest.mark.parametrize("entry", FORMATS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_a_cache_whose_every_layer_is_coded(family, entry):
    model, ids, new = build(family), prompt(N), 30
    (cache,) = kvbench.prefill(model, ids, [entry])
    audit(cache, cache_shape(model))
    assert kvbench.generate(model, [cache], new) == [reference(model, ids, entry, new)]


@pytest.mark.parametrize("entry", [*FORMATS, {"method": "fp8", "scale": "tensor"}], ids=str)
@pytest.mark.parametrize("family", ["gemma3_text", "llama4_text"])
def test_batches_and_longer_texts_store_what_single_steps_store(family, entry):
    model, more = build(family), prompt(9, 4)
    caches = [kvbench.prefill(model, prompt(n), [entry])[0] for n in (10, 33, N)]
    alone = [kvbench.generate(model, [cache], 8)[0] for cache in caches]
    assert kvbench.generate(model, caches, 8) == alone
    at_once = kvbench.extend(model, caches[2], more)
    one_by_one = caches[2]
    for token in more:
        one_by_one = kvbench.extend(model, one_by_one, token[None])
    for a, b in zip((*at_once.layers, *at_once.local), (*one_by_one.layers, *one_by_one.local), strict=True):
        assert ref.kept(a) == ref.kept(b)
        assert a.nbytes() == b.nbytes()
        assert [t.shape for t in a.segments[0].payload()] == [t.shape for t in b.segments[0].payload()]
    torch.testing.assert_close(at_once.logits, one_by_one.logits, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_count_the_codes_of_local_layers_and_a_knob_leaves_them_exact(family):
    model, shape = build(family), from_config(build(family).config)
    coded, exact = ({"method": "q4_0", "group": 16}, {"method": "q4_0", "group": 16, "local": "exact"})
    caches = kvbench.prefill(model, prompt(N), [coded, exact, "full", {"method": "kivi", "group": 8, "residual": 8}])
    # a token has 2 heads of 16 channels: 8 bytes of codes and 2 of the scale, or 64 bytes in fp32
    local = [sum(layer.nbytes() for layer in cache.local) for cache in caches]
    each = shape.local_layers * WINDOW
    assert local == [each * (4 * 10 + 4), each * (4 * 64 + 4), each * (4 * 64 + 4), each * (4 * 64 + 4)]
    for cache in caches:
        measured = audit(cache, cache_shape(model))
        declared = bytes_declared(cache.chain, shape, N, 4)
        assert (measured.payload, measured.overhead) == (declared.payload, declared.overhead)
        assert measured.full_bytes == bytes_declared(caches[2].chain, shape, N, 4).payload
    # a knob that is not set is no part of a cell's id
    assert "local" not in chain_of(coded).identity()["stages"][0]["knobs"]
    batch = batch_of(model, [caches[0]], 9)
    places = [i for i, index in enumerate(key_layers(model.config)) if index in local_layers(model.config)]
    assert [batch.with_keys[place].payload() for place in places] == [[WINDOW * 40]] * len(places)


def test_the_prompt_reads_coded_windows_where_its_attention_reads_codes():
    model, ids = build("gemma3_text"), prompt(N)
    entry = {"method": "q4_0", "group": 16, "code_prefill": True}
    both, only_global, exact = kvbench.prefill(model, ids, [entry, {**entry, "local": "exact"}, "full"])
    assert not torch.allclose(both.logits, only_global.logits)
    assert not torch.allclose(only_global.logits, exact.logits)
    # layer 0 is local, and reads what it stores: its codes are those of the exact prompt
    stored = [replace(cache.local[0].segments[0].codes.k) for cache in (both,)]
    packed = chain_of(entry).quantiser.pack_keys(exact.local[0].segments[0].k)
    assert all(torch.equal(a, b) for a, b in zip(stored[0].payload(), packed.payload(), strict=True))
