"""Any family that transformers' attention interface serves runs as it does in transformers, or is refused in words."""

import json
import shutil

import pytest
import torch
from support.families import COMMON, FAMILIES, GQA, WITH_LATENTS, WITH_SHARING, WITH_STATES, build, prompt, random_model
from transformers import AutoConfig, AutoModelForCausalLM, MllamaForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.gptj import modeling_gptj
from transformers.models.mllama.configuration_mllama import MllamaTextConfig
from transformers.models.nemotron import modeling_nemotron

import kvbench
from kvbench.base.errors import Refused, UsageError
from kvbench.cli.main import main
from kvbench.methods.core.resolve import chain_of
from kvbench.models import embedded, probe, traits
from kvbench.models.interface import attached

SMALL = {**COMMON, **GQA, "intermediate_size": 96, "pad_token_id": 0}
WIDE = {**SMALL, "head_dim": 24}  # not hidden size over heads
MIXED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
NORM = "k_norm stands between"
TURN = "rotates keys by another rule"
OWN = "no projections of their own"
RECURRENT = "none of its layers has keys|attention modules are not those of the layers"
"""By the types of the layers, or in releases that give none by their modules."""
# family: config, why keys are not rotated anew, why low-rank methods do not run ("" where they are and do)
SERVED = {
    "qwen3": (WIDE, "", NORM),
    "qwen3_moe": ({**WIDE, "num_experts": 4, "num_experts_per_tok": 2}, "", NORM),
    "gemma2": ({**WIDE, "attn_logit_softcapping": 8.0, "query_pre_attn_scalar": 24}, "softcapping", ""),
    "phi": ({**COMMON, "num_attention_heads": 4, "intermediate_size": 96}, "", ""),
    "phi3": (SMALL, "", OWN),
    "gemma": (WIDE, "", ""),
    "gemma3_text": ({**WIDE, "query_pre_attn_scalar": 24}, "", NORM),
    "gpt2": ({**COMMON, "num_attention_heads": 4}, "learns its positions", OWN),
    "olmo": (SMALL, "", ""),
    "olmo2": (SMALL, "", NORM),
    "olmo3": (SMALL, "", NORM),
    "granite": ({**SMALL, "attention_multiplier": 0.4}, "", ""),
    "starcoder2": (SMALL, "", ""),
    "stablelm": (SMALL, "", ""),
    "mixtral": (SMALL, "", ""),
    "nemotron": (WIDE, "", ""),
    "smollm3": (SMALL, "", ""),
    "cohere": (SMALL, TURN, TURN),
    "glm4": (WIDE, TURN, TURN),
    "persimmon": ({**COMMON, "num_attention_heads": 4, "intermediate_size": 96}, "", OWN),
    "hunyuan_v1_dense": (WIDE, "", "key_layernorm stands between"),
}
REFUSED = {
    "falcon": ({}, "attention interface"),
    "gptj": ({"n_layer": 2}, "attention interface"),
    "bloom": ({}, "attention interface"),
    "glm_moe_dsa": ({"num_hidden_layers": 2, "index_topk": 0}, "index_topk is 0, so that its indexer chooses no token"),
    "deepseek_v4": ({"num_hidden_layers": 2}, "an indexer that kvbench does not know chooses"),
    "mamba": ({"num_hidden_layers": 2}, RECURRENT),
    "rwkv": ({"num_hidden_layers": 2}, RECURRENT),
    "zamba": ({}, RECURRENT),
    "zamba2": ({}, RECURRENT),
    "qwen3_5": ({}, "qwen3_5_text, is a part of a larger model: save that part"),
    "gemma3": ({}, "gemma3_text, is a part of a larger model: save that part"),
    "llama4_text": ({"num_hidden_layers": 2, "no_rope_layers": [1, 1]}, "all of its layers attend chunks"),
    "bert": ({"num_hidden_layers": 2}, "not causal"),
    "bart": ({"is_encoder_decoder": True}, "cross-attention"),
    "t5": ({}, "no causal language model"),
}
# by the release of transformers
if not hasattr(modeling_nemotron, "ALL_ATTENTION_FUNCTIONS"):
    REFUSED["nemotron"] = SERVED.pop("nemotron")[0], "attention interface"
if hasattr(modeling_gptj, "ALL_ATTENTION_FUNCTIONS"):
    del REFUSED["gptj"]
    SERVED["gptj"] = {**COMMON, "num_attention_heads": 4, "rotary_dim": 8}, "from a table", "from a table"


