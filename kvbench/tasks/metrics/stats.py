"""Intervals of means, of differences and of shares of the full cache; p-values of mean differences.

Every interval has the confidence LEVEL, 95 %. None is drawn at random: the same values always give the same interval.
``scripts/coverage.py`` simulates how often each kind covers the true value. Its table is
``results/benchmarks/coverage.txt``.

A score lies within bounds, and most scores lie at one of them: 0 or 1. A t interval around the mean of a few such
scores is too short and too symmetric. Wilson's interval of a proportion asks instead which means ``m`` the data do not
exclude, with the variance that a proportion has at ``m``. It is used here for any bounded score. The variance is then
multiplied by the part of it that the scores were seen to have (``_solve_bounded_interval``).

Equal values show no spread. The interval is then the range that n equal draws cannot exclude: with 95 % confidence at
least ``q = (alpha/2)**(1/n)`` of all examples give that value, and the others may lie anywhere within ``bounds``. For
scores that are all 0 or all 1 this is the exact (Clopper-Pearson) interval.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

from kvbench.base.numbers import ceil_div

Scores = Sequence[float] | NDArray[np.float64]
Bounds = tuple[float, float]
"""(least, largest) value that a score can have."""
Interval = tuple[float, float]
"""(low, high) end of a confidence interval."""
Pairs = NDArray[np.float64]
"""[n, 2]: for each example, a method's score and the full cache's."""

LEVEL = 0.95
"""The confidence of every interval."""
FEWEST = 8
"""The fewest examples for which an interval is shown."""
FLOOR = 0.03
"""The least difference, on the scale from 0 to 1, between the mean score of the full cache and that of empty or guessed
answers. If the difference is smaller, no share of the full cache's score is shown."""
ROUNDING = 1e-9
"""Differences of means below this are rounding."""
FLIPS = 20_000
"""The number of random sets of signs that ``p_above`` draws. Its least p-value is 1 / (FLIPS + 1)."""
_BLOCK = 2**22
"""The number of signs drawn at a time. It bounds the memory of a test to some 50 MB for any number of pairs."""


def mean_interval(scores: Scores, bounds: Bounds | None = (0.0, 1.0)) -> Interval | None:
    """Return the interval (low, high) of the mean score; None for fewer than two scores, since they show no spread.

    ``bounds`` is the range of a score. Values without a range, such as log losses, have None and get the t interval.
    The caller leaves out examples that cannot be scored. Raises ValueError for scores that are not finite or outside
    their bounds.
    """
    values = _check_finite(scores)
    if len(values) < 2:
        return None
    return _compute_interval_of_means([values], bounds)


def mean_over_tasks(tasks: Sequence[Scores], bounds: Bounds | None = (0.0, 1.0)) -> tuple[float, Interval | None]:
    """Return (the mean of the tasks' mean scores, its interval from the spread within each task).

    tasks: the scores of each task, at least one task with at least one score each.

    The variances of the tasks' means are added up, with the degrees of freedom of all tasks together. There is no
    interval below FEWEST examples in all, nor if a task has only one.
    """
    values = [_check_finite(scores) for scores in tasks]
    point = float(np.mean([task_values.mean() for task_values in values]))
    if not _has_enough_examples(values):
        return point, None
    return point, _compute_interval_of_means(values, bounds)


def mean_over_parts(parts: Sequence[Sequence[Scores]]) -> tuple[float, Interval | None]:
    """Return (the mean over parts of the means over their tasks, its t interval). Each part counts alike.

    parts: for each part, the scores of each of its tasks.

    The variances of the tasks' means are added up with the squares of their weights. There is no interval below FEWEST
    examples in all, if a task has only one, or if all scores within each task are equal.
    """
    tasks_by_part = []
    all_tasks: list[NDArray[np.float64]] = []
    part_means = []
    for part in parts:
        tasks = [_check_finite(scores) for scores in part]
        tasks_by_part.append(tasks)
        all_tasks += tasks
        part_means.append(np.mean([values.mean() for values in tasks]))
    point = float(np.mean(part_means))
    if not _has_enough_examples(all_tasks):
        return point, None
    # the point is the sum over tasks of weight * mean, so its variance is the sum of weight^2 * variance of the mean
    variance = 0.0
    for tasks in tasks_by_part:
        # each part counts alike, and within a part each task
        weight = 1 / (len(tasks_by_part) * len(tasks))
        variance += weight**2 * sum(_estimate_variance_of_mean(values) for values in tasks)
    if variance <= ROUNDING**2:
        return point, None
    half = _t_quantile(_count_degrees_of_freedom(all_tasks)) * variance**0.5
    return point, (point - half, point + half)


