"""Bytes of a cache: those held, by what they are for, and those that a chain declares, without any cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest

from kvbench.cache.model_shape import Shape
from kvbench.cache.segment import LayerCache, storage_bytes
from kvbench.methods.base import Block, Expected
from kvbench.methods.chain import Chain
from kvbench.methods.pruner import ChannelPruner

POSITION_BYTES = COUNT_BYTES = 4
LEAD_BYTES = 2
HALF = 2
"""Bytes of an element at 16 bits. Shares are of the full cache at this width, whatever a run held: codes of few bits
are half the share of an fp32 cache that they are of the caches that models run with."""


@dataclass(frozen=True)
class Held:
    """Bytes of storages by what they are for.

    Payload: ``exact`` keys and values as the model made them, packed ``codes`` and their ``scales`` (and minima).
    Overhead: ``positions`` (and lengths of ragged heads), ``ids`` of channels and of leading heads, ``state`` that
    decoding goes on from.
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

    def __add__(self, other: Held) -> Held:
        return Held(*(a + b for a, b in zip(self.parts(), other.parts(), strict=True)))

    def times(self, layers: int) -> Held:
        """As many layers that hold the same."""
        return Held(*(layers * part for part in self.parts()))

    def parts(self) -> tuple[int, ...]:
        return (self.exact, self.codes, self.scales, self.positions, self.ids, self.state)


def held(layer: LayerCache) -> Held:
    """What one layer keeps alive."""
    found = Held()
    for s in layer.segments:
        packed = () if s.codes is None else (s.codes.k, s.codes.v)
        codes = storage_bytes(p.codes for p in packed)
        scales = storage_bytes(t for p in packed for t in (p.scale, p.low))
        ids = storage_bytes(t for t in (s.key_channels, s.value_channels, s.leads) if t is not None)
        state = storage_bytes(s.state.values())
        found += Held(
            exact=storage_bytes(s.payload()) - codes - scales,
            codes=codes,
            scales=scales,
            positions=storage_bytes(s.overhead()) - ids - state,
            ids=ids,
            state=state,
        )
    return found


@dataclass(frozen=True)
class DeclaredBytes:
    """What a chain says that it holds after a prompt, over all layers. ``tokens`` is the mean per stored head.

    ``even``: the data decide how tokens are spread over heads or layers, and they are taken as spread evenly. That
    changes no sum where every token costs the same.
    """

    tokens: float
    payload: int
    overhead: int
    even: bool

    @property
    def total(self) -> int:
        return self.payload + self.overhead


def declared(chain: Chain, shape: Shape, n: int, itemsize: int) -> DeclaredBytes | None:
    """The formula's bytes for a prompt of n tokens; None where only the prompt decides how many tokens stay."""
    counts = layer_counts(chain, shape, n)
    if counts is None:
        return None
    heads = chain.heads(shape.kv_heads, shape.query_heads)
    payload = overhead = tokens = 0
    for (expected, kept, rows), layers in counts.items():
        blocks = [chain.layout(k, shape.head_dim, itemsize) for k in kept]
        payload += layers * payload_bytes(blocks)
        overhead += layers * _overhead(chain, shape, expected, blocks, min(kept) >= rows)
        tokens += layers * sum(kept)
    if chain.sharer is not None:
        without = keyless(chain, shape, n)
        if without is None:
            return None
        payload -= sum(without) * n * shape.head_dim * itemsize
        overhead += sum(LEAD_BYTES * shape.query_heads for missing in without if missing)
    even = any(expected.low != expected.high for expected, _, _ in counts)
    return DeclaredBytes(tokens / (heads * shape.layers), payload, overhead, even)


def layer_counts(chain: Chain, shape: Shape, n: int) -> Counter[tuple[Expected, tuple[int, ...], int]] | None:
    """How many layers have each promise, with the tokens that their heads keep and that they read.

    None where only the prompt decides.
    """
    heads = chain.heads(shape.kv_heads, shape.query_heads)
    promises = [chain.expected(n, i, shape.layers, heads) for i in range(shape.layers)]
    free = [p for p in promises if p.low != p.high and p.total is None]
    left = chain.expected_sum(n, shape.layers, heads)
    if free and left is None:
        return None
    shared = iter(spread((left or 0) - sum(sum(p.low) for p in promises if p.low == p.high), len(free)))
    found: Counter[tuple[Expected, tuple[int, ...], int]] = Counter()
    for i, p in enumerate(promises):
        even = spread(p.total if p.total is not None else next(shared), heads) if p.low != p.high else ()
        kept = p.low if p.low == p.high else tuple(even)
        found[p, kept, chain.rows(n, i, shape.layers)] += 1
    return found


def keyless(chain: Chain, shape: Shape, n: int) -> list[int] | None:
    """Stored heads without keys by layer, where query heads share logits; None where only the prompt decides."""
    heads = chain.heads(shape.kv_heads, shape.query_heads)
    leading = [chain.leading(n, i, shape.layers, shape.query_heads, shape.kv_heads) for i in range(shape.layers)]
    if heads < shape.query_heads and min(leading) < shape.query_heads:
        return None
    return [shape.query_heads - c for c in leading]


