import coverage
import numpy as np
import pytest

from kvbench.tasks.metrics import stats
from kvbench.tasks.metrics.stats import holm, mean_interval, p_above, paired_difference, share_of_full


def test_interval_of_right_and_wrong_answers_is_wilsons():
    """8 of 10 right: Wilson's interval of Newcombe (1998), method 3."""
    low, high = mean_interval([1.0] * 8 + [0.0] * 2)
    assert (low, high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))


def test_interval_without_bounds_is_students_t():
    values = np.array([2.0, 1.0, 4.0, 3.0, 5.0])
    half = 2.7764 * 1.5811 / 5**0.5  # the t quantile of 4 degrees of freedom, and the standard deviation
    assert mean_interval(values, None) == (pytest.approx(3 - half, abs=1e-3), pytest.approx(3 + half, abs=1e-3))


def test_an_interval_holds_all_means_that_bounded_scores_do_not_exclude():
    """A slow search over means, with the variance that a bounded score can have there."""
    values = np.array([0.0, 0.0, 0.1, 0.0, 0.6, 0.0, 0.2, 0.0, 1.0])
    m, n = values.mean(), len(values)
    part = values.var(ddof=1) / (m * (1 - m))  # of the variance that right and wrong answers would have
    grid = np.linspace(1e-6, 1 - 1e-6, 1_000_001)
    held = grid[(m - grid) ** 2 <= 2.306004**2 * part * grid * (1 - grid) / n]
    assert mean_interval(values) == (pytest.approx(held[0], abs=1e-5), pytest.approx(held[-1], abs=1e-5))
    shifted = mean_interval(2 * values - 1, (-1.0, 1.0))
    assert shifted == (pytest.approx(2 * held[0] - 1, abs=1e-5), pytest.approx(2 * held[-1] - 1, abs=1e-5))


def test_fewer_than_two_examples_have_no_interval():
    assert mean_interval([]) is None
    assert mean_interval([0.5]) is None
    assert paired_difference([1.0], [0.25]) == (0.75, None)


def test_equal_scores_do_not_claim_certainty():
    low, high = mean_interval([1.0] * 50)
    assert (low, high) == (pytest.approx(0.025 ** (1 / 50)), 1.0)  # Clopper-Pearson for 50 of 50: 0.929
    assert low == pytest.approx(0.9289, abs=1e-4)
    assert mean_interval([0.0] * 50) == (0.0, pytest.approx(1 - 0.9289, abs=1e-4))
    low, high = mean_interval([0.5, 0.5])
    assert low < 0.1 and high > 0.9
    assert mean_interval([3.0] * 50, bounds=None) is None
    with pytest.raises(ValueError, match="outside its bounds"):
        mean_interval([3.0] * 50)


def test_paired_difference():
    rng = np.random.default_rng(0)
    baseline = rng.random(60)
    noise = rng.normal(scale=0.01, size=60)
    mean, (low, high) = paired_difference(baseline - 0.1 + noise, baseline)
    assert mean == pytest.approx(-0.1 + noise.mean())
    assert low < mean < high < 0
    # Pairing removes the spread between examples, which is thirty times the noise.
    unpaired_low, unpaired_high = mean_interval(baseline)
    assert high - low < 0.2 * (unpaired_high - unpaired_low)


def test_paired_difference_of_equal_scores():
    mean, (low, high) = paired_difference([1.0, 0.0] * 25, [1.0, 0.0] * 25)
    assert mean == 0.0 and low == -high and 0.07 < high < 0.08


def test_bad_input():
    with pytest.raises(ValueError, match="same examples"):
        paired_difference([1.0, 0.0], [1.0])
    with pytest.raises(ValueError, match="same examples"):
        paired_difference([], [])
    with pytest.raises(ValueError, match="finite"):
        mean_interval([1.0, float("nan")])


def test_a_ratio_of_sums_by_a_slow_jackknife():
    rng = np.random.default_rng(0)
    sums = np.column_stack([rng.gamma(1.0, 1.0, 12), rng.integers(20, 60, 12)])
    logs = []
    for i in range(12):
        rest = np.delete(sums, i, axis=0)
        logs.append(np.log(rest[:, 0].sum() / rest[:, 1].sum()))
    deviation = (11 * np.var(logs)) ** 0.5
    point, half = np.log(sums[:, 0].sum() / sums[:, 1].sum()), 2.502 * deviation  # the t quantile of 5.5
    expected = np.exp([point - half, point + half])
    assert stats.ratio_interval(sums) == pytest.approx(tuple(expected), rel=1e-3)
    assert stats.ratio_interval(sums[:7]) is None
    assert stats.ratio_interval(sums * [0, 1]) is None  # nothing diverges


