"""A snapshot of a model. Two snapshots show whether something has changed the model."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.kv.content import INTEGER_VIEWS

STRIDE = 61
"""The snapshot sums every STRIDE-th element of weights and buffers: that takes less time than one token."""


def snapshot_model(model: PreTrainedModel) -> tuple[object, ...]:
    """Return a snapshot of a model, which differs from an earlier one if something has changed the model.

    It is (configuration, (name, dtype, shape, device) of each weight and buffer, sums of their bits, hooks).
    """
    tensors: list[tuple[str, Tensor]] = list(model.named_parameters())
    tensors.extend(model.named_buffers())
    kinds = [(name, t.dtype, t.shape, t.device) for name, t in tensors]
    bit_sums = []
    for _, t in tensors:
        # bits are summed as integers, because their sum is exact in any order
        bits = t.detach().view(INTEGER_VIEWS[t.itemsize]).flatten()
        bit_sums.append(bits[::STRIDE].sum(dtype=torch.int64))
    hooks = []
    for module in model.modules():
        # hooks change what a module computes, and so does a ``forward`` in its own attributes
        forward = module.__dict__.get("forward")
        hooks.append((id(forward), list(module._forward_pre_hooks), list(module._forward_hooks)))
    # sums are read only now, because a GPU computes them all while the processor goes on
    return model.config.to_json_string(use_diff=False), kinds, [int(bit_sum) for bit_sum in bit_sums], hooks
