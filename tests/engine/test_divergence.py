"""Divergence from the full cache: by hand, against dense fp64, its floor and its laws."""

import math
from copy import deepcopy

import numpy as np
import pytest
import torch
import yaml
from support.data import data_path
from support.families import build, prompt
from transformers import DynamicCache

import kvbench
from kvbench.audit.decode_audit import check_bytes
from kvbench.engine import divergence
from kvbench.engine.likelihood import diverge, teacher_force
from kvbench.models.interface import cache_shape
from kvbench.models.releases import named_cache

METHODS = {
    "snapkv": {"kv_size": 24, "window": 8},
    "h2o": {"kv_size": 24, "window": 8},
    "kivi": {"residual": 32},
    "think": {"ratio": 0.4, "recent": 4},
    "snapkv+think": {"kv_size": 24, "window": 8, "recent": 4},
    "streamingllm": {"kv_size": 24},
}


def slow_kl(full, row):
    """KL(full || row) of logits [T, V] by its definition, in numpy."""
    p, q = (
        np.exp(z - np.logaddexp.reduce(z, -1, keepdims=True)) for z in (full.double().numpy(), row.double().numpy())
    )
    ratio = np.divide(p, q, out=np.ones_like(p), where=p > 0)
    return (p * np.log(ratio)).sum(-1).tolist()


def test_the_hand_example():
    p, q = torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([[0.4, 0.4, 0.2]]).log()
    (d,) = divergence.compare_logits(p, q[None], torch.tensor([1]))
    assert d.kl.item() == pytest.approx(0.0252672, abs=1e-7)
    assert d.kl.item() / math.log(2) == pytest.approx(0.0364527, abs=1e-7)
    assert d.shift.item() == pytest.approx(0.1) and d.log_ratio.item() == pytest.approx(-0.287682, abs=1e-6)
    assert d.same.tolist() == [True]  # a tie goes to the lower id


def test_shifted_logits_are_the_same_distribution_and_close_ones_give_half_the_variance():
    z = torch.randn(70, 500, generator=torch.Generator().manual_seed(0))
    noise = 1e-4 * torch.randn(70, 500, generator=torch.Generator().manual_seed(1)).double()
    y = torch.arange(70)
    equal, close = divergence.compare_logits(z, torch.stack([z.double() + 3, z.double() + noise]), y)
    padded = torch.tensor([[1.0, 2.0, -torch.inf, 0.0]])
    (same,) = divergence.compare_logits(padded, padded[None], torch.tensor([1]))
    assert same.kl.item() == 0 == same.log_ratio.item()
    assert equal.kl.abs().max() < 1e-15 and equal.same.all() and equal.log_ratio.abs().max() < 1e-14
    p = z.double().softmax(-1)
    variance = (p * noise**2).sum(-1) - (p * noise).sum(-1) ** 2
    torch.testing.assert_close(close.kl, variance / 2, rtol=1e-3, atol=0)
    assert (close.shift.abs() <= (close.kl / 2).sqrt()).all()  # total variation


def test_on_text_drawn_from_the_full_cache_the_mean_log_ratio_is_the_mean_divergence():
    z, noise = (torch.randn(4000, 50, generator=torch.Generator().manual_seed(i)) for i in range(2))
    y = torch.multinomial(z.softmax(-1), 1, generator=torch.Generator().manual_seed(2))[:, 0]
    (d,) = divergence.compare_logits(z, (z + noise / 2)[None], y)
    difference = d.log_ratio - d.kl
    assert difference.mean().abs() < 3 * difference.std() / 4000**0.5 < d.kl.mean() / 2


