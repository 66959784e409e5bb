"""Cache layers that hold a state (of a convolution or a recurrence) in place of keys, or beside keys.

transformers updates states in place. A layer therefore shares no tensor with the ``LayerState`` that it begins from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils

from kvbench.kv.model_shape import HOLD_STATES, KEYLESS, layer_types
from kvbench.kv.state import LayerState
from kvbench.models.interface import KvbenchLayer

# older releases have other classes; models that hold states are refused there
LinearAttentionLayer: Any = getattr(cache_utils, "LinearAttentionLayer", object)


class StateLayer(LinearAttentionLayer):  # type: ignore[misc]
    """A cache layer that holds a state for each of B rows.

    rows: the states with which the rows go on; () if a text begins.
    """

    def __init__(self, config: Any, rows: Sequence[LayerState] = ()) -> None:
        """Make a layer for models of ``config`` that goes on with copies of the states ``rows``."""
        # most families have one state a layer, and their config does not say so
        super().__init__(number_of_states=getattr(config, "number_of_conv_states", 1))
        if not rows:
            return
        # the keys number the layer's states: 0, 1, ...
        for i in self.conv_states:
            conv = [row.conv[i] for row in rows]
            recurrent = [row.recurrent[i] for row in rows]
            self._put(i, _join_rows(conv), _join_rows(recurrent))

    def _put(self, i: int, conv: Tensor | None, recurrent: Tensor | None) -> None:
        """Hold these tensors [B, ...] as state ``i``, so that the layer goes on with the texts that they result from.

        None stands for a state that the layer does not have.
        """
        self.conv_states[i], self.recurrent_states[i] = conv, recurrent
        self.is_conv_states_initialized[i] = conv is not None
        self.is_recurrent_states_initialized[i] = recurrent is not None
        # transformers then goes on from the state, as within a text
        self.has_previous_state[i] = True
        if conv is not None:
            self.conv_kernel_size[i] = conv.shape[-1]
            self.dtype, self.device = conv.dtype, conv.device

    def state(self, row: int = 0) -> LayerState:
        """Return a copy of one row's state."""
        index = torch.tensor([row])
        return LayerState(
            conv=tuple(_choose_rows(state, index) for state in self.conv_states.values()),
            recurrent=tuple(_choose_rows(state, index) for state in self.recurrent_states.values()),
        )

    def nbytes(self) -> int:
        """Return how many bytes the states of all rows take."""
        states = [*self.conv_states.values(), *self.recurrent_states.values()]
        return sum(state.nbytes for state in states if state is not None)

    def join(self, other: StateLayer) -> None:
        """Append the rows of ``other``, the same layer of another batch."""
        for i in self.conv_states:
            conv = _join_rows([self.conv_states[i], other.conv_states[i]])
            recurrent = _join_rows([self.recurrent_states[i], other.recurrent_states[i]])
            self._put(i, conv, recurrent)

    def keep(self, rows: Tensor) -> None:
        """Drop all rows except the indices ``rows``."""
        for i in self.conv_states:
            self._put(i, _choose_rows(self.conv_states[i], rows), _choose_rows(self.recurrent_states[i], rows))


class StateBesideKeys(StateLayer, KvbenchLayer):
    """A layer that holds a state and keys (Falcon H1). The keys are in a layer of their own, which methods compress.

    key_layer: the layer that holds the keys.
    """

    def __init__(self, keys: KvbenchLayer, config: Any, rows: Sequence[LayerState] = ()) -> None:
        """Make a layer from the layer of its keys, and from the states with which its rows go on."""
        StateLayer.__init__(self, config, rows)
        self.key_layer = keys

    def add(self, k: Tensor, v: Tensor) -> None:
        """Store keys and values in the layer of keys."""
        self.key_layer.add(k, v)

    def attend(self, query: Tensor, scale: float, window: int | None) -> Tensor:
        """Return the attention over the layer of keys."""
        return self.key_layer.attend(query, scale, window)

    @property
    def seen(self) -> int:  # type: ignore[override]
        """The number of tokens that the layer of keys has read."""
        return self.key_layer.seen


def state_layers_of(
    config: Any, with_keys: Sequence[KvbenchLayer], columns: Iterable[Sequence[LayerState]] | None = None
) -> list[StateLayer]:
    """Return new cache layers for the layers of a model that hold a state, in order.

    with_keys: the cache layers that hold keys, in order. A layer with a state and keys is joined with its keys' layer.
    columns: for each layer with a state, the states of all rows; None if texts begin. They are taken one by one, so
        that the caller can free each.
    """
    layers: list[StateLayer] = []
    # both iterators are advanced in the order of the model's layers
    key_layers = iter(with_keys)
    remaining_columns = iter(columns) if columns is not None else None
    for kind in layer_types(config):
        key_layer = next(key_layers) if kind not in KEYLESS else None
        if kind not in HOLD_STATES:
            continue
        rows: Sequence[LayerState] = ()
        if remaining_columns is not None:
            rows = next(remaining_columns)
        if key_layer is None:
            layers.append(StateLayer(config, rows))
        else:
            layers.append(StateBesideKeys(key_layer, config, rows))
    return layers


def in_model_order(config: Any, with_keys: Iterable[Any], with_states: Sequence[StateLayer]) -> list[Any]:
    """Return the layers with keys and those with states as one list, in the order in which transformers counts layers.

    with_keys: the cache layers that hold keys, in order.
    with_states: the result of ``state_layers_of``, in order.

    Layers without either get a placeholder.
    """
    kinds = layer_types(config)
    # only models with states or keyless layers need placeholders, which older releases of transformers lack
    if not with_states and not any(kind in KEYLESS for kind in kinds):
        return list(with_keys)
    layers: list[Any] = []
    key_layers, state_layers = iter(with_keys), iter(with_states)
    for kind in kinds:
        # an MLP alone holds nothing
        layer: Any = cache_utils.DummyLayer()
        if kind not in KEYLESS:
            layer = next(key_layers)
        if kind in HOLD_STATES:
            # if a layer holds both, the cache layer with the state passes keys on to the one with the keys
            layer = next(state_layers)
        layers.append(layer)
    return layers


def _join_rows(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Return the rows of all ``parts`` [b, ...] in one new tensor [B, ...]; None if the layer has no such state."""
    tensors = [part for part in parts if part is not None]
    if not tensors:
        return None
    return torch.cat(tensors)


def _choose_rows(state: Tensor | None, rows: Tensor) -> Tensor | None:
    """Return a copy of the rows with the indices ``rows`` of a state [B, ...]; None if the layer has no such state."""
    if state is None:
        return None
    return state.index_select(0, rows.to(state.device))
