"""CHAI: UNComp's numbers of clusters, the clustering, its prompts against a slow reference, and what it holds."""

from dataclasses import replace

import prefill_reference as slow
import pytest
import torch
from families import FAMILIES, build, heads_of, prompt

import kvbench
from kvbench.cache.audit import Refused, audit
from kvbench.errors import UsageError
from kvbench.methods import registry
from kvbench.methods.chai import LISTS, Chai, lead_heads


# spec 5: 794/1024; UNComp's other lists: 1042/1600 and 900/1024
@pytest.mark.parametrize(
    ("name", "layers", "heads", "total"),
    [("llama2", 32, 32, 794), ("llama2-13b", 40, 40, 1042), ("llama3", 32, 32, 900)],
)
def test_the_lists_are_uncomps(name, layers, heads, total):
    assert len(LISTS[name]) == layers and sum(LISTS[name]) == total
    by_shape = Chai().counts(layers, heads, 8 if name == "llama3" else heads)
    assert tuple(by_shape) == LISTS[name] == tuple(Chai(like=name).counts(layers, heads, 8))


def test_llama_2_holds_77_54_percent_of_the_keys():
    assert round(100 * sum(LISTS["llama2"]) / 1024, 2) == 77.54
    assert round(100 * (sum(LISTS["llama2"]) + 1024) / 2048, 2) == 88.77


def test_other_models_have_llama_2s_mean_or_the_share_asked_for():
    assert Chai().counts(3, 16, 16) == [12] * 3
    assert Chai(share=0.5).counts(32, 32, 32) == [16] * 32
    assert Chai(share=0.01).counts(2, 4, 4) == [1] * 2
    assert Chai(clusters=(3, 4)).counts(2, 4, 4) == (3, 4)


def test_two_identical_heads_merge_first():
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(6, 5, 8, generator=g) for _ in "qk")
    q[4], k[4] = q[1], k[1]
    assert lead_heads(q, k, 0.3, 5).tolist() == [0, 1, 2, 3, 1, 5]
    assert lead_heads(q, k, 0.3, 6).tolist() == list(range(6))
    assert lead_heads(q, k, 0.3, 1).tolist() == [0] * 6


def test_the_maps_are_not_causal():
    """Heads 0 and 1 differ only in what the first token attends to behind itself."""
    q, k = torch.zeros(3, 5, 4), torch.zeros(3, 5, 4)
    k[:, 4, 0] = 1.0
    q[1, 0, 0], q[2, 4, 0] = 40.0, 2.0
    assert lead_heads(q, k, 1.0, 2).tolist() == [0, 1, 0]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("count", [1, 3, 5, 7, 8])
