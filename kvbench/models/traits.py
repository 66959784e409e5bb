"""The traits of a model, read from its config and its modules. No list of families decides what runs.

A family runs if transformers' attention interface serves it. A model that would be computed wrongly is refused with a
reason. Every method is tested on the families in TESTED. Other families run with the note ``untested``.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvbench.base.errors import UsageError, headline
from kvbench.kv.model_shape import (
    Shape,
    chunk_size,
    from_config,
    indexer_reach,
    key_layers,
    latent_width,
    layer_heads,
    layer_types,
    local_layers,
    sharing_layers,
    state_layers,
)
from kvbench.models import probe
from kvbench.models.indexer import find_indexers
from kvbench.models.interface import attention_modules, compressed_modules, decoder_layers
from kvbench.models.latent import expands_after_caching, find_up_fault
from kvbench.models.releases import HOLDS_STATES
from kvbench.models.rotary import stated_frequencies

READ = (
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
"""Tested families whose traits follow from config and modules alone. Models of all other families are probed, too."""
TESTED = (
    *READ,
    "arcee",
    "cohere2",
    "ernie4_5",
    "exaone4",
    "glm4",
    "glm4_moe",
    "gpt_oss",
    "granite",
    "minimax_m2",
    "ministral3",
    "olmo2",
    "olmo3",
    "seed_oss",
    # these hold a state in place of keys in some layers, or beside keys
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "jamba",
    "lfm2",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    # the last layers of these read the keys and values of an earlier layer
    "gemma3n_text",
    "gemma4_text",
    # layers of this family attend chunks
    "llama4_text",
    # these hold one latent a token in place of the keys and values of heads
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "kimi_linear",
    "longcat_flash",
    "minicpm3",
)
"""Families on which every method is tested."""
MOST_LAYERS = 4096
"""The most layers of a model. A config.json may ask for a million, and building them would take hours."""
MOVING = ("dynamic", "longrope")
"""The rotary types whose frequencies depend on the length read so far."""
LAYER_TYPES = (
    "full_attention",
    "indexed_attention",
    "sliding_attention",
    "chunked_attention",
    "linear_attention",
    "conv",
    "hybrid",
    "mlp",
    "moe",
)
"""The types of layers, as transformers names them, that kvbench runs."""
ONE_BY_ONE = ("jamba",)
"""Families for which transformers 5.24 ignores the stored state when it reads several new tokens at once."""
PLAIN_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "dense", "query_key_value", "rotary_emb", "q_norm")
"""Children of an attention module that do not change keys and values between its projections and the cache."""


@dataclass(frozen=True)
class ModelTraits:
    """A model's family, the shape of its cache, and the reasons that keep methods from running on it.

    family: the ``model_type`` in the model's config.
    shape: the sizes of the cache: layers, heads, head dimension.
    unrolled: why cached keys cannot be rotated to other positions; None if they can.
    mixed: why keys and values are not linear in their layer's input, as low-rank methods need; None if they are.
    capped: True if attention logits are capped (softcapping).
    one_by_one: True if tokens that follow a text must be read one at a time.
    sinks: True if attention also goes to learned sinks, which are no tokens.
    paired: True if a layer has several attention modules, so that there are more of these than layers.
    """

    family: str
    shape: Shape
    unrolled: str | None
    mixed: str | None
    capped: bool = False
    one_by_one: bool = False
    sinks: bool = False
    paired: bool = False

    @property
    def note(self) -> str | None:
        """The warning that readers of results must see for an untested family, or None for a tested one."""
        if self.family in TESTED:
            return None
        return (
            f"Untested family {self.family!r}: transformers serves it through the same interface as the tested ones "
            f"({', '.join(TESTED)}), but kvbench's methods are not tested on it."
        )


def check_is_model(model: Any) -> None:
    """Raise UsageError unless ``model`` is a causal language model of transformers."""
    # a user may give any object, such as a model's name
    can_generate = getattr(model, "can_generate", None)
    if not (hasattr(model, "config") and callable(can_generate) and can_generate()):
        raise UsageError(
            f"model is {type(model).__name__}: give a causal language model of transformers, as kvbench.load_model "
            "returns beside its tokenizer"
        )


def check_tokenizer(tokenizer: Any) -> None:
    """Raise UsageError unless ``tokenizer`` is an object that encodes texts."""
    # a text, such as the tokenizer's name, has an ``encode`` as well
    if isinstance(tokenizer, str) or not callable(getattr(tokenizer, "encode", None)):
        raise UsageError(f"tokenizer is {type(tokenizer).__name__}: give the model's, as kvbench.load_model returns it")


def of_model(model: PreTrainedModel) -> ModelTraits:
    """Return the traits of a model. Raises UsageError with the reason if kvbench cannot run it."""
    check_is_model(model)
    check_served(model)
    family = str(model.config.model_type)
    modules = attention_modules(model)
    unrolled = _find_position_fault(model, modules)
    mixed = _find_projection_fault(model, modules)
    # config and modules may not show every rule of a family, so most families are probed; on meta there are no weights
    if family not in READ and model.device.type != "meta":
        result = probe.probe_model(model)
        # a reason that the modules show says more than the probe's
        unrolled = unrolled or result.unrolled
        mixed = mixed or result.mixed
    capped = getattr(model.config, "attn_logit_softcapping", None) is not None
    conv, recurrent = probe.count_states(model)
    shape = replace(from_config(model.config), conv_numbers=conv, recurrent_numbers=recurrent)
    return ModelTraits(
        family=family,
        shape=shape,
        unrolled=unrolled,
        mixed=mixed,
        capped=capped,
        sinks=any(hasattr(module, "sinks") for module in modules),
        one_by_one=reads_one_by_one(model.config),
        paired=_attends_twice(model),
    )


def _find_position_fault(model: PreTrainedModel, modules: list[nn.Module]) -> str | None:
    """Return why cached keys cannot be moved to other positions, as the modules show it; None if they can.

    ``modules`` are the model's attention modules.
    """
    if not learned_positions(model) or _reads_position_table(model):
        return _find_rotation_fault(model, modules)
    family = str(model.config.model_type)
    # the names of tables of positions in OPT, GPT-2 and their relatives
    if any("position" in name or "wpe" in name for name, _ in model.named_parameters()):
        return f"the family {family!r} learns its positions"
    return f"the family {family!r} rotates no keys"


def shape_of(config: Any) -> Shape:
    """Return the shape of a model's cache from its configuration. States are counted by reading one token.

    Raises UsageError if the language model is only a part of the model, or if a model with states cannot run.
    """
    check_whole(config)
    # only states need a model: all other sizes are in the configuration
    if state_layers(config):
        return of_config(config).shape
    return from_config(config)


def reads_one_by_one(config: Any) -> bool:
    """Return True if tokens that follow a text must be read one at a time, because of a bug in transformers."""
    return config.model_type in ONE_BY_ONE


_KNOWN: dict[str, ModelTraits] = {}
"""The traits found so far, by the text of a configuration. Building a model takes seconds, even without weights."""


def of_config(config: Any) -> ModelTraits:
    """Return a model's traits from its configuration alone. Its modules are built without memory for weights.

    Raises UsageError if transformers builds no model of the configuration, or if kvbench cannot run the model.
    """
    check_whole(config)
    layers = getattr(config, "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise _refusal(config, f"its config.json says num_hidden_layers={layers}; {MOST_LAYERS} are the most")
    # two classes of configuration may have the same values, so the key names the class
    key = f"{type(config).__name__} {config.to_json_string()}"
    if key not in _KNOWN:
        try:
            # transformers may write into the configuration of a model that it builds
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
        except Exception as error:
            # the code of families raises errors of many types
            raise _refusal(config, f"transformers builds no causal language model of it ({headline(error)})") from None
        _KNOWN[key] = of_model(model)
    return _KNOWN[key]


def _attends_twice(model: PreTrainedModel) -> bool:
    """Return True if a layer of the model has several attention modules (LongCat)."""
    # such a layer is listed once for each of its attention modules
    layers = decoder_layers(model)
    return len(set(layers)) < len(layers)


def check_whole(config: Any) -> None:
    """Raise UsageError if the language model is only a part of a model, such as a model that also reads pictures."""
    text_config = config.get_text_config()
    # ``check_served`` refuses an encoder with a decoder, for a better reason
    if text_config is not config and not config.is_encoder_decoder:
        raise _refusal(
            config,
            f"its language model, of the type {text_config.model_type}, is a part of a larger model: save that part as "
            "a model of its own and give its folder (docs/own.md says how)",
        )


def check_served(model: PreTrainedModel) -> None:
    """Raise UsageError with the reason for a model whose cache or attention kvbench does not compute."""
    check_whole(model.config)
    # the first reason that applies is given, so specific ones come first
    modules = attention_modules(model)
    reasons = _list_attention_faults(model, modules)
    reasons |= _list_layer_faults(model, modules) | _list_code_faults(model, modules)
    for reason, applies in reasons.items():
        if applies:
            raise _refusal(model.config, reason)


def _list_attention_faults(model: PreTrainedModel, modules: list[nn.Module]) -> dict[str, object]:
    """Return reasons to refuse a model for its kind of attention, each with a value that is true if it applies.

    ``modules`` are the model's attention modules.
    """
    config = model.config
    layers = getattr(config, "num_hidden_layers", 0)
    up_fault = None
    if latent_width(config):
        up_fault = next((fault for fault in map(find_up_fault, modules) if fault is not None), None)
    return {
        "it reads through cross-attention": (
            config.is_encoder_decoder or getattr(config, "cross_attention_layers", None)
        ),
        "it has more attention modules than layers (cross-attention)": len(modules) > layers,
        f"its index_topk is {indexer_reach(config)}, so that its indexer chooses no token": (
            indexer_reach(config) is not None and int(config.index_topk) < 1
        ),
        "an indexer that kvbench does not know chooses which tokens each query attends": (
            indexer_reach(config) is not None and not _indexer_is_known(modules)
        ),
        "this version of transformers caches the keys and values made of latents: install 5.24 or newer": (
            latent_width(config) and not all(expands_after_caching(module) for module in modules)
        ),
        f"{up_fault}: load it unquantised, and merge adapters first": up_fault is not None,
    }


def _list_layer_faults(model: PreTrainedModel, modules: list[nn.Module]) -> dict[str, object]:
    """Return reasons to refuse a model for its layers, each with a value that is true if it applies.

    ``modules`` are the model's attention modules.
    """
    config = model.config
    unserved = sorted(set(layer_types(config)) - set(LAYER_TYPES))
    layer_numbers = [module.layer_idx for module in modules]
    # the device of each part of the model, if accelerate has spread them; None or {} on one device
    devices = set((getattr(model, "hf_device_map", None) or {}).values())
    return {
        f"it has layers of the type {', '.join(unserved)}, and only {', '.join(LAYER_TYPES)} run": unserved,
        "all of its layers attend chunks": chunk_size(config) is not None and not local_layers(config),
        "none of its layers has keys and values": not key_layers(config),
        "this version of transformers holds states in another way: install 5.23 or newer": (
            state_layers(config) and not HOLDS_STATES
        ),
        "layers of one kind have heads of different sizes": _head_size_varies(config),
        "its attention modules are not those of the layers that hold keys by its config (shared or recurrent layers)": (
            layer_numbers != list(key_layers(config))
        ),
        "it has recurrent (state-space) layers that its config does not name": not state_layers(config)
        and any(name.endswith("A_log") for name, _ in model.named_parameters()),
        "this version of transformers shares keys and values between layers in another way: install 5.24 or newer": (
            sharing_layers(config) and not hasattr(config, "kv_sharing_modes")
        ),
        "its layers share keys and lie on several devices: load it on one, without device_map=": (
            sharing_layers(config) and len(devices) > 1
        ),
    }


def _list_code_faults(model: PreTrainedModel, modules: list[nn.Module]) -> dict[str, object]:
    """Return reasons to refuse a model for its family's code, each with a value that is true if it applies.

    ``modules`` are the model's attention modules.
    """
    arguments = inspect.signature(model.forward).parameters
    return {
        # modeling files that use the interface import its table of functions
        "its attention does not go through transformers' attention interface": not all(
            hasattr(sys.modules.get(type(module).__module__), "ALL_ATTENTION_FUNCTIONS") for module in modules
        ),
        "it takes no position ids": "position_ids" not in arguments,
        "its attention is not causal": any(getattr(module, "is_causal", True) is False for module in modules),
    }


def _head_size_varies(config: Any) -> bool:
    """Return True if local layers, or the other layers with keys, have heads of several sizes among themselves."""
    try:
        local = local_layers(config)
        # the different pairs of (True for a local layer, the layer's kv heads and head dimension)
        sizes_by_kind = {(i in local, layer_heads(config, i)) for i in key_layers(config)}
    # transformers raises this for a size that differs by layer
    except RuntimeError:
        return True
    # the model has no attention, and is refused for that reason
    except AttributeError:
        return False
    kinds = {is_local for is_local, _ in sizes_by_kind}
    # with one size for each kind, there are as many pairs as kinds
    return len(sizes_by_kind) > len(kinds)


def _indexer_is_known(modules: list[nn.Module]) -> bool:
    """Return True if the modules' indexers choose among latents, as DeepSeek-V3.2's do. Other indexers cannot run."""
    return bool(find_indexers(modules)) and all(expands_after_caching(module) for module in modules)


def context_length(config: Any, configured: int | None = None) -> int | None:
    """Return the longest text, in tokens, for which a model is made; None if nothing states a limit.

    A run cuts prompts to this length. ``api.prefill`` reads longer prompts with a warning, up to the limit of
    ``engine.limits.find_longest_text``.

    config: the model's configuration, whose ``max_position_embeddings`` counts unless the user has set a length.
    configured: the length that the user has set; None: no length. The reach of an indexer limits the text under any
        setting.
    """
    stated = configured or getattr(config, "max_position_embeddings", None)
    limits = [limit for limit in (stated, indexer_reach(config)) if limit is not None]
    return min(limits, default=None)


def _refusal(config: Any, reason: str) -> UsageError:
    """Return the error by which a model is refused, with its family and the reason."""
    return UsageError(f"the model family {getattr(config, 'model_type', None)!r} does not run in kvbench: {reason}")


def learned_positions(model: PreTrainedModel) -> bool:
    """Return True if the model has no rotary frequencies, as models that learn their positions in a table."""
    return not any(name.endswith("inv_freq") for name, _ in model.named_buffers())


def rope_type(config: Any) -> str:
    """Return the kind of a model's rotary positions: ``default`` if they are not scaled, or if they differ by layer."""
    # where positions differ by type of layer, the parameters are mappings by type, without a common rope_type
    parameters = getattr(config, "rope_parameters", None) or {}
    return str(parameters.get("rope_type", "default"))


