"""Attention over exact tokens: whole or thin keys and values, in heads of equal or of different lengths.

A program reads one split of one stored head for all of that head's queries, so that grouped query heads share the
reads. Thin keys are multiplied with the query's own channels (arXiv 2407.21018, section 3). Outputs of thin values are
summed in the places of their channels.
Shapes: B rows, Hq query heads, H stored heads, T new tokens, R = Hq / H * T queries of a stored head.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvbench.storage.kernels.softmax import (
    Parts,
    Splits,
    contiguous_channels,
    count_seen,
    find_places,
    find_program,
    power_of_two,
    product_type,
    softmax_step,
    start_softmax,
    store_split,
)
from kvbench.storage.row_segments import Ragged, RowSegment


def attend(
    query: Tensor, run: RowSegment | Ragged, scale: float, cut: Splits, parts: Parts, causal: bool = False
) -> None:
    """Write into ``parts`` the attention of query [B, Hq, T, D], contiguous, over each split of ``run``.

    run: the exact tokens: a stored segment, or the tail.
    scale: the factor of q.k.
    cut: how the run's tokens are cut into splits.
    parts: one partial result for each split of ``cut``.
    causal: True if the run's last T tokens are the query's own. Each query then sees no later token.
    """
    b, hq, t, d = query.shape
    rows = hq // run.heads * t
    c, cv = run.k.shape[-1], run.v.shape[-1]
    k, v, lengths = _with_unit_stride(run.k), _with_unit_stride(run.v), run.lengths
    k_row, k_head, k_token = _strides(k)
    v_row, v_head, v_token = _strides(v)
    length_row, length_head = 0, 0
    if lengths is not None:
        length_row = lengths.stride(0)
        # lengths [B, 1]: all heads of a row have one length, so stride 0 repeats it
        if lengths.shape[1] > 1:
            length_head = lengths.stride(1)
    # the grid has one program for each stored head of each row and each split
    _attend[(b * run.heads, cut.count)](
        query=query,
        keys=k,
        values=v,
        key_channels=contiguous_channels(run.key_channels),
        value_channels=contiguous_channels(run.value_channels),
        starts=run.starts,
        lengths=lengths,
        out=parts.out,
        lse=parts.lse,
        k_row=k_row,
        k_head=k_head,
        k_token=k_token,
        v_row=v_row,
        v_head=v_head,
        v_token=v_token,
        length_row=length_row,
        length_head=length_head,
        longest=run.longest,
        heads=run.heads,
        span=cut.span,
        queries=b * hq * t,
        scale=scale,
        T=t,
        R=rows,
        C=c,
        CV=cv,
        D=d,
        BLOCK_R=power_of_two(rows, 16),
        BLOCK_C=power_of_two(c, 16),
        BLOCK_CV=power_of_two(cv, 16),
        BLOCK_D=power_of_two(d, 16),
        BLOCK_N=cut.block,
        CAUSAL=causal,
        PRODUCT=product_type(query),
        enable_fp_fusion=True,
    )


def _with_unit_stride(x: Tensor) -> Tensor:
    """Return x with the channels of a token next to each other in memory, as the kernel reads them."""
    if x.stride(-1) == 1:
        return x
    return x.contiguous()


def _strides(x: Tensor) -> tuple[int, int, int]:
    """Return the strides of x by (row, head, token), in elements. Ragged x has no row and head axes: they get 0."""
    if x.dim() == 2:
        return (0, 0, x.stride(0))
    return (x.stride(0), x.stride(1), x.stride(2))


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
    """Write to ``out`` and ``lse`` the attention of one stored head's R queries over one split of its tokens.

    ``attend`` passes pointers and strides. Stored keys have C and stored values CV of a head's D channels. T is the
    number of new tokens. BLOCK_R, BLOCK_C, ... are R, C, ... rounded up to powers of two. BLOCK_N tokens are read at a
    time.
    """
    head, split, row, stored_head = find_program(heads)
    # r, c, d and n count the queries, key channels, dimensions and tokens of a block
    r, c, d, n = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    kind: tl.constexpr = query.dtype.element_ty

    total = longest
    if lengths is not None:
        total = tl.load(lengths + row * length_row + stored_head * length_head)
    # first is the first token of a ragged head, whose tokens lie behind those of earlier heads
    first = tl.zeros([], tl.int64)
    if starts is not None:
        first = tl.load(starts + head)
    # move the pointers to the head's first token
    keys += row * k_row + stored_head * k_head + first * k_token
    values += row * v_row + stored_head * v_head + first * v_token

    # for thin keys, only the query's channels that the keys keep are loaded
    key_dim = c
    if key_channels is not None:
        key_dim = tl.load(key_channels + head * C + c, mask=c < C, other=0).to(tl.int32)
    # with thin values, output dimension d takes their channel value_channel[d], or none for -1
    value_channel = d
    if value_channels is not None:
        value_channel = find_places(value_channels, head, CV, BLOCK_CV, d)
    has_value = (value_channel >= 0) & (d < D)

    # blocks are powers of two, so masks cut off everything beyond R queries, C and D channels
    is_query = (r < R)[:, None] & (c < C)[None, :]
    q = tl.load(query + (head * R + r)[:, None] * D + key_dim[None, :], mask=is_query, other=0.0).to(PRODUCT)
    seen = tl.zeros([BLOCK_R], tl.int32) + total
    if CAUSAL:
        seen = count_seen(total, r, T)

    best, mass = start_softmax(BLOCK_R)
    sums = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    start = split * span
    for block_start in range(start, tl.minimum(start + span, total), BLOCK_N):
        token = block_start + n
        is_token = token < total
        k_offsets = token[:, None] * k_token + c[None, :]
        k = tl.load(keys + k_offsets, mask=is_token[:, None] & (c < C)[None, :], other=0.0).to(kind).to(PRODUCT)
        v_offsets = token[:, None] * v_token + value_channel[None, :]
        v = tl.load(values + v_offsets, mask=is_token[:, None] & has_value[None, :], other=0.0).to(kind).to(PRODUCT)
        # logits = scale q k^T, -inf for tokens that a query does not see
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        logits = tl.where(token[None, :] < seen[:, None], logits, -float("inf"))
        weights, shrink, best, mass = softmax_step(logits, best, mass)
        sums = sums * shrink[:, None] + tl.dot(weights.to(kind).to(PRODUCT), v, input_precision="ieee")

    store_split(out, lse, split * queries + head * R, sums=sums, best=best, total=mass, r=r, d=d, R=R, D=D)
