"""Models with local layers (Gemma 2 and 3): these hold their window, methods compress the others, caps are kept."""

import copy
import json
import shutil
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from support import method_reference as ref
from support.calibrations import ready
from support.families import COMMON, CONFIGS, LOCALS, build, prompt
from support.runs import prepare, run_json
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

import kvbench
from kvbench.audit.accounting import bytes_declared
from kvbench.audit.prompt_audit import audit
from kvbench.base.errors import Refused, UsageError
from kvbench.bench import layers as bench_layers
from kvbench.engine.decode import extend_caches
from kvbench.engine.likelihood import teacher_force
from kvbench.engine.step import build as batch_of
from kvbench.kv import exact_attention
from kvbench.kv.model_shape import Shape, from_config, from_entry
from kvbench.kv.observation import Needs
from kvbench.kv.packed import quantise_tokens
from kvbench.kv.scale import LogitScale, capped
from kvbench.methods.chai import merge_clusters
from kvbench.methods.core.base import Selector
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.resolve import chain_of
from kvbench.models import embedded, traits
from kvbench.models.interface import cache_shape
from kvbench.storage import attend as storage_attend
from kvbench.storage import kernels
from kvbench.storage.attend import compute_packed_logits

WINDOW = 24
PLACES = {
    "gemma2": [1],
    "gemma3_text": [0, 2],
    "cohere2": [0, 2],
    "exaone4": [0, 2],
    "olmo3": [0, 2],
    "gpt_oss": [0, 2],
    "llama4_text": [0, 2],
    "gemma3n_text": [0, 2],
    "gemma4_text": [0, 2],
}
KEPT_WHOLE = [
    "full",
    {"method": "snapkv", "kv_ratio": 1.0},
    {"method": "h2o", "kv_size": 500, "window": 8},
    {"method": "tova", "kv_size": 500},
    {"method": "adakv", "kv_ratio": 1.0},
    {"method": "h2o+vatp", "kv_size": 500, "h2o.window": 8},
    {"method": "snapkv+think", "kv_ratio": 1.0, "ratio": 0.0},
    {"method": "twilight", "p": 1.0},
    {"method": "refreekv", "T": 0.0},
]
SCALE = LogitScale.of(0.5, 2.0)


