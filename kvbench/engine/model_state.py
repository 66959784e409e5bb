"""A snapshot of a model, to find out whether something has changed it since."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.content import INTEGER_VIEWS

STRIDE = 61
"""Every so many elements of weights and buffers are summed up: that takes less time than one token."""


def state_of(model: PreTrainedModel) -> tuple[object, ...]:
    """Return the model's configuration, and names, types, shapes and sums of its weights and buffers."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    sums = [_sum(t.detach()) for _, t in tensors]
    kinds = [(name, t.dtype, t.shape, t.device) for name, t in tensors]
    return model.config.to_json_string(use_diff=False), kinds, [int(s) for s in sums]


def _sum(t: Tensor) -> Tensor:
    """Return an exact sum over the bits of every STRIDE-th element."""
    return t.view(INTEGER_VIEWS[t.itemsize]).flatten()[::STRIDE].sum(dtype=torch.int64)
