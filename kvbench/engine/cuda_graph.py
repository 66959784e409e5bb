"""A decode step as one graph: the same operations on the same memory, recorded once and then only replayed.

What a plain step spends in Python, and on a GPU on launching kernels one by one, is spent once. That needs rows whose
storage stands still but for the tail, which here is read whole with the slots that are not written yet masked out.
On a GPU the graph is CUDA's, which nobody has run yet; on a CPU the list of PyTorch's operations, run in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import PreTrainedModel

from kvbench.engine.decode_layer import RowLayer
from kvbench.engine.step import step
from kvbench.errors import KvbenchError
from kvbench.models.interface import KvbenchLayer
from kvbench.storage import kernels
from kvbench.storage.attend import attend
from kvbench.storage.row_segments import RowSegment

WARM_UP = 3


def moving(layer: RowLayer) -> str:
    """Why the steps of ``layer`` are not alike; '' if they are."""
    if layer.slots:
        return "it evicts while decoding"
    if any(g.coded is not None for g in layer.groups):
        return "it packs tokens or keeps latents while decoding"
    if any(g.masker is not None for g in layer.groups):
        return "it decides in each step what is attended"
    if any(s.shared is not None for g in layer.groups for s in g.segments):
        return "its heads share logits"
    if any(getattr(s, "positions", None) is not None for g in layer.groups for s in g.segments):
        return "the text outgrows the model's sliding window"
    return ""


class StillLayer(KvbenchLayer):
    """``layer``, whose next token goes to slot ``place`` [1] of its tail, wherever that is when the step runs."""

    def __init__(self, layer: RowLayer, place: Tensor) -> None:
        super().__init__()
        self.layer, self.place, self.seen = layer, place, layer.seen
        if layer.keys is not None and layer.values is not None:
            # a masked slot weighs nothing, which only a number stays that is one
            layer.keys[:, :, layer.used :] = 0
            layer.values[:, :, layer.used :] = 0

    def add(self, k: Tensor, v: Tensor) -> None:
        mine = self.layer
        if mine.keys is None:
            mine.keys, mine.values = (x.new_zeros(*x.shape[:2], mine.capacity, x.shape[3]) for x in (k, v))
        assert mine.values is not None
        mine.keys.index_copy_(2, self.place, k)
        mine.values.index_copy_(2, self.place, v)
        self.newest = (k, v)

    def attend(self, query: Tensor, scale: float, window: int | None) -> Tensor:
        mine = self.layer
        assert mine.keys is not None and mine.values is not None
        older = torch.arange(mine.capacity, device=query.device) < self.place

        def tail(k: Tensor, v: Tensor) -> RowSegment:
            # kernels step through lengths row by row
            length = self.place.to(torch.int32).repeat(len(k), 1)
            return RowSegment(k, v, older.expand(len(k), 1, -1), lengths=length)

        if len(mine.groups) == 1 and mine.groups[0].heads is None:
            # all rows in their order: nothing of the tail is copied
            return attend(query, [*mine.groups[0].segments, tail(mine.keys, mine.values)], self.newest, scale)
        out = torch.empty_like(query)
        for g in mine.groups:
            newest = (g.tail(self.newest[0]), g.tail(self.newest[1]))
            segments = [*g.segments, tail(g.tail(mine.keys), g.tail(mine.values))]
            g.put(out, attend(g.split(query), segments, newest, scale))
        return out


class Graph:
    """The steps of ``batch``, one new token a row. Raises KvbenchError for a batch whose steps are not alike.

    It is recorded here. The batch stays as plain steps would leave it, so that either can go on; its rows must stay.
    """

    def __init__(self, model: PreTrainedModel, batch: Sequence[RowLayer]) -> None:
        for i, layer in enumerate(batch):
            if why := moving(layer):
                raise KvbenchError(f"no graph of a decode step: layer {i}: {why}; step=plain runs it")
        devices = {layer.starts.device for layer in batch}
        if len(devices) > 1:
            raise KvbenchError("no graph of a decode step: layers are on several devices; step=plain runs it")
        (device,), rows = devices, len(batch[0].starts)
        if device.type == "cpu" and kernels.serves(device):
            raise KvbenchError(f"no graph of a decode step in Triton's interpreter: {kernels.SWITCH}=off does without")
        self.model, self.batch = model, batch
        self.tokens, self.positions = torch.zeros(2, rows, 1, dtype=torch.int64, device=device)
        self.place = torch.zeros(1, dtype=torch.int64, device=device)
        self.layers = [StillLayer(layer, self.place) for layer in batch]
        # a token that means nothing is in the next one's slot now: the first step writes over it
        self.place.fill_(batch[0].used)
        self.replay = recorded(lambda: step(self.model, self.layers, self.tokens, self.positions), device)

    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Feed ``tokens`` [B, 1] at ``positions`` [B, 1]; the logits [B, 1, V] are good until the next step."""
        self.tokens.copy_(tokens)
        self.positions.copy_(positions)
        self.place.fill_(self.batch[0].used)
        logits = self.replay()
        for layer in self.batch:
            layer.used, layer.new, layer.seen = layer.used + 1, 1, layer.seen + 1
        return logits


def recorded(run: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """What replays the operations of ``run`` on the memory they had; ``run`` may be run any number of times before."""
    if device.type != "cuda":
        run()
        return make_fx(run)()
    beside = torch.cuda.Stream(device)
    beside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(beside):
        for _ in range(WARM_UP):
            run()
    torch.cuda.current_stream(device).wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay
