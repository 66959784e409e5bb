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
    generator = torch.Generator().manual_seed(seed)
    size = basis_width(channels, kind)
    if kind == "haar":
        # take Q of a Gaussian's QR; the signs of R's diagonal make it uniform over all rotations
        q, r = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
        return (q * r.diagonal().sign()).float()[:channels]
    # the matrix has equal blocks on its diagonal, each of the largest power of 2 that divides ``size`` and is at most
    # ``block``
    largest_divisor = size & -size
    largest_in_block = 1 << (block.bit_length() - 1)
    block_size = min(largest_divisor, largest_in_block)
    hadamard = _build_hadamard(block_size)
    # H H' = block_size I, so H / sqrt(block_size) has orthonormal rows
    blocks = [hadamard / block_size**0.5] * (size // block_size)
    matrix = torch.block_diag(*blocks).float()
    if kind == "signed":
        # a row belongs to a channel, whose sign is +1 or -1
        signs = torch.randint(0, 2, (size, 1), generator=generator) * 2 - 1
        matrix = signs * matrix
    # channels of padding are zeros, so they need no rows
    return matrix[:channels]


def _build_hadamard(size: int) -> Tensor:
    """Return the Sylvester-Hadamard matrix [size, size] in fp64, with entries +1 and -1. ``size`` is a power of 2."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < size:
        # Sylvester: H_2n = [[H_n, H_n], [H_n, -H_n]]
        h = torch.cat([torch.cat([h, h], dim=1), torch.cat([h, -h], dim=1)])
    return h


@cache
def make_basis(channels: int, kind: str, block: int, device: torch.device, seed: int = SEED) -> Tensor:
    """Return the basis as a matrix B [C, C'] fp32 with orthonormal rows.

    x B expresses x in the basis, and multiplying by the transpose of B gives x back. C' is ``basis_width``.

    kind: ``hadamard`` is the Sylvester-Hadamard matrix. ``signed`` flips the channels' signs at random before that
    matrix. ``haar`` is a random rotation, uniform over all rotations, with C' = C.
    block: the most channels that a Hadamard matrix mixes.
    """
    return _make_basis_on_cpu(channels, kind, block, seed).to(device)