def paired_difference(scores: Scores, baseline: Scores) -> tuple[float, Interval | None]:
    """Return (mean of ``scores - baseline`` over the same examples in the same order, its interval or None).

    Scores lie between 0 and 1. Raises ValueError if the lengths differ or there is no example.
    """
    values, baseline_values = _check_finite(scores), _check_finite(baseline)
    n, n_baseline = len(values), len(baseline_values)
    if n != n_baseline or not n:
        raise ValueError(f"a paired difference needs the same examples twice, got {n} and {n_baseline}")
    differences = values - baseline_values
    # both scores lie in [0, 1], hence their difference in [-1, 1]
    return float(differences.mean()), mean_interval(differences, bounds=(-1.0, 1.0))


def ratio_interval(sums: NDArray[np.float64]) -> Interval | None:
    """Return the interval of ``sum(y) / sum(x)`` over independent ``sums`` [n, 2] of (y, x), all positive.

    It is a t interval of the ratio's logarithm, turned back by the exponential. The logarithm makes skewed values, such
    as the divergences of prompts, more symmetric. The jackknife gives its standard error. The degrees of freedom are
    half of n - 1, since the standard error of skewed values is itself uncertain.

    Returns None below FEWEST rows, if a sum without one row is 0, and if no row changes the ratio.
    """
    n = len(sums)
    if n < FEWEST:
        return None
    totals = sums.sum(0)
    # row i holds the sums (y, x) over all rows except row i
    without_one = totals - sums
    # 0 has no logarithm
    if (without_one <= 0).any():
        return None
    log_ratios = np.log(without_one[:, 0]) - np.log(without_one[:, 1])
    error = _compute_jackknife_error(log_ratios)
    if error < ROUNDING:
        return None  # no row changes the ratio, so no spread is seen
    # exp(log r -+ t * error) = r * exp(-+ t * error)
    half = _t_quantile((n - 1) / 2) * error
    y_total, x_total = totals
    ratio = float(y_total / x_total)
    return ratio * float(np.exp(-half)), ratio * float(np.exp(half))


def pooled_interval(sums: NDArray[np.float64], bounds: Bounds | None) -> Interval | None:
    """Return the interval of ``r = sum(y) / sum(x)`` over independent ``sums`` [n, 2] of (y, x), x being above 0.

    bounds: the range of r; None if it has no range.

    Each row counts as ``r + (y - r x) / mean x``. The mean of these values is r, and their spread is that of r (the
    delta method). Returns None below FEWEST rows.
    """
    if len(sums) < FEWEST:
        return None
    y, x = sums[:, 0], sums[:, 1]
    ratio = float(y.sum() / x.sum())
    return _compute_interval_of_means([_linearise_ratio(sums, ratio)], bounds)


def jackknife_interval(
    values: NDArray[np.float64], statistic: Callable[[NDArray[np.float64]], float]
) -> Interval | None:
    """Return the t interval of a smooth statistic of the means of ``values`` [n, k]; None below FEWEST rows.

    statistic: the function from the means [k] to the statistic. Its standard error is the jackknife's.
    """
    n = len(values)
    if n < FEWEST:
        return None
    total = values.sum(0)
    # entry i is the statistic of the means over all rows except row i
    without_one = np.array([statistic((total - row) / (n - 1)) for row in values])
    half = _t_quantile(n - 1) * _compute_jackknife_error(without_one)
    point = statistic(values.mean(0))
    return point - half, point + half


class Share(NamedTuple):
    """A score in per cent of the full cache's score, with its interval.

    point: the share; None if it is not known.
    ci: the interval of the share; None if it is not known.
    """

    point: float | None = None
    ci: Interval | None = None


