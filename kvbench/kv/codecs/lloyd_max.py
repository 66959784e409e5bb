"""TurboQuant: a rotated unit vector, each coordinate by the best scalar quantiser for a Gaussian (arXiv 2504.19874).

As engines store keys: vLLM's turboquant formats (https://github.com/vllm-project/vllm) rotate by a plain Hadamard
matrix; the paper by a random rotation, and for inner products it spends one bit on signs of a sketch of the error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kvbench.kv.coded import Codec, bit_bytes, pack_bits, unpack_bits
from kvbench.kv.rotation import SEED

POSITIVE = {
    1: (0.797885,),
    2: (0.452780, 1.510418),
    3: (0.245094, 0.756005, 1.343909, 2.151946),
    4: (0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590),
}
"""The positive centroids of the Lloyd-Max quantiser of N(0, 1), by bits; borders lie half-way between centroids."""


@cache
def _tables(bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (centroids, ascending, and the borders between them) of N(0, 1)."""
    positive = torch.tensor(POSITIVE[bits], dtype=torch.float64)
    centroids = torch.cat([-positive.flip(0), positive])
    return centroids.float().to(device), ((centroids[1:] + centroids[:-1]) / 2).float().to(device)


@cache
def sketch(channels: int, device: torch.device) -> Tensor:
    """Return the Gaussian matrix [C, C] whose products with the residual leave their signs."""
    return torch.randn(channels, channels, generator=torch.Generator().manual_seed(SEED + 1)).to(device)


@dataclass(frozen=True, kw_only=True)
class LloydMax(Codec):
    """Codes of y = R x / (|x| + 1e-8), coordinate by coordinate, and the norm |x| in fp16; read as |x| times centroids.

    Centroids are those of N(0, 1) over sqrt(C), ties go up. Under ``normed`` the centroids of a token are brought to
    length 1 before (vLLM's norm correction).

    inner: one bit of ``bits`` is spent on unbiased inner products: codes have bits - 1, and the residual r = y - y^ is
    stored as signs of S r, S Gaussian, and |r| in fp16. It is read as y^ + sqrt(pi / 2) / C * |r| * S' sign(S r).
    """

    bits: int = 4
    normed: bool = False
    inner: bool = False

    @property
    def code_bits(self) -> int:
        return self.bits - 1 if self.inner else self.bits

    def token_bytes(self, channels: int) -> int:
        c = self.coded_channels(channels)
        return bit_bytes(c, self.code_bits) + 2 + (bit_bytes(c, 1) + 2 if self.inner else 0)

    def encode(self, x: Tensor, frozen: Tensor | None) -> dict[str, Tensor]:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        y = x / (norm + 1e-8)
        centroids, borders = _tables(self.code_bits, x.device)
        root = x.shape[-1] ** 0.5
        codes = torch.bucketize(y, borders / root, right=True)  # right: a tie goes up
        tensors = {"codes": pack_bits(codes, self.code_bits), "norm": norm.half()}
        if self.inner:
            residual = y - centroids[codes] / root
            signs = residual @ sketch(x.shape[-1], x.device).T >= 0
            length = torch.linalg.vector_norm(residual, dim=-1, keepdim=True)
            tensors |= {"codes_signs": pack_bits(signs, 1), "residual_norm": length.half()}
        return tensors

    def decode(self, tensors: Mapping[str, Tensor], channels: int, frozen: Tensor | None) -> Tensor:
        codes = tensors["codes"]
        y = _tables(self.code_bits, codes.device)[0][unpack_bits(codes, self.code_bits, channels).long()]
        y = y / channels**0.5
        if self.normed:
            y = y / (y.square().sum(dim=-1, keepdim=True) + 1e-16).sqrt()
        if self.inner:
            signs = unpack_bits(tensors["codes_signs"], 1, channels).float() * 2 - 1
            back = signs @ sketch(channels, codes.device)
            y = y + math.sqrt(math.pi / 2) / channels * tensors["residual_norm"].float() * back
        return y * tensors["norm"].float()
