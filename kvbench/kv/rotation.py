"""Orthogonal bases for quantisers. Values in such a basis are spread evenly, so that no channel dominates."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kvbench.base.numbers import ceil_div

ROTATIONS = ("none", "hadamard", "signed", "haar")
"""The kinds of bases, as ``make_basis`` describes them; ``none`` is no basis."""
SEED = 0
"""The seed from which random bases are drawn."""
LEAST = 32
"""Channels are padded if their blocks would be smaller than this: such a block mixes too few channels to help."""


def basis_width(channels: int, kind: str) -> int:
    """Return how many channels C' a basis for ``channels`` channels has: as many, or a few more for a Hadamard matrix.

    Hadamard matrices exist for powers of 2. Other numbers of channels are cut into blocks of the largest power of 2
    that divides the number. If that power is below 32, zeros first fill the channels up to a multiple of 32.
    """
    # n & (n - 1) is 0 for powers of 2 only
    if kind == "haar" or channels & (channels - 1) == 0:
        return channels
    return ceil_div(channels, LEAST) * LEAST


@cache
def _make_basis_on_cpu(channels: int, kind: str, block: int, seed: int) -> Tensor:
    """Return the matrix of ``make_basis``. It is drawn on the CPU, so that it is the same whatever the device."""
    g = torch.Generator().manual_seed(seed)
    size = basis_width(channels, kind)
    if kind == "haar":
        # take Q of a Gaussian's QR; the signs of R's diagonal make it uniform over all rotations
        q, r = torch.linalg.qr(torch.randn(size, size, generator=g, dtype=torch.float64))
        return (q * r.diagonal().sign()).float()[:channels]
    # a block has ``span`` channels: the largest power of 2 that divides ``size`` and is at most ``block``
    largest_divisor = size & -size
    largest_in_block = 1 << (block.bit_length() - 1)
    span = min(largest_divisor, largest_in_block)
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < span:
        # Sylvester: H_2n = [[H_n, H_n], [H_n, -H_n]]
        h = torch.cat([torch.cat([h, h], dim=1), torch.cat([h, -h], dim=1)])
    # H H' = span I, so H / sqrt(span) has orthonormal rows
    blocks = [h / span**0.5] * (size // span)
    matrix = torch.block_diag(*blocks).float()
    if kind == "signed":
        # a row belongs to a channel, whose sign is +1 or -1
        matrix = (torch.randint(0, 2, (size, 1), generator=g) * 2 - 1) * matrix
    # channels of padding are zeros, so they need no rows
    return matrix[:channels]


@cache
def make_basis(channels: int, kind: str, block: int, device: torch.device, seed: int = SEED) -> Tensor:
    """Return the basis as a matrix B [C, C'] fp32 with orthonormal rows.

    x B expresses x in the basis, and multiplying by the transpose of B gives x back. C' is ``basis_width``.

    kind: ``hadamard`` is the Sylvester-Hadamard matrix. ``signed`` flips the channels' signs at random before that
    matrix. ``haar`` is a random rotation, uniform over all rotations, with C' = C.
    block: the most channels that a Hadamard matrix mixes.
    """
    return _make_basis_on_cpu(channels, kind, block, seed).to(device)
