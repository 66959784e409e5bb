"""Attention over packed tokens and a ring of exact ones: numbers are made of codes where they are used, never stored.

Keys are packed by channel over groups of tokens (KIVI, arXiv 2402.02750) or by token, values by token (FlexGen, arXiv
2303.06865), in the layout of kvbench.cache.packed. Keys and values are packed at different moments: a token may be
packed as one and exact as the other. A program reads one split of one stored head for all of that head's queries.
Shapes: U rows, Hq query heads, H stored heads, T new tokens, R = Hq / H * T queries of a stored head.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kvbench.cache.packed import Packed
from kvbench.storage.kernels.merge import Parts
from kvbench.storage.kernels.softmax import Splits, begun, finished, places, power, product_type, softmax_step


def readable(x: Packed) -> bool:
    """Whether the kernel can read ``x`` [U, H, L, C]: what one row's head holds lies in one piece."""
    return all(t[0, 0].is_contiguous() for t in x.payload())


def attend(
    query: Tensor,
    scale: float,
    packed: tuple[Packed, Packed],
    exact: tuple[Tensor, Tensor],
    channels: tuple[Tensor | None, Tensor | None],
    counts: Tensor,
    cut: Splits,
    parts: Parts,
) -> None:
    """Leave in ``parts`` what each split gives query [U, Hq, T, D], contiguous, of the newest T tokens.

    packed: keys and values [U, H, L, C]; exact: theirs [U, H, S, D], token t in slot t mod S; channels: int64
    [U, H, C], of thin ones; counts [3, U] int32: tokens in all, those packed as keys, those packed as values.
    """
    u, hq, t, d = query.shape
    h = exact[0].shape[1]
    (k, v), rows = packed, hq // h * t
    rings = [x.contiguous() for x in exact]
    thin = [None if ids is None else ids.contiguous() for ids in channels]
    c, cv = k.shape[3], v.shape[3]
    _attend[(u * h, cut.count)](
        query,
        *k.payload(),
        rings[0],
        thin[0],
        *v.payload(),
        rings[1],
        thin[1],
        counts,
        parts.out,
        parts.lse,
        *_strides(k),
        rings[0].shape[2],
        *_strides(v),
        rings[1].shape[2],
        u,
        h,
        cut.span,
        u * hq * t,
        scale,
        T=t,
        R=rows,
        C=c,
        CV=cv,
        D=d,
        K_FORM=_form(k),
        V_FORM=_form(v),
        BLOCK_R=power(rows, 16),
        BLOCK_C=power(c, 16),
        BLOCK_CV=power(cv, 16),
        BLOCK_D=power(d, 16),
        BLOCK_N=cut.block,
        PRODUCT=product_type(query),
        enable_fp_fusion=True,
    )


def _strides(x: Packed) -> tuple[int, int, int, int]:
    """Numbers between rows and between heads, of codes and of scales and minima."""
    return (x.codes.stride(0), x.codes.stride(1), x.scale.stride(0), x.scale.stride(1))


def _form(x: Packed) -> tuple[int, ...]:
    """The format as the kernel is compiled for it."""
    run, groups = x.codes.shape[-2 if x.axis == "channel" else -1], x.scale.shape[-1]
    return (x.bits, x.group, x.size, run, groups, int(x.axis == "channel"), int(x.zero_point))


