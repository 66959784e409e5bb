"""Models with latent attention: one vector a token is held for all heads, and keys are their own values."""

import copy

import pytest
import torch
from support.families import HOLDS_LATENTS, WITH_LATENTS, build, prompt
from support.own_model import check_full_is_the_model, kept_by, own_logits

import kvbench
from kvbench.__main__ import main
from kvbench.audit.accounting import bytes_declared
from kvbench.audit.prompt_audit import audit
from kvbench.base.errors import UsageError
from kvbench.bench import layers as bench_layers
from kvbench.engine.decode import extend_cache, generate_rows
from kvbench.engine.likelihood import compute_forced_logits, diverge, teacher_force
from kvbench.engine.prefill import make_observer, prefill_chains
from kvbench.engine.shared_prefix import SharedPrefix
from kvbench.engine.stopping import Ending
from kvbench.kv.model_shape import Shape
from kvbench.kv.observation import Needs
from kvbench.kv.own_values import NoValues, values_or_keys
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.resolve import chain_of
from kvbench.methods.core.stage import Stage
from kvbench.models import traits
from kvbench.models.interface import attached, attention_modules, cache_shape
from kvbench.models.latent import absorb_query, head_outputs

pytestmark = pytest.mark.skipif(not HOLDS_LATENTS, reason="this release of transformers caches expanded latents")
FAMILIES = tuple(WITH_LATENTS)
SNAPKV = {"method": "snapkv", "kv_size": 20, "window": 8}
ENTRIES = [
    "full",
    SNAPKV,
    {"method": "h2o", "kv_size": 20, "window": 8},
    {**SNAPKV, "decode_budget": 20, "decode_every": 4},
    "fp8",
    {"method": "q4_0", "group": 16},
    {"method": "h2o+int8", "kv_size": 20, "window": 8},
]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_full_cache_answers_as_generate_and_its_logits_are_the_models(family):
    check_full_is_the_model(build(family), prompt(70))


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_in_a_batch_answer_as_alone_and_later_turns_as_the_whole_text(family):
    model, more = build(family), prompt(9, 4)
    caches = [c for n in (70, 31) for c in kvbench.prefill(model, prompt(n), ENTRIES)]
    alone = [kvbench.generate(model, [cache], 5)[0] for cache in caches]
    assert kvbench.generate(model, caches, 5) == alone
    longer = extend_cache(model, caches[0], more)
    whole = torch.cat([prompt(70), more])
    torch.testing.assert_close(longer.logits, own_logits(model, whole)[-1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_in_pieces_is_the_prompt_at_once(family):
    model = build(family)
    prefix, chains = SharedPrefix(model, 16), [chain_of(entry) for entry in ENTRIES]
    for ids in (prompt(70), torch.cat([prompt(70)[:40], prompt(30, 7)])):
        pieced = prefill_chains(model, ids, chains, prefix=prefix)
        whole = prefill_chains(model, ids, chains)
        for ours, theirs in zip(pieced, whole, strict=True):
            torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-4, rtol=1e-4)
            assert kept_by(ours) == kept_by(theirs)
        answers = kvbench.generate(model, [*pieced, *whole], 6)
        assert answers[: len(pieced)] == answers[len(pieced) :]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_takes_its_latent_and_rotated_key_once(family, dtype):
    model, n = build(family, dtype), 70
    shape = traits.of_model(model).shape
    # the configurations have latents of 24 numbers and rotated keys of 8
    assert (shape.kv_heads, shape.head_dim, shape.latent_width, shape.token_numbers) == (1, 32, 24, 32)
    caches = kvbench.prefill(model, prompt(n), ENTRIES)
    for cache in caches:
        measured = audit(cache, cache_shape(model))
        assert measured.payload + measured.overhead == cache.nbytes()
        assert measured.full_bytes == shape.full_bytes(n, dtype.itemsize)
        declared = bytes_declared(cache.chain, shape, n, dtype.itemsize)
        assert declared is not None and declared.total == cache.nbytes()
        # layers built without a model count the same
        built = bench_layers.measure_bytes(cache.chain, shape, n, dtype)
        assert built.off == 0 and built.held.total == cache.nbytes()
    of_layers = [sum(t.nbytes for s in layer.segments for t in s.payload()) for layer in caches[0].layers]
    assert of_layers == [n * 32 * dtype.itemsize] * shape.layers
    fixed = shape.state_bytes(dtype.itemsize)
    assert audit(caches[1], cache_shape(model)).payload - fixed == 20 * 32 * dtype.itemsize * shape.layers
    # fp8: a byte a number; int8 packs both, with 4 bytes a token of scale and minimum
    assert audit(caches[4], cache_shape(model)).payload - fixed == n * 32 * shape.layers


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_forced_in_chunks_has_the_losses_of_the_model(family):
    model, ids, rest = build(family), prompt(50), prompt(20, 4)
    (cache,) = kvbench.prefill(model, ids, ["full"])
    logp = own_logits(model, torch.cat([ids, rest]))[len(ids) - 1 : -1].log_softmax(dim=-1)
    for chunk in (1, 13):
        (forced,) = teacher_force(model, [cache], rest, chunk)
        torch.testing.assert_close(forced.losses, -logp.gather(1, rest[:, None])[:, 0], atol=1e-4, rtol=1e-4)


def test_the_absorbed_query_meets_latents_as_the_heads_queries_meet_their_keys():
    module = attention_modules(build("deepseek_v3"))[0]
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(1, 4, 5, 24, generator=generator)  # 16 numbers without and 8 with rotation
    latent = torch.randn(1, 1, 7, 24, generator=generator)
    rotated_key = torch.randn(1, 1, 7, 8, generator=generator)
    with torch.no_grad():
        keys, values = module.expand_kv(latent, rotated_key)
        held = torch.cat([latent, rotated_key], dim=-1)
        logits = absorb_query(module, query) @ held.transpose(2, 3)
        torch.testing.assert_close(logits, query @ keys.transpose(2, 3))
        weights = logits.softmax(dim=-1)
        torch.testing.assert_close(head_outputs(module, weights @ held), weights @ values)


def test_the_model_is_restored_and_its_own_attention_still_expands():
    model = build("deepseek_v3")
    module = attention_modules(model)[0]
    latent, rotated_key = torch.ones(1, 1, 2, 24), torch.ones(1, 1, 2, 8)
    with torch.no_grad(), attached(model):
        inside = module.expand_kv(latent, rotated_key)
    assert "expand_kv" not in vars(module)
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(inside, module.expand_kv(latent, rotated_key), strict=True))


