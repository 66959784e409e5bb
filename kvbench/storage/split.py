"""CPU attention of new tokens over parts of the stored tokens. Parts are merged by log-sum-exp, as in flash-decoding.

A part is one call of PyTorch's fused function, which reads keys and values once and keeps no weights. The query heads
of a group read their keys together, as if they were that many queries of one head. Numbers are fp32.
Shapes: U entries, Hq query heads, H stored heads, T new tokens, L slots, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.kv.exact_attention import FUSED, attend_with_lse
from kvbench.kv.own_values import values_or_keys
from kvbench.storage.attend import compute_logits, hide_free, weigh
from kvbench.storage.channels import spread_channels
from kvbench.storage.row_segments import Ragged, RowSegment


class Part(NamedTuple):
    """Attention over some of the tokens: the output of a softmax over these tokens, and the lse that merges parts."""

    out: Tensor  # [U, Hq, T, D]
    lse: Tensor  # [U, Hq, T], the logarithm of the sum of exp(logit); -inf over no token


def attend(query: Tensor, keys: Tensor, values: Tensor, scale: float, hidden: Tensor | None = None) -> Part:
    """Return the attention of query [U, Hq, T, D] over keys and values [U, H, L, D] of at least one token.

    scale: the factor of q.k.
    hidden: [U or 1, H or 1, T or 1, L], True where a query must not look; None: every query sees every token.
    """
    u, hq, t, d = query.shape
    h, length = keys.shape[1:3]
    values = values_or_keys(keys, values)
    # the query heads of a group become queries of their kv head: token j of head i is query i T + j
    q = query.reshape(u, h, hq // h * t, d)
    mask: Tensor | None = None
    if hidden is not None:
        hidden_rows = hidden
        if hidden.shape[2] > 1:
            # each query head of the group hides the same T rows
            hidden_rows = hidden.repeat(1, 1, hq // h, 1)
        mask = torch.zeros(hidden_rows.shape).masked_fill_(hidden_rows, -torch.inf).expand(u, -1, q.shape[2], length)
    # 0.0 means no dropout; False means that the function adds no causal mask of its own
    out, lse = FUSED(q, keys, values, 0.0, False, attn_mask=mask, scale=scale)
    if hidden is not None:
        # over no token the fused function returns 0 as output and as lse, but log(0) is -inf
        sees_nothing = hidden.all(dim=-1).repeat(1, 1, q.shape[2] // hidden.shape[2])
        lse = lse.masked_fill(sees_nothing, -torch.inf)
    return Part(out.reshape(u, hq, t, -1), lse.reshape(u, hq, t))


def attend_causally(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Part:
    """Return the attention of the newest T of L tokens over all L tokens. The newest tokens see each other causally.

    query: [U, Hq, T, D], the queries of the newest tokens.
    keys, values: [U, H, L, D], those of all tokens, the newest last.
    """
    t, length = query.shape[2], keys.shape[2]
    if t == 1:
        return attend(query, keys, values, scale)
    future = torch.ones(1, 1, t, length, dtype=torch.bool).triu(length - t + 1)
    return attend(query, keys, values, scale, hidden=future)


def attend_after(
    query: Tensor, earlier: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], scale: float
) -> tuple[Tensor, Tensor] | None:
    """Return (attention [Hq, T, D], lse [Hq, T]) of T tokens over earlier tokens and, causally, over themselves.

    Returns None if PyTorch's fused function cannot compute it: on a GPU, in half precision, or with a cap or sinks.

    query: [Hq, T, D].
    earlier: the keys and values [H, L, D] of at least one earlier token.
    own: the keys and values [H, T, D] of the T tokens.
    """
    own_attention = attend_with_lse(query, own[0], own[1], scale)
    if own_attention is None:
        return None
    own_out, own_lse = own_attention
    keys, values = earlier
    earlier_part = attend(query[None], keys[None], values[None], scale)
    both = join_parts(earlier_part, Part(own_out[None], own_lse[None]))
    return both.out[0], both.lse[0]


def attend_segments(query: Tensor, segments: Sequence[RowSegment | Ragged], scale: float) -> Part:
    """Return the attention of query [U, Hq, T, D] over all tokens of stored segments.

    Heads of the segments must not share logits. Without any token the output is 0 and the lse is -inf.
    """
    # a segment without tokens has no attention to merge
    parts = [_attend_segment(query, s.padded(), scale) for s in segments if s.longest]
    if not parts:
        return Part(torch.zeros_like(query), query.new_full(query.shape[:3], -torch.inf))
    total = parts[0]
    for part in parts[1:]:
        total = join_parts(total, part)
    return total


def join_parts(a: Part, b: Part) -> Part:
    """Return the attention over the tokens of both parts, with its lse. Part b must have at least one token."""
    # lse = log(e^a.lse + e^b.lse)
    return Part(merge_outputs(a, b), torch.logaddexp(a.lse, b.lse))


def merge_outputs(a: Part, b: Part) -> Tensor:
    """Return the attention [U, Hq, T, D] over the tokens of both parts. Part b must have at least one token."""
    # out = (e^a.lse a.out + e^b.lse b.out) / (e^a.lse + e^b.lse) = b.out + sigmoid(a.lse - b.lse) (a.out - b.out)
    # A row must not depend on its place in a batch, where PyTorch may run vector or scalar code. The two agree in fp64
    # once rounded, and in single sums and products.
    weight = torch.sigmoid((a.lse - b.lse).double()).to(a.out.dtype)
    return (a.out - b.out).mul_(weight[..., None]).add_(b.out)


def _attend_segment(query: Tensor, s: RowSegment, scale: float) -> Part:
    """Return the attention of query [U, Hq, T, D] over one stored segment, whole or thin."""
    if s.key_channels is None and s.value_channels is None:
        hidden: Tensor | None = ~s.valid[:, :, None] if s.valid is not None else None
        return attend(query, s.k, s.v, scale, hidden=hidden)
    scores = compute_logits(query, s.k, scale, s.key_channels)
    if s.valid is not None:
        scores = hide_free(scores, s.valid)
    lse = scores.logsumexp(dim=-1)
    # weights = exp(logit - lse); the clamp makes them 0 over no token, where -inf - -inf would be NaN
    finite_lse = lse.clamp(min=torch.finfo(lse.dtype).min)
    out = weigh((scores - finite_lse[..., None]).exp_(), s.v)
    if s.value_channels is not None:
        out = spread_channels(out, s.value_channels, query.shape[3])
    return Part(out, lse)
