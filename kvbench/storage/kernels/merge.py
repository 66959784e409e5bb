"""Several runs of tokens under one softmax: what each split of them leaves behind, and the kernel that merges it.

A split leaves the output of its own softmax and the logarithm of its sum of exponentials (lse); the whole is the mean
of outputs weighted by exp(lse), as in flash-decoding. Q: rows of queries, batch x query heads x new tokens.
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
    """What S splits leave of Q rows of queries: ``out`` [S, Q, D] fp32; ``lse`` [S, Q] fp32, -inf if nothing was seen.

    ``out`` means nothing where ``lse`` is -inf.
    """

    out: Tensor
    lse: Tensor

    @classmethod
    def room(cls, count: int, query: Tensor) -> Parts:
        """Room for ``count`` splits of query [B, Hq, T, D]."""
        rows = query.shape[:3].numel()
        out = query.new_empty(count, rows, query.shape[3], dtype=torch.float32)
        return cls(out, query.new_empty(count, rows, dtype=torch.float32))

    def upto(self, first: int, count: int) -> Parts:
        """``count`` of the splits, from ``first`` on, views."""
        return Parts(self.out[first : first + count], self.lse[first : first + count])

    def merged(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Attention over all splits, in the shape and dtype of ``query``, and its lse [B, Hq, T] fp32."""
        count, rows, d = self.out.shape
        out, lse = torch.empty_like(query, memory_format=torch.contiguous_format), self.lse.new_empty(query.shape[:3])
        blocks = {"BLOCK_S": power(count), "BLOCK_D": power(d)}
        _merge[(rows,)](self.out, self.lse, out, lse, count, rows, D=d, **blocks, enable_fp_fusion=True)
        return out, lse


@triton.jit
def _merge(
    parts: tl.tensor,
    sums: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    count: tl.tensor,
    rows: tl.tensor,
    D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """One query's output over all splits."""
    row = tl.program_id(0).to(tl.int64)
    s, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    logs = tl.load(sums + s * rows + row, mask=s < count, other=-float("inf"))
    best = tl.max(logs, 0)
    weights = tl.exp(logs - tl.where(best == -float("inf"), 0.0, best))
    total = tl.sum(weights, 0)
    safe = tl.where(total == 0, 1.0, total)
    at = (s * rows + row)[:, None] * D + d[None, :]
    found = tl.load(parts + at, mask=(logs != -float("inf"))[:, None] & (d < D)[None, :], other=0.0)
    mean = tl.sum(found * weights[:, None], 0) / safe
    tl.store(out + row * D + d, mean.to(out.dtype.element_ty), mask=d < D)
    tl.store(lse + row, tl.where(total == 0, -float("inf"), best + tl.log(safe)))
