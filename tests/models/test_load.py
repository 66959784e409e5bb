"""Finding and fingerprinting checkpoints: folders good and bad, and the five families through the command line."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import FAMILIES, WITH_LATENTS, build

from kvbench.base import extras
from kvbench.base.errors import MissingModel, UsageError
from kvbench.cli.main import main
from kvbench.models import embedded, load
from kvbench.models.config import ModelConfig


def folder_of(family, tmp_path, shard="20KB"):
    """A family's random model as users have it: sharded safetensors and a tokenizer with a chat template."""
    folder = tmp_path / family
    build(family).save_pretrained(folder, max_shard_size=shard)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded.path() / name, folder)
    return folder


@pytest.fixture
def small(tmp_path):
    """A model whose vocabulary fits the tiny tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "m", max_shard_size="100KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded.path() / name, tmp_path / "m")
    return tmp_path / "m"


def locate(path, **knobs):
    return load.locate(ModelConfig(name="hf", path=str(path), **knobs))


def test_fingerprint_sees_every_part_of_a_checkpoint(small):
    first = load.fingerprint(small)
    assert load.fingerprint(small) == first
    for name in ("vocab.json", "merges.txt", "special_tokens_map.json", "generation_config.json", "tokenizer.json"):
        path = small / name
        before = path.read_bytes() if path.exists() else None
        path.write_text("{}")
        assert load.fingerprint(small) != first, name
        path.unlink() if before is None else path.write_bytes(before)
    assert load.fingerprint(small) == first
    sliced = load.fingerprint(small, whole_limit=1000)
    assert sliced != first
    shard = sorted(small.glob("*.safetensors"))[-1]
    tensors = load_file(shard)
    name = sorted(tensors)[0]
    tensors[name].view(-1)[tensors[name].numel() // 2 + 1] += 1
    save_file(tensors, shard, metadata={"format": "pt"})
    assert load.fingerprint(small, whole_limit=1000) != sliced


def test_bad_folders_each_have_one_message(small, tmp_path):
    cases = {}
    for name in ("noweights", "half", "index", "json", "family", "pickle"):
        shutil.copytree(small, tmp_path / name)
    for path in (tmp_path / "noweights").glob("*.safetensors"):
        path.unlink()
    cases["noweights"] = "no \\*.safetensors"
    sorted((tmp_path / "half").glob("*.safetensors"))[0].unlink()
    cases["half"] = "half downloaded"
    (tmp_path / "index" / "model.safetensors.index.json").write_text("{")
    cases["index"] = "index.json is damaged"
    (tmp_path / "json" / "config.json").write_text("{")
    cases["json"] = "not valid JSON"
    config = json.loads((tmp_path / "family" / "config.json").read_text())
    (tmp_path / "family" / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    cases["family"] = "mamba.*does not run"
    for path in (tmp_path / "pickle").glob("*.safetensors"):
        path.rename(path.with_suffix(".bin"))
    cases["pickle"] = "pickles"
    for name, message in cases.items():
        with pytest.raises(UsageError, match=message):
            locate(tmp_path / name)
    locate(tmp_path / "noweights", weights="random")


def test_end_tokens_include_those_of_the_generation_config(small):
    assert load.end_tokens(ModelConfig(name="hf", path=str(small)), locate(small)) == {2}
    (small / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert load.end_tokens(ModelConfig(name="hf", path=str(small)), locate(small)) == {2, 7}


def test_a_truncated_weight_file_is_one_message_at_loading(small):
    shard = max(small.glob("*.safetensors"), key=lambda p: p.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:-100])
    cfg = ModelConfig(name="hf", path=str(small))
    with pytest.raises(UsageError, match="Is the download complete"):
        load.load_weights(cfg, load.locate(cfg), torch.device("cpu"))


def test_random_weights_are_the_same_every_time_and_say_so(small, tmp_path, capsys):
    arguments = [f"model={small}", "weights=random", "dataset=tiny/needle", "length=128", "limit=1"]
    assert main(["run", *arguments, f"results={tmp_path / 'r'}"]) == 0
    assert "Random weights" in capsys.readouterr().out


def test_rope_scaling_changes_the_model_and_its_identity(small):
    plain, scaled = locate(small), locate(small, rope_scaling={"rope_type": "linear", "factor": 4.0})
    assert plain.config.rope_parameters["rope_type"] == "default"
    assert scaled.config.rope_parameters["factor"] == 4.0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sharded_folder_with_a_chat_template_runs_longbench_end_to_end(family, tmp_path, capsys):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {**build(family).config.to_dict(), "vocab_size": 1024}
    if "vocab_size_per_layer_input" in sizes:
        sizes["vocab_size_per_layer_input"] = 1024
    config = AutoConfig.for_model(**sizes)
    torch.manual_seed(0)
    folder = tmp_path / "model"
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded.path() / name, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}[bot]"
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    data = tmp_path / "data" / "longbench"
    data.mkdir(parents=True)
    (data / "dataset2prompt.json").write_text(json.dumps({"qasper": "Read: {context}\nQuestion: {input}\nAnswer:"}))
    (data / "dataset2maxlen.json").write_text(json.dumps({"qasper": 3}))
    rows = [
        {"_id": str(i), "input": "what is it?", "context": "it is a cold river. " * 30, "answers": ["a river"],
         "length": 150, "all_classes": None, "dataset": "qasper", "language": "en"}
        for i in range(2)
    ]  # fmt: skip
    (data / "qasper.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    arguments = [
        f"model={folder}",
        "dataset=longbench/qasper,tiny/needle",
        f"data.root={tmp_path / 'data'}",
        "length=200",
        "limit=1",
        "prompt=chat",
        "kv_size=50",
    ]
    method = "snapkv+int8" if family in WITH_LATENTS else "snapkv+think"
    assert main(["run", *arguments, f"method={method}", f"results={tmp_path / 'r'}", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["rows"][0]["method"] == "full"
    assert {c["status"] for r in report["rows"] for c in r["cells"]} == {"measured"}
    assert [c["task"] for c in report["columns"]] == ["longbench/qasper", "tiny/needle"]
    assert all(c["prompt_tokens"] > 200 for c in report["rows"][0]["cells"])


@pytest.mark.parametrize(
    ("knobs", "says"),
    [({}, "\\.\\[gpu\\]"), ({"weights": "random"}, "weights=random reads none")],
)
def test_layers_over_several_devices_need_accelerate_and_weights(small, monkeypatch, knobs, says):
    monkeypatch.setattr(extras, "installed", lambda package: False)
    with pytest.raises(UsageError, match=says):
        load.load_model(str(small), device_map="auto", **knobs)


def test_a_model_is_loaded_by_the_name_of_its_entry():
    """As ``run model=`` has it; the message used to suggest the very name that was given."""
    with pytest.raises(
        MissingModel, match=r"model llama2-7b \(meta-llama/Llama-2-7b-hf\) is not on .*kvbench model fetch llama2-7b"
    ):
        load.load_model("llama2-7b")
    for name in ("hf", "llama2"):
        with pytest.raises(MissingModel, match=rf"model={name}: there is no such folder") as error:
            load.load_model(name)
        assert f"Did you mean {name}?" not in str(error.value)


@pytest.mark.parametrize(("knobs", "revision"), [({}, ""), ({"revision": "abc"}, ", revision abc,")])
def test_a_hub_id_that_is_absent_is_told_as_on_the_command_line(knobs, revision):
    with pytest.raises(MissingModel) as error:
        load.load_model("owner/absent", **knobs)
    start = f"model owner/absent{revision} is not on this machine. Download it: add download=true. Or"
    assert str(error.value).startswith(start)
