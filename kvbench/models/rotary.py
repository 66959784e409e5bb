"""The frequencies by which the layers that methods compress rotate their keys (RoPE), as the model's modules state."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.kv.model_shape import compressed_layers, layer_types
from kvbench.models.interface import compressed_modules


def stated_frequencies(model: PreTrainedModel) -> list[Tensor | None]:
    """Return the frequencies [r / 2] of each compressed layer, in layer order; None where the model states none.

    Layers of different types may rotate by different frequencies (Gemma 3). Zeros stand for a layer that says in
    ``use_rope`` that it does not rotate (SmolLM3, Llama 4).
    """
    buffers: dict[str, Tensor] = {}
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name.endswith("inv_freq"):
                # the first module that has such frequencies speaks for all layers
                buffers.setdefault(name, buffer)
    types = layer_types(model.config)
    frequencies: list[Tensor | None] = []
    for index, attention in zip(compressed_layers(model.config), compressed_modules(model), strict=True):
        own = buffers.get(f"{types[index]}_inv_freq", buffers.get("inv_freq"))
        if own is not None and not getattr(attention, "use_rope", True):
            own = torch.zeros_like(own)
        frequencies.append(own)
    return frequencies
