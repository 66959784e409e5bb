"""The cache of one prompt under one chain."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kvbench.cache.segment import LayerCache, storage_bytes
from kvbench.methods.chain import Chain


@dataclass(frozen=True)
class Cache:
    """The compressed layers of one prompt and the next token's logits [V], ready to generate from.

    No function changes a cache, so that it can be used again.

    prefill_s: the seconds of the prompt's forward pass without compression, which all chains of that pass share.
    compress_s: the seconds of this chain alone, with the statistics that it needs.
    model: the model that read the prompt.
    mismatch: where the cache differs from the prompt, as found while the prompt's own keys and values were at hand.
    """

    layers: tuple[LayerCache, ...]
    logits: Tensor
    chain: Chain
    prompt_tokens: int
    prefill_s: float = 0.0
    compress_s: float = 0.0
    model: weakref.ref[Any] | None = field(default=None, compare=False, repr=False)
    mismatch: str = ""

    @property
    def seen(self) -> int:
        """The number of tokens read so far, hence the position of the next one."""
        return self.layers[0].seen

    def nbytes(self) -> int:
        """Return the bytes of the storages held for keys, values and their overhead, each storage once."""
        return storage_bytes(t for layer in self.layers for t in layer.tensors())
