"""What a model is at a moment, to find out whether something has changed it since."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.content import WORDS

STRIDE = 61
"""Of weights and buffers every so many elements are summed up, which reads a model in the time of less than a token."""


def state_of(model: PreTrainedModel) -> tuple[object, ...]:
    """The model's configuration, and names, types, shapes and sums of its weights and buffers."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    sums = [_sum(t.detach()) for _, t in tensors]
    what = [(name, t.dtype, t.shape, t.device) for name, t in tensors]
    return model.config.to_json_string(use_diff=False), what, [int(s) for s in sums]


def _sum(t: Tensor) -> Tensor:
    """An exact sum over the bits of every STRIDE-th element."""
    return t.view(WORDS[t.itemsize]).flatten()[::STRIDE].sum(dtype=torch.int64)