def test_keys_stand_for_values_without_channels():
    keys, values = torch.ones(2, 3, 4), torch.zeros(2, 3, 4)
    assert values_or_keys(keys, values) is values
    assert values_or_keys(keys, values[..., :0]) is keys
    marks = NoValues(torch.zeros(2, 5, 0))
    assert marks.shape == (2, 5, 0) and marks.tokens(1, 3).shape == (2, 2, 0) and marks[:1].shape == (1, 5, 0)
    assert NoValues(torch.zeros(3, 2, 5, 0)).flat().shape == (6, 5, 0)


REFUSED = {
    "think": "it removes channels of keys alone",
    "kivi": "it quantises keys and values by rules of their own",
    "flexgen": "it quantises keys and values by rules of their own",
    "chai": "all heads read the same latents already",
    "h2o+vatp": "a token's value is another vector for each head",
    "qhitter": "it quantises keys and values apart",
    "palu": "the model has low-rank keys and values of its own",
    "asvd": "the model has low-rank keys and values of its own",
    "expectedattention": "only a part of a latent is rotated",
}


@pytest.mark.parametrize("method", REFUSED)
def test_a_method_without_a_meaning_is_refused_with_its_reason(method):
    model_traits = traits.of_model(build("deepseek_v3"))
    with pytest.raises(UsageError, match=f"method .* not possible on this model: it holds latents.*{REFUSED[method]}"):
        chain_of(method).check_model(model_traits)


class OfCalls(Stage):
    """A stage that reads the call of a layer's attention module."""

    id = "ofcalls"
    role = "mask"

    def needs(self, n):
        return Needs(call=True)


def test_methods_that_read_projections_are_refused():
    model_traits = traits.of_model(build("deepseek_v3"))
    with pytest.raises(UsageError, match="it reads projections of keys and values"):
        Chain((OfCalls(),)).check_model(model_traits)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"method": "q8_0", "group": 16, "values": "int4"}, "leave values=int4 out"),
        ({"method": "int8", "only": "values"}, "leave only=values out"),
        ({**SNAPKV, "per": "query_head"}, "per=query_head is not possible on a model that holds latents"),
        ({"method": "streamingllm", "kv_size": 20, "mode": "rolled"}, "positions=rolled needs rotary positions"),
    ],
)
def test_options_without_a_meaning_are_refused_with_their_reason(entry, reason):
    with pytest.raises(UsageError, match=reason):
        chain_of(entry).check_model(traits.of_model(build("deepseek_v3")))


