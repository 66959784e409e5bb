"""Intervals of mean scores and of shares of the full cache, by the percentile bootstrap; p-values of mean differences.

Every interval is of LEVEL, 95 %, and always the same for the same values.

Where all values are equal every resample is too, and the bootstrap would claim certainty after a handful of examples.
Then the interval says what n equal draws can exclude: with 95 % confidence at least ``q = (alpha/2)**(1/n)`` of all
examples give that value, and the others may lie anywhere within ``bounds``. For scores that are all 0 or all 1 this is
the exact (Clopper-Pearson) binomial interval.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Scores = Sequence[float] | NDArray[np.float64]
Bounds = tuple[float, float]
Interval = tuple[float, float]
Pairs = NDArray[np.float64]
"""[n, 2]: a method's score and the full cache's of each example."""

LEVEL = 0.95
DRAWS = 10_000
FEWEST = 8
"""The fewest examples for a bootstrap: below, no interval is shown."""
FLOOR = 0.03
"""The least distance of a full cache's mean score, of 1, to that of silence or guessing: nearer, no share is shown."""
TINY = 1e-12
STAKES = np.array([*np.geomspace(0.002, 0.8, 24), 1.0])
WEIGHTS = np.array([0.75 / 24] * 24 + [0.25])
"""Parts of their wealth that the bettors of ``p_above`` stake, and the share of the money that each begins with."""
_BLOCK = 2**22
"""Indices drawn at a time: bounds the memory of a bootstrap to some 50 MB whatever n is."""
_CACHED = 2**21
"""The most counts of one table of draws that is kept, of 16: 256 MB at most, for 200 examples."""


