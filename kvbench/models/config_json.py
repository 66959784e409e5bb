"""Checks of the sizes in a checkpoint's config.json, before transformers reads the file.

transformers checks types only, and builds any model that fits them: one without layers, with heads of size 0 or without
a vocabulary. Running it then fails with "list index out of range" or "integer modulo by zero".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from kvbench.base.conf import is_whole
from kvbench.base.errors import UsageError

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
WHOLE = "a whole number, 1 or more"
DTYPES = ("float32", "float16", "bfloat16", "float64")


def check_sizes(path: str, config: Any) -> None:
    """Raise UsageError for an impossible size in a config.json, with its key, its value and the allowed values.

    path: the user's name for the model, for the error.
    config: the parsed config.json. A size that is null or a list (one for each layer) is left to transformers, which
        knows the family.
    """
    if not isinstance(config, Mapping):
        raise UsageError(f"model={path}: its config.json is no JSON object, but {type(config).__name__}")
    for key in SIZES:
        value = config.get(key)
        # transformers knows what null and a list mean
        if value is None or isinstance(value, list):
            continue
        if not (is_whole(value) and value >= 1):
            raise _refusal(path, key, value, WHOLE)
    _check_related_sizes(path, config)
    # older checkpoints say torch_dtype
    for key in ("dtype", "torch_dtype"):
        name = config.get(key)
        if name is not None and not (isinstance(name, str) and _is_dtype(name)):
            raise _refusal(path, key, name, f"one of {', '.join(DTYPES)}")
    model_type = config.get("model_type")
    if model_type is not None and not isinstance(model_type, str):
        raise _refusal(path, "model_type", model_type, "a name")
    quantisation = config.get("quantization_config")
    if quantisation is not None and not isinstance(quantisation, Mapping):
        raise _refusal(path, "quantization_config", quantisation, "a JSON object")
    window = config.get("sliding_window")
    if window is not None and not (is_whole(window) and window >= 1):
        raise _refusal(path, "sliding_window", window, f"{WHOLE}, or null")
    _check_thetas(path, config)


def _check_related_sizes(path: str, config: Mapping[str, Any]) -> None:
    """Raise UsageError for sizes that do not fit each other, as far as both are given as numbers.

    Each size alone must be possible.
    """
    numbers = {key: value for key, value in config.items() if is_whole(value)}
    # absent sizes count as 1, which divides every number, or as 0, which is a multiple of every number
    heads = numbers.get("num_attention_heads", 1)
    kv_heads = numbers.get("num_key_value_heads", 1)
    # each kv head serves a group of query heads; without a number of heads, the family's default is not known here
    if "num_attention_heads" in numbers and heads % kv_heads:
        raise _refusal(path, "num_key_value_heads", kv_heads, f"a divisor of num_attention_heads={heads}")
    hidden = numbers.get("hidden_size", 0)
    # without a head_dim, the heads divide the hidden size among them
    if config.get("head_dim") is None and hidden % heads:
        allowed = f"a divisor of hidden_size={hidden}, or a head_dim beside it"
        raise _refusal(path, "num_attention_heads", heads, allowed)
    # a padding id beyond the vocabulary has no row in the embedding; -1 stands for none
    padding, vocabulary = numbers.get("pad_token_id", -1), numbers.get("vocab_size")
    if vocabulary is not None and padding >= vocabulary:
        raise _refusal(path, "pad_token_id", padding, f"null or an id below vocab_size={vocabulary}")


def check_end_ids(path: str, file: str, config: Any) -> None:
    """Raise UsageError if the ``eos_token_id`` in a JSON file of a checkpoint is no id, no list of ids and not null.

    path: the user's name for the model, for the error.
    file: the name of the file.
    config: the parsed content of the file.
    """
    if not isinstance(config, Mapping):
        raise UsageError(f"model={path}: its {file} is no JSON object, but {type(config).__name__}")
    stated = config.get("eos_token_id")
    if stated is None:
        return
    # the file may state one id, or a list of ids
    ids: list[Any] = stated if isinstance(stated, list) else [stated]
    if not all(is_whole(token_id) and token_id >= 0 for token_id in ids):
        allowed = "null, a token id of 0 or more, or a list of them"
        raise UsageError(f"model={path}: its {file} says eos_token_id={stated!r}, which is not possible: {allowed}")


def _is_dtype(name: str) -> bool:
    """Return True for the name of a floating-point dtype of PyTorch, with or without ``torch.``, and for ``auto``."""
    dtype = getattr(torch, name.removeprefix("torch."), None)
    return name == "auto" or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)


def _check_thetas(path: str, config: Mapping[str, object]) -> None:
    """Raise UsageError for a base of rotary positions (``rope_theta``) that is not a finite number above 0.

    Mappings within the configuration are checked as well, because some families have a base for each type of layer.
    """
    theta = config.get("rope_theta")
    # Python counts true as the number 1
    possible = isinstance(theta, (int, float)) and not isinstance(theta, bool) and 0 < theta < math.inf
    if theta is not None and not possible:
        raise _refusal(path, "rope_theta", theta, "a number above 0")
    for value in config.values():
        if isinstance(value, Mapping):
            _check_thetas(path, value)


def _refusal(path: str, key: str, value: object, allowed: str) -> UsageError:
    """Return the error for one impossible value of a config.json.

    path: the user's name for the model.
    allowed: the possible values in words.
    """
    return UsageError(f"model={path}: its config.json says {key}={value!r}, which is not possible: {allowed}")
