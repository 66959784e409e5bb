"""The cache that one method kept of one prompt."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kvbench.cache.segment import LayerCache, storage_bytes
from kvbench.methods.chain import Chain


@dataclass(frozen=True)
class Cache:
    """What one chain kept of one prompt, ready to generate from: the layers and the next token's logits [V].

    ``prefill_s`` is the time of the prompt's forward pass without compression (shared by all chains of that pass);
    ``compress_s`` is this chain's own, the statistics that it needs included. ``model`` is the model that made it.
    Calling code never changes a cache: it can be used again.
    """

    layers: tuple[LayerCache, ...]
    logits: Tensor
    chain: Chain
    prompt_tokens: int
    prefill_s: float = 0.0
    compress_s: float = 0.0
    model: weakref.ref[Any] | None = field(default=None, compare=False, repr=False)
    strange: str = ""  # what was found in it, while the prompt was at hand, that the prompt does not have there

    @property
    def seen(self) -> int:
        """Tokens read so far, hence the position of the next one."""
        return self.layers[0].seen

    def nbytes(self) -> int:
        """Bytes of the storages held for keys, values and their overhead, each storage once."""
        return storage_bytes(t for layer in self.layers for t in layer.tensors())
