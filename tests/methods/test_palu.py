"""Palu: what is cached, rebuilt and attended, against a copy of the model with the products as its weights."""

from dataclasses import replace

import pytest
import torch
from support import lowrank_reference as slow
from support import method_reference as ref
from support.calibrated import bound
from support.families import LINEAR, build, prompt

import kvbench
from kvbench.audit.accounting import bytes_declared
from kvbench.audit.prompt_audit import audit
from kvbench.base.errors import Refused, UsageError
from kvbench.engine.calibration.session import Session
from kvbench.engine.likelihood import teacher_force
from kvbench.engine.patches import adapted
from kvbench.kv.model_shape import from_config
from kvbench.methods.core import registry
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.recipe import Calibration
from kvbench.methods.core.resolve import chain_of
from kvbench.models.interface import attention_modules, cache_shape
from kvbench.models.lowrank import LowRank, lifts, projection_modules
from kvbench.storage import latent_rows

pytestmark = pytest.mark.e2e("factorises models")

N, NEW = 60, 4


def chain(model, method="palu", **knobs):
    return bound(model, chain_of({"method": method, "multiple": 4, **knobs}))


def reference(model, made):
    stage = made.lowrank
    return slow.palu(model, stage.tensor("moments"), stage.ranks, stage.heads_per_group * 16)


def greedy(model, ids, new=NEW):
    with torch.no_grad():
        out = model.generate(ids[None], max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[0, len(ids) :].tolist()


def modules(model):
    return [type(m) for m in model.modules()], [m for a in attention_modules(model) for m in projection_modules(a)]


def is_own(model):
    return all(isinstance(m, torch.nn.Linear) for a in attention_modules(model) for m in projection_modules(a))


@pytest.mark.parametrize("family", LINEAR)
@pytest.mark.parametrize("ranks_by", ["fisher", "fisher_uniform", "uniform"])
@pytest.mark.parametrize("group", [1, 4])
def test_it_decodes_as_a_model_with_the_products_as_its_weights(family, ranks_by, group):
    model, ids = build(family), prompt(N, 4)
    calibrated = chain(model, ratio=0.4, ranks_by=ranks_by, group=group)
    dense = reference(model, calibrated)
    cache, full_cache = kvbench.prefill(model, ids, [calibrated])[0], kvbench.prefill(dense, ids, ["full"])[0]
    torch.testing.assert_close(cache.logits, full_cache.logits, atol=2e-4, rtol=2e-4)
    assert kvbench.generate(model, [cache], NEW) == [greedy(dense, ids)]
    more = prompt(7, 9)
    longer, want = kvbench.extend(model, cache, more), kvbench.extend(dense, full_cache, more)
    torch.testing.assert_close(longer.logits, want.logits, atol=2e-4, rtol=2e-4)
    assert kvbench.generate(model, [longer], NEW) == kvbench.generate(dense, [want], NEW)
    assert longer.layers[0].kept_positions()[0].tolist() == list(range(N + 7))
    losses = teacher_force(model, [cache], more, 3)[0].losses
    torch.testing.assert_close(losses, teacher_force(dense, [full_cache], more, 3)[0].losses, atol=2e-4, rtol=2e-4)
    assert is_own(model)


@pytest.mark.parametrize("ranks_by", ["fisher", "uniform"])
def test_ranks_differ_as_declared(ranks_by):
    calibrated = chain(build("gpt_neox"), ratio=0.5, ranks_by=ranks_by, group=2)
    flat = [r for layer in calibrated.lowrank.ranks for pair in layer for r in pair]
    assert len(flat) == 3 * 2 * 2 and sum(flat) == 12 * 16
    assert (len(set(flat)) == 1) == (ranks_by == "uniform")
    even = chain(build("gpt_neox"), ratio=0.5, ranks_by="fisher_uniform", group=2).lowrank.ranks
    assert all(len(set(pair)) == 1 for layer in even for pair in layer)
    assert len({r for layer in even for pair in layer for r in pair}) > 1


@pytest.mark.parametrize("family", LINEAR)
def test_bytes_are_those_of_the_latents_and_nothing_else_is_held(family):
    model = build(family)
    calibrated = chain(model, ratio=0.5)
    (cache,) = kvbench.prefill(model, prompt(N, 4), [calibrated])
    stage = calibrated.lowrank
    measured = audit(cache, cache_shape(model))
    per_token = sum(sum(pair) for layer in stage.ranks for pair in layer)
    assert measured.payload == per_token * N * 4
    assert measured.payload == measured.payload_kv_head == measured.payload_query_head == measured.full_bytes // 2
    assert measured.overhead == 3 * N * 4
    assert cache.nbytes() == measured.payload + measured.overhead
    for layer, (k, v) in zip(cache.layers, stage.ranks, strict=True):
        (s,) = layer.segments
        assert s.k.shape == (1, N, sum(k)) and s.v.shape == (1, N, sum(v)) and s.latent and s.latents is None


@pytest.mark.parametrize("ranks_by", ["fisher", "uniform"])
def test_declared_bytes_count_each_layers_own_ranks(ranks_by):
    model = build("llama")
    calibrated = chain(model, ratio=0.5, ranks_by=ranks_by)
    per_layer = [sum(map(sum, pair)) for pair in calibrated.lowrank.ranks]
    assert (len(set(per_layer)) == 1) == (ranks_by == "uniform")
    shape = from_config(model.config)
    assert bytes_declared(calibrated, shape, 100, 4).payload == sum(per_layer) * 100 * 4
    (cache,) = kvbench.prefill(model, prompt(100, 4), [calibrated])
    assert audit(cache, cache_shape(model)).payload == sum(per_layer) * 100 * 4


def test_a_cache_with_latents_of_another_width_is_refused():
    model = build("llama")
    cache = kvbench.prefill(model, prompt(N, 4), [chain(model, ratio=0.5)])[0]
    other = replace(cache, chain=chain(model, ratio=0.25))
    with pytest.raises(Refused, match="payload bytes"):
        audit(other, cache_shape(model))


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_keys_are_rebuilt_a_block_at_a_time(family, monkeypatch):
    model, ids = build(family), prompt(N, 4)
    calibrated = chain(model, ratio=0.4)
    caches = kvbench.prefill(model, ids, [calibrated])
    want = kvbench.generate(model, caches, NEW)
    seen = []
    real = type(lifts_of(model, calibrated)[0]).keys

    def spy(self, latent, positions):
        seen.append(latent.shape[1])
        return real(self, latent, positions)

    heads = 2 if family == "llama" else 4
    monkeypatch.setattr(latent_rows, "BLOCK", 7 * heads * 16)
    monkeypatch.setattr("kvbench.models.lowrank.LatentLift.keys", spy)
    assert kvbench.generate(model, caches, NEW) == want
    assert max(seen) == 7 and len(seen) >= 3 * (NEW - 1) * (N // 7)


def lifts_of(model, made):
    with adapted(model, made):
        return lifts(model)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "opt"])
