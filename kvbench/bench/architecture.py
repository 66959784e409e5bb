"""The model that is timed: a checkpoint, or random weights of the architecture that an entry of conf/model states."""

from __future__ import annotations

import gc
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from kvbench.base.errors import KvbenchError, UsageError
from kvbench.kv.model_shape import from_entry
from kvbench.models import load
from kvbench.models.config import ModelConfig


def model_config(cfg: ModelConfig) -> PretrainedConfig:
    """Return the Hugging Face configuration: the checkpoint's, or with ``weights=random`` that of the model's entry.

    Raises UsageError if the model is missing, or has neither a checkpoint nor an architecture in its entry.
    """
    if cfg.weights != "random" or cfg.architecture is None or cfg.shape is None:
        return load.locate(cfg).config
    settings, shape = dict(cfg.architecture), from_entry(cfg.shape)
    family = settings.pop("model_type", None)
    if family not in CONFIG_MAPPING:
        raise UsageError(f"model.architecture.model_type={family!r} is not possible: transformers has no such family")
    size_settings: dict[str, Any] = {"num_hidden_layers": shape.all_layers, "num_attention_heads": shape.query_heads}
    if "rope_theta" not in settings:  # learned positions
        return load.scaled(cfg, AutoConfig.for_model(family, **size_settings, **settings))
    theta = settings.pop("rope_theta")
    size_settings |= {"num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim}
    size_settings["tie_word_embeddings"] = settings.pop("tie_word_embeddings", False)
    config = AutoConfig.for_model(
        family, **size_settings, **settings, rope_parameters={"rope_type": "default", "rope_theta": float(theta)}
    )
    return load.scaled(cfg, config)


def build(cfg: ModelConfig, device: torch.device, layers: int | None = None) -> PreTrainedModel:
    """Return the model in eval mode on ``device``, cut to its first ``layers``. Random weights are drawn there.

    Raises UsageError if a checkpoint is to be cut, and KvbenchError if the model does not fit into memory.
    """
    if cfg.weights != "random":
        if layers is not None:
            raise UsageError(f"layers={layers} needs weights=random: a checkpoint keeps all of its layers")
        return load.load_weights(cfg, load.locate(cfg), device)
    config = model_config(cfg)
    if layers is not None:
        if layers > config.num_hidden_layers:
            raise UsageError(f"layers={layers} is not possible: {cfg.name} has {config.num_hidden_layers}")
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: config.num_hidden_layers]
    dtype = load.resolve_dtype(cfg, device, config)
    try:
        with torch.device(device), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    except torch.OutOfMemoryError:
        gc.collect()
        raise KvbenchError(f"model={cfg.name} does not fit into the memory of {device} as {dtype}") from None


def weight_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of the model's parameters and buffers. Tied ones count once."""
    tensors = {t.untyped_storage().data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    return sum(tensors.values())


def step_weight_bytes(model: PreTrainedModel, batch: int) -> int:
    """Return the bytes of weights that a decode step of ``batch`` rows reads.

    They are all, but only ``batch`` rows of the embedding. An embedding that is also the output layer is read whole.
    """
    total = weight_bytes(model)
    output = model.get_output_embeddings()
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            table = module.weight
            if output is None or output.weight.data_ptr() != table.data_ptr():
                total -= max(0, table.shape[0] - batch) * table.shape[1] * table.element_size()
    return total
