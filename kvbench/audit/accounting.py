"""Count the bytes of a cache in two ways: by its storages, and by formula.

``bytes_held`` measures the storages of a cache, by purpose. ``bytes_declared`` computes the bytes that a chain declares
by formula, without a cache. Shapes use: n prompt tokens, H stored heads (1, Hk or Hq), D head dimension.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from kvbench.kv.model_shape import POSITION_BYTES, CacheShape, Shape
from kvbench.kv.segment import LayerCache, storage_bytes
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.contract import Block, Expected
from kvbench.methods.core.pruner import ChannelPruner

COUNT_BYTES = 4  # an int32: the length of a ragged head, or the number of its packed tokens
HEAD_ID_BYTES = 2  # an int16: the head whose logits or output another head takes
HALF = 2
"""The bytes of an element at 16 bits.

Every share is a share of the full cache at this width, whatever width a run used. Models do not run with fp32 caches,
and codes of few bits would look smaller beside one.
"""


@dataclass(frozen=True)
class HeldBytes:
    """The bytes of storages by purpose. The first three purposes are the payload, the others the overhead.

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
        """The bytes of keys and values, packed or not."""
        return self.exact + self.codes + self.scales

    @property
    def overhead(self) -> int:
        """The bytes of all that is stored beside keys and values."""
        return self.positions + self.ids + self.state

    @property
    def total(self) -> int:
        """The bytes of all purposes together."""
        return self.payload + self.overhead

    def __add__(self, other: HeldBytes) -> HeldBytes:
        return HeldBytes(
            exact=self.exact + other.exact,
            codes=self.codes + other.codes,
            scales=self.scales + other.scales,
            positions=self.positions + other.positions,
            ids=self.ids + other.ids,
            state=self.state + other.state,
        )

    def times(self, layers: int) -> HeldBytes:
        """Return the bytes of ``layers`` layers, each of which holds as many bytes as these."""
        return HeldBytes(
            exact=layers * self.exact,
            codes=layers * self.codes,
            scales=layers * self.scales,
            positions=layers * self.positions,
            ids=layers * self.ids,
            state=layers * self.state,
        )

    def parts(self) -> tuple[int, ...]:
        """Return the bytes by purpose, in the order of the fields."""
        return (self.exact, self.codes, self.scales, self.positions, self.ids, self.state)


def bytes_held(layer: LayerCache) -> HeldBytes:
    """Return the bytes that one layer keeps alive, by purpose."""
    total = HeldBytes()
    for segment in layer.segments:
        codes_and_scales: list[Tensor] = []
        codes_alone: list[Tensor] = []
        state_tensors = list(segment.state.values())
        if segment.codes is not None:
            for packed in (segment.codes.k, segment.codes.v):
                codes_and_scales.extend(packed.payload())
                codes_alone.extend(packed.codes_only())
            state_tensors.extend(segment.codes.frozen())
        id_tensors = [t for t in (segment.key_channels, segment.value_channels, segment.leads) if t is not None]
        codes = storage_bytes(codes_alone)
        # The scales and minima are what a packed tensor stores beside its codes.
        scales = storage_bytes(codes_and_scales) - codes
        ids = storage_bytes(id_tensors)
        state = storage_bytes(state_tensors)
        # The rest of the payload is exact. The rest of the overhead is positions and counts.
        total += HeldBytes(
            exact=storage_bytes(segment.payload()) - codes - scales,
            codes=codes,
            scales=scales,
            positions=storage_bytes(segment.overhead()) - ids - state,
            ids=ids,
            state=state,
        )
    # A method that chooses again while decoding keeps the layer's last queries, which belong to no segment.
    if layer.observed is not None and layer.observed.last_q is not None:
        total += HeldBytes(state=storage_bytes([layer.observed.last_q]))
    return total


@dataclass(frozen=True)
class DeclaredBytes:
    """The bytes that a chain declares after a prompt, over all layers.

    tokens: the mean number of tokens per stored head, over the layers that methods compress.
    payload: the bytes of keys and values, and of the states of layers that hold one.
    overhead: the bytes of all else, such as positions.
    even: True if the data decide how tokens are spread over heads or layers. The formula then spreads them evenly.
    This changes no sum if every token costs the same.
    """

    tokens: float
    payload: int
    overhead: int
    even: bool

    @property
    def total(self) -> int:
        """The bytes of payload and overhead together."""
        return self.payload + self.overhead