def test_batched_with_other_ranks_prompts_and_methods_it_answers_as_alone(family):
    model = build(family)
    entries = [
        chain(model, ratio=0.4),
        "full",
        chain(model, ratio=0.7),
        {"method": "snapkv+kivi", "kv_size": 24, "window": 8, "group": 4, "residual": 8},
        chain(model, "streamingllm+palu", ratio=0.4, kv_size=20),
        chain(model, "asvd", ratio=0.4),
        chain(model, "twilight+palu", ratio=0.4, p=0.5),
    ]
    caches = [c for n, seed in ((N, 4), (41, 5)) for c in kvbench.prefill(model, prompt(n, seed), entries)]
    alone = [kvbench.generate(model, [c], NEW)[0] for c in caches]
    assert kvbench.generate(model, caches, NEW) == alone
    assert len({tuple(a) for a in alone}) > 6
    one = caches[: len(entries)]
    together = [f.losses for f in teacher_force(model, one, prompt(6, 7), 4)]
    for cache, losses in zip(one, together, strict=True):
        torch.testing.assert_close(
            losses, teacher_force(model, [cache], prompt(6, 7), 4)[0].losses, atol=1e-4, rtol=1e-4
        )


def test_rows_that_end_early_leave_the_others_as_they_were():
    model = build("llama")
    calibrated = chain(model, ratio=0.4)
    caches = [kvbench.prefill(model, prompt(30 + 5 * i, i), [calibrated])[0] for i in range(6)]
    complete = kvbench.generate(model, caches, 10)
    stop = sorted({a[2 + i % 3] for i, a in enumerate(complete[:4])})
    cut = [a[: next((i for i, t in enumerate(a) if t in stop), 9) + 1] for a in complete]
    assert kvbench.generate(model, caches, 10, stop) == cut and len({len(a) for a in cut}) > 1


def test_a_prefill_of_its_own_leaves_all_others_alone():
    model, ids = build("llama"), prompt(N, 4)
    one, two, same = chain(model, ratio=0.4), chain(model, ratio=0.7), chain(model, "streamingllm+palu", ratio=0.4)
    assert len({c.prefill_key for c in (Chain(), one, two)}) == 3
    assert one.prefill_key == same.prefill_key != ""
    caches = kvbench.prefill(model, ids, ["full", one, two, same])
    assert torch.equal(caches[0].logits, kvbench.prefill(model, ids, ["full"])[0].logits)
    assert torch.equal(caches[1].logits, caches[3].logits)
    assert len({tuple(m.logits.tolist()) for m in caches}) == 3