@pytest.mark.parametrize("method", METHODS)
def test_divergences_equal_a_dense_calculation_in_fp64(method):
    model, ids = build("llama"), prompt(90, 3)
    full, cache = kvbench.prefill(model, ids[:60], ["full", method], **METHODS[method])
    (forced,), floor = diverge(model, full, [cache], ids[60:])
    # each token alone, from an extended cache
    logits = {}
    for name, start in (("full", full), ("row", cache)):
        steps = []
        for token in ids[60:-1]:
            start = kvbench.extend(model, start, token[None])
            steps.append(start.logits)
        logits[name] = torch.stack(steps)
    found = forced.divergence
    np.testing.assert_allclose(found.kl, slow_kl(logits["full"], logits["row"]), rtol=1e-3, atol=1e-9)
    assert found.same.tolist() == (logits["full"].argmax(-1) == logits["row"].argmax(-1)).tolist()
    losses = teacher_force(model, [full], ids[60:], 1)[0].losses[1:]
    torch.testing.assert_close(found.log_ratio, (forced.losses[1:] - losses).double(), atol=1e-4, rtol=1e-4)
    assert len(found.kl) == 29 and 0 <= floor.kl.max() < 1e-9


def dense_kl(model, ids, n, full_logits, cache):
    """KL at each token but the first after ``n``: a model in fp64, transformers' own cache and attention."""
    held = DynamicCache(config=model.config)
    for i, layer in enumerate(cache.layers):
        (segment,) = layer.segments
        held.update(segment.k[None].double(), segment.v[None].double(), i)
    rest = ids[n:-1][None]
    mask = torch.ones(1, cache.layers[0].tokens + rest.shape[1])
    where = torch.arange(n, len(ids) - 1)[None]
    return slow_kl(full_logits, model(rest, **named_cache(held), position_ids=where, attention_mask=mask).logits[0])


@pytest.mark.e2e("computes in fp64")
@pytest.mark.parametrize(("name", "texts", "n"), [("tiny", 4, 120), ("smol", 1, 60)])
def test_divergences_on_real_text_equal_those_of_a_model_in_fp64(name, texts, n, request):
    model, tokenizer = kvbench.load_model(str(request.getfixturevalue("smol")) if name == "smol" else name)
    exact = deepcopy(model).double()
    essay = sorted(data_path("paul_graham").glob("*.txt"))[0].read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer.encode(essay[: 8 * texts * (n + 25)]))
    with torch.no_grad():
        for i in range(texts):
            some = ids[i * n : i * n + n + 25]
            assert len(some) == n + 25
            full, *caches = kvbench.prefill(model, some[:n], ["full", "snapkv", "streamingllm"], kv_ratio=0.5, window=8)
            full_logits = exact(some[None]).logits[0, n:-1]
            for cache, forced in zip(caches, diverge(model, full, caches, some[n:])[0], strict=True):
                wanted = dense_kl(exact, some, n, full_logits, cache)
                assert len(wanted) == 24 and max(wanted) > 1e-4
                np.testing.assert_allclose(forced.divergence.kl, wanted, rtol=1e-3, atol=1e-7)


PACKED = ["fp8", "q4_0 group=16", "q4_0 group=16 residual=9", "turboquant", "int8", "nvfp4", "snapkv+fp8", "flexgen"]
PACKED += ["kivi group=4 residual=8", "kivi group=4 residual=8 only=values", "think+kivi group=4 residual=8"]
PACKED += ["adakv+kivi group=4 residual=8", "snapkv+kivi group=8 residual=16", "twilight+flexgen p=0.7"]


@pytest.mark.e2e("feeds thirteen rows token by token")
def test_formats_are_fed_in_chunks_as_if_each_token_came_alone():
    model, ids = build("llama"), prompt(90, 3)
    sized = {"kv_size": 24, "window": 8}
    knobs = [yaml.safe_load(f"{{{', '.join(w.split()[1:])}}}".replace("=", ": ")) for w in PACKED]
    chains = [{"method": w.split()[0], **k} for w, k in zip(PACKED, knobs, strict=True)]
    chains = [c | (sized if c["method"].startswith(("snap", "ada")) else {}) for c in chains]
    full, *caches = kvbench.prefill(model, ids[:60], ["full", *chains])
    assert not any(c.chain.evicts for c in caches)
    chunks, _ = diverge(model, full, caches, ids[60:])
    steps, _ = diverge(model, full, caches, ids[60:], chunk_bytes=1)
    for written, a, b in zip(PACKED, chunks, steps, strict=True):
        np.testing.assert_allclose(a.divergence.kl, b.divergence.kl, rtol=1e-3, atol=1e-9, err_msg=written)
        assert a.stored == b.stored and a.held == b.held, written
        assert a.divergence.kl.mean() > 1e-7, written