class LayerTokens(NamedTuple):
    """The tokens of one layer after a prompt, by formula. Layers with equal records have equal bytes.

    expected: the chain's promise for the layer.
    sizes: the tokens of each stored head. If the promise leaves them open, they are spread evenly.
    tokens_read: how many of the prompt's tokens the layer reads.
    layout_layer: the first layer whose tokens take as many bytes each as this layer's (``Chain.first_alike``).
    """

    expected: Expected
    sizes: tuple[int, ...]
    tokens_read: int
    layout_layer: int


def bytes_declared(chain: Chain, shape: Shape, n: int, itemsize: int) -> DeclaredBytes | None:
    """Return the bytes by formula after a prompt of n tokens, or None if its text decides how many tokens stay.

    itemsize: the bytes of an exact number.
    """
    counts = layer_counts(chain, shape, n)
    if counts is None:
        return None
    heads = chain.heads(shape.kv_heads, shape.query_heads)
    local_payload, overhead = declare_local_layers(chain, shape, n, itemsize)
    payload = local_payload + shape.state_bytes(itemsize)
    tokens = 0
    for layer, count in counts.items():
        blocks = []
        for size in layer.sizes:
            blocks.append(chain.layout(size, shape.head_dim, itemsize, layer.layout_layer, shape.own_values))
        payload += count * payload_bytes(blocks)
        overhead += count * _declare_overhead(chain, layer, blocks, shape)
        tokens += count * sum(layer.sizes)
    overhead += shape.layers * chain.observed_bytes(n, shape.query_heads, shape.head_dim, itemsize)
    if chain.sharer is not None:
        keyless_heads = count_heads_without_keys(chain, shape, n)
        if keyless_heads is None:
            return None
        # A head without keys saves n D numbers.
        payload -= sum(keyless_heads) * n * shape.head_dim * itemsize
        # A layer with such a head stores an id for each query head: that of its leading head.
        layers_with_ids = sum(count > 0 for count in keyless_heads)
        overhead += layers_with_ids * HEAD_ID_BYTES * shape.query_heads
    return DeclaredBytes(
        tokens=tokens / (heads * shape.layers),
        payload=payload,
        overhead=overhead,
        even=any(layer.expected.low != layer.expected.high for layer in counts),
    )


def declare_local_layer(chain: Chain, tokens: int, kv_heads: int, head_dim: int, itemsize: int) -> tuple[int, int]:
    """Return the (payload, overhead) bytes of a local layer that holds ``tokens`` tokens, by formula."""
    exact_bytes = tokens * head_dim * itemsize
    block = Block(tokens, key_bytes=exact_bytes, value_bytes=exact_bytes)
    if chain.quantiser is not None and chain.local_coder is not None:
        (block,) = chain.quantiser.packed_layout([block], head_dim, itemsize, pruner=None, layer=None)
    payload = kv_heads * (block.key_bytes + block.value_bytes)
    # all heads share one row of positions
    return payload, POSITION_BYTES * tokens + kv_heads * block.fixed_overhead


def declare_local_layers(chain: Chain, shape: Shape, n: int, itemsize: int) -> tuple[int, int]:
    """Return the (payload, overhead) bytes of all local layers after a prompt of n tokens, by formula."""
    payload, overhead = declare_local_layer(chain, min(n, shape.window), *shape.local_heads, itemsize)
    return shape.local_layers * payload, shape.local_layers * overhead


def _declare_overhead(chain: Chain, layer: LayerTokens, blocks: Sequence[Sequence[Block]], shape: Shape) -> int:
    """Return the overhead bytes that a chain declares for one layer. ``blocks`` are the blocks of each head."""
    expected, selector = layer.expected, chain.selector
    keeps_all = min(layer.sizes) >= layer.tokens_read
    # Heads are ragged if they differ in their numbers of tokens: by promise, or because only their sum is fixed.
    promises_differ = len(set(expected.low)) > 1
    only_sum_fixed = expected.total is not None or (selector is not None and selector.ragged)
    sizes_open = expected.low != expected.high and only_sum_fixed
    ragged = not keeps_all and (sizes_open or promises_differ)
    # All heads use one row of positions if they keep the same tokens.
    same_tokens = selector is None or selector.shared or keeps_all
    shared = same_tokens and not ragged
    if not ragged:
        count_tensors = 0
    elif chain.quantiser:
        # A ragged packed segment stores the lengths of its heads and the counts of its packed keys and values.
        count_tensors = 3
    else:
        count_tensors = _count_ragged_segments(chain, expected, shape)
    return overhead_bytes(blocks, shared, count_tensors)