def turning_point(config: Any) -> int | None:
    """Return the number of tokens up to which LongRoPE rotates a text by its short factors (arXiv 2402.13753).

    Longer texts are rotated by its long factors, from their first token on. Returns None for other rotations.
    """
    if rope_type(config) != "longrope":
        return None
    return int(config.rope_parameters["original_max_position_embeddings"])


def _find_rotation_fault(model: PreTrainedModel, modules: list[nn.Module]) -> str | None:
    """Return why cached keys cannot be rotated to other positions, or None if they can.

    ``modules`` are the model's attention modules.
    """
    if latent_width(model.config):
        return "only a part of what it holds of a token is rotated (latent attention)"
    if _reads_position_table(model):
        return "it reads its rotary positions from a table"
    kind = rope_type(model.config)
    if kind in MOVING:
        return f"its rotary positions ({kind}) change with the length of the text"
    # a probe tells most families' rules; without weights there is none, and layers that all rotate show their own:
    # by halves [x1, x2] becomes [-x2, x1], hence 0 1 2 3 becomes -2 -3 0 1; other families rotate neighbours
    rotate_half = getattr(sys.modules[type(modules[0]).__module__], "rotate_half", None)
    if local_layers(model.config) or rotate_half is None:
        return None
    if rotate_half(torch.arange(4.0)).tolist() != [-2, -3, 0, 1]:
        return "it rotates keys by another rule than halves"
    return None


