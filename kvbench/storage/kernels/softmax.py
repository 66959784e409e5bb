"""Helpers of all kernels: cutting a run of tokens into splits, and the running softmax over a split."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

WAVES = 2  # programs for each of the device's processors
LEAST_SPAN = 256  # tokens of a split at least: a shorter one is not worth its launch
MOST_SPLITS = 64
TILE_BYTES = 2**14  # of keys, or values, that a program holds at once


@dataclass(frozen=True)
class Splits:
    """A run of tokens cut into ``count`` splits of ``span`` tokens, each read ``block`` tokens at a time."""

    count: int
    span: int
    block: int


def splits(longest: int, programs: int, token_bytes: int, processors: int) -> Splits:
    """Cut up to ``longest`` tokens in each of ``programs`` heads; one token's keys take ``token_bytes``."""
    block = min(64, max(16, power(TILE_BYTES // token_bytes + 1) // 2))
    wanted = max(1, min(WAVES * processors // max(programs, 1), longest // LEAST_SPAN, MOST_SPLITS))
    span = max(-(-longest // (wanted * block)), 1) * block
    return Splits(max(1, -(-longest // span)), span, block)


def cut(query: Tensor, heads: int, longest: int) -> Splits:
    """Cut up to ``longest`` tokens of each of ``heads`` stored heads, to be attended by query [B, Hq, T, D]."""
    # a token of any format is converted to the query's type when it is read
    token_bytes = query.element_size() * power(query.shape[3], 16)
    return splits(longest, len(query) * heads, token_bytes, processors(query.device))


@functools.cache
def processors(device: torch.device) -> int:
    """Return the number of a GPU's multiprocessors, or of the CPU's cores where kernels are interpreted."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return os.cpu_count() or 1


def power(n: int, least: int = 1) -> int:
    """Return the smallest power of two that is not below n or ``least``."""
    return max(least, 1 << max(n - 1, 0).bit_length())


def product_type(query: Tensor) -> tl.dtype:
    """Return the type in which ``query`` is multiplied with keys; sums are fp32.

    Triton's interpreter multiplies the bits of bf16 as if they were whole numbers. There it gets numbers rounded to
    bf16 as fp32: their products are the same.
    """
    known = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    return tl.float32 if query.device.type == "cpu" else known[query.dtype]


@triton.jit
def begun(R: tl.constexpr) -> Any:
    """Return (largest logit, sum of exponentials) of R queries that have seen no token: -inf and 0."""
    return tl.full([R], -float("inf"), tl.float32), tl.zeros([R], tl.float32)


@triton.jit
def softmax_step(logits: tl.tensor, best: tl.tensor, total: tl.tensor) -> Any:
    """Update a running softmax by logits [R, N].

    Returns their weights, the factor for all earlier sums, the largest logit, and the sum of exponentials.
    """
    largest = tl.maximum(best, tl.max(logits, 1))
    # a query that has seen no token yet has no largest logit: -inf - -inf would be NaN
    shift = tl.where(largest == -float("inf"), 0.0, largest)
    weights = tl.exp(logits - shift[:, None])
    shrink = tl.exp(best - shift)
    return weights, shrink, largest, total * shrink + tl.sum(weights, 1)


@triton.jit
def finished(sums: tl.tensor, best: tl.tensor, total: tl.tensor) -> Any:
    """Return a split's outputs [R, D] and lse [R] from its weighted sums [R, D] of values."""
    # only 0, of a query that saw no token, is replaced: NaN stays NaN
    divisor = tl.where(total == 0, 1.0, total)
    return sums / divisor[:, None], tl.where(total == 0, -float("inf"), best + tl.log(divisor))


@triton.jit
def places(channels: tl.tensor, head: tl.tensor, C: tl.constexpr, BLOCK_C: tl.constexpr, D: tl.tensor) -> Any:
    """Return the index of each of the dimensions D [BLOCK_D] among a head's C kept channels; -1 if it is not kept."""
    c = tl.arange(0, BLOCK_C)
    ids = tl.load(channels + head * C + c, mask=c < C, other=-1)
    return tl.sum(tl.where(ids[None, :] == D[:, None], c[None, :] + 1, 0), 1) - 1  # at most one matches
