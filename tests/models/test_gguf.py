"""A GGUF file of our own making becomes the model that it was made of, the same bytes every time."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from kvbench.base.errors import KvbenchError
from kvbench.models import gguf as converter
from kvbench.models import load
from kvbench.models.config import ModelConfig
from kvbench.models.releases import READS_GGUF

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.skipif(not READS_GGUF, reason="this release of transformers builds other tokenizers")

HEADS, KV_HEADS, LAYERS = 4, 2, 2
PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
LETTERS = [chr(b) for b in (*range(33, 127), *range(161, 173), *range(174, 256))] + [chr(256 + i) for i in range(68)]
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *LETTERS, "ab", "Ġa"]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=512, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0}, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    built = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for p in built.parameters():
            p.uniform_(-0.5, 0.5)
    return built


def stored(name, tensor):
    """A weight's name and rows as llama.cpp keeps them: of a query or key head, a pair of a rotation side by side."""
    if not name.startswith("model.layers."):
        return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[
            name
        ], tensor
    _, _, layer, *part = name.removesuffix(".weight").split(".")
    kind = PARTS[".".join(part)]
    if kind in ("attn_q", "attn_k"):
        heads = HEADS if kind == "attn_q" else KV_HEADS
        rows = tensor.shape[0] // heads
        order = [h * rows + half * rows // 2 + i for h in range(heads) for i in range(rows // 2) for half in (0, 1)]
        tensor = tensor[order]
    return f"blk.{layer}.{kind}.weight", tensor


def write(path, model, kind=None, architecture="llama", pre="smollm", extra=(), facts=()):
    """The model as a GGUF file; ``kind`` quantises what has two dimensions. ``facts``: more numbers to state."""
    out = gguf.GGUFWriter(str(path), architecture)
    c = model.config
    out.add_block_count(c.num_hidden_layers)
    out.add_context_length(c.max_position_embeddings)
    out.add_embedding_length(c.hidden_size)
    out.add_feed_forward_length(c.intermediate_size)
    out.add_head_count(HEADS)
    out.add_head_count_kv(KV_HEADS)
    out.add_layer_norm_rms_eps(c.rms_norm_eps)
    out.add_rope_freq_base(100000.0)
    out.add_rope_dimension_count(c.hidden_size // HEADS)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre(pre)
    out.add_token_list(TOKENS)
    out.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    out.add_token_merges(["a b", "Ġ a"])
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_unk_token_id(0)
    out.add_chat_template("{{ messages }}")
    for name, number in dict(facts).items():
        (out.add_uint32 if isinstance(number, int) else out.add_float32)(name, number)
    for name, p in model.named_parameters():
        name, tensor = stored(name, p.detach().numpy())
        if kind is not None and tensor.ndim == 2:
            out.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
        else:
            out.add_tensor(name, tensor.copy())
    for name in extra:
        out.add_tensor(name, np.ones(32, dtype=np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def converted(path, folder, known=None, say=lambda text: None):
    folder.mkdir()
    converter.convert(path, folder, say, known)
    return folder


def test_the_model_comes_back_bit_for_bit_and_answers_the_same(model, tmp_path):
    folder = converted(write(tmp_path / "m.gguf", model), tmp_path / "out")
    tensors = load_file(folder / "model.safetensors")
    assert set(tensors) == {n for n, _ in model.named_parameters()}
    assert all(torch.equal(tensors[n], p) for n, p in model.named_parameters())
    loaded, tokenizer = load.load_model(str(folder), device="cpu")
    ids = torch.tensor([tokenizer("ab a 12")["input_ids"]])
    assert tokenizer.convert_ids_to_tokens(ids[0].tolist()) == ["ab", "Ġa", "Ġ", "1", "2"]
    assert tokenizer.chat_template == "{{ messages }}"
    with torch.inference_mode():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    cfg = ModelConfig(name="m", path=str(folder))
    assert load.end_tokens(cfg, load.locate(cfg)) == {2}
    assert loaded.config.max_position_embeddings == 512 and loaded.config.rms_norm_eps == pytest.approx(1e-5)
    # others who share the folder may read it
    modes = {path.stat().st_mode for path in folder.iterdir()}
    assert len(modes) == 1


def test_known_files_are_the_same_bytes_with_every_release(model, tmp_path):
    path = write(tmp_path / "m.gguf", model)
    made = converted(path, tmp_path / "a")
    known = {"config.json": json.loads((made / "config.json").read_text()) | {"transformers_version": "5.2.0"}}
    known["tokenizer.json"] = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE"}, "decoder": None}
    folder = converted(path, tmp_path / "b", known)
    assert json.loads((folder / "config.json").read_text()) == known["config.json"]
    content = json.loads((folder / "tokenizer.json").read_text())
    assert list(content) == ["version", "added_tokens", "model", "decoder"]
    assert [token["content"] for token in content["added_tokens"]] == TOKENS[:3]
    assert list(content["model"]["vocab"]) == TOKENS and content["model"]["merges"] == ["a b", "Ġ a"]
    assert (folder / "model.safetensors").read_bytes() == (made / "model.safetensors").read_bytes()


def test_a_config_of_another_model_is_refused(model, tmp_path):
    path = write(tmp_path / "m.gguf", model)
    content = json.loads((converted(path, tmp_path / "a") / "config.json").read_text())
    content["rope_parameters"]["rope_theta"] = 1000.0
    with pytest.raises(KvbenchError, match="the converted model has other logits than the GGUF"):
        converted(path, tmp_path / "b", {"config.json": content})


def test_the_ends_of_turns_end_answers(model, tmp_path):
    path = write(tmp_path / "m.gguf", model, facts={"tokenizer.ggml.eot_token_id": 0})
    cfg = ModelConfig(name="m", path=str(converted(path, tmp_path / "out")))
    assert load.end_tokens(cfg, load.locate(cfg)) == {0, 2}


@pytest.mark.parametrize(("pre", "noted"), [("gpt-2", False), ("smollm", False), ("its-own", True)])
def test_an_unknown_way_to_split_texts_is_told(model, tmp_path, pre, noted):
    said = []
    converted(write(tmp_path / "m.gguf", model, pre=pre), tmp_path / "out", say=said.append)
    assert any("names the pre-tokenizer its-own" in text for text in said) == noted


def test_four_bits_are_a_scale_times_an_integer_plus_an_offset(model, tmp_path):
    folder = converted(write(tmp_path / "m.gguf", model, gguf.GGMLQuantizationType.Q4_1), tmp_path / "out")
    actual = load_file(folder / "model.safetensors")["model.layers.1.mlp.up_proj.weight"].numpy()
    weight = model.state_dict()["model.layers.1.mlp.up_proj.weight"].numpy()
    blocks = gguf.quantize(weight, gguf.GGMLQuantizationType.Q4_1).reshape(-1, 20)  # scale, offset, 32 x 4 bits
    scale, offset = blocks[:, :2].copy().view(np.float16), blocks[:, 2:4].copy().view(np.float16)
    integers = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    exact = scale.astype(np.float64) * integers + offset.astype(np.float64)
    assert np.array_equal(actual, exact.reshape(actual.shape)) and np.abs(actual - weight).max() < 0.05


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"architecture": "plamo"}, "m.gguf is no GGUF file that transformers .* can read: .*plamo is not supported"),
        ({"extra": ["blk.0.attn_q.bias"]}, "holds 78,496 weights, and transformers' LlamaForCausalLM has 78,464"),
        ({"extra": ["rope_freqs.weight"]}, "Llama 3.1 and later have rope_freqs.weight"),
        ({"facts": {"llama.rope.scaling.factor": 4.0}}, "scales its rotations .*, which transformers leaves out"),
        ({"facts": {"split.count": 3}}, "one of 3 parts: join them"),
    ],
)
def test_what_would_be_another_model_is_refused(model, tmp_path, options, reason):
    with pytest.raises(KvbenchError, match=reason):
        converted(write(tmp_path / "m.gguf", model, **options), tmp_path / "out")


def test_a_cut_off_file_is_refused(model, tmp_path):
    path = write(tmp_path / "m.gguf", model)
    path.write_bytes(path.read_bytes()[:20_000])
    with pytest.raises(KvbenchError, match=r"m\.gguf is no GGUF file that transformers"):
        converted(path, tmp_path / "out")
