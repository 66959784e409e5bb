"""What a cache really holds, against what its chain declares. A cache that fails is refused, with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvbench.audit.accounting import HALF
from kvbench.cache.ops import key_heads
from kvbench.cache.segment import LayerCache, storage_bytes
from kvbench.errors import Refused as Refused
from kvbench.methods.base import Block
from kvbench.methods.chain import Chain
from kvbench.methods.prompt_cache import Cache


@dataclass(frozen=True)
class MeasuredBytes:
    """One audited cache. Bytes are those of the storages held; ``full_bytes`` is the same prompt kept whole.

    ``kept`` is the mean of tokens held over layers and heads; ``nominal`` the budget that was asked for,
    None for a method without one.
    ``payload_kv_head`` and ``payload_query_head`` are the payload under both kinds of ``per``: measured for the heads
    stored, else by formula, the mean bytes of a stored head times the heads of the other kind. Latents are those of all
    heads under either. ``payload16``, ``overhead16`` and ``full16``: the same tokens at 16 bits, by formula.
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
    """Measure a freshly compressed cache and hold it to its chain's promises; raises Refused with the reason.

    Checked per layer and head: tokens kept (those recorded, where the data decide), their positions, payload bytes and
    overhead bytes against the formula, that every tensor owns its storage, and what was compared with the prompt while
    that was at hand (cache.content says what that is).
    """
    chain, n = cache.chain, cache.prompt_tokens
    n_layers = len(cache.layers)
    item = dtype.itemsize
    kept_sum = 0
    payload = overhead = payload16 = overhead16 = head_count = query_heads = 0
    storages: set[int] = set()
    for i, layer in enumerate(cache.layers):
        heads = chain.heads(kv_heads, layer.query_heads)
        expected = chain.expected(n, i, n_layers, heads)
        kept = check_positions(chain.name, layer, i, n, heads)
        if any(not low <= k <= high for k, low, high in zip(kept, expected.low, expected.high, strict=True)):
            raise Refused(
                f"{chain.name}: layer {i} keeps {_list(kept)} tokens per head of {n}, "
                f"but the method declares {_range(expected.low, expected.high)}"
            )
        if expected.low != expected.high and layer.decided is None:
            raise Refused(f"{chain.name}: layer {i} does not record how many tokens the data made it keep")
        if layer.decided is not None and list(layer.decided) != kept:
            raise Refused(
                f"{chain.name}: layer {i} keeps {_list(kept)} tokens per head, "
                f"but decided to keep {_list(list(layer.decided))}"
            )
        if expected.total is not None and sum(kept) != expected.total:
            raise Refused(f"{chain.name}: layer {i} keeps {sum(kept)} tokens in all, declared were {expected.total}")
        check_storages(chain.name, layer, i, storages)
        held_payload = storage_bytes(t for s in layer.segments for t in s.payload())
        held_overhead = layer.nbytes() - held_payload
        layouts = {k: chain.layout(k, head_dim, item, i) for k in set(kept)}
        blocks = [layouts[k] for k in kept]
        check_sharing(chain, layer, i, n_layers, kv_heads, heads)
        want_payload = payload_formula(layer, blocks)
        if held_payload != want_payload:
            raise Refused(
                f"{chain.name}: layer {i} holds {held_payload} payload bytes for {_list(kept)} tokens per head, "
                f"the formula says {want_payload:g}"
            )
        want_overhead = overhead_formula(layer, blocks)
        if held_overhead != want_overhead:
            raise Refused(f"{chain.name}: layer {i} holds {held_overhead} overhead bytes, declared {want_overhead}")
        halves = {k: chain.layout(k, head_dim, HALF, i) for k in layouts}
        blocks = [halves[k] for k in kept]
        payload16 += payload_formula(layer, blocks)
        overhead16 += overhead_formula(layer, blocks)
        payload += held_payload
        overhead += held_overhead
        kept_sum += sum(kept)
        head_count += heads
        query_heads += layer.query_heads
    declared = chain.expected_sum(n, n_layers, head_count // n_layers)
    if declared is not None and kept_sum != declared:
        raise Refused(f"{chain.name}: keeps {kept_sum} tokens over all layers and heads, declared were {declared}")
    if cache.strange:
        raise Refused(f"{chain.name}: {cache.strange}")
    return MeasuredBytes(
        n=n,
        kept=kept_sum / head_count,
        nominal=chain.nominal(n),
        payload=payload,
        overhead=overhead,
        full_bytes=full_bytes(n, n_layers, kv_heads, head_dim, item),
        payload_kv_head=payload if chain.lowrank else round(payload * n_layers * kv_heads / head_count),
        payload_query_head=payload if chain.lowrank else round(payload * query_heads / head_count),
        payload16=payload16,
        overhead16=overhead16,
        full16=full_bytes(n, n_layers, kv_heads, head_dim, HALF),
    )


def full_bytes(n: int, n_layers: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Keys and values of n tokens kept whole under kv heads."""
    return 2 * n_layers * kv_heads * n * head_dim * itemsize


def check_positions(name: str, layer: LayerCache, index: int, n: int, heads: int) -> list[int]:
    """Tokens held per stored head; raises Refused unless they are distinct prompt positions in ascending order."""
    if layer.seen != n:
        raise Refused(f"{name}: layer {index} says that it has read {layer.seen} tokens, the prompt has {n}")
    stored = max([layer.heads, *(s.heads for s in layer.segments)])
    if stored != heads:
        raise Refused(f"{name}: layer {index} stores {stored} heads, the chain declares {heads}")
    for segment in layer.segments:
        slots, values = segment.k.shape[1], segment.v.shape[1]
        if segment.codes is not None:
            slots, values = slots + segment.codes.k.shape[1], values + segment.codes.v.shape[1]
        ragged = segment.lengths is not None and int(segment.lengths.sum()) != slots
        heads_differ = segment.k.shape[0] != segment.v.shape[0] and segment.leads is None
        if values != slots or heads_differ or segment.positions.shape[1] != slots or ragged:
            raise Refused(f"{name}: layer {index} holds keys, values and positions of different lengths")
    even = layer.even_positions()
    if even is not None and even.shape[1] and _in_order(even, n):
        return [even.shape[1]] * heads
    kept = layer.kept_positions()
    for head, positions in enumerate(kept):
        if len(positions) == 0 and (layer.copy_from is None or int(layer.copy_from[head]) == head):
            raise Refused(f"{name}: layer {index}, head {head} holds no token at all")
        if len(positions) and not _in_order(positions[None], n):
            raise Refused(
                f"{name}: layer {index}, head {head} does not hold distinct prompt positions 0..{n - 1} in order"
            )
    return [len(p) for p in kept]


def _in_order(positions: torch.Tensor, n: int) -> bool:
    """Whether each row of positions [H, m] ascends within 0..n-1."""
    ascending = bool((positions[:, 1:] > positions[:, :-1]).all())
    return ascending and int(positions[:, 0].min()) >= 0 and int(positions[:, -1].max()) < n


def check_sharing(chain: Chain, layer: LayerCache, index: int, n_layers: int, kv_heads: int, heads: int) -> None:
    """Raise Refused unless as many query heads lead as the chain declares, and the keys held are those they read."""
    declared = chain.leading(layer.prompt_tokens, index, n_layers, layer.query_heads, kv_heads)
    (segment, *_) = layer.segments
    found = layer.query_heads if segment.leads is None else len(segment.leads.unique())
    if found != declared:
        raise Refused(
            f"{chain.name}: layer {index} computes the logits of {found} query heads, the method declares {declared}"
        )
    held = heads if segment.leads is None else len(key_heads(segment.leads, heads))
    if segment.leads is not None and segment.k.shape[0] != held:
        raise Refused(f"{chain.name}: layer {index} holds keys of {segment.k.shape[0]} heads, {held} are read")


def check_storages(name: str, layer: LayerCache, index: int, seen: set[int]) -> None:
    """Raise Refused if a tensor keeps more memory alive than it shows, or shares it with another of the cache.

    ``seen`` collects the storages of the layers before.
    """
    for what, t in _named(layer):
        storage = t.untyped_storage()
        if storage.nbytes() > t.nbytes:
            raise Refused(
                f"{name}: layer {index}: {what} shows {t.nbytes} bytes but is a view that keeps {storage.nbytes()} "
                "alive: nothing is saved"
            )
        if storage.nbytes() and storage.data_ptr() in seen:
            raise Refused(f"{name}: layer {index}: {what} shares its storage with another tensor of the cache")
        seen.add(storage.data_ptr())


def _named(layer: LayerCache) -> Iterator[tuple[str, torch.Tensor]]:
    if layer.copy_from is not None:
        yield "the tensor of heads that copy others", layer.copy_from
    for i, s in enumerate(layer.segments):
        for t in s.payload():
            yield f"a payload tensor of segment {i}", t
        for t in s.overhead():
            yield f"an overhead tensor of segment {i}", t


def payload_formula(layer: LayerCache, blocks: list[list[Block]]) -> int:
    """Keys and values of heads with these blocks; where heads share logits, keys only of those that are read."""
    leads = layer.segments[0].leads
    with_keys = len(blocks) if leads is None else len(key_heads(leads, len(blocks)))
    values = sum(b.value_bytes for head in blocks for b in head)
    return values + sum(b.key_bytes for head in blocks[:with_keys] for b in head)


def overhead_formula(layer: LayerCache, blocks: list[list[Block]]) -> int:
    """Positions (4 bytes a slot, once where all heads share them), lengths of ragged heads, channel ids and state.

    Heads that copy others are named in 2 bytes a query head.

    ``blocks`` are those of each head. What is held once a head is held by every head, even one too short to need it.
    """
    heads, most = len(blocks), max(blocks, key=len)
    shared = all(s.positions.shape[0] == 1 and s.lengths is None for s in layer.segments)
    placed = sum(4 * b.slots for head in (blocks[:1] if shared else blocks) for b in head)
    codes = [s.codes for s in layer.segments if s.codes is not None]
    counts = [*(s.lengths for s in layer.segments), *(c.k_counts for c in codes), *(c.v_counts for c in codes)]
    leads = 2 * layer.query_heads * sum(s.leads is not None for s in layer.segments)
    ragged = 4 * heads * sum(t is not None for t in counts)
    state = sum(b.slot_overhead * b.slots for head in blocks for b in head)
    copies = 0 if layer.copy_from is None else 2 * layer.query_heads
    return placed + ragged + state + leads + copies + heads * sum(b.fixed_overhead for b in most)


def _list(values: list[int]) -> str:
    return str(values[0]) if len(set(values)) == 1 else f"{min(values)}..{max(values)}"


def _range(low: tuple[int, ...], high: tuple[int, ...]) -> str:
    bounds = f"{min(low)}..{max(low)}" if len(set(low)) > 1 else str(low[0])
    return f"exactly {bounds}" if low == high else f"between {min(low)} and {max(high)}"