@triton.jit
def _plane(
    run: tl.tensor, at: tl.tensor, step: tl.tensor, inside: tl.tensor, BITS: tl.constexpr, SIZE: tl.constexpr
) -> Any:
    """Codes number ``at`` of 1, 2, 4 or 8 bits, of runs of SIZE codes whose bytes lie ``step`` apart."""
    width: tl.constexpr = (SIZE * BITS + 7) // 8
    byte = tl.load(run + (at % width) * step, mask=inside, other=0).to(tl.int32)
    return (byte >> (at // width * BITS)) & ((1 << BITS) - 1)


@triton.jit
def _numbers(
    codes: tl.tensor,
    scale: tl.tensor,
    low: tl.tensor,
    token: tl.tensor,
    channel: tl.tensor,
    inside: tl.tensor,
    FORM: tl.constexpr,
) -> Any:
    """The numbers [N, C] fp32 of tokens [N] and channels [C] that are ``inside``, else 0."""
    BITS: tl.constexpr = FORM[0]
    GROUP: tl.constexpr = FORM[1]
    SIZE: tl.constexpr = FORM[2]
    BYTES: tl.constexpr = FORM[3]  # of a run
    GROUPS: tl.constexpr = FORM[4]  # scales of a token, or of a group of tokens
    if FORM[5]:
        at, step = (token % GROUP)[:, None], GROUPS
        run = codes + (token // GROUP * BYTES * GROUPS)[:, None] + channel[None, :]
        group = (token // GROUP * GROUPS)[:, None] + channel[None, :]
    else:
        at, step = channel[None, :], 1
        run = codes + (token * BYTES)[:, None]
        group = (token * GROUPS)[:, None] + (channel // GROUP)[None, :]
    if BITS == 3:
        below: tl.constexpr = (SIZE + 3) // 4
        code = _plane(run, at, step, inside, 2, SIZE) | (_plane(run + below * step, at, step, inside, 1, SIZE) << 2)
    else:
        code = _plane(run, at, step, inside, BITS, SIZE)
    one = tl.load(scale + group, mask=inside, other=0.0).to(tl.float32)
    zero = tl.load(low + group, mask=inside, other=0.0).to(tl.float32)
    if FORM[6]:
        zero = -one * zero
    return tl.where(inside, code.to(tl.float32) * one + zero, 0.0)


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
    """One split of one stored head, for all of its queries."""
    head, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, own = head // heads, head % heads
    r, c, d, n = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    kind: tl.constexpr = query.dtype.element_ty

    total = tl.load(counts + row)
    k_packed = tl.load(counts + rows + row)
    v_packed = tl.load(counts + 2 * rows + row)
    k_codes += row * k_codes_row + own * k_codes_head
    k_scale += row * k_scale_row + own * k_scale_head
    k_low += row * k_scale_row + own * k_scale_head
    k_ring += head * k_slots * D
    v_codes += row * v_codes_row + own * v_codes_head
    v_scale += row * v_scale_row + own * v_scale_head
    v_low += row * v_scale_row + own * v_scale_head
    v_ring += head * v_slots * D

    asking, whole = (r < R)[:, None], (d < D)[None, :]
    ask = query + (head * R + r)[:, None] * D
    q = tl.load(ask + d[None, :], mask=asking & whole, other=0.0).to(PRODUCT)
    thin = q
    if k_channels is not None:
        of_key = tl.load(k_channels + head * C + c, mask=c < C, other=0)
        thin = tl.load(ask + of_key[None, :], mask=asking & (c < C)[None, :], other=0.0).to(PRODUCT)
    of_value = d
    if v_channels is not None:
        of_value = places(v_channels, head, CV, BLOCK_CV, d)
    has_key, has_value = (c < C)[None, :], ((of_value >= 0) & (d < D))[None, :]
    of_value = tl.maximum(of_value, 0)
    seen = total - (T - 1) + r % T

    best, mass = begun(BLOCK_R)
    found = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    start = split * span
    end = tl.minimum(start + span, total)
    for at in range(start, end, BLOCK_N):
        token = at + n
        last = tl.minimum(at + BLOCK_N, end)
        logits = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
        if at < k_packed:
            k = _numbers(k_codes, k_scale, k_low, token, c, (token < k_packed)[:, None] & has_key, K_FORM)
            logits += tl.dot(thin, tl.trans(k.to(kind).to(PRODUCT)), input_precision="ieee")
        if last > k_packed:
            ringed = ((token >= k_packed) & (token < total))[:, None] & whole
            k = tl.load(k_ring + (token % k_slots)[:, None] * D + d[None, :], mask=ringed, other=0.0)
            logits += tl.dot(q, tl.trans(k.to(kind).to(PRODUCT)), input_precision="ieee")
        logits = tl.where(token[None, :] < seen[:, None], logits * scale, -float("inf"))
        weights, shrink, best, mass = softmax_step(logits, best, mass)
        weights = weights.to(kind).to(PRODUCT)
        found = found * shrink[:, None]
        if at < v_packed:
            v = _numbers(v_codes, v_scale, v_low, token, of_value, (token < v_packed)[:, None] & has_value, V_FORM)
            found += tl.dot(weights, v.to(kind).to(PRODUCT), input_precision="ieee")
        if last > v_packed:
            ringed = ((token >= v_packed) & (token < total))[:, None] & whole
            v = tl.load(v_ring + (token % v_slots)[:, None] * D + d[None, :], mask=ringed, other=0.0)
            found += tl.dot(weights, v.to(kind).to(PRODUCT), input_precision="ieee")

    mean, log = finished(found, best, mass)
    to = split * queries + head * R + r
    tl.store(out + to[:, None] * D + d[None, :], mean, mask=asking & whole)
    tl.store(lse + to, log, mask=r < R)
