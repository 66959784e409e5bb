"""Llama 4: layers that attend the chunk of a token, and queries that are scaled by their position."""

from dataclasses import replace

import pytest
import torch
from support import method_reference as ref
from support.families import COMMON, CONFIGS, build, prompt, random_model
from support.own_model import check_full_is_the_model, own_logits

import kvbench
from kvbench.audit.prompt_audit import audit
from kvbench.base.errors import KvbenchError
from kvbench.engine.cuda_graph import Graph
from kvbench.engine.likelihood import teacher_force
from kvbench.engine.prompt_layer import PromptLayer
from kvbench.engine.step import build as batch_of
from kvbench.kv import ops
from kvbench.models import traits
from kvbench.models.interface import attached, attention_modules, cache_shape
from kvbench.models.temperature import scale_queries
from kvbench.storage.format import Room, StoredRow
from kvbench.storage.local_rows import LocalRows

CHUNK = 24
ENTRIES = ["full", {"method": "snapkv", "kv_size": 20, "window": 8}, "kivi"]


@pytest.mark.parametrize("n", [10, 47, 48, 70])
def test_the_full_cache_answers_as_the_model_at_any_place_in_a_chunk(n):
    # transformers' own generate takes the cache's length of one row: an answer crosses into the next chunk
    check_full_is_the_model(build("llama4_text"), prompt(n), new=12)


def test_rows_of_unequal_lengths_answer_as_alone():
    """Their queries are scaled by their own positions, where transformers has one position for all rows."""
    model = build("llama4_text")
    caches = [c for n in (12, 45, 70) for c in kvbench.prefill(model, prompt(n), ENTRIES)]
    assert kvbench.generate(model, caches, 10) == [kvbench.generate(model, [cache], 10)[0] for cache in caches]


def test_a_text_forced_in_chunks_of_any_size_has_the_losses_of_the_model():
    model, ids, rest = build("llama4_text"), prompt(20), prompt(60, 4)
    (cache,) = kvbench.prefill(model, ids, ["full"])
    logp = own_logits(model, torch.cat([ids, rest]))[len(ids) - 1 : -1].log_softmax(dim=-1)
    for size in (1, 7, 40):
        (forced,) = teacher_force(model, [cache], rest, size)
        torch.testing.assert_close(forced.losses, -logp.gather(1, rest[:, None])[:, 0], atol=1e-4, rtol=1e-4)


def test_each_chunk_of_a_prompt_attends_itself_alone():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 10, 8, generator=generator) for heads in (4, 2, 2))
    layer = PromptLayer({}, chunk=4)
    layer.add(k, v)
    out = layer.attend(q, 0.5, None)
    for start, end in ((0, 4), (4, 8), (8, 10)):
        alone = PromptLayer({})
        alone.add(k[:, :, start:end], v[:, :, start:end])
        torch.testing.assert_close(out[:, :, start:end], alone.attend(q[:, :, start:end], 0.5, None))


def test_a_new_token_attends_its_chunk_and_not_the_last_tokens():
    """Token 8 of chunks of 4 attends itself alone, and token 9 attends 8 and 9."""
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, 8, 8, generator=generator) for _ in range(2))
    rows = LocalRows([StoredRow(cache=ops.local(k, v, 4, 4, chunked=True))], Room(tokens=2))
    new_k, new_v, query = (torch.randn(2, 1, heads, 1, 8, generator=generator) for heads in (2, 2, 4))
    rows.add(new_k[0], new_v[0], torch.tensor([[8]]))
    torch.testing.assert_close(rows.attend(query[0], 0.5, None), new_v[0].repeat_interleave(2, dim=1))
    rows.add(new_k[1], new_v[1], torch.tensor([[9]]))
    keys, values = (torch.cat([t[0], t[1]], dim=2).repeat_interleave(2, dim=1) for t in (new_k, new_v))
    weights = (query[1] @ keys.transpose(2, 3) * 0.5).softmax(dim=-1)
    torch.testing.assert_close(rows.attend(query[1], 0.5, None), weights @ values)


def test_queries_are_scaled_by_hand_and_only_inside_kvbench():
    model = build("llama4_text")
    rotated, plain = attention_modules(model)[:2]
    query = torch.ones(2, 4, 2, 16)
    positions_of = {2: torch.tensor([[14, 15], [46, 47]])}.__getitem__
    assert torch.equal(scale_queries(plain, query, positions_of), query)
    with attached(model):
        assert plain.attn_temperature_tuning is False
        assert torch.equal(scale_queries(rotated, query, positions_of), query)
        out = scale_queries(plain, query, positions_of)
    assert plain.attn_temperature_tuning
    # floor((p + 1) / 16) is 0, 1, 2 and 3; attn_scale is 0.1
    expected = 1 + 0.1 * torch.tensor([[1.0, 2.0], [3.0, 4.0]]).log()
    torch.testing.assert_close(out[:, 0, :, 0], expected)


def test_no_graph_of_a_step_whose_queries_are_scaled_by_their_position():
    model = build("llama4_text")
    (cache,) = kvbench.prefill(model, prompt(20), ["full"])
    with pytest.raises(KvbenchError, match="queries are scaled by their position"):
        Graph(model, batch_of(model, [cache], 4))


def test_the_probe_compares_with_the_model_as_it_scales_its_own_queries():
    model = random_model("llama4_text", {**COMMON, **CONFIGS["llama4_text"], "floor_scale": 3}).eval()
    assert traits.of_model(model).family == "llama4_text"
    (cache,) = kvbench.prefill(model, prompt(20), ["full"])
    torch.testing.assert_close(cache.logits, own_logits(model, prompt(20))[-1], atol=1e-5, rtol=1e-5)


def test_chunked_layers_hold_what_a_window_holds_and_methods_leave_them_alone():
    model = build("llama4_text")
    shape = traits.of_model(model).shape
    assert (shape.layers, shape.local_layers, shape.window) == (3, 2, CHUNK)
    small, whole = kvbench.prefill(model, prompt(70), [ENTRIES[1], "full"])
    for cache in (small, whole):
        measured = audit(cache, cache_shape(model))
        assert measured.full_bytes == shape.full_bytes(70, 4)
        assert measured.payload + measured.overhead == cache.nbytes()
        for layer in cache.local:
            assert layer.chunked and ref.kept(layer) == [list(range(70 - CHUNK, 70))] * 2
    # a batch keeps chunks and windows apart
    as_window = StoredRow(cache=replace(small.local[0], chunked=False))
    assert LocalRows.key(StoredRow(cache=small.local[0])) != LocalRows.key(as_window)
    batch = batch_of(model, [small, whole], 4)
    assert [layer.local for layer in batch.with_keys] == [True, False, True, False, False]
