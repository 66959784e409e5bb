"""The mean of a metric's scores and its interval, in printed units."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from kvbench.tasks.metrics import metric, stats


def show_mean(name: str, scores: Sequence[float]) -> tuple[float | None, tuple[float, float] | None]:
    """Return (the mean of the scores, its 95 % interval), both in printed units.

    name: the name of the metric that gave the scores.

    Without a score both are None. The interval is None for fewer than ``stats.FEWEST`` scores. It is also None if the
    scores have no bounds and are all equal.
    """
    chosen = metric(name)
    if not scores:
        return None, None
    mean = chosen.show(fmean(scores))
    if len(scores) < stats.FEWEST:
        return mean, None
    # a likelihood is shown by a formula of its own, and its log losses have no bounds
    bounds: stats.Bounds | None = (0.0, 1.0) if chosen.formula is None else None
    interval = stats.mean_interval(scores, bounds=bounds)
    if interval is None:
        return mean, None
    low, high = interval
    return mean, (chosen.show(low), chosen.show(high))
