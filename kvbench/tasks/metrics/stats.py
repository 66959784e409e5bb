"""Intervals of means, of differences and of shares of the full cache; p-values of mean differences.

Every interval is of LEVEL, 95 %. None is drawn at random: the same values always give the same interval. How often each
kind covers what it should is simulated by ``scripts/coverage.py``, whose table is ``results/benchmarks/coverage.txt``.

A score lies within bounds, and most scores lie at one of them: 0 or 1. A t interval around the mean of a few such
scores is too short and too symmetric. Wilson's interval of a proportion asks instead which means ``m`` the data do not
exclude, with the variance that a proportion has at ``m``. It is used here for any bounded score, with that variance
times the part of it that the scores were seen to have (``_bounded``).

Where all values are equal no spread is seen. Then the interval says what n equal draws can exclude: with 95 %
confidence at least ``q = (alpha/2)**(1/n)`` of all examples give that value, and the others may lie anywhere within
``bounds``. For scores that are all 0 or all 1 this is the exact (Clopper-Pearson) interval.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

Scores = Sequence[float] | NDArray[np.float64]
Bounds = tuple[float, float]
Interval = tuple[float, float]
Pairs = NDArray[np.float64]
"""[n, 2]: a method's score and the full cache's of each example."""

LEVEL = 0.95
FEWEST = 8
"""The fewest examples of an interval that is shown."""
FLOOR = 0.03
"""The least distance of a full cache's mean score, of 1, to that of silence or guessing: nearer, no share is shown."""
ROUNDING = 1e-9
"""Differences of means below this are rounding."""
FLIPS = 20_000
"""Random signs that ``p_above`` draws for each set of pairs: its least p-value is 1 / (FLIPS + 1)."""
_BLOCK = 2**22
"""Signs drawn at a time: bounds the memory of a test to some 50 MB whatever the number of pairs is."""


def mean_interval(scores: Scores, bounds: Bounds | None = (0.0, 1.0)) -> Interval | None:
    """Return the interval (low, high) of the mean score, or None for fewer than two scores, which have no spread.

    ``bounds`` is the range of a score; None where it has none, as a log loss: then it is the t interval. Raises
    ValueError for scores that are not finite or outside their bounds: leave unscorable examples out before.
    """
    values = _finite(scores)
    if len(values) < 2:
        return None
    return _interval([values], bounds)


def mean_over_tasks(tasks: Sequence[Scores], bounds: Bounds = (0.0, 1.0)) -> tuple[float, Interval | None]:
    """Return the mean of the tasks' mean scores, and its interval from the spread within each task.

    The variances of the tasks' means are added up, with the degrees of freedom of all tasks together. There is no
    interval below FEWEST examples in all, nor where a task has only one.
    """
    values = [_finite(scores) for scores in tasks]
    point = float(np.mean([v.mean() for v in values]))
    if sum(map(len, values)) < FEWEST or min(map(len, values)) < 2:
        return point, None
    return point, _interval(values, bounds)


def paired_difference(scores: Scores, baseline: Scores) -> tuple[float, Interval | None]:
    """Return (mean of ``scores - baseline`` over the same examples in the same order, its interval or None).

    Scores lie between 0 and 1. Raises ValueError where the lengths differ or there is no example.
    """
    a, b = _finite(scores), _finite(baseline)
    if len(a) != len(b) or not len(a):
        raise ValueError(f"a paired difference needs the same examples twice, got {len(a)} and {len(b)}")
    differences = a - b
    return float(differences.mean()), mean_interval(differences, bounds=(-1.0, 1.0))


def ratio_interval(sums: NDArray[np.float64]) -> Interval | None:
    """Return the interval of ``sum(y) / sum(x)`` over independent ``sums`` [n, 2] of (y, x), all positive.

    It is the exponential of a t interval of the logarithm, whose standard error is the jackknife's: divergences of
    prompts are skewed, and a ratio of sums is biased. The degrees of freedom are half of n - 1, since the standard
    error of skewed values is itself uncertain. None below FEWEST rows, and where a sum without one row is 0.
    """
    n = len(sums)
    if n < FEWEST:
        return None
    totals = sums.sum(0)
    without_one = totals - sums
    if (without_one <= 0).any():
        return None
    logs = np.log(without_one[:, 0]) - np.log(without_one[:, 1])
    deviation = _jackknife_error(logs)
    if deviation < ROUNDING:
        return None  # the same ratio everywhere: no spread is seen
    half = _t_quantile((n - 1) / 2) * deviation
    ratio = float(totals[0] / totals[1])
    return ratio * float(np.exp(-half)), ratio * float(np.exp(half))