def layer_counts(chain: Chain, shape: Shape, n: int) -> Counter[LayerTokens] | None:
    """Return {record of a layer's tokens: how many layers have it}, after a prompt of n tokens.

    Return None if the prompt's text decides how many tokens stay, so that no formula can tell.
    """
    heads = chain.heads(shape.kv_heads, shape.query_heads)
    promises = [chain.expected(n, i, shape.layers, heads) for i in range(shape.layers)]
    # In an open layer neither the heads nor their sum are fixed. The other layers' tokens are subtracted from the sum
    # over all layers, and the open layers divide the rest.
    open_layers = [promise for promise in promises if promise.low != promise.high and promise.total is None]
    total = chain.expected_sum(n, shape.layers, heads)
    if open_layers and total is None:
        return None
    # Without open layers, ``total`` may be None, and there is nothing to divide.
    fixed_tokens = sum(sum(promise.low) for promise in promises if promise.low == promise.high)
    remaining_tokens = (total or 0) - fixed_tokens
    open_layer_tokens = iter(spread_evenly(remaining_tokens, len(open_layers)))
    counts: Counter[LayerTokens] = Counter()
    for i, promise in enumerate(promises):
        if promise.low == promise.high:
            sizes = promise.low
        else:
            layer_tokens = promise.total
            if layer_tokens is None:
                layer_tokens = next(open_layer_tokens)
            sizes = tuple(spread_evenly(layer_tokens, heads))
        tokens_of_layer = LayerTokens(
            expected=promise,
            sizes=sizes,
            tokens_read=chain.tokens_read(n, i, shape.layers),
            layout_layer=chain.first_alike(i),
        )
        counts[tokens_of_layer] += 1
    return counts


def count_heads_without_keys(chain: Chain, shape: Shape, n: int) -> list[int] | None:
    """Return for each layer how many stored heads have no keys, because their query heads share another head's logits.

    Only heads that lead compute logits, so only they need keys. Returns None if the prompt's text decides the number.
    """
    heads = chain.heads(shape.kv_heads, shape.query_heads)
    leading_heads = [
        chain.leading_heads(n, i, shape.layers, shape.query_heads, shape.kv_heads) for i in range(shape.layers)
    ]
    # a stored head of several query heads loses its keys only if none of them leads, and the text decides which lead
    if heads < shape.query_heads and min(leading_heads) < shape.query_heads:
        return None
    # here each stored head serves one query head, or all query heads lead and the differences are 0
    return [shape.query_heads - count for count in leading_heads]


def spread_evenly(total: int, parts: int) -> list[int]:
    """Return ``parts`` whole numbers that add up to ``total`` and differ by at most one, the larger ones first."""
    # without parts there is nothing to divide by
    if not parts:
        return []
    size, remainder = divmod(total, parts)
    return [size + 1] * remainder + [size] * (parts - remainder)


def payload_bytes(blocks: Iterable[Iterable[Block]]) -> int:
    """Return the payload bytes of all heads together. ``blocks`` are the blocks of each head."""
    total = 0
    for head_blocks in blocks:
        total += sum(block.key_bytes + block.value_bytes for block in head_blocks)
    return total


