"""A decode step as one graph: the same operations on the same memory, recorded once and then only replayed.

The cost of Python, and on a GPU of launching kernels one by one, is paid once. This needs rows whose storage does not
move. Only their tail grows. Each step reads the tail's whole room and masks the slots that are not written yet.
On a GPU the graph is CUDA's, which nobody has run yet. On a CPU it is the list of PyTorch's operations, run in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import PreTrainedModel

from kvbench.base.errors import KvbenchError, headline
from kvbench.engine.decode_layer import RowLayer
from kvbench.engine.memory import is_out_of_memory
from kvbench.engine.step import step
from kvbench.models.interface import KvbenchLayer
from kvbench.storage import kernels
from kvbench.storage.attend import attend
from kvbench.storage.exact_rows import ExactGroup, ExactRows
from kvbench.storage.row_segments import RowSegment

WARM_UP = 3  # PyTorch and its libraries allocate in the first runs, which must not be recorded


class StillLayer(KvbenchLayer):
    """A layer whose next token goes to slot ``place`` [1] of its tail.

    The place is a tensor, as a replayed step reads its number anew. Raises KvbenchError if the layer's steps are not
    alike.
    """

    def __init__(self, layer: RowLayer, place: Tensor) -> None:
        super().__init__()
        for _, stored in layer.formats:
            if stored.moves or not isinstance(stored, ExactRows):
                raise KvbenchError(stored.moves or "its storage changes")
            self.rows = stored
        self.layer, self.place, self.seen = layer, place, layer.seen
        if self.rows.keys is not None and self.rows.values is not None:
            # a masked slot has weight 0, and 0 times NaN or inf of uninitialised memory would be NaN
            self.rows.keys[:, :, layer.used :] = 0
            self.rows.values[:, :, layer.used :] = 0

    def add(self, k: Tensor, v: Tensor) -> None:
        # the room is allocated by the first token; unwritten slots must be finite here, too
        if self.rows.keys is None:
            for tail in self.rows.room(k, v):
                tail.zero_()
        key_tail, value_tail = self.rows.room(k, v)
        key_tail.index_copy_(2, self.place, k)
        value_tail.index_copy_(2, self.place, v)
        self.newest = (k, v)

    def attend(self, query: Tensor, scale: float, window: int | None) -> Tensor:
        newest_k, newest_v = self.newest
        keys, values = self.rows.room(newest_k, newest_v)
        # [slots]: the tail's older tokens; the newest is attended apart
        older = torch.arange(keys.shape[2], device=query.device) < self.place

        def attend_group(group: ExactGroup, query: Tensor) -> Tensor:
            k, v = group.entries.tokens(keys), group.entries.tokens(values)
            new_tokens = (group.entries.tokens(newest_k), group.entries.tokens(newest_v))
            # kernels step through lengths row by row
            length = self.place.to(torch.int32).repeat(len(k), 1)
            tail = RowSegment(k, v, older.expand(len(k), 1, -1), lengths=length)
            segments = list(group.segments)
            segments.append(tail)
            out, _ = attend(query, segments, new_tokens, scale)
            return out

        return self.rows.in_groups(query, attend_group)

    def grow(self, tokens: int) -> None:
        """Count tokens that a replayed step has written."""
        self.layer.grow(tokens)
        self.rows.grow(tokens)


class Graph:
    """The steps of ``batch``, one new token a row. Raises KvbenchError if the steps of the batch are not alike.

    A step is recorded when the graph is made. The batch stays as plain steps would leave it, so that plain or replayed
    steps can go on. No row may enter or leave the batch.
    """

    def __init__(self, model: PreTrainedModel, batch: Sequence[RowLayer]) -> None:
        self.place = torch.zeros(1, dtype=torch.int64, device=batch[0].next.device)
        self.layers = []
        for i, layer in enumerate(batch):
            try:
                self.layers.append(StillLayer(layer, self.place))
            except KvbenchError as why:
                raise KvbenchError(f"no graph of a decode step: layer {i}: {why}; step=plain runs it") from None
        devices = {layer.next.device for layer in batch}
        if len(devices) > 1:
            raise KvbenchError("no graph of a decode step: layers are on several devices; step=plain runs it")
        (device,) = devices
        if device.type == "cpu" and kernels.serves(device):
            raise KvbenchError(f"no graph of a decode step in Triton's interpreter: {kernels.SWITCH}=off does without")
        self.model, self.batch = model, batch
        # [B, 1] each: a replayed step reads its input from this memory
        rows = len(batch[0].next)
        self.tokens, self.positions = torch.zeros(2, rows, 1, dtype=torch.int64, device=device)
        # recording writes a meaningless token into the next one's slot; the first step overwrites it
        self.place.fill_(batch[0].used)

        def run_step() -> Tensor:
            return step(self.model, self.layers, self.tokens, self.positions)

        try:
            self.replay = recorded(run_step, device)
        except RuntimeError as error:  # PyTorch raises it while it records
            if is_out_of_memory(error):
                raise
            reason = f"the model's own code cannot be recorded ({headline(error)})"
            raise KvbenchError(f"no graph of a decode step: {reason}; step=plain runs it") from error

    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Feed ``tokens`` [B, 1] at ``positions`` [B, 1]. Return logits [B, 1, V], valid until the next step."""
        self.tokens.copy_(tokens)
        self.positions.copy_(positions)
        self.place.fill_(self.batch[0].used)
        logits = self.replay()
        for layer in self.layers:
            layer.grow(1)
        return logits


def recorded(run: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """Record the operations of ``run`` and return a function that replays them on the same memory.

    ``run`` may be run any number of times before.
    """
    if device.type != "cuda":
        run()
        return make_fx(run)()
    # PyTorch's recipe: warm up on a stream of its own, then capture
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
