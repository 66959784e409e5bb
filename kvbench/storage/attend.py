"""Decode attention by plain PyTorch: queries attend exact tokens and a dense tail under one softmax.

Packed tokens are multiplied block by block, so that memory never holds a whole unpacked tensor. A ``scale`` is the
factor of q.k. It may also carry a cap on logits and sinks (``kv.scale``).

Shapes: B (or U) rows, Hq query heads, H stored heads, T new tokens, L slots, C kept key channels, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.kv.own_values import are_stored, values_or_keys
from kvbench.kv.packed import Packed
from kvbench.kv.scale import capped, is_plain, sinks_of, softmax
from kvbench.storage import kernels
from kvbench.storage.channels import pick_channels, spread_channels
from kvbench.storage.kernels import on_cpu
from kvbench.storage.roles import Masker
from kvbench.storage.row_segments import Ragged, RowSegment, Shared

Estimate = Callable[[Tensor], Tensor]  # maps keys [..., D] to the keys that attention reads instead


def compute_logits(query: Tensor, keys: Tensor, scale: float, channels: Tensor | None = None) -> Tensor:
    """Return the logits scale * q.k [B, Hq, T, L] of query [B, Hq, T, D] and keys [B, H, L, D or C].

    Thin keys keep only some channels. They are multiplied with the query's own ``channels`` [B, H, C], and full keys
    are never rebuilt (arXiv 2407.21018, section 3). Logits of half precision are fp32, as in PyTorch's fused attention:
    rounding them would change the chosen tokens.
    """
    b, hq, t, d = query.shape
    h = keys.shape[1]
    # the product of half-precision numbers is fp32, so it is scaled afterwards
    is_fp32 = query.dtype == torch.float32
    if is_fp32:
        query = query * scale
    # the query heads of a group become more queries of the stored head that they share
    q = query.reshape(b, h, hq // h * t, d)
    if channels is not None:
        q = pick_channels(q, channels)
    k = keys.transpose(2, 3)
    if is_fp32:
        products = q @ k
    else:
        products = matmul_in_fp32(q.flatten(0, 1), k.flatten(0, 1)) * scale
    return capped(products, scale).reshape(b, hq, t, keys.shape[2])


def matmul_in_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Return the matrix products a @ b [N, R, S] fp32 of a [N, R, C] and b [N, C, S].

    Sums over C are taken in fp32, also for inputs of half precision.
    """
    # cuBLAS itself sums half precision in fp32; a CPU needs fp32 inputs for that
    if a.is_cuda and b.dtype != torch.float32:
        return torch.bmm(a.to(b.dtype), b, out_dtype=torch.float32)
    return a.float() @ b.float()


def compute_shared_logits(query: Tensor, keys: Tensor, scale: float, shared: Shared) -> Tensor:
    """Return the logits [B, Hq, T, L] of query heads that share logits.

    Logits are computed for the leading heads alone. Each query head takes the logits of its leading head.

    query: [B, Hq, T, D].
    keys: [B, H or fewer, L, D]; keys that no leading head reads may be missing.
    shared: names each query head's leading head, and the keys that the leading heads read.
    """
    lead = query.gather(1, shared.leading[..., None, None].expand(-1, -1, *query.shape[2:]))
    if shared.key_rows is not None:
        keys = keys.gather(1, shared.key_rows[..., None, None].expand(-1, -1, *keys.shape[2:]))
    # C leading heads read C rows of keys, so each head is its own group
    computed = compute_logits(lead, keys, scale)
    return computed.gather(1, shared.place[..., None, None].expand(-1, -1, *computed.shape[2:]))