def overhead_bytes(blocks: Sequence[Sequence[Block]], shared: bool, count_tensors: int, named_heads: int = 0) -> int:
    """Return the overhead bytes of a layer: positions, counts, head and channel ids, state.

    blocks: the blocks of each head. Every head has the fixed overhead of the head with the most blocks.
    shared: True if positions, 4 bytes per slot, are stored once for all heads.
    count_tensors: how many tensors hold 4 bytes per head: lengths of ragged segments, counts of packed keys and values.
    named_heads: how many head ids are stored, 2 bytes each. An id names the head whose logits or output another takes.
    """
    heads = len(blocks)
    # any head's blocks give the length of a shared row
    heads_with_positions = blocks[:1] if shared else blocks
    positions = 0
    for head_blocks in heads_with_positions:
        positions += sum(POSITION_BYTES * block.slots for block in head_blocks)
    state = 0
    for head_blocks in blocks:
        state += sum(block.slot_overhead * block.slots for block in head_blocks)
    # Segments hold ids for all heads in one tensor, even for a head without tokens in that segment. Such a head has no
    # block for the segment, so the head with the most blocks states the overhead of all segments.
    fixed = heads * sum(block.fixed_overhead for block in max(blocks, key=len))
    counts = COUNT_BYTES * heads * count_tensors
    head_ids = HEAD_ID_BYTES * named_heads
    return positions + counts + head_ids + state + fixed


def _count_ragged_segments(chain: Chain, expected: Expected, shape: Shape) -> int:
    """Return how many segments of a layer are ragged, so that each stores the lengths of its heads.

    These are the segments whose number of tokens differs between the heads with fewest and with most tokens.
    """
    # Numbers of slots do not depend on the width of an element, so a width of 1 byte will do.
    least = chain.layout(min(expected.low), shape.head_dim, itemsize=1)
    most = chain.layout(max(expected.high), shape.head_dim, itemsize=1)
    # If one head has more segments than the other, its extra segments are ragged as well.
    ragged = abs(len(least) - len(most))
    for least_block, most_block in zip(least, most, strict=False):
        if least_block.slots != most_block.slots:
            ragged += 1
    return ragged


def _find_pruner(chain: Chain) -> ChannelPruner | None:
    for stage in chain.stages:
        if isinstance(stage, ChannelPruner):
            return stage
    return None


def nominal_payload(chain: Chain, shape: Shape, n: int, itemsize: int) -> float | None:
    """Return the payload bytes after a prompt of n tokens as ThinK's paper counts them (arXiv 2407.21018, table 7).

    A pruned token has (1 - ratio) D channels. As in the paper, that product is not rounded, and channel masks and
    positions are left out. Without a pruning stage the result is the payload of ``bytes_declared``. Returns None if the
    prompt's text decides how many tokens stay.
    """
    counts = layer_counts(chain, shape, n)
    if counts is None:
        return None
    layer_bytes: list[float] = []
    for layer, count in counts.items():
        # heads of equal tokens have equal bytes
        bytes_by_size: dict[int, float] = {}
        for slots in set(layer.sizes):
            bytes_by_size[slots] = _count_nominal_bytes(
                chain, slots, shape, itemsize=itemsize, layer=layer.layout_layer
            )
        layer_bytes.append(count * sum(bytes_by_size[slots] for slots in layer.sizes))
    local_payload, _ = declare_local_layers(chain, shape, n, itemsize)
    return sum(layer_bytes) + local_payload + shape.state_bytes(itemsize)


def _count_nominal_bytes(chain: Chain, slots: int, shape: Shape, *, itemsize: int, layer: int) -> float:
    """Return the bytes that ``nominal_payload`` counts for one stored head of ``slots`` tokens, in layer ``layer``."""
    head_dim = shape.head_dim
    pruner = _find_pruner(chain)
    if pruner is None:
        return payload_bytes([chain.layout(slots, head_dim, itemsize, layer, shape.own_values)])
    dense = head_dim * itemsize  # the bytes of one exact key or value
    key_ratio = pruner.ratio
    value_ratio = float(getattr(pruner, "value_ratio", 0.0))  # some pruners leave values alone
    coder = chain.coder_at(layer)
    if chain.quantiser is None or coder is None:
        # the latest ``recent`` tokens keep all channels, and the older ones lose the share ``ratio`` of theirs:
        # bytes = 2 slots dense - (key_ratio + value_ratio) older_tokens dense
        older_tokens = max(0, slots - pruner.recent)
        return 2 * slots * dense - (key_ratio + value_ratio) * older_tokens * dense
    # Only packed tokens lose channels: bytes = exact + (1 - key_ratio) packed keys + (1 - value_ratio) packed values
    packed_keys = coder.keys.packed(slots)
    packed_values = coder.values.packed(slots)
    packed_key_bytes = chain.quantiser.key_bytes(packed_keys, head_dim)
    packed_value_bytes = chain.quantiser.value_bytes(packed_values, head_dim)
    exact = (2 * slots - packed_keys - packed_values) * dense
    return exact + ((1 - key_ratio) * packed_key_bytes + (1 - value_ratio) * packed_value_bytes)