def model_of(family, **changes):
    """A random model whose attention is far from uniform and whose norms are no identities."""
    torch.manual_seed(0)
    model = random_model(family, {**SERVED[family][0], **changes})
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 2:
                p.normal_(std=0.35 if any(k in name for k in ("q_proj", "k_proj", "qkv", "query_key")) else 0.15)
            elif "norm" in name:
                p.add_(torch.rand_like(p) - 0.5)
    return model.eval()


def reference(model, ids, new=10):
    out = model.generate(ids[None], max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[0, len(ids) :].tolist()


@pytest.mark.filterwarnings("ignore:Untested family")
@pytest.mark.parametrize("family", SERVED)
def test_the_full_cache_and_a_full_budget_answer_as_the_model_itself(family):
    model, ids = model_of(family), prompt(30)
    with torch.no_grad():
        arguments = model(input_ids=ids[None]).logits[0, -1]
    complete = {"method": "snapkv", "kv_ratio": 1.0}
    caches = kvbench.prefill(model, ids, ["full", complete, {"method": "h2o", "kv_size": 12, "window": 4}])
    for cache in caches:
        torch.testing.assert_close(cache.logits, arguments, atol=1e-4, rtol=1e-4)
    answers = kvbench.generate(model, caches, 10)
    assert answers[:2] == [reference(model, ids)] * 2
    assert caches[2].layers[0].tokens == 12 and len(answers[2]) == 10


@pytest.mark.parametrize("family", SERVED)
def test_methods_that_would_compute_something_else_are_refused_with_the_reason(family):
    config, unrolled, mixed = SERVED[family]
    traits_found = traits.of_config(AutoConfig.for_model(family, **config))
    for entry, reason in (
        # a cap on logits is no matter of the rotation
        ({"method": "streamingllm", "mode": "rolled"}, unrolled if unrolled != "softcapping" else ""),
        ({"method": "expectedattention"}, unrolled),
        ({"method": "palu"}, mixed),
        ({"method": "asvd"}, mixed),
    ):
        chain = chain_of(entry)
        if not reason:
            chain.check_model(traits_found)
            continue
        with pytest.raises(UsageError, match=reason):
            chain.check_model(traits_found)


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_right_is_refused_before_its_weights_are_read(family):
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this release of transformers does not know {family}")
    changes, reason = REFUSED[family]
    with pytest.raises(UsageError, match=f"{family}.*{reason}"):
        traits.of_config(AutoConfig.for_model(family, **changes))


def test_a_model_object_with_layers_of_cross_attention_is_refused():
    config = MllamaTextConfig(**SMALL, cross_attention_layers=[2])
    with torch.device("meta"):
        model = MllamaForCausalLM(config)
    with pytest.raises(UsageError, match="cross-attention"):
        traits.of_model(model)


@pytest.mark.filterwarnings("ignore:Untested family")
@pytest.mark.parametrize("family", ["gemma3_text", "olmo3", "smollm3"])
def test_layers_with_and_without_a_window_answer_as_the_model_itself(family):
    model, ids = model_of(family, **MIXED), prompt(30)
    full, complete, small = kvbench.prefill(
        model, ids, ["full", {"method": "snapkv", "kv_ratio": 1.0}, {"method": "snapkv", "kv_size": 8, "window": 4}]
    )
    assert kvbench.generate(model, [full, complete], 10) == [reference(model, ids)] * 2
    assert (len(small.layers), [layer.tokens for layer in (*small.layers, *small.local)]) == (1, [8, 8, 8])


@pytest.mark.filterwarnings("ignore:Untested family")
def test_a_norm_behind_the_rotation_is_measured_where_no_attribute_tells():
    model = model_of("hunyuan_v1_dense")
    assert traits.of_config(model.config).unrolled is None
    with pytest.raises(UsageError, match="keys at other positions are not its keys rotated"):
        kvbench.prefill(model, prompt(30), [{"method": "streamingllm", "mode": "rolled"}])


def test_keys_that_are_no_projection_are_measured_where_no_attribute_tells(monkeypatch):
    from transformers.models.granite import modeling_granite

    turn = modeling_granite.apply_rotary_pos_emb
    assert traits.of_model(model_of("granite")).mixed is None
    monkeypatch.setattr(
        modeling_granite, "apply_rotary_pos_emb", lambda q, k, *rest: (turn(q, k, *rest)[0], 1.5 * turn(q, k, *rest)[1])
    )
    traits_found = traits.of_model(model_of("granite"))
    assert traits_found.unrolled is None and "not what its projections give" in traits_found.mixed


@pytest.mark.parametrize("family", ["diffllama", "doge"])
def test_a_family_that_reads_its_cache_past_the_attention_function_is_refused(family):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SMALL))
    # releases differ in which of them takes part in the interface
    with pytest.raises(UsageError, match=r"outside the attention function|through transformers' attention interface"):
        kvbench.prefill(model, prompt(10), ["full"])


