"""Audit the bytes and tokens of a cache against those that its chain declares. A cache that fails is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvbench.audit.accounting import HALF, overhead_bytes
from kvbench.base.errors import Refused as Refused
from kvbench.kv.model_shape import POSITION_BYTES
from kvbench.kv.ops import key_heads
from kvbench.kv.segment import LayerCache, storage_bytes
from kvbench.methods.core.base import Block
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.prompt_cache import Cache


@dataclass(frozen=True)
class MeasuredBytes:
    """The measurements of one audited cache; bytes are those of storages.

    full_bytes: the bytes of the prompt's full cache.
    kept: the mean number of tokens held, over heads and the layers that methods compress; bytes are of all layers.
    nominal: the budget that the user gave, in tokens; None for a method without one.
    payload_kv_head, payload_query_head: the payload under both kinds of ``per``. It is measured for the heads stored;
    for the other kind it is the mean bytes of a stored head times the heads of that kind. Latents count alike in both.
    payload16, overhead16, full16: the bytes that the same tokens take at 16 bits, by formula.
    """

    n: int
    kept: float
    nominal: int | None
    payload: int
    overhead: int
    full_bytes: int
    payload_kv_head: int
    payload_query_head: int
    payload16: int
    overhead16: int
    full16: int


def audit(cache: Cache, kv_heads: int, head_dim: int, dtype: torch.dtype) -> MeasuredBytes:
    """Return the measurements of a freshly compressed cache. Raises Refused where it breaks its chain's promises.

    The audit checks for each layer and head the tokens kept (against those recorded, if the data decide), their
    positions, the payload and overhead bytes against the formula, and that every tensor owns its storage. It also
    refuses a cache that differed from the prompt when it was compressed (see cache.content).
    """
    chain, n, n_layers, itemsize = cache.chain, cache.prompt_tokens, len(cache.layers), dtype.itemsize
    tokens = payload = overhead = payload16 = overhead16 = head_count = query_heads = 0
    storages: set[int] = set()
    for i, layer in enumerate(cache.layers):
        heads = chain.heads(kv_heads, layer.query_heads)
        counts = check_positions(chain.name, layer, i, n, heads)
        _check_counts(chain, layer, i, n, n_layers, counts)
        check_storages(chain.name, layer, i, storages)
        check_sharing(chain, layer, i, n_layers, kv_heads, heads)
        # the bytes behind keys and values, and all others, against the formula for as many tokens
        payload_held = storage_bytes(t for s in layer.segments for t in s.payload())
        overhead_held = layer.nbytes() - payload_held
        blocks = _blocks(chain, counts, head_dim, itemsize, i)
        if payload_held != payload_formula(layer, blocks):
            raise Refused(
                f"{chain.name}: layer {i} holds {payload_held} payload bytes for {_list(counts)} tokens per head, "
                f"the formula says {payload_formula(layer, blocks):g}"
            )
        declared_overhead = overhead_formula(layer, blocks) + chain.observed_bytes(
            n, layer.query_heads, head_dim, itemsize
        )
        if overhead_held != declared_overhead:
            raise Refused(f"{chain.name}: layer {i} holds {overhead_held} overhead bytes, declared {declared_overhead}")
        # the same tokens at 16 bits
        blocks16 = _blocks(chain, counts, head_dim, HALF, i)
        payload16 += payload_formula(layer, blocks16)
        overhead16 += overhead_formula(layer, blocks16) + chain.observed_bytes(n, layer.query_heads, head_dim, HALF)
        payload += payload_held
        overhead += overhead_held
        tokens += sum(counts)
        head_count += heads
        query_heads += layer.query_heads
    declared = chain.expected_sum(n, n_layers, head_count // n_layers)
    if declared is not None and tokens != declared:
        raise Refused(f"{chain.name}: keeps {tokens} tokens over all layers and heads, declared were {declared}")
    if cache.mismatch:
        raise Refused(f"{chain.name}: {cache.mismatch}")
    entries = 2 * n_layers * kv_heads * n * head_dim  # numbers of the full cache, local layers aside
    local, local_overhead = _local_layers(cache, kv_heads, head_dim, itemsize, storages)
    per_kv_head = payload if chain.lowrank else round(payload * n_layers * kv_heads / head_count)
    per_query_head = payload if chain.lowrank else round(payload * query_heads / head_count)
    return MeasuredBytes(
        n=n,
        kept=tokens / head_count,
        nominal=chain.nominal(n),
        payload=payload + local * itemsize,
        overhead=overhead + local_overhead,
        full_bytes=(entries + local) * itemsize,
        payload_kv_head=per_kv_head + local * itemsize,
        payload_query_head=per_query_head + local * itemsize,
        payload16=payload16 + local * HALF,
        overhead16=overhead16 + local_overhead,
        full16=(entries + local) * HALF,
    )


def _local_layers(cache: Cache, kv_heads: int, head_dim: int, itemsize: int, storages: set[int]) -> tuple[int, int]:
    """Return (numbers of keys and values, overhead bytes) that local layers hold.

    Raises Refused unless each holds the last tokens of its window, and nothing else.
    """
    numbers = overhead = 0
    for i, layer in enumerate(cache.local):
        counts = check_positions("the model", layer, i, cache.prompt_tokens, kv_heads)
        check_storages("the model", layer, i, storages)
        tokens = min(cache.prompt_tokens, layer.window or 0)
        held = 2 * kv_heads * tokens * head_dim
        if set(counts) != {tokens} or layer.nbytes() != held * itemsize + POSITION_BYTES * tokens:
            raise Refused(
                f"local layer {i} holds {layer.nbytes()} bytes for {_list(counts)} tokens per head, its window of "
                f"{layer.window} has {tokens}"
            )
        numbers, overhead = numbers + held, overhead + POSITION_BYTES * tokens
    return numbers, overhead


def _check_counts(chain: Chain, layer: LayerCache, index: int, n: int, n_layers: int, counts: list[int]) -> None:
    """Raise Refused unless each head of a layer keeps as many tokens as declared, and as a stage recorded, if any."""
    expected = chain.expected(n, index, n_layers, len(counts))
    if any(not low <= count <= high for count, low, high in zip(counts, expected.low, expected.high, strict=True)):
        raise Refused(
            f"{chain.name}: layer {index} keeps {_list(counts)} tokens per head of {n}, "
            f"but the method declares {_range(expected.low, expected.high)}"
        )
    if expected.low != expected.high and layer.decided is None:
        raise Refused(f"{chain.name}: layer {index} does not record how many tokens the data made it keep")
    if layer.decided is not None and list(layer.decided) != counts:
        raise Refused(
            f"{chain.name}: layer {index} keeps {_list(counts)} tokens per head, "
            f"but decided to keep {_list(list(layer.decided))}"
        )
    if expected.total is not None and sum(counts) != expected.total:
        raise Refused(f"{chain.name}: layer {index} keeps {sum(counts)} tokens in all, declared were {expected.total}")


def _blocks(chain: Chain, counts: list[int], head_dim: int, itemsize: int, layer: int) -> list[list[Block]]:
    """Return the declared blocks of each head of a layer whose heads hold ``counts`` tokens."""
    layouts = {count: chain.layout(count, head_dim, itemsize, layer) for count in set(counts)}
    return [layouts[count] for count in counts]


def check_positions(name: str, layer: LayerCache, index: int, n: int, heads: int) -> list[int]:
    """Return how many tokens each stored head holds. Raises Refused unless they are distinct prompt tokens in order."""
    if layer.seen != n:
        raise Refused(f"{name}: layer {index} says that it has read {layer.seen} tokens, the prompt has {n}")
    stored = max([layer.heads, *(s.heads for s in layer.segments)])
    if stored != heads:
        raise Refused(f"{name}: layer {index} stores {stored} heads, the chain declares {heads}")
    for segment in layer.segments:
        # tokens held as keys and as values: exact ones, and before them packed ones
        slots, values = segment.k.shape[1], segment.v.shape[1]
        if segment.codes is not None:
            slots, values = slots + segment.codes.k.shape[1], values + segment.codes.v.shape[1]
        ragged = segment.lengths is not None and int(segment.lengths.sum()) != slots
        heads_differ = segment.k.shape[0] != segment.v.shape[0] and segment.leads is None
        if values != slots or heads_differ or segment.positions.shape[1] != slots or ragged:
            raise Refused(f"{name}: layer {index} holds keys, values and positions of different lengths")
    # heads of equal numbers are checked in one tensor, which saves a GPU most of the waiting
    even = layer.even_positions()
    if even is not None and even.shape[1] and _in_order(even, n):
        return [even.shape[1]] * heads
    by_head = layer.kept_positions()
    for head, positions in enumerate(by_head):
        if len(positions) == 0 and (layer.copy_from is None or int(layer.copy_from[head]) == head):
            raise Refused(f"{name}: layer {index}, head {head} holds no token at all")
        if len(positions) and not _in_order(positions[None], n):
            raise Refused(
                f"{name}: layer {index}, head {head} does not hold distinct prompt positions 0..{n - 1} in order"
            )
    return [len(p) for p in by_head]


def _in_order(positions: torch.Tensor, n: int) -> bool:
    """Tell whether each row of positions [H, m] ascends within 0..n-1."""
    ascending = bool((positions[:, 1:] > positions[:, :-1]).all())
    return ascending and int(positions[:, 0].min()) >= 0 and int(positions[:, -1].max()) < n


def check_sharing(chain: Chain, layer: LayerCache, index: int, n_layers: int, kv_heads: int, heads: int) -> None:
    """Raise Refused unless as many query heads lead as the chain declares, and the keys held are those they read."""
    declared = chain.leading_heads(layer.prompt_tokens, index, n_layers, layer.query_heads, kv_heads)
    (segment, *_) = layer.segments
    leading = layer.query_heads if segment.leads is None else len(segment.leads.unique())
    if leading != declared:
        raise Refused(
            f"{chain.name}: layer {index} computes the logits of {leading} query heads, the method declares {declared}"
        )
    if segment.leads is not None and segment.k.shape[0] != len(key_heads(segment.leads, heads)):
        raise Refused(
            f"{chain.name}: layer {index} holds keys of {segment.k.shape[0]} heads, "
            f"{len(key_heads(segment.leads, heads))} are read"
        )


def check_storages(name: str, layer: LayerCache, index: int, seen: set[int]) -> None:
    """Raise Refused if a tensor is a view of more memory than it shows, or shares memory with another of the cache.

    ``seen`` collects the addresses of storages over the layers of a cache.
    """
    for kind, t in _described(layer):
        storage = t.untyped_storage()
        if storage.nbytes() > t.nbytes:
            raise Refused(
                f"{name}: layer {index}: {kind} shows {t.nbytes} bytes but is a view that keeps {storage.nbytes()} "
                "alive: nothing is saved"
            )
        if storage.nbytes() and storage.data_ptr() in seen:
            raise Refused(f"{name}: layer {index}: {kind} shares its storage with another tensor of the cache")
        seen.add(storage.data_ptr())


def _described(layer: LayerCache) -> Iterator[tuple[str, torch.Tensor]]:
    for t in layer.of_layer():
        yield "a tensor of the layer (heads that copy others, last queries)", t
    for i, s in enumerate(layer.segments):
        for t in s.payload():
            yield f"a payload tensor of segment {i}", t
        for t in s.overhead():
            yield f"an overhead tensor of segment {i}", t


def payload_formula(layer: LayerCache, blocks: list[list[Block]]) -> int:
    """Return the declared bytes of a layer's keys and values; ``blocks`` are those of each head.

    Where heads share logits, only the heads whose keys are read count with keys.
    """
    leads = layer.segments[0].leads
    with_keys = len(blocks) if leads is None else len(key_heads(leads, len(blocks)))
    values = sum(b.value_bytes for head in blocks for b in head)
    return values + sum(b.key_bytes for head in blocks[:with_keys] for b in head)


def overhead_formula(layer: LayerCache, blocks: list[list[Block]]) -> int:
    """Return the declared overhead bytes of a layer, stored as it is; ``blocks`` are those of each head."""
    shared = all(s.positions.shape[0] == 1 and s.lengths is None for s in layer.segments)
    codes = [s.codes for s in layer.segments if s.codes is not None]
    count_tensors = [*(s.lengths for s in layer.segments), *(c.k_counts for c in codes), *(c.v_counts for c in codes)]
    id_tensors = [layer.copy_from, *(s.leads for s in layer.segments)]
    named_heads = layer.query_heads * sum(t is not None for t in id_tensors)
    return overhead_bytes(blocks, shared, sum(t is not None for t in count_tensors), named_heads)


def _list(values: list[int]) -> str:
    return str(values[0]) if len(set(values)) == 1 else f"{min(values)}..{max(values)}"


def _range(low: tuple[int, ...], high: tuple[int, ...]) -> str:
    bounds = f"{min(low)}..{max(low)}" if len(set(low)) > 1 else str(low[0])
    return f"exactly {bounds}" if low == high else f"between {min(low)} and {max(high)}"
