"""Build layers of any shape from random numbers and compress them by the real stages, without a model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from kvbench.audit.accounting import HALF, HeldBytes, bytes_held, declare_local_layers
from kvbench.audit.pages import pages_freed
from kvbench.audit.prompt_audit import (
    check_positions,
    check_storages,
    declare_blocks,
    overhead_formula,
    payload_formula,
)
from kvbench.engine.layer_by_layer import CompressedLayers
from kvbench.kv import ops
from kvbench.kv.model_shape import Shape
from kvbench.kv.observation import Observation
from kvbench.kv.pages import PagesFreed
from kvbench.kv.segment import LayerCache
from kvbench.methods.core.chain import Chain

SCORED_QUERIES = 512
"""The most queries whose attention rows are assumed to be in memory at once: ``window_sums`` goes block by block."""
FP32_BYTES = 4


@dataclass(frozen=True)
class MeasuredLayers:
    """The bytes held over all layers, and the bytes by formula for the tokens kept.

    held: the bytes held.
    payload_formula: the bytes of keys and values by formula, in the number type that was built.
    overhead_formula: the bytes of everything beside them by formula, in the same number type.
    tokens: tokens per stored head, on average over the layers that methods compress.
    made: how many layers were built. Each other layer is counted as a built layer that promises the same bytes.
    total16: the bytes by formula at 16 bits.
    pages_freed: the shares of the prompt's pages that an engine could give back.
    """

    held: HeldBytes
    payload_formula: int
    overhead_formula: int
    tokens: float
    made: int
    total16: int
    pages_freed: PagesFreed

    @property
    def off(self) -> int:
        """The number of bytes held beyond the formulas. It is negative if fewer are held."""
        return self.held.total - self.payload_formula - self.overhead_formula

    @property
    def agrees(self) -> bool:
        """True if payload and overhead each equal their formula."""
        return (self.held.payload, self.held.overhead) == (self.payload_formula, self.overhead_formula)


def draw_layer(
    chain: Chain, shape: Shape, n: int, dtype: torch.dtype, index: int = 0, device: torch.device | None = None
) -> tuple[Observation, LayerCache]:
    """Return (observation, cache) of layer ``index`` after a prompt of n tokens, with normal random keys and values.

    The observation holds random statistics, but only the statistics that the chain needs.
    """
    rows = chain.tokens_read(n, index, shape.layers)
    positions = None
    if rows < n:
        # a layer that reads fewer tokens is given the last ones; bytes do not depend on the choice
        positions = torch.arange(n - rows, n, device=device)
    observation = _draw_observation(
        chain, shape, n, rows=rows, positions=positions, dtype=dtype, index=index, device=device
    )
    shared_k, shared_v = _draw_keys_and_values(shape.kv_heads, rows, shape.head_dim, shape.value_dim, dtype)
    # every layer gets the same numbers, but no two layers of a cache may share a storage
    k, v = shared_k.to(device, copy=True), shared_v.to(device, copy=True)
    heads = chain.heads(shape.kv_heads, shape.query_heads)
    cache = ops.dense(k, v, heads=heads, query_heads=shape.query_heads, positions=positions, length=n)
    return observation, cache


def _draw_observation(
    chain: Chain,
    shape: Shape,
    n: int,
    *,
    rows: int,
    positions: torch.Tensor | None,
    dtype: torch.dtype,
    index: int,
    device: torch.device | None,
) -> Observation:
    """Return an observation of layer ``index`` with random statistics, but only those that the chain needs.

    n: the prompt's tokens.
    rows: how many of them the layer reads.
    positions: the positions of the tokens read; None if the layer reads all.
    """
    generator = torch.Generator().manual_seed(index)
    needs = chain.needs(n)
    head_dim = shape.head_dim

    def draw_normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(device, dtype)

    def draw_attention_sums() -> torch.Tensor:
        """Return a random number in [0, 1) for each query head and token: the attention that the token got."""
        return torch.rand(shape.query_heads, rows, generator=generator).to(device)

    # one generator serves all draws, so their order is part of the result
    last_queries, first_queries, column_sums, hidden = None, None, None, None
    if needs.last_q:
        last_queries = draw_normal(shape.query_heads, min(needs.last_q, rows), head_dim)
    if needs.first_q:
        first_queries = draw_normal(shape.query_heads, min(needs.first_q, rows), head_dim)
    if needs.colsums:
        column_sums = draw_attention_sums()
    quantised_sums = {bits: draw_attention_sums() for bits in needs.colsums_bits}
    if needs.hidden:
        hidden = draw_normal(rows, shape.query_heads * head_dim)
    return Observation(
        layer=index,
        n_layers=shape.layers,
        n=rows,
        scale=1 / math.sqrt(head_dim),
        # a run has the checksum of a prompt's tokens here, and a timing has no tokens
        prompt=index,
        last_q=last_queries,
        first_q=first_queries,
        colsums=column_sums,
        colsums_q=quantised_sums,
        hidden=hidden,
        # rotary frequencies theta_i = 10000^(-2i / d), as in Llama 2
        inv_freq=1e4 ** (-torch.arange(0, head_dim, 2, device=device) / head_dim),
        length=n,
        positions=positions,
    )


# drawing takes longer than copying, and the layers of a benchmark have one size
@lru_cache(maxsize=1)
def _draw_keys_and_values(
    heads: int, n: int, key_dim: int, value_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random keys [heads, n, key_dim] and values [heads, n, value_dim]. Callers must not change them.

    They are the same for every layer of one size.
    """
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(heads, n, key_dim, generator=generator).to(dtype)
    v = torch.randn(heads, n, value_dim, generator=generator).to(dtype)
    return k, v


