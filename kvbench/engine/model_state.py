"""A snapshot of a model, to find out whether something has changed it since."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from kvbench.kv.content import INTEGER_VIEWS

STRIDE = 61
"""Every so many elements of weights and buffers are summed up: that takes less time than one token."""


def state_of(model: PreTrainedModel) -> tuple[object, ...]:
    """Return the model's configuration, names, types, shapes and sums of its weights and buffers, and its hooks."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    # an exact sum over the bits of every STRIDE-th element
    bits = (t.detach().view(INTEGER_VIEWS[t.itemsize]).flatten() for _, t in tensors)
    sums = [t[::STRIDE].sum(dtype=torch.int64) for t in bits]
    kinds = [(name, t.dtype, t.shape, t.device) for name, t in tensors]
    hooks = [(id(m.__dict__.get("forward")), [*m._forward_pre_hooks], [*m._forward_hooks]) for m in model.modules()]
    return model.config.to_json_string(use_diff=False), kinds, [int(s) for s in sums], hooks
