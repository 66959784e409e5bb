"""Build layers of any shape from random numbers and compress them by the real stages, without a model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from kvbench.audit.accounting import HALF, HeldBytes, bytes_held
from kvbench.audit.prompt_audit import check_positions, check_storages, overhead_formula, payload_formula
from kvbench.engine.layer_by_layer import CompressedLayers
from kvbench.kv import ops
from kvbench.kv.model_shape import Shape
from kvbench.kv.observation import Observation
from kvbench.kv.segment import LayerCache
from kvbench.methods.core.chain import Chain


@dataclass(frozen=True)
class MeasuredLayers:
    """The bytes held over all layers, and those of the formulas for the tokens kept.

    tokens: tokens per stored head, on average, of the layers that methods compress.
    made: how many layers were built. Each other layer promises the same as one of them and counts as that one.
    total16: the bytes by formula at 16 bits.
    """

    held: HeldBytes
    payload_formula: int
    overhead_formula: int
    tokens: float
    made: int
    total16: int

    @property
    def off(self) -> int:
        """Return how many bytes are held beyond the formulas."""
        return self.held.total - self.payload_formula - self.overhead_formula

    @property
    def agrees(self) -> bool:
        return (self.held.payload, self.held.overhead) == (self.payload_formula, self.overhead_formula)


def random_layer(
    chain: Chain, shape: Shape, n: int, dtype: torch.dtype, index: int = 0, device: torch.device | None = None
) -> tuple[Observation, LayerCache]:
    """Return (observation, cache) of one layer: of a prompt of n tokens, with normal random keys and values."""
    g = torch.Generator().manual_seed(index)
    needs = chain.needs(n)
    length = n
    n = chain.tokens_read(length, index, shape.layers)
    # a layer that reads fewer tokens reads the last ones: which do not matter here
    positions = None if n == length else torch.arange(length - n, length, device=device)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=g).to(device, dtype)

    def received() -> torch.Tensor:
        return torch.rand(shape.query_heads, n, generator=g).to(device)

    d = shape.head_dim
    obs = Observation(
        layer=index,
        n_layers=shape.layers,
        n=n,
        scale=1 / math.sqrt(d),
        prompt=index,
        last_q=normal(shape.query_heads, min(needs.last_q, n), d) if needs.last_q else None,
        first_q=normal(shape.query_heads, min(needs.first_q, n), d) if needs.first_q else None,
        colsums=received() if needs.colsums else None,
        colsums_q={bits: received() for bits in needs.colsums_bits},
        hidden=normal(n, shape.query_heads * d) if needs.hidden else None,
        inv_freq=1e4 ** (-torch.arange(0, d, 2, device=device) / d),
        length=length,
        positions=positions,
    )
    k, v = (t.to(device, copy=True) for t in _dense(shape.kv_heads, n, d, dtype))
    heads = chain.heads(shape.kv_heads, shape.query_heads)
    return obs, ops.dense(k, v, heads=heads, query_heads=shape.query_heads, positions=positions, length=length)


@lru_cache(maxsize=1)
def _dense(heads: int, n: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values [heads, n, head_dim], the same for every layer, to be copied."""
    g = torch.Generator().manual_seed(0)
    k, v = (torch.randn(heads, n, head_dim, generator=g).to(dtype) for _ in range(2))
    return k, v


def all_layers(chain: Chain, shape: Shape, n: int, dtype: torch.dtype) -> list[LayerCache]:
    """Return the cache of every layer of a model under the chain, from random numbers."""
    layers = CompressedLayers(chain)
    for i in range(shape.layers):
        obs, dense = random_layer(chain, shape, n, dtype, i)
        layers.add(dense, obs)
    if chain.replayer is not None:
        g = torch.Generator().manual_seed(1)
        received = [torch.rand(shape.query_heads, n, generator=g) for _ in range(shape.layers)]
        layers.replayed(received if chain.replayer.replay(n) else None)
    return layers.caches


def compressed(chain: Chain, shape: Shape, n: int, dtype: torch.dtype) -> list[tuple[int, LayerCache, int]]:
    """Return (number, cache) of one layer of each kind, with how many of the model's layers are of that kind.

    Layers are of one kind if they must keep the same tokens, read as many and have the same leading heads. If the
    chain divides one budget over all layers, every layer is built.
    """
    if chain.rebalancer is not None:
        return [(i, layer, 1) for i, layer in enumerate(all_layers(chain, shape, n, dtype))]
    heads = chain.heads(shape.kv_heads, shape.query_heads)
    layers_of_kind: dict[object, list[int]] = {}
    for i in range(shape.layers):
        leading = chain.leading_heads(n, i, shape.layers, shape.query_heads, shape.kv_heads)
        rows = chain.tokens_read(n, i, shape.layers)
        kind = chain.expected(n, i, shape.layers, heads), rows, leading, chain.first_alike(i)
        layers_of_kind.setdefault(kind, []).append(i)
    built = []
    for members in layers_of_kind.values():
        obs, dense = random_layer(chain, shape, n, dtype, members[0])
        built.append((members[0], chain.compress(dense, obs), len(members)))
        del dense  # its memory is free before the next layer is drawn
    return built


def measure(chain: Chain, shape: Shape, n: int, dtype: torch.dtype) -> MeasuredLayers:
    """Return the bytes of real caches and of the formulas. Raises Refused for unsound positions or storages."""
    layers = compressed(chain, shape, n, dtype)
    heads = chain.heads(shape.kv_heads, shape.query_heads)
    total = HeldBytes()
    payload, overhead, tokens, total16 = 0, 0, 0, 0
    storages: set[int] = set()
    for i, layer, count in layers:
        counts = check_positions(chain.name, layer, i, n, heads)
        check_storages(chain.name, layer, i, storages)
        blocks = [chain.layout(k, shape.head_dim, dtype.itemsize, i) for k in counts]
        total += bytes_held(layer).times(count)
        payload += count * payload_formula(layer, blocks)
        observed = chain.observed_bytes(n, shape.query_heads, shape.head_dim, dtype.itemsize)
        overhead += count * (overhead_formula(layer, blocks) + observed)
        blocks = [chain.layout(k, shape.head_dim, HALF, i) for k in counts]
        observed = chain.observed_bytes(n, shape.query_heads, shape.head_dim, HALF)
        total16 += count * (payload_formula(layer, blocks) + overhead_formula(layer, blocks) + observed)
        tokens += count * sum(counts)
    if shape.local_layers:
        local = ops.local(*_dense(shape.kv_heads, n, shape.head_dim, dtype), shape.window, shape.query_heads)
        total += bytes_held(local).times(shape.local_layers)
        payload += shape.local_bytes(n, dtype.itemsize)
        overhead += shape.local_overhead(n)
        total16 += shape.local_bytes(n, HALF) + shape.local_overhead(n)
    return MeasuredLayers(
        held=total,
        payload_formula=payload,
        overhead_formula=overhead,
        tokens=tokens / (heads * shape.layers),
        made=len(layers),
        total16=total16,
    )


def working_bytes(chain: Chain, shape: Shape, n: int, itemsize: int) -> int:
    """Estimate the bytes that building a layer takes: keys, values, fp32 copies, scores of queries, and results."""
    heads, d = chain.heads(shape.kv_heads, shape.query_heads), shape.head_dim
    dense = 2 * shape.kv_heads * n * d * (itemsize + 4) + 4 * heads * n * d * 4
    rows = 3 * 4 * shape.query_heads * n * min(chain.needs(n).last_q, 512)
    stored = shape.full_bytes(n, itemsize, heads) if chain.rebalancer is not None else 0
    return dense + rows + stored
