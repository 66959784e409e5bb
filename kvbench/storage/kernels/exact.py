"""Attention over exact tokens: whole or thin keys and values, in heads of one length or of different ones.

A program reads one split of one stored head for all of that head's queries, so that grouped query heads share what is
read. Thin keys meet the query's own channels (arXiv 2407.21018, section 3); thin values are summed up in their places.
Shapes: B rows, Hq query heads, H stored heads, T new tokens, R = Hq / H * T queries of a stored head.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvbench.storage.kernels.softmax import Parts, Splits, begun, finished, places, power, product_type, softmax_step
from kvbench.storage.row_segments import Ragged, RowSegment


def attend(
    query: Tensor, run: RowSegment | Ragged, scale: float, cut: Splits, parts: Parts, causal: bool = False
) -> None:
    """Write into ``parts`` the attention of query [B, Hq, T, D], contiguous, over each split of ``run``.

    ``causal``: the run's last T tokens are those of the query, and each sees none that comes after it.
    """
    b, hq, t, d = query.shape
    rows, c, cv = hq // run.heads * t, run.k.shape[-1], run.v.shape[-1]
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (run.k, run.v))
    lengths = run.lengths
    thin = [None if ids is None else ids.contiguous() for ids in (run.key_channels, run.value_channels)]
    _attend[(b * run.heads, cut.count)](
        query,
        k,
        v,
        *thin,
        run.starts,
        lengths,
        parts.out,
        parts.lse,
        *_strides(k),
        *_strides(v),
        *((0, 0) if lengths is None else (lengths.stride(0), lengths.stride(1) if lengths.shape[1] > 1 else 0)),
        run.longest,
        run.heads,
        cut.span,
        b * hq * t,
        scale,
        T=t,
        R=rows,
        C=c,
        CV=cv,
        D=d,
        BLOCK_R=power(rows, 16),
        BLOCK_C=power(c, 16),
        BLOCK_CV=power(cv, 16),
        BLOCK_D=power(d, 16),
        BLOCK_N=cut.block,
        CAUSAL=causal,
        PRODUCT=product_type(query),
        enable_fp_fusion=True,
    )


def _strides(x: Tensor) -> tuple[int, int, int]:
    """Return the strides of x by (row, head, token) in elements; those by row and head are 0 for ragged x."""
    return (0, 0, x.stride(0)) if x.dim() == 2 else (x.stride(0), x.stride(1), x.stride(2))


@triton.jit
def _attend(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_channels: tl.tensor,
    value_channels: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    k_token: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    v_token: tl.tensor,
    length_row: tl.tensor,
    length_head: tl.tensor,
    longest: tl.tensor,
    heads: tl.tensor,
    span: tl.tensor,
    queries: tl.tensor,
    scale: tl.tensor,
    T: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    CV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_CV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRODUCT: tl.constexpr,
) -> None:
    """Attend one split of one stored head for all R of its queries; pointers as ``attend`` passes them."""
    head, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, stored_head = head // heads, head % heads
    r, c, d, n = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    kind: tl.constexpr = query.dtype.element_ty

    total = longest
    if lengths is not None:
        total = tl.load(lengths + row * length_row + stored_head * length_head)
    first = tl.zeros([], tl.int64)
    if starts is not None:
        first = tl.load(starts + head)
    keys += row * k_row + stored_head * k_head + first * k_token
    values += row * v_row + stored_head * v_head + first * v_token

    key_dim = c
    if key_channels is not None:
        key_dim = tl.load(key_channels + head * C + c, mask=c < C, other=0).to(tl.int32)
    value_channel = d
    if value_channels is not None:
        value_channel = places(value_channels, head, CV, BLOCK_CV, d)
    has_value = (value_channel >= 0) & (d < D)

    is_query = (r < R)[:, None] & (c < C)[None, :]
    q = tl.load(query + (head * R + r)[:, None] * D + key_dim[None, :], mask=is_query, other=0.0).to(PRODUCT)
    seen = tl.zeros([BLOCK_R], tl.int32) + total
    if CAUSAL:
        # queries lie in head x T order; the newest sees all tokens, each one before it one fewer
        seen = total - (T - 1) + r % T

    best, mass = begun(BLOCK_R)
    sums = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    start = split * span
    for block_start in range(start, tl.minimum(start + span, total), BLOCK_N):
        token = block_start + n
        is_token = token < total
        k_offsets = token[:, None] * k_token + c[None, :]
        k = tl.load(keys + k_offsets, mask=is_token[:, None] & (c < C)[None, :], other=0.0).to(kind).to(PRODUCT)
        v_offsets = token[:, None] * v_token + value_channel[None, :]
        v = tl.load(values + v_offsets, mask=is_token[:, None] & has_value[None, :], other=0.0).to(kind).to(PRODUCT)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        logits = tl.where(token[None, :] < seen[:, None], logits, -float("inf"))
        weights, shrink, best, mass = softmax_step(logits, best, mass)
        sums = sums * shrink[:, None] + tl.dot(weights.to(kind).to(PRODUCT), v, input_precision="ieee")

    mean, log = finished(sums, best, mass)
    target = split * queries + head * R + r
    tl.store(out + target[:, None] * D + d[None, :], mean, mask=(r < R)[:, None] & (d < D)[None, :])
    tl.store(lse + target, log, mask=r < R)
