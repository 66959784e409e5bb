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
        yield heads, tokens, part.rotated(dtype, scratch) if rotated else part.dequantise(dtype, scratch)


def packed_logits(query: Tensor, keys: Packed, scale: float, channels: Tensor | None, estimate: Estimate) -> Tensor:
    """Return the scaled logits [U, Hq, T, L] fp32 of query [U, Hq, T, D] and packed keys [U, H, L, C], block by block.

    Keys are rounded to the query's dtype, logits are not: see attend.logits.
    """
    u, hq, t, _ = query.shape
    h, length = keys.shape[1:3]
    is_fp32 = query.dtype == torch.float32
    q = (query * scale if is_fp32 else query).reshape(u, h, hq // h * t, -1)
    if channels is not None:
        q = q.gather(3, channels[:, :, None].expand(-1, -1, q.shape[2], -1))
    # the query enters the basis of the keys once; stand-ins are made of keys as they were
    rotation = keys.rotation if estimate is as_they_are else None
    if rotation is not None:
        q = (q.float() @ rotation).to(q.dtype)
    flat, scores = q.flatten(0, 1), query.new_empty(u * h, hq // h * t, length, dtype=torch.float32)
    for heads, tokens, part in unpacked(keys, query.dtype, rotation is not None):
        scores[heads, :, tokens] = summed(flat[heads], estimate(part).transpose(1, 2))
    return capped(scores if is_fp32 else scores.mul_(scale), scale).view(u, hq, t, length)


def packed_weigh(probs: Tensor, values: Packed) -> Tensor:
    """Return packed values [U, H, L, C] weighted by probs [U, Hq, T, L]: [U, Hq, T, C] fp32, block by block."""
    u, hq, t, length = probs.shape
    rotation = values.rotation
    h, c = values.shape[1], values.shape[3] if rotation is None else rotation.shape[1]
    flat = probs.reshape(u * h, hq // h * t, length)
    out = flat.new_zeros(u * h, hq // h * t, c, dtype=torch.float32)
    for heads, tokens, part in unpacked(values, probs.dtype, rotation is not None):
        out[heads] += weigh(flat[heads, None, :, tokens], part[:, None])[:, 0]
    # the output leaves the basis of the values
    return (out if rotation is None else out @ rotation.T).view(u, hq, t, -1)
