"""A checkpoint's weights are all there, fit and are floats, or loading says which are not and why."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import FAMILIES, build
from transformers import LlamaConfig

from kvbench.api import generate
from kvbench.base.errors import UsageError
from kvbench.cli.main import main
from kvbench.engine.prefill import prefill_chains
from kvbench.methods.core.resolve import chain_of
from kvbench.models import load, weights
from kvbench.models.config import ModelConfig
from kvbench.models.config_json import check_sizes

CPU = torch.device("cpu")


def _checks_types():
    try:
        LlamaConfig(rms_norm_eps="x")
    except Exception:
        return True
    return False


CHECKS_TYPES = _checks_types()
"""True if this release of transformers refuses a value of another type in a config.json."""


@pytest.fixture
def folder(tmp_path):
    build("llama").save_pretrained(tmp_path / "m")
    return tmp_path / "m"


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def configure(folder, **more):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **more}))


def loaded(folder, **knobs):
    cfg = ModelConfig(name="hf", path=str(folder), **knobs)
    return load.load_weights(cfg, load.locate(cfg), CPU)


def refused(folder, *reasons, **knobs):
    with pytest.raises(UsageError) as error:
        loaded(folder, **knobs)
    for reason in reasons:
        assert reason in str(error.value), error.value
    return str(error.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_missing_surplus_misshapen_and_integer_weights_are_named(family, tmp_path):
    build(family).save_pretrained(tmp_path / "whole")
    names = sorted(load_file(tmp_path / "whole" / "model.safetensors"))
    weight = next(
        n for n in names if n.endswith(("dense.weight", "q_proj.weight", "qkv_proj.weight", "q_b_proj.weight"))
    )
    cases = {
        "lacks weights": lambda t: t.pop(weight),
        "no place for": lambda t: t.update({"model.extra.weight": torch.ones(2)}),
        "another shape": lambda t: t.update({weight: torch.ones(3, 3)}),
        "as integers": lambda t: t.update({weight: torch.ones(t[weight].shape, dtype=torch.int8)}),
    }
    for number, (reason, change) in enumerate(cases.items()):
        broken = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", broken)
        rewrite(broken, change)
        # some families name their layers otherwise in files
        refused(broken, reason, "model.extra.weight" if reason == "no place for" else weight.partition("layers.")[2])
    kept_tokens = loaded(tmp_path / "whole").state_dict()
    assert all(torch.equal(kept_tokens[n], t) for n, t in build(family).state_dict().items())


def test_a_config_of_another_depth_is_told_with_names_and_count(folder):
    configure(folder, num_hidden_layers=2)
    refused(folder, "no place for: model.layers.2.input_layernorm.weight", "(9 in all)")
    configure(folder, num_hidden_layers=4)
    refused(folder, "lacks weights that its config.json asks for: model.layers.3", "(9 in all)")
    configure(folder, num_hidden_layers=3, intermediate_size=100)
    refused(folder, "down_proj.weight [64, 96] for [64, 100]", "(9 in all)")


def test_the_layers_of_several_files_are_checked_together(folder):
    build("llama").save_pretrained(folder, max_shard_size="40KB")
    (folder / "model.safetensors").unlink()
    assert loaded(folder)
    shard = sorted(folder.glob("*.safetensors"))[-1]
    tensors = load_file(shard)
    name, tensor = sorted(tensors.items())[0]
    save_file({**tensors, name: tensor.to(torch.int32)}, shard, metadata={"format": "pt"})
    refused(folder, "as integers", name)


def test_what_transformers_leaves_out_itself_is_no_error(folder):
    def old(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    configure(folder, tie_word_embeddings=True)
    rewrite(folder, old)
    assert loaded(folder)


def test_a_run_on_half_a_checkpoint_measures_nothing(folder, tmp_path, capsys):
    from kvbench.models import embedded

    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded.path() / name, folder)
    rewrite(folder, lambda t: t.pop("model.norm.weight"))
    assert main(["run", f"model={folder}", "dataset=tiny/needle", "limit=1", f"results={tmp_path / 'r'}"]) == 2
    captured = capsys.readouterr()
    assert "lacks weights that its config.json asks for: model.norm.weight" in captured.err
    assert not list((tmp_path / "r").rglob("*.jsonl"))


def test_an_adapter_and_a_folder_of_a_weights_name_are_refused(folder):
    (folder / "adapter_config.json").write_text("{}")
    refused(folder, "holds an adapter", "merge it")
    (folder / "adapter_config.json").unlink()
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    refused(folder, "model.safetensors is no file")


@pytest.mark.parametrize(
    ("scaling", "reason"),
    [
        ({"rope_type": "nope"}, "rope_type=nope is not known; default, dynamic, linear"),
        ({"rope_type": "linear"}, "rope_type=linear needs factor="),
        ({"rope_type": "linear", "factor": 0}, "factor=0 is not possible"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor=nan is not possible"),
    ],
)
def test_a_rope_scaling_that_cannot_be_is_said(folder, scaling, reason):
    refused(folder, reason, rope_scaling=scaling)


@pytest.mark.parametrize(
    ("device", "reason"),
    [("mps", "unknown device mps"), ("meta", "unknown device"), ("cpu:5", "unknown device"), ("cuda:99", "sees")],
)
def test_devices_that_are_not_there(device, reason):
    with pytest.raises(UsageError, match=reason):
        load.resolve_device(device)


def test_a_device_map_and_an_embedded_model_by_a_wrong_name(folder):
    refused(folder, "unknown value foo of model.device_map", "balanced", device_map="foo")
    with pytest.raises(UsageError, match=r"unknown embedded model nope.*tiny"):
        load.locate(ModelConfig(name="x", path="embedded:nope"))


def test_a_million_threads_are_refused_before_any_is_started(capsys):
    assert main(["run", "threads=1000000", "limit=1"]) == 2
    assert "threads=1000000 is not possible: auto, or 1 to 1024" in capsys.readouterr().err


def test_llama3_scaled_rope_generates_as_transformers_does(folder):
    """Llama-3.2's scaling: frequencies above a wavelength are divided by the factor."""
    rope = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 64
    configure(folder, rope_parameters={**rope, "rope_theta": 500000.0}, max_position_embeddings=2048)
    model = loaded(folder)
    plain = build("llama").model.rotary_emb.inv_freq
    assert not torch.equal(model.model.rotary_emb.inv_freq, plain)
    ids = torch.randint(3, 128, (1, 200), generator=torch.Generator().manual_seed(0))
    (cache,) = prefill_chains(model, ids, [chain_of("full")])
    expected = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None)[0, 200:].tolist()
    assert generate(model, [cache], 12) == [expected]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers=0, which is not possible: a whole number, 1 or more"),
        ({"num_attention_heads": 0}, "num_attention_heads=0, which is not possible: a whole number, 1 or more"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0, which is not possible: a whole number, 1 or more"),
        (
            {"num_key_value_heads": 3},
            "num_key_value_heads=3, which is not possible: a divisor of num_attention_heads=4",
        ),
        (
            {"num_attention_heads": 3, "num_key_value_heads": 1},
            "num_attention_heads=3, which is not possible: a divisor",
        ),
        ({"hidden_size": "big"}, "hidden_size='big', which is not possible: a whole number, 1 or more"),
        ({"vocab_size": True}, "vocab_size=True, which is not possible"),
        ({"intermediate_size": 2.5}, "intermediate_size=2.5, which is not possible"),
        ({"max_position_embeddings": -1}, "max_position_embeddings=-1, which is not possible"),
        ({"pad_token_id": 128}, "pad_token_id=128, which is not possible: null or an id below vocab_size=128"),
        ({"dtype": "float7"}, "dtype='float7', which is not possible: one of float32"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
            "rope_theta=0, which is not possible: a number",
        ),
        ({"model_type": ["llama"]}, "model_type=['llama'], which is not possible: a name"),
        ({"quantization_config": "gptq"}, "quantization_config='gptq', which is not possible: a JSON object"),
        ({"sliding_window": 0}, "sliding_window=0, which is not possible: a whole number, 1 or more, or null"),
        pytest.param(
            {"rms_norm_eps": "x"},
            "'rms_norm_eps': TypeError: Field 'rms_norm_eps' expected float, got str (value: 'x')",
            marks=pytest.mark.skipif(not CHECKS_TYPES, reason="this release of transformers takes any type"),
        ),
    ],
)
def test_an_impossible_size_is_told_with_its_key_and_value(folder, changed, reason):
    configure(folder, **{"head_dim": None, **changed})
    refused(folder, reason)