def test_low_rank_methods_refuse_a_norm_behind_the_projection_before_they_measure_anything(tmp_path):
    for method in ("palu", "asvd"):
        with pytest.raises(UsageError, match="k_norm stands between its projections and the cache"):
            kvbench.calibrate(build("qwen3"), None, method, folder=tmp_path)
        chain = chain_of(method)
        with pytest.raises(UsageError, match=f"method {method} does not support the model family 'qwen3': k_norm"):
            kvbench.prefill(build("qwen3"), prompt(10), [chain])
    assert not list(tmp_path.iterdir())


def test_logits_of_another_attention_than_the_models_own_are_refused(monkeypatch):
    from transformers.models.granite import modeling_granite

    model, eager = model_of("granite"), modeling_granite.eager_attention_forward

    def capped(module, query, key, value, mask, **kwargs):
        return eager(module, query.tanh(), key, value, mask, **kwargs)

    monkeypatch.setattr(modeling_granite, "eager_attention_forward", capped)
    with pytest.raises(UsageError, match="logits are not the model's own"):
        kvbench.prefill(model, prompt(10), ["full"])


def test_logits_that_are_no_numbers_under_kvbenchs_attention_alone_are_refused(monkeypatch):
    monkeypatch.setattr(probe, "attend_rows", lambda query, *_: torch.full_like(query, torch.nan))
    with pytest.raises(UsageError, match="logits are not the model's own"):
        kvbench.prefill(model_of("granite"), prompt(10), ["full"])


def test_own_logits_that_are_no_numbers_are_not_blamed_on_kvbenchs_attention():
    model = model_of("granite")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = torch.nan
    with pytest.raises(Refused, match="of this prompt are not finite"):
        kvbench.prefill(model, prompt(10), ["full"])


@pytest.mark.parametrize("asked", ["head_mask", "position_bias"])
def test_what_a_model_asks_of_attention_beyond_scale_and_window_is_refused(asked):
    from kvbench.models.interface import WindowMask, attention
    from kvbench.models.probe import ProbeLayer

    for mask in (None, WindowMask(2)):
        with pytest.raises(UsageError, match=f"asks for {asked}"):
            attention(torch.nn.Identity(), torch.zeros(1, 2, 3, 4), ProbeLayer(), None, mask, **{asked: 30.0})


def test_the_note_on_an_untested_family_is_a_warning_and_is_given_for_no_tested_one(recwarn):
    # an older release of transformers may lack what some families need
    assert set(traits.TESTED) == {*FAMILIES, *WITH_STATES, *WITH_LATENTS, *WITH_SHARING}
    assert traits.of_model(build("llama")).note is None
    kvbench.prefill(build("qwen3"), prompt(10), ["full"])
    assert not [w for w in recwarn if "Untested" in str(w.message)]
    with pytest.warns(UserWarning, match="Untested family 'phi'"):
        kvbench.prefill(model_of("phi"), prompt(10), ["full"])
    with attached(build("llama")):
        assert traits.of_model(build("llama")).family == "llama"


def test_a_run_of_an_untested_family_says_so_in_its_notes_and_json(tmp_path, capsys):
    folder = tmp_path / "phi"
    AutoConfig.for_model("phi", **{**SERVED["phi"][0], "vocab_size": 1024}).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded.path() / name, folder)
    arguments = [f"model={folder}", "weights=random", "dataset=tiny/needle", "length=128", "limit=1"]
    arguments += ["method=snapkv", f"results={tmp_path / 'r'}"]
    assert main(["run", *arguments]) == 0
    assert "Untested family 'phi'" in capsys.readouterr().out
    assert main(["run", *arguments, "--json"]) == 0
    assert any("Untested family 'phi'" in note for note in json.loads(capsys.readouterr().out)["notes"])