def bytes_after_decoding(chain: Chain, layer: LayerCache, index: int, new: int, shape: CacheShape) -> tuple[int, int]:
    """Return (least, most), the limits of the payload bytes that ``layer`` may hold after ``new`` more tokens.

    layer: the layer's cache as it was before the new tokens.
    index: the layer's number.

    The limits differ only if a chain evicts and some tokens lack channels: the data then decide how many of those
    tokens are left.
    """
    if chain.evictor is None:
        payload = _count_grown_bytes(chain, layer, index, new=new, shape=shape)
        return payload, payload
    head_tokens, _ = chain.evictor.tokens_after(layer, index, new)
    pruner = _find_pruner(chain)
    if pruner is None:
        payload = _declare_payload(chain, head_tokens, index, shape)
        return payload, payload
    dense = _compute_exact_token_bytes(shape)
    first_segment = layer.segments[0]
    if first_segment.key_channels is None and first_segment.value_channels is None:
        # The prompt was too short to lose channels, or all tokens that lost some are gone. New ones have all channels.
        payload = sum(head_tokens) * dense
        return payload, payload
    thin = (pruner.kept_keys(shape.head_dim) + pruner.kept_values(shape.head_dim)) * shape.itemsize
    # At least: eviction leaves only thin tokens, those without some of their channels. At most: it leaves every token
    # that has all channels, the exact ones of the prompt (segments behind the first) and the new ones.
    least = sum(head_tokens) * thin
    most = least
    unpruned_counts = [segment.counts for segment in layer.segments[1:]]
    for head, tokens in enumerate(head_tokens):
        unpruned = sum(counts[head] for counts in unpruned_counts)
        most += min(tokens, unpruned + new) * (dense - thin)
    return least, most


def _compute_exact_token_bytes(shape: CacheShape) -> int:
    """Return the bytes of one exact token in one head: a key and a value, or a key that is its own value."""
    tensors = 1 if shape.own_values else 2
    return tensors * shape.head_dim * shape.itemsize


def _declare_payload(chain: Chain, head_tokens: Iterable[int], index: int, shape: CacheShape) -> int:
    """Return the payload bytes that a chain declares for layer ``index``, whose heads hold ``head_tokens`` tokens."""
    return payload_bytes(
        chain.layout(tokens, shape.head_dim, shape.itemsize, index, shape.own_values) for tokens in head_tokens
    )


def _count_grown_bytes(chain: Chain, layer: LayerCache, index: int, *, new: int, shape: CacheShape) -> int:
    """Return the payload bytes of a layer that stores ``new`` more tokens and evicts none.

    layer: the layer's cache as it was before the new tokens.
    index: the layer's number.
    """
    stored_tokens = layer.kept_counts()  # one number for each head
    if chain.coder and chain.coder.grows:
        return _declare_payload(chain, [tokens + new for tokens in stored_tokens], index, shape)
    if chain.coder:
        # the coder packs the prompt alone: new tokens stay exact
        prompt_bytes = sum(storage_bytes(segment.payload()) for segment in layer.segments)
        return prompt_bytes + new * len(stored_tokens) * _compute_exact_token_bytes(shape)
    return _count_exact_bytes(chain, layer, index, new=new, shape=shape)


def _count_exact_bytes(chain: Chain, layer: LayerCache, index: int, *, new: int, shape: CacheShape) -> int:
    """Return the payload bytes of a layer that stores ``new`` more tokens exactly and evicts none.

    layer: the layer's cache as it was before the new tokens.
    index: the layer's number.
    """
    if chain.lowrank:
        new_token = sum(chain.lowrank.widths(index)) * shape.itemsize  # latents, which all heads use
    else:
        new_token = shape.kv_heads * _compute_exact_token_bytes(shape)
    stored_heads = len(layer.kept_counts())
    ragged = any(segment.lengths is not None for segment in layer.segments)
    total = new * new_token
    for segment in layer.segments:
        # Ragged heads are attended one by one, each with its own copy of a text that was appended since.
        copies = stored_heads // segment.heads if ragged else 1
        total += storage_bytes(segment.payload()) * copies
    return total
