"""Orthogonal bases in which values are coded, so that no channel is larger than the others."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

ROTATIONS = ("none", "hadamard", "signed", "haar")
SEED = 0
LEAST = 32  # blocks of fewer channels mix too few of them to help


def width(channels: int, kind: str) -> int:
    """Return how many channels a basis for ``channels`` has: equally many, or a few more for a Hadamard matrix.

    Hadamard matrices exist for powers of 2. Other numbers are cut into blocks of the largest power of 2, at least 32,
    that divides them. If there is none, zeros fill them up to a multiple of 32.
    """
    if kind == "haar" or channels & (channels - 1) == 0:
        return channels
    return -(-channels // LEAST) * LEAST


@cache
def _basis(channels: int, kind: str, block: int, seed: int) -> Tensor:
    """Return ``basis`` on the CPU."""
    g = torch.Generator().manual_seed(seed)
    size = width(channels, kind)
    if kind == "haar":
        # QR of a Gaussian; the signs of R's diagonal make it uniform
        q, r = torch.linalg.qr(torch.randn(size, size, generator=g, dtype=torch.float64))
        return (q * r.diagonal().sign()).float()[:channels]
    # the channels of a block: the largest power of 2 that divides ``size`` and is at most ``block``
    span = min(size & -size, 1 << (block.bit_length() - 1))
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < span:
        # Sylvester: H_2n = [[H_n, H_n], [H_n, -H_n]]
        h = torch.cat([torch.cat([h, h], dim=1), torch.cat([h, -h], dim=1)])
    # H H' = span I: over sqrt(span) its rows are orthonormal
    blocks = [h / span**0.5] * (size // span)
    matrix = torch.block_diag(*blocks).float()
    if kind == "signed":
        matrix = (torch.randint(0, 2, (size, 1), generator=g) * 2 - 1) * matrix
    return matrix[:channels]


@cache
def basis(channels: int, kind: str, block: int, device: torch.device, seed: int = SEED) -> Tensor:
    """Return a matrix B [C, C'] fp32 with orthonormal rows. y = x B is x in another basis, and x = y B'.

    kind: ``hadamard`` is the plain Sylvester matrix. ``signed`` gives the channels random signs before it. ``haar`` is
    uniform over all rotations, with C' = C.
    block: the most channels that a Hadamard matrix mixes.
    """
    return _basis(channels, kind, block, seed).to(device)
