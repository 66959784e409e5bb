"""The examples that a limit takes of a task whose examples lie on a grid, as of depths: some of every part of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from kvbench.base.example import Example


def spread(examples: Sequence[Example], keys: Sequence[str]) -> list[int]:
    """Return the examples' indices in an order whose every beginning covers the grid of ``meta``'s values by ``keys``.

    The grid's fields take turns: the first example of each, then the second of each, and so on. The lowest field comes
    first, then always the one farthest from all before it, of equals the lower.
    """
    fields: dict[tuple[float, ...], list[int]] = {}
    for i, example in enumerate(examples):
        fields.setdefault(tuple(example.meta[k] for k in keys), []).append(i)
    rounds = zip_longest(*(fields[f] for f in _farthest_first(sorted(fields))))
    return [i for one_per_field in rounds for i in one_per_field if i is not None]


def _farthest_first(points: Sequence[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """Return sorted points in an order in which each is the farthest from all before it.

    Distances are those of ranks along each axis, from 0 to 1.
    """
    axes = [sorted(set(values)) for values in zip(*points, strict=True)]

    def rank(point: tuple[float, ...]) -> list[float]:
        return [axis.index(x) / max(1, len(axis) - 1) for axis, x in zip(axes, point, strict=True)]

    remaining = {p: rank(p) for p in points}
    distances = dict.fromkeys(points, float("inf"))
    order: list[tuple[float, ...]] = []
    while remaining:
        chosen = max(remaining, key=distances.__getitem__)
        chosen_rank = remaining.pop(chosen)
        order.append(chosen)
        distances = {
            p: min(distances[p], sum((a - b) ** 2 for a, b in zip(chosen_rank, q, strict=True)))
            for p, q in remaining.items()
        }
    return order


def left_out(taken: Sequence[Example], examples: Sequence[Example], keys: Sequence[str]) -> list[str]:
    """Return the values of each key for which ``taken`` has no example, in words: ``depth 25, 75``."""
    parts = []
    for key in keys:
        missing = sorted({e.meta[key] for e in examples} - {e.meta[key] for e in taken})
        if missing:
            parts.append(f"{key} {', '.join(f'{x:g}' for x in missing)}")
    return parts
