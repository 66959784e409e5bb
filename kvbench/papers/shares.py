"""Scores in per cent of the full cache's over the same examples, with intervals of resampled pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbench.metrics import stats
from kvbench.report import FEWEST

DRAWS = 2000

Pairs = NDArray[np.float64]
"""[n, 2]: a method's score and the full cache's of each example."""


FLOOR = 0.03
"""What a full cache's mean score, of 1, must be above that of empty answers or of guessing for a share to say much."""


def floored(pairs: Pairs, chance: float = 0.0) -> bool:
    """Whether the full cache is at the floor: less than FLOOR above ``chance``, or with an interval that reaches it."""
    if not len(pairs):
        return False
    interval = stats.bootstrap_ci(pairs[:, 1], bounds=(0.0, 1.0)) if len(pairs) >= FEWEST else None
    return bool(pairs[:, 1].mean() < chance + FLOOR or (interval is not None and interval[0] <= chance))


def of_task(pairs: Pairs, lower: bool) -> tuple[float | None, tuple[float, float] | None]:
    """A mean in per cent of the full cache's over the same examples, with the interval of resampled pairs."""
    if not len(pairs):
        return None, None
    if lower:  # sums of log losses: what is printed is their exponential
        share = 100 * float(np.exp(pairs[:, 1].mean() - pairs[:, 0].mean()))
        if len(pairs) < FEWEST:
            return share, None
        return share, _ends(100 * np.exp([1, -1] @ _draws(pairs)[:, ::-1].T))
    if pairs[:, 1].mean() == 0:
        return None, None
    share = 100 * float(pairs[:, 0].mean() / pairs[:, 1].mean())
    if len(pairs) < FEWEST:
        return share, None
    if np.ptp(pairs, axis=0).max() == 0:  # every resample is the same: what n equal draws cannot exclude
        low, high = stats.bootstrap_ci(pairs[:, 0]) or (None, None)
        whole = float(pairs[0, 1])
        return share, None if low is None or high is None else (100 * low / whole, 100 * high / whole)
    draws = _draws(pairs)
    return share, _ends(100 * draws[:, 0] / np.maximum(draws[:, 1], 1e-12))


def of_mean(tasks: Sequence[Pairs], of_ratios: bool) -> tuple[float | None, tuple[float, float] | None]:
    """The same of a mean over tasks: of the ratios if ``of_ratios``, else the ratio of the means."""
    wholes = [t[:, 1].mean() for t in tasks if len(t)]
    if not tasks or len(wholes) < len(tasks) or not (all(wholes) if of_ratios else any(wholes)):
        return None, None

    def share(means: Sequence[Any]) -> Any:
        if of_ratios:
            return 100 * sum(m[..., 0] / np.maximum(m[..., 1], 1e-12) for m in means) / len(means)
        return 100 * sum(m[..., 0] for m in means) / np.maximum(sum(m[..., 1] for m in means), 1e-12)

    point = float(share([t.mean(0) for t in tasks]))
    if min(map(len, tasks)) < FEWEST:
        return point, None
    low, high = _ends(share([_draws(t, seed) for seed, t in enumerate(tasks)]))
    if high - low < 1e-9:  # as above, of the examples of all tasks
        found = stats.bootstrap_ci(np.full(sum(map(len, tasks)), min(1.0, point / 100)))
        return point, found and (100 * found[0], max(point, 100 * found[1]))
    return point, (low, high)


def _draws(pairs: Pairs, seed: int = 0) -> Pairs:
    """Means [DRAWS, 2] of resampled pairs."""
    index = np.random.default_rng(seed).integers(len(pairs), size=(DRAWS, len(pairs)))
    return pairs[index].mean(1)


def _ends(values: NDArray[np.float64]) -> tuple[float, float]:
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)
