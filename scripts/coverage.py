"""Simulate how often the intervals and tests of ``kvbench.tasks.metrics.stats`` say what they should.

python scripts/coverage.py                  print the table
python scripts/coverage.py --draws 20000    with more data sets for each number (the standard error of 95 % is 0.15)
python scripts/coverage.py --write          write it to results/benchmarks/coverage.txt

Each row is a kind of data whose true value is known. Data sets of n examples are drawn from it, and the table says in
per cent how many intervals hold the true value, or how many tests reject a true null hypothesis.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvbench.report import writers
from kvbench.report.table import Table
from kvbench.tasks.metrics import stats

OUTPUT = Path(__file__).resolve().parent.parent / "results" / "benchmarks" / "coverage.txt"
SIZES = (8, 12, 16, 50, 187)
"""Examples of a data set; of a mean over tasks, of each of its tasks; of clusters, the articles."""
DRAWS = 4_000
TASKS = 4
QUESTIONS = 25
"""Questions that are asked of one article."""
NOTES = (
    "Wanted: 93 to 97 % from n = 12 on and at least 92 % at n = 8; tests at the 5 % level may reject in 5 %. Where "
    "most differences are 0, intervals hold the true value more often and tests reject less often at small n: eight "
    "pairs of which two differ cannot say more.",
    "F1-like: some answers score 0, the others are drawn from Beta(1, 1.5). Right or wrong: the share of right answers "
    "is itself drawn between 5 and 95 %, since the coverage of any interval of a proportion rises and falls with it.",
    "Skewed: divergences are drawn from a log-normal distribution (sigma of the logarithm) or a Gamma distribution "
    "(shape 0.5). Where sigma is above 1 a mean over few prompts hangs on one of them, and no interval that was tried "
    "holds its level. SmolLM2's prompts have a sigma of 0.5 to 2.1, by method: of such methods read the interval of a "
    "mean divergence as too short. Claims do not rest on it but on the difference over the sum, a bounded number for "
    "each prompt.",
    "One of five answers lost: at n = 50 about six pairs differ, all in one direction and by all they had; the "
    "interval of the share is then too short.",
    "Rare losses: one answer of a hundred is lost whole, the others are not changed. The test of no worse with a "
    "margin of one point must not reject, since the mean is at the margin.",
)

Data = NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], Data]
Counted = Callable[[Data], bool]


@dataclass(frozen=True)
class Row:
    """A kind of data, the statistic computed from it, and the outcome that is counted.

    draw: makes one data set of n examples.
    counted: whether its interval holds the true value, or its test rejects.
    """

    what: str
    data: str
    draw: Draw
    counted: Counted


def f1(rng: np.random.Generator, n: int, zeros: float) -> Data:
    """Return scores of answers. A part ``zeros`` of them is wrong, and their mean is 0.4 of the others' part."""
    return np.where(rng.random(n) < zeros, 0.0, rng.beta(1.0, 1.5, n))


def right_or_wrong(rng: np.random.Generator, n: int) -> Data:
    """Return [n + 1]: the true share of right answers, and n answers that are right, 1, or wrong, 0."""
    share = rng.uniform(0.05, 0.95)
    return np.concatenate([[share], (rng.random(n) < share).astype(float)])


def changed(rng: np.random.Generator, n: int, part: float) -> Data:
    """Return differences of F1-like scores with mean 0, where a ``part`` of the answers differs."""
    return np.where(rng.random(n) < part, f1(rng, n, 0.3) - f1(rng, n, 0.3), 0.0)


def flipped(rng: np.random.Generator, n: int, part: float) -> Data:
    """Return differences of right and wrong answers with mean 0, where a ``part`` of the answers differs."""
    return np.where(rng.random(n) < part, rng.choice([-1.0, 1.0], n), 0.0)


def contrast(rng: np.random.Generator, n: int, sigma: float) -> Data:
    """Return (y - x) / (y + x) of two divergences of each prompt that have the same distribution."""
    base = rng.normal(0, sigma, n)
    x, y = (np.exp(base + rng.normal(0, 0.5, n)) for _ in range(2))
    return (y - x) / (y + x)


