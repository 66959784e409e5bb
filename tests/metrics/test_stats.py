import random
import statistics
import time

import numpy as np
import pytest

from kvbench.metrics import stats
from kvbench.metrics.stats import bootstrap_ci, holm, p_above, paired_difference, share, stratified_ci


def slow_bootstrap(values: list[float], seed: int, resamples: int = 4000) -> tuple[float, float]:
    rng = random.Random(seed)
    means = sorted(statistics.fmean(rng.choices(values, k=len(values))) for _ in range(resamples))
    return means[int(0.025 * resamples)], means[int(0.975 * resamples) - 1]


@pytest.mark.parametrize("seed", range(3))
def test_interval_equals_a_slow_loop(seed):
    rng = random.Random(seed)
    values = [rng.random() ** 2 for _ in range(40)]
    low, high = bootstrap_ci(values)
    slow_low, slow_high = slow_bootstrap(values, seed + 100)
    width = slow_high - slow_low
    assert abs(low - slow_low) < 0.05 * width
    assert abs(high - slow_high) < 0.05 * width
    assert low < statistics.fmean(values) < high


def test_interval_of_two_values_by_hand():
    # Means of two draws from {0, 1} are 0, 1/2, 1 with probabilities 1/4, 1/2, 1/4.
    assert bootstrap_ci([0.0, 1.0]) == (0.0, 1.0)


def test_the_same_values_have_the_same_interval():
    values = np.random.default_rng(0).random(50)
    assert bootstrap_ci(values) == bootstrap_ci(list(values))


def test_blocks_do_not_show():
    values = np.random.default_rng(0).random(3000)
    low, high = bootstrap_ci(values)  # several blocks
    half = 1.96 * values.std() / np.sqrt(len(values))
    assert low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.1 * half)


def test_fewer_than_two_examples_have_no_interval():
    assert bootstrap_ci([]) is None
    assert bootstrap_ci([0.5]) is None
    assert paired_difference([1.0], [0.25]) == (0.75, None)


def test_equal_scores_do_not_claim_certainty():
    low, high = bootstrap_ci([1.0] * 50)
    assert (low, high) == (pytest.approx(0.025 ** (1 / 50)), 1.0)  # Clopper-Pearson for 50 of 50: 0.929
    assert low == pytest.approx(0.9289, abs=1e-4)
    assert bootstrap_ci([0.0] * 50) == (0.0, pytest.approx(1 - 0.9289, abs=1e-4))
    low, high = bootstrap_ci([0.5, 0.5])
    assert low < 0.1 and high > 0.9
    assert bootstrap_ci([3.0] * 50, bounds=None) is None
    with pytest.raises(ValueError, match="outside its bounds"):
        bootstrap_ci([3.0] * 50)


def test_paired_difference():
    rng = np.random.default_rng(0)
    baseline = rng.random(60)
    noise = rng.normal(scale=0.01, size=60)
    mean, (low, high) = paired_difference(baseline - 0.1 + noise, baseline)
    assert mean == pytest.approx(-0.1 + noise.mean())
    assert low < mean < high < 0
    # Pairing removes the spread between examples, which is thirty times the noise.
    unpaired_low, unpaired_high = bootstrap_ci(baseline)
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
        bootstrap_ci([1.0, float("nan")])


def test_sixteen_tasks_take_seconds():
    scores = np.random.default_rng(0).random((16, 200))
    start = time.process_time()
    for task in scores:
        bootstrap_ci(task)
    assert time.process_time() - start < 10


def test_intervals_resample_within_strata():
    even, odd = np.array([[1.0, 1.0]] * 8), np.array([[0.0, 1.0], [1.0, 1.0]] * 4)
    low, high = stratified_ci([even, odd], lambda m: 100 * np.mean([t[:, 0] for t in m], axis=0), 100)
    draws = np.random.default_rng(5).binomial(8, 0.5, 100_000) / 8
    assert (low, high) == pytest.approx(np.quantile(50 + 50 * draws, [0.025, 0.975]), abs=0.1)
    assert stratified_ci([even, odd[:7]], lambda m: m[0][:, 0], 1) is None
    same = np.ones((10, 2))
    assert stratified_ci([same, same], lambda m: 100 * m[0][:, 0], 100) == pytest.approx(
        [100 * x for x in bootstrap_ci([1.0] * 20)]
    )


def test_a_share_by_hand_and_none_of_nothing():
    half, twice = np.array([[0.2, 0.4]] * 3), np.array([[0.6, 0.3]] * 3)
    assert share([half, twice]).point == pytest.approx(100 * 0.8 / 0.7)
    assert share([half, twice], of_ratios=True).point == pytest.approx(100 * (0.5 + 2) / 2)
    assert share([half]).ci is None  # three examples
    assert share([half, np.zeros((3, 2))], of_ratios=True).point is None
    assert share([half, np.zeros((0, 2))]).point is None and share([]).point is None


def test_a_share_has_one_interval_wherever_it_is_printed():
    """Tables and figures drew 2,000 and 10,000 resamples of the same pairs, and disagreed."""
    pairs = np.random.default_rng(0).random((20, 2))
    one, mean = share([pairs]), share([pairs], of_ratios=True)
    assert one.point == pytest.approx(mean.point) and one.ci == pytest.approx(mean.ci)


