"""The softmax of Triton's kernels, computed split by split: cutting tokens into splits, a split's softmax, and merging.

A split's partial result is the output of its own softmax and the logarithm of its sum of exponentials (log-sum-exp,
lse). Attention over all splits is the mean of their outputs weighted by exp(lse), as in flash-decoding.
Shapes: Q rows of queries (batch x query heads x new tokens), S splits, D head dimension.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.base.numbers import ceil_div

WAVES = 2  # a run is cut so that each of the device's processors gets about this many programs
LEAST_SPAN = 256  # a split has at least this many tokens, because a shorter split is not worth its launch
MOST_SPLITS = 64  # a run is cut into at most this many splits
TILE_BYTES = 2**14  # one program loads at most this many bytes of keys (or of values) at once


@dataclass(frozen=True)
class Splits:
    """A run of tokens cut into ``count`` splits of ``span`` tokens. A program reads ``block`` tokens at a time."""

    count: int
    span: int
    block: int


def cut_runs(longest: int, programs: int, token_bytes: int, processors: int) -> Splits:
    """Return how to cut runs of up to ``longest`` tokens.

    programs: the number of runs, one for each stored head of each row.
    token_bytes: the bytes of a token's keys in one head.
    processors: the multiprocessors of the device, which should all have work.
    """
    # block is the largest power of two whose keys fit into a tile, from 16 (the least for tl.dot) to 64
    block = min(64, max(16, power_of_two(TILE_BYTES // token_bytes + 1) // 2))
    count = max(1, min(WAVES * processors // max(programs, 1), longest // LEAST_SPAN, MOST_SPLITS))
    # spans are whole blocks; after rounding up, fewer splits may cover the run
    span = max(ceil_div(longest, count * block), 1) * block
    return Splits(max(1, ceil_div(longest, span)), span, block)


def cut_tokens(query: Tensor, heads: int, longest: int) -> Splits:
    """Return how to cut the tokens that query [B, Hq, T, D] attends: up to ``longest`` in each of ``heads`` heads."""
    # tokens of any format are converted to the query's type when they are read
    token_bytes = query.element_size() * power_of_two(query.shape[3], 16)
    return cut_runs(longest, len(query) * heads, token_bytes, count_processors(query.device))


@functools.cache
def count_processors(device: torch.device) -> int:
    """Return the number of a GPU's multiprocessors, or of the CPU's cores where kernels are interpreted."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return os.cpu_count() or 1