def test_a_pooled_ratio_within_bounds():
    """Equal numbers of tokens: the pooled share is the mean of the texts' shares."""
    same = np.array([9.0, 10.0, 8.0, 10.0, 7.0, 9.0, 10.0, 10.0])
    sums = np.column_stack([same, np.full(8, 10.0)])
    assert stats.pooled_interval(sums, (0.0, 1.0)) == pytest.approx(mean_interval(same / 10))
    perfect = np.full((8, 2), 10.0)
    assert stats.pooled_interval(perfect, (0.0, 1.0)) == pytest.approx(mean_interval([1.0] * 8))
    assert stats.pooled_interval(sums[:7], (0.0, 1.0)) is None


def test_a_share_by_hand_and_none_of_nothing():
    half, twice = np.array([[0.2, 0.4]] * 3), np.array([[0.6, 0.3]] * 3)
    assert share_of_full([half, twice]).point == pytest.approx(100 * 0.8 / 0.7)
    assert share_of_full([half, twice], of_ratios=True).point == pytest.approx(100 * (0.5 + 2) / 2)
    assert share_of_full([half]).ci is None  # three examples
    assert share_of_full([half, np.zeros((3, 2))], of_ratios=True).point is None
    assert share_of_full([half, np.zeros((0, 2))]).point is None and share_of_full([]).point is None


def test_a_share_is_fiellers_set_of_ratios():
    """All r for which the mean of y - r x is not told apart from 0, by a slow search."""
    pairs = np.random.default_rng(0).random((20, 2))
    y, x = pairs.T
    grid = np.linspace(0.2, 3, 28_001)
    held = []
    for r in grid:
        d = y - r * x
        if abs(d.mean()) <= 2.0930 * d.std(ddof=1) / 20**0.5:
            held.append(r)
    assert share_of_full([pairs]).ci == (
        pytest.approx(100 * held[0], abs=0.05),
        pytest.approx(100 * held[-1], abs=0.05),
    )


def test_a_share_of_a_full_cache_that_may_be_nothing_has_no_interval():
    pairs = np.zeros((10, 2))
    pairs[0], pairs[1] = (1.0, 1.0), (1.0, 0.0)
    assert share_of_full([pairs]).point == pytest.approx(200) and share_of_full([pairs]).ci is None


@pytest.mark.parametrize("values", [[0.2, -0.1, 0.4, 0.3], [1.0, 1.0, -0.5, 0.25, 0.125, -1.0], [0.5] * 10])
def test_p_is_the_share_of_all_signs_that_reach_the_sum(values):
    signs = np.array(np.meshgrid(*[[-1, 1]] * len(values))).reshape(len(values), -1)
    exact = float((np.array(values) @ signs >= sum(values) - 1e-9).mean())
    assert p_above(values) == pytest.approx(exact, abs=0.01)
    # no sign has been drawn that was not seen
    assert p_above(values) >= 1 / (stats.FLIPS + 1)


def test_p_of_a_loss_that_must_be_excluded_counts_one_lost_pair_more():
    least = -0.01
    assert p_above(np.zeros(40), least) > 0.4  # 40 pairs of which none is lost: one of a hundred may be
    assert p_above(np.zeros(800), least) < 0.001
    assert p_above(np.zeros(40)) == p_above([-1.0] * 40) == 1.0
    assert p_above([1.0] * 30) < p_above([1.0] * 20 + [-1.0] * 5) < 0.01


def test_p_hardly_hangs_on_the_order():
    values = np.random.default_rng(3).uniform(-0.2, 0.3, 60)
    others = [p_above(np.random.default_rng(seed).permutation(values)) for seed in range(5)]
    assert max(others) - min(others) < 0.01


@pytest.mark.parametrize(
    "row", [r for r in coverage.rows() if "sigma 1.5" not in r.data], ids=lambda r: r.what + r.data
)
def test_coverage_and_errors_in_small(row):
    """The committed table has all sizes and more data sets: results/benchmarks/coverage.txt."""
    found = coverage.per_cent(row, 16, 300)
    if "rejects" in row.what:
        assert found <= 9
    else:
        assert found >= 89


def test_p_refuses_what_it_has_no_bound_for():
    with pytest.raises(ValueError, match="within"):
        p_above([1.5])


def test_holm_by_hand():
    # 3 * 0.01, then max(0.03, 2 * 0.02), then max(0.04, 0.5)
    assert holm({"a": 0.02, "b": 0.01, "c": 0.5}, 3) == {"b": 0.03, "a": 0.04, "c": 0.5}
    assert holm({"a": 0.01}, 4) == {"a": 0.04}


def test_a_share_of_perplexities_is_the_full_caches_over_the_methods():
    losses = np.column_stack([np.linspace(1.0, 3.0, 20), np.linspace(0.9, 2.5, 20)])
    point, (low, high) = share_of_full([losses], log_losses=True)
    assert point == pytest.approx(100 * np.exp(1.7 - 2.0))  # a higher loss is less than the full cache's
    gains = losses[:, 1] - losses[:, 0]
    half = 2.0930 * gains.std(ddof=1) / 20**0.5
    assert (low, high) == pytest.approx((point * np.exp(-half), point * np.exp(half)), rel=1e-3)