def build_layers(chain: Chain, shape: Shape, n: int, dtype: torch.dtype) -> list[LayerCache]:
    """Return the cache of every layer of a model under the chain, built from random numbers."""
    layers = CompressedLayers(chain)
    for i in range(shape.layers):
        observation, dense = draw_layer(chain, shape, n, dtype=dtype, index=i)
        layers.add_layer(dense, observation)
    if chain.replayer is not None:
        # a replayer chooses by the attention of a second pass over the prompt: [query heads, n] for each layer
        attention_sums = None
        if chain.replayer.replay(n):
            generator = torch.Generator().manual_seed(1)
            attention_sums = [torch.rand(shape.query_heads, n, generator=generator) for _ in range(shape.layers)]
        layers.finish_replay(attention_sums)
    return layers.caches


def compress_layers(chain: Chain, shape: Shape, n: int, dtype: torch.dtype) -> list[tuple[int, LayerCache, int]]:
    """Build and compress one layer of each kind. Return (its number, its cache, how many layers are of its kind).

    Layers are of one kind if they must keep equally many tokens and read equally many. They must also have the same
    leading heads, and store equally many bytes for a token. If the chain divides one budget over all layers, every
    layer is built.
    """
    if chain.rebalancer is not None:
        # every layer's choice depends on all others, so no layer can stand for another
        return [(i, layer, 1) for i, layer in enumerate(build_layers(chain, shape, n, dtype))]
    heads = chain.heads(shape.kv_heads, shape.query_heads)
    layers_by_kind: dict[object, list[int]] = {}
    for i in range(shape.layers):
        kind = (
            chain.expected(n, i, shape.layers, heads),
            chain.tokens_read(n, i, shape.layers),
            chain.leading_heads(n, i, shape.layers, query_heads=shape.query_heads, kv_heads=shape.kv_heads),
            chain.first_alike(i),
        )
        layers_by_kind.setdefault(kind, []).append(i)
    built = []
    for members in layers_by_kind.values():
        first = members[0]
        observation, dense = draw_layer(chain, shape, n, dtype=dtype, index=first)
        built.append((first, chain.compress(dense, observation), len(members)))
        # free its memory before the next layer is drawn
        del dense
    return built


