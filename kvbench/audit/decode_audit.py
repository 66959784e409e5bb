"""Audit the tokens and bytes that a cache held while decoding against its chain's declaration.

A cache may pass its prompt's audit and exceed its promise afterwards, so its peak is checked as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.audit.accounting import bytes_after_decoding
from kvbench.base.errors import Refused
from kvbench.kv.model_shape import CacheShape
from kvbench.methods.core.evicting import EvictingSelector
from kvbench.methods.core.prompt_cache import PromptCache


@dataclass(frozen=True)
class Stored:
    """The bytes of keys and values that one row held at one moment of decoding.

    fed: how many tokens the row had read by then, beyond the tokens of its cache.
    payload: the bytes in each layer.
    """

    fed: int
    payload: Sequence[int]


def check_peak(cache: PromptCache, held: Sequence[int], fed: int) -> int:
    """Return the most tokens that a head of any layer held while decoding. Raises Refused if a layer held too many.

    cache: the cache as it was before the new tokens.
    held: for each layer, the most tokens that one of its heads held at any time while decoding.
    fed: the number of new tokens.
    """
    chain = cache.chain
    limits, limit_over_layers = _declare_limits(cache, fed)
    # a head may hold fewer than its limit, for example if the answer ends before the next choice
    for i, (most, limit) in enumerate(zip(held, limits, strict=True)):
        if most > limit:
            raise Refused(
                f"{chain.name}: layer {i} holds {most} tokens per head while decoding, declared are at most {limit}"
            )
    if limit_over_layers is not None and sum(held) > limit_over_layers:
        raise Refused(
            f"{chain.name}: holds {sum(held)} tokens per head over all layers while decoding, "
            f"declared are at most {limit_over_layers}"
        )
    return max(held)


def _declare_limits(cache: PromptCache, fed: int) -> tuple[list[int], int | None]:
    """Return the most tokens that a head of each layer may hold while decoding, and the most over all layers.

    A cache that grows may hold its earlier tokens and the new ones. A cache that evicts may hold its selector's
    ``decode_limit``. The limit over all layers is None unless the data divide one budget among the layers.

    cache: the cache as it was before the new tokens.
    fed: the number of new tokens.
    """
    selector, evictor = cache.chain.selector, cache.chain.evictor
    # ``every``: after so many new tokens the evictor chooses again
    if evictor is not None and evictor.every:
        # heads grow until the next choice, so they are largest just before it
        limits = []
        for i, layer in enumerate(cache.layers):
            _, most_tokens = evictor.tokens_after(layer, i, fed)
            limits.append(max(most_tokens))
        return limits, None
    grown_sizes = [layer.tokens + fed for layer in cache.layers]
    if not isinstance(selector, EvictingSelector) or not selector.evicts:
        return grown_sizes, None
    budgets = [selector.decode_limit(cache.prompt_tokens, i) for i in range(len(cache.layers))]
    limit_over_layers = None
    if cache.chain.rebalancer is not None:
        # the data divide one budget among the layers: each layer has its share, and only the sum is fixed
        limit_over_layers = sum(min(budget, cache.seen + fed) for budget in budgets)
        budgets = [selector.layer_budget(layer, i) for i, layer in enumerate(cache.layers)]
    # before its budget is full, a cache grows
    limits = [min(size, budget) for size, budget in zip(grown_sizes, budgets, strict=True)]
    return limits, limit_over_layers


def check_bytes(cache: PromptCache, stored: Stored, shape: CacheShape) -> None:
    """Raise Refused, with the reason, unless the row's payload is as declared for ``cache`` and its new tokens.

    cache: the cache as it was before the new tokens.
    stored: the payload bytes that a row held in each layer, and how many new tokens it had read.
    shape: the sizes of the model's cache.
    """
    for i, payload in enumerate(stored.payload):
        layer = cache.layers[i]
        # the limits differ only where the data decide how many tokens without all channels stay
        low, high = bytes_after_decoding(cache.chain, layer, i, new=stored.fed, shape=shape)
        if not low <= payload <= high:
            declared = f"{low}" if low == high else f"{low} to {high}"
            raise Refused(
                f"{cache.chain.name}: layer {i} holds {payload} payload bytes after {stored.fed} new tokens, "
                f"the formula says {declared}"
            )
