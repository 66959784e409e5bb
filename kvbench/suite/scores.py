"""The score S of a suite: how far a row gets from random tokens (0) to the full cache (100), by part and in the mean.

    S = 100 * (score - random) / (full - random)

``score``, ``random`` and ``full`` are means over tasks of the row, of random tokens and of the full cache, on the same
prompts. Random tokens hold the same bytes as the row. In a part that measures divergences, a prompt's score is -ln KL.
The full cache has no divergence, so its KL is set to the suite's floor. Intervals are Fieller's
(``stats.ratio_of_means``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log, sqrt
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from kvbench.base.errors import UsageError
from kvbench.base.formatting import format_number, with_interval
from kvbench.kv.pages import PagesFreed
from kvbench.report.unchanged import UNCHANGED, same_as_full
from kvbench.store.fidelity import KINDS
from kvbench.store.results import Sample
from kvbench.suite.definition import CHANCE, CONTROL, KL, NEGATIVE, Suite, SuitePart
from kvbench.tasks.metrics import stats
from kvbench.tasks.metrics.stats import Interval

PartSamples = Mapping[str, Mapping[str, Sample]]
"""The samples of a row in one part, by column and then by example."""
Scores = Mapping[str, Mapping[str, float]]
"""Scores of a row in one part, by column and then by example."""
PartScores = Mapping[str, Scores]
"""Scores of a row by part, column and example."""


@dataclass(frozen=True, kw_only=True)
class RowSamples:
    """The stored samples of a row at one budget.

    name: the row's method with its options.
    budget: the denominator d of the budget, 1/d of the full cache's bytes.
    role: the purpose of the row; ``definition`` lists the roles.
    parts: the samples by part. Parts that cannot measure the row are left out.
    """

    name: str
    budget: int
    role: str
    parts: Mapping[str, PartSamples]


@dataclass(frozen=True, kw_only=True)
class PartScore:
    """The score of a row in one part.

    retained: S; None if the part cannot be measured with this model.
    ci: the 95 % interval of S; None if there is none.
    raw: the row's mean score in per cent, or its mean divergence in nats.
    full: the same mean for the full cache.
    chance: the same mean for random tokens.
    n: the number of prompts.
    """

    retained: float | None
    ci: Interval | None
    raw: float
    full: float
    chance: float
    n: int


@dataclass(frozen=True, kw_only=True)
class RowScore:
    """A row of the card.

    name: the row's method with its options.
    budget: the denominator d of the budget, 1/d of the full cache's bytes.
    role: the purpose of the row; ``definition`` lists the roles.
    parts: the row's score in each part, by the part's name.
    mean: the mean of S over the measurable parts; None if no part is measurable.
    ci: the 95 % interval of ``mean``; None if a part has none.
    worst: the part with the lowest S; '' if no part is measurable.
    bytes: the cache's bytes after the prompt, in per cent of the full cache's at 16 bits.
    unchanged: the share of prompts whose tokens, bytes and answers are the full cache's.
    pages: the shares of a prompt's pages that an engine could free.
    rank: 1 + the number of rows at the same budget that are better by an interval; None for a row without a mean, and
        for one that compressed nothing.
    """

    name: str
    budget: int
    role: str
    parts: Mapping[str, PartScore]
    mean: float | None
    ci: Interval | None
    worst: str
    bytes: float
    unchanged: float
    pages: PagesFreed | None
    rank: int | None = None

    @property
    def nothing_compressed(self) -> bool:
        """True if the row equals the full cache on nearly all prompts. Its score then says nothing."""
        return self.unchanged >= UNCHANGED


def score_rows(suite: Suite, rows: Sequence[RowSamples], full: Mapping[str, PartSamples]) -> list[RowScore]:
    """Return the scores of all rows, in the order of the suite's budgets, and at each budget by rank and mean.

    full: the full cache's samples by part.

    Raises UsageError if a budget has rows but no row of random tokens.
    """
    scored: list[RowScore] = []
    # rows of two budgets have different random tokens, so each budget is scored and ranked by itself
    for budget in suite.budgets:
        rows_of_budget = [row for row in rows if row.budget == budget]
        if rows_of_budget:
            scored += _score_budget(suite, rows_of_budget, full)
    return scored


def _score_budget(suite: Suite, rows: Sequence[RowSamples], full: Mapping[str, PartSamples]) -> list[RowScore]:
    """Return the scores of all rows of one budget, by rank and mean. Raises UsageError without random tokens.

    full: the full cache's samples by part.
    """
    chance_rows = [row for row in rows if row.role == CHANCE]
    if not chance_rows:
        raise UsageError(f"the budget 1/{rows[0].budget} has no row of random tokens, which every score is relative to")
    # the ends of the scale: random tokens are S = 0, the full cache is S = 100
    low = _compute_scores(suite, chance_rows[0].parts)
    high = _compute_scores(suite, full, is_full=True)
    entries = []
    # ranks compare rows in units of each part's gap, so that parts with other units weigh alike
    scaled_rows = []
    for row in rows:
        own = _compute_scores(suite, row.parts)
        entry = _score_row(suite, row, full, own=own, low=low, high=high)
        entries.append(entry)
        scaled_rows.append(_scale_by_gaps(entry, own=own, low=low, high=high))
    ranked = []
    for scaled, entry in zip(scaled_rows, entries, strict=True):
        rank: int | None = None
        if entry.mean is not None and not entry.nothing_compressed:
            # one more than the rows that are better by an interval, without rows that compressed nothing
            rank = 1
            for other, other_entry in zip(scaled_rows, entries, strict=True):
                if not other_entry.nothing_compressed and _is_ahead(other, scaled):
                    rank += 1
        ranked.append(replace(entry, rank=rank))
    # rows of one rank stand by mean, and rows without a meaningful mean last; zeros stand in for None, which cannot be
    # compared with numbers
    return sorted(ranked, key=lambda entry: (entry.rank is None, entry.rank or 0, -(entry.mean or 0.0)))


def _compute_scores(
    suite: Suite, parts: Mapping[str, PartSamples], is_full: bool = False
) -> dict[str, dict[str, dict[str, float]]]:
    """Return the score of each prompt by part, column and example. ``is_full`` says that the row is the full cache."""
    scores = {}
    for part in suite.parts:
        if part.name in parts:
            scores[part.name] = score_prompts(part, parts[part.name], suite.floor, is_full)
    return scores


def _score_row(
    suite: Suite,
    row: RowSamples,
    full: Mapping[str, PartSamples],
    *,
    own: PartScores,
    low: PartScores,
    high: PartScores,
) -> RowScore:
    """Return a row's entry on the card.

    full: the full cache's samples by part.
    own: the row's scores.
    low: the scores of random tokens, which are S = 0.
    high: the scores of the full cache, which are S = 100.
    """
    parts: dict[str, PartScore] = {}
    # each sample of the row with the full cache's sample of the same prompt
    pairs: list[tuple[Sample, Sample]] = []
    for part in suite.parts:
        name = part.name
        if name not in row.parts:
            continue
        parts[name] = score_part(own[name], low[name], high[name], divergence=part.measure == KL)
        for column, samples in row.parts[name].items():
            for example_id, sample in samples.items():
                pairs.append((sample, full[name][column][example_id]))
    # parts that cannot be measured with this model are left out of the mean
    retained = {name: entry.retained for name, entry in parts.items() if entry.retained is not None}
    mean = ci = None
    worst = ""
    if retained:
        mean = fmean(retained.values())
        worst = min(retained, key=retained.__getitem__)
        ci = _compute_interval(mean, [parts[name] for name in retained])
    compressed = [sample for sample, _ in pairs]
    bytes16 = sum(sample.payload16 + sample.overhead16 for sample in compressed)
    return RowScore(
        name=row.name,
        budget=row.budget,
        role=row.role,
        parts=parts,
        mean=mean,
        ci=ci,
        worst=worst,
        bytes=100 * bytes16 / sum(sample.full16 for sample in compressed),
        unchanged=fmean(same_as_full(sample, exact) for sample, exact in pairs),
        pages=PagesFreed.mean([sample.pages_freed for sample in compressed]),
    )


def score_prompts(
    part: SuitePart, samples: PartSamples, floor: float, is_full: bool = False
) -> dict[str, dict[str, float]]:
    """Return the score of each prompt in one part, by column and example: a task's score in [0, 1], or -ln KL.

    KL is a prompt's mean divergence in nats a token, and at least ``floor``. The full cache (``is_full``) has no
    divergence from itself, so its KL is the floor.
    """
    scores_by_column: dict[str, dict[str, float]] = {}
    for column, samples_by_example in samples.items():
        scores: dict[str, float] = {}
        for example_id, sample in sorted(samples_by_example.items()):
            if part.measure == KL:
                # the floor also keeps the logarithm finite: equal distributions have a divergence of 0
                nats = floor if is_full else max(compute_mean_divergence(sample), floor)
                scores[example_id] = -log(nats)
            elif sample.score is not None:
                scores[example_id] = sample.score
        scores_by_column[column] = scores
    return scores_by_column


def compute_mean_divergence(sample: Sample) -> float:
    """Return a prompt's mean divergence from the full cache in nats a token.

    It is measured on the reference text, or else on the full cache's own answer. Raises UsageError for a sample without
    divergences.
    """
    for kind in KINDS:
        if sample.fidelity is not None and kind in sample.fidelity:
            return fmean(sample.fidelity[kind].kl)
    raise UsageError(f"the sample of {sample.id} has no divergence from the full cache")


def score_part(row: Scores, chance: Scores, full: Scores, divergence: bool = False) -> PartScore:
    """Compute a row's score in one part.

    S, its interval and ``n`` rest on the prompts that the row, ``chance`` and ``full`` all have a score for. The means
    ``raw``, ``full`` and ``chance`` are each over all scores given.

    row: the row's scores.
    chance: the scores of random tokens, which are S = 0.
    full: the scores of the full cache, which are S = 100.
    divergence: True if the scores are -ln KL.
    """
    # arrays for each task: (score - random, full - random) of each prompt [n, 2], and full - random [n]
    pairs: list[NDArray[np.float64]] = []
    gaps: list[NDArray[np.float64]] = []
    for column, scores in row.items():
        shared = [i for i in scores if i in chance[column] and i in full[column]]
        own_scores = np.array([scores[i] for i in shared])
        chance_scores = np.array([chance[column][i] for i in shared])
        full_scores = np.array([full[column][i] for i in shared])
        gap = full_scores - chance_scores
        pairs.append(np.stack([own_scores - chance_scores, gap], axis=1))
        gaps.append(gap)
    if is_measurable(gaps):
        # S = mean(score - random) / mean(full - random), in per cent
        share = stats.ratio_of_means(pairs)
    else:
        # an empty share has neither S nor an interval
        share = stats.Share()
    return PartScore(
        retained=share.point,
        ci=share.ci,
        raw=_compute_mean(row, divergence),
        full=_compute_mean(full, divergence),
        chance=_compute_mean(chance, divergence),
        n=sum(map(len, gaps)),
    )


def is_measurable(gaps: Sequence[NDArray[np.float64]]) -> bool:
    """Return True if the full cache scores above random tokens, even at the lower end of the difference's interval.

    Without that gap, the share of it that a method retains says nothing.

    gaps: for each task an array [n] with the full cache's score minus that of random tokens for each prompt.
    """
    # gaps of divergences have no bounds
    mean, interval = stats.mean_over_tasks(gaps, bounds=None)
    if interval is None:
        # without an interval, all gaps are equal or there are too few of them; enough equal gaps above 0 are a gap
        return mean > 0 and sum(map(len, gaps)) >= stats.FEWEST
    low, _ = interval
    return low > 0


def _compute_mean(scores: Scores, divergence: bool) -> float:
    """Return the mean score over tasks in per cent, or with ``divergence`` the geometric mean of KL in nats."""
    mean = fmean(fmean(scores_of_task.values()) for scores_of_task in scores.values())
    # a divergence's score is -ln KL, so that exp(-mean) is the geometric mean of KL
    if divergence:
        return float(np.exp(-mean))
    return 100 * mean


def _compute_interval(mean: float, parts: Sequence[PartScore]) -> Interval | None:
    """Return the interval of the mean of S over parts, whose prompts are independent. None if a part has no interval.

    Its lower half width is sqrt(sum of (S_p - low_p)^2) / P over the P parts, and its upper one sqrt(sum of
    (high_p - S_p)^2) / P.
    """
    # the sides are added up separately, since the parts' intervals are asymmetric
    squares_below = squares_above = 0.0
    for entry in parts:
        if entry.ci is None or entry.retained is None:
            return None
        low, high = entry.ci
        squares_below += (entry.retained - low) ** 2
        squares_above += (high - entry.retained) ** 2
    return mean - sqrt(squares_below) / len(parts), mean + sqrt(squares_above) / len(parts)


def _scale_by_gaps(entry: RowScore, *, own: PartScores, low: PartScores, high: PartScores) -> PartScores:
    """Return a row's scores in its measurable parts, divided by each part's gap between full cache and random tokens.

    own: the row's scores.
    low: the scores of random tokens.
    high: the scores of the full cache.
    """
    scaled_parts: dict[str, Scores] = {}
    for name, part in entry.parts.items():
        if part.retained is None:
            continue
        # full - random of each of the part's tasks
        task_gaps = []
        for column in own[name]:
            task_gaps.append(fmean(high[name][column].values()) - fmean(low[name][column].values()))
        # the unit of the part's scores; it is above 0, since the part is measurable
        gap = fmean(task_gaps)
        scaled = {}
        for column, scores in own[name].items():
            scaled[column] = {i: value / gap for i, value in scores.items()}
        scaled_parts[name] = scaled
    return scaled_parts


def _is_ahead(a: PartScores, b: PartScores) -> bool:
    """Return True if row ``a`` is better than row ``b`` by an interval, over the parts and prompts that both have."""
    # a - b on each prompt, by part and task
    differences_by_part = []
    for part in a:
        if part not in b:
            continue
        differences_by_task = []
        for column, a_scores in a[part].items():
            b_scores = b[part][column]
            differences_by_task.append([a_scores[i] - b_scores[i] for i in a_scores if i in b_scores])
        differences_by_part.append(differences_by_task)
    if not differences_by_part:
        return False
    _, interval = stats.mean_over_parts(differences_by_part)
    if interval is None:
        return False
    low, _ = interval
    return low > 0


def list_above_full(scored: Sequence[RowScore]) -> list[str]:
    """Return a line for each part and budget in which a row's whole interval lies above 100, the full cache's score."""
    lines = []
    for entry in scored:
        for part, score in entry.parts.items():
            if score.retained is not None and score.ci is not None and score.ci[0] > 100:
                share = with_interval(score.retained, score.ci, 0, gap=" ")
                lines.append(f"higher than the full cache: {entry.name} at 1/{entry.budget}, {part} {share}")
    return lines


def list_control_problems(scored: Sequence[RowScore]) -> list[str]:
    """Return a message for each part and budget in which a control is worse than the negative control.

    Such a control shows that the measurement is broken.
    """
    return [str(place) for place in find_below_negative(scored) if place.role == CONTROL]


@dataclass(frozen=True, kw_only=True)
class BelowNegative:
    """A part and budget in which a row is worse than the negative control by their intervals.

    name: the row.
    role: the row's role.
    part: the part.
    budget: the denominator d of the budget, 1/d of the full cache's bytes.
    retained: the row's score S in the part.
    negative: the negative control.
    negative_retained: the negative control's score S in the part.
    """

    name: str
    role: str
    part: str
    budget: int
    retained: float
    negative: str
    negative_retained: float

    def __str__(self) -> str:
        retained, negative = format_number(self.retained, 0), format_number(self.negative_retained, 0)
        return (
            f"{self.part} at 1/{self.budget}: {self.name} ({retained}) is below the negative control "
            f"{self.negative} ({negative})"
        )


def find_below_negative(scored: Sequence[RowScore]) -> list[BelowNegative]:
    """Return each part and budget in which a row is worse than the negative control, by their intervals.

    The negative control keeps the first tokens alone. A real method can be worse: the first tokens hold the attention
    sinks, and a method that drops them can lose more. Parts that cannot be measured are left out.
    """
    places = []
    for control in scored:
        if control.role != NEGATIVE:
            continue
        peers = [entry for entry in scored if entry.budget == control.budget and entry is not control]
        for part in control.parts:
            for peer in peers:
                place = _compare_with_negative(peer, control, part)
                if place is not None:
                    places.append(place)
    return places


def _compare_with_negative(row: RowScore, control: RowScore, part: str) -> BelowNegative | None:
    """Return the place if ``row`` is worse in a part than the negative control by their intervals, else None."""
    row_score, control_score = row.parts.get(part), control.parts[part]
    if row_score is None or row_score.retained is None or row_score.ci is None:
        return None
    if control_score.retained is None or control_score.ci is None:
        return None
    _, row_high = row_score.ci
    control_low, _ = control_score.ci
    # a row counts as below the control only if the two intervals do not meet
    if row_high >= control_low:
        return None
    return BelowNegative(
        name=row.name,
        role=row.role,
        part=part,
        budget=control.budget,
        retained=row_score.retained,
        negative=control.name,
        negative_retained=control_score.retained,
    )