def measure_bytes(chain: Chain, shape: Shape, n: int, dtype: torch.dtype) -> MeasuredLayers:
    """Return the bytes of real caches and of the formulas. Raises Refused for unsound positions or storages."""
    itemsize = dtype.itemsize
    layers = compress_layers(chain, shape, n, dtype)
    heads = chain.heads(shape.kv_heads, shape.query_heads)
    held = HeldBytes()
    payload, overhead, tokens, total16 = 0, 0, 0, 0
    # collect storages over all layers, since a storage that two layers share would be counted twice
    storages: set[int] = set()
    for i, layer, alike in layers:
        tokens_by_head = check_positions(chain.name, layer, i, n=n, heads=heads)
        check_storages(chain.name, layer, i, storages)
        # the layer counts for all layers of its kind
        held += bytes_held(layer).times(alike)
        tokens += alike * sum(tokens_by_head)
        layer_payload, layer_overhead = _apply_formulas(chain, shape, n, i, layer, tokens_by_head, itemsize)
        payload += alike * layer_payload
        overhead += alike * layer_overhead
        total16 += alike * sum(_apply_formulas(chain, shape, n, i, layer, tokens_by_head, HALF))
    if shape.local_layers:
        # layers with a sliding window: formats alone code them
        local_kv_heads, local_head_dim = shape.local_heads
        k, v = _draw_keys_and_values(local_kv_heads, n, local_head_dim, local_head_dim, dtype)
        local = chain.store_local(ops.local(k, v, shape.window, shape.query_heads))
        held += bytes_held(local).times(shape.local_layers)
        local_payload, local_overhead = declare_local_layers(chain, shape, n, itemsize)
        payload += local_payload
        overhead += local_overhead
        total16 += sum(declare_local_layers(chain, shape, n, HALF))
    # states are counted as the formula counts them: no method changes them
    state_bytes = shape.state_bytes(itemsize)
    held += HeldBytes(exact=state_bytes)
    payload += state_bytes
    total16 += shape.state_bytes(HALF)
    return MeasuredLayers(
        held=held,
        payload_formula=payload,
        overhead_formula=overhead,
        tokens=tokens / (heads * shape.layers),
        made=len(layers),
        total16=total16,
        pages_freed=pages_freed([layer for _, layer, _ in layers], n, [alike for _, _, alike in layers]),
    )


def _apply_formulas(
    chain: Chain, shape: Shape, n: int, index: int, layer: LayerCache, tokens_by_head: list[int], itemsize: int
) -> tuple[int, int]:
    """Return the bytes of payload and of overhead that layer ``index`` should hold for the tokens that it kept.

    tokens_by_head: the number of tokens kept in each stored head.
    itemsize: the bytes of one exact number.
    """
    blocks = declare_blocks(chain, tokens_by_head, shape.cache_shape(itemsize), index)
    # the prompt's last queries, which a chain that chooses again while decoding stores beside the cache
    observed = chain.observed_bytes(n, shape.query_heads, shape.head_dim, itemsize)
    return payload_formula(layer, blocks), overhead_formula(layer, blocks) + observed


def estimate_working_bytes(chain: Chain, shape: Shape, n: int, itemsize: int) -> int:
    """Estimate the most bytes in use at once while layers of n tokens are built and compressed.

    itemsize: the bytes of one number of keys and values.
    """
    heads = chain.heads(shape.kv_heads, shape.query_heads)
    # keys and values, each also as an fp32 copy
    keys_and_values = shape.kv_heads * n * shape.token_numbers * (itemsize + FP32_BYTES)
    # four more fp32 tensors of all stored heads while a stage works
    scratch_of_stage = 4 * heads * n * shape.head_dim * FP32_BYTES
    # three fp32 tensors [query heads, last queries, n]: scores, their softmax and one more copy
    scored_queries = min(chain.needs(n).last_q, SCORED_QUERIES)
    scores = 3 * FP32_BYTES * shape.query_heads * n * scored_queries
    other_layers = 0
    if chain.rebalancer is not None:
        # all layers are built before the budget is divided
        other_layers = shape.full_bytes(n, itemsize, heads)
    return keys_and_values + scratch_of_stage + scores + other_layers
