"""The examples that a limit takes from a task with a grid of depths or lengths: some from every part of the grid."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from kvbench.base.example import Example

Point = tuple[float, ...]
"""The values of an example's ``meta`` along the axes of a grid."""


def order_by_spread(examples: Sequence[Example], keys: Sequence[str]) -> list[int]:
    """Return the examples' indices in an order of which every beginning covers the grid as evenly as it can.

    keys: the keys of ``meta`` whose values are the axes of the grid.

    The grid's points take turns: the first example of each, then the second of each, and so on. The lowest point comes
    first, then always the point farthest from all points before it. Of two that are equally far, the lower comes first.
    """
    indices_at: dict[Point, list[int]] = {}
    for i, example in enumerate(examples):
        point = tuple(example.meta[key] for key in keys)
        indices_at.setdefault(point, []).append(i)
    points = _order_farthest_first(sorted(indices_at))
    order: list[int] = []
    # one index of each point; a point without unused examples has None
    for indices in zip_longest(*[indices_at[point] for point in points]):
        order.extend(i for i in indices if i is not None)
    return order


def _order_farthest_first(points: Sequence[Point]) -> list[Point]:
    """Return sorted points in an order in which each is the farthest from all points before it, the lowest being first.

    Distances are those of ranks along each axis, from 0 to 1.
    """
    axes = [sorted(set(values)) for values in zip(*points, strict=True)]

    def scale(point: Point) -> list[float]:
        coordinates = []
        for axis, value in zip(axes, point, strict=True):
            # ranks, so that lengths 1k, 2k, 32k are as far apart as depths 0, 50, 100. An axis with a single value has
            # the largest rank 0, by which nothing can be divided
            largest_rank = len(axis) - 1
            coordinates.append(axis.index(value) / max(1, largest_rank))
        return coordinates

    remaining = {point: scale(point) for point in points}
    # the squared distance of each remaining point to the nearest ordered one
    distances = dict.fromkeys(points, float("inf"))
    order: list[Point] = []
    while remaining:
        # max takes the first of equals, the lowest; before any point is ordered, all distances are infinite
        farthest = max(remaining, key=distances.__getitem__)
        coordinates = remaining.pop(farthest)
        order.append(farthest)
        # the new point may be nearer to a remaining one than all earlier points are
        for point, other_coordinates in remaining.items():
            squared = sum((a - b) ** 2 for a, b in zip(coordinates, other_coordinates, strict=True))
            distances[point] = min(distances[point], squared)
    return order


def describe_left_out(taken: Sequence[Example], examples: Sequence[Example], keys: Sequence[str]) -> list[str]:
    """Return, in words (``depth 25, 75``), the values of each key that occur in ``examples`` but not in ``taken``."""
    parts = []
    for key in keys:
        all_values = {example.meta[key] for example in examples}
        taken_values = {example.meta[key] for example in taken}
        missing = all_values - taken_values
        if missing:
            values = ", ".join(f"{value:g}" for value in sorted(missing))
            parts.append(f"{key} {values}")
    return parts