def share_of_full(tasks: Sequence[Pairs], of_ratios: bool = False, log_losses: bool = False) -> Share:
    """Return the mean score over tasks in per cent of the full cache's mean score.

    tasks: the pairs of each task.
    of_ratios: True for the mean of the tasks' ratios, False for the ratio of the two means over tasks.
    log_losses: True if the pairs are log losses of a single task. The share is then the full cache's perplexity over
    the method's perplexity.

    The interval is over pairs within each task. It needs FEWEST examples in all, and two in each task. There is no
    share if it would divide by a full cache's score of 0.
    """
    if not tasks or not all(map(len, tasks)):
        return Share()
    enough_examples = _has_enough_examples(tasks)
    if log_losses:
        (pairs,) = tasks
        return _compute_perplexity_share(pairs, enough_examples)
    # [tasks]
    method_means = np.array([pairs[:, 0].mean() for pairs in tasks])
    full_means = np.array([pairs[:, 1].mean() for pairs in tasks])
    # ``most``, the upper bound of the interval, is the share of a method that scores 1 everywhere
    if of_ratios:
        # mean over tasks of (method's mean / full cache's mean), so no task may have a full cache's score of 0
        if not full_means.all():
            return Share()
        point = float(np.mean(method_means / full_means))
        most = float(np.mean(1 / full_means))
    else:
        # (method's mean over tasks) / (full cache's mean over tasks), so some task must have a score above 0
        if not full_means.any():
            return Share()
        point = float(method_means.mean() / full_means.mean())
        most = 1 / float(full_means.mean())
    interval = _compute_share_interval(tasks, point, most, of_ratios) if enough_examples else None
    return Share(100 * point, in_percent(interval))


def _compute_perplexity_share(log_losses: Pairs, with_interval: bool) -> Share:
    """Return the full cache's perplexity in per cent of the method's perplexity, with its interval if that is wanted.

    log_losses: the pairs [n, 2] of a method's log loss and the full cache's.
    with_interval: False if there are too few pairs for an interval.
    """
    # a perplexity is exp(mean loss): exp(mean full loss) / exp(mean loss) = exp(mean (full loss - loss))
    gains = log_losses[:, 1] - log_losses[:, 0]
    share = 100 * float(np.exp(gains.mean()))
    interval = mean_interval(gains, bounds=None) if with_interval else None
    if interval is None:
        return Share(share)
    low, high = interval
    return Share(share, in_percent((float(np.exp(low)), float(np.exp(high)))))


def ratio_of_means(tasks: Sequence[Pairs]) -> Share:
    """Return the mean of y over tasks in per cent of the mean of x, with its interval.

    tasks: the pairs (y, x) [n, 2] of each task. Their values may be negative.

    The interval is Fieller's over pairs within each task. Pairs in which y is always the same share of x have the
    range that n equal draws cannot exclude, between 0 and twice that share.

    There is no share if the mean of x is 0. There is no interval below FEWEST examples in all, or if a task has only
    one. Nor is there one if the mean of x is not told apart from 0.
    """
    mean_y = float(np.mean([pairs[:, 0].mean() for pairs in tasks]))
    mean_x = float(np.mean([pairs[:, 1].mean() for pairs in tasks]))
    if not mean_x:
        return Share()
    point = mean_y / mean_x
    if not _has_enough_examples(tasks):
        return Share(100 * point)
    if _estimate_residual_variance(tasks, point) > ROUNDING**2:
        return Share(100 * point, in_percent(_solve_fieller_interval(tasks)))
    # y is the same share of x in every pair; a share of 0 would leave no room between the bounds
    if not point:
        return Share(100 * point)
    n = sum(map(len, tasks))
    return Share(100 * point, in_percent(_compute_constant_interval(point, n, bounds=(0.0, 2 * point))))


def in_percent(interval: Interval | None) -> Interval | None:
    """Return an interval of shares in per cent; None for None."""
    return scaled(interval, 100)


def scaled(interval: Interval | None, scale: float) -> Interval | None:
    """Return an interval with both ends multiplied by ``scale``; None for None."""
    if interval is None:
        return None
    low, high = interval
    return scale * low, scale * high


def at_floor(full: Scores, chance: float = 0.0) -> bool:
    """Return True if the full cache's scores are less than FLOOR above ``chance``, or their interval reaches it.

    chance: the mean score of empty or guessed answers.
    """
    values = _check_finite(full)
    if not len(values):
        return False
    if values.mean() < chance + FLOOR:
        return True
    if len(values) < FEWEST:
        return False
    # use the t interval: one with bounds never reaches the bound itself, so one right answer of ten would count as
    # above an empty answer's score
    interval = mean_interval(values, bounds=None)
    if interval is None:
        return False
    low, _ = interval
    return low <= chance


