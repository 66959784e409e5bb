"""Audit the bytes and tokens of a cache against its chain's declaration. A cache that fails is refused."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from kvbench.audit.accounting import HALF, declare_local_layer, overhead_bytes
from kvbench.audit.pages import pages_freed
from kvbench.base.errors import Refused
from kvbench.kv.model_shape import CacheShape
from kvbench.kv.ops import key_heads
from kvbench.kv.pages import PagesFreed
from kvbench.kv.segment import LayerCache, Segment, storage_bytes
from kvbench.kv.state import state_bytes
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.contract import Block
from kvbench.methods.core.prompt_cache import PromptCache

HOW_TO_DECLARE = "Its class declares other numbers by budget(), expected() and expected_sum() (docs/own.md)"
"""What to do about tokens that are not those declared."""


@dataclass(frozen=True)
class MeasuredBytes:
    """The measurements of one audited cache. Bytes are the sizes of PyTorch's storages.

    n: the number of the prompt's tokens.
    kept: the mean number of tokens held, over heads and the layers that methods compress. Bytes count all layers.
    nominal: the budget that the user gave, in tokens. It is None for a method without a budget.
    payload, overhead: the bytes of keys, values and states, and the bytes of all else, such as positions.
    full_bytes: the bytes of the prompt's full cache.
    payload_kv_head, payload_query_head: the payload if one head is stored for each kv head, or for each query head. The
    kind that the chain stores is measured. The other kind is the mean bytes of a stored head times its heads. Latents
    count alike in both.
    payload16, overhead16, full16: the bytes that the same tokens take at 16 bits, by formula.
    pages_freed: the fractions of the prompt's pages that an engine with paged attention could give back.
    compressed_percent: the bytes of the layers that methods compress, in per cent of those of their full cache, both at
        16 bits. None if the model has neither local layers nor states beside them.
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
    pages_freed: PagesFreed
    compressed_percent: float | None


@dataclass
class _Sums:
    """Sums over the layers of one cache, to which ``_audit_layer`` adds each layer that methods compress.

    tokens: the tokens of all stored heads.
    heads: the stored heads of all layers.
    query_heads: the query heads of all layers.
    payload, overhead: the bytes measured.
    payload16, overhead16: the bytes of the same tokens at 16 bits, by formula.
    storages: the addresses of all storages that have been met.
    """

    tokens: int = 0
    heads: int = 0
    query_heads: int = 0
    payload: int = 0
    overhead: int = 0
    payload16: int = 0
    overhead16: int = 0
    storages: set[int] = field(default_factory=set)