def layer_frequencies(model: PreTrainedModel) -> Sequence[Tensor | None]:
    """Return the frequencies [r / 2] by which each compressed layer rotates its keys, in layer order.

    Zeros stand for a layer that does not rotate, and None for one with another rule, or with learned positions.
    """
    if model.config.model_type in READ:
        return stated_frequencies(model)
    return probe.probe_model(model).frequencies


def _reads_position_table(model: PreTrainedModel) -> bool:
    """Return True if the model reads its rotations from a table over positions, which is not trained (GPT-J)."""
    return any(name.endswith("embed_positions") for name, _ in model.named_buffers())


def _find_projection_fault(model: PreTrainedModel, modules: list[nn.Module]) -> str | None:
    """Return why keys and values are not linear in their layer's input, or None if they are.

    ``modules`` are the model's attention modules.
    """
    if latent_width(model.config):
        return "it holds latents already (latent attention)"
    # one attention module stands for those of all layers that methods compress
    attention = compressed_modules(model)[0]
    names = [name for name, _ in attention.named_children()]
    # only GPT-NeoX's ``query_key_value`` has the order of rows that kvbench knows
    fused = "query_key_value" in names
    separate = all(isinstance(getattr(attention, name, None), nn.Linear) for name in ("k_proj", "v_proj"))
    if not separate and not (fused and model.config.model_type == "gpt_neox"):
        return "its keys and values have no projections of their own"
    # other children, such as a norm of keys (Qwen3's k_norm), may change keys after their projection
    between = [name for name in names if name not in PLAIN_PARTS and "dropout" not in name]
    if between:
        # the last one is enough for the message
        return f"{between[-1]} stands between its projections and the cache"
    if getattr(model.config, "clip_qkv", None) is not None:
        return "it clips keys and values after the projection (clip_qkv)"
    # latents hold unrotated keys, which reading rotates: only a model that rotates keys can fail at that
    if learned_positions(model) and not _reads_position_table(model):
        return None
    if len({bool(getattr(module, "use_rope", True)) for module in compressed_modules(model)}) > 1:
        return "some of its layers do not rotate keys"
    return _find_rotation_fault(model, modules)