def test_another_calibration_is_another_prefill():
    model = build("llama")
    calibrated = chain(model, ratio=0.4)
    stage = calibrated.lowrank
    tensors = {**stage.calibration.tensors, "moments": torch.eye(64).expand(3, 64, 64).contiguous()}
    other = stage.calibrated(Calibration("palu", "f" * 64, stage.calibration.weights, tensors))
    assert other.prefill_key != stage.prefill_key
    first, second = kvbench.prefill(model, prompt(N, 4), [calibrated, Chain((other,))])
    assert not torch.equal(first.logits, second.logits)


@pytest.mark.parametrize("family", LINEAR)
@pytest.mark.parametrize("per", ["kv_head", "query_head"])
def test_a_selector_decides_for_the_layer_by_the_keys_that_attention_read(family, per):
    model, ids = build(family), prompt(N, 4)
    calibrated = chain(model, "snapkv+palu", ratio=0.4, kv_size=20, per=per, **{"snapkv.window": 8})
    (cache,) = kvbench.prefill(model, ids, [calibrated])
    attn = slow.rows_of_attention(reference(model, calibrated), ids)
    for layer, rows in zip(cache.layers, attn, strict=True):
        assert ref.kept(layer) == ref.snapkv(rows, 1, 20, 8, 7, "max")
    per_token = sum(sum(pair) for layer in calibrated.lowrank.ranks for pair in layer)
    assert audit(cache, cache_shape(model)).payload == per_token * 20 * 4


@pytest.mark.parametrize("family", LINEAR)
def test_what_is_left_after_a_selector_is_decoded_as_by_the_dense_model(family):
    model, ids = build(family), prompt(N, 4)
    calibrated = chain(model, "streamingllm+palu", ratio=0.4, kv_size=20)
    entry = {"method": "streamingllm", "kv_size": 20}
    dense = reference(model, calibrated)
    (cache,), (want,) = kvbench.prefill(model, ids, [calibrated]), kvbench.prefill(dense, ids, [entry])
    assert ref.kept(cache.layers[1]) == ref.kept(want.layers[1])[:1]
    assert kvbench.generate(model, [cache], NEW) == kvbench.generate(dense, [want], NEW)
    logits = [kvbench.extend(m, c, prompt(4, 8)).logits for m, c in ((model, cache), (dense, want))]
    torch.testing.assert_close(*logits, atol=2e-4, rtol=2e-4)


def test_values_and_key_norms_of_all_heads_are_averaged():
    model, ids = build("llama"), prompt(N, 4)
    calibrated = chain(model, "keynorm+palu", ratio=0.4, kv_size=20)
    dense = reference(model, calibrated)
    full_cache, (cache,) = kvbench.prefill(dense, ids, ["full"])[0], kvbench.prefill(model, ids, [calibrated])
    for layer, full in zip(cache.layers, full_cache.layers, strict=True):
        norms = full.segments[0].k.norm(dim=-1).mean(dim=0)
        assert ref.kept(layer) == [ref.top((-norms).tolist(), 20)]


@pytest.mark.parametrize(
    ("method", "knobs"),
    [
        ("adakv", {}),
        ("refreekv", {"frozen_layers": [], "T": 0.3}),
        ("expectedattention", {}),
        ("cake", {"decode_evict": False}),
        ("h2o", {}),
        ("random", {}),
    ],
)
def test_every_selector_that_evicts_after_the_prompt_stands_beside_it(method, knobs):
    model, sizes = build("llama"), {"kv_size": 24, "window": 8}
    own_knobs = {k: v for k, v in sizes.items() if k in registry.knob_names(method)}
    calibrated = chain(model, f"{method}+palu", ratio=0.4, **own_knobs, **knobs)
    (cache,) = kvbench.prefill(model, prompt(N, 4), [calibrated])
    measured = audit(cache, cache_shape(model))
    assert 0 < measured.kept < N and all(len(ref.kept(layer)) == 1 for layer in cache.layers)
    assert len(kvbench.generate(model, [cache], 2)[0]) == 2


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("think+palu", "think removes channels of stored keys or values, and palu stores none"),
        ("l2+asvd", "l2 removes channels"),
        ("palu+kivi", "kivi quantises keys and values as attention reads them, and palu stores latents"),
        ("palu+asvd", "palu and asvd, but each replaces the same projections"),
        ("tova+palu", "tova evicts tokens while decoding as set here"),
        ("cake+palu", "cake evicts tokens while decoding as set here"),
    ],
)
def test_what_cannot_stand_beside_latents_is_refused_with_the_reason(method, why):
    with pytest.raises(UsageError, match=why.replace("(", r"\(")):
        chain_of(method)