def p_above(differences: Scores, least: float = 0.0) -> float:
    """Return the p-value of the null hypothesis that the mean of ``differences`` is at most ``least``.

    differences: independent values in [-1, 1], such as the differences of two methods' scores.

    This is a permutation test of pairs (Fisher 1935). Each value minus ``least`` has a sign. If the mean is ``least``,
    both signs are equally likely for every value, and so are all sets of signs. FLIPS sets are drawn at random. The
    p-value is the share of sets whose sum reaches the observed sum, the observed set included.

    A ``least`` below 0 asks whether no more than that is lost. Losses may be rare and whole, and pairs in which nothing
    is lost do not exclude them. One additional pair is therefore counted as a loss of everything, -1. With it 100 equal
    pairs exclude a loss of one in a hundred no better than the rule of three does.

    Raises ValueError for values outside these bounds.
    """
    values = _check_finite(differences)
    # ``initial`` stands for the maximum of no values
    if np.abs(values).max(initial=0.0) > 1 or not -1 < least < 1:
        raise ValueError(f"p_above: differences must lie within [-1, 1] and least {least} between them")
    if least < 0:
        # the additional pair, in which everything is lost
        values = np.append(values, -1.0)
    values = values - least
    values = values[np.abs(values) > 0]  # drop zeros: the sign of 0 changes nothing
    if not len(values):
        return 1.0
    observed = values.sum()
    # flipping the signs of a subset of the values takes twice the subset's sum from the sum of all
    flipped = observed - 2 * _draw_subset_sums(values)
    reached = np.count_nonzero(flipped >= observed - ROUNDING)
    # the observed set of signs counts as one more draw
    return float((1 + reached) / (1 + FLIPS))


