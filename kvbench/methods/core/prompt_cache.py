"""The compressed cache of one prompt under one chain: the result of ``kvbench.prefill``."""

from __future__ import annotations

import weakref
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from kvbench.base.formatting import format_number, format_size
from kvbench.kv.segment import LayerCache, storage_bytes
from kvbench.kv.state import LayerState
from kvbench.methods.core.chain import Chain

SHOWN = ("kv_size", "kv_ratio", "ratio", "bits")
"""The knobs that ``repr`` of a cache shows."""


@dataclass(frozen=True, eq=False)
class PromptCache:
    """The compressed layers of one prompt and the next token's logits [V], ready to generate from.

    V is the size of the vocabulary. No function changes a cache, so you can use it again. A cache cannot be pickled,
    because its method is code and it belongs to a model object. To restore a cache later, keep the prompt's token ids
    and the method, and call ``prefill`` again.

    chain: the method that compressed the prompt.
    prompt_tokens: the number of the prompt's tokens.
    prefill_s: the seconds of the prompt's forward pass without compression. Methods that share the pass have the same
        number.
    compress_s: the seconds of this method's compression, with the attention statistics that the method needs.
    layers: the caches of the layers that methods compress: all layers with keys, except local layers.
    local: the caches of local layers, in which a token attends only to a window of tokens. No method compresses them.
    states: the states of layers that hold a state in place of keys, or beside them. No method changes them.
    long: True if the prompt is so long that the model rotates keys by other frequencies (LongRoPE).
    model: a weak reference to the model that read the prompt. None: the cache names no model.
    mismatch: the first layer whose stored keys and values differ from the prompt's, in words. "": no layer differs. The
        check was made during compression, while the prompt's own keys and values were still in memory.
    """

    layers: tuple[LayerCache, ...]
    logits: Tensor
    chain: Chain
    prompt_tokens: int
    prefill_s: float = 0.0
    compress_s: float = 0.0
    model: weakref.ref[Any] | None = field(default=None, compare=False, repr=False)
    mismatch: str = ""
    local: tuple[LayerCache, ...] = ()
    long: bool = False
    states: tuple[LayerState, ...] = ()

    def __repr__(self) -> str:
        """Return the method with its budget, the tokens kept per head and the size in MiB."""
        # the method with its budget, such as "snapkv kv_size=64"
        words = [self.chain.name]
        for stage in self.chain.stages:
            for knob, value in stage.knobs().items():
                if knob in SHOWN and value is not None:
                    words.append(f"{knob}={value}")
        method = " ".join(words)
        # the tokens of every stored head of every layer
        counts: list[int] = []
        for layer in self.layers:
            counts += layer.kept_counts()
        if min(counts) < max(counts):
            tokens = f"{min(counts)} to {max(counts)}, {format_number(sum(counts) / len(counts), 0)} in the mean,"
        else:
            tokens = f"{counts[0]}"
        return f"<PromptCache {method}: {tokens} of {self.seen} tokens, {format_size(self.nbytes())}>"

    def __copy__(self) -> PromptCache:
        # the layers are shared, because no function changes them
        return replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> PromptCache:
        """Return a copy with tensors of its own and the same method and model."""
        # neither the chain nor the model is copied: the chain cannot change, and the model is not the cache's own
        layers, local, states = deepcopy((self.layers, self.local, self.states), memo)
        return replace(self, layers=layers, local=local, states=states, logits=self.logits.clone())

    def __reduce__(self) -> str:
        raise TypeError(
            "a kvbench cache cannot be pickled: its method is code and it belongs to a model object. Keep the prompt's "
            "ids and the method, and call kvbench.prefill again"
        )

    @property
    def seen(self) -> int:
        """The number of tokens read so far. The next token has this position."""
        # every layer counts the tokens of the whole text, however few it holds
        return self.layers[0].seen

    @property
    def batch_key(self) -> object:
        """The key of the decode batch that this cache can join. All rows of a batch have equal keys."""
        # LongRoPE rotates long texts by other frequencies
        return self.chain.batch_key, self.long

    def shapes(self) -> PromptCache:
        """Return the cache with tensors that keep their shapes but hold no numbers.

        Checks read it after the storage of the real cache was given up.
        """
        layers = tuple(layer.shapes() for layer in self.layers)
        local = tuple(layer.shapes() for layer in self.local)
        states = tuple(state.shapes() for state in self.states)
        # the empty slice is cloned, because a view would keep the storage of all logits
        return replace(self, layers=layers, local=local, states=states, logits=self.logits[:0].clone())

    def nbytes(self) -> int:
        """Return the bytes of memory held for keys, values, overhead and states. Shared memory counts once."""
        tensors: list[Tensor] = []
        for layer in self.layers + self.local:
            tensors += layer.tensors()
        for state in self.states:
            tensors += state.tensors()
        return storage_bytes(tensors)
