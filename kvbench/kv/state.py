"""The states of layers that read tokens one after the other: linear attention, state space, convolution.

Such a layer holds numbers of a fixed size in place of keys and values. They stand for the whole text read so far, so
that no token can be taken back, and no method compresses them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FP32 = 4
"""The bytes of one number of a recurrent state, which transformers holds in fp32."""
States = tuple[Tensor | None, ...]
"""The state tensors [1, ...] of a layer, in the layer's order; None stands for a tensor that it does not have."""


@dataclass(frozen=True, eq=False)
class LayerState:
    """The states of one layer after the text read so far.

    conv: the last inputs of the layer's convolutions, which the next token needs.
    recurrent: the states of linear attention or of a state space.
    """

    conv: States
    recurrent: States

    def tensors(self) -> list[Tensor]:
        """Return all tensors that the layer has."""
        return [t for t in (*self.conv, *self.recurrent) if t is not None]

    @property
    def counts(self) -> tuple[int, int]:
        """The pair (count of numbers in the convolutions' states, count of numbers in the recurrent states)."""
        return _count_numbers(self.conv), _count_numbers(self.recurrent)

    def shapes(self) -> LayerState:
        """Return the states with tensors that keep their shapes but hold no numbers."""
        return LayerState(conv=_strip_numbers(self.conv), recurrent=_strip_numbers(self.recurrent))


def state_bytes(conv: int, recurrent: int, itemsize: int) -> int:
    """Return the bytes of a model's states.

    conv: the count of numbers in the states of convolutions. They have the model's dtype, of ``itemsize`` bytes.
    recurrent: the count of numbers in the recurrent states. transformers holds them in fp32.
    """
    return conv * itemsize + recurrent * FP32


def _count_numbers(states: States) -> int:
    return sum(t.numel() for t in states if t is not None)


def _strip_numbers(states: States) -> States:
    """Return tensors of the same shapes that hold no numbers."""
    stripped: list[Tensor | None] = []
    for t in states:
        if t is None:
            stripped.append(None)
        else:
            # a tensor on the device "meta" has a shape and a dtype, but no storage
            stripped.append(torch.empty_like(t, device="meta"))
    return tuple(stripped)
