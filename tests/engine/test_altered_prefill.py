"""Prompts whose own attention reads quantised keys or values: against explicit attention, and never shared."""

import pytest
import torch
from support import method_reference as ref
from support import qhitter_reference as slow
from support.decoding_reference import whole_pass
from support.families import build, prompt
from support.passthrough import quantisers_pass_through

import kvbench
from kvbench.audit.prompt_audit import audit
from kvbench.engine import prefill
from kvbench.methods.core.resolve import chain_of
from kvbench.models.interface import cache_shape

ALIASED = {"method": "qhitter", "kv_size": 14, "bits": 2, "v_alias": True}
SIMULATED = {"method": "flexgen", "bits": 2, "code_prefill": True}
BOTH = pytest.mark.parametrize("entry", [ALIASED, SIMULATED], ids=["qhitter", "flexgen"])


def quantised(entry):
    """``read`` of whole_pass: what a prompt's query sees under ``entry``."""

    def read(what, layer, x):
        if entry["method"] == "qhitter" and what == "k":
            return x
        return ref.rounded(x, entry["bits"]) if entry["method"] == "qhitter" else slow.min_max(x, entry["bits"])

    return read


@BOTH
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox"])
def test_logits_are_those_of_explicit_attention_over_what_is_read(entry, family):
    model, ids = build(family), prompt(40, 6)
    caches, full = kvbench.prefill(model, ids, [entry, "full"])
    layers, logits = whole_pass(model, ids, quantised(entry))
    torch.testing.assert_close(caches.logits, logits, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(caches.logits, full.logits, atol=1e-2)
    # and what is stored comes from the exact keys and values of this pass
    for layer, seen in zip(caches.layers, layers, strict=True):
        (s,), pack = layer.segments, ref.rounded if entry["method"] == "qhitter" else slow.min_max
        for packed, exact in ((s.codes.k, seen.k), (s.codes.v, seen.v)):
            want = torch.stack([exact[h, p] for h, p in enumerate(ref.kept(layer))])
            torch.testing.assert_close(packed.dequantise(torch.float32), pack(want, 2), atol=1e-4, rtol=1e-3)


def test_tokens_are_chosen_by_the_attention_that_read_quantised_tensors():
    model, ids = build("llama"), prompt(40, 6)
    entries = [
        {**ALIASED, "lam": 1.0},
        {**SIMULATED, "method": "h2o+flexgen", "kv_size": 14, "window": 5},
        {**SIMULATED, "method": "snapkv+flexgen", "kv_size": 14, "window": 5, "kernel": 1},
        {**SIMULATED, "method": "tova+flexgen", "kv_size": 14},
    ]
    aliased, *simulated = kvbench.prefill(model, ids, entries)
    rows, _ = whole_pass(model, ids, quantised(ALIASED))
    first, second, recent = aliased.chain.selector.parts(40)
    for layer, attn in zip(aliased.layers, rows, strict=True):
        mass = ref.stored(ref.row_sums(attn, 40), 2)
        want = [ref.top(m[: 40 - recent], first + second) + list(range(40 - recent, 40)) for m in mass]
        assert ref.kept(layer) == want
    rows, _ = whole_pass(model, ids, quantised(SIMULATED))
    h2o, snapkv, tova = simulated
    for i, attn in enumerate(rows):
        assert ref.kept(h2o.layers[i]) == ref.h2o(attn, 2, 14, 5, "all")
        assert ref.kept(snapkv.layers[i]) == ref.snapkv(attn, 2, 14, 5, 1, "max")
        assert ref.kept(tova.layers[i]) == ref.tova(attn, 2, 14, False)
    exact = kvbench.prefill(model, ids, [{**e, "code_prefill": False} for e in entries[1:]])
    for a, b in zip(simulated, exact, strict=True):
        assert [ref.kept(x) for x in a.layers] != [ref.kept(x) for x in b.layers]


def test_only_chains_that_read_alike_share_a_prefill(monkeypatch):
    model, ids, passes = build("llama"), prompt(40, 6), []
    real = prefill._run_shared_pass

    def counted(model, ids, chains, *options):
        passes.append([c.name for c in chains])
        return real(model, ids, chains, *options)

    monkeypatch.setattr(prefill, "_run_shared_pass", counted)
    entries = [
        "full",
        ALIASED,
        {**ALIASED, "lam": 1.0, "variant": "paper"},
        {**ALIASED, "bits": 4},
        {**ALIASED, "v_alias": False},
        SIMULATED,
        {**SIMULATED, "method": "snapkv+flexgen", "kv_size": 14, "window": 4},
        {**SIMULATED, "group": 8},
        {**SIMULATED, "code_prefill": False},
    ]
    together = kvbench.prefill(model, ids, entries)
    assert passes == [
        ["full", "qhitter", "flexgen"],
        ["qhitter", "qhitter"],
        ["qhitter"],
        ["flexgen", "snapkv+flexgen"],
        ["flexgen"],
    ]
    assert len({c.chain.prefill_key for c in together}) == 5
    for entry, shared in zip(entries, together, strict=True):
        (alone,) = kvbench.prefill(model, ids, [entry])
        assert torch.equal(alone.logits, shared.logits)
        assert [ref.kept(x) for x in alone.layers] == [ref.kept(x) for x in shared.layers]
        audit(shared, cache_shape(model))


@BOTH
@pytest.mark.parametrize("per", ["kv_head", "query_head"])
@pytest.mark.parametrize("family", ["llama", "mistral", "opt"])
def test_a_quantiser_that_loses_nothing_leaves_the_prompt_and_the_answer_alone(entry, per, family):
    model, ids = build(family), prompt(40, 6)
    with quantisers_pass_through():
        caches, full = kvbench.prefill(model, ids, [{**entry, "kv_size": 200} if "kv_size" in entry else entry, "full"])
        assert torch.equal(caches.logits, full.logits)
        assert kvbench.generate(model, [caches], 6) == kvbench.generate(model, [full], 6)


@BOTH
def test_the_plain_defaults_read_the_prompt_exactly(entry):
    assert chain_of(entry["method"]).prefill_key == ""
    assert chain_of(entry).prefill_key != ""
    assert chain_of(entry).identity() != chain_of({**entry, "bits": 4}).identity()