def test_kv_heads_without_a_number_of_heads_are_left_to_the_familys_default():
    check_sizes("m", {"num_key_value_heads": 8})


def test_a_config_that_is_no_object_and_sizes_by_layer_are_told_apart(folder):
    configure(folder, num_key_value_heads=[1, 2, 2])
    refused(folder, "num_key_value_heads" if CHECKS_TYPES else "unsupported operand type(s) for //: 'int' and 'list'")
    (folder / "config.json").write_text("[1]")
    refused(folder, "its config.json is no JSON object, but list")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{bad", "its generation_config.json is not valid JSON"),
        ("[1]", "its generation_config.json is no JSON object, but list"),
        (
            '{"eos_token_id": "z"}',
            "its generation_config.json says eos_token_id='z', which is not possible: null, a token",
        ),
        ('{"eos_token_id": [1, -1]}', "eos_token_id=[1, -1], which is not possible"),
    ],
)
def test_ends_of_an_answer_that_are_none_are_refused(folder, content, reason):
    (folder / "generation_config.json").write_text(content)
    refused(folder, reason)


def test_a_folder_without_a_vocabulary_says_what_to_save(folder):
    for path in [*folder.glob("tokenizer*"), *folder.glob("vocab*")]:
        path.unlink()
    cfg = ModelConfig(name="m", path=str(folder))
    with pytest.raises(
        UsageError, match=r"there is none of tokenizer.json, .* save the model's tokenizer into its folder"
    ):
        load.load_tokenizer(cfg, load.locate(cfg))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            {"vocab_size": 10**13},
            "another shape than its config.json says: lm_head.weight [128, 64] for [10000000000000",
        ),
        ({"intermediate_size": 10**12}, "down_proj.weight [64, 96] for [64, 1000000000000]"),
        ({"num_hidden_layers": 60}, "weights, and its files hold 108,992"),
    ],
)
def test_a_model_larger_than_its_files_is_refused_before_memory_is_taken(folder, changed, reason, monkeypatch):
    def read(*_, **__):
        raise AssertionError("memory is taken")

    configure(folder, **changed)
    monkeypatch.setattr(weights.AutoModelForCausalLM, "from_pretrained", read)
    refused(folder, reason)