def _draw_subset_sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sums [FLIPS] of random subsets of ``values`` [n]. Each value is in a subset with probability 1/2."""
    n = len(values)
    subsets_at_a_time = max(1, _BLOCK // n)
    # always the same seed, so that a p-value is a function of the values
    rng = np.random.default_rng(0)
    sums = []
    for start in range(0, FLIPS, subsets_at_a_time):
        count = min(subsets_at_a_time, FLIPS - start)
        # a row of random bits for each subset: bit i says whether value i is in it; rows are whole bytes
        row_bytes = ceil_div(n, 8)
        random_bytes = np.frombuffer(rng.bytes(count * row_bytes), np.uint8)
        bits = np.unpackbits(random_bytes.reshape(count, row_bytes), axis=1)
        sums.append(bits[:, :n].astype(np.float64) @ values)
    return np.concatenate(sums)


def holm(ps: Mapping[str, float], family: int) -> dict[str, float]:
    """Return {key: p-value} corrected by Holm's step-down for ``family`` tests.

    ps: the p-values to correct, by the key of the test.
    family: the number of tests, at least ``len(ps)``. Tests that are not in ``ps`` count as having larger p-values.
    """
    corrected: dict[str, float] = {}
    largest = 0.0
    for rank, key in enumerate(sorted(ps, key=lambda key: ps[key])):
        # the p-value of rank r, counted from 0, is multiplied by family - r, and never falls below an earlier one
        largest = max(largest, min(1.0, (family - rank) * ps[key]))
        corrected[key] = largest
    return corrected


def normal_quantile(p: float) -> float:
    """Return the quantile of the standard normal distribution at probability ``p``."""
    return float(special.ndtri(p))


def average_by_example(rows_by_example: Mapping[str, Sequence[Sequence[float]]], width: int) -> NDArray[np.float64]:
    """Return the mean scores [examples, width] of each example over its prompts.

    rows_by_example: for each example, a row of ``width`` scores for each prompt that asked it.
    """
    # several prompts of one example are not independent, so they count as one row of an interval
    means = [np.mean(rows, axis=0) for rows in rows_by_example.values()]
    # reshaped for the case of no examples: an empty list would become an array without columns
    return np.array(means, dtype=np.float64).reshape(-1, width)


def _has_enough_examples(tasks: Sequence[NDArray[np.float64]]) -> bool:
    """Return True if the examples suffice for an interval: FEWEST in all tasks together, and two in each task."""
    return sum(map(len, tasks)) >= FEWEST and min(map(len, tasks)) >= 2


def _estimate_variance_of_mean(values: NDArray[np.float64]) -> float:
    """Return the estimated variance of the mean of independent ``values`` [n]: s^2 / n."""
    return float(values.var(ddof=1)) / len(values)


def _compute_jackknife_error(without_one: NDArray[np.float64]) -> float:
    """Return the jackknife's standard error of a statistic, ``sqrt((n - 1) / n * sum_i (s_i - mean s)^2)``.

    without_one: [n], the statistic s_i of all examples except example i.
    """
    n = len(without_one)
    return float(np.sqrt((n - 1) / n * ((without_one - without_one.mean()) ** 2).sum()))


def _compute_interval_of_means(tasks: Sequence[NDArray[np.float64]], bounds: Bounds | None) -> Interval | None:
    """Return the interval of the mean of the tasks' means. Without bounds, None if each task's scores are all equal.

    tasks: the scores of each task, at least two each.
    """
    point = float(np.mean([values.mean() for values in tasks]))
    if bounds is not None:
        point = _clip_rounding(point, bounds)
    # the variance of the mean of T independent means is the sum of their variances / T^2
    variance_sum = sum([_estimate_variance_of_mean(values) for values in tasks])
    if variance_sum <= ROUNDING**2:
        return _compute_constant_interval(point, n=sum(map(len, tasks)), bounds=bounds)
    variance = variance_sum / len(tasks) ** 2
    quantile = _t_quantile(_count_degrees_of_freedom(tasks))
    if bounds is None:
        half = quantile * variance**0.5
        return point - half, point + half
    are_right_or_wrong = all(np.isin(values, bounds).all() for values in tasks)
    if are_right_or_wrong:
        # such scores have the variance p (1 - p), which their mean p decides. No variance is estimated, so Wilson's
        # interval has the normal distribution's quantile in place of Student's t
        quantile = normal_quantile((1 + LEVEL) / 2)
        if len(tasks) == 1:
            # Wilson's own variance divides by n instead of n - 1
            n = len(tasks[0])
            variance = variance * ((n - 1) / n)
    return _solve_bounded_interval(point, variance, quantile, bounds)


def _solve_bounded_interval(point: float, variance: float, quantile: float, bounds: Bounds) -> Interval:
    """Return all means m within bounds for which ``(point - m)^2 <= quantile^2 * variance * v(m) / v(point)``.

    ``v(m) = (m - low) * (high - m)`` is the largest variance that a value within bounds with mean m can have. It is
    the variance of right and wrong answers, for which this is Wilson's interval (1927).

    point: the observed mean, between the bounds. On one of them ``v(point)`` is 0, and no mean within bounds is
        excluded. Only the linearised values of a ratio have such a mean and a spread, as when a method scores 1
        everywhere.
    variance: the variance of the observed mean, above 0.
    quantile: the number of standard errors that the interval reaches to each side.
    """
    low, high = bounds
    width = high - low
    # the observed mean p and the unknown mean x, on a scale from 0 to 1
    p = (point - low) / width
    if p in (0, 1):
        return bounds
    # on this scale v(x) = x (1 - x), and the condition is (p - x)^2 <= k x (1 - x)
    k = quantile**2 * variance / width**2 / (p * (1 - p))
    # the roots of (p - x)^2 = k x (1 - x) are the ends of the interval
    middle = (p + k / 2) / (1 + k)
    half = (k * p * (1 - p) + k**2 / 4) ** 0.5 / (1 + k)
    return low + width * (middle - half), low + width * (middle + half)


def _compute_share_interval(tasks: Sequence[Pairs], point: float, most: float, of_ratios: bool) -> Interval | None:
    """Return the interval of a share, 1 being the full cache's score. None if the full cache is not clearly above 0.

    tasks: the pairs (y, x) of each task: a method's scores and the full cache's.
    point: the share itself.
    most: the share of a method that scores 1 everywhere.
    of_ratios: True if the share is the mean of the tasks' ratios, False if it is the ratio of the two means over tasks.

    The interval of a ratio of means is Fieller's: all shares r for which the mean of ``y - r * x`` is not told apart
    from 0. The interval of a mean of ratios spreads each task's ratio as ``pooled_interval`` does.
    """
    bounds = (0.0, most)
    if of_ratios:
        linearised = []
        for pairs in tasks:
            ratio = float(pairs[:, 0].mean() / pairs[:, 1].mean())
            linearised.append(_linearise_ratio(pairs, ratio))
        return _compute_interval_of_means(linearised, bounds)
    if _estimate_residual_variance(tasks, point) <= ROUNDING**2:
        return _compute_constant_interval(_clip_rounding(point, bounds), n=sum(map(len, tasks)), bounds=bounds)
    interval = _solve_fieller_interval(tasks)
    if interval is None:
        return None
    low, high = interval
    # Fieller's interval knows no bounds, and a share of scores is not below 0
    return max(0.0, low), high


def _estimate_residual_variance(tasks: Sequence[Pairs], point: float) -> float:
    """Return the sum over tasks of the variance of the mean of ``y - point * x``, for pairs (y, x).

    It is 0 if y is the same share ``point`` of x in every pair.
    """
    residuals = [pairs[:, 0] - point * pairs[:, 1] for pairs in tasks]
    return sum(_estimate_variance_of_mean(values) for values in residuals)


def _solve_fieller_interval(tasks: Sequence[Pairs]) -> Interval | None:
    """Return Fieller's interval of (mean y over tasks) / (mean x over tasks). None if mean x is not clearly above 0."""
    # the degrees of freedom depend only on the numbers of pairs
    t = _t_quantile(_count_degrees_of_freedom([pairs[:, 0] for pairs in tasks]))
    t_squared = t**2
    # [2, 2]: the covariance matrix of mean y and mean x
    cov = np.sum([np.cov(pairs.T) / len(pairs) for pairs in tasks], axis=0) / len(tasks) ** 2
    cov_yy, cov_xy, cov_xx = cov[0, 0], cov[0, 1], cov[1, 1]
    y = float(np.mean([pairs[:, 0].mean() for pairs in tasks]))
    x = float(np.mean([pairs[:, 1].mean() for pairs in tasks]))
    # the ends r solve (y - r x)^2 = t^2 * (cov_yy - 2 r cov_xy + r^2 cov_xx), or a r^2 - 2 b r + c = 0 with
    a = x * x - t_squared * cov_xx
    b = x * y - t_squared * cov_xy
    c = y * y - t_squared * cov_yy
    discriminant = b * b - a * c
    # a <= 0: an x of 0 is within its interval, and then so is any share
    if a <= 0 or discriminant < 0:
        return None
    root = discriminant**0.5
    return float((b - root) / a), float((b + root) / a)


