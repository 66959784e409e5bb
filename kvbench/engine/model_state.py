"""A snapshot of a model, to find out whether something has changed it since."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.kv.content import INTEGER_VIEWS

STRIDE = 61
"""Of weights and buffers every STRIDE-th element is summed up, which takes less time than one token."""


def state_of(model: PreTrainedModel) -> tuple[object, ...]:
    """Return the model's configuration, names, types, shapes and sums of its weights and buffers, and its hooks."""
    tensors: list[tuple[str, Tensor]] = list(model.named_parameters())
    tensors.extend(model.named_buffers())
    kinds = [(name, t.dtype, t.shape, t.device) for name, t in tensors]
    sums = []
    for _, t in tensors:
        # the bits as whole numbers: their sum is exact, and the same in any order
        bits = t.detach().view(INTEGER_VIEWS[t.itemsize]).flatten()
        sums.append(bits[::STRIDE].sum(dtype=torch.int64))
    hooks = []
    for module in model.modules():
        # a ``forward`` of its own is another way to change a module
        forward = module.__dict__.get("forward")
        hooks.append((id(forward), list(module._forward_pre_hooks), list(module._forward_hooks)))
    return model.config.to_json_string(use_diff=False), kinds, [int(s) for s in sums], hooks
