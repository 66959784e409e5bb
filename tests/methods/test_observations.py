"""What one prefill observes of each layer (spec 4): shapes, types, bytes, and nothing that nobody asked for."""

import math
import re

import pytest
import torch
from support import method_reference as ref
from support.families import FAMILIES, WITH_LATENTS, build, prompt

from kvbench.engine import prefill, prompt_pass
from kvbench.engine.prompt_pass import observe_prompt
from kvbench.kv.exact_attention import causal_softmax, column_sums, yield_row_blocks
from kvbench.kv.model_shape import Shape, from_config
from kvbench.kv.observation import Needs
from kvbench.kv.segment import storage_bytes
from kvbench.methods.core.resolve import chain_of


def observed(family, n, needs, dtype=torch.float32):
    """Return (observation, keys, values) of every layer of a prompt of n tokens."""
    layers = []
    observe_prompt(build(family, dtype), prompt(n, 3), needs, lambda o, k, v: layers.append((o, k, v)))
    return layers


HEADS = {"gpt_neox": (4, 16), "opt": (4, 16), "gemma4_text": (2, 32), **dict.fromkeys(WITH_LATENTS, (1, 32))}
"""The kv heads and head dimension of families in which they are not 2 and 16."""


@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_is_observed_in_the_shapes_and_bytes_of_the_specification(family):
    n, w = 70, 32
    arguments = Needs(last_q=w, first_q=5, colsums=True, hidden=True, colsums_bits=frozenset({2, 8}))
    layers = observed(family, n, arguments, torch.bfloat16)
    shape = from_config(build(family).config)
    assert (shape.kv_heads, shape.head_dim) == HEADS.get(family, (2, 16))
    hk, d, dv = shape.kv_heads, shape.head_dim, shape.value_dim
    assert [o.layer for o, *_ in layers] == list(range(shape.layers))
    for o, k, v in layers:
        assert k.shape == (hk, n, d) and v.shape == (hk, n, dv) and k.dtype == torch.bfloat16  # O1
        assert storage_bytes([k, v]) == hk * n * (d + dv) * 2
        assert o.last_q.shape == (4, w, d) and storage_bytes([o.last_q]) == 4 * w * d * 2  # O2
        assert o.first_q.shape == (4, 5, d)  # O7
        for sums in (o.colsums, *o.colsums_q.values()):  # O3, per query head
            assert sums.shape == (4, n) and sums.dtype == torch.float32 and storage_bytes([sums]) == 4 * 4 * n
        assert o.hidden.shape == (n, 64) and set(o.colsums_q) == {2, 8}


def test_bytes_of_the_full_cache_by_hand():
    """Spec 4 (O1) and spec 5, Full: LLaMA-2-7B."""
    layer, model = Shape(1, 32, 32, 128), Shape(32, 32, 32, 128)
    assert layer.full_bytes(4096, 2) == 64 * 2**20
    assert model.full_bytes(1, 2) == 2**19
    assert model.full_bytes(2048 * 13, 2) == 13 * 2**30


def test_nothing_is_observed_that_nobody_asked_for():
    for o, *_ in observed("llama", 40, Needs()):
        assert (o.last_q, o.first_q, o.colsums, o.hidden) == (None,) * 4 and o.colsums_q == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_observed_queries_and_keys_give_the_observed_column_sums(family):
    """G1, O2 to O5: after bias and rotation, scaled, causal; the sums of a head add up to n, those of w rows to w."""
    n = 50
    for o, k, _ in observed(family, n, Needs(last_q=n, colsums=True, colsums_bits=frozenset({3}))):
        rows = causal_softmax(o.last_q, k, o.scale)
        torch.testing.assert_close(rows.sum(dim=1), o.colsums, atol=1e-4, rtol=1e-4)
        if family == "gpt_oss":  # a part of each row goes to the sink
            assert (o.colsums.sum(dim=1) < n).all()
        else:
            torch.testing.assert_close(o.colsums.sum(dim=1), torch.full((4,), float(n)))
            torch.testing.assert_close(rows[:, -8:].sum(dim=(1, 2)), torch.full((4,), 8.0))
        coarse = causal_softmax(o.last_q, ref.rounded(k, 3), o.scale).sum(dim=1)
        torch.testing.assert_close(o.colsums_q[3], coarse, atol=1e-4, rtol=1e-4)
        assert not torch.allclose(coarse, o.colsums, atol=1e-2)