def power_of_two(n: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least n and at least ``least``."""
    return max(least, 1 << max(n - 1, 0).bit_length())


def product_type(query: Tensor) -> tl.dtype:
    """Return the type in which ``query`` is multiplied with keys. Sums are fp32.

    Triton's interpreter multiplies the bits of bf16 as if they were integers. It gets fp32 numbers that are already
    rounded to bf16 instead, and the products are the same.
    """
    if query.device.type == "cpu":
        return tl.float32
    triton_types = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    return triton_types[query.dtype]


def contiguous_channels(channels: Tensor | None) -> Tensor | None:
    """Return the channels contiguous in memory, as kernels read them, or None if ``channels`` is None."""
    if channels is None:
        return None
    return channels.contiguous()


@triton.jit
def find_program(heads: tl.tensor) -> Any:
    """Return this program's (stored head among all rows, split, row, stored head of its row)."""
    head, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    return head, split, head // heads, head % heads


@triton.jit
def count_seen(total: tl.tensor, r: tl.tensor, T: tl.constexpr) -> Any:
    """Return how many of ``total`` tokens each query of r [R] sees. The last T tokens are the queries' own."""
    # queries lie in head x T order: the newest sees all tokens, and each earlier one sees one token fewer
    return total - (T - 1) + r % T


@triton.jit
def start_softmax(R: tl.constexpr) -> Any:
    """Return (largest logit, sum of exponentials) of R queries before their first token: -inf and 0."""
    return tl.full([R], -float("inf"), tl.float32), tl.zeros([R], tl.float32)


@triton.jit
def softmax_step(logits: tl.tensor, best: tl.tensor, total: tl.tensor) -> Any:
    """Return (weights of logits [R, N], factor for all earlier sums, largest logit, sum of exponentials).

    The largest logit and the sum continue ``best`` and ``total`` of the earlier steps with these logits.
    """
    largest = tl.maximum(best, tl.max(logits, 1))
    # before its first token a query has no largest logit: -inf - -inf would be NaN
    shift = tl.where(largest == -float("inf"), 0.0, largest)
    weights = tl.exp(logits - shift[:, None])
    shrink = tl.exp(best - shift)
    return weights, shrink, largest, total * shrink + tl.sum(weights, 1)


@triton.jit
def store_split(
    out: tl.tensor,
    lse: tl.tensor,
    first: tl.tensor,
    sums: tl.tensor,
    best: tl.tensor,
    total: tl.tensor,
    r: tl.tensor,
    d: tl.tensor,
    R: tl.constexpr,
    D: tl.constexpr,
) -> None:
    """Write a split's outputs [R, D] and lse [R] to the R rows of ``out`` and ``lse`` that begin with row ``first``.

    ``sums`` [R, D] are the split's weighted sums of values. ``best`` and ``total`` [R] come from ``softmax_step``. The
    output is sums / total, and lse = best + log(total).
    """
    # only the total 0 of a query that saw no token is replaced: NaN stays NaN
    divisor = tl.where(total == 0, 1.0, total)
    mean = sums / divisor[:, None]
    log = tl.where(total == 0, -float("inf"), best + tl.log(divisor))
    rows = first + r
    tl.store(out + rows[:, None] * D + d[None, :], mean, mask=(r < R)[:, None] & (d < D)[None, :])
    tl.store(lse + rows, log, mask=r < R)


@triton.jit
def find_places(channels: tl.tensor, head: tl.tensor, C: tl.constexpr, BLOCK_C: tl.constexpr, D: tl.tensor) -> Any:
    """Return for each dimension of D [BLOCK_D] its index among a head's C kept channels, or -1 if it is not kept."""
    c = tl.arange(0, BLOCK_C)
    ids = tl.load(channels + head * C + c, mask=c < C, other=-1)
    # at most one channel matches, so the sum is its index + 1, or 0 for no match
    return tl.sum(tl.where(ids[None, :] == D[:, None], c[None, :] + 1, 0), 1) - 1


@dataclass(frozen=True)
class Parts:
    """Partial results of S splits for Q rows of queries: ``out`` [S, Q, D] and ``lse`` [S, Q], both fp32.

    If a query saw no token of a split, its ``lse`` is -inf and its ``out`` is undefined.
    """

    out: Tensor
    lse: Tensor

    @classmethod
    def room(cls, count: int, query: Tensor) -> Parts:
        """Return room, with undefined numbers, for the results of ``count`` splits for query [B, Hq, T, D]."""
        rows = query.shape[:3].numel()
        out = query.new_empty(count, rows, query.shape[3], dtype=torch.float32)
        return cls(out, query.new_empty(count, rows, dtype=torch.float32))

    def upto(self, first: int, count: int) -> Parts:
        """Return views of the partial results of ``count`` splits, beginning with split ``first``."""
        return Parts(self.out[first : first + count], self.lse[first : first + count])

    def merged(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return attention over all splits, in the shape and dtype of ``query``, and its lse [B, Hq, T] fp32."""
        count, rows, d = self.out.shape
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        lse = self.lse.new_empty(query.shape[:3])
        _merge[(rows,)](
            split_out=self.out,
            split_lse=self.lse,
            out=out,
            lse=lse,
            count=count,
            rows=rows,
            D=d,
            BLOCK_S=power_of_two(count),
            BLOCK_D=power_of_two(d),
            enable_fp_fusion=True,
        )
        return out, lse


@triton.jit
def _merge(
    split_out: tl.tensor,
    split_lse: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    count: tl.tensor,
    rows: tl.tensor,
    D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Merge the ``count`` splits of one of ``rows`` queries.

    Reads split_out [count, rows, D] and split_lse [count, rows]. Writes the attention, which is
    sum_s exp(lse_s) out_s / sum_s exp(lse_s), to out [rows, D], and its lse, log(sum_s exp(lse_s)), to lse [rows].
    """
    row = tl.program_id(0).to(tl.int64)
    s, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    logs = tl.load(split_lse + s * rows + row, mask=s < count, other=-float("inf"))
    largest = tl.max(logs, 0)
    # if no split saw a token, all logs are -inf, and -inf - -inf would be NaN: shift by 0 instead
    weights = tl.exp(logs - tl.where(largest == -float("inf"), 0.0, largest))
    total = tl.sum(weights, 0)
    # without any token the total is 0 and the output becomes 0 / 1; a total of NaN is not 0 and stays NaN
    divisor = tl.where(total == 0, 1.0, total)
    offsets = (s * rows + row)[:, None] * D + d[None, :]
    # where lse is -inf the output is undefined: it is read as 0, because NaN times weight 0 would be NaN
    outputs = tl.load(split_out + offsets, mask=(logs != -float("inf"))[:, None] & (d < D)[None, :], other=0.0)
    mean = tl.sum(outputs * weights[:, None], 0) / divisor
    tl.store(out + row * D + d, mean.to(out.dtype.element_ty), mask=d < D)
    tl.store(lse + row, tl.where(total == 0, -float("inf"), largest + tl.log(divisor)))