def pooled_interval(sums: NDArray[np.float64], bounds: Bounds | None) -> Interval | None:
    """Return the interval of ``r = sum(y) / sum(x)`` over independent ``sums`` [n, 2] of (y, x), x being above 0.

    Each row counts as ``r + (y - r x) / mean x``: the mean of these is r, and their spread is that of r (the delta
    method). None below FEWEST rows.
    """
    if len(sums) < FEWEST:
        return None
    return _interval([_linear(sums, float(sums[:, 0].sum() / sums[:, 1].sum()))], bounds)


def jackknife_interval(
    values: NDArray[np.float64], statistic: Callable[[NDArray[np.float64]], float]
) -> Interval | None:
    """Return the t interval of a smooth statistic of the means of ``values`` [n, k]; None below FEWEST rows.

    Its standard error is the jackknife's.
    """
    n = len(values)
    if n < FEWEST:
        return None
    without_one = np.array([statistic((values.sum(0) - row) / (n - 1)) for row in values])
    half = _t_quantile(n - 1) * _jackknife_error(without_one)
    point = statistic(values.mean(0))
    return point - half, point + half


class Share(NamedTuple):
    """A score in per cent of the full cache's, with its interval; None where there is none."""

    point: float | None = None
    ci: Interval | None = None


def share(tasks: Sequence[Pairs], of_ratios: bool = False, log_losses: bool = False) -> Share:
    """Return the mean score over tasks in per cent of the full cache's, with an interval over pairs within each task.

    ``tasks`` are pairs [n, 2] of each task: a method's score and the full cache's. The share is the ratio of the two
    means, or with ``of_ratios`` the mean of the tasks' ratios. ``log_losses`` are of one task: their exponentials
    (perplexities) are compared, the full cache's over the method's. There is no share where the full cache that would
    be divided by scores 0, and no interval below FEWEST examples in all or where a task has only one.
    """
    if not tasks or not all(map(len, tasks)):
        return Share()
    enough = sum(map(len, tasks)) >= FEWEST and min(map(len, tasks)) >= 2
    if log_losses:
        (pairs,) = tasks
        gains = pairs[:, 1] - pairs[:, 0]  # exp(full loss) / exp(loss) = exp(full loss - loss)
        interval = mean_interval(gains, None) if enough else None
        percent = interval and (100 * float(np.exp(interval[0])), 100 * float(np.exp(interval[1])))
        return Share(100 * float(np.exp(gains.mean())), percent)
    method_means, full_means = (np.array([t[:, i].mean() for t in tasks]) for i in (0, 1))
    if not (full_means.all() if of_ratios else full_means.any()):
        return Share()
    if of_ratios:
        point = float(np.mean(method_means / full_means))
        most = float(np.mean(1 / full_means))  # of a method that scores 1 everywhere
    else:
        point = float(method_means.mean() / full_means.mean())
        most = 1 / float(full_means.mean())
    found = _share_interval(tasks, point, most, of_ratios) if enough else None
    return Share(100 * point, found and (100 * found[0], 100 * found[1]))


def at_floor(full: Scores, chance: float = 0.0) -> bool:
    """Tell whether the full cache's scores are less than FLOOR above ``chance``, or their interval reaches it."""
    values = _finite(full)
    if not len(values):
        return False
    if values.mean() < chance + FLOOR:
        return True
    # The t interval: one with bounds never reaches the bound itself, so one right answer of ten would be above silence.
    interval = mean_interval(values, None) if len(values) >= FEWEST else None
    return interval is not None and interval[0] <= chance