def articles(rng: np.random.Generator, n: int) -> Data:
    """Return the mean score of each of n articles: QUESTIONS answers that are right more often on some articles."""
    difficulty = rng.beta(2.0, 3.0, n)  # the mean is 0.4
    return rng.binomial(QUESTIONS, difficulty) / QUESTIONS


def ratio_pairs(rng: np.random.Generator, n: int, values: Data) -> Data:
    """Return [n, 2]: sums of a text and its number of tokens, 20 to 60."""
    tokens = rng.integers(20, 60, n).astype(float)
    return np.column_stack([values * tokens, tokens])


def shared(rng: np.random.Generator, n: int, lost: bool) -> Data:
    """Return [n, 2]: scores of a method beside the full cache's.

    With ``lost``, one answer of five scores 0 and no other changes, a share of 80 %. Otherwise two of five are other
    answers with half the mean: also 80 %.
    """
    full = f1(rng, n, 0.4)
    if lost:
        return np.column_stack([np.where(rng.random(n) < 0.8, full, 0.0), full])
    return np.column_stack([np.where(rng.random(n) < 0.6, full, f1(rng, n, 0.7)), full])


def alike(rng: np.random.Generator, n: int) -> Data:
    """Return [n, 2]: two methods' divergences of each prompt, with one distribution and alike on a prompt."""
    return np.exp(rng.normal(0, 1, n)[:, None] + rng.normal(0, 0.5, (n, 2)))


def log_normal(rng: np.random.Generator, n: int, sigma: float) -> Data:
    """Return [n, 2]: the divergence of each text, log-normal with the median 1, added up over its tokens."""
    return ratio_pairs(rng, n, np.exp(rng.normal(0, sigma, n)))


def gamma(rng: np.random.Generator, n: int) -> Data:
    """Return [n, 2]: the divergence of each text, of a Gamma distribution with shape 0.5, added up over its tokens."""
    return ratio_pairs(rng, n, rng.gamma(0.5, 1.0, n))


def four_tasks(rng: np.random.Generator, n: int) -> Data:
    """Return [TASKS, n]: F1-like scores of tasks that are easier or harder, of mean 0.2 in all."""
    return np.stack([f1(rng, n, zeros) for zeros in np.linspace(0.2, 0.8, TASKS)])


def tasks_of_two(rng: np.random.Generator, n: int) -> Data:
    """Return [n, 2]: two F1-like scores of each of n tasks that are easier or harder, of mean 0.2 in all."""
    return np.stack([f1(rng, 2, zeros) for zeros in np.linspace(0.05, 0.95, n)])


def rare_losses(rng: np.random.Generator, n: int) -> Data:
    """Return differences: one of a hundred is a whole answer lost, the others are 0."""
    return -(rng.random(n) < 0.01).astype(float)


def holds(interval: stats.Interval | None, truth: float) -> bool:
    """Tell whether an interval holds a value. None holds everything."""
    return interval is None or interval[0] - stats.ROUNDING <= truth <= interval[1] + stats.ROUNDING


def mean_holds(x: Data, truth: float, bounds: stats.Bounds = (0.0, 1.0)) -> bool:
    """Tell whether the interval of a mean holds its true value."""
    return holds(stats.mean_interval(x, bounds), truth)


def share_holds(x: Data) -> bool:
    """Tell whether the interval of a share holds 80 %."""
    return holds(stats.share_of_full([x]).ci, 80.0)


def ratio_holds(x: Data, truth: float) -> bool:
    """Tell whether the interval of a ratio of sums holds its true value."""
    return holds(stats.ratio_interval(x), truth)


def proportion_holds(x: Data) -> bool:
    """Tell whether the interval of a share of right answers holds the true one, which stands first."""
    return mean_holds(x[1:], float(x[0]))