def test_the_full_cache_beside_itself_and_a_method_that_keeps_everything_are_at_the_floor():
    model, ids = build("llama"), prompt(80, 5)
    full, all_kept, heads = kvbench.prefill(
        model, ids[:50], ["full", {"method": "snapkv", "kv_ratio": 1.0}, {"method": "adakv", "kv_ratio": 1.0}]
    )
    forced, floor = diverge(model, full, [full, all_kept, heads], ids[50:])
    beside, _ = diverge(model, full, [all_kept, heads], ids[50:])
    for a, b in zip(forced[1:], beside, strict=True):  # the same batch: the full cache is a row of it once
        assert torch.equal(a.divergence.kl, b.divergence.kl) and torch.equal(a.losses, b.losses)
    assert forced[0].divergence.kl.abs().max() == 0
    for other in forced[1:]:
        assert other.divergence.kl.max() < 1e-9 and other.divergence.same.all()
    assert floor.kl.max() < 1e-9


def test_rows_that_change_the_model_go_beside_the_full_cache_of_the_model_as_it_is():
    model, ids = build("llama"), prompt(80, 3)
    chai, snapkv = ({"method": "chai"}, {"method": "snapkv", "kv_size": 24, "window": 8})
    full, *rows = kvbench.prefill(model, ids[:50], ["full", chai, snapkv])
    together, _ = diverge(model, full, rows, ids[50:])
    for row, forced in zip(rows, together, strict=True):
        alone, _ = diverge(model, full, [row], ids[50:])
        np.testing.assert_allclose(alone[0].divergence.kl, forced.divergence.kl, rtol=1e-4, atol=1e-10)
        assert forced.divergence.kl.mean() > 1e-6


@pytest.mark.parametrize("tokens", [2, 8, 30])
def test_what_is_stored_behind_a_text_is_declared_for_its_tokens_but_the_last(tokens):
    """The last token is predicted and never fed."""
    model, ids = build("llama"), prompt(40 + tokens, 5)
    entries = [{"method": method, **knobs} for method, knobs in METHODS.items()]
    full, *caches = kvbench.prefill(model, ids[:40], ["full", *entries])
    forced, _ = diverge(model, full, [full, *caches], ids[40:])
    at_a_time = [teacher_force(model, [cache], ids[40:], chunk=3)[0] for cache in caches if not cache.chain.evicts]
    assert {row.stored.fed for row in [*forced, *at_a_time]} == {tokens - 1}
    for cache, row in zip([full, *caches], forced, strict=True):
        check_bytes(cache, row.stored, cache_shape(model))


def test_logits_exist_of_one_chunk_alone(monkeypatch):
    model, ids = build("llama"), prompt(100, 3)
    full, row = kvbench.prefill(model, ids[:40], ["full", "snapkv"], kv_size=24, window=8)
    at_once, _ = diverge(model, full, [row], ids[40:])
    largest = []
    compare = divergence.compare_logits
    monkeypatch.setattr(
        "kvbench.engine.likelihood.compare_logits", lambda f, r, y: (largest.append(r.shape), compare(f, r, y))[1]
    )
    in_chunks, _ = diverge(model, full, [row], ids[40:], chunk_bytes=3 * 7 * model.config.vocab_size * 4)
    assert max(shape[1] for shape in largest) == 7
    np.testing.assert_allclose(in_chunks[0].divergence.kl, at_once[0].divergence.kl, rtol=1e-4, atol=1e-10)


def test_logits_of_half_precision_are_computed_in_fp32_and_the_head_is_left_as_it_was():
    model = deepcopy(build("llama")).to(torch.bfloat16)
    head = model.get_output_embeddings()
    before = head.forward
    with divergence.exact_head(model):
        assert model(prompt(9, 1)[None]).logits.dtype == torch.float32
    assert head.forward == before and model(prompt(9, 1)[None]).logits.dtype == torch.bfloat16
    full, row = kvbench.prefill(model, prompt(60, 3)[:40], ["full", "snapkv"], kv_size=24, window=8)
    (forced,), floor = diverge(model, full, [row], prompt(60, 3)[40:])
    assert 0 < floor.kl.mean() < forced.divergence.kl.mean()