def p_above(differences: Scores, least: float = 0.0) -> float:
    """Return the p-value of the null hypothesis: the mean of independent ``differences`` in [-1, 1] is <= ``least``.

    The signs of the differences from ``least`` are flipped at random: if they are as often above as below it, no set
    of signs is more likely than another, and the p-value is the share of sets whose sum reaches the one that was seen,
    itself included (a permutation test of pairs; Fisher 1935).

    ``least`` below 0 asks whether no more than that is lost. Losses may be rare and whole, and pairs in which nothing
    is lost do not exclude them: one pair more is counted as a loss of everything, -1. So 100 equal pairs exclude that
    one of a hundred is lost no better than the rule of three does.
    """
    values = _finite(differences)
    if np.abs(values).max(initial=0.0) > 1 or not -1 < least < 1:
        raise ValueError(f"p_above: differences must lie within [-1, 1] and least {least} between them")
    if least < 0:
        values = np.append(values, -1.0)
    values = values - least
    values = values[np.abs(values) > 0]  # the sign of 0 changes nothing
    if not len(values):
        return 1.0
    # Flipping all signs turns sum(v) into sum(v) - 2 * (the sum of those flipped).
    seen = values.sum()
    flipped = _flipped_sums(values)
    reached = np.count_nonzero(seen - 2 * flipped >= seen - ROUNDING)
    return float((1 + reached) / (1 + FLIPS))


def _flipped_sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return for each of FLIPS random subsets of ``values`` its sum; every value is in it with a chance of a half."""
    n = len(values)
    rows = max(1, _BLOCK // n)
    rng = np.random.default_rng(0)
    sums = []
    for start in range(0, FLIPS, rows):
        drawn = min(rows, FLIPS - start)
        bits = np.unpackbits(np.frombuffer(rng.bytes(drawn * -(-n // 8)), np.uint8).reshape(drawn, -1), axis=1)
        sums.append(bits[:, :n].astype(np.float64) @ values)
    return np.concatenate(sums)


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


def normal_quantile(p: float) -> float:
    """Return the value that a standard normal variable stays below with probability ``p``."""
    return float(special.ndtri(p))


def by_example(ways: Mapping[str, Sequence[Sequence[float]]], width: int) -> NDArray[np.float64]:
    """Return scores [examples, width], each the mean over the ways in which one example was asked."""
    means = [np.mean(scores, axis=0) for scores in ways.values()]
    return np.array(means, dtype=np.float64).reshape(-1, width)


def _jackknife_error(without_one: NDArray[np.float64]) -> float:
    """Return the standard error ``sqrt((n - 1) / n * sum (s_i - mean s)^2)``, where s_i leaves example i out."""
    n = len(without_one)
    return float(np.sqrt((n - 1) / n * ((without_one - without_one.mean()) ** 2).sum()))


def _interval(tasks: Sequence[NDArray[np.float64]], bounds: Bounds | None) -> Interval | None:
    """Return the interval of the mean of the tasks' means; None where no value differs and there are no bounds."""
    point = float(np.mean([v.mean() for v in tasks]))
    if bounds is not None:
        point = _within(point, bounds)
    variances = [float(v.var(ddof=1)) / len(v) for v in tasks]
    total = sum(variances)
    if total <= ROUNDING**2:
        return _constant(point, sum(map(len, tasks)), bounds)
    quantile = _t_quantile(_freedom(tasks))
    variance = total / len(tasks) ** 2
    if bounds is None:
        half = quantile * variance**0.5
        return point - half, point + half
    if all(np.isin(v, bounds).all() for v in tasks):
        # The variance of right and wrong answers follows from their mean: it is not estimated, and Wilson's quantile
        # is that of the normal distribution.
        quantile = normal_quantile((1 + LEVEL) / 2)
        return _bounded(point, variance * _unbiased(tasks), quantile, bounds)
    return _bounded(point, variance, quantile, bounds)


def _unbiased(tasks: Sequence[NDArray[np.float64]]) -> float:
    """Return what turns variances that divide by n - 1 into those that divide by n: of one task Wilson's own."""
    return (len(tasks[0]) - 1) / len(tasks[0]) if len(tasks) == 1 else 1.0


