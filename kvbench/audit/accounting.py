"""The bytes of a cache: those held, by purpose, and those that a chain declares, computed without a cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from kvbench.kv.model_shape import POSITION_BYTES, Shape
from kvbench.kv.segment import LayerCache, storage_bytes
from kvbench.methods.core.base import Block, Expected
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.pruner import ChannelPruner

COUNT_BYTES = 4
HEAD_ID_BYTES = 2
HALF = 2
"""The bytes of an element at 16 bits. Shares are of the full cache at this width, also if a run used another: of an
fp32 cache, codes of few bits are only half the share that they are of the caches that models run with."""


@dataclass(frozen=True)
class HeldBytes:
    """The bytes of storages by purpose: the payload, which is the first three, and the overhead.

    exact: keys and values as the model made them.
    codes: the packed codes of keys and values.
    scales: the scales and minima of the codes.
    positions: the positions of tokens, and the lengths of ragged heads.
    ids: the ids of kept channels and of leading heads.
    state: the running state from which decoding continues, and scales that the prompt settled for tokens to come.
    """

    exact: int = 0
    codes: int = 0
    scales: int = 0
    positions: int = 0
    ids: int = 0
    state: int = 0

    @property
    def payload(self) -> int:
        return self.exact + self.codes + self.scales

    @property
    def overhead(self) -> int:
        return self.positions + self.ids + self.state

    @property
    def total(self) -> int:
        return self.payload + self.overhead

    def __add__(self, other: HeldBytes) -> HeldBytes:
        return HeldBytes(*(a + b for a, b in zip(self.parts(), other.parts(), strict=True)))

    def times(self, layers: int) -> HeldBytes:
        """Return the bytes of ``layers`` layers that each hold as many as this one."""
        return HeldBytes(*(layers * part for part in self.parts()))

    def parts(self) -> tuple[int, ...]:
        return (self.exact, self.codes, self.scales, self.positions, self.ids, self.state)


def bytes_held(layer: LayerCache) -> HeldBytes:
    """Return the bytes that one layer keeps alive, by purpose."""
    total = HeldBytes()
    for s in layer.segments:
        packed = () if s.codes is None else (s.codes.k, s.codes.v)
        codes = storage_bytes(t for p in packed for t in p.codes_only())
        scales = storage_bytes(t for p in packed for t in p.payload()) - codes
        ids = storage_bytes(t for t in (s.key_channels, s.value_channels, s.leads) if t is not None)
        state = storage_bytes((*s.state.values(), *(() if s.codes is None else s.codes.frozen())))
        # what remains of the payload is exact, what remains of the overhead are positions and counts
        total += HeldBytes(
            exact=storage_bytes(s.payload()) - codes - scales,
            codes=codes,
            scales=scales,
            positions=storage_bytes(s.overhead()) - ids - state,
            ids=ids,
            state=state,
        )
    last_q = None if layer.observed is None else layer.observed.last_q
    return total if last_q is None else total + HeldBytes(state=storage_bytes([last_q]))


@dataclass(frozen=True)
class DeclaredBytes:
    """The bytes that a chain declares after a prompt, over all layers.

    tokens: the mean number of tokens per stored head, of the layers that it compresses.
    payload: the bytes of keys and values.
    overhead: the bytes of all else, such as positions.
    even: True if the data decide how tokens are spread over heads or layers. They are then taken as spread evenly,
    which changes no sum if every token costs the same.
    """

    tokens: float
    payload: int
    overhead: int
    even: bool

    @property
    def total(self) -> int:
        return self.payload + self.overhead


def bytes_declared(chain: Chain, shape: Shape, n: int, itemsize: int) -> DeclaredBytes | None:
    """Return the bytes by formula after a prompt of n tokens, or None if its text decides how many tokens stay."""
    counts = layer_counts(chain, shape, n)
    if counts is None:
        return None
    heads = chain.heads(shape.kv_heads, shape.query_heads)
    payload, overhead, tokens = shape.local_bytes(n, itemsize), shape.local_overhead(n), 0
    for (expected, sizes, rows, alike), layers in counts.items():
        blocks = [chain.layout(size, shape.head_dim, itemsize, alike) for size in sizes]
        keeps_all = min(sizes) >= rows
        # heads are ragged where they are said to differ, or only a sum over them is fixed
        summed = expected.total is not None or (chain.selector is not None and chain.selector.ragged)
        open_sizes = expected.low != expected.high and summed
        ragged = not keeps_all and (open_sizes or len(set(expected.low)) > 1)
        shared = not ragged and (chain.selector is None or chain.selector.shared or keeps_all)
        # a ragged segment has the lengths of its heads; a packed one the counts of its keys and values, too
        count_tensors = (3 if chain.quantiser else _ragged_segments(chain, expected, shape)) if ragged else 0
        payload += layers * payload_bytes(blocks)
        overhead += layers * overhead_bytes(blocks, shared, count_tensors)
        tokens += layers * sum(sizes)
    overhead += shape.layers * chain.observed_bytes(n, shape.query_heads, shape.head_dim, itemsize)
    if chain.sharer is not None:
        keyless = heads_without_keys(chain, shape, n)
        if keyless is None:
            return None
        payload -= sum(keyless) * n * shape.head_dim * itemsize
        overhead += sum(HEAD_ID_BYTES * shape.query_heads for count in keyless if count)
    even = any(expected.low != expected.high for expected, *_ in counts)
    return DeclaredBytes(tokens / (heads * shape.layers), payload, overhead, even)


def layer_counts(chain: Chain, shape: Shape, n: int) -> Counter[tuple[Expected, tuple[int, ...], int, int]] | None:
    """Return how many layers have the same (promise, tokens of each head, tokens read, first layer packed alike).

    Returns None if the prompt's text decides how many tokens stay.
    """
    heads = chain.heads(shape.kv_heads, shape.query_heads)
    promises = [chain.expected(n, i, shape.layers, heads) for i in range(shape.layers)]
    # layers of which neither heads nor their sum are fixed share the rest of the sum over all layers
    open_layers = [p for p in promises if p.low != p.high and p.total is None]
    total = chain.expected_sum(n, shape.layers, heads)
    if open_layers and total is None:
        return None
    remaining_tokens = (total or 0) - sum(sum(p.low) for p in promises if p.low == p.high)
    shares = iter(spread_evenly(remaining_tokens, len(open_layers)))
    counts: Counter[tuple[Expected, tuple[int, ...], int, int]] = Counter()
    for i, p in enumerate(promises):
        sizes = p.low
        if p.low != p.high:
            sizes = tuple(spread_evenly(p.total if p.total is not None else next(shares), heads))
        counts[p, sizes, chain.tokens_read(n, i, shape.layers), chain.first_alike(i)] += 1
    return counts


def heads_without_keys(chain: Chain, shape: Shape, n: int) -> list[int] | None:
    """Return for each layer how many stored heads have no keys as logits are shared; None if the text decides."""
    heads = chain.heads(shape.kv_heads, shape.query_heads)
    leading = [chain.leading_heads(n, i, shape.layers, shape.query_heads, shape.kv_heads) for i in range(shape.layers)]
    if heads < shape.query_heads and min(leading) < shape.query_heads:
        return None
    return [shape.query_heads - count for count in leading]


def spread_evenly(total: int, parts: int) -> list[int]:
    """Return ``total`` in ``parts`` whole numbers that differ by one at most."""
    return [total // parts + (i < total % parts) for i in range(parts)]


def payload_bytes(blocks: Iterable[Iterable[Block]]) -> int:
    """Return the payload bytes of all heads together; ``blocks`` are those of each head."""
    return sum(b.key_bytes + b.value_bytes for head in blocks for b in head)


def overhead_bytes(blocks: Sequence[Sequence[Block]], shared: bool, count_tensors: int, named_heads: int = 0) -> int:
    """Return the overhead bytes of a layer: positions, counts, head and channel ids, state.

    blocks: the blocks of each head. Every head has the fixed overhead of the head with most blocks.
    shared: whether positions, 4 bytes a slot, are stored once for all heads.
    count_tensors: how many tensors hold 4 bytes a head: lengths of ragged segments, counts of packed keys and values.
    named_heads: how many ids are stored, of 2 bytes each, of heads whose logits or output others take.
    """
    positions = sum(POSITION_BYTES * b.slots for head in (blocks[:1] if shared else blocks) for b in head)
    state = sum(b.slot_overhead * b.slots for head in blocks for b in head)
    fixed = len(blocks) * sum(b.fixed_overhead for b in max(blocks, key=len))
    return positions + COUNT_BYTES * len(blocks) * count_tensors + HEAD_ID_BYTES * named_heads + state + fixed


def _ragged_segments(chain: Chain, expected: Expected, shape: Shape) -> int:
    """Return how many segments differ in tokens between the head that holds least and the one that holds most."""
    ends = [chain.layout(tokens, shape.head_dim, 1) for tokens in (min(expected.low), max(expected.high))]
    return sum(a is None or b is None or a.slots != b.slots for a, b in zip_longest(*ends))


def nominal_payload(chain: Chain, shape: Shape, n: int, itemsize: int) -> float | None:
    """Return the payload bytes as ThinK's paper counts them (arXiv 2407.21018, table 7), with (1 - ratio) D channels.

    This product is not rounded, and channel masks and positions are left out, as in the paper. Without a pruning stage
    the result is the payload of ``bytes_declared``. Returns None if the prompt's text decides how many tokens stay.
    """
    counts = layer_counts(chain, shape, n)
    if counts is None:
        return None
    heads = {(k, i): _nominal_head(chain, k, shape.head_dim, itemsize, i) for _, sizes, _, i in counts for k in sizes}
    compressed = sum(layers * sum(heads[k, i] for k in sizes) for (_, sizes, _, i), layers in counts.items())
    return compressed + shape.local_bytes(n, itemsize)


def _nominal_head(chain: Chain, slots: int, head_dim: int, itemsize: int, layer: int) -> float:
    """Return the bytes of one stored head of ``slots`` tokens in ``nominal_payload``."""
    pruner = next((s for s in chain.stages if isinstance(s, ChannelPruner)), None)
    if pruner is None:
        return payload_bytes([chain.layout(slots, head_dim, itemsize, layer)])
    dense, ratios = head_dim * itemsize, (pruner.ratio, float(getattr(pruner, "value_ratio", 0.0)))
    quantiser, coder = chain.quantiser, chain.coder_at(layer)
    if quantiser is None or coder is None:
        older_tokens = max(0, slots - pruner.recent)
        return 2 * slots * dense - sum(ratios) * older_tokens * dense
    packed_keys, packed_values = coder.keys.packed(slots), coder.values.packed(slots)
    packed = (quantiser.key_bytes(packed_keys, head_dim), quantiser.value_bytes(packed_values, head_dim))
    exact = (2 * slots - packed_keys - packed_values) * dense
    return exact + sum((1 - ratio) * size for ratio, size in zip(ratios, packed, strict=True))


def bytes_after_decoding(
    chain: Chain, layer: LayerCache, index: int, new: int, kv_heads: int, head_dim: int, itemsize: int
) -> tuple[int, int]:
    """Return (least, most): the limits of the payload bytes of ``layer`` after ``new`` more tokens.

    They differ only where some tokens lack channels, as the data decide how many of these tokens eviction leaves.
    """
    counts = [len(p) for p in layer.kept_positions()]

    def formula(tokens: Iterable[int]) -> int:
        return payload_bytes(chain.layout(t, head_dim, itemsize, index) for t in tokens)

    evictor, dense = chain.evictor, 2 * head_dim * itemsize
    if evictor is None:
        if chain.coder and not chain.coder.grows:
            total = sum(storage_bytes(s.payload()) for s in layer.segments) + new * len(counts) * dense
        elif chain.coder:
            total = formula(c + new for c in counts)
        else:
            new_token = sum(chain.lowrank.widths(index)) * itemsize if chain.lowrank else kv_heads * dense
            # ragged heads are attended one by one, each with its own copy of text that was appended since
            ragged = any(s.lengths is not None for s in layer.segments)
            copies = ((storage_bytes(s.payload()), len(counts) // s.heads if ragged else 1) for s in layer.segments)
            total = sum(size * count for size, count in copies) + new * new_token
        return total, total
    pruner = next((s for s in chain.stages if isinstance(s, ChannelPruner)), None)
    ends, _ = evictor.tokens_after(layer, index, new)
    if pruner is None:
        return formula(ends), formula(ends)
    if layer.segments[0].key_channels is None and layer.segments[0].value_channels is None:
        # the prompt was too short to lose channels, or all tokens that did are gone: new ones have all channels
        return sum(ends) * dense, sum(ends) * dense
    thin = (pruner.kept_keys(head_dim) + pruner.kept_values(head_dim)) * itemsize
    unpruned = [sum(column) for column in zip([0] * len(ends), *(s.counts for s in layer.segments[1:]), strict=True)]
    least = sum(ends) * thin
    return least, least + sum(min(end, u + new) for end, u in zip(ends, unpruned, strict=True)) * (dense - thin)