def test_up_projections_that_are_no_plain_matrix_are_refused_by_their_type():
    """Codes cannot be absorbed, and an adapter computes more than one product."""
    for change, says in (
        (
            lambda up: torch.nn.Sequential(up),
            "its kv_b_proj is a Sequential of None, not a plain matrix",
        ),
        (lambda up: up.to(torch.float8_e4m3fn), "its kv_b_proj is a Linear of torch.float8_e4m3fn"),
    ):
        model = copy.deepcopy(build("deepseek_v3"))
        attention = model.model.layers[1].self_attn
        attention.kv_b_proj = change(attention.kv_b_proj)
        with pytest.raises(UsageError, match=says):
            traits.of_model(model)


def test_a_copy_made_inside_kvbenchs_attention_expands_by_its_own_weights():
    model = build("deepseek_v3")
    latent, rotated_key = torch.ones(1, 1, 2, 24), torch.ones(1, 1, 2, 8)
    with torch.no_grad(), attached(model):
        twin = copy.deepcopy(model)
        for parameter in twin.parameters():
            parameter.mul_(2)
        ours, theirs = (m.model.layers[0].self_attn.expand_kv(latent, rotated_key)[1] for m in (model, twin))
    torch.testing.assert_close(theirs, 2 * ours)


def test_bytes_of_all_methods_leave_out_what_has_no_meaning(capsys):
    words = ["bench", "memory", "model=deepseek-v3", "n=512", "--formula"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "snapkv" in printed and "Left out, because they cannot work on this model's cache" in printed
    assert main([*words, "method=kivi"]) == 2
    assert "method kivi is not possible on this model" in capsys.readouterr().err


def test_a_layer_that_attends_twice_is_no_layer_to_drop_tokens_before():
    with pytest.raises(UsageError, match="each of its layers attends twice"):
        chain_of("uncomp-stage").check_model(traits.of_model(build("longcat_flash")))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_heads": 2, "query_heads": 4}, "a latent is one kv head"),
        ({"latent_width": 40}, "at most as wide as head_dim"),
        ({"latent_width": -1}, "a whole number, 0 or more"),
    ],
)
def test_shapes_of_latents_are_checked(changes, reason):
    with pytest.raises(UsageError, match=reason):
        Shape(**{"layers": 3, "query_heads": 4, "kv_heads": 1, "head_dim": 32, "latent_width": 24, **changes})


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_an_indexer_chooses_all_tokens_of_a_text_within_its_reach_and_longer_texts_are_refused(family):
    model = build(family)
    check_full_is_the_model(model, prompt(500), new=12)  # the longest prompt beside 12 new tokens of 512
    reach = r"prompt \+ new tokens = 513, and the model's indexer chooses 512 tokens for each query"
    with pytest.raises(UsageError, match=reach):
        kvbench.prefill(model, prompt(513), [SNAPKV])
    (cache,) = kvbench.prefill(model, prompt(505), [SNAPKV])
    with pytest.raises(UsageError, match=reach):
        kvbench.generate(model, [cache], 8)
    assert traits.context_length(model.config) == 512
    # the model's own attention scores with its own indexer, also while kvbench's attention is attached
    ids = prompt(520)
    expected = own_logits(model, ids)
    with attached(model):
        model.set_attn_implementation("eager")
        torch.testing.assert_close(own_logits(model, ids), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_no_way_leads_past_the_tokens_that_an_indexer_chooses(family):
    model, beyond = build(family), "indexer chooses 512 tokens"
    (cache,) = kvbench.prefill(model, prompt(500), ["full"])
    for feed in (
        lambda: compute_forced_logits(model, cache, prompt(13, 4)),
        lambda: teacher_force(model, [cache], prompt(13, 4), 4),
        lambda: diverge(model, cache, [cache], prompt(13, 4)),
        lambda: generate_rows(model, [cache], [Ending(20)]),
        lambda: make_observer(model)(prompt(513), Needs(), lambda *given: None),
    ):
        with pytest.raises(UsageError, match=beyond):
            feed()
    # one that stays within is as before: 12 tokens, of which the last is never fed
    assert len(compute_forced_logits(model, cache, prompt(12, 4))) == 12
    # the user's own length of a context does not widen it
    assert traits.context_length(model.config, 4096) == 512
    assert "indexer's keys, 16 numbers a token" in traits.of_model(model).shape.note


def test_an_indexers_own_forward_comes_back():
    model = copy.deepcopy(build("deepseek_v32"))
    indexer = attention_modules(model)[0].indexer
    own = indexer.forward
    calls = []
    indexer.forward = lambda *given, **named: calls.append(1) or own(*given, **named)
    # the first reading may probe the model, which then scores by itself
    kvbench.prefill(model, prompt(20), ["full"])
    calls.clear()
    kvbench.prefill(model, prompt(20), ["full"])
    assert not calls
    own_logits(model, prompt(20))
    assert calls
