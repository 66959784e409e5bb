"""What the kernels share: the cut of a run of tokens into splits, and the running softmax over one."""

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
LEAST_SPAN = 256  # tokens of a split at least: a shorter one is a launch for little
MOST_SPLITS = 64
TILE_BYTES = 2**14  # of keys, or values, that a program holds at once


@dataclass(frozen=True)
class Splits:
    """How a run of tokens is cut: ``count`` splits of ``span`` tokens, read ``block`` tokens at a time."""

    count: int
    span: int
    block: int


def splits(longest: int, programs: int, token_bytes: int, processors: int) -> Splits:
    """Splits of up to ``longest`` tokens in each of ``programs`` heads; ``token_bytes``: of one token's keys."""
    block = min(64, max(16, power(TILE_BYTES // token_bytes + 1) // 2))
    wanted = max(1, min(WAVES * processors // max(programs, 1), longest // LEAST_SPAN, MOST_SPLITS))
    span = max(-(-longest // (wanted * block)), 1) * block
    return Splits(max(1, -(-longest // span)), span, block)


def cut(query: Tensor, heads: int, longest: int) -> Splits:
    """How query [B, Hq, T, D] has up to ``longest`` tokens of each of ``heads`` stored heads cut."""
    # a token of any format becomes one of numbers in the query's type
    token_bytes = query.element_size() * power(query.shape[3], 16)
    return splits(longest, len(query) * heads, token_bytes, processors(query.device))


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU, or of what interprets the kernels."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return os.cpu_count() or 1


def power(n: int, least: int = 1) -> int:
    """The smallest power of two that is not below n or ``least``."""
    return max(least, 1 << max(n - 1, 0).bit_length())


def product_type(query: Tensor) -> tl.dtype:
    """The type in which ``query`` meets keys; sums are fp32.

    Triton's interpreter multiplies the bits of bf16 as if they were whole numbers. There it gets numbers rounded to
    bf16 as fp32: their products are the same.
    """
    known = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    return tl.float32 if query.device.type == "cpu" else known[query.dtype]


@triton.jit
def begun(R: tl.constexpr) -> Any:
    """Of R queries that have seen nothing: (best logit, sum of exponentials)."""
    return tl.full([R], -float("inf"), tl.float32), tl.zeros([R], tl.float32)


@triton.jit
def softmax_step(logits: tl.tensor, best: tl.tensor, total: tl.tensor) -> Any:
    """A running softmax over [R, N] more logits: (their weights, what earlier ones shrink by, best, total)."""
    higher = tl.maximum(best, tl.max(logits, 1))
    # a query that has seen no token yet has no best one
    shift = tl.where(higher == -float("inf"), 0.0, higher)
    weights = tl.exp(logits - shift[:, None])
    shrink = tl.exp(best - shift)
    return weights, shrink, higher, total * shrink + tl.sum(weights, 1)


@triton.jit
def finished(found: tl.tensor, best: tl.tensor, total: tl.tensor) -> Any:
    """A split's outputs [R, D] and lse [R] of weighted sums ``found``."""
    # compared with 0, so that what is not a number stays what it is
    safe = tl.where(total == 0, 1.0, total)
    return found / safe[:, None], tl.where(total == 0, -float("inf"), best + tl.log(safe))


@triton.jit
def places(channels: tl.tensor, head: tl.tensor, C: tl.constexpr, BLOCK_C: tl.constexpr, D: tl.tensor) -> Any:
    """Where each of the dimensions D [BLOCK_D] is among a head's C kept channels; -1 where it is not kept."""
    c = tl.arange(0, BLOCK_C)
    kept = tl.load(channels + head * C + c, mask=c < C, other=-1)
    return tl.sum(tl.where(kept[None, :] == D[:, None], c[None, :] + 1, 0), 1) - 1
