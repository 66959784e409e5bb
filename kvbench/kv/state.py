"""The states of layers that read tokens one after the other: linear attention, state space, convolution.

Such a layer holds numbers of a fixed size in place of keys and values. They stand for the whole text read so far, so
that no token can be taken back, and no method compresses them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FP32 = 4
"""Bytes of a number of a recurrent state."""
States = tuple[Tensor | None, ...]
"""Tensors [1, ...] by their number in the layer; None for one that the layer does not have."""


@dataclass(frozen=True, eq=False)
class LayerState:
    """The states of one layer after the text read so far.

    conv: the last inputs of its convolutions. recurrent: the recurrent states.
    """

    conv: States
    recurrent: States

    def tensors(self) -> list[Tensor]:
        """Return all tensors that the layer has."""
        return [t for t in (*self.conv, *self.recurrent) if t is not None]

    @property
    def counts(self) -> tuple[int, int]:
        """The counts of numbers in the states of (convolutions, recurrences)."""
        return _count(self.conv), _count(self.recurrent)

    def shapes(self) -> LayerState:
        """Return the states with the shapes of their tensors alone."""
        return LayerState(conv=_on_meta(self.conv), recurrent=_on_meta(self.recurrent))


def state_bytes(conv: int, recurrent: int, itemsize: int) -> int:
    """Return the bytes of so many numbers in a model whose numbers take ``itemsize`` bytes.

    transformers holds the states of convolutions in the model's dtype and recurrent ones in fp32.
    """
    return conv * itemsize + recurrent * FP32


def _count(states: States) -> int:
    return sum(t.numel() for t in states if t is not None)


def _on_meta(states: States) -> States:
    """Return tensors of the same shapes and without numbers."""
    return tuple(t if t is None else torch.empty_like(t, device="meta") for t in states)