def own_logits(model, ids):
    """The logits after ids [n] by transformers' eager attention without a cache."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            return model(ids[None], use_cache=False).logits[0, -1]
    finally:
        model.set_attn_implementation(before)


@pytest.mark.parametrize("family", LOCALS)
def test_caches_that_keep_everything_are_the_model_itself_beyond_the_window(family):
    model, ids, more = build(family), prompt(70), prompt(30, 4)
    caches = kvbench.prefill(model, ids, KEPT_WHOLE)
    greedy = []
    for _ in range(5):
        greedy.append(int(own_logits(model, torch.cat([ids, torch.tensor(greedy, dtype=torch.int64)])).argmax()))
    assert kvbench.generate(model, caches, 5) == [greedy] * len(caches)
    own, own_of_longer = own_logits(model, ids), own_logits(model, torch.cat([ids, more]))
    # the second time by more than a window at once
    extended = extend_caches(model, extend_caches(model, caches, more[:3]), more[3:])
    for cache, longer in zip(caches, extended, strict=True):
        torch.testing.assert_close(cache.logits, own, atol=1e-4, rtol=1e-4)
        assert (len(cache.layers), len(cache.local)) == (3, len(PLACES[family]))
        torch.testing.assert_close(longer.logits, own_of_longer, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", LOCALS)
def test_local_layers_hold_the_last_tokens_of_their_window_whatever_the_method(family):
    model, ids = build(family), prompt(70)
    small, whole = kvbench.prefill(
        model, ids, [{"method": "snapkv", "kv_size": 9, "window": 4, "per": "query_head"}, "full"]
    )
    for cache, n in ((small, 70), (whole, 70), (kvbench.extend(model, small, prompt(7, 3)), 77)):
        for layer in cache.local:
            assert ref.kept(layer) == [list(range(n - WINDOW, n))] * 2 and layer.seen == n
    assert [layer.tokens for layer in small.layers] == [9] * 3
    short = kvbench.prefill(model, ids[:10], [{"method": "snapkv", "kv_size": 6, "window": 4}])[0]
    assert [layer.tokens for layer in (*short.layers, *short.local)] == [6] * 3 + [10] * len(PLACES[family])


@pytest.mark.parametrize("family", LOCALS)
def test_a_decode_batch_holds_a_window_of_each_local_layer_and_no_more(family):
    model = build(family)
    caches = [kvbench.prefill(model, prompt(n), ["full"])[0] for n in (10, 70)]
    batch = batch_of(model, caches, 30)
    assert [i for i, layer in enumerate(batch.with_keys) if layer.local] == PLACES[family]
    for layer in batch.with_keys:
        if layer.local:
            ((_, rows),) = layer.formats
            assert rows.k.shape[2] == rows.v.shape[2] == WINDOW
            assert rows.tokens().tolist() == [10, WINDOW]
            assert layer.payload() == [tokens * 2 * 2 * 16 * 4 for tokens in (10, WINDOW)]


@pytest.mark.parametrize("family", LOCALS)
def test_a_text_forced_in_chunks_has_the_losses_of_its_tokens_one_by_one(family):
    model, ids, rest = build(family), prompt(50), prompt(30, 4)
    caches = kvbench.prefill(model, ids, ["full", {"method": "h2o", "kv_size": 500, "window": 8}])
    with torch.no_grad():
        logp = model(torch.cat([ids, rest])[None]).logits[0, len(ids) - 1 : -1].log_softmax(dim=-1)
    wanted = -logp.gather(1, rest[:, None])[:, 0]
    for chunk in (1, 26):  # alone, and more than a window at once
        for forced in teacher_force(model, caches, rest, chunk):
            torch.testing.assert_close(forced.losses, wanted, atol=1e-4, rtol=1e-4)
            assert forced.held == [79] * 3  # the last token is predicted, and never read


def test_methods_number_the_layers_that_they_compress():
    model = build("gemma3_text")
    (cache,) = kvbench.prefill(
        model, prompt(70), [{"method": "snapkv", "kv_size": 9, "window": 4, "frozen_layers": [2]}]
    )
    assert [layer.tokens for layer in cache.layers] == [9, 9, 70]
    with pytest.raises(UsageError, match="the model has layers 0 to 2"):
        kvbench.prefill(model, prompt(70), [{"method": "snapkv", "frozen_layers": [3]}])


def test_an_audit_refuses_a_local_layer_that_does_not_hold_its_window():
    model = build("gemma2")
    (cache,) = kvbench.prefill(model, prompt(70), ["full"])
    (layer,) = cache.local
    audit(cache, cache_shape(model))
    for wrong, reason in (
        (replace(layer, window=30), "its window of 30 has 30"),
        (replace(cache.layers[0], window=WINDOW), "shares its storage"),
        (replace(layer, seen=71), "has read 71 tokens"),
    ):
        with pytest.raises(Refused, match=reason):
            audit(replace(cache, local=(wrong,)), cache_shape(model))


def test_a_copy_of_a_cache_shares_no_local_layer_with_it():
    (cache,) = kvbench.prefill(build("gemma2"), prompt(40), ["full"])
    assert copy.deepcopy(cache).local[0].segments[0].k.data_ptr() != cache.local[0].segments[0].k.data_ptr()


def test_bytes_by_formula_and_of_built_layers_count_windows():
    shape = Shape(3, 4, 2, 16, local_layers=2, window=WINDOW)
    assert from_config(build("gemma3_text").config) == shape == from_entry(vars(shape))
    local = 2 * 2 * 2 * 16  # numbers of a token, keys and values of two heads in two layers
    assert shape.full_bytes(70, 2) == 2 * 3 * 2 * 70 * 16 * 2 + local * WINDOW * 2
    assert shape.full_bytes(10, 2) == 2 * 5 * 2 * 10 * 16 * 2
    chain = chain_of({"method": "snapkv", "kv_size": 9, "window": 4})
    declared, built = bytes_declared(chain, shape, 70, 4), bench_layers.measure_bytes(chain, shape, 70, torch.float32)
    assert declared.payload == 2 * 3 * 2 * 9 * 16 * 4 + local * WINDOW * 4
    assert (built.held.payload, built.held.overhead) == (declared.payload, declared.overhead) and built.agrees
    for wrong in ({"local_layers": 2}, {"window": 4}, {"local_layers": -1, "window": 4}):
        with pytest.raises(UsageError, match=r"model\.shape"):
            from_entry({"layers": 3, "query_heads": 4, "kv_heads": 2, "head_dim": 16, **wrong})


def test_a_run_says_which_layers_pass_through_and_stores_bytes_of_all(tmp_path, capsys):
    assert traits.of_model(build("llama")).shape.note is None
    note = traits.of_model(build("gemma3_text")).shape.note
    assert note.startswith("2 of 5 layers are local (window 24), and formats alone compress them.")
    folder = tmp_path / "gemma"
    AutoConfig.for_model("gemma3_text", **{**COMMON, **CONFIGS["gemma3_text"], "vocab_size": 1024}).save_pretrained(
        folder
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded.path() / name, folder)
    arguments = [f"model={folder}", "weights=random", "dataset=tiny/needle", "length=128", "limit=2", "method=snapkv"]
    status, report = run_json(capsys, *arguments, "kv_size=20", "window=8", f"results={tmp_path / 'r'}")
    assert status == 0 and note in report["notes"]
    full, small = (row["cells"][0] for row in report["rows"])
    # their cells are told from those of the days when methods compressed all layers; other models' ids stay
    (identity,) = {
        json.loads(p.read_text())["identity"]["model"]["local"] for p in tmp_path.glob("r/cells/*/cell.json")
    }
    assert identity == "coded by formats"
    assert "local" not in prepare("model=tiny", "dataset=tiny/needle").groups[0].cells[0].identity["model"]
    local = 2 * 2 * 2 * 16 * WINDOW * 4
    assert small["kept"] == 20 and small["payload"] == 3 * 2 * 2 * 20 * 16 * 4 + local
    assert full["full_bytes"] == full["payload"] == 3 * 2 * 2 * full["prompt_tokens"] * 16 * 4 + local


@pytest.mark.parametrize("family", LOCALS)
def test_methods_that_reach_into_local_layers_are_refused(family):
    model = traits.of_model(build(family))
    with pytest.raises(UsageError, match=f"does not support the model family '{family}'.*would lose tokens of their"):
        chain_of("uncomp-stage").check_model(model)
    with pytest.raises(UsageError, match="layers are local, and it reads attention modules"):
        Chain((ReadsModules(kv_size=8),)).check_model(model)
    Chain((ReadsModules(kv_size=8),)).check_model(traits.of_model(build("qwen3")))


@pytest.mark.parametrize("family", ["gemma2", "cohere2", "llama4_text"])
def test_low_rank_methods_factor_the_layers_that_attend_everything(family):
    """At full rank the cache of latents answers as the model; the local layers keep projections of their own."""
    model, ids = build(family), prompt(70)
    caches = kvbench.prefill(
        model, ids, [ready(model, {"method": "palu", "ratio": 0.0, "multiple": 1}, "kv_head"), "full"]
    )
    torch.testing.assert_close(caches[0].logits, caches[1].logits, atol=1e-3, rtol=1e-3)
    low, full = kvbench.generate(model, caches, 5)
    assert low == full
    assert all(layer.segments[0].latents is not None or layer.segments[0].latent for layer in caches[0].layers)
    for layer, own in zip(caches[0].local, caches[1].local, strict=True):
        torch.testing.assert_close(layer.segments[0].k, own.segments[0].k, atol=1e-4, rtol=1e-4)


@dataclass(frozen=True, kw_only=True)
class ReadsModules(Selector):
    """A stage as kvpress's presses are: it reads attention modules."""

    id: ClassVar[str] = "readsmodules"

    def needs(self, n):
        return Needs(call=True)


