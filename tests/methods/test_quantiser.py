"""Packing keys alone or values alone: what stays exact is exact to the end, and costs what exact numbers cost."""

import pytest
import torch
from support import method_reference as ref

import kvbench
from kvbench.base.errors import UsageError
from kvbench.engine.decode_layer import RowLayer
from kvbench.kv.segment import storage_bytes
from kvbench.methods.core.resolve import chain_of
from kvbench.storage.format import Room, StoredRow

QUANTISERS = ({"method": "kivi", "group": 8, "residual": 16}, {"method": "flexgen"})


def compressed(entry, n=50, d=12, per="kv_head"):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(h, n, d, generator=g) for h in (4, 2, 2))
    dense, obs = ref.make_layer(q, k, v, per=per)
    chain = chain_of({**entry, "per": per})
    return chain, dense, chain.compress(dense, obs)


@pytest.mark.parametrize("entry", QUANTISERS, ids=lambda e: e["method"])
@pytest.mark.parametrize("per", ["kv_head", "query_head"])
@pytest.mark.parametrize("only", ["keys", "values"])
def test_the_other_half_is_exact_and_this_one_is_as_without_the_knob(entry, per, only):
    _, _, both = compressed(entry, per=per)
    chain, dense, cache = compressed({**entry, "only": only}, per=per)
    (complete,), (s,), (inputs,) = both.segments, cache.segments, dense.segments
    exact, packed, there = (s.v, s.codes.k, complete.codes.k) if only == "keys" else (s.k, s.codes.v, complete.codes.v)
    source = inputs.v if only == "keys" else inputs.k
    assert torch.equal(exact, source.repeat_interleave(dense.heads // 2, dim=0))
    assert torch.equal(packed.codes, there.codes) and packed.shape[1] > 0
    (block,) = chain.layout(50, 12, 4)
    assert (block.value_bytes if only == "keys" else block.key_bytes) == 50 * 12 * 4
    assert storage_bytes(s.payload()) == dense.heads * (block.key_bytes + block.value_bytes)


@pytest.mark.parametrize("entry", QUANTISERS, ids=lambda e: e["method"])
@pytest.mark.parametrize("only", ["keys", "values"])
def test_decoding_reads_the_exact_half_exactly(entry, only):
    """A step attends over packed keys (or values) and exact others, which stay so while more come than there were."""
    chain, dense, cache = compressed({**entry, "only": only}, n=20)
    rows, g = RowLayer([StoredRow(cache=cache, coder=chain.coder)], Room(tokens=60)), torch.Generator().manual_seed(3)
    ((_, stored),) = rows.formats
    k, v = dense.segments[0].k, dense.segments[0].v
    for _ in range(60):
        new_k, new_v, q = (torch.randn(1, h, 1, 12, generator=g) for h in (2, 2, 4))
        rows.add(new_k, new_v)
        k, v = torch.cat([k, new_k[0]], 1), torch.cat([v, new_v[0]], 1)
        packed = (stored.k if only == "keys" else stored.v).held(0)[0]
        old = packed.dequantise(torch.float32)
        seen = torch.cat([old, (k if only == "keys" else v)[:, old.shape[1] :]], 1)
        keys, values = (seen, v) if only == "keys" else (k, seen)
        logits = torch.einsum("hgd,hld->hgl", q.view(2, 2, 12), keys) * 0.3
        want = torch.einsum("hgl,hld->hgd", logits.softmax(-1), values).reshape(1, 4, 1, 12)
        torch.testing.assert_close(rows.attend(q, 0.3, None), want, rtol=1e-4, atol=1e-5)
    assert (stored.v if only == "keys" else stored.k).packed == [0]
    assert (stored.k if only == "keys" else stored.v).packed[0] > 50


def test_half_a_cache_answers_and_passes_the_audit():
    """The bytes held are audited after the prompt and while decoding; 8 bits of either half change no answer."""
    model, tokenizer = kvbench.load_model("tiny")
    text = "notes: the cold river shines slowly. the magic number of paris is 471. question: what is the magic number"
    ids = tokenizer(f"{text} of paris? answer: paris is", return_tensors="pt").input_ids
    entries = [{"method": "flexgen", "bits": 8, "group": 32, "only": o} for o in ("keys", "values")]
    caches = kvbench.prefill(model, ids, ["full", *entries])
    assert caches[1].nbytes() == caches[2].nbytes() < caches[0].nbytes()
    full, keys, values = kvbench.generate(model, caches, max_new_tokens=4, eos_token_id=None)
    assert full == keys == values


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"method": "kivi", "only": "both"}, "method.kivi.only='both'"),
        ({"method": "think+kivi", "only": "values"}, "think drops channels"),
        ({"method": "h2o+flexgen", "variant": "orig", "only": "keys"}, "method.flexgen.only=keys"),
    ],
)
def test_what_half_a_cache_cannot_do_is_refused(entry, message):
    with pytest.raises(UsageError) as error:
        chain_of(entry)
    assert message in str(error.value)
