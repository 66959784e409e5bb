"""Low-rank factors of a projection, and ranks divided over projections: the maths of Palu and ASVD, without a model.

Shapes: m outputs of a group of heads (heads times D), d hidden size, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.kv.apportion import proportional_shares, round_shares

JITTER = (0.0, *(10.0**-e for e in range(10, 1, -1)))
STEPS = 16  # of a group's rank where ``multiple`` is not given: 32 of 512


@dataclass(frozen=True)
class Factors:
    """A projection [H D, d] by low-rank factors.

    down: [R, d], the rows of all groups.
    ups: each group's matrix [m, r]; None where the group keeps its full rank, so that its latents are its outputs.
    ranks: each group's rank.
    """

    down: Tensor
    ups: tuple[Tensor | None, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Spectrum:
    """The singular value decomposition of W S, for any rank: W = ``u`` diag(``s``) ``vt`` S^-1, fp64."""

    weight: Tensor  # [m, d]
    u: Tensor  # [m, q]
    s: Tensor  # [q], descending
    back: Tensor  # [q, d], vt S^-1

    @classmethod
    def of(cls, weight: Tensor, scale: Tensor) -> Spectrum:
        """Return the decomposition of weight [m, d] times S, the ``scale``.

        S is lower triangular [d, d], the Cholesky factor of the inputs' moments, or a diagonal [d].
        """
        w64, scale64 = weight.detach().double(), scale.to(weight.device).double()
        u, s, vt = torch.linalg.svd(w64 * scale64 if scale64.dim() == 1 else w64 @ scale64, full_matrices=False)
        if scale64.dim() == 1:
            return cls(weight.detach(), u, s, vt / scale64)
        return cls(weight.detach(), u, s, torch.linalg.solve_triangular(scale64, vt, upper=False, left=False))

    def cut(self, rank: int) -> tuple[Tensor, Tensor | None]:
        """Return (down [rank, d], up [m, rank]) of the largest singular values, split evenly between both.

        At full rank, any invertible split is exact; the one without rounding is the weight itself.
        """
        if rank >= self.weight.shape[0]:
            return self.weight, None
        root = self.s[:rank].sqrt()
        dtype = self.weight.dtype
        return (root[:, None] * self.back[:rank]).to(dtype), (self.u[:, :rank] * root).to(dtype)


def joined(parts: Sequence[tuple[Tensor, Tensor | None]]) -> Factors:
    """Return the factors of a projection from the (down, up) of its groups, in order."""
    downs, ups = zip(*parts, strict=True)
    return Factors(torch.cat(downs), tuple(ups), tuple(d.shape[0] for d in downs))


def damping(moments: Tensor) -> float:
    """Return the number to add to the diagonal of moments [d, d] so that they have a Cholesky factor; 0 if they do."""
    m = moments.double()
    mean = float(m.diagonal().mean())
    eye = torch.eye(len(m), dtype=m.dtype, device=m.device)
    for step in JITTER:
        added = step * mean
        if int(torch.linalg.cholesky_ex(m + added * eye).info) == 0:
            return added
    return mean


def whitening(moments: Tensor, added: float) -> Tensor:
    """Return the lower Cholesky factor [d, d], fp64, of moments [d, d] with ``added`` on the diagonal."""
    m = moments.double()
    return torch.linalg.cholesky(m + added * torch.eye(len(m), dtype=m.dtype, device=m.device))


def group_size(heads: int, most: int) -> int:
    """Return how many heads a group has: the largest divisor of ``heads`` that is at most ``most``."""
    return max(g for g in range(1, min(heads, most) + 1) if heads % g == 0)


def step_of(full: int, multiple: int | None) -> int:
    """Return the step between ranks: ``multiple``, or a sixteenth of the full rank."""
    return multiple if multiple is not None else max(1, full // STEPS)


def nearest_rank(full: int, ratio: float, multiple: int | None) -> int:
    """Return the rank that is left of ``full`` without the fraction ``ratio``: the nearest multiple, at least one."""
    step = step_of(full, multiple)
    if ratio == 0:
        return full
    return min(full, max(1, math.floor((1 - ratio) * full / step + 0.5)) * step)


def divided_ranks(weights: Sequence[float], full: int, ratio: float, multiple: int | None) -> list[int]:
    """Return ranks that divide 1 - ratio of all ranks in proportion to ``weights``, in whole multiples.

    None is above ``full`` or below one multiple. What a cap takes away goes to the others in proportion, and fractions
    of multiples to the largest remainders.
    """
    step = step_of(full, multiple)
    if ratio == 0:
        return [full] * len(weights)
    most_units = -(-full // step)
    total = max(len(weights), math.floor((1 - ratio) * full * len(weights) / step + 0.5))
    units = round_shares(proportional_shares(weights, total, most_units), total)
    for i, count in enumerate(units):
        if count == 0:
            units[units.index(max(units))] -= 1
            units[i] = 1
    return [min(full, u * step) for u in units]


def searched_ranks(loss: Sequence[Sequence[float]], ranks: Sequence[int], full: int, target: int) -> list[int]:
    """Return each projection's rank: the smallest of ``ranks`` whose ``loss`` [projections, ranks] is at most a limit.

    The limit, found by bisection (ASVD's binary search), is the smallest loss with which all ranks add up to at most
    ``target``. If there is none, the limit is the largest loss, which gives the least ranks.
    """

    def chosen(limit: float) -> list[int]:
        return [min([r for r, x in zip(ranks, row, strict=True) if x <= limit], default=full) for row in loss]

    limits = sorted({x for row in loss for x in row})
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        if sum(chosen(limits[middle])) <= target:
            high = middle
        else:
            low = middle + 1
    return chosen(limits[low])
