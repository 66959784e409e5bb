"""A decode batch and one step of it: the new tokens of many rows go through the model at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.base.errors import UsageError
from kvbench.engine.decode_layer import RowLayer
from kvbench.engine.limits import check_capacity
from kvbench.kv.model_shape import compressed_layers, indexer_reach, key_layers, local_layers, sharing_layers
from kvbench.kv.segment import LayerCache
from kvbench.kv.state import LayerState
from kvbench.methods.core.prompt_cache import PromptCache
from kvbench.models.interface import model_cache, sliding_window
from kvbench.models.lowrank import lifts
from kvbench.models.state_layer import StateLayer, in_model_order, state_layers_of
from kvbench.models.traits import layer_frequencies
from kvbench.storage.format import Room, StoredRow
from kvbench.storage.roles import Rotary


class StepLayers(Protocol):
    """The cache layers of a whole model, which a decode step fills and attends."""

    def in_order(self, config: Any) -> Sequence[Any]:
        """Return all layers in the order of the model with this configuration."""


@dataclass
class BatchLayers:
    """The cache layers of a decode batch, each with all rows of the batch.

    with_keys: the layers that hold keys, in the model's order, local ones included.
    with_states: the layers that hold a state, in the model's order.
    """

    with_keys: list[RowLayer]
    with_states: list[StateLayer]

    def in_order(self, config: Any) -> Sequence[Any]:
        """Return all layers in the order of the model with this configuration."""
        return in_model_order(config, self.with_keys, self.with_states)

    @property
    def used(self) -> int:
        """The number of tokens that have come since the batch was built."""
        return self.with_keys[0].used

    def join(self, other: BatchLayers) -> None:
        """Append the rows of ``other``, another batch of the same model."""
        for layer, entering_layer in zip(self.with_keys, other.with_keys, strict=True):
            layer.join(entering_layer)
        for state, entering_state in zip(self.with_states, other.with_states, strict=True):
            state.join(entering_state)

    def keep(self, rows: Tensor) -> None:
        """Drop all rows except ``rows``, which ascend."""
        for layer in self.with_keys:
            layer.keep(rows)
        for state in self.with_states:
            state.keep(rows)


def build(
    model: PreTrainedModel, caches: Iterable[PromptCache], capacity: int, at_once: int = 1, alone: bool = False
) -> BatchLayers:
    """Return the decode batch of ``caches``, each of them one row with room for ``capacity`` new tokens.

    The model must stay as the chains adapt it while the batch is used. Memory never holds all layers twice: the batch
    copies layer by layer, and a layer of the caches is freed at once if nothing else refers to it. To leave no other
    reference, pass ``give_up_caches``.

    at_once: the most tokens that come in one step.
    alone: True if tokens of one step are stored as if each came in a step of its own.
    """
    rows = list(caches)
    window = sliding_window(model.config)
    # a sliding window matters only if the text outgrows it
    windowed = window is not None and max(cache.seen for cache in rows) + capacity > window
    room = Room(tokens=capacity, at_once=at_once, alone=alone, windowed=windowed)
    chains = [cache.chain for cache in rows]
    evictors = [chain.evictor for chain in chains]
    lifted = lifts(model)
    rotaries: list[Rotary] = []
    if any(evictor is not None and evictor.rolled for evictor in evictors):
        rotaries = find_rotaries(model)
    columns = _queue_columns(model.config, rows)
    # a column has one layer's states of all rows
    state_columns = deque(zip(*(cache.states for cache in rows), strict=True))
    # from here on only the columns refer to the layers of the caches
    del rows
    layers: list[RowLayer] = []
    while columns:
        number, column = columns.popleft()
        # what the model gives concerns compressed layers, and a local layer has a number of another kind
        is_local = column[0].window is not None
        lift = lifted[number] if lifted and not is_local else None
        rotary = rotaries[number] if rotaries and not is_local else None
        stored_rows = [
            StoredRow(
                cache=cache,
                layer=number,
                masker=chain.masker(number),
                coder=chain.local_coder if is_local else chain.coder_at(number),
                evictor=evictor,
                lift=lift,
                rotary=rotary,
            )
            for cache, chain, evictor in zip(column, chains, evictors, strict=True)
        ]
        layers.append(RowLayer(stored_rows, room))
        # these are the last references to this layer of the caches
        del stored_rows, column
    state_layers: list[StateLayer] = []
    if state_columns:
        # each column is given up before the next layer is made
        state_layers = state_layers_of(model.config, layers, _give_up_columns(state_columns))
    return BatchLayers(layers, state_layers)


def _queue_columns(config: Any, caches: Sequence[PromptCache]) -> deque[tuple[int, tuple[LayerCache, ...]]]:
    """Return (number, column) of each layer with keys, in the model's order. A column has one layer of all caches.

    A compressed layer's number counts the layers that methods compress. A local layer's number counts all layers with
    keys.
    """
    columns = deque(enumerate(zip(*(cache.layers for cache in caches), strict=True)))
    local_columns = zip(*(cache.local for cache in caches), strict=True)
    # so far there are only compressed layers; local layers go to their places among all layers with keys
    local = local_layers(config)
    places = [place for place, index in enumerate(key_layers(config)) if index in local]
    for place, column in zip(places, local_columns, strict=True):
        columns.insert(place, (place, column))
    return columns


def _give_up_columns(columns: deque[tuple[LayerState, ...]]) -> Iterator[tuple[LayerState, ...]]:
    """Yield the columns in order, and remove each from the queue first, so that the caller alone refers to it."""
    while columns:
        yield columns.popleft()


def give_up_caches(caches: list[PromptCache]) -> Iterator[PromptCache]:
    """Yield the caches in order, and remove each from the list first, so that the caller alone refers to it."""
    while caches:
        yield caches.pop(0)


def find_rotaries(model: PreTrainedModel) -> list[Rotary]:
    """Return the rotation of keys of each compressed layer. Raises UsageError for a model without one, such as OPT."""
    rotaries = [Rotary(frequencies) for frequencies in layer_frequencies(model) if frequencies is not None]
    if len(rotaries) < len(compressed_layers(model.config)):
        family = model.config.model_type
        raise UsageError(f"positions=rolled needs rotary positions, and the family {family!r} has none that turn keys")
    return rotaries


def step(model: PreTrainedModel, batch: StepLayers, tokens: Tensor, positions: Tensor, whole: bool = False) -> Tensor:
    """Feed ``tokens`` [B, T] at ``positions`` [B, T] to all rows, and return the logits [B, 1, V] after the last token.

    With ``whole``, return the logits [B, T, V] after each token.
    """
    if indexer_reach(model.config) is not None:
        # the last place where a text can still be found too long, whoever feeds it
        check_capacity(model, int(positions.max()) + 1)
    logits_to_keep: Tensor | int = 1
    if whole:
        logits_to_keep = 0  # transformers reads 0 as all
    elif tokens.shape[1] > 1 and sharing_layers(model.config):
        # with a number here, layers that share keys would get only the last of the new tokens (Gemma 4)
        logits_to_keep = torch.tensor([tokens.shape[1] - 1], device=tokens.device)
    out = model(
        input_ids=tokens,
        position_ids=positions,
        use_cache=True,
        logits_to_keep=logits_to_keep,
        **model_cache(model.config, batch.in_order(model.config)),
    )
    return out.logits
