"""Convert a Llama in a GGUF file to the folder that transformers reads, with the original model's tokenizer.

GGUF is the file format of llama.cpp. Each quantised weight is a scale times a small integer (plus an offset). Only
float32 represents these products exactly, so weights are written as float32. GGUF stores the rows of the query and key
projections in another order, with the pairs of a rotation side by side. The conversion restores transformers' order.
The same GGUF gives the same bytes on every machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from kvbench.base.errors import KvbenchError
from kvbench.base.extras import require

Fields = Mapping[str, Any]
"""The fields of a GGUF file's header, by key."""
WEIGHTS = "model.safetensors"
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS)
"""The files that a conversion writes."""

# _LAYER and _OUTSIDE map GGUF's names of tensors to those of transformers, within a layer and outside the layers
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
PRE_TOKENIZERS: Mapping[str, Mapping[str, object]] = {
    # SmolLM's pre-tokenizer splits off single digits, and then splits by GPT-2's regular expression
    "smollm": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTES]},
}
"""Pre-tokenizers as tokenizer.json describes them, by the short name that GGUF gives them."""
CONTROL = 3
"""llama.cpp's type number for tokens that mark structure, such as the beginning of a message."""


def convert(path: Path, folder: Path, say: Callable[[str], None]) -> None:
    """Write the config, tokenizer and weights of the GGUF file ``path`` into ``folder``, which must exist.

    ``say`` prints a line of progress. Raises UsageError if the package gguf is missing, KvbenchError if the file is no
    GGUF of a Llama, and OSError if a file cannot be read or written.
    """
    require("gguf", "converting a GGUF file")
    from gguf import GGUFReader

    try:
        reader = GGUFReader(str(path))
        fields = {name: field.contents() for name, field in reader.fields.items()}
        contents = _build_json_files(fields, {tensor.name for tensor in reader.tensors})
    except OSError:
        # the caller explains a file that cannot be opened or read
        raise
    except Exception as error:
        # the reader fails on a damaged file with errors of many types
        reason = " ".join(str(error).split()) or type(error).__name__
        raise KvbenchError(f"{path.name} is no GGUF file of a Llama that can be read: {reason}") from None
    for name, content in contents.items():
        # with an indent, each entry of the tokenizer's vocabulary would take a line
        indent = None if name == "tokenizer.json" else 2
        text = json.dumps(content, ensure_ascii=False, indent=indent)
        _write_and_sync(folder / name, text.encode("utf-8"))
    say(f"writing {len(reader.tensors)} tensors as float32")
    query_heads = fields["llama.attention.head_count"]
    kv_heads = fields["llama.attention.head_count_kv"]
    # safetensors writes all tensors at once, so the whole model must be in memory as float32
    weights = {}
    for tensor in reader.tensors:
        # the name comes first, because its translation refuses tensors of other models
        name = _translate_weight_name(tensor.name)
        values = _dequantise(tensor, query_heads, kv_heads)
        # little-endian float32, whatever the machine's own order of bytes
        weights[name] = np.ascontiguousarray(values, dtype="<f4")
    _write_and_sync(folder / WEIGHTS, save(weights, metadata={"format": "pt"}))


def _build_json_files(fields: Fields, tensors: set[str]) -> dict[str, dict[str, object]]:
    """Return {file name: content} of the JSON files to write.

    fields: the metadata of the GGUF file, by key.
    tensors: the names of the file's tensors.

    Raises ValueError for another architecture or tokenizer, and KeyError for a field that is missing.
    """
    if fields.get("general.architecture") != "llama":
        raise ValueError(f"its architecture is {fields.get('general.architecture')!r}, not 'llama'")
    if fields["tokenizer.ggml.model"] != "gpt2" or fields["tokenizer.ggml.pre"] not in PRE_TOKENIZERS:
        raise ValueError(f"its tokenizer is of an unknown kind, {fields['tokenizer.ggml.pre']!r}")
    special_ids: dict[str, int] = {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
    }
    # a model without a padding token pads with the end of a sequence
    special_ids["pad_token_id"] = fields.get("tokenizer.ggml.padding_token_id", special_ids["eos_token_id"])
    return {
        "config.json": _build_config(fields, tensors, special_ids),
        "generation_config.json": dict(special_ids),
        "tokenizer.json": _build_tokenizer(fields),
        "tokenizer_config.json": _build_tokenizer_config(fields, special_ids),
    }