def test_column_sums_never_hold_more_than_a_block_of_rows(monkeypatch):
    hq, n, seen = 4, 300, []
    exp = torch.Tensor.exp_

    def spy(rows):
        seen.append(rows.numel() * 4)
        return exp(rows)

    monkeypatch.setattr(torch.Tensor, "exp_", spy)
    q, k, limit = torch.randn(hq, n, 8), torch.randn(2, n, 8), 4 * hq * n * 7
    sums = column_sums(q, k, 0.5, block_bytes=limit)
    # a CPU takes the two query heads of one kv head at a time: 14 rows of each fit
    assert max(seen) <= limit and len(seen) == 2 * math.ceil(n / 14)
    torch.testing.assert_close(sums.sum(dim=1), torch.full((hq,), float(n)))
    assert [queries for queries, _, _ in yield_row_blocks(q, k, 0.5, block_bytes=limit)][-1] == slice(294, 300)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3_text"])
def test_caches_of_the_first_tokens_come_from_the_pass_over_all(family, monkeypatch):
    model, ids = build(family), prompt(61, 3)
    names = [
        "full",
        "snapkv",
        "h2o",
        "expectedattention",
        "cake",
        "keydiff",
        "kivi",
        "snapkv+think",
        "qhitter",
        "kvzip",
    ]
    budget = {"kv_ratio": 0.5}
    if family == "gemma3_text":  # local layers, which not every method runs beside
        names = [name for name in names if name not in ("expectedattention", "kvzip")]
    chains = [chain_of(name, {} if name in ("full", "kivi") else budget) for name in names]
    passes = []
    plain = prefill._run_shared_pass
    monkeypatch.setattr(
        prefill, "_run_shared_pass", lambda m, i, c, *rest: passes.append(len(c)) or plain(m, i, c, *rest)
    )
    both = prefill.prefill_chains(model, ids, [*chains, *chains], lengths=[61] * len(chains) + [40] * len(chains))
    shared = passes[0]
    assert shared > len(chains)  # those that compute the prompt their own way, or read it again, are read apart
    alone = [*prefill.prefill_chains(model, ids, chains), *prefill.prefill_chains(model, ids[:40], chains)]
    for ours, theirs in zip(both, alone, strict=True):
        assert ours.prompt_tokens == theirs.prompt_tokens and ours.mismatch == theirs.mismatch == ""
        torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-4, atol=1e-5)
        for one, other in zip((*ours.layers, *ours.local), (*theirs.layers, *theirs.local), strict=True):
            for a, b in zip(one.tensors(), other.tensors(), strict=True):
                assert a.untyped_storage().nbytes() == b.untyped_storage().nbytes()
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_mlps_of_a_long_prompt_compute_a_part_of_its_tokens_at_a_time(family, monkeypatch):
    """The same keys, values and logits, from inner states of 16 tokens; OPT has no module that is an MLP."""
    model, n = build(family), 50
    linear = [
        m for name, m in model.named_modules() if re.search(r"\.mlps?\.", name) and isinstance(m, torch.nn.Linear)
    ]
    rows = []
    handles = [m.register_forward_pre_hook(lambda m, args: rows.append(args[0].shape[-2])) for m in linear]

    def read():
        rows.clear()
        layers = []
        logits, _ = observe_prompt(model, prompt(n, 3), Needs(), lambda o, k, v: layers.append((k, v)))
        return logits[n], layers

    try:
        expected, whole = read()
        # Gemma 4's last layers read the last token alone
        last = {1} if family == "gemma4_text" else set()
        assert set(rows) - last <= {n}
        monkeypatch.setattr(prompt_pass, "LONG", n - 1)
        monkeypatch.setattr(prompt_pass, "MLP_TOKENS", 16)
        actual, parts = read()
        assert set(rows) - last == ({16, n % 16} if linear else set())
        assert not any("forward" in vars(m) for m in model.modules())
    finally:
        for handle in handles:
            handle.remove()
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(parts, whole, atol=1e-4, rtol=1e-4)
