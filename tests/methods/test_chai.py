"""CHAI: UNComp's numbers of clusters, the clustering, its prompts against a slow reference, and what it holds."""

import itertools
from dataclasses import replace

import pytest
import torch
from support import prefill_reference as slow
from support.families import WHOLE, build, heads_of, prompt
from support.grids import grid

import kvbench
from kvbench.audit.prompt_audit import audit
from kvbench.base.errors import Refused, UsageError
from kvbench.engine.prefill import make_observer
from kvbench.engine.weights_digest import digest_weights
from kvbench.methods.chai import LISTS, Chai, divide_clusters, merge_clusters
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.recipe import Calibration, CalibrationRun, digest
from kvbench.methods.core.resolve import chain_of
from kvbench.models.interface import cache_shape


# spec 5: 794/1024; UNComp's other lists: 1042/1600 and 900/1024
@pytest.mark.parametrize(
    ("name", "layers", "heads", "total"),
    [("llama2", 32, 32, 794), ("llama2-13b", 40, 40, 1042), ("llama3", 32, 32, 900)],
)
def test_the_lists_are_uncomps(name, layers, heads, total):
    assert len(LISTS[name]) == layers and sum(LISTS[name]) == total
    by_shape = Chai().count_clusters(layers, heads, 8 if name == "llama3" else heads)
    assert tuple(by_shape) == LISTS[name] == tuple(Chai(like=name).count_clusters(layers, heads, 8))


def test_llama_2_holds_77_54_percent_of_the_keys():
    assert round(100 * sum(LISTS["llama2"]) / 1024, 2) == 77.54
    assert round(100 * (sum(LISTS["llama2"]) + 1024) / 2048, 2) == 88.77


def test_other_models_have_llama_2s_mean_or_the_share_asked_for():
    assert Chai().count_clusters(3, 16, 16) == [12] * 3
    assert Chai(share=0.5).count_clusters(32, 32, 32) == [16] * 32
    assert Chai(share=0.01).count_clusters(2, 4, 4) == [1] * 2
    assert Chai(clusters=(3, 4)).count_clusters(2, 4, 4) == (3, 4)


def test_two_identical_heads_merge_first():
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(6, 5, 8, generator=g) for _ in "qk")
    q[4], k[4] = q[1], k[1]
    assert merge_clusters(q, k, 0.3, 5)[0].tolist() == [0, 1, 2, 3, 1, 5]
    assert merge_clusters(q, k, 0.3, 6)[0].tolist() == list(range(6))
    assert merge_clusters(q, k, 0.3, 1)[0].tolist() == [0] * 6


def test_the_maps_are_not_causal():
    """Heads 0 and 1 differ only in what the first token attends to behind itself."""
    q, k = torch.zeros(3, 5, 4), torch.zeros(3, 5, 4)
    k[:, 4, 0] = 1.0
    q[1, 0, 0], q[2, 4, 0] = 40.0, 2.0
    assert merge_clusters(q, k, 1.0, 2)[0].tolist() == [0, 1, 0]


@grid("seed", range(6))
@grid("kv_heads", [8, 2])
@grid("count", [1, 3, 5, 7, 8])
def test_clusters_are_those_of_average_linkage(seed, kv_heads, count):
    g = torch.Generator().manual_seed(seed)
    q, k = torch.randn(8, 5, 6, generator=g), torch.randn(kv_heads, 5, 6, generator=g)
    clusters = slow.clustered(q.double(), k.double(), 0.4, count)
    lead = {h: c[0] for c in clusters for h in c}
    assert merge_clusters(q, k, 0.4, count)[0].tolist() == [lead[h] for h in range(8)]


def slow_merges(maps):
    """Return the distances at which clusters of maps [H][25] merge, by average linkage over all pairs of members."""
    clusters, passed = [[h] for h in range(len(maps))], []
    unit = maps / maps.norm(dim=1, keepdim=True)
    while len(clusters) > 1:
        pairs = itertools.combinations(range(len(clusters)), 2)
        means = {(a, b): float(1 - (unit[clusters[a]] @ unit[clusters[b]].T).mean()) for a, b in pairs}
        a, b = min(means, key=means.get)
        passed.append(means[a, b])
        clusters[a] += clusters.pop(b)
    return passed