def _build_config(fields: Fields, tensors: set[str], special_ids: dict[str, int]) -> dict[str, object]:
    """Return the content of config.json.

    fields: the metadata of the GGUF file, by key.
    tensors: the names of the file's tensors.
    special_ids: the ids of the tokens for beginning, end and padding, by their keys in config.json.
    """
    tokens = fields["tokenizer.ggml.tokens"]
    heads = fields["llama.attention.head_count"]
    width = fields["llama.embedding_length"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        # newer files state the head dimension; without it, the heads divide the width
        "head_dim": fields.get("llama.attention.key_length", width // heads),
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": _shorten_float(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _shorten_float(fields["llama.rope.freq_base"]),
        # a model without an output matrix of its own uses that of the embedding
        "tie_word_embeddings": "output.weight" not in tensors,
        "vocab_size": len(tokens),
        "dtype": "float32",
    }
    return config | special_ids


def _build_tokenizer(fields: Fields) -> dict[str, object]:
    """Return the content of tokenizer.json, which the tokenizers library reads. ``fields`` is the file's metadata."""
    tokens = fields["tokenizer.ggml.tokens"]
    # control tokens such as <|im_end|> must never be split, so the tokenizer gets them as added tokens
    special_tokens: list[dict[str, object]] = []
    for i, (token, kind) in enumerate(zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)):
        if kind == CONTROL:
            special_token = {
                "id": i,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            special_tokens.append(special_token)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special_tokens,
        "normalizer": None,
        "pre_tokenizer": PRE_TOKENIZERS[fields["tokenizer.ggml.pre"]],
        "post_processor": None,
        "decoder": _BYTES | {"add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": fields["tokenizer.ggml.merges"],
        },
    }


def _build_tokenizer_config(fields: Fields, special_ids: dict[str, int]) -> dict[str, object]:
    """Return the content of tokenizer_config.json, which transformers reads.

    fields: the metadata of the GGUF file, by key.
    special_ids: the ids of the tokens for beginning, end and padding, by their keys in config.json.
    """
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        # GPT2Tokenizer, as the original's file says, would put its own pre-tokenizer in the place of this one
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "bos_token": tokens[special_ids["bos_token_id"]],
        "eos_token": tokens[special_ids["eos_token_id"]],
        "pad_token": tokens[special_ids["pad_token_id"]],
        "unk_token": tokens[fields.get("tokenizer.ggml.unknown_token_id", 0)],
        "chat_template": fields["tokenizer.chat_template"],
    }


def _shorten_float(value: float) -> float:
    """Return the shortest decimal that rounds to the same float32, such as 1e-05 for 9.999999747e-06."""
    return float(str(np.float32(value)))


def _dequantise(tensor: Any, query_heads: int, kv_heads: int) -> Any:
    """Return the values of a GGUF tensor as a float32 array, with rows in transformers' order.

    Only the query and key projections, of ``query_heads`` and ``kv_heads`` heads, have another order in GGUF.
    """
    from gguf import dequantize

    values = dequantize(tensor.data, tensor.tensor_type)
    # the name is such as blk.0.attn_q.weight
    weight = tensor.name.split(".")[-2]
    heads = {"attn_q": query_heads, "attn_k": kv_heads}.get(weight)
    if heads is None:
        return values
    rows, columns = values.shape
    # Pair i of a head has the rows 2i and 2i + 1 in llama.cpp, which stores pairs side by side, and the rows i and
    # i + D / 2 in transformers, which rotates by halves: [H, D / 2, 2, d] -> [H, 2, D / 2, d]
    pairs = values.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _translate_weight_name(name: str) -> str:
    """Return transformers' name for the tensor that GGUF calls ``name``.

    Raises KvbenchError for a tensor that a Llama does not have.
    """
    # within a layer the name is such as blk.0.attn_q.weight, outside the layers such as output.weight
    *layer, module, kind = name.split(".")
    if kind == "weight" and not layer and module in _OUTSIDE:
        return f"{_OUTSIDE[module]}.weight"
    if kind == "weight" and layer[:1] == ["blk"] and module in _LAYER:
        return f"model.layers.{layer[1]}.{_LAYER[module]}.weight"
    raise KvbenchError(f"its tensor {name} is none of a Llama's")


def _write_and_sync(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on the disk, because its checksum will be trusted later."""
    with path.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
