"""One softmax over several splits of tokens: the partial result of each split, and the kernel that merges them.

The partial result is the output of the split's own softmax and the logarithm of its sum of exponentials (log-sum-exp,
lse). Attention over all splits is the mean of their outputs weighted by exp(lse), as in flash-decoding.
Q: rows of queries, batch x query heads x new tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.storage.kernels.softmax import power


@dataclass(frozen=True)
class Parts:
    """Partial results of S splits for Q rows of queries: ``out`` [S, Q, D] and ``lse`` [S, Q], both fp32.

    ``lse`` is -inf where a query saw no token of the split; ``out`` is undefined there.
    """

    out: Tensor
    lse: Tensor

    @classmethod
    def room(cls, count: int, query: Tensor) -> Parts:
        """Return uninitialised partial results of ``count`` splits for query [B, Hq, T, D]."""
        rows = query.shape[:3].numel()
        out = query.new_empty(count, rows, query.shape[3], dtype=torch.float32)
        return cls(out, query.new_empty(count, rows, dtype=torch.float32))

    def upto(self, first: int, count: int) -> Parts:
        """Return views of ``count`` splits from ``first`` on."""
        return Parts(self.out[first : first + count], self.lse[first : first + count])

    def merged(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return attention over all splits, in the shape and dtype of ``query``, and its lse [B, Hq, T] fp32."""
        count, rows, d = self.out.shape
        out, lse = torch.empty_like(query, memory_format=torch.contiguous_format), self.lse.new_empty(query.shape[:3])
        blocks = {"BLOCK_S": power(count), "BLOCK_D": power(d)}
        _merge[(rows,)](self.out, self.lse, out, lse, count, rows, D=d, **blocks, enable_fp_fusion=True)
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
    """Merge ``count`` splits for one of ``rows`` queries: sum_s exp(lse_s) out_s / sum_s exp(lse_s).

    Pointers: split_out [count, rows, D] and split_lse [count, rows] are read, out [rows, D] and lse [rows] written.
    """
    row = tl.program_id(0).to(tl.int64)
    s, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    logs = tl.load(split_lse + s * rows + row, mask=s < count, other=-float("inf"))
    largest = tl.max(logs, 0)
    # if no split saw a token, all are -inf: shift by 0, as -inf - -inf would be NaN
    weights = tl.exp(logs - tl.where(largest == -float("inf"), 0.0, largest))
    total = tl.sum(weights, 0)
    # then total is 0 too, and the output is 0 / 1; a total of NaN is not 0, and stays NaN
    divisor = tl.where(total == 0, 1.0, total)
    offsets = (s * rows + row)[:, None] * D + d[None, :]
    # where lse is -inf the output is undefined: read 0, as NaN times weight 0 would be NaN
    outputs = tl.load(split_out + offsets, mask=(logs != -float("inf"))[:, None] & (d < D)[None, :], other=0.0)
    mean = tl.sum(outputs * weights[:, None], 0) / divisor
    tl.store(out + row * D + d, mean.to(out.dtype.element_ty), mask=d < D)
    tl.store(lse + row, tl.where(total == 0, -float("inf"), largest + tl.log(divisor)))