def mean_over_tasks_holds(x: Data) -> bool:
    """Tell whether the interval of a mean over tasks holds 0.2."""
    return holds(stats.mean_over_tasks(list(x))[1], 0.2)


def rejects(x: Data, least: float = 0.0) -> bool:
    """Tell whether the test of means above ``least`` rejects at 5 %."""
    return stats.p_above(x, least) < 0.05


def rows() -> Iterator[Row]:
    """Yield all rows of the table."""
    mean, difference = "interval of a mean", "of a paired difference"
    around_0 = partial(mean_holds, truth=0.0, bounds=(-1.0, 1.0))
    for zeros in (0.0, 0.5, 0.8):
        data = f"F1-like, {zeros:.0%} of answers 0"
        yield Row(mean, data, partial(f1, zeros=zeros), partial(mean_holds, truth=0.4 * (1 - zeros)))
    yield Row(mean, "right or wrong", right_or_wrong, proportion_holds)
    yield Row(mean, f"articles with {QUESTIONS} questions", articles, partial(mean_holds, truth=0.4))
    yield Row(f"of a mean over {TASKS} tasks", "F1-like, 20 to 80 % of answers 0", four_tasks, mean_over_tasks_holds)
    yield Row("of a mean over n tasks", "two examples each, F1-like", tasks_of_two, mean_over_tasks_holds)
    for lost, data in ((False, "F1-like, two of five answers differ"), (True, "F1-like, one of five answers lost")):
        yield Row("of a share of the full cache", data, partial(shared, lost=lost), share_holds)
    for part in (0.2, 0.5, 1.0):
        yield Row(difference, f"F1-like, {part:.0%} of answers differ", partial(changed, part=part), around_0)
    for part in (0.2, 0.5):
        yield Row(difference, f"right or wrong, {part:.0%} differ", partial(flipped, part=part), around_0)
    for sigma in (0.5, 1.0, 1.5):
        truth = float(np.exp(sigma**2 / 2))
        data = f"skewed, log-normal, sigma {sigma}"
        yield Row("of a mean divergence", data, partial(log_normal, sigma=sigma), partial(ratio_holds, truth=truth))
    yield Row("of a mean divergence", "skewed, Gamma of shape 0.5", gamma, partial(ratio_holds, truth=0.5))
    data = "log-normal, sigma 1, alike on a prompt"
    yield Row("of the ratio of two divergences", data, alike, partial(ratio_holds, truth=1.0))
    gain = "test of a gain, 5 %: rejects"
    for part in (0.2, 0.5, 1.0):
        yield Row(gain, f"F1-like, {part:.0%} of answers differ", partial(changed, part=part), rejects)
    yield Row(gain, "right or wrong, 50% differ", partial(flipped, part=0.5), rejects)
    yield Row(gain, "contrast of two divergences", partial(contrast, sigma=1.0), rejects)
    yield Row("test of no worse, 5 %: rejects", "rare losses", rare_losses, partial(rejects, least=-0.01))


def per_cent(row: Row, n: int, draws: int) -> float:
    """Return in how many of ``draws`` data sets of n examples the outcome of a row is counted, in per cent."""
    rng = np.random.default_rng(n)
    return 100 * float(np.mean([row.counted(row.draw(rng, n)) for _ in range(draws)]))


def table(draws: int) -> str:
    """Return the whole table as text, with its notes."""
    head = ("what", "of which data", *(f"n = {n}" for n in SIZES))
    body = [(r.what, r.data, *(f"{per_cent(r, n, draws):.1f}" for n in SIZES)) for r in rows()]
    first = f"{draws:,} data sets a number (python scripts/coverage.py --draws {draws} --write)."
    return writers.compose([Table(head, tuple(body), left=2)], [first, *NOTES], "text") + "\n"


def main() -> int:
    """Print or write the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=DRAWS, help="data sets for each number")
    parser.add_argument("--write", action="store_true", help=f"write the table to {OUTPUT.name}")
    args = parser.parse_args()
    text = table(args.draws)
    print(text)
    if args.write:
        OUTPUT.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