def test_clusters_are_those_of_average_linkage(seed, kv_heads, count):
    g = torch.Generator().manual_seed(seed)
    q, k = torch.randn(8, 5, 6, generator=g), torch.randn(kv_heads, 5, 6, generator=g)
    clusters = slow.clustered(q.double(), k.double(), 0.4, count)
    lead = {h: c[0] for c in clusters for h in c}
    assert lead_heads(q, k, 0.4, count).tolist() == [lead[h] for h in range(8)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("per", ["kv_head", "query_head"])
@pytest.mark.parametrize("clusters", [[2, 3, 1], [4, 1, 2]])
def test_prompt_and_decoding_are_those_of_a_slow_reference(family, per, clusters):
    model, n, new = build(family), 40, prompt(4, 9)
    attend, leads = slow.chai(clusters)
    wanted = slow.logits(model, torch.cat([prompt(n, 4), new]), attend)
    (cache,) = kvbench.prefill(model, prompt(n, 4), [{"method": "chai", "clusters": clusters}], per=per)
    for layer, lead in zip(cache.layers, leads, strict=True):
        held = layer.segments[0].leads
        assert (list(range(4)) if held is None else held.tolist()) == lead
    torch.testing.assert_close(cache.logits, wanted[n - 1], atol=1e-4, rtol=1e-4)
    at_once = kvbench.extend(model, cache, new)
    torch.testing.assert_close(at_once.logits, wanted[-1], atol=1e-4, rtol=1e-4)
    for t in range(len(new)):
        cache = kvbench.extend(model, cache, new[t : t + 1])
        torch.testing.assert_close(cache.logits, wanted[n + t], atol=1e-4, rtol=1e-4)
    for layer in cache.layers:
        # the tail holds no keys that are never read, either
        assert all(s.k.shape[0] <= layer.segments[0].k.shape[0] for s in layer.segments[1:])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("per", ["kv_head", "query_head"])
def test_bytes_are_those_of_the_leading_heads_keys_and_of_all_values(family, per):
    model, n = build(family), 40
    (cache,) = kvbench.prefill(model, prompt(n, 4), [{"method": "chai", "clusters": [1, 2, 4]}], per=per)
    kv_heads, d = heads_of(model)
    heads = 4 if per == "query_head" else kv_heads
    measured = audit(cache, kv_heads, d, model.dtype)
    item = model.dtype.itemsize
    payload = 0
    for layer, count in zip(cache.layers, (1, 2, 4), strict=True):
        (s,) = layer.segments
        lead = range(4) if s.leads is None else set(s.leads.tolist())
        rep = len({h // (4 // heads) for h in lead})
        assert len(lead) == count and (rep == count if heads == 4 else rep <= count)
        payload += rep * n * d * item + heads * n * d * item
        assert s.k.shape[0] == rep
    assert measured.payload == payload
    assert measured.overhead == 3 * 4 * n + 2 * 2 * 4
    assert measured.payload + measured.overhead == cache.nbytes()


def test_under_gqa_nothing_is_saved_while_every_group_has_a_leading_head():
    model = build("llama")
    chai, full = kvbench.prefill(model, prompt(40), [{"method": "chai", "clusters": [3, 3, 3]}, "full"])
    sizes = [audit(c, *heads_of(model), model.dtype).payload for c in (chai, full)]
    assert sizes[0] == sizes[1] and not torch.equal(chai.logits, full.logits)


@pytest.mark.parametrize("change", ["leads", "keys"])
def test_the_audit_refuses_other_heads_than_declared(change):
    model = build("opt")
    (cache,) = kvbench.prefill(model, prompt(40), [{"method": "chai", "clusters": [2, 2, 2]}])
    (s,) = cache.layers[0].segments
    other = replace(s, leads=torch.zeros_like(s.leads)) if change == "leads" else replace(s, k=s.v.clone())
    layer = replace(cache.layers[0], segments=(other,))
    with pytest.raises(Refused, match="logits of 1 query heads" if change == "leads" else "keys of 4 heads"):
        audit(replace(cache, layers=(layer, *cache.layers[1:])), *heads_of(model), model.dtype)


@pytest.mark.parametrize("n", [1, 5, 6])
def test_prompts_of_fewer_than_six_tokens_are_left_alone(n):
    model = build("llama")
    chai, full = kvbench.prefill(model, prompt(n), [{"method": "chai", "share": 0.25}, "full"])
    audit(chai, *heads_of(model), model.dtype)
    assert torch.equal(chai.logits, full.logits) == (n < 6)
    # rows with and without shared heads go on in one batch
    (long,) = kvbench.prefill(model, prompt(30), [{"method": "chai", "share": 0.25}])
    (a,), (b,) = (kvbench.generate(model, [c], 5) for c in (chai, long))
    assert kvbench.generate(model, [chai, long, full], 5)[:2] == [a, b]


@pytest.mark.parametrize("n_prompts", [3])
def test_rows_with_other_clusters_are_attended_in_one_batch(n_prompts):
    model = build("opt")
    entry = {"method": "chai", "clusters": [2, 3, 2]}
    caches = [kvbench.prefill(model, prompt(20 + 9 * i, i), [entry])[0] for i in range(n_prompts)]
    leads = {tuple(c.layers[0].segments[0].leads.tolist()) for c in caches}
    assert len(leads) > 1
    alone = [kvbench.generate(model, [c], 6)[0] for c in caches]
    assert kvbench.generate(model, caches, 6) == alone


@pytest.mark.parametrize("method", ["chai+snapkv", "chai+think", "kivi+chai", "chai+twilight"])
def test_chai_is_written_alone(method):
    with pytest.raises(UsageError, match=r"chai shares logits between heads.*written alone"):
        registry.parse(method)


@pytest.mark.parametrize(
    ("knobs", "what"),
    [
        ({"like": "llama"}, "llama2-13b, llama3"),
        ({"clusters": [0, 1]}, "1 or more"),
        ({"share": 0}, "above 0"),
        ({"share": 1.5}, "at most 1"),
        ({"share": 0.5, "clusters": [1, 2, 3]}, "share says"),
    ],
)
def test_impossible_knobs_are_refused(knobs, what):
    with pytest.raises(UsageError, match=what):
        registry.parse({"method": "chai", **knobs})


@pytest.mark.parametrize(
    ("knobs", "what"),
    [
        ({"clusters": [2, 2]}, "clusters.*3 layers"),
        ({"clusters": [2, 2, 5]}, "clusters.*4 query heads"),
        ({"like": "llama2"}, "like='llama2'.*3 layers"),
    ],
)
def test_clusters_of_another_model_are_refused(knobs, what):
    with pytest.raises(UsageError, match=what):
        kvbench.prefill(build("llama"), prompt(40), [{"method": "chai", **knobs}])
