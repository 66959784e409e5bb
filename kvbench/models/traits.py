"""The traits of a model, read off its config and its modules. No list of families decides what runs.

A family that transformers' attention interface serves runs; what would be computed wrongly is refused with the reason.
TESTED names the families on which every method is tested, the others are run with the note ``untested``.
"""

from __future__ import annotations

import copy
import inspect
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvbench.base.errors import UsageError, headline
from kvbench.kv.model_shape import Shape, from_config
from kvbench.models import probe
from kvbench.models.interface import attention_modules

TESTED = (
    "gemma2",
    "gemma3_text",
    "gpt_neox",
    "llama",
    "mistral",
    "mixtral",
    "opt",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
)
MOST_LAYERS = 4096  # building a million would take hours
MOVING = ("dynamic", "longrope")  # rotary types whose frequencies depend on the length read so far
LAYER_TYPES = ("full_attention", "sliding_attention")
PLAIN_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "dense", "query_key_value", "rotary_emb", "q_norm")
"""Children of an attention module through which its keys and values do not pass on the way to the cache."""


@dataclass(frozen=True)
class ModelTraits:
    """A model's family, the shape of its cache, and the reasons that keep methods from running on it.

    unrolled: why cached keys cannot be rotated to other positions, or None.
    mixed: why keys and values are not linear in what their layer reads, as low-rank methods need, or None.
    capped: whether attention logits are capped (softcapping).
    """

    family: str
    shape: Shape
    unrolled: str | None
    mixed: str | None
    capped: bool = False

    @property
    def note(self) -> str | None:
        """Return the warning that a reader of results must see for an untested family."""
        if self.family in TESTED:
            return None
        return (
            f"Untested family {self.family!r}: transformers serves it through the same interface as the tested ones "
            f"({', '.join(TESTED)}), but kvbench's methods are not tested on it."
        )


def check_is_model(model: Any) -> None:
    """Raise UsageError unless ``model`` is a causal language model of transformers."""
    can_generate = getattr(model, "can_generate", None)
    if not (hasattr(model, "config") and callable(can_generate) and can_generate()):
        raise UsageError(
            f"model is {type(model).__name__}: give a causal language model of transformers, as kvbench.load_model "
            "returns beside its tokenizer"
        )


def check_tokenizer(tokenizer: Any) -> None:
    """Raise UsageError unless ``tokenizer`` encodes texts."""
    if isinstance(tokenizer, str) or not callable(getattr(tokenizer, "encode", None)):
        raise UsageError(f"tokenizer is {type(tokenizer).__name__}: give the model's, as kvbench.load_model returns it")


def of_model(model: PreTrainedModel) -> ModelTraits:
    """Return the traits of a model. Raises UsageError with the reason if kvbench cannot run it."""
    check_is_model(model)
    check_served(model)
    family = str(model.config.model_type)
    learned = learned_positions(model) and not _of_table(model)
    unrolled = f"the family {family!r} learns its positions" if learned else _unrolled(model)
    mixed = _mixed(model)
    if family not in TESTED and model.device.type != "meta":
        result = probe.probe(model)
        unrolled, mixed = unrolled or result.unrolled, mixed or result.mixed
    capped = getattr(model.config, "attn_logit_softcapping", None) is not None
    return ModelTraits(family, from_config(model.config), unrolled, mixed, capped)


_KNOWN: dict[str, ModelTraits] = {}