def test_a_mean_over_tasks_adds_up_the_variances_of_its_tasks():
    tasks = [[0.0, 1.0, 0.5, 0.25], [0.5, 0.75, 0.25, 1.0]]
    point, (low, high) = stats.mean_over_tasks(tasks)
    assert point == pytest.approx((0.4375 + 0.625) / 2)
    v1, v2 = (np.var(t, ddof=1) / 4 for t in tasks)
    # Wilson's form at the t quantile of 3 + 3 degrees of freedom
    k = 2.4469**2 * (v1 + v2) / 4 / (point * (1 - point))
    half = (k * point * (1 - point) + k**2 / 4) ** 0.5 / (1 + k)
    middle = (point + k / 2) / (1 + k)
    assert (low, high) == pytest.approx((middle - half, middle + half), abs=2e-3)
    assert stats.mean_over_tasks([[0.0, 1.0], [1.0]]) == (0.75, None)


def test_a_full_cache_is_at_the_floor_near_silence_or_guessing():
    assert stats.at_floor([0.02] * 4) and not stats.at_floor([0.5] * 4) and not stats.at_floor([])
    assert stats.at_floor([0.27] * 4, chance=0.25) and not stats.at_floor([0.29] * 4, chance=0.25)
    # one right answer of ten is above the floor, but its interval reaches 0; six of ten are clear of it
    assert stats.at_floor([1.0] + [0.0] * 9) and not stats.at_floor([1.0] * 6 + [0.0] * 4)
    assert stats.at_floor([1.0] * 3 + [0.0] * 7, chance=0.25)


def test_scores_of_an_example_that_was_asked_in_several_ways_are_averaged():
    ways = {"a": [[1.0, 0.0], [0.0, 0.0]], "b": [[0.5, 0.25]]}
    assert stats.average_by_example(ways, 2).tolist() == [[0.5, 0.0], [0.5, 0.25]]


def test_equal_shares_lie_between_nothing_and_what_full_marks_would_be():
    tasks = [np.tile([0.2, 0.5], (8, 1)), np.tile([0.1, 0.25], (8, 1))]
    q = 0.025 ** (1 / 16)
    for of_ratios, most in ((True, 100 * (1 / 0.5 + 1 / 0.25) / 2), (False, 100 / 0.375)):
        point, (low, high) = share_of_full(tasks, of_ratios=of_ratios)
        assert point == pytest.approx(40)
        assert (low, high) == (pytest.approx(40 * q), pytest.approx(40 * q + (1 - q) * most))


def test_a_ratio_on_its_bound_excludes_no_ratio_within_bounds():
    """A method that is always right beside a full cache that is not: the ratio is the highest, and still spreads."""
    full = np.array([1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.5, 1.0])
    right = np.column_stack([np.ones(10), full])
    highest = 100 / full.mean()
    assert share_of_full([right], of_ratios=True) == (pytest.approx(highest), pytest.approx((0, highest)))
    point, interval = share_of_full([right, np.ones((10, 2))], of_ratios=True)
    assert point == pytest.approx((highest + 100) / 2)
    assert interval == pytest.approx((0, point))
    bounds = (0.0, 1 / full.mean())
    assert stats.pooled_interval(right, bounds) == bounds


def test_the_interval_of_a_mean_over_tasks_by_hand():
    tasks = [[1, 1, 0, 0, 1, 0, 1, 0], [1, 0, 0, 0, 1, 0, 0, 0]]
    mean, (low, high) = stats.mean_over_tasks(tasks)
    assert mean == 0.375
    # variance of the mean of two means of 8: (2/7 + 1.5/7) / 8 / 4
    error = ((2 / 7 + 1.5 / 7) / 8 / 4) ** 0.5
    assert (high - low) / 2 == pytest.approx(1.96 * error, rel=0.12)
    assert low < mean < high and (low + high) / 2 > mean  # Wilson's lies nearer to a half


def test_few_examples_a_task_have_the_interval_of_as_many_in_one():
    rng = np.random.default_rng(0)
    truth, inside = 0.5, 0
    for _ in range(200):
        draws = rng.integers(2, size=(11, 2)).astype(float)
        low, high = stats.mean_over_tasks(list(draws))[1]
        inside += low <= truth <= high
    assert inside / 200 >= 0.88


@pytest.mark.parametrize(
    ("tasks", "interval"),
    [([[1.0, 0.0]], False), ([[1.0] * 8, [0.0]], False), ([[1.0] * 4, [1.0] * 4], True), ([[1.0, 0.0] * 4], True)],
)
def test_a_mean_over_tasks_of_too_few_examples_has_no_interval(tasks, interval):
    found = stats.mean_over_tasks(tasks)[1]
    assert (found is not None) == interval
    if found and all(x == 1 for t in tasks for x in t):
        assert found[0] < 1 == found[1]  # eight equal answers do not prove the ninth
