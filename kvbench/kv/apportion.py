"""Divide one budget over layers or heads, in proportion and in whole tokens. The parts add up to the budget."""

from __future__ import annotations

import math
from collections.abc import Sequence


def proportional_shares(weights: Sequence[float], total: int, room: int) -> list[float]:
    """Divide ``total`` in proportion to ``weights``, and return the shares, none of them above ``room``.

    Weights are finite, 0 or more. A share that reaches ``room`` is full. The rest of ``total`` goes to the open shares
    in proportion to their weights, or in equal parts if these weights are all 0. If all shares are full, the rest is
    lost. No share grows when another weight joins.
    """
    shares = [0.0] * len(weights)
    open_shares = list(range(len(weights)))
    undivided = float(total)
    # each round either fills at least one share up to ``room``, or gives the open shares all that is left and ends
    while open_shares:
        mass = sum(weights[i] for i in open_shares)
        offers = {}
        for i in open_shares:
            # without any weight, all open shares get equally much
            fraction = weights[i] / mass if mass > 0 else 1 / len(open_shares)
            offers[i] = undivided * fraction
        full = [i for i in open_shares if offers[i] >= room]
        if not full:
            # every offer fits
            for i in open_shares:
                shares[i] = offers[i]
            break
        for i in full:
            shares[i] = float(room)
        undivided -= room * len(full)
        open_shares = [i for i in open_shares if offers[i] < room]
    return shares


def round_shares(shares: Sequence[float], total: int) -> list[int]:
    """Return the shares rounded to whole numbers that add up to ``total``.

    All shares are rounded down. Each missing unit then goes to the share with the largest fraction, the first among
    equals. The shares must add up to ``total`` but for rounding.
    """
    sizes = [math.floor(share) for share in shares]
    # floor(share) - share is the negative fraction: the largest fraction comes first, and of equals the lowest index
    by_fraction = sorted(range(len(shares)), key=lambda i: (sizes[i] - shares[i], i))
    for i in by_fraction[: total - sum(sizes)]:
        sizes[i] += 1
    return sizes
