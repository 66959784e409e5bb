"""Exact attention rows, their column sums and outputs, in blocks of queries: never an n x n tensor."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK_BYTES = 16 * 2**20
CACHED_BYTES = 2**20


def causal_softmax(query: Tensor, keys: Tensor, scale: float, window: int | None = None) -> Tensor:
    """Attention rows [Hq, w, m] of the last w of m tokens: query [Hq, w, D], keys [Hk, m, D], fp32.

    A sliding ``window`` hides keys that are ``window`` or more tokens behind the query.
    """
    hq, w, d = query.shape
    hk, m, _ = keys.shape
    scaled = (query.float() * scale).reshape(hk, hq // hk * w, d)
    scores = (scaled @ keys.float().transpose(1, 2)).view(hq, w, m)
    ones = torch.ones(w, m, dtype=torch.bool, device=scores.device)
    hidden = ones.triu(m - w + 1)
    if window is not None:
        hidden |= ones.tril(m - w - window)
    scores.masked_fill_(hidden, -torch.inf)
    # in place: with long prompts a second copy of the block would be most of the memory that statistics need
    scores.sub_(scores.amax(dim=-1, keepdim=True)).exp_()
    return scores.div_(scores.sum(dim=-1, keepdim=True))


def row_blocks(
    query: Tensor, keys: Tensor, scale: float, window: int | None = None, block_bytes: int = BLOCK_BYTES
) -> Iterator[tuple[int, int, Tensor]]:
    """(start, end, rows [Hq, end - start, end]) of causal attention for query [Hq, n, D] and keys [Hk, n, D]."""
    hq, n, _ = query.shape
    k = keys.float()
    block = max(1, block_bytes // (4 * hq * n))
    for start in range(0, n, block):
        end = min(n, start + block)
        yield start, end, causal_softmax(query[:, start:end], k[:, :end], scale, window)


def column_sums(query: Tensor, keys: Tensor, scale: float, block_bytes: int | None = None) -> Tensor:
    """Attention that each token receives from all queries.

    query [Hq, n, D], keys [Hk, n, D] -> [Hq, n] fp32 sums of the causal softmax over query rows. A CPU goes through it
    in blocks of ``block_bytes`` that stay in its cache, one kv head after the other.
    """
    hq, n, d = query.shape
    hk, group = keys.shape[0], hq // keys.shape[0]
    block_bytes = block_bytes or (BLOCK_BYTES if query.is_cuda else CACHED_BYTES)
    heads = hk if query.is_cuda else 1
    size = max(1, min(n, block_bytes // (4 * heads * group * n)))
    q = (query.float() * scale).view(hk, group, n, d)
    k = keys.float().transpose(1, 2).contiguous()
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    sums = q.new_zeros(hk, group, n)
    for first in range(0, hk, heads):
        at = slice(first, first + heads)
        for start in range(0, n, size):
            end = min(n, start + size)
            rows = (q[at, :, start:end].flatten(1, 2) @ k[at, :, :end]).view(-1, group, end - start, end)
            rows[..., start:].masked_fill_(later[: end - start, : end - start], -torch.inf)
            rows.sub_(rows.amax(dim=-1, keepdim=True)).exp_()
            # dividing by the sums of rows and adding up is one product
            weights = rows.sum(dim=-1, keepdim=True).reciprocal_().transpose(2, 3)
            sums[at, :, :end] += (weights @ rows)[:, :, 0]
    return sums.view(hq, n)


def attend_rows(query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None = None) -> Tensor:
    """Causal attention, plainly: query [Hq, n, D], keys and values [Hk, n, D] -> [Hq, n, D] in the query's dtype."""
    hq, _, d = query.shape
    hk = values.shape[0]
    v = values.float()
    out = torch.empty_like(query)
    for start, end, rows in row_blocks(query, keys, scale, window):
        mixed = rows.reshape(hk, hq // hk * (end - start), end) @ v[:, :end]
        out[:, start:end] = mixed.reshape(hq, end - start, d).to(query.dtype)
    return out
