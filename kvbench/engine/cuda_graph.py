"""A decode step as one graph: the same operations on the same memory, recorded once and then only replayed.

Recording pays the cost of Python once, and on a GPU also the cost of launching kernels one by one. It needs rows whose
storage does not move: only their tail grows. Each step reads the tail's whole room and masks the unwritten slots. On a
GPU the graph is CUDA's. On a CPU the graph is the list of PyTorch's operations in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import PreTrainedModel

from kvbench.base.errors import KvbenchError, headline
from kvbench.engine.decode_layer import RowLayer
from kvbench.engine.memory import is_out_of_memory
from kvbench.engine.step import BatchLayers, step
from kvbench.models.interface import KvbenchLayer
from kvbench.storage import kernels
from kvbench.storage.attend import attend
from kvbench.storage.exact_rows import ExactGroup, ExactRows
from kvbench.storage.row_segments import RowSegment

WARM_UP = 3  # the first runs let PyTorch and its libraries allocate, and allocations must not be recorded


class StillLayer(KvbenchLayer):
    """A layer of a decode batch as a graph runs it: the next token always goes to slot ``place`` [1] of the tail.

    ``place`` is a tensor, so that a replayed step reads its current number. Raises KvbenchError if the layer's steps
    are not alike.

    layer: the layer of the batch.
    rows: the storage of all its rows.
    newest: the key and value [B, Hk, 1, D] of the newest token.
    """

    def __init__(self, layer: RowLayer, place: Tensor) -> None:
        super().__init__()
        # in a batch that no other has joined, all unmasked exact rows are in one storage: the loop sets ``rows`` once
        for _, stored in layer.formats:
            if stored.moves or not isinstance(stored, ExactRows):
                raise KvbenchError(stored.moves or "its storage changes")
            self.rows = stored
        self.layer, self.place, self.seen = layer, place, layer.seen
        if self.rows.keys is not None and self.rows.values is not None:
            # a masked slot has weight 0, but 0 times NaN or inf of uninitialised memory would be NaN
            self.rows.keys[:, :, layer.used :] = 0
            self.rows.values[:, :, layer.used :] = 0

    def add(self, k: Tensor, v: Tensor) -> None:
        """Write the newest token of each row into slot ``place`` of the tail."""
        # the first token allocates the room, and unwritten slots must be finite here as well
        if self.rows.keys is None:
            for tail in self.rows.room(k, v):
                tail.zero_()
        key_tail, value_tail = self.rows.room(k, v)
        key_tail.index_copy_(2, self.place, k)
        value_tail.index_copy_(2, self.place, v)
        self.newest = (k, v)

    def attend(self, query: Tensor, scale: float, window: int | None) -> Tensor:
        """Return the attention [B, Hq, 1, D] of the newest token over segments, the tail's older tokens, and itself."""
        newest_k, newest_v = self.newest
        keys, values = self.rows.room(newest_k, newest_v)
        # older [slots] marks the tail's older tokens, because the newest token is attended apart
        older = torch.arange(keys.shape[2], device=query.device) < self.place

        def attend_group(group: ExactGroup, query: Tensor) -> Tensor:
            """Return the attention of a group's queries over its segments, the tail's older tokens, and the newest."""
            k, v = group.entries.select_tokens(keys), group.entries.select_tokens(values)
            new_tokens = (group.entries.select_tokens(newest_k), group.entries.select_tokens(newest_v))
            # kernels step through lengths row by row, so each row gets its own number
            length = self.place.to(torch.int32).repeat(len(k), 1)
            tail = RowSegment(k, v, valid=older.expand(len(k), 1, -1), lengths=length)
            segments = list(group.segments)
            segments.append(tail)
            out, _ = attend(query, segments, new_tokens, group.entries.select_scale(scale))
            return out

        return self.rows.attend_by_group(query, attend_group)

    def grow(self, tokens: int) -> None:
        """Count ``tokens`` tokens, which a replayed step has written: a replay runs no Python and counts nothing."""
        self.layer.grow(tokens)
        self.rows.grow(tokens)


class Graph:
    """A recorded decode step of ``batch``, which adds one new token to each row, and can be replayed.

    Making the graph records the step. The batch stays as it was, so that plain or replayed steps can follow. No row may
    enter or leave the batch afterwards. Raises KvbenchError if the batch's steps are not alike.

    place: [1], the slot of the tail that the next token takes.
    layers: the layers of the batch, as the graph runs them.
    tokens, positions: [B, 1], the memory from which a replay reads its input.
    replay: the function that replays the step and returns its logits.
    """

    def __init__(self, model: PreTrainedModel, batch: BatchLayers) -> None:
        self.place = torch.zeros(1, dtype=torch.int64, device=batch.with_keys[0].next.device)
        if batch.with_states:
            raise KvbenchError("no graph of a decode step: layers hold states, which move; step=plain runs it")
        # only some families, such as Llama 4, have this setting
        if getattr(model.config, "attn_temperature_tuning", False):
            raise KvbenchError("no graph of a decode step: queries are scaled by their position; step=plain runs it")
        self.layers: list[StillLayer] = []
        for i, layer in enumerate(batch.with_keys):
            try:
                self.layers.append(StillLayer(layer, self.place))
            except KvbenchError as why:
                raise KvbenchError(f"no graph of a decode step: layer {i}: {why}; step=plain runs it") from None
        device = _find_device(batch.with_keys)
        self.model, self.batch = model, batch
        # a replayed step reads its input from this memory, [B, 1] each
        rows = len(batch.with_keys[0].next)
        self.tokens, self.positions = torch.zeros(2, rows, 1, dtype=torch.int64, device=device)
        # recording writes a meaningless token into the next token's slot, and the first step overwrites it
        self.place.fill_(batch.used)

        # a function without arguments, because make_fx counts the ``self`` of a method as an argument
        def run_step() -> Tensor:
            return step(self.model, self, self.tokens, self.positions)

        try:
            self.replay = record_operations(run_step, device)
        except RuntimeError as error:  # PyTorch raises this error while recording
            if is_out_of_memory(error):
                raise
            reason = f"the model's own code cannot be recorded ({headline(error)})"
            raise KvbenchError(f"no graph of a decode step: {reason}; step=plain runs it") from error

    def in_order(self, config: Any) -> list[StillLayer]:
        """Return all layers in the model's order. None of them holds a state."""
        return self.layers

    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Feed ``tokens`` [B, 1] at ``positions`` [B, 1]. Return logits [B, 1, V], valid until the next step."""
        self.tokens.copy_(tokens)
        self.positions.copy_(positions)
        self.place.fill_(self.batch.used)
        logits = self.replay()
        for layer in self.layers:
            layer.grow(1)
        return logits


def _find_device(layers: Sequence[RowLayer]) -> torch.device:
    """Return the device of all layers. Raises KvbenchError unless a graph of their steps can be recorded there."""
    devices = {layer.next.device for layer in layers}
    if len(devices) > 1:
        raise KvbenchError("no graph of a decode step: layers are on several devices; step=plain runs it")
    (device,) = devices
    if device.type == "cpu" and kernels.serves(device):
        raise KvbenchError(f"no graph of a decode step in Triton's interpreter: {kernels.SWITCH}=off does without")
    return device


def record_operations(run: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """Record the operations of ``run``, and return a function that replays them on the same memory.

    The returned function returns the result of ``run``, on a GPU always in the same tensor. ``run`` may be called
    several times before it is recorded.
    """
    if device.type != "cuda":
        run()
        return make_fx(run)()
    # PyTorch recommends to warm up on a separate stream and then capture
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            run()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay
