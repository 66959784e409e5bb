"""Asymmetric rounding per token with an integer zero point, as in Q-Hitter (MLSys 2024)."""

from __future__ import annotations

from torch import Tensor

SCALE_FLOOR = 1e-5


def round_tokens(x: Tensor, bits: int) -> Tensor:
    """What ``bits`` bits make of x [..., D], in fp32: one scale and zero point per token and head, over D.

    The zero point is an integer clamped to [0, 2^bits - 1], so that a range which leaves out 0 is not met: a constant
    token is lost. Zeros are exact.
    """
    x = x.float()
    low, high = x.aminmax(dim=-1, keepdim=True)
    top = 2**bits - 1
    scale = ((high - low) / top).clamp(min=SCALE_FLOOR)
    zero = (-low / scale).round().clamp(0, top)
    return (((x / scale).round() + zero).clamp(0, top) - zero) * scale
