"""Attention over packed tokens and a ring of exact tokens. Codes are decoded where they are used.

Keys are packed by channel over groups of tokens (KIVI, arXiv 2402.02750) or by token, values by token (FlexGen, arXiv
2303.06865), in the layout of kvbench.kv.packed. Keys and values are packed at different moments, so a token's key may
be packed while its value is exact. A program reads one split of one stored head for all of that head's queries.
Shapes: U rows, Hq query heads, H stored heads, T new tokens, R = Hq / H * T queries of a stored head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from torch import Tensor

from kvbench.kv.packed import BITS, MinMax, Packed
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

if TYPE_CHECKING:
    from kvbench.storage.packed_half import PackedHalf


def can_read(x: Packed) -> bool:
    """Return True if the kernel can read ``x`` [U, H, L, C]: min-max codes, with each head of each row contiguous."""
    # rows and heads may lie apart, because packed tokens are a view into buffers with room for more
    if not isinstance(x, MinMax) or x.bits not in BITS:
        return False
    return all(t[0, 0].is_contiguous() for t in x.payload())


def attend(
    query: Tensor,
    scale: float,
    keys: PackedHalf,
    values: PackedHalf,
    counts: Tensor,
    cut: Splits,
    parts: Parts,
) -> None:
    """Write into ``parts`` the attention of the newest T tokens over each split of the packed and exact tokens.

    query: [U, Hq, T, D], contiguous, the queries of the newest tokens.
    scale: the factor of q.k.
    keys, values: the packed and exact keys and values of the rows.
    counts: [3, U] int32, each row's numbers of all tokens, of packed keys, and of packed values.
    cut: how the tokens are cut into splits.
    parts: one partial result for each split of ``cut``.
    """
    u, hq, t, d = query.shape
    h = keys.ring.shape[1]
    # R: the query heads that share a stored head, times the new tokens
    queries_per_head = hq // h * t
    k, v = keys.old(), values.old()
    # callers ask ``can_read`` first
    assert isinstance(k, MinMax) and isinstance(v, MinMax)
    k_ring, v_ring = keys.ring.contiguous(), values.ring.contiguous()
    k_codes_row, k_codes_head, k_scale_row, k_scale_head = _strides(k)
    v_codes_row, v_codes_head, v_scale_row, v_scale_head = _strides(v)
    c, cv = k.shape[3], v.shape[3]
    # the grid has one program for each stored head of each row and each split
    _attend[(u * h, cut.count)](
        query=query,
        k_codes=k.codes,
        k_scale=k.scale,
        k_low=k.low,
        k_ring=k_ring,
        k_channels=contiguous_channels(keys.channels),
        v_codes=v.codes,
        v_scale=v.scale,
        v_low=v.low,
        v_ring=v_ring,
        v_channels=contiguous_channels(values.channels),
        counts=counts,
        out=parts.out,
        lse=parts.lse,
        k_codes_row=k_codes_row,
        k_codes_head=k_codes_head,
        k_scale_row=k_scale_row,
        k_scale_head=k_scale_head,
        k_slots=k_ring.shape[2],
        v_codes_row=v_codes_row,
        v_codes_head=v_codes_head,
        v_scale_row=v_scale_row,
        v_scale_head=v_scale_head,
        v_slots=v_ring.shape[2],
        rows=u,
        heads=h,
        span=cut.span,
        queries=u * hq * t,
        scale=scale,
        T=t,
        R=queries_per_head,
        C=c,
        CV=cv,
        D=d,
        K_FORM=_form(k),
        V_FORM=_form(v),
        BLOCK_R=power_of_two(queries_per_head, 16),
        BLOCK_C=power_of_two(c, 16),
        BLOCK_CV=power_of_two(cv, 16),
        BLOCK_D=power_of_two(d, 16),
        BLOCK_N=cut.block,
        PRODUCT=product_type(query),
        enable_fp_fusion=True,
    )


def _strides(x: MinMax) -> tuple[int, int, int, int]:
    """Return (stride of codes by row, of codes by head, of scales by row, of scales by head), in elements.

    Minima lie in memory as scales do.
    """
    return (x.codes.stride(0), x.codes.stride(1), x.scale.stride(0), x.scale.stride(1))


def _form(x: MinMax) -> tuple[int, ...]:
    """Return the constants that describe how ``x`` is packed. The kernel is compiled for each set of them.

    ``_dequantise`` explains them as FORM.
    """
    by_channel = x.axis == "channel"
    # a run is the codes [..., bytes, C] of a group of tokens, or [..., bytes] of a token
    run_bytes = x.codes.shape[-1]
    if by_channel:
        run_bytes = x.codes.shape[-2]
    return (x.bits, x.group, x.size, run_bytes, x.scale.shape[-1], int(by_channel), int(x.zero_point))


@triton.jit
def _unpack_plane(
    run: tl.tensor, index: tl.tensor, step: tl.tensor, inside: tl.tensor, BITS: tl.constexpr, SIZE: tl.constexpr
) -> Any:
    """Return the codes of BITS (1, 2, 4 or 8) bits at ``index`` in a run, or 0 where not ``inside``.

    ``run`` points to the first byte. A run holds SIZE codes in ``width`` bytes that lie ``step`` apart. Code i is in
    byte i mod width, and its lowest bit is bit i // width * BITS of that byte.
    """
    width: tl.constexpr = (SIZE * BITS + 7) // 8
    # kvbench.kv.packed.pack writes this layout under the name ``runs``
    byte = tl.load(run + (index % width) * step, mask=inside, other=0).to(tl.int32)
    return (byte >> (index // width * BITS)) & ((1 << BITS) - 1)


@triton.jit
def _dequantise(
    codes: tl.tensor,
    scale: tl.tensor,
    low: tl.tensor,
    token: tl.tensor,
    channel: tl.tensor,
    inside: tl.tensor,
    FORM: tl.constexpr,
) -> Any:
    """Return the numbers [N, C] fp32 of tokens [N] and channels [C]: code * scale + minimum, or 0 where not ``inside``.

    ``codes``, ``scale`` and ``low`` point to the head's first codes, scales and minima (or zero points).

    FORM is a tuple of seven constants:
    bits, group: the bits of a code, and the elements that share a scale.
    codes and bytes of a run: a run is the packed codes of a token, or of one channel of a group of tokens.
    scales: how many scales a token, or a group of tokens, has.
    by channel: 1 if a group is consecutive tokens of one channel, 0 if it is channels of one token.
    zero point: 1 if ``low`` is a zero point, not a minimum.
    """
    BITS: tl.constexpr = FORM[0]
    GROUP: tl.constexpr = FORM[1]
    SIZE: tl.constexpr = FORM[2]
    BYTES: tl.constexpr = FORM[3]
    GROUPS: tl.constexpr = FORM[4]
    BY_CHANNEL: tl.constexpr = FORM[5]
    ZERO_POINT: tl.constexpr = FORM[6]
    # a code has place ``index`` in its run, whose bytes lie ``step`` apart; ``group`` locates its scale and minimum
    if BY_CHANNEL:
        index, step = (token % GROUP)[:, None], GROUPS
        run = codes + (token // GROUP * BYTES * GROUPS)[:, None] + channel[None, :]
        group = (token // GROUP * GROUPS)[:, None] + channel[None, :]
    else:
        index, step = channel[None, :], 1
        run = codes + (token * BYTES)[:, None]
        group = (token * GROUPS)[:, None] + (channel // GROUP)[None, :]
    if BITS == 3:
        # 3-bit codes have a plane of their two low bits and, behind its bytes, a plane of their high bit
        low_bytes: tl.constexpr = (SIZE + 3) // 4
        high = _unpack_plane(run + low_bytes * step, index, step, inside=inside, BITS=1, SIZE=SIZE)
        code = _unpack_plane(run, index, step, inside=inside, BITS=2, SIZE=SIZE) | (high << 2)
    else:
        code = _unpack_plane(run, index, step, inside=inside, BITS=BITS, SIZE=SIZE)
    # value = scale * code + minimum
    factor = tl.load(scale + group, mask=inside, other=0.0).to(tl.float32)
    minimum = tl.load(low + group, mask=inside, other=0.0).to(tl.float32)
    if ZERO_POINT:
        # under a zero point the value is (code - zero point) * scale, so code 0 stands for -zero point * scale
        minimum = -factor * minimum
    return tl.where(inside, code.to(tl.float32) * factor + minimum, 0.0)


@triton.jit
def _ring_numbers(
    ring: tl.tensor,
    token: tl.tensor,
    d: tl.tensor,
    inside: tl.tensor,
    slots: tl.tensor,
    D: tl.constexpr,
) -> Any:
    """Load the exact numbers [N, D] of tokens [N] from their ring of ``slots`` slots.

    Token t is in slot t mod ``slots``. Tokens that are not ``inside`` [N] get 0.
    """
    mask = inside[:, None] & (d < D)[None, :]
    return tl.load(ring + (token % slots)[:, None] * D + d[None, :], mask=mask, other=0.0)


@triton.jit
def _attend(
    query: tl.tensor,
    k_codes: tl.tensor,
    k_scale: tl.tensor,
    k_low: tl.tensor,
    k_ring: tl.tensor,
    k_channels: tl.tensor,
    v_codes: tl.tensor,
    v_scale: tl.tensor,
    v_low: tl.tensor,
    v_ring: tl.tensor,
    v_channels: tl.tensor,
    counts: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    k_codes_row: tl.tensor,
    k_codes_head: tl.tensor,
    k_scale_row: tl.tensor,
    k_scale_head: tl.tensor,
    k_slots: tl.tensor,
    v_codes_row: tl.tensor,
    v_codes_head: tl.tensor,
    v_scale_row: tl.tensor,
    v_scale_head: tl.tensor,
    v_slots: tl.tensor,
    rows: tl.tensor,
    heads: tl.tensor,
    span: tl.tensor,
    queries: tl.tensor,
    scale: tl.tensor,
    T: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    CV: tl.constexpr,
    D: tl.constexpr,
    K_FORM: tl.constexpr,
    V_FORM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_CV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRODUCT: tl.constexpr,
) -> None:
    """Write to ``out`` and ``lse`` the attention of one stored head's R queries over one split of its tokens.

    ``attend`` passes pointers and strides. Packed keys have C and packed values CV of a head's D channels. T is the
    number of new tokens. BLOCK_R, BLOCK_C, ... are R, C, ... rounded up to powers of two. BLOCK_N tokens are read at a
    time.
    """
    head, split, row, stored_head = find_program(heads)
    # r, c, d and n count the queries, key channels, dimensions and tokens of a block
    r, c, d, n = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    kind: tl.constexpr = query.dtype.element_ty

    # counts is [3, rows]
    total = tl.load(counts + row)
    k_packed = tl.load(counts + rows + row)
    v_packed = tl.load(counts + 2 * rows + row)
    # move pointers to the head's first tokens; scales and minima lie alike, and a ring [U, H, S, D] is contiguous
    k_codes += row * k_codes_row + stored_head * k_codes_head
    k_scale += row * k_scale_row + stored_head * k_scale_head
    k_low += row * k_scale_row + stored_head * k_scale_head
    k_ring += head * k_slots * D
    v_codes += row * v_codes_row + stored_head * v_codes_head
    v_scale += row * v_scale_row + stored_head * v_scale_head
    v_low += row * v_scale_row + stored_head * v_scale_head
    v_ring += head * v_slots * D

    is_query, is_dim = (r < R)[:, None], (d < D)[None, :]
    query_rows = query + (head * R + r)[:, None] * D
    q = tl.load(query_rows + d[None, :], mask=is_query & is_dim, other=0.0).to(PRODUCT)
    thin = q  # thin is the query in the channels that packed keys keep
    if k_channels is not None:
        key_dim = tl.load(k_channels + head * C + c, mask=c < C, other=0)
        thin = tl.load(query_rows + key_dim[None, :], mask=is_query & (c < C)[None, :], other=0.0).to(PRODUCT)
    value_channel = d
    if v_channels is not None:
        value_channel = find_places(v_channels, head, CV, BLOCK_CV, d)
    has_key, has_value = (c < C)[None, :], ((value_channel >= 0) & (d < D))[None, :]
    value_channel = tl.maximum(value_channel, 0)  # the index stays valid; ``has_value`` masks dropped channels
    seen = count_seen(total, r, T)

    best, mass = start_softmax(BLOCK_R)
    sums = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    start = split * span
    end = tl.minimum(start + span, total)
    for block_start in range(start, end, BLOCK_N):
        token = block_start + n
        block_end = tl.minimum(block_start + BLOCK_N, end)
        # a token's key is either packed or exact: the other of the two products adds 0 to its logit
        logits = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
        if block_start < k_packed:
            packed_key = (token < k_packed)[:, None] & has_key
            k = _dequantise(k_codes, k_scale, k_low, token=token, channel=c, inside=packed_key, FORM=K_FORM)
            logits += tl.dot(thin, tl.trans(k.to(kind).to(PRODUCT)), input_precision="ieee")
        if block_end > k_packed:
            exact_key = (token >= k_packed) & (token < total)
            k = _ring_numbers(k_ring, token, d, inside=exact_key, slots=k_slots, D=D)
            logits += tl.dot(q, tl.trans(k.to(kind).to(PRODUCT)), input_precision="ieee")
        logits = tl.where(token[None, :] < seen[:, None], logits * scale, -float("inf"))
        weights, shrink, best, mass = softmax_step(logits, best, mass)
        # plain PyTorch rounds weights to the type of the values, so this does the same
        weights = weights.to(kind).to(PRODUCT)
        sums = sums * shrink[:, None]
        if block_start < v_packed:
            packed_value = (token < v_packed)[:, None] & has_value
            v = _dequantise(
                v_codes, v_scale, v_low, token=token, channel=value_channel, inside=packed_value, FORM=V_FORM
            )
            sums += tl.dot(weights, v.to(kind).to(PRODUCT), input_precision="ieee")
        if block_end > v_packed:
            exact_value = (token >= v_packed) & (token < total)
            v = _ring_numbers(v_ring, token, d, inside=exact_value, slots=v_slots, D=D)
            sums += tl.dot(weights, v.to(kind).to(PRODUCT), input_precision="ieee")

    store_split(out, lse, split * queries + head * R, sums=sums, best=best, total=mass, r=r, d=d, R=R, D=D)