def spread(total: int, parts: int) -> list[int]:
    """``total`` in ``parts`` whole numbers that differ by one at most."""
    return [total // parts + (i < total % parts) for i in range(parts)]


def payload_bytes(blocks: Iterable[Iterable[Block]]) -> int:
    """Payload of heads with these blocks."""
    return sum(b.key_bytes + b.value_bytes for head in blocks for b in head)


def _overhead(chain: Chain, shape: Shape, expected: Expected, blocks: list[list[Block]], whole: bool) -> int:
    """Overhead of one layer, by the rules of audit.prompt_audit."""
    selector = chain.selector
    # heads are ragged where they are said to differ, or only a sum over them is fixed
    free = expected.low != expected.high and expected.total is not None
    ragged = not whole and (free or len(set(expected.low)) > 1)
    once = not ragged and (selector is None or selector.shared or whole)
    placed = sum(POSITION_BYTES * b.slots for head in (blocks[:1] if once else blocks) for b in head)
    lengths = COUNT_BYTES * len(blocks) * (3 if chain.quantiser else _uneven(chain, expected, shape)) if ragged else 0
    state = sum(b.slot_overhead * b.slots for head in blocks for b in head)
    return placed + lengths + state + len(blocks) * sum(b.fixed_overhead for b in max(blocks, key=len))


def _uneven(chain: Chain, expected: Expected, shape: Shape) -> int:
    """Segments of which heads that hold least and most have different numbers of tokens."""
    ends = [chain.layout(tokens, shape.head_dim, 1) for tokens in (min(expected.low), max(expected.high))]
    return sum(a is None or b is None or a.slots != b.slots for a, b in zip_longest(*ends))


def nominal(chain: Chain, shape: Shape, n: int, itemsize: int) -> float | None:
    """Payload as ThinK's paper counts it (arXiv 2407.21018, table 7): (1 - ratio) D channels, whole or not.

    Channel masks and positions are left out, as there. Without a pruning stage it is the payload of ``declared``.
    """
    counts = layer_counts(chain, shape, n)
    if counts is None:
        return None
    each = {k: nominal_head(chain, k, shape.head_dim, itemsize) for _, kept, _ in counts for k in kept}
    return sum(layers * sum(each[k] for k in kept) for (_, kept, _), layers in counts.items())


def nominal_head(chain: Chain, slots: int, head_dim: int, itemsize: int) -> float:
    """One stored head's share of ``nominal``."""
    pruner = next((s for s in chain.stages if isinstance(s, ChannelPruner)), None)
    if pruner is None:
        return payload_bytes([chain.layout(slots, head_dim, itemsize)])
    dense, cut = head_dim * itemsize, (pruner.ratio, float(getattr(pruner, "value_ratio", 0.0)))
    quantiser, coder = chain.quantiser, chain.coder
    if quantiser is None or coder is None:
        old = max(0, slots - pruner.recent)
        return 2 * slots * dense - sum(cut) * old * dense
    keys, values = coder.keys.packed(slots), coder.values.packed(slots)
    packed = (quantiser.key_bytes(keys, head_dim), quantiser.value_bytes(values, head_dim))
    exact = (2 * slots - keys - values) * dense
    return exact + sum((1 - c) * b for c, b in zip(cut, packed, strict=True))


def decoded(
    chain: Chain, layer: LayerCache, index: int, fed: int, kv_heads: int, head_dim: int, itemsize: int
) -> tuple[int, int]:
    """Payload bytes, at least and at most, of a layer's tokens after ``fed`` more than ``layer`` have come.

    They are the same but for thin tokens of which eviction leaves as many as the data decide.
    """
    counts = [len(p) for p in layer.kept_positions()]

    def formula(tokens: Iterable[int]) -> int:
        return payload_bytes(chain.layout(t, head_dim, itemsize, index) for t in tokens)

    evictor, dense = chain.evictor, 2 * head_dim * itemsize
    if evictor is None:
        if chain.coder:
            total = formula(c + fed for c in counts)
        else:
            new = sum(chain.lowrank.widths(index)) * itemsize if chain.lowrank else kv_heads * dense
            # ragged heads are attended one by one, each with its own copy of text that was appended since
            ragged = any(s.lengths is not None for s in layer.segments)
            held = ((storage_bytes(s.payload()), len(counts) // s.heads if ragged else 1) for s in layer.segments)
            total = sum(size * copies for size, copies in held) + fed * new
        return total, total
    pruner = next((s for s in chain.stages if isinstance(s, ChannelPruner)), None)
    ends = [min(most, c + fed) if fed else c for most, c in zip(evictor.shares(layer, index), counts, strict=True)]
    if pruner is None:
        return formula(ends), formula(ends)
    if layer.segments[0].key_channels is None and layer.segments[0].value_channels is None:
        # a prompt too short to lose channels, or all thin tokens gone: new ones are whole, however many come
        return sum(ends) * dense, sum(ends) * dense
    thin = (pruner.kept_keys(head_dim) + pruner.kept_values(head_dim)) * itemsize
    whole = [sum(column) for column in zip([0] * len(ends), *(s.counts for s in layer.segments[1:]), strict=True)]
    least = sum(ends) * thin
    return least, least + sum(min(end, w + fed) for end, w in zip(ends, whole, strict=True)) * (dense - thin)
