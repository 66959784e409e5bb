"""Models whose layers hold a state in place of keys, or beside them: it passes through, whole, in every row."""

import copy
from dataclasses import replace

import pytest
import torch
from support.families import WITH_STATES, build, prompt
from support.own_model import check_full_is_the_model, kept_by, own_logits

import kvbench
from kvbench.audit.prompt_audit import audit
from kvbench.base.errors import KvbenchError, Refused, UsageError
from kvbench.bench import layers as bench_layers
from kvbench.engine.cuda_graph import Graph
from kvbench.engine.decode import extend_cache
from kvbench.engine.divergence import nudge_cache
from kvbench.engine.likelihood import diverge, teacher_force
from kvbench.engine.prefill import prefill_chains
from kvbench.engine.shared_prefix import SharedPrefix
from kvbench.engine.step import build as batch_of
from kvbench.kv.model_shape import Shape, state_layers
from kvbench.methods.core.resolve import chain_of
from kvbench.models import traits
from kvbench.models.interface import cache_shape
from kvbench.models.releases import HOLDS_STATES
from kvbench.models.traits import reads_one_by_one

pytestmark = pytest.mark.skipif(not HOLDS_STATES, reason="this release of transformers holds states in another way")
FAMILIES = tuple(WITH_STATES)
ENTRIES = ["full", {"method": "snapkv", "kv_size": 20, "window": 8}, {"method": "h2o", "kv_size": 20, "window": 8}]
SOME = ("qwen3_5_text", "nemotron_h", "falcon_h1", "lfm2")
"""A family of each kind: linear attention, state space with layers of MLPs alone, both in one layer, convolution."""