def weigh(probs: Tensor, values: Tensor) -> Tensor:
    """Return values [B, H, L, D] weighted by probs [B, Hq, T, L] as [B, Hq, T, D] fp32.

    Half precision is summed in fp32: neither the order of tokens nor their division into segments changes the result.
    """
    b, hq, t, length = probs.shape
    h = values.shape[1]
    # the query heads of a group become more rows of weights over the stored head that they share
    out = matmul_in_fp32(probs.reshape(b * h, hq // h * t, length), values.flatten(0, 1))
    return out.reshape(b, hq, t, values.shape[3])


def as_they_are(keys: Tensor) -> Tensor:
    """Return the keys themselves: the ``Estimate`` of methods that read stored keys."""
    return keys


def unpack_blocks(packed: Packed, dtype: torch.dtype, rotated: bool) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield (heads, tokens, numbers) for each block of ``packed``: two slices, and the unpacked numbers in ``dtype``.

    Each block overwrites the memory of the previous block. If ``rotated``, the numbers are in the basis of
    ``packed.rotation``, else as they were before packing.
    """
    scratch: Tensor | None = None
    for heads, tokens, part in packed.blocks():
        # a tensor that is large enough serves smaller blocks as well
        if scratch is None or scratch.numel() < part.shape.numel():
            scratch = torch.empty(part.shape.numel(), device=packed.device)
        if rotated:
            yield heads, tokens, part.rotated(dtype, scratch)
        else:
            yield heads, tokens, part.dequantise(dtype, scratch)


def compute_packed_logits(
    query: Tensor, keys: Packed, scale: float, channels: Tensor | None, estimate: Estimate
) -> Tensor:
    """Return the logits [U, Hq, T, L] fp32 of query [U, Hq, T, D] and packed keys [U, H, L, C], block by block.

    Thin keys have the ``channels`` [U, H, C]. ``estimate`` maps unpacked keys to those that are multiplied. Keys are
    rounded to the query's dtype. Logits are not, for the reason that ``compute_logits`` gives.
    """
    u, hq, t, _ = query.shape
    h, length = keys.shape[1:3]
    # the product of half-precision numbers is fp32, so it is scaled afterwards
    is_fp32 = query.dtype == torch.float32
    if is_fp32:
        query = query * scale
    q = query.reshape(u, h, hq // h * t, -1)
    if channels is not None:
        q = pick_channels(q, channels)
    # rotating the query once is cheaper than rotating keys back; only an estimate needs the original keys
    rotation = keys.rotation if estimate is as_they_are else None
    if rotation is not None:
        # q.k = (q B).(k B), because the basis B has orthonormal rows
        q = (q.float() @ rotation).to(q.dtype)
    flat_query = q.flatten(0, 1)
    if estimate is as_they_are:
        products = on_cpu.logits(flat_query, keys)
        if products is not None:
            return capped(products, scale).view(u, hq, t, length)
    scores = query.new_empty(u * h, hq // h * t, length, dtype=torch.float32)
    for heads, tokens, part in unpack_blocks(keys, query.dtype, rotation is not None):
        scores[heads, :, tokens] = matmul_in_fp32(flat_query[heads], estimate(part).transpose(1, 2))
    if not is_fp32:
        scores.mul_(scale)
    return capped(scores, scale).view(u, hq, t, length)


def weigh_packed(probs: Tensor, values: Packed) -> Tensor:
    """Return packed values [U, H, L, C] weighted by probs [U, Hq, T, L] as [U, Hq, T, C] fp32, block by block."""
    u, hq, t, length = probs.shape
    h = values.shape[1]
    rotation = values.rotation
    flat_probs = probs.reshape(u * h, hq // h * t, length)
    weighed = on_cpu.weigh(flat_probs, values)
    if weighed is None:
        # rotated numbers have the channels of the basis
        channels = values.shape[3] if rotation is None else rotation.shape[1]
        weighed = flat_probs.new_zeros(u * h, hq // h * t, channels, dtype=torch.float32)
        for heads, tokens, part in unpack_blocks(values, probs.dtype, rotation is not None):
            weighed[heads] += weigh(flat_probs[heads, None, :, tokens], part[:, None])[:, 0]
    if rotation is not None:
        # rotate the output back once: sum_t p_t v_t = (sum_t p_t v_t B) B'
        weighed = weighed @ rotation.T
    return weighed.view(u, hq, t, -1)


def attend(
    query: Tensor,
    segments: Sequence[RowSegment | Ragged],
    tail: tuple[Tensor, Tensor],
    scale: float,
    floor: Tensor | None = None,
    tail_start: Tensor | None = None,
    masker: Masker | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return (attention [B, Hq, T, D] of T new tokens over stored segments and a dense tail, tokens attended [B]).

    The attention is in the query's dtype. New tokens see each other causally. The number of tokens attended is the mean
    over heads and new tokens with a masker, else None.

    query: [B, Hq, T, D], the queries of the new tokens.
    tail: the keys and values [B, Hk, t, D] of a dense tail that ends with the new tokens, t >= T.
    floor: [B, T], the first position that each new token sees under a sliding window; None: no window.
    tail_start: [B], the position of the tail's first token, needed with ``floor``.
    masker: restricts exact attention to the tokens that it picks.
    """
    tail_k, tail_v = tail
    # kernels know no maskers, windows, caps and sinks, and need values that are stored apart from the keys
    is_simple = masker is None and floor is None and is_plain(scale) and are_stored(tail_v)
    if is_simple:
        out = kernels.attend(query, segments, tail, scale)
        if out is not None:
            return out, None
    padded = [s.padded() for s in segments]
    # in half precision, PyTorch's fused function rounds as transformers' own decoding does
    if is_simple and query.device.type == "cpu" and query.dtype != torch.float32:
        out = _attend_fused(query, padded, tail, scale)
        if out is not None:
            return out, None

    def weigh_all(probs: Tensor) -> Tensor:
        """Return the sum [B, Hq, T, D] of all slots' values, weighted by probs [B, Hq, T, S]."""
        # the columns of probs are the slots of all segments and then the tail; sums begin at the tail
        start = probs.shape[3] - tail_v.shape[2]
        out = weigh(probs[..., start:], values_or_keys(tail_k, tail_v))
        for s in reversed(padded):
            end = start
            start -= s.v.shape[2]
            segment_out = weigh(probs[..., start:end], values_or_keys(s.k, s.v))
            if s.value_channels is not None:
                segment_out = spread_channels(segment_out, s.value_channels, out.shape[3])
            out = out + segment_out
        return out

    def logits_of(estimate: Estimate) -> Tensor:
        """Return the logits [B, Hq, T, S] of all slots, with keys mapped by ``estimate``."""
        return _compute_all_logits(
            query, padded, tail_k, scale=scale, floor=floor, tail_start=tail_start, estimate=estimate
        )

    return attend_by_logits(logits_of, weigh_all, query.dtype, masker, scale)


def attend_by_logits(
    logits_of: Callable[[Estimate], Tensor],
    weigh_values: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
    masker: Masker | None,
    scale: float,
) -> tuple[Tensor, Tensor | None]:
    """Return the outputs softmax(logits) V [B, Hq, T, D], and how many tokens were attended [B].

    That number is the mean over heads and new tokens, or None without a masker. A masker picks tokens by the logits of
    estimated keys. Picked tokens are weighted by their exact logits. The softmax is in fp32, the outputs in ``dtype``.

    logits_of: maps an estimate of the keys to logits [B, Hq, T, S], -inf where a query must not look.
    weigh_values: maps weights [B, Hq, T, S] to the weighted sum of values [B, Hq, T, D].
    scale: the factor of q.k, for the model's sinks.
    """
    exact = logits_of(as_they_are)
    attended = None
    if masker is not None:
        weights = softmax(logits_of(masker.estimate), sinks_of(scale))
        # a masker cannot show tokens that causality, padding or a window hides
        seen = masker.mask(weights) & ~exact.isneginf()
        exact = exact.masked_fill(~seen, -torch.inf)
        attended = seen.sum(dim=-1).float().mean(dim=(1, 2))
    return weigh_rounded(softmax(exact, sinks_of(scale)), dtype, weigh_values), attended


def weigh_rounded(probs: Tensor, dtype: torch.dtype, weigh_values: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the values weighted by probs [B, Hq, T, S] fp32, with weights and result rounded to ``dtype``.

    ``weigh_values`` maps weights to the weighted sum of values [B, Hq, T, D].

    In half precision, weights are divided by the largest before rounding. PyTorch's fused attention does the same.
    """
    if dtype == torch.float32:
        return weigh_values(probs)
    # the clamp avoids division by 0: a query that attends nothing has only weights of 0
    top = probs.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return (weigh_values((probs / top).to(dtype)) * top).to(dtype)


def _attend_fused(
    query: Tensor, segments: Sequence[RowSegment], tail: tuple[Tensor, Tensor], scale: float
) -> Tensor | None:
    """Return attention [B, Hq, T, D] of query [B, Hq, T, D] by PyTorch's fused function; None if it cannot compute it.

    It rounds half precision as transformers' decoding does. It cannot compute heads that share logits and segments
    that lack channels. The caller leaves out maskers, windows, caps, sinks and keys that are their own values.

    segments: the stored tokens of all rows, in order.
    tail: the keys and values [B, Hk, L, D] of the tokens after the segments. The queries are those of its last T.
    """
    for s in segments:
        if s.shared is not None or s.key_channels is not None or s.value_channels is not None:
            return None
    tail_k, tail_v = tail
    heads = max([tail_k.shape[1], *(s.heads for s in segments)])
    # [B, heads, S, D]: the tokens of all segments, then the tail
    k = torch.cat([*(_repeat_heads(s.k, heads) for s in segments), _repeat_heads(tail_k, heads)], dim=2)
    v = torch.cat([*(_repeat_heads(s.v, heads) for s in segments), _repeat_heads(tail_v, heads)], dim=2)
    mask: Tensor | None = None
    # without padding, a single new token attends all slots
    if query.shape[2] > 1 or any(s.valid is not None for s in segments):
        seen = _mark_seen_slots(query, segments, heads, tail_tokens=tail_k.shape[2])
        # enable_gqa shares keys between query heads, but the mask must have an entry for each query head
        mask = seen.repeat_interleave(query.shape[1] // heads, dim=1)
    return F.scaled_dot_product_attention(query, k, v, mask, scale=scale, enable_gqa=heads != query.shape[1])


def _mark_seen_slots(query: Tensor, segments: Sequence[RowSegment], heads: int, tail_tokens: int) -> Tensor:
    """Return a mask [B, heads, T, S] of the slots that each query [B, Hq, T, D] attends; False in padding.

    The slots are those of all segments, then the ``tail_tokens`` tokens of the tail. The queries are those of its last
    T tokens.
    """
    new_tokens = query.shape[2]
    slots = sum(s.longest for s in segments) + tail_tokens
    seen = torch.ones(len(query), heads, new_tokens, slots, dtype=torch.bool, device=query.device)
    # query i is token tail_tokens - T + i of the tail, and attends no later one
    causal = torch.ones(new_tokens, tail_tokens, dtype=torch.bool, device=query.device).tril(tail_tokens - new_tokens)
    seen[..., -tail_tokens:] = causal
    start = 0
    for s in segments:
        if s.valid is not None:
            seen[..., start : start + s.longest] = s.valid[:, :, None]
        start += s.longest
    return seen


def _repeat_heads(t: Tensor, heads: int) -> Tensor:
    """Return keys or values t [B, H', L, D] with ``heads`` heads: each is repeated for the heads that share it."""
    if t.shape[1] == heads:
        return t
    return t.repeat_interleave(heads // t.shape[1], dim=1)


def _compute_all_logits(
    query: Tensor,
    segments: Sequence[RowSegment],
    tail_k: Tensor,
    scale: float,
    floor: Tensor | None,
    tail_start: Tensor | None,
    estimate: Estimate,
) -> Tensor:
    """Return logits [B, Hq, T, S] over the slots of all segments, then the tail; -inf where a query must not look.

    ``estimate`` maps stored keys to those that are multiplied. The other arguments are those of ``attend``.
    """
    all_scores = []
    for s in segments:
        if s.shared is not None:
            scores = compute_shared_logits(query, s.k, scale, s.shared)
        else:
            scores = compute_logits(query, estimate(s.k), scale, s.key_channels)
        if s.valid is not None:
            scores = hide_free(scores, s.valid)
        if floor is not None:
            assert s.positions is not None
            scores = _hide_before(scores, s.positions, floor)
        all_scores.append(scores)
    # heads that share logits share them in all segments
    sharings = [s.shared for s in segments if s.shared is not None]
    if sharings:
        # they share them in the tail as well, but the tail stores the keys of all heads
        scores = compute_shared_logits(query, tail_k, scale, sharings[0].over(tail_k.shape[1]))
    else:
        scores = compute_logits(query, estimate(tail_k), scale)
    t_new, t_all = scores.shape[2:]
    if t_new > 1:
        # new token i is token t_all - t_new + i of the tail, and sees no later token
        future = torch.ones(t_new, t_all, dtype=torch.bool, device=scores.device).triu(t_all - t_new + 1)
        scores = scores.masked_fill(future, -torch.inf)
    if floor is not None:
        assert tail_start is not None
        positions = tail_start[:, None] + torch.arange(t_all, device=scores.device)
        scores = _hide_before(scores, positions[:, None], floor)
    all_scores.append(scores)
    return torch.cat(all_scores, dim=-1)


def hide_free(scores: Tensor, valid: Tensor) -> Tensor:
    """Return the logits ``scores`` [B, Hq, T, L] with -inf in slots that ``valid`` [B, H or 1, L] does not mark."""
    by_head = scores.unflatten(1, (valid.shape[1], -1))
    return by_head.masked_fill(~valid[:, :, None, None], -torch.inf).flatten(1, 2)


def _hide_before(scores: Tensor, positions: Tensor, floor: Tensor) -> Tensor:
    """Return the logits ``scores`` [B, Hq, T, L] with -inf for tokens before the sliding window.

    positions: [B, H or 1, L], the position of each token.
    floor: [B, T], the first position that each query sees.
    """
    b, hq, t, length = scores.shape
    # [B, H or 1, 1, T, L]: all query heads of a group hide the same tokens
    hidden = positions[:, :, None, None] < floor[:, None, None, :, None]
    by_head = scores.view(b, positions.shape[1], -1, t, length)
    return by_head.masked_fill(hidden, -torch.inf).view(b, hq, t, length)