def test_p_of_equal_pairs_by_hand():
    # all stakes win 1 + s * 0.01 / 0.99 each time: a mean of powers, of which the highest stake's is 0.99 ** -n
    for n in (40, 400):
        wealth = sum(w * (1 + s * 0.01 / 0.99) ** n for s, w in zip(stats.STAKES, stats.WEIGHTS, strict=True))
        assert p_above(np.zeros(n), -0.01) == pytest.approx(1 / wealth)
    assert p_above(np.zeros(40), -0.01) > 0.99**40 and p_above(np.zeros(800), -0.01) < 0.05
    assert p_above(np.zeros(40)) == p_above([-1.0] * 40) == 1.0
    # nothing is left of the highest stake after one loss, of the others something
    assert p_above([1.0] * 30) < p_above([1.0] * 30 + [-1.0]) < 1e-4


@pytest.mark.parametrize("seed", range(20))
def test_p_does_not_hang_on_a_seed_or_an_order(seed):
    values = np.random.default_rng(3).uniform(-0.2, 0.4, 60)
    assert p_above(np.random.default_rng(seed).permutation(values)) == pytest.approx(p_above(values), rel=1e-9)


@pytest.mark.parametrize("lost", [0.01, 0.1, 0.5])
def test_a_true_null_is_seldom_rejected_even_over_unequal_strata(lost):
    """Half of the pairs come from a task that gains, half from one that loses as much: a mean of exactly the null."""
    rng = np.random.default_rng(1)
    wrong = 0
    for _ in range(400):
        gains = np.where(rng.random(40) < lost, 1.0, 0.0)
        losses = np.where(rng.random(40) < lost, -1.0, 0.0)
        wrong += p_above(np.concatenate([gains, losses])) < 0.05
    assert wrong / 400 <= 0.05


def test_p_refuses_what_it_has_no_bound_for():
    with pytest.raises(ValueError, match="within"):
        p_above([1.5])


def test_holm_by_hand():
    # 3 * 0.01, then max(0.03, 2 * 0.02), then max(0.04, 0.5)
    assert holm({"a": 0.02, "b": 0.01, "c": 0.5}, 3) == {"b": 0.03, "a": 0.04, "c": 0.5}
    assert holm({"a": 0.01}, 4) == {"a": 0.04}


def test_a_share_of_perplexities_is_the_full_caches_over_the_methods():
    losses = np.column_stack([np.linspace(1.0, 3.0, 20), np.linspace(0.9, 2.5, 20)])
    point, (low, high) = share([losses], log_losses=True)
    assert point == pytest.approx(100 * np.exp(1.7 - 2.0))  # a higher loss is less than the full cache's
    resampled = np.random.default_rng(0).choice(losses[:, 1] - losses[:, 0], (20000, 20)).mean(1)
    assert (low, high) == pytest.approx(tuple(100 * np.exp(np.quantile(resampled, [0.025, 0.975]))), abs=0.5)


def test_a_mean_over_tasks_is_stretched_by_the_root_of_n_over_n_less_1():
    tasks = [[0.0, 1.0, 0.5, 0.25], [0.5, 0.75, 0.25, 1.0]]
    point, (low, high) = stats.mean_over_tasks(tasks)
    assert point == pytest.approx((0.4375 + 0.625) / 2)
    rng = np.random.default_rng(0)
    means = [np.mean(t) + (rng.choice(t, (40000, 4)).mean(1) - np.mean(t)) * (4 / 3) ** 0.5 for t in tasks]
    slow = np.quantile(np.mean(means, axis=0), [0.025, 0.975])
    assert (low, high) == pytest.approx(tuple(slow), abs=0.01)
    assert stats.mean_over_tasks([[0.0, 1.0], [1.0]]) == (0.75, None)


def test_a_full_cache_is_at_the_floor_near_silence_or_guessing():
    assert stats.at_floor([0.02] * 4) and not stats.at_floor([0.5] * 4) and not stats.at_floor([])
    assert stats.at_floor([0.27] * 4, chance=0.25) and not stats.at_floor([0.29] * 4, chance=0.25)
    # one right answer of ten is above the floor, but its interval reaches 0; six of ten are clear of it
    assert stats.at_floor([1.0] + [0.0] * 9) and not stats.at_floor([1.0] * 6 + [0.0] * 4)
    assert stats.at_floor([1.0] * 3 + [0.0] * 7, chance=0.25)


def test_scores_of_an_example_that_was_asked_in_several_ways_are_averaged():
    ways = {"a": [[1.0, 0.0], [0.0, 0.0]], "b": [[0.5, 0.25]]}
    assert stats.by_example(ways, 2).tolist() == [[0.5, 0.0], [0.5, 0.25]]


def test_a_betting_interval_is_what_the_test_does_not_reject_at_either_end():
    values = np.random.default_rng(0).uniform(-0.4, 0.8, 60)
    low, high = stats.betting_ci(values)
    assert low < values.mean() < high
    for ends, inside, outside in ((values, low + 1e-6, low - 1e-6), (-values, -high + 1e-6, -high - 1e-6)):
        assert p_above(ends, outside) < 0.025 <= p_above(ends, inside)


def test_equal_shares_lie_between_nothing_and_what_full_marks_would_be():
    tasks = [np.tile([0.2, 0.5], (8, 1)), np.tile([0.1, 0.25], (8, 1))]
    q = 0.025 ** (1 / 16)
    for of_ratios, most in ((True, 100 * (1 / 0.5 + 1 / 0.25) / 2), (False, 100 / 0.375)):
        point, (low, high) = share(tasks, of_ratios=of_ratios)
        assert point == pytest.approx(40)
        assert (low, high) == (pytest.approx(40 * q), pytest.approx(40 * q + (1 - q) * most))