def first_maps(model, window):
    """Each layer's maps [H, 25] of the first five tokens, without a causal mask, as exact attention reads them."""
    collected = []

    def attend(layer, q, k, v, scale):
        k, v = (t.repeat_interleave(len(q) // len(t), 0) for t in (k, v))
        collected.append((scale * q[:, :5].double() @ k[:, :5].double().transpose(1, 2)).softmax(-1).flatten(1))
        return torch.stack([slow.weights(q[h], k[h], scale) @ v[h] for h in range(len(q))])

    slow.logits(model, window, attend)
    return collected


@pytest.mark.parametrize("family", WHOLE)
def test_distances_are_the_mean_over_windows_of_slow_merges(family):
    model, windows = build(family), [prompt(12, 50 + i) for i in range(4)]
    (cache,) = kvbench.prefill(model, windows[0], [calibrated(model, windows, share=0.6)])
    actual = cache.chain.stages[0].calibration.tensors["distances"]
    total = torch.zeros(3, 3, dtype=torch.float64)
    for window in windows:
        for i, maps in enumerate(first_maps(model, window)):
            total[i] += torch.tensor(slow_merges(maps), dtype=torch.float64) / 4
    torch.testing.assert_close(actual.double(), total, atol=1e-5, rtol=1e-4)
    assert bool((actual.diff(dim=1) >= 0).all())


def calibrated(model, windows, **knobs):
    """Return the chain of CHAI calibrated on these windows."""
    (stage,) = chain_of({"method": "chai", "counts": "calibrated", **knobs}).stages
    recipe = stage.recipe().fill_tokens(None)
    tensors = stage.calibrate(CalibrationRun(model, iter(windows), recipe, lambda: None, make_observer(model)))
    return Chain((stage.calibrated(Calibration("chai", digest(tensors), digest_weights(model), tensors)),))


def test_layers_of_like_heads_have_fewer_clusters_and_the_sum_is_the_share():
    distances = torch.tensor([[0.1, 0.2, 0.9], [0.3, 0.4, 0.5], [0.6, 0.7, 0.8]])
    assert divide_clusters(distances, 1.0) == [4, 4, 4]
    assert divide_clusters(distances, 0.75) == [2, 3, 4]
    assert divide_clusters(distances, 0.5) == [2, 1, 3]
    assert divide_clusters(distances, 0.01) == [1, 1, 1]
    even = torch.full((2, 3), 0.5)
    assert divide_clusters(even, 0.75) == [2, 4]  # equal merges: the lower layer's first


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_calibrated_counts_are_those_that_the_prompt_is_read_with(family):
    model = build(family)
    chain = calibrated(model, [prompt(12, 50 + i) for i in range(4)], share=0.6)
    counts = divide_clusters(chain.stages[0].calibration.tensors["distances"], 0.6)
    assert sum(counts) == 7
    caches, same = kvbench.prefill(model, prompt(40), [{"method": "chai", "clusters": counts}, chain])
    assert torch.equal(caches.logits, same.logits) and same.nbytes() == caches.nbytes()
    audit(same, cache_shape(model))
    assert len({c.chain.prefill_key for c in (caches, same)}) == 2


def test_calibrated_counts_are_not_guessed_and_need_five_tokens():
    with pytest.raises(UsageError, match=r"not calibrated.*counts=calibrated"):
        Chai(counts="calibrated").leading_heads(10, 0, 3, 4, 4)
    stage = Chai(counts="calibrated", tokens=4)
    run = CalibrationRun(build("llama"), iter([]), stage.recipe(), lambda: None, make_observer(build("llama")))
    with pytest.raises(UsageError, match="estimates 5 dimensions"):
        stage.calibrate(run)
    assert Chai().recipe() is None


@pytest.mark.parametrize("family", WHOLE)
@pytest.mark.parametrize("per", ["kv_head", "query_head"])
@pytest.mark.parametrize("clusters", [[2, 3, 1], [4, 1, 2]])
def test_prompt_and_decoding_are_those_of_a_slow_reference(family, per, clusters):
    model, n, new = build(family), 40, prompt(4, 9)
    attend, leads = slow.chai(clusters)
    wanted = slow.logits(model, torch.cat([prompt(n, 4), new]), attend)
    (cache,) = kvbench.prefill(model, prompt(n, 4), [{"method": "chai", "clusters": clusters}], per=per)
    for layer, lead in zip(cache.layers, leads, strict=True):
        stored = layer.segments[0].leads
        assert (list(range(4)) if stored is None else stored.tolist()) == lead
    torch.testing.assert_close(cache.logits, wanted[n - 1], atol=1e-4, rtol=1e-4)
    at_once = kvbench.extend(model, cache, new)
    torch.testing.assert_close(at_once.logits, wanted[-1], atol=1e-4, rtol=1e-4)
    for t in range(len(new)):
        cache = kvbench.extend(model, cache, new[t : t + 1])
        torch.testing.assert_close(cache.logits, wanted[n + t], atol=1e-4, rtol=1e-4)
    for layer in cache.layers:
        # the tail holds no keys that are never read, either
        assert all(s.k.shape[0] <= layer.segments[0].k.shape[0] for s in layer.segments[1:])


@pytest.mark.parametrize("family", WHOLE)
@pytest.mark.parametrize("per", ["kv_head", "query_head"])
def test_bytes_are_those_of_the_leading_heads_keys_and_of_all_values(family, per):
    model, n = build(family), 40
    (cache,) = kvbench.prefill(model, prompt(n, 4), [{"method": "chai", "clusters": [1, 2, 4]}], per=per)
    kv_heads, d = heads_of(model)
    heads = 4 if per == "query_head" else kv_heads
    measured = audit(cache, cache_shape(model))
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
    sizes = [audit(c, cache_shape(model)).payload for c in (chai, full)]
    assert sizes[0] == sizes[1] and not torch.equal(chai.logits, full.logits)


@pytest.mark.parametrize("change", ["leads", "keys"])
def test_the_audit_refuses_other_heads_than_declared(change):
    model = build("opt")
    (cache,) = kvbench.prefill(model, prompt(40), [{"method": "chai", "clusters": [2, 2, 2]}])
    (s,) = cache.layers[0].segments
    other = replace(s, leads=torch.zeros_like(s.leads)) if change == "leads" else replace(s, k=s.v.clone())
    layer = replace(cache.layers[0], segments=(other,))
    with pytest.raises(Refused, match="logits of 1 query heads" if change == "leads" else "keys of 4 heads"):
        audit(replace(cache, layers=(layer, *cache.layers[1:])), cache_shape(model))


@pytest.mark.parametrize("n", [1, 5, 6])
def test_prompts_of_fewer_than_six_tokens_are_left_alone(n):
    model = build("llama")
    chai, full = kvbench.prefill(model, prompt(n), [{"method": "chai", "share": 0.25}, "full"])
    audit(chai, cache_shape(model))
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
        chain_of(method)


@pytest.mark.parametrize(
    ("knobs", "what"),
    [
        ({"like": "llama"}, "llama2-13b, llama3"),
        ({"clusters": [0, 1]}, "1 or more"),
        ({"share": 0}, "above 0"),
        ({"share": 1.5}, "at most 1"),
        ({"share": 0.5, "clusters": [1, 2, 3]}, "share says"),
        ({"counts": "elbow"}, "listed or calibrated"),
        ({"counts": "calibrated", "like": "llama2"}, "only without clusters and like"),
        ({"samples": 0}, "1 or more"),
    ],
)
def test_impossible_knobs_are_refused(knobs, what):
    with pytest.raises(UsageError, match=what):
        chain_of({"method": "chai", **knobs})


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