def _linearise_ratio(sums: NDArray[np.float64], ratio: float) -> NDArray[np.float64]:
    """Return values [n] whose mean is the ``ratio`` of the sums [n, 2] of (y, x), and whose spread is the ratio's."""
    y, x = sums[:, 0], sums[:, 1]
    # the first-order expansion of mean y / mean x
    return ratio + (y - ratio * x) / x.mean()


def _count_degrees_of_freedom(tasks: Sequence[NDArray[np.float64]]) -> int:
    """Return the degrees of freedom of a sum of variances of means: n - 1 of each task, added up.

    The formula of Welch and Satterthwaite gives a few less for unequal tasks, and hardly one if only one task of many
    varies. Intervals of a mean over eleven tasks of two examples would then be half of the scale wide. By simulation,
    they would hold the true value no more often.
    """
    return sum(len(values) - 1 for values in tasks)


def _compute_constant_interval(value: float, n: int, bounds: Bounds | None) -> Interval | None:
    """Return the interval of a mean whose ``n`` draws all have the same ``value``.

    None without bounds, since nothing then limits the values that were not drawn.
    """
    if bounds is None:
        return None
    # Clopper and Pearson's exact bound: if only the share q of all examples had this value, n draws would all have it
    # with probability q^n = alpha / 2. The other 1 - q may lie at either bound
    q = ((1 - LEVEL) / 2) ** (1 / n)
    low, high = bounds
    return q * value + (1 - q) * low, q * value + (1 - q) * high


def _clip_rounding(value: float, bounds: Bounds) -> float:
    """Return ``value``, moved onto a bound that it passes by rounding. Raises ValueError if it lies farther out."""
    low, high = bounds
    if not low - ROUNDING <= value <= high + ROUNDING:
        raise ValueError(f"interval: score {value} is outside its bounds {bounds}")
    return min(max(value, low), high)


@lru_cache(1024)
def _t_quantile(freedom: float) -> float:
    """Return the quantile below which the absolute value of Student's t lies with probability LEVEL."""
    return float(special.stdtrit(freedom, (1 + LEVEL) / 2))


def _check_finite(scores: Scores) -> NDArray[np.float64]:
    """Return scores as an array [n]. Raises ValueError unless they are a flat list of finite numbers."""
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise ValueError("interval: scores must be a flat list of finite numbers")
    return values
