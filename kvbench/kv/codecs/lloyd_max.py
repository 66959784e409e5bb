"""TurboQuant: rotate unit vectors and store each coordinate by the best scalar quantiser for a Gaussian.

The paper (arXiv 2504.19874) takes a random rotation. For inner products it spends one bit on the signs of a sketch of
the error. vLLM's turboquant formats (https://github.com/vllm-project/vllm) store keys this way, rotated by a plain
Hadamard matrix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kvbench.kv.coded import Codec
from kvbench.kv.packed import Levels, pack, packed_bytes, unpack
from kvbench.kv.rotation import SEED

POSITIVE = {
    1: (0.797885,),
    2: (0.452780, 1.510418),
    3: (0.245094, 0.756005, 1.343909, 2.151946),
    4: (0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590),
}
"""The positive centroids of the Lloyd-Max quantiser of N(0, 1), by bits. Borders lie half-way between centroids."""


@cache
def _build_quantiser(bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the quantiser of N(0, 1): centroids [2^bits] and the borders [2^bits - 1] between them, both ascending."""
    positive = torch.tensor(POSITIVE[bits], dtype=torch.float64)
    centroids = torch.cat([-positive.flip(0), positive])
    borders = (centroids[1:] + centroids[:-1]) / 2
    return centroids.float().to(device), borders.float().to(device)


@cache
def draw_sketch(channels: int, device: torch.device) -> Tensor:
    """Return the Gaussian matrix S [C, C]. ``LloydMax`` stores the signs of its products with the residual."""
    # rotations are drawn from SEED, so S takes another seed; it is drawn on the CPU to be the same on every device
    generator = torch.Generator().manual_seed(SEED + 1)
    return torch.randn(channels, channels, generator=generator).to(device)


@dataclass(frozen=True, kw_only=True)
class LloydMax(Codec):
    """Store the norm |x| in fp16 and a code for each coordinate of y = R x / (|x| + 1e-8), read as |x| times centroids.

    R is the rotation. Centroids are those of N(0, 1) divided by sqrt(C). Ties go to the upper centroid.

    normed: True scales a token's centroids to length 1 before they are multiplied by |x| (vLLM's norm correction).
    inner: True spends one of ``bits`` on unbiased inner products, and codes have bits - 1. With the centroids y^, the
    residual r = y - y^ is stored as the signs of S r, for a Gaussian matrix S, and |r| in fp16. y is then read as
    y^ + sqrt(pi / 2) / C * |r| * S' sign(S r).
    """

    bits: int = 4
    normed: bool = False
    inner: bool = False

    @property
    def code_bits(self) -> int:
        """The bits of a centroid's code. Under ``inner`` one of ``bits`` goes to the signs instead."""
        if self.inner:
            return self.bits - 1
        return self.bits

    def token_bytes(self, channels: int) -> int:
        coded_channels = self.coded_channels(channels)
        # a token has its codes and its norm, 2 bytes in fp16
        size = packed_bytes(coded_channels, self.code_bits, "stream") + 2
        if self.inner:
            # it also has the signs and the residual's norm in fp16
            size += packed_bytes(coded_channels, 1, "stream") + 2
        return size

    def encode(self, x: Tensor, frozen: Tensor | None) -> dict[str, Tensor]:
        """Return ``codes`` [..., L, bytes] and ``norm`` [..., L, 1] fp16, and under ``inner`` the residual."""
        # y = R x / (|x| + 1e-8), with x already in the basis of R; 1e-8 keeps a token of zeros from dividing by 0
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        y = x / (norm + 1e-8)
        centroids, borders = _build_quantiser(self.code_bits, x.device)
        # coordinates of y have variance 1 / C, so centroids and borders of N(0, 1) shrink by sqrt(C)
        sqrt_channels = x.shape[-1] ** 0.5
        # right=True puts ties into the upper bucket
        codes = torch.bucketize(y, borders / sqrt_channels, right=True)
        tensors = {"codes": pack(codes, self.code_bits, layout="stream"), "norm": norm.half()}
        if self.inner:
            # the residual r = y - y^ is stored as the signs of S r, and |r|
            residual = y - centroids[codes] / sqrt_channels
            is_positive = residual @ draw_sketch(residual.shape[-1], residual.device).T >= 0
            residual_norm = torch.linalg.vector_norm(residual, dim=-1, keepdim=True)
            tensors |= {"codes_signs": pack(is_positive, 1, layout="stream"), "residual_norm": residual_norm.half()}
        return tensors

    def decode(self, tensors: Mapping[str, Tensor], channels: int, frozen: Tensor | None) -> Tensor:
        """Return the numbers |x| y [..., L, C'] fp32, with y as the codes stand for it."""
        device = tensors["codes"].device
        centroids, _ = _build_quantiser(self.code_bits, device)
        codes = unpack(tensors["codes"], self.code_bits, channels, layout="stream")
        y = centroids[codes.long()] / channels**0.5
        if self.normed:
            # the centroids of a token are scaled to length 1; 1e-16 keeps a length of 0 from dividing by 0
            squared_length = y.square().sum(dim=-1, keepdim=True)
            y = y / (squared_length + 1e-16).sqrt()
        if self.inner:
            # bit 0 stands for the sign -1, bit 1 for +1
            signs = unpack(tensors["codes_signs"], 1, channels, layout="stream").float() * 2 - 1
            # S' sign(S r) approximates the direction of the residual
            direction = signs @ draw_sketch(channels, device)
            # y = y^ + sqrt(pi / 2) / C * |r| * S' sign(S r)
            y = y + math.sqrt(math.pi / 2) / channels * tensors["residual_norm"].float() * direction
        return y * tensors["norm"].float()

    def levels(self, tensors: Mapping[str, Tensor], channels: int, frozen: Tensor | None) -> Levels | None:
        # a residual adds a product with the matrix S, which ``Levels`` cannot express
        if self.inner:
            return None
        centroids, _ = _build_quantiser(self.code_bits, tensors["codes"].device)
        scale = tensors["norm"].float()
        # normed centroids have length 1 in any case; others are those of N(0, 1) divided by sqrt(C)
        if not self.normed:
            scale = scale / channels**0.5
        return Levels(
            codes=tensors["codes"],
            scale=scale,
            table=centroids,
            normed=self.normed,
            bits=self.code_bits,
            run=channels,
            group=channels,
            channels=channels,
            layout="stream",
        )
