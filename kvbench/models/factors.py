"""Low-rank factors of a projection, and the division of ranks over projections: the maths of Palu and ASVD.

Palu is arXiv 2407.21118, ASVD arXiv 2312.05821.
Shapes: m outputs of a group of heads (heads times D), d hidden size, q = min(m, d) singular values, r rank of a group,
R the sum of all groups' ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.base.numbers import ceil_div
from kvbench.kv.apportion import proportional_shares, round_shares

JITTER = (0.0, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
"""Fractions of a diagonal's mean to add to the diagonal. ``damping_needed`` tries them in this order."""
STEPS = 16
"""Without ``multiple``, ranks are multiples of the full rank divided by this number: of 32 for a full rank of 512."""


@dataclass(frozen=True)
class Factors:
    """A projection W [H D, d] as low-rank factors. The rows of each group g of heads are W_g = up_g down_g.

    down: [R, d], the matrices down_g [r, d] of all groups one below the other. It maps an input to R latents.
    ups: each group's matrix up_g [m, r], or None for a group of full rank, whose latents are its outputs.
    ranks: each group's rank r.
    """

    down: Tensor
    ups: tuple[Tensor | None, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Spectrum:
    """The singular value decomposition of a weight in fp64, from which ``cut`` takes low-rank factors of any rank.

    It is W S = u diag(s) vt, hence W = u diag(s) vt S^-1. W is the weight of a group of heads, and S weighs its inputs
    (see ``of``).

    weight: W [m, d], in its own dtype.
    u: the left singular vectors [m, q].
    s: the singular values [q], descending.
    back: vt S^-1 [q, d], the right singular vectors on inputs that S does not weigh.
    """

    weight: Tensor
    u: Tensor
    s: Tensor
    back: Tensor

    @classmethod
    def of(cls, weight: Tensor, scale: Tensor) -> Spectrum:
        """Return the decomposition of W S for the weight W [m, d] and the ``scale`` S.

        S is the lower triangular Cholesky factor [d, d] of the inputs' moments (Palu), or a diagonal [d] (ASVD).
        """
        weight64, scale64 = weight.detach().double(), scale.to(weight.device).double()
        if scale64.dim() == 1:
            # W S scales column j by S_j, and vt S^-1 divides it by S_j
            u, s, vt = torch.linalg.svd(weight64 * scale64, full_matrices=False)
            back = vt / scale64
        else:
            u, s, vt = torch.linalg.svd(weight64 @ scale64, full_matrices=False)
            # the solution X of X S = vt
            back = torch.linalg.solve_triangular(scale64, vt, upper=False, left=False)
        return cls(weight=weight.detach(), u=u, s=s, back=back)

    def cut(self, rank: int) -> tuple[Tensor, Tensor | None]:
        """Return (down [rank, d], up [m, rank]) with the ``rank`` largest singular values, in the weight's dtype.

        Each factor is multiplied by the square roots of these singular values. At full rank the result is (the weight
        itself, None), because factors would only add rounding.
        """
        if rank >= self.weight.shape[0]:
            return self.weight, None
        # down = sqrt(s) vt S^-1 and up = u sqrt(s), so that up down = u s vt S^-1
        roots = self.s[:rank].sqrt()
        down = roots[:, None] * self.back[:rank]
        up = self.u[:, :rank] * roots
        return down.to(self.weight.dtype), up.to(self.weight.dtype)


def join_factors(parts: Sequence[tuple[Tensor, Tensor | None]]) -> Factors:
    """Return the factors of a projection, joined from the pairs (down, up) of its groups of heads, in order."""
    downs = [down for down, _ in parts]
    ups = [up for _, up in parts]
    return Factors(down=torch.cat(downs), ups=tuple(ups), ranks=tuple(down.shape[0] for down in downs))


def damping_needed(moments: Tensor) -> float:
    """Return the number to add to the diagonal of moments [d, d] so that they have a Cholesky factor.

    The number is the diagonal's mean times the first fraction in JITTER that is large enough, which is 0 for moments
    that have a factor already. If no fraction is large enough, the number is the mean itself.
    """
    moments64 = moments.double()
    mean = float(moments64.diagonal().mean())
    eye = torch.eye(len(moments64), dtype=moments64.dtype, device=moments64.device)
    for fraction in JITTER:
        added = fraction * mean
        # cholesky_ex reports 0 in ``info`` where the factor exists
        if int(torch.linalg.cholesky_ex(moments64 + added * eye).info) == 0:
            return added
    return mean


def whitening_factor(moments: Tensor, added: float) -> Tensor:
    """Return the lower Cholesky factor [d, d], fp64, of moments [d, d] with ``added`` on the diagonal.

    ``added`` must be large enough for the factor to exist; ``damping_needed`` finds such a number.
    """
    moments64 = moments.double()
    eye = torch.eye(len(moments64), dtype=moments64.dtype, device=moments64.device)
    return torch.linalg.cholesky(moments64 + added * eye)


def group_size(heads: int, most: int) -> int:
    """Return how many of ``heads`` heads form a group: the largest divisor of ``heads`` that is at most ``most``."""
    return max(size for size in range(1, min(heads, most) + 1) if heads % size == 0)


def step_of(full: int, multiple: int | None) -> int:
    """Return the step between ranks: ``multiple``, or without one a sixteenth of the full rank, at least 1."""
    if multiple is not None:
        return multiple
    return max(1, full // STEPS)


def nearest_rank(full: int, ratio: float, multiple: int | None) -> int:
    """Return the rank that remains of the full rank ``full`` if the fraction ``ratio`` of it is removed.

    The rank is (1 - ratio) * full, rounded to the nearest multiple of ``step_of``, at least one multiple and at most
    ``full``. With a ratio of 0 it is ``full``, even if that is no multiple.
    """
    step = step_of(full, multiple)
    # the full rank need not be a multiple, and rounding would change it
    if ratio == 0:
        return full
    # floor(x + 0.5) rounds halves up, whereas round() would round them to even
    steps = math.floor((1 - ratio) * full / step + 0.5)
    return min(full, max(1, steps) * step)


def divided_ranks(weights: Sequence[float], full: int, ratio: float, multiple: int | None) -> list[int]:
    """Return a rank for each matrix. Together, the fraction ``ratio`` of their full ranks is removed.

    The remaining ranks are divided in proportion to ``weights``, which has a number for each matrix. All matrices have
    the full rank ``full``. A rank is a multiple of ``step_of``, at least one multiple and at most ``full``. A share
    above ``full`` is cut, and the excess goes to the other matrices in proportion. Multiples that are left over go to
    the shares with the largest remainders.
    """
    step = step_of(full, multiple)
    # the full rank need not be a multiple, and rounding would change it
    if ratio == 0:
        return [full] * len(weights)
    # ranks are counted in units of one multiple; the last unit of a full rank may be cut by ``full``
    most_units = ceil_div(full, step)
    # floor(x + 0.5) rounds halves up
    total_units = math.floor((1 - ratio) * full * len(weights) / step + 0.5)
    # there is at least one unit for every matrix
    total_units = max(len(weights), total_units)
    shares = proportional_shares(weights, total_units, most_units)
    units = round_shares(shares, total_units)
    for i, count in enumerate(units):
        if count == 0:
            # the matrix with most units gives one of its own
            units[units.index(max(units))] -= 1
            units[i] = 1
    return [min(full, count * step) for count in units]


def searched_ranks(loss: Sequence[Sequence[float]], ranks: Sequence[int], full: int, target: int) -> list[int]:
    """Return each projection's rank: the smallest of ``ranks`` whose loss is within one limit, else ``full``.

    The limit is the same for all projections. It is the smallest loss for which the chosen ranks add up to at most
    ``target``. Bisection finds it, as in ASVD (arXiv 2312.05821). If the ranks add up to more under every limit, the
    limit is the largest loss, which gives the smallest ranks.

    loss: [projections, ranks], the model's loss with one projection cut to one of the ranks.
    ranks: the ranks that were tried, one for each column of ``loss``.
    full: the full rank of every projection.
    """

    def choose_ranks(limit: float) -> list[int]:
        """Return each projection's smallest rank with a loss of at most ``limit``."""
        projection_ranks = []
        for row in loss:
            possible = [rank for rank, rank_loss in zip(ranks, row, strict=True) if rank_loss <= limit]
            projection_ranks.append(min(possible, default=full))
        return projection_ranks

    losses: set[float] = set()
    for row in loss:
        losses.update(row)
    # only at these limits do the chosen ranks change
    limits = sorted(losses)
    # a larger limit never gives larger ranks, so limits[high] always suffices or is the last one
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        if sum(choose_ranks(limits[middle])) <= target:
            high = middle
        else:
            low = middle + 1
    return choose_ranks(limits[low])
