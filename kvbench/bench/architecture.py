"""The model that is timed: a checkpoint, or random weights of the architecture that an entry of conf/model states."""

from __future__ import annotations

import gc
from itertools import chain

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from kvbench.base.errors import KvbenchError, UsageError
from kvbench.kv.model_shape import Shape, from_entry
from kvbench.models import load, traits
from kvbench.models.config import ModelConfig


def shape_of(cfg: ModelConfig) -> Shape:
    """Return the model's shape from its entry in conf/model, or else from its checkpoint."""
    if cfg.shape is not None:
        return from_entry(cfg.shape)
    return traits.shape_of(load.locate(cfg).config)


def resolve_model_config(cfg: ModelConfig) -> PretrainedConfig:
    """Return the Hugging Face configuration: the checkpoint's, or with ``weights=random`` the model entry's.

    Raises UsageError if the model is missing, or has neither a checkpoint nor an architecture in its entry.
    """
    if cfg.weights != "random" or cfg.architecture is None or cfg.shape is None:
        return load.locate(cfg).config
    # the entry states heads and layers once, under shape, and all other sizes under architecture
    architecture, shape = dict(cfg.architecture), from_entry(cfg.shape)
    family = architecture.pop("model_type", None)
    if family not in CONFIG_MAPPING:
        raise UsageError(f"model.architecture.model_type={family!r} is not possible: transformers has no such family")
    settings: dict[str, object] = {"num_hidden_layers": shape.all_layers, "num_attention_heads": shape.query_heads}
    # a family without rotary positions has learned ones (OPT), and its configuration knows none of these four keys
    if "rope_theta" in architecture:
        theta = float(architecture.pop("rope_theta"))
        settings |= {
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "tie_word_embeddings": architecture.pop("tie_word_embeddings", False),
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        }
    return load.config_with_scaling(cfg, AutoConfig.for_model(family, **settings, **architecture))


def build_model(cfg: ModelConfig, device: torch.device, layers: int | None = None) -> PreTrainedModel:
    """Return the model in eval mode on ``device``, cut to its first ``layers``. Random weights are drawn there.

    Raises UsageError if a checkpoint is to be cut, and KvbenchError if the model does not fit into memory.
    """
    if cfg.weights != "random":
        if layers is not None:
            raise UsageError(f"layers={layers} needs weights=random: a checkpoint keeps all of its layers")
        return load.load_weights(cfg, load.locate(cfg), device)
    config = resolve_model_config(cfg)
    if layers is not None:
        if layers > config.num_hidden_layers:
            raise UsageError(f"layers={layers} is not possible: {cfg.name} has {config.num_hidden_layers}")
        config.num_hidden_layers = layers
        # only some families list their layers' types, and transformers refuses a list with too many entries
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    dtype = load.resolve_dtype(cfg, device, config)
    # the processor's generator is always forked, a GPU's only if it is named
    generator_devices = [device] if device.type == "cuda" else []
    try:
        # fork the generator, so that building a model does not change the caller's random numbers
        with torch.device(device), torch.random.fork_rng(devices=generator_devices):
            torch.manual_seed(0)
            return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    except torch.OutOfMemoryError:
        # free the part that was built before the caller goes on
        gc.collect()
        raise KvbenchError(f"model={cfg.name} does not fit into the memory of {device} as {dtype}") from None


def weight_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of the model's parameters and buffers. Tied parameters count once."""
    # tied parameters share their storage and so its address
    bytes_by_address: dict[int, int] = {}
    for tensor in chain(model.parameters(), model.buffers()):
        bytes_by_address[tensor.untyped_storage().data_ptr()] = tensor.nbytes
    return sum(bytes_by_address.values())


def count_step_weight_bytes(model: PreTrainedModel, batch: int) -> int:
    """Return the bytes of weights that a decode step of ``batch`` rows reads.

    A step reads all weights, except that it reads only ``batch`` rows of an embedding. An embedding that is also the
    output layer is read whole.
    """
    total = weight_bytes(model)
    output = model.get_output_embeddings()
    for module in model.modules():
        if not isinstance(module, torch.nn.Embedding):
            continue
        table = module.weight
        is_output_layer = output is not None and output.weight.data_ptr() == table.data_ptr()
        if not is_output_layer:
            table_rows, columns = table.shape
            # a batch may have more rows than the embedding
            unread_rows = max(0, table_rows - batch)
            total -= unread_rows * columns * table.element_size()
    return total
