"""Audit the tokens and bytes that a cache held while decoding against those that its chain declares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvbench.audit.accounting import bytes_after_decoding
from kvbench.audit.prompt_audit import Refused
from kvbench.methods.core.evicting import EvictingSelector
from kvbench.methods.core.prompt_cache import Cache


@dataclass(frozen=True)
class Stored:
    """The bytes of keys and values that one row held at a time while decoding.

    fed: how many tokens it had then read beyond those of its cache.
    payload: the bytes in each layer.
    """

    fed: int
    payload: Sequence[int]


def check_peak(cache: Cache, held: Sequence[int], fed: int) -> int:
    """Return the most tokens that a head of any layer held while decoding. Raises Refused if a layer held too many.

    cache: the cache as it was before the new tokens.
    held: for each layer, the most tokens that a head held since.
    fed: the number of new tokens.

    A cache that grows may hold its earlier tokens and the new ones. A cache that evicts may hold its selector's
    ``decode_limit``, which is a sum over layers if the method divides its budget among them by the data.
    """
    chain, total = cache.chain, None
    limits = [layer.tokens + fed for layer in cache.layers]
    selector, evictor = chain.selector, chain.evictor
    if evictor is not None and evictor.every:
        limits = [max(evictor.tokens_after(layer, i, fed)[1]) for i, layer in enumerate(cache.layers)]
    elif isinstance(selector, EvictingSelector) and selector.evicts:
        budgets = [selector.decode_limit(cache.prompt_tokens, i) for i in range(len(limits))]
        if chain.rebalancer is None:
            limits = [min(limit, b) for limit, b in zip(limits, budgets, strict=True)]
        else:
            shares = [selector.layer_budget(layer, i) for i, layer in enumerate(cache.layers)]
            limits = [min(limit, s) for limit, s in zip(limits, shares, strict=True)]
            total = sum(min(b, cache.seen + fed) for b in budgets)
    for i, (most, limit) in enumerate(zip(held, limits, strict=True)):
        if most > limit:
            raise Refused(
                f"{chain.name}: layer {i} holds {most} tokens per head while decoding, declared are at most {limit}"
            )
    if total is not None and sum(held) > total:
        raise Refused(
            f"{chain.name}: holds {sum(held)} tokens per head over all layers while decoding, "
            f"declared are at most {total}"
        )
    return max(held)


def check_bytes(cache: Cache, stored: Stored, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """Raise Refused, with the reason, unless storage held the bytes declared for ``cache`` and its new tokens."""
    for i, payload in enumerate(stored.payload):
        layer = cache.layers[i]
        low, high = bytes_after_decoding(cache.chain, layer, i, stored.fed, kv_heads, head_dim, dtype.itemsize)
        if not low <= payload <= high:
            declared = f"{low}" if low == high else f"{low} to {high}"
            raise Refused(
                f"{cache.chain.name}: layer {i} holds {payload} payload bytes after {stored.fed} new tokens, "
                f"the formula says {declared}"
            )