def test_a_cap_on_logits_decides_answers_and_no_kernel_takes_them(monkeypatch):
    model, ids = build("gemma2"), prompt(70)
    (cache,) = kvbench.prefill(model, ids, ["full"])
    monkeypatch.setattr(model.config, "attn_logit_softcapping", None)
    for module in model.modules():
        if hasattr(module, "attn_logit_softcapping"):
            monkeypatch.setattr(module, "attn_logit_softcapping", None)
    (uncapped,) = kvbench.prefill(model, ids, ["full"])
    assert (uncapped.logits - cache.logits).abs().max() > 0.1
    q, k, v = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16)
    monkeypatch.setattr(kernels, "attend", lambda *run: pytest.fail("a kernel without caps"))
    monkeypatch.setattr(kernels, "serves", lambda device: True)
    out, _ = storage_attend.attend(q, [], (k, v), SCALE)
    probs = (2 * torch.tanh(q @ k.repeat_interleave(2, 1).transpose(2, 3) * 0.5 / 2)).softmax(-1)
    torch.testing.assert_close(out, probs @ v.repeat_interleave(2, 1))


def dense_rows(q, k):
    """Causal attention rows [Hq, n, n] under SCALE, written down plainly."""
    logits = 2 * torch.tanh(q @ k.repeat_interleave(len(q) // len(k), 0).transpose(1, 2) * 0.5 / 2)
    hidden = torch.ones(q.shape[1], k.shape[1]).triu(1).bool()
    return logits.masked_fill(hidden, -torch.inf).softmax(-1)


def test_every_statistic_and_format_takes_logits_under_the_cap():
    torch.manual_seed(0)
    q, k, v = 3 * torch.randn(4, 20, 16), torch.randn(2, 20, 16), torch.randn(2, 20, 16)
    rows = dense_rows(q, k)
    torch.testing.assert_close(exact_attention.causal_softmax(q[:, -5:], k, SCALE), rows[:, -5:])
    torch.testing.assert_close(exact_attention.column_sums(q, k, SCALE), rows.sum(1))
    out = exact_attention.attend_rows(q, k, v, SCALE)
    torch.testing.assert_close(out, rows @ v.repeat_interleave(2, 0))
    assert exact_attention.attend_with_lse(q, k, v, SCALE) is None
    packed = quantise_tokens(k[None], 4, 16)
    for dtype in (torch.float32, torch.bfloat16):
        exact = storage_attend.compute_logits(q[None].to(dtype), packed.dequantise(dtype), SCALE)
        coded = compute_packed_logits(q[None].to(dtype), packed, SCALE, None, storage_attend.as_they_are)
        torch.testing.assert_close(coded, exact)
        assert exact.abs().max() <= 2
    # heads that are alike below the cap
    far = torch.tensor([[[40.0, 0]], [[90.0, 0]], [[0, 40.0]], [[0, 90.0]]]).expand(4, 2, 2)
    keys = torch.tensor([[1.0, 0], [0, 1.0]]).expand(1, 2, 2)
    assert merge_clusters(far, keys, SCALE, 2)[0].tolist() == [0, 0, 2, 2]
    assert merge_clusters(far, keys, SCALE, 2)[1][0] < 1e-12
    assert float(copy.deepcopy(SCALE)) == 0.5 and copy.deepcopy(SCALE).cap == 2
    assert capped(k, 0.5) is k


def test_thin_keys_decode_under_the_cap_as_they_do_where_nothing_is_evicted():
    """The same channels go; one row holds its tokens in slots that could be reused, the other in segments."""
    model, knobs = build("gemma2"), {"recent": 6, "think.ratio": 0.5, "observed": 8}
    rows = kvbench.prefill(
        model,
        prompt(60),
        [{"method": "h2o+think", "kv_size": 500, "h2o.window": 8, **knobs}, {"method": "think", **knobs}],
    )
    thin, plain = (kvbench.extend(model, cache, prompt(5, 2)) for cache in rows)
    torch.testing.assert_close(thin.logits, plain.logits, atol=1e-4, rtol=1e-4)


def test_the_language_model_of_a_larger_one_runs_once_it_is_saved_as_its_own(tmp_path):
    text = {**build("gemma3_text").config.to_dict(), "vocab_size": 140}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14})
    larger = Gemma3ForConditionalGeneration(config).eval()
    with pytest.raises(UsageError, match="gemma3_text, is a part of a larger model: save that part"):
        kvbench.prefill(larger, prompt(40), ["full"])
    # as docs/own.md says
    part = AutoModelForCausalLM.from_config(larger.config.text_config)
    part.model.load_state_dict(larger.model.language_model.state_dict())
    part.lm_head.load_state_dict(larger.lm_head.state_dict())
    part.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    (cache,) = kvbench.prefill(model, prompt(40), ["full"])
    with torch.no_grad():
        torch.testing.assert_close(cache.logits, larger(prompt(40)[None]).logits[0, -1], atol=1e-4, rtol=1e-4)
