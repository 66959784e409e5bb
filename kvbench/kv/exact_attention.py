"""Exact attention of a prompt: its softmax rows, their column sums, and its outputs.

Queries are taken in blocks, so that no n x n tensor is in memory. Shapes: Hq query heads, Hk kv heads, n prompt tokens,
m tokens seen, w last queries, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.kv.own_values import values_or_keys
from kvbench.kv.scale import capped, exponentiate, is_plain, sinks_of
from kvbench.kv.segment import per_head

BLOCK_BYTES = 16 * 2**20  # a block of attention rows takes at most this much memory
CACHED_BYTES = 2**20  # a block of this size stays in the cache of one CPU thread
FUSED: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
"""PyTorch's CPU attention that returns (outputs, log-sum-exps), or None in a PyTorch that lacks it."""


def causal_softmax(query: Tensor, keys: Tensor, scale: float, window: int | None = None) -> Tensor:
    """Return the attention rows [Hq, w, m] fp32 of the last w of m tokens: softmax of scale * q k^T, causal.

    query is [Hq, w, D], keys [Hk, m, D]. A sliding ``window`` hides keys ``window`` or more tokens behind the query.
    ``scale`` may carry the model's cap and sinks (``LogitScale``).
    """
    hq, w, d = query.shape
    hk, m, _ = keys.shape
    # logits = scale * q k^T; the query heads of a group share one product with their kv head
    scaled_query = (query.float() * scale).reshape(hk, hq // hk * w, d)
    logits = capped(scaled_query @ keys.float().transpose(1, 2), scale).view(hq, w, m)
    # query i is token m - w + i: it sees no later key, and under a window no key ``window`` or more tokens before it
    ones = torch.ones(w, m, dtype=torch.bool, device=logits.device)
    hidden = ones.triu(m - w + 1)
    if window is not None:
        hidden |= ones.tril(m - w - window)
    logits.masked_fill_(hidden, -torch.inf)
    # the softmax runs in place: with long prompts a second copy of the block would dominate the memory of statistics
    weights, total = exponentiate(logits, sinks_of(scale))
    return weights.div_(total)


def yield_row_blocks(
    query: Tensor, keys: Tensor, scale: float, window: int | None = None, block_bytes: int = BLOCK_BYTES
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield the attention rows of a prompt's last queries in blocks of about ``block_bytes`` bytes.

    A block is (queries, keys, rows [Hq, its queries, its keys]) with the slices of both. query [Hq, w, D] are the
    queries of the last w of m tokens, keys are [Hk, m, D]. A sliding ``window`` hides keys ``window`` or more tokens
    behind the query. A block then has only the keys of its band, so that all blocks cost w * window and not w * m.
    """
    hq, w, _ = query.shape
    k = keys.float()
    n_earlier = k.shape[1] - w
    # a row of fp32 attention over all heads takes 4 hq m bytes
    row_bytes = 4 * hq * k.shape[1]
    block = max(1, block_bytes // row_bytes)
    if window is not None:
        # the band of b queries has b + window - 1 keys: few queries waste few of them
        block = min(w, max(32, window // 4))
    for start in range(0, w, block):
        end = min(w, start + block)
        first = 0
        if window is not None:
            first = max(0, n_earlier + start - window + 1)
        seen = slice(first, n_earlier + end)
        yield slice(start, end), seen, causal_softmax(query[:, start:end], k[:, seen], scale, window)


def column_sums(
    query: Tensor, keys: Tensor, scale: float, block_bytes: int | None = None, lse: Tensor | None = None
) -> Tensor:
    """Return the attention [Hq, m] fp32 that each token receives from the queries: column sums of their softmax rows.

    query [Hq, w, D] are the queries of the last w of m tokens; keys are [Hk, m, D]. A CPU takes as many kv heads at a
    time as it has threads. It computes the rows in blocks of ``block_bytes``, which stay in the processor's cache.

    lse: [Hq, w], the logarithm of each row's sum of exponentials, if attention has computed it already; it saves passes
    here. It is given only for a plain ``scale``, without cap and sinks.
    """
    hq, w = query.shape[:2]
    hk, m = keys.shape[:2]
    # the first query is that of token m - w
    group, n_earlier = hq // hk, m - w
    heads_at_once, block_queries = _choose_block_size(query, keys, block_bytes)
    q = query.float() * scale
    k = keys.float()
    if lse is not None:
        # one more channel subtracts lse from every logit within the product: (q, -lse) . (k, 1)
        q, k = torch.cat([q, -lse[..., None]], dim=-1), F.pad(k, (0, 1), value=1.0)
    q = q.view(hk, group, w, -1)
    k = k.transpose(1, 2).contiguous()
    sinks = sinks_of(scale)
    if sinks is not None:
        sinks = sinks.view(hk, group, 1, 1)
    # ``future`` marks the keys of a block's own tokens that come after each query of the block
    future = torch.ones(block_queries, block_queries, dtype=torch.bool, device=q.device).triu(1)
    sums = q.new_zeros(hk, group, m)
    for first in range(0, hk, heads_at_once):
        kv_slice = slice(first, first + heads_at_once)
        for start in range(0, w, block_queries):
            end = min(w, start + block_queries)
            # queries start to end see the keys up to the last query's own token
            seen = n_earlier + end
            logits = capped(q[kv_slice, :, start:end].flatten(1, 2) @ k[kv_slice, :, :seen], scale)
            logits = logits.view(-1, group, end - start, seen)
            # a view of the columns of the block's own tokens, which see each other causally
            own_columns = logits[..., n_earlier + start :]
            if lse is not None:
                # exp(logit - lse) is the softmax itself; tril clears the keys that come after each query
                logits.exp_()
                own_columns.tril_()
                sums[kv_slice, :, :seen] += logits.sum(dim=2)
            else:
                own_columns.masked_fill_(future[: end - start, : end - start], -torch.inf)
                block_sinks = sinks[kv_slice] if sinks is not None else None
                sums[kv_slice, :, :seen] += _sum_softmax_columns(logits, block_sinks)
    return sums.view(hq, m)


def _choose_block_size(query: Tensor, keys: Tensor, block_bytes: int | None) -> tuple[int, int]:
    """Return (kv heads, queries) of a block in which ``column_sums`` computes rows, at least one of each.

    block_bytes: the most bytes of a block's rows, which are fp32. None: a GPU takes BLOCK_BYTES for all heads, a CPU
        CACHED_BYTES for each of as many kv heads as it has threads.
    """
    hq, w = query.shape[:2]
    hk, m = keys.shape[:2]
    if query.is_cuda:
        heads_at_once, default_bytes = hk, BLOCK_BYTES
    else:
        heads_at_once = min(hk, torch.get_num_threads())
        default_bytes = heads_at_once * CACHED_BYTES
    # the fp32 rows of one query, over all query heads of these kv heads
    query_bytes = 4 * heads_at_once * (hq // hk) * m
    fitting_queries = (block_bytes or default_bytes) // query_bytes
    return heads_at_once, max(1, min(w, fitting_queries))


def _sum_softmax_columns(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the column sums [H, group, m] of the softmax of fp32 logits [H, group, w, m], which are overwritten.

    Masked logits are -inf. ``sinks`` are [H, group, 1, 1].
    """
    weights, totals = exponentiate(logits, sinks)
    # one product computes, for each column j, the sum over rows i of weights[i, j] / totals[i]
    inverse = totals.reciprocal_().transpose(2, 3)
    return (inverse @ weights)[:, :, 0]


def can_fuse(query: Tensor, scale: float) -> bool:
    """Return True if FUSED exists and takes these queries and ``scale``: fp32 on a CPU, without cap and sinks."""
    if FUSED is None or not is_plain(scale):
        return False
    return query.device.type == "cpu" and query.dtype == torch.float32


def attend_with_lse(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor] | None:
    """Return (causal attention [Hq, n, D], each row's log-sum-exp [Hq, n]), computed by FUSED.

    query is [Hq, n, D], keys and values are [Hk, n, D], all fp32. Returns None if FUSED cannot compute it: on a GPU, in
    half precision, or with capped logits or sinks.
    """
    if not can_fuse(query, scale):
        return None
    values = values_or_keys(keys, values)
    query_heads = len(query)
    k = per_head(keys, query_heads)
    # keys that are their own values (latents) are repeated for the query heads only once
    v = k if values is keys else per_head(values, query_heads)
    # FUSED takes the dropout (0.0) and the causal flag (True) by position
    out, lse = FUSED(query[None], k[None], v[None], 0.0, True, scale=scale)
    return out[0], lse[0]


def attend_rows(query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None = None) -> Tensor:
    """Return causal attention [Hq, w, D] in the query's dtype, computed from softmax rows in fp32.

    query [Hq, w, D] are the queries of the last w of m tokens; keys and values are [Hk, m, D]. A sliding ``window``
    hides keys ``window`` or more tokens behind the query.
    """
    values = values_or_keys(keys, values)
    hq, _, d = query.shape
    hk = values.shape[0]
    v = values.float()
    out = torch.empty_like(query)
    for queries, seen, rows in yield_row_blocks(query, keys, scale, window):
        # the query heads of a group share one product with the values of their kv head
        block = rows.reshape(hk, hq // hk * rows.shape[1], rows.shape[2]) @ v[:, seen]
        out[:, queries] = block.reshape(hq, rows.shape[1], d).to(query.dtype)
    return out


def attend_in_blocks(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, blocks: Sequence[tuple[int, Tensor]]
) -> Tensor:
    """Return the attention [Hq, n, D] of a prompt read in blocks.

    A block attends its own tokens causally, and those earlier tokens that were kept when it was read.

    query: [Hq, n, D].
    keys, values: [Hk, n, D].
    blocks: for each block in order (its first token, the kept earlier tokens [Hk, m]), as indices; at least one block.
    """
    values = values_or_keys(keys, values)
    out = torch.empty_like(query)
    # a block ends where the next one begins, and the last one at the end of the prompt
    ends = [start for start, _ in blocks[1:]]
    ends.append(query.shape[1])
    for (start, kept_tokens), end in zip(blocks, ends, strict=True):
        new_tokens = torch.arange(start, end, device=query.device).expand(len(kept_tokens), -1)
        index = torch.cat([kept_tokens, new_tokens], dim=1)[..., None].expand(-1, -1, query.shape[2])
        # ``causal_softmax`` takes the last tokens as the queries' own: the block's tokens follow the kept ones
        rows = causal_softmax(query[:, start:end], keys.gather(1, index), scale)
        # the query heads of a group share one product with the values of their kv head
        block = rows.view(len(kept_tokens), -1, rows.shape[2]) @ values.gather(1, index).float()
        out[:, start:end] = block.view(query.shape[0], end - start, -1).to(query.dtype)
    return out