def _bounded(point: float, variance: float, quantile: float, bounds: Bounds) -> Interval:
    """Return all means m within bounds for which ``(point - m)^2 <= quantile^2 * variance * v(m) / v(point)``.

    ``v(m) = (m - low) * (high - m)`` is the most that the variance of a value within bounds can be whose mean is m. For
    right and wrong answers it is their variance, and this is Wilson's interval (1927).
    """
    low, high = bounds
    m = (point - low) / (high - low)
    # k = quantile^2 * the variance of the mean, in parts of the most that one value can have
    k = quantile**2 * variance / (high - low) ** 2 / (m * (1 - m))
    middle = (m + k / 2) / (1 + k)
    half = (k * m * (1 - m) + k**2 / 4) ** 0.5 / (1 + k)
    return low + (high - low) * (middle - half), low + (high - low) * (middle + half)


def _share_interval(tasks: Sequence[Pairs], point: float, most: float, of_ratios: bool) -> Interval | None:
    """Return the interval of a share, 1 being the full cache's; None where the full cache is not clearly above 0.

    Of means it is Fieller's: all shares r for which the mean of ``y - r * x`` is not told apart from 0. Of ratios each
    task's is spread as in ``pooled_interval``.
    """
    if of_ratios:
        return _interval([_linear(t, float(t[:, 0].mean() / t[:, 1].mean())) for t in tasks], (0.0, most))
    residuals = [t[:, 0] - point * t[:, 1] for t in tasks]
    variances = [float(v.var(ddof=1)) / len(v) for v in residuals]
    if sum(variances) <= ROUNDING**2:
        return _constant(_within(point, (0.0, most)), sum(map(len, tasks)), (0.0, most))
    squared = _t_quantile(_freedom(tasks)) ** 2
    # the covariance matrix of the two means
    cov = np.sum([np.cov(t.T) / len(t) for t in tasks], axis=0) / len(tasks) ** 2
    y, x = (float(np.mean([t[:, i].mean() for t in tasks])) for i in (0, 1))
    # (y - r x)^2 = squared * (cov_yy - 2 r cov_xy + r^2 cov_xx), a quadratic equation in r
    a = x * x - squared * cov[1, 1]
    b = x * y - squared * cov[0, 1]
    c = y * y - squared * cov[0, 0]
    root = b * b - a * c
    if a <= 0 or root < 0:
        return None
    return max(0.0, float((b - root**0.5) / a)), float((b + root**0.5) / a)


def _linear(sums: NDArray[np.float64], ratio: float) -> NDArray[np.float64]:
    """Return values [n] whose mean is the ratio of the sums [n, 2] of (y, x), and whose spread is that of the ratio."""
    return ratio + (sums[:, 0] - ratio * sums[:, 1]) / sums[:, 1].mean()


def _freedom(tasks: Sequence[NDArray[np.float64]]) -> int:
    """Return the degrees of freedom of a sum of variances of means: all tasks' together, n - 1 of each.

    Welch's and Satterthwaite's are a few less of unequal tasks, and hardly one where only one task of many varies. Then
    intervals of a mean over eleven tasks of two examples would be half of the scale wide, and hold the true value no
    more often (simulated).
    """
    return sum(len(t) - 1 for t in tasks)


def _constant(value: float, n: int, bounds: Bounds | None) -> Interval | None:
    if bounds is None:
        return None
    # q = (alpha / 2)^(1 / n) of all examples have the value, the others lie at a bound
    q = ((1 - LEVEL) / 2) ** (1 / n)
    low, high = (q * value + (1 - q) * bound for bound in bounds)
    return low, high


def _within(value: float, bounds: Bounds) -> float:
    """Return the value, moved onto a bound that it passes by rounding. Raises ValueError where it is farther out."""
    if not bounds[0] - ROUNDING <= value <= bounds[1] + ROUNDING:
        raise ValueError(f"interval: score {value} is outside its bounds {bounds}")
    return min(max(value, bounds[0]), bounds[1])


@lru_cache(1024)
def _t_quantile(freedom: float) -> float:
    """Return the quantile of Student's t distribution that LEVEL lies below in absolute value."""
    return float(special.stdtrit(freedom, (1 + LEVEL) / 2))


def _finite(scores: Scores) -> NDArray[np.float64]:
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise ValueError("interval: scores must be a flat list of finite numbers")
    return values