@pytest.mark.parametrize("family", FAMILIES)
def test_the_full_cache_answers_as_generate_and_its_logits_are_the_models(family):
    check_full_is_the_model(build(family), prompt(70))


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_in_a_batch_answer_as_alone_and_later_turns_as_the_whole_text(family):
    model, more = build(family), prompt(9, 4)
    caches = [c for n in (70, 31) for c in kvbench.prefill(model, prompt(n), ENTRIES)]
    alone = [kvbench.generate(model, [cache], 5)[0] for cache in caches]
    # rows that end at different steps leave the batch, and others go on
    assert kvbench.generate(model, caches, 5) == alone
    full = caches[0]
    longer = extend_cache(model, full, more)
    whole = torch.cat([prompt(70), more])
    torch.testing.assert_close(longer.logits, own_logits(model, whole)[-1], atol=1e-4, rtol=1e-4)
    (read_at_once,) = kvbench.prefill(model, whole, ["full"])
    for ours, theirs in zip(longer.states, read_at_once.states, strict=True):
        for a, b in zip(ours.tensors(), theirs.tensors(), strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_in_pieces_is_the_prompt_at_once(family):
    model = build(family)
    if reads_one_by_one(model.config):
        with pytest.raises(UsageError, match="it must read the tokens after the first piece one at a time"):
            SharedPrefix(model, 16)
        return
    prefix, chains = SharedPrefix(model, 16), [chain_of(entry) for entry in ENTRIES]
    # the second prompt shares pieces with the first, the third parts earlier
    texts = [prompt(70), torch.cat([prompt(70)[:40], prompt(30, 7)]), torch.cat([prompt(70)[:20], prompt(50, 8)])]
    for ids in texts:
        pieced = prefill_chains(model, ids, chains, prefix=prefix)
        whole = prefill_chains(model, ids, chains)
        for ours, theirs in zip(pieced, whole, strict=True):
            torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-4, rtol=1e-4)
            assert kept_by(ours) == kept_by(theirs)
        answers = kvbench.generate(model, [*pieced, *whole], 6)
        assert answers[: len(pieced)] == answers[len(pieced) :]


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_counted_in_every_row_by_their_storages(family):
    model = build(family)
    shape = traits.of_model(model).shape
    full, small, _ = kvbench.prefill(model, prompt(70), ENTRIES)
    numbers = sum(t.numel() for state in full.states for t in state.tensors())
    assert len(full.states) == len(state_layers(model.config))
    assert numbers == shape.conv_numbers + shape.recurrent_numbers > 0
    numbers16 = shape.conv_numbers + 2 * shape.recurrent_numbers
    assert traits.of_config(model.config).shape == shape
    keys = 2 * shape.layers * shape.kv_heads * 70 * shape.head_dim
    for cache, tokens in ((full, 70), (small, 20)):
        measured = audit(cache, cache_shape(model))
        assert measured.full_bytes == 4 * (keys + numbers) == shape.full_bytes(70, 4)
        assert measured.payload == 4 * (keys * tokens // 70 + numbers)
        assert measured.payload16 == 2 * (keys * tokens // 70 + numbers16)
        assert measured.payload + measured.overhead == cache.nbytes()
    # layers built without a model count the same
    built = bench_layers.measure_bytes(small.chain, shape, 70, torch.float32)
    assert built.held.total == small.nbytes()
    assert built.payload_formula + built.overhead_formula == small.nbytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_16_bits_hold_recurrent_states_in_fp32_and_the_formula_says_so(family):
    model = build(family, torch.bfloat16)
    (cache,) = kvbench.prefill(model, prompt(40), ["full"])
    measured = audit(cache, cache_shape(model))
    assert measured.full_bytes == measured.full16 == traits.of_model(model).shape.full_bytes(40, 2)


@pytest.mark.parametrize("family", SOME)
def test_two_lengths_of_one_prompt_have_states_of_their_own(family):
    model, ids = build(family), prompt(70)
    chain = chain_of("full")
    short, long = prefill_chains(model, ids, [chain, chain], lengths=[40, 70])
    (alone,) = prefill_chains(model, ids[:40], [chain])
    for ours, theirs, other in zip(short.states, alone.states, long.states, strict=True):
        for a, b, c in zip(ours.tensors(), theirs.tensors(), other.tensors(), strict=True):
            assert torch.equal(a, b) and not torch.equal(a, c)
    assert kvbench.generate(model, [short], 6) == kvbench.generate(model, [alone], 6)


@pytest.mark.parametrize("family", SOME)
def test_decoding_leaves_the_states_of_the_cache_as_they_were(family):
    model = build(family)
    (cache,) = kvbench.prefill(model, prompt(40), ["full"])
    before = [t.clone() for state in cache.states for t in state.tensors()]
    answer = kvbench.generate(model, [cache, cache], 8)
    diverge(model, cache, [cache], prompt(12, 3))
    extend_cache(model, cache, prompt(5, 3))
    assert all(torch.equal(a, t) for a, t in zip(before, [t for s in cache.states for t in s.tensors()], strict=True))
    assert kvbench.generate(model, [cache], 8) == answer[:1] == answer[1:]
    twin = copy.deepcopy(cache)
    assert twin.states[0].tensors()[0].data_ptr() != cache.states[0].tensors()[0].data_ptr()
    assert len(nudge_cache(cache).states) == len(cache.states)


@pytest.mark.parametrize("family", SOME)
def test_a_text_forced_in_chunks_has_the_losses_of_the_model(family):
    model, ids, rest = build(family), prompt(50), prompt(20, 4)
    (cache,) = kvbench.prefill(model, ids, ["full"])
    logp = own_logits(model, torch.cat([ids, rest]))[len(ids) - 1 : -1].log_softmax(dim=-1)
    for chunk in (1, 13):
        (forced,) = teacher_force(model, [cache], rest, chunk)
        torch.testing.assert_close(forced.losses, -logp.gather(1, rest[:, None])[:, 0], atol=1e-4, rtol=1e-4)


def test_a_state_that_shares_its_storage_is_refused():
    model = build("qwen3_5_text")
    (cache,) = kvbench.prefill(model, prompt(30), ["full"])
    first = cache.states[0]
    shared = replace(cache, states=(first, first))
    with pytest.raises(Refused, match="state 1 shares its storage"):
        audit(shared, cache_shape(model))


def test_no_graph_of_a_step_with_states():
    model = build("qwen3_5_text")
    (cache,) = kvbench.prefill(model, prompt(30), ["full"])
    with pytest.raises(KvbenchError, match="layers hold states"):
        Graph(model, batch_of(model, [cache], 4))


def test_layers_are_told_by_kind():
    shape = Shape(3, 4, 2, 16, keyless_layers=9, conv_numbers=60, recurrent_numbers=40)
    assert shape.all_layers == 12 and shape.full_bytes(10, 2) == 3 * 2 * 2 * 10 * 16 * 2 + 120 + 160
    assert shape.note == (
        "3 of 12 layers hold keys and values. Methods, budgets and tokens kept concern 3 layers. Bytes are those of "
        "all layers, with the states of the others."
    )
