"""One budget divided over layers or heads: in proportion, in whole tokens, with its sum kept."""

from __future__ import annotations

import math
from collections.abc import Sequence


def proportional_shares(weights: Sequence[float], total: int, room: int) -> list[float]:
    """Return the shares of ``total`` in proportion to ``weights``, none above ``room``; equal if all weights are 0.

    The excess of full shares goes to the others in proportion. No share grows when another weight joins.
    """
    shares, open_shares, undivided = [0.0] * len(weights), list(range(len(weights))), float(total)
    while open_shares:
        mass = sum(weights[i] for i in open_shares)
        offers = {i: undivided * (weights[i] / mass if mass > 0 else 1 / len(open_shares)) for i in open_shares}
        full = [i for i in open_shares if offers[i] >= room]
        for i in full or open_shares:
            shares[i] = min(offers[i], float(room))
        if not full:
            break
        undivided -= room * len(full)
        open_shares = [i for i in open_shares if offers[i] < room]
    return shares


def round_shares(shares: Sequence[float], total: int) -> list[int]:
    """Return the shares rounded to whole numbers that add up to ``total``.

    All are rounded down, and what is left goes to the largest fractions, to the first among equals.
    """
    sizes = [math.floor(share) for share in shares]
    by_fraction = sorted(range(len(shares)), key=lambda i: (sizes[i] - shares[i], i))
    for i in by_fraction[: total - sum(sizes)]:
        sizes[i] += 1
    return sizes
