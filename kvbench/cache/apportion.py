"""One budget divided over layers or heads: in proportion, in whole tokens, with its sum kept."""

from __future__ import annotations

import math
from collections.abc import Sequence


def shares(weights: Sequence[float], total: int, room: int) -> list[float]:
    """``total`` divided in proportion to ``weights``, none above ``room``; equally where all weights are 0.

    What full ones leave over goes to the others in proportion: no share grows when another weight joins.
    """
    found, free, left = [0.0] * len(weights), list(range(len(weights))), float(total)
    while free:
        mass = sum(weights[i] for i in free)
        given = {i: left * (weights[i] / mass if mass > 0 else 1 / len(free)) for i in free}
        full = [i for i in free if given[i] >= room]
        for i in full or free:
            found[i] = min(given[i], float(room))
        if not full:
            break
        left -= room * len(full)
        free = [i for i in free if given[i] < room]
    return found


def whole_shares(wanted: Sequence[float], total: int) -> list[int]:
    """Whole numbers that add up to ``total``: rounded down, the rest to the largest fractions, ties to the first."""
    sizes = [math.floor(x) for x in wanted]
    by_fraction = sorted(range(len(wanted)), key=lambda i: (sizes[i] - wanted[i], i))
    for i in by_fraction[: total - sum(sizes)]:
        sizes[i] += 1
    return sizes
