"""The channels that thin keys and values keep: taken from whole heads, and put back into whole heads.

Shapes: B rows, Hq query heads, H stored heads, R queries or tokens of a head, T new tokens, C kept channels, D head
dimension.
"""

from __future__ import annotations

from torch import Tensor


def pick_channels(x: Tensor, channels: Tensor) -> Tensor:
    """Return the ``channels`` [B, H, C] of x [B, H, R, D] as [B, H, R, C]."""
    return x.gather(3, channels[:, :, None].expand(-1, -1, x.shape[2], -1))


def spread_channels(part: Tensor, channels: Tensor, head_dim: int) -> Tensor:
    """Return outputs of thin values in whole heads [B, Hq, T, D]: 0 in every channel that the values do not keep.

    part: the outputs [B, Hq, T, C] in the kept value channels.
    channels: [B, H, C], the kept channels of each stored head.
    """
    b, hq, t, c = part.shape
    index = channels.repeat_interleave(hq // channels.shape[1], dim=1)[:, :, None].expand(b, hq, t, c)
    return part.new_zeros(b, hq, t, head_dim).scatter_(3, index, part)