def of_config(config: Any) -> ModelTraits:
    """Return a model's traits from its configuration alone, by modules that have no memory for weights."""
    layers = getattr(config, "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise _refused(config, f"its config.json says num_hidden_layers={layers}; {MOST_LAYERS} are the most")
    key = f"{type(config).__name__} {config.to_json_string()}"
    if key not in _KNOWN:
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
        except Exception as error:
            raise _refused(config, f"transformers builds no causal language model of it ({headline(error)})") from None
        _KNOWN[key] = of_model(model)
    return _KNOWN[key]


def check_served(model: PreTrainedModel) -> None:
    """Raise UsageError with the reason for a model whose cache or attention kvbench does not compute."""
    config, modules = model.config, attention_modules(model)
    text = config.get_text_config()
    layers = getattr(config, "num_hidden_layers", 0)
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - set(LAYER_TYPES))
    arguments = inspect.signature(model.forward).parameters
    reasons = {
        "it reads through cross-attention": (
            config.is_encoder_decoder or getattr(config, "cross_attention_layers", None)
        ),
        f"its language model, of the type {text.model_type}, is a part of a larger model: save that part as a model "
        "of its own and give its folder (docs/own.md says how)": text is not config,
        "it has more attention modules than layers (cross-attention)": len(modules) > layers,
        "it caches latents instead of keys and values (latent attention)": getattr(config, "kv_lora_rank", None),
        f"it has layers of the type {', '.join(kinds)}, and only {' and '.join(LAYER_TYPES)} run (state-space and "
        "other recurrent layers cache no keys)": kinds,
        "its layers have heads of different sizes": _varies(config),
        f"{len(modules)} of its {layers} layers have attention (state-space or recurrent layers have no keys)": (
            [m.layer_idx for m in modules] != list(range(layers))
        ),
        "it has recurrent (state-space) layers beside its attention, which cache no keys": any(
            name.endswith("A_log") for name, _ in model.named_parameters()
        ),
        "it shares keys and values between layers": getattr(config, "num_kv_shared_layers", 0),
        "its attention does not go through transformers' attention interface": not all(
            hasattr(sys.modules.get(type(m).__module__), "ALL_ATTENTION_FUNCTIONS") for m in modules
        ),
        "it takes no position ids": "position_ids" not in arguments,
        "its attention has sinks that are no tokens": any(hasattr(m, "sinks") for m in modules),
        "its attention is not causal": any(getattr(m, "is_causal", True) is False for m in modules),
    }
    reason = next((text for text, applies in reasons.items() if applies), None)
    if reason is not None:
        raise _refused(config, reason)


def _varies(config: Any) -> bool:
    """Tell whether a configuration has no one head dimension: transformers then raises an error for whoever asks."""
    try:
        getattr(config, "head_dim", None)
    except RuntimeError:
        return True
    return False


def _refused(config: Any, reason: str) -> UsageError:
    return UsageError(f"the model family {getattr(config, 'model_type', None)!r} does not run in kvbench: {reason}")


def learned_positions(model: PreTrainedModel) -> bool:
    """Tell if the model learns its positions from a table, as it does where it has no rotary frequencies."""
    return not any(name.endswith("inv_freq") for name, _ in model.named_buffers())


def rope_type(config: Any) -> str:
    """Return the kind of a model's rotary positions: ``default`` where they are not scaled, or differ by layer."""
    return str((getattr(config, "rope_parameters", None) or {}).get("rope_type", "default"))


def turning_point(config: Any) -> int | None:
    """Return the most tokens of a text that LongRoPE rotates by its short factors; None for another rotation."""
    return int(config.rope_parameters["original_max_position_embeddings"]) if rope_type(config) == "longrope" else None


def _unrolled(model: PreTrainedModel) -> str | None:
    modules = attention_modules(model)
    if _of_table(model):
        return "it reads its rotary positions from a table"
    if (kind := rope_type(model.config)) in MOVING:
        return f"its rotary positions ({kind}) change with the length of the text"
    if sum(hasattr(m, "inv_freq") for m in model.modules()) != 1:
        return "its layers rotate keys in different ways"
    if not all(getattr(m, "use_rope", True) for m in modules):
        return "some of its layers do not rotate keys"
    # [x1, x2] -> [-x2, x1] by halves; other families rotate neighbouring dimensions
    rotate_half = getattr(sys.modules[type(modules[0]).__module__], "rotate_half", None)
    if rotate_half is None or rotate_half(torch.arange(4.0)).tolist() != [-2, -3, 0, 1]:
        return "it rotates keys by another rule than halves"
    return None


def _of_table(model: PreTrainedModel) -> bool:
    """Tell if the model rotates by a table of its positions, which no training changes (GPT-J)."""
    return any(name.endswith("embed_positions") for name, _ in model.named_buffers())


def _mixed(model: PreTrainedModel) -> str | None:
    attention = attention_modules(model)[0]
    names = [name for name, _ in attention.named_children()]
    fused = "query_key_value" in names
    separate = all(isinstance(getattr(attention, name, None), nn.Linear) for name in ("k_proj", "v_proj"))
    if not separate and not (fused and model.config.model_type == "gpt_neox"):
        return "its keys and values have no projections of their own"
    between = [n for n in names if n not in PLAIN_PARTS and "dropout" not in n]
    if between:
        return f"{between[-1]} stands between its projections and the cache"
    if getattr(model.config, "clip_qkv", None) is not None:
        return "it clips keys and values after the projection (clip_qkv)"
    return None if learned_positions(model) and not _of_table(model) else _unrolled(model)