def bootstrap_ci(scores: Scores, bounds: Bounds | None = (0.0, 1.0)) -> Interval | None:
    """Return the interval (low, high) of the mean score, or None for fewer than two scores, which have no spread.

    ``bounds`` is the range of a score, used only where all scores are equal; if it is None there is no interval then.
    Raises ValueError for scores that are not finite: leave unscorable examples out before.
    """
    values = _finite(scores)
    if len(values) < 2:
        return None
    if values.min() == values.max():
        return _constant(float(values[0]), len(values), bounds)
    low, high = np.quantile(_resampled(values, seed=0), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def paired_difference(scores: Scores, baseline: Scores) -> tuple[float, Interval | None]:
    """Return (mean of ``scores - baseline`` over the same examples in the same order, its interval or None).

    Scores lie between 0 and 1. Raises ValueError where the lengths differ or there is no example.
    """
    a, b = _finite(scores), _finite(baseline)
    if len(a) != len(b) or not len(a):
        raise ValueError(f"a paired difference needs the same examples twice, got {len(a)} and {len(b)}")
    differences = a - b
    return float(differences.mean()), bootstrap_ci(differences, bounds=(-1.0, 1.0))


class Share(NamedTuple):
    """A score in per cent of the full cache's, with its interval; None where there is none."""

    point: float | None = None
    ci: Interval | None = None


def share(tasks: Sequence[Pairs], of_ratios: bool = False, log_losses: bool = False) -> Share:
    """Return the mean score over tasks in per cent of the full cache's, with pairs resampled within each task.

    ``tasks`` are pairs [n, 2] of each task: a method's score and the full cache's. The share is the ratio of the two
    means, or with ``of_ratios`` the mean of the tasks' ratios. ``log_losses`` are of one task: their exponentials
    (perplexities) are compared, the full cache's over the method's. There is no share where the full cache that would
    be divided by scores 0.
    """
    if not tasks or not all(map(len, tasks)):
        return Share()
    if log_losses:
        (pairs,) = tasks
        # exp(full loss) / exp(loss)
        interval = stratified_ci([pairs], lambda means: 100 * np.exp(means[0][:, 1] - means[0][:, 0]), None)
        return Share(100 * float(np.exp(pairs[:, 1].mean() - pairs[:, 0].mean())), interval)
    full_means = [float(t[:, 1].mean()) for t in tasks]
    if not (all(full_means) if of_ratios else any(full_means)):
        return Share()

    def percent(means: Sequence[Pairs]) -> NDArray[np.float64]:
        if of_ratios:
            return 100 * np.mean([m[:, 0] / np.maximum(m[:, 1], TINY) for m in means], axis=0)
        method, full = (np.mean([m[:, i] for m in means], axis=0) for i in (0, 1))
        return np.asarray(100 * method / np.maximum(full, TINY))

    # the share of a method that scores 1 everywhere
    most = 100 * float(np.mean([1 / f for f in full_means])) if of_ratios else 100 / float(np.mean(full_means))
    point = float(percent([t.mean(0, keepdims=True) for t in tasks])[0])
    return Share(point, stratified_ci(tasks, percent, most))


def stratified_ci(
    strata: Sequence[NDArray[np.float64]],
    statistic: Callable[[Sequence[NDArray[np.float64]]], NDArray[np.float64]],
    most: float | None,
) -> Interval | None:
    """Return the 95 % interval of a statistic of means [DRAWS, ...], resampled within each stratum.

    Returns None if a stratum has fewer than FEWEST examples. Where every resample gives the same value, the interval is
    what so many equal draws cannot exclude if the statistic lies between 0 and ``most``; None if ``most`` is None.
    """
    if min(map(len, strata)) < FEWEST:
        return None
    means = [_resampled(values, seed) for seed, values in enumerate(strata)]
    low, high = (float(x) for x in np.quantile(statistic(means), [0.025, 0.975]))
    if high - low > 1e-9:  # less is rounding: all resamples are equal
        return low, high
    if most is None:
        return None
    return _constant(min(most, max(0.0, low)), sum(map(len, strata)), (0.0, most))


def mean_over_tasks(tasks: Sequence[Scores], bounds: Bounds = (0.0, 1.0)) -> tuple[float, Interval | None]:
    """Return the mean of the tasks' mean scores, and its 95 % interval, for few examples a task.

    Examples are resampled within each task, and a resample's distance from the task's mean is stretched by
    sqrt(n / (n - 1)), which n examples would understate otherwise (the rescaled bootstrap, Rao and Wu 1988). None below
    FEWEST examples in all, and where a task has one. Scores lie within ``bounds``.
    """
    values = [_finite(scores) for scores in tasks]
    point = float(np.mean([v.mean() for v in values]))
    if sum(map(len, values)) < FEWEST or min(map(len, values)) < 2:
        return point, None
    stretched = [
        v.mean() + (_resampled(v, seed) - v.mean()) * (len(v) / (len(v) - 1)) ** 0.5 for seed, v in enumerate(values)
    ]
    low, high = (float(x) for x in np.quantile(np.mean(stretched, axis=0), [(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
    if high - low <= 1e-9:  # less is rounding: all resamples are equal
        return point, _constant(min(max(point, bounds[0]), bounds[1]), sum(map(len, values)), bounds)
    return point, (max(low, bounds[0]), min(high, bounds[1]))


def at_floor(full: Scores, chance: float = 0.0) -> bool:
    """Tell whether the full cache's scores are less than FLOOR above ``chance``, or their interval reaches it."""
    values = _finite(full)
    if not len(values):
        return False
    interval = bootstrap_ci(values) if len(values) >= FEWEST else None
    return bool(values.mean() < chance + FLOOR or (interval is not None and interval[0] <= chance))


def p_above(differences: Scores, least: float = 0.0) -> float:
    """Return the p-value of the null hypothesis: the mean of independent ``differences`` in [-1, 1] is <= ``least``.

    A bettor against the null stakes the same part of his wealth on each difference x, which is multiplied by
    ``1 + stake * (x - least)``. Under the null the expected product is at most 1, whatever the distributions of the
    differences are: by the inequality of the arithmetic and the geometric mean it is at most the n-th power of the mean
    factor. The same holds for a mean over stakes, and by Markov's inequality 1 / wealth is a p-value (betting:
    Waudby-Smith and Ramdas, arXiv 2010.09686, section 4).
    """
    values = _finite(differences)
    if np.abs(values).max(initial=0.0) > 1 or not -1 < least < 1:
        raise ValueError(f"p_above: differences must lie within [-1, 1] and least {least} between them")
    stakes = STAKES / (1 + least)  # the highest stake loses all its wealth on a difference of -1
    with np.errstate(divide="ignore"):
        logs = np.log1p(np.maximum(stakes[:, None] * (values - least), -1.0)).sum(1)
    wealth = float(np.average(np.exp(np.minimum(logs, 700.0)), weights=WEIGHTS))  # exp(710) would overflow
    return 1.0 if wealth <= 1 else 1 / wealth


def betting_ci(differences: Scores) -> Interval:
    """Return the interval of the mean of independent ``differences`` in [-1, 1] that ``p_above`` does not reject."""
    values = _finite(differences)

    def lowest(xs: NDArray[np.float64]) -> float:
        low, high = -1.0, float(xs.mean())
        for _ in range(30):  # to 2 / 2^30
            middle = (low + high) / 2
            rejected = -1 < middle < 1 and p_above(xs, middle) < (1 - LEVEL) / 2
            low, high = (middle, high) if rejected else (low, middle)
        return low

    return lowest(values), -lowest(-values)


def holm(ps: Mapping[str, float], family: int) -> dict[str, float]:
    """Return {key: p-value} corrected by Holm's step-down for ``family`` tests.

    Tests of the family that are not in ``ps`` count as having larger p-values.
    """
    corrected: dict[str, float] = {}
    largest = 0.0
    for rank, i in enumerate(sorted(ps, key=lambda i: ps[i])):
        # the p-value of rank r is multiplied by family - r; none falls below an earlier one
        largest = max(largest, min(1.0, (family - rank) * ps[i]))
        corrected[i] = largest
    return corrected


def by_example(ways: Mapping[str, Sequence[Sequence[float]]], width: int) -> NDArray[np.float64]:
    """Return scores [examples, width], each the mean over the ways in which one example was asked."""
    means = [np.mean(scores, axis=0) for scores in ways.values()]
    return np.array(means, dtype=np.float64).reshape(-1, width)


def _resampled(values: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """Return means [DRAWS, ...] of n examples each, drawn from ``values`` [n, ...] with replacement."""
    n = len(values)
    if DRAWS * n <= _CACHED:
        return _counts(n, seed) @ values / n
    return np.concatenate([values[rows].mean(1) for rows in _draws(n, seed, max(1, _BLOCK // values.size))])


@lru_cache(16)
def _counts(n: int, seed: int) -> NDArray[np.float64]:
    """Return how often [DRAWS, n] each of n examples is drawn: tables ask for the same n again and again."""
    (rows,) = _draws(n, seed, DRAWS)
    flat = (rows + n * np.arange(DRAWS)[:, None]).ravel()
    return np.bincount(flat, minlength=DRAWS * n).reshape(DRAWS, n).astype(np.float64)


def _draws(n: int, seed: int, most: int) -> Iterator[NDArray[np.int64]]:
    """Yield the examples [resamples, n] of all DRAWS resamples, at most ``most`` at a time; ``most`` changes none."""
    rng = np.random.default_rng(seed)
    for start in range(0, DRAWS, most):
        yield rng.integers(n, size=(min(most, DRAWS - start), n))


def _constant(value: float, n: int, bounds: Bounds | None) -> Interval | None:
    if bounds is None:
        return None
    if not bounds[0] <= value <= bounds[1]:
        raise ValueError(f"bootstrap: score {value} is outside its bounds {bounds}")
    # q = (alpha / 2)^(1 / n) of all examples have the value, the others lie at a bound
    q = ((1 - LEVEL) / 2) ** (1 / n)
    low, high = (q * value + (1 - q) * bound for bound in bounds)
    return low, high


def _finite(scores: Scores) -> NDArray[np.float64]:
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise ValueError("bootstrap: scores must be a flat list of finite numbers")
    return values