@pytest.mark.parametrize("knobs", [{"ratio": 1.0}, {"ratio": -0.1}, {"group": 0}, {"ranks_by": "x"}, {"multiple": 0}])
def test_impossible_knobs_are_refused_by_name(knobs):
    (name,) = knobs
    with pytest.raises(UsageError, match=rf"method\.palu\.{name}="):
        chain_of({"method": "palu", **knobs})


def test_bytes_before_any_calibration_are_refused_and_not_guessed():
    with pytest.raises(UsageError, match="palu was not calibrated, and its ranks, hence its bytes"):
        chain_of("palu").layout(10, 16, 4)


class Tokens:
    bos_token_id = 1

    def encode(self, content, add_special_tokens):
        return [3 + ord(c) % 120 for c in content]


def test_too_few_tokens_another_model_or_none_at_all_are_refused(tmp_path):
    model, text = build("llama"), tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 9)
    session = Session(tmp_path / "kept", {"name": "small"}, Tokens(), 512, text=str(text))
    with pytest.raises(UsageError, match=r"estimates 64 dimensions \(the hidden size\), and all windows together have"):
        session.bind(chain_of({"method": "palu", "samples": 3, "tokens": 21}), model, quiet=True)
    assert is_own(model)
    calibrated = chain_of({"method": "palu", "samples": 4, "tokens": 21, "multiple": 4})
    built_chain = session.bind(calibrated, model, quiet=True)
    assert session.bind(calibrated, model, quiet=True) == built_chain
    kvbench.prefill(model, prompt(20), [built_chain])
    with pytest.raises(UsageError, match="other weights"):
        kvbench.prefill(build("mistral"), prompt(20), [built_chain])
    with pytest.raises(UsageError, match="needs a calibration of this model"):
        kvbench.prefill(model, prompt(20), [calibrated])
    assert session.chain_identity(calibrated) == session.chain_identity(built_chain)


def test_what_a_calibration_takes_is_said_before_it_starts(tmp_path, capsys):
    model, text = build("llama"), tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 9)
    session = Session(tmp_path / "kept", {"name": "small"}, Tokens(), 512, text=str(text))
    session.bind(chain_of({"method": "palu", "samples": 4, "tokens": 21, "multiple": 4}), model)
    assert "; 1 MiB of statistics beside the model, 1 MiB on disk; kept in" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["palu", "asvd"])
def test_windows_are_as_long_as_the_context_allows_up_to_2048(method, tmp_path):
    (stage,) = chain_of(method).stages
    text = tmp_path / "text.txt"
    text.write_text("words")
    for context, tokens in ((512, 512), (2048, 2048), (8192, 2048), (None, 2048)):
        session = Session(tmp_path, {"name": "small"}, Tokens(), context, text=str(text))
        assert session.request(stage).recipe.tokens == tokens
    assert Session(tmp_path, {}, Tokens(), 4096, own_corpus=True).request(stage).recipe.tokens == 1024


@pytest.mark.parametrize("family", LINEAR)
def test_the_models_modules_come_back_even_on_errors(family):
    model, before = build(family), modules(build(family))
    calibrated = chain(model, ratio=0.4)
    (cache,) = kvbench.prefill(model, prompt(30), [calibrated])
    assert modules(model) == before
    with adapted(model, calibrated):
        assert len(lifts(model)) == 3 and isinstance(lifts(model)[0].k, LowRank)
    assert modules(model) == before
    with pytest.raises(ArithmeticError), adapted(model, calibrated):
        raise ArithmeticError
    assert modules(model) == before and lifts(model) == []
    broken = replace(cache, layers=cache.layers[:2])
    with pytest.raises(IndexError):
        kvbench.generate(model, [broken], 3)
    assert modules(model) == before
    with pytest.raises(UsageError):
        kvbench.prefill(model, torch.tensor([[1, 2], [3, 4]]), [calibrated])
    assert modules(model) == before


def test_frequencies_that_move_with_the_text_are_refused():
    model = build("llama")
    built, before = chain(model, ratio=0.4), model.config.rope_parameters
    model.config.rope_parameters = {**before, "rope_type": "dynamic"}
    try:
        with pytest.raises(UsageError, match="dynamic"):
            kvbench.prefill(model, prompt(20), [built])
    finally:
        model.config.rope_parameters = before
    assert is_own(model)
