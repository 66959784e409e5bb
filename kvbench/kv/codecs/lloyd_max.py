"""TurboQuant: a rotated unit vector, each coordinate by the best scalar quantiser for a Gaussian (arXiv 2504.19874).

vLLM's turboquant formats (https://github.com/vllm-project/vllm) store keys so, rotated by a plain Hadamard matrix. The
paper takes a random rotation. For inner products it spends one bit on the signs of a sketch of the error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kvbench.kv.coded import Codec
from kvbench.kv.packed import pack, packed_bytes, unpack
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
    """Return the quantiser of N(0, 1): its centroids [2^bits], ascending, and the borders [2^bits - 1] between them."""
    positive = torch.tensor(POSITIVE[bits], dtype=torch.float64)
    centroids = torch.cat([-positive.flip(0), positive])
    borders = (centroids[1:] + centroids[:-1]) / 2
    return centroids.float().to(device), borders.float().to(device)


@cache
def sketch(channels: int, device: torch.device) -> Tensor:
    """Return the Gaussian matrix [C, C] whose products with the residual leave their signs."""
    return torch.randn(channels, channels, generator=torch.Generator().manual_seed(SEED + 1)).to(device)


@dataclass(frozen=True, kw_only=True)
class LloydMax(Codec):
    """Codes of y = R x / (|x| + 1e-8), coordinate by coordinate, and the norm |x| in fp16; read as |x| times centroids.

    Centroids are those of N(0, 1) over sqrt(C). Ties go up.

    normed: the centroids of a token are brought to length 1 before they are scaled (vLLM's norm correction).
    inner: one bit of ``bits`` is spent on unbiased inner products. Codes have bits - 1. The residual r = y - y^ is
    stored as the signs of S r, S Gaussian, and |r| in fp16. It is read as y^ + sqrt(pi / 2) / C * |r| * S' sign(S r).
    """

    bits: int = 4
    normed: bool = False
    inner: bool = False

    @property
    def code_bits(self) -> int:
        """The bits of a centroid's code; under ``inner`` one of ``bits`` goes to the signs."""
        if self.inner:
            return self.bits - 1
        return self.bits

    def token_bytes(self, channels: int) -> int:
        coded_channels = self.coded_channels(channels)
        # codes and the norm in fp16
        size = packed_bytes(coded_channels, self.code_bits, "stream") + 2
        if self.inner:
            # signs and the residual's norm in fp16
            size += packed_bytes(coded_channels, 1, "stream") + 2
        return size

    def encode(self, x: Tensor, frozen: Tensor | None) -> dict[str, Tensor]:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        y = x / (norm + 1e-8)
        centroids, borders = _tables(self.code_bits, x.device)
        root = x.shape[-1] ** 0.5
        # y has C coordinates of variance 1 / C; right=True puts a tie into the upper bucket
        codes = torch.bucketize(y, borders / root, right=True)
        tensors = {"codes": pack(codes, self.code_bits, layout="stream"), "norm": norm.half()}
        if self.inner:
            residual = y - centroids[codes] / root
            signs = residual @ sketch(x.shape[-1], x.device).T >= 0
            length = torch.linalg.vector_norm(residual, dim=-1, keepdim=True)
            tensors["codes_signs"] = pack(signs, 1, layout="stream")
            tensors["residual_norm"] = length.half()
        return tensors

    def decode(self, tensors: Mapping[str, Tensor], channels: int, frozen: Tensor | None) -> Tensor:
        device = tensors["codes"].device
        centroids, _ = _tables(self.code_bits, device)
        codes = unpack(tensors["codes"], self.code_bits, channels, layout="stream")
        y = centroids[codes.long()] / channels**0.5
        if self.normed:
            y = y / (y.square().sum(dim=-1, keepdim=True) + 1e-16).sqrt()
        if self.inner:
            # bits 0 and 1 are the signs -1 and +1
            signs = unpack(tensors["codes_signs"], 1, channels, layout="stream").float() * 2 - 1
            # S' sign(S r), the sketch read backwards
            back = signs @ sketch(channels, device)
            y = y + math.sqrt(math.pi / 2) / channels * tensors["residual_norm"].float() * back
        return y * tensors["norm"].float()
