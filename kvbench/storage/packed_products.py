"""Products of queries and of weights with packed tokens, block by block: no packed tensor is ever whole in memory.

Shapes: U rows, Hq query heads, H stored heads, T new tokens, L packed tokens, C channels, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvbench.kv.packed import Packed
from kvbench.kv.scale import capped
from kvbench.storage.attend import Estimate, as_they_are, summed, weigh


def unpacked(packed: Packed, dtype: torch.dtype, rotated: bool) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield (heads, tokens, numbers) of the blocks of ``packed``; each block overwrites the one before it.

    The numbers are in the basis of ``packed.rotation`` if ``rotated``, else as they were before packing.
    """
    scratch: Tensor | None = None
    for heads, tokens, part in packed.blocks():
        if scratch is None or scratch.numel() < part.shape.numel():
            scratch = torch.empty(part.shape.numel(), device=packed.device)
        if rotated:
            yield heads, tokens, part.rotated(dtype, scratch)
        else:
            yield heads, tokens, part.dequantise(dtype, scratch)


def packed_logits(query: Tensor, keys: Packed, scale: float, channels: Tensor | None, estimate: Estimate) -> Tensor:
    """Return the scaled logits [U, Hq, T, L] fp32 of query [U, Hq, T, D] and packed keys [U, H, L, C], block by block.

    Keys are rounded to the query's dtype, logits are not: see attend.logits.
    """
    u, hq, t, _ = query.shape
    h, length = keys.shape[1:3]
    # half precision is scaled after the product, which is fp32
    is_fp32 = query.dtype == torch.float32
    if is_fp32:
        query = query * scale
    q = query.reshape(u, h, hq // h * t, -1)
    if channels is not None:
        q = q.gather(3, channels[:, :, None].expand(-1, -1, q.shape[2], -1))
    # the query enters the basis of the keys once; stand-ins are made of keys as they were
    rotation = keys.rotation if estimate is as_they_are else None
    if rotation is not None:
        # q.k = (q B).(k B) for a basis B with orthonormal rows
        q = (q.float() @ rotation).to(q.dtype)
    flat_query = q.flatten(0, 1)
    scores = query.new_empty(u * h, hq // h * t, length, dtype=torch.float32)
    for heads, tokens, part in unpacked(keys, query.dtype, rotation is not None):
        scores[heads, :, tokens] = summed(flat_query[heads], estimate(part).transpose(1, 2))
    if not is_fp32:
        scores.mul_(scale)
    return capped(scores, scale).view(u, hq, t, length)


def packed_weigh(probs: Tensor, values: Packed) -> Tensor:
    """Return packed values [U, H, L, C] weighted by probs [U, Hq, T, L]: [U, Hq, T, C] fp32, block by block."""
    u, hq, t, length = probs.shape
    h, c = values.shape[1], values.shape[3]
    rotation = values.rotation
    if rotation is not None:
        c = rotation.shape[1]
    flat_probs = probs.reshape(u * h, hq // h * t, length)
    out = flat_probs.new_zeros(u * h, hq // h * t, c, dtype=torch.float32)
    for heads, tokens, part in unpacked(values, probs.dtype, rotation is not None):
        out[heads] += weigh(flat_probs[heads, None, :, tokens], part[:, None])[:, 0]
    if rotation is not None:
        # the output leaves the basis of the values: sum_t p_t v_t = (sum_t p_t v_t B) B'
        out = out @ rotation.T
    return out.view(u, hq, t, -1)
