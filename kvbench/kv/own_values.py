"""Keys that are their own values, as latent attention holds them: nothing is stored as values.

Such a layer holds one vector a token for all query heads: a latent, and a part of the key that is rotated beside it.
Attention over it has one kv head, whose key is the whole vector and whose value is the latent within the key
(``models.latent``). Values therefore have the width 0 wherever they are stored, moved and counted, and attention weighs
the keys in their place.

Shapes: H stored heads, L tokens, D key channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self, TypeVar

import torch
from torch import Tensor

from kvbench.kv.packed import Packed

AsStored = TypeVar("AsStored", Tensor, Tensor | Packed)


def are_stored(values: Tensor | Packed) -> bool:
    """Return True if values [..., L, D] are stored, and False if the keys are their own values."""
    return values.shape[-1] > 0


def values_or_keys(keys: AsStored, values: AsStored) -> AsStored:
    """Return the values [..., L, D] that attention weighs: the keys themselves if no values are stored."""
    if are_stored(values):
        return values
    return keys


@dataclass(frozen=True)
class NoValues(Packed):
    """The packed values of keys that are their own values: one value for each key, without channels.

    marks: [..., L, 0], a tensor that only counts tokens and takes no memory.
    """

    marks: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.marks.shape

    @property
    def format(self) -> tuple[object, ...]:
        return ("no values",)

    def payload(self) -> Iterator[Tensor]:
        yield self.marks

    def codes_only(self) -> Iterator[Tensor]:
        yield self.marks

    def holding(self, tensors: Sequence[Tensor], frozen: Tensor | None) -> Self:
        (marks,) = tensors
        return replace(self, marks=marks)

    def tokens(self, start: int | None = None, stop: int | None = None) -> Self:
        return replace(self, marks=self.marks[..., start:stop, :])

    def flat(self) -> Self:
        return replace(self, marks=self.marks.flatten(0, -3))

    def pack_more(self, x: Tensor, pack: Callable[[Tensor], Packed], rows: Sequence[int] | None = None) -> Packed:
        # new values have no channels either, so there is nothing to pack
        return NoValues(x)

    def dequantise(self, dtype: torch.dtype, scratch: Tensor | None = None) -> Tensor:
        return self.marks.to(dtype)