def audit(cache: PromptCache, shape: CacheShape) -> MeasuredBytes:
    """Return the measurements of a freshly compressed cache. Raises Refused if it breaks its chain's promises.

    The audit checks how many tokens each head of each layer keeps, and their positions. Where the prompt's data decide
    how many tokens a method keeps, the numbers must be those that its stage recorded (``LayerCache.decided``). Payload
    and overhead bytes are compared with the formula. Every tensor must own its storage. The audit also refuses a
    cache whose keys and values differed from the prompt's when it was compressed (``PromptCache.mismatch``).

    shape: the sizes of the model's cache.
    """
    chain = cache.chain
    n = cache.prompt_tokens
    n_layers = len(cache.layers)
    sums = _Sums()
    for index in range(n_layers):
        _audit_layer(cache, index, shape, sums)
    # all layers store the same number of heads
    declared_tokens = chain.expected_sum(n, n_layers, heads=sums.heads // n_layers)
    if declared_tokens is not None and sums.tokens != declared_tokens:
        raise Refused(
            f"{chain.name}: keeps {sums.tokens} tokens over all layers and heads, declared were {declared_tokens}. "
            f"{HOW_TO_DECLARE}"
        )
    if cache.mismatch:
        raise Refused(f"{chain.name}: {cache.mismatch}")
    # numbers of the full cache in the layers that methods compress: keys and values [kv_heads, n, head_dim] each, or
    # keys alone if these are their own values
    tensors = 1 if shape.own_values else 2
    full_numbers = tensors * n_layers * shape.kv_heads * n * shape.head_dim
    local = _audit_local_layers(cache, shape, sums.storages)
    states = _audit_states(cache, sums.storages)
    # the payload beside the layers that methods compress: as held, and at 16 bits
    fixed = local.payload + states.bytes
    fixed16 = local.payload16 + states.bytes16
    full_fixed, full_fixed16 = local.numbers * shape.itemsize + states.bytes, local.numbers * HALF + states.bytes16
    compressed_percent = None
    if cache.local or cache.states:
        compressed_percent = 100 * (sums.payload16 + sums.overhead16) / (full_numbers * HALF)
    if chain.lowrank:
        # latents are one head that all others read
        payload_kv_head, payload_query_head = sums.payload, sums.payload
    else:
        # mean bytes of a stored head times all heads of either kind
        payload_kv_head = round(sums.payload * n_layers * shape.kv_heads / sums.heads)
        payload_query_head = round(sums.payload * sums.query_heads / sums.heads)
    return MeasuredBytes(
        n=n,
        kept=sums.tokens / sums.heads,
        nominal=chain.nominal(n),
        payload=sums.payload + fixed,
        overhead=sums.overhead + local.overhead,
        full_bytes=full_numbers * shape.itemsize + full_fixed,
        payload_kv_head=payload_kv_head + fixed,
        payload_query_head=payload_query_head + fixed,
        payload16=sums.payload16 + fixed16,
        overhead16=sums.overhead16 + local.overhead,
        full16=full_numbers * HALF + full_fixed16,
        pages_freed=pages_freed(cache.layers, n),
        compressed_percent=compressed_percent,
    )


def _audit_layer(cache: PromptCache, index: int, shape: CacheShape, sums: _Sums) -> None:
    """Add a layer's tokens and bytes to ``sums``. Raises Refused where the layer breaks its chain's promises."""
    chain, n, n_layers = cache.chain, cache.prompt_tokens, len(cache.layers)
    layer = cache.layers[index]
    heads = chain.heads(shape.kv_heads, layer.query_heads)
    counts = check_positions(chain.name, layer, index, n=n, heads=heads)
    _check_counts(chain, layer, index, n=n, n_layers=n_layers, counts=counts)
    check_storages(chain.name, layer, index, sums.storages)
    check_sharing(chain, layer, index, n_layers=n_layers, kv_heads=shape.kv_heads, heads=heads)
    # Payload is the bytes behind keys and values, overhead is all other bytes. Both must equal the formula.
    payload_tensors: list[torch.Tensor] = []
    for segment in layer.segments:
        payload_tensors.extend(segment.payload())
    payload = storage_bytes(payload_tensors)
    overhead = layer.nbytes() - payload
    blocks = declare_blocks(chain, counts, shape, index)
    declared_payload = payload_formula(layer, blocks)
    if payload != declared_payload:
        raise Refused(
            f"{chain.name}: layer {index} holds {payload} payload bytes for {_describe_counts(counts)} "
            f"tokens per head, the formula says {declared_payload:g}"
        )
    # some methods keep the layer's last queries
    queries = chain.observed_bytes(n, layer.query_heads, shape.head_dim, shape.itemsize)
    declared_overhead = overhead_formula(layer, blocks) + queries
    if overhead != declared_overhead:
        raise Refused(f"{chain.name}: layer {index} holds {overhead} overhead bytes, declared {declared_overhead}")
    # the same tokens at 16 bits
    blocks16 = declare_blocks(chain, counts, replace(shape, itemsize=HALF), index)
    queries16 = chain.observed_bytes(n, layer.query_heads, shape.head_dim, HALF)
    sums.payload16 += payload_formula(layer, blocks16)
    sums.overhead16 += overhead_formula(layer, blocks16) + queries16
    sums.payload += payload
    sums.overhead += overhead
    sums.tokens += sum(counts)
    sums.heads += heads
    sums.query_heads += layer.query_heads


class _LocalLayers(NamedTuple):
    """The sizes of all local layers.

    numbers: the count of numbers in the keys and values of their tokens.
    payload, overhead: the bytes held.
    payload16: the bytes that the payload takes if exact numbers have 16 bits, by formula.
    """

    numbers: int
    payload: int
    overhead: int
    payload16: int


def _audit_local_layers(cache: PromptCache, shape: CacheShape, storage_addresses: set[int]) -> _LocalLayers:
    """Return the sizes of the local layers.

    storage_addresses: the addresses of all storages met so far, to which those of these layers are added.

    Raises Refused unless each layer holds the last tokens of its window as the chain stores them, and nothing else.
    """
    kv_heads, head_dim = shape.local_heads or (shape.kv_heads, shape.head_dim)
    total_numbers, total_payload, total_overhead, total16 = 0, 0, 0, 0
    for i, layer in enumerate(cache.local):
        counts = check_positions("the model", layer, i, n=cache.prompt_tokens, heads=kv_heads)
        check_storages("the model", layer, i, storage_addresses)
        # every local layer has a window: ``or 0`` is for the type alone
        tokens = min(cache.prompt_tokens, layer.window or 0)
        payload, overhead = declare_local_layer(cache.chain, tokens, kv_heads, head_dim, shape.itemsize)
        if set(counts) != {tokens} or layer.nbytes() != payload + overhead:
            raise Refused(
                f"local layer {i} holds {layer.nbytes()} bytes for {_describe_counts(counts)} tokens per head, "
                f"its window of {layer.window} has {tokens} in {payload + overhead} bytes"
            )
        total_numbers += 2 * kv_heads * tokens * head_dim
        total_payload += payload
        total_overhead += overhead
        total16 += declare_local_layer(cache.chain, tokens, kv_heads, head_dim, HALF)[0]
    return _LocalLayers(total_numbers, total_payload, total_overhead, total16)


class _States(NamedTuple):
    """The bytes of a cache's states.

    bytes: the bytes of the states' storages.
    bytes16: the bytes that the states take at 16 bits, by formula. Recurrent states stay in fp32.
    """

    bytes: int
    bytes16: int


def _audit_states(cache: PromptCache, storage_addresses: set[int]) -> _States:
    """Return the bytes of all states, as held and at 16 bits. Raises Refused unless each tensor owns its storage.

    Unlike keys and values, states are not compared with a formula: they have the dtypes that the model gives them.

    storage_addresses: the addresses of all storages met so far, to which those of the states are added.
    """
    tensors: list[torch.Tensor] = []
    bytes16 = 0
    for number, state in enumerate(cache.states):
        for tensor in state.tensors():
            _check_owned(f"the model: state {number}", tensor, storage_addresses)
            tensors.append(tensor)
        bytes16 += state_bytes(*state.counts, HALF)
    return _States(storage_bytes(tensors), bytes16)


def _check_counts(chain: Chain, layer: LayerCache, index: int, *, n: int, n_layers: int, counts: list[int]) -> None:
    """Raise Refused unless each head of a layer keeps as many tokens as the chain declares.

    If a stage recorded how many tokens it decided to keep (``layer.decided``), the record must be true as well. The
    record is required if the chain leaves the numbers open.

    counts: how many tokens each stored head holds.
    index: the layer's number.
    n: the prompt's tokens.
    """
    expected = chain.expected(n, index, n_layers, len(counts))
    for count, low, high in zip(counts, expected.low, expected.high, strict=True):
        if not low <= count <= high:
            declared = f"between {min(expected.low)} and {max(expected.high)}"
            if expected.low == expected.high:
                declared = f"exactly {_describe_counts(list(expected.low))}"
            raise Refused(
                f"{chain.name}: layer {index} keeps {_describe_counts(counts)} tokens per head of {n}, "
                f"but the method declares {declared}. {HOW_TO_DECLARE}"
            )
    if expected.low != expected.high and layer.decided is None:
        raise Refused(f"{chain.name}: layer {index} does not record how many tokens the data made it keep")
    if layer.decided is not None and list(layer.decided) != counts:
        raise Refused(
            f"{chain.name}: layer {index} keeps {_describe_counts(counts)} tokens per head, "
            f"but decided to keep {_describe_counts(list(layer.decided))}"
        )
    if expected.total is not None and sum(counts) != expected.total:
        raise Refused(
            f"{chain.name}: layer {index} keeps {sum(counts)} tokens in all, declared were {expected.total}. "
            f"{HOW_TO_DECLARE}"
        )


def declare_blocks(chain: Chain, counts: list[int], shape: CacheShape, layer: int) -> list[list[Block]]:
    """Return for each head of a layer the blocks that ``chain`` declares. Head h holds ``counts[h]`` tokens."""
    # heads of equal counts have equal blocks
    layouts = {}
    for count in set(counts):
        layouts[count] = chain.layout(count, shape.head_dim, shape.itemsize, layer, shape.own_values)
    return [layouts[count] for count in counts]


def check_positions(name: str, layer: LayerCache, index: int, n: int, heads: int) -> list[int]:
    """Return how many tokens each of a layer's ``heads`` stored heads holds, after a prompt of n tokens.

    Raises Refused unless each head holds distinct tokens of the prompt in order. ``name`` is the method's name in
    messages.
    """
    if layer.seen != n:
        raise Refused(f"{name}: layer {index} says that it has read {layer.seen} tokens, the prompt has {n}")
    if layer.stored_heads != heads:
        raise Refused(f"{name}: layer {index} stores {layer.stored_heads} heads, the method declares {heads}")
    if not all(_has_equal_lengths(segment) for segment in layer.segments):
        raise Refused(f"{name}: layer {index} holds keys, values and positions of different lengths")
    # Heads of equal numbers are checked in one tensor, which saves a GPU most of the waiting. If that check fails, the
    # loop below names the head.
    even_positions = layer.even_positions()
    if even_positions is not None and even_positions.shape[1] and _are_in_order(even_positions, n):
        return [even_positions.shape[1]] * heads
    positions_by_head = layer.kept_positions()
    for head, positions in enumerate(positions_by_head):
        # a head may be empty only if it copies another head's output
        if len(positions) == 0 and (layer.copy_from is None or int(layer.copy_from[head]) == head):
            raise Refused(f"{name}: layer {index}, head {head} holds no token at all")
        if len(positions) and not _are_in_order(positions[None], n):
            raise Refused(
                f"{name}: layer {index}, head {head} does not hold distinct prompt positions 0..{n - 1} in order"
            )
    return [len(positions) for positions in positions_by_head]


def _has_equal_lengths(segment: Segment) -> bool:
    """Return True if a segment has as many values and positions as keys, in as many heads."""
    # counted in tokens: the exact keys and values, and the packed ones before them
    keys, values = segment.k.shape[1], segment.v.shape[1]
    if segment.codes is not None:
        keys += segment.codes.k.shape[1]
        values += segment.codes.v.shape[1]
    if values != keys or segment.positions.shape[1] != keys:
        return False
    # the lengths of ragged heads must add up to the tokens stored one after the other
    if segment.lengths is not None and int(segment.lengths.sum()) != keys:
        return False
    # if query heads share logits, keys may have fewer heads than values
    return segment.k.shape[0] == segment.v.shape[0] or segment.leads is not None


def _are_in_order(positions: torch.Tensor, n: int) -> bool:
    """Return True if each row of positions [H, m] ascends within 0..n-1. There must be at least one token."""
    # each row is distinct and in order if every position is larger than the one before
    rows_ascend = bool((positions[:, 1:] > positions[:, :-1]).all())
    return rows_ascend and int(positions[:, 0].min()) >= 0 and int(positions[:, -1].max()) < n


def check_sharing(chain: Chain, layer: LayerCache, index: int, n_layers: int, kv_heads: int, heads: int) -> None:
    """Raise Refused unless a layer's query heads share logits as the chain declares.

    Heads that share logits have one leading head, which computes them. There must be as many leading heads as declared,
    and only the keys that they read may be stored.

    heads: the number of stored heads that the chain declares.
    """
    declared = chain.leading_heads(layer.prompt_tokens, index, n_layers, layer.query_heads, kv_heads)
    # all segments of a layer have the same leading heads
    first_segment = layer.segments[0]
    leads = first_segment.leads
    # without shared logits every query head leads itself
    leading = len(leads.unique()) if leads is not None else layer.query_heads
    if leading != declared:
        raise Refused(
            f"{chain.name}: layer {index} computes the logits of {leading} query heads, the method declares {declared}"
        )
    if leads is None:
        return
    stored_heads = first_segment.k.shape[0]
    read_heads = len(key_heads(leads, heads))
    if stored_heads != read_heads:
        raise Refused(f"{chain.name}: layer {index} holds keys of {stored_heads} heads, {read_heads} are read")


def check_storages(name: str, layer: LayerCache, index: int, seen: set[int]) -> None:
    """Raise Refused if a tensor is a view of a larger storage, or shares its storage with another tensor of the cache.

    name: the method's name in messages.
    index: the layer's number.
    seen: collects the addresses of storages over the layers of a cache.
    """
    place = f"{name}: layer {index}"
    for tensor in layer.layer_tensors():
        _check_owned(f"{place}: a tensor of the layer (heads that copy others, last queries)", tensor, seen)
    for i, segment in enumerate(layer.segments):
        for tensor in segment.payload():
            _check_owned(f"{place}: a payload tensor of segment {i}", tensor, seen)
        for tensor in segment.overhead():
            _check_owned(f"{place}: an overhead tensor of segment {i}", tensor, seen)


def _check_owned(tensor_name: str, tensor: torch.Tensor, seen: set[int]) -> None:
    """Raise Refused unless a tensor owns its storage. ``seen`` collects the addresses of all storages so far."""
    storage = tensor.untyped_storage()
    if storage.nbytes() > tensor.nbytes:
        raise Refused(
            f"{tensor_name} shows {tensor.nbytes} bytes but is a view that keeps {storage.nbytes()} alive: "
            "nothing is saved"
        )
    # a tensor without elements has no storage to share, and address 0
    if storage.nbytes() and storage.data_ptr() in seen:
        raise Refused(f"{tensor_name} shares its storage with another tensor of the cache")
    seen.add(storage.data_ptr())


def payload_formula(layer: LayerCache, blocks: list[list[Block]]) -> int:
    """Return the declared bytes of a layer's keys and values. ``blocks`` are the blocks of each head.

    Where heads share logits, only the heads whose keys are read count with keys.
    """
    leads = layer.segments[0].leads
    heads_with_keys = len(key_heads(leads, len(blocks))) if leads is not None else len(blocks)
    total = 0
    for head, head_blocks in enumerate(blocks):
        total += sum(block.value_bytes for block in head_blocks)
        # where heads share logits, all hold the same tokens: only the number of heads with keys matters
        if head < heads_with_keys:
            total += sum(block.key_bytes for block in head_blocks)
    return total


def overhead_formula(layer: LayerCache, blocks: list[list[Block]]) -> int:
    """Return the declared overhead bytes of a layer as it is stored. ``blocks`` are the blocks of each head."""
    # all heads use one row of positions
    shared = all(segment.positions.shape[0] == 1 and segment.lengths is None for segment in layer.segments)
    # ragged segments store the length of each head, and packed ones the counts of its packed keys and values
    count_tensors: list[torch.Tensor | None] = []
    # each of these tensors has an id for every query head: the head it copies, or whose logits it takes
    id_tensors: list[torch.Tensor | None] = [layer.copy_from]
    for segment in layer.segments:
        count_tensors.append(segment.lengths)
        id_tensors.append(segment.leads)
        if segment.codes is not None:
            count_tensors += [segment.codes.k_counts, segment.codes.v_counts]
    stored_count_tensors = sum(tensor is not None for tensor in count_tensors)
    stored_id_tensors = sum(tensor is not None for tensor in id_tensors)
    return overhead_bytes(blocks, shared, stored_count_tensors, named_heads=layer.query_heads * stored_id_tensors)


def _describe_counts(counts: list[int]) -> str:
    """Return the tokens of heads for a message: one number, or ``least..most`` where heads differ."""
    if len(set(counts)) == 1:
        return str(counts[0])
    return f"{min(counts)}..{max(counts)}"
