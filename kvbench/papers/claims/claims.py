"""Claims of papers as tests that a model can decide: pairs of methods on the same examples, and a verdict.

A claim holds the paper's own words (``quote``) and names the tested part of them. The paired differences of its two
sides decide it, over all examples of its tasks. ``better`` asks for a mean above 0, and ``no_worse`` for no loss beyond
a margin. Both directions are tested (see ``stats.p_above``), and two one-sided tests ask whether a gain is next to
nothing (``NOTHING``). Each of the three has a third of LEVEL over all claims of a ledger together (Holm).

Three measures read the differences and are never merged: the score of answers in points of 100, the likelihood of the
reference answer, and the divergence from the full cache. Each has verdicts of its own, at a third of LEVEL, and words
of its own: papers claim scores, so only scores support or contradict a claim. A task on which the model fails even with
the full cache decides nothing in points and is left out there. The other two measures need no right answers. A task on
which a side compressed nothing is left out of all three.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from math import ceil, log2
from typing import Any, NamedTuple

import numpy as np
import yaml
from numpy.typing import NDArray

from kvbench.base.conf import YAML_LOADER
from kvbench.base.errors import KvbenchError, unknown
from kvbench.papers import data_files
from kvbench.papers.spec import catalogue, table_spec
from kvbench.papers.spec.table_spec import UnprintedCell, UnprintedTable
from kvbench.tasks.longbench import task_names
from kvbench.tasks.metrics import stats

TABLE = "claims"
"""The name and title of the tables whose rows are the methods that claims compare."""
TESTS = ("better", "no_worse", "elsewhere")
"""The tests of claims: a gain, no loss beyond the margin, and none, since no score can decide the claim."""
LEVEL = 0.05
"""The highest accepted chance that a ledger has any wrong verdict, by any of its measures."""
POWER = 0.8
"""The chance of a decision with the number of examples that an undecided verdict asks for (``Verdict.needs``)."""
POINTS, LIKELIHOOD, DIVERGENCE = "points", "likelihood", "divergence"
"""The measures of differences: scores, the likelihood of the reference answer, and the distance from the full cache."""
MEASURES = (POINTS, LIKELIHOOD, DIVERGENCE)
"""All measures: the papers' own first."""
NOTHING = {POINTS: 0.01, LIKELIHOOD: 0.01, DIVERGENCE: 0.1}
"""By measure, the largest mean difference that is next to nothing: as a gain, and as a loss if the claim has no margin.

It is one point of 100 (scores are out of 1), 0.01 nats a token, or a contrast of 10 % of two divergences
(``evidence.compare_nearness``). With such a contrast, the larger divergence is 1.22 times the smaller one.
"""
SUPPORTED, CONTRADICTED, UNDECIDED = "supported", "contradicted", "undecided"
IN_LINE, NOT_REPRODUCED = "in line", "not reproduced here"
NO_DIFFERENCE, MIXED, FRAGILE = "no difference", "mixed", "fragile"
NOT_DECIDABLE, FLOOR, ELSEWHERE = "not decidable here", "the model fails", "not testable here"
UNMEASURED = "not measured yet"
SIDES = {
    POINTS: (SUPPORTED, CONTRADICTED),
    LIKELIHOOD: (IN_LINE, NOT_REPRODUCED),
    DIVERGENCE: (IN_LINE, NOT_REPRODUCED),
}
"""By measure, the words for a claim that holds by it, and for one that does not."""
DECIDED = (SUPPORTED, CONTRADICTED, IN_LINE, NOT_REPRODUCED, NO_DIFFERENCE, MIXED, FRAGILE)
"""The verdicts that decide a claim; the other verdicts of VERDICTS say why it is not decided."""
VERDICTS = (*DECIDED, UNDECIDED, NOT_DECIDABLE, FLOOR, UNMEASURED, ELSEWHERE)
SAME = 1e-9
"""Means that are no further apart than this count as equal, since rounding alone can separate them."""
AS_PRINTED = "windows=paper"
"""The part of a row's setting that keeps the paper's windows on the tiny model, which otherwise scales them."""

Differences = NDArray[np.float64]
"""Paired differences of scores or other measures, above 0 if a pair's first side is the better one."""


@dataclass(frozen=True)
class Claim:
    """One statement of a paper as a test of methods against each other.

    paper: the paper's name, as in conf/preset.
    id: the claim's name, unique among all papers.
    quote: the paper's words.
    where: the section or table of the quote.
    tested: the part of the quote that is tested, in our words.
    test: one of TESTS. ``elsewhere`` marks a claim that no score can decide.
    pairs: the rows to compare, each a method and its setting in the notation of paper tables. The claim says that the
    first of a pair is better than the second, or no worse.
    margin: the loss in points of 100 that still counts as no loss.
    datasets: the datasets to compare on; () for LongBench's English tasks.
    why: the reason why no score can decide the claim; '' if one can.
    """

    paper: str
    id: str
    quote: str
    where: str
    tested: str
    test: str
    pairs: tuple[tuple[str, str], ...] = ()
    margin: float = 1.0
    datasets: tuple[str, ...] = ()
    why: str = ""

    def __post_init__(self) -> None:
        """Raise KvbenchError if ``test`` is not one of TESTS."""
        if self.test not in TESTS:
            raise KvbenchError(f"claim {self.id}: test must be one of {', '.join(TESTS)}, not {self.test!r}")

    def least(self, measure: str = POINTS) -> float:
        """Return the bound that the mean difference exceeds if the claim holds, in the unit of ``NOTHING``."""
        if self.test == "better":
            return 0.0
        # the margin is in points of 100, but differences of scores are out of 1
        if measure == POINTS:
            return -self.margin / 100
        return -NOTHING[measure]

    @property
    def columns(self) -> tuple[str, ...]:
        """The claim's datasets: those that it names, or else LongBench's 16 English tasks."""
        return self.datasets or task_names("en")


@dataclass(frozen=True)
class Evidence:
    """Measurements for a claim by one measure. Either all rows have scaled windows, or all have the paper's own.

    differences: by dataset, an array [examples, pairs of the claim] with numbers from -1 to 1. Each says how much
    better the first side of a pair is (``evidence.pair_differences``). An example that is asked several times (MDQA's
    three positions) has one row, the mean over them.
    floors: datasets left out because the model fails there even with the full cache.
    unchanged: datasets left out because a side compressed nothing.
    waiting: datasets that can be compared but are not measured yet.
    cells: the ids of the cells of both sides.
    ran: for each pair, the labels of the methods as they ran on this model.
    possible: the number of examples of all datasets that the measure can use, measured or not.
    reason: why some measurements, or all of them, are missing; '' if none are.
    """

    differences: Mapping[str, Differences] = field(default_factory=dict)
    floors: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    cells: tuple[str, ...] = ()
    ran: tuple[str, ...] = ()
    possible: int = 0
    reason: str = ""
    unchanged: tuple[str, ...] = ()

    @property
    def values(self) -> Differences:
        """The mean difference of each example over the claim's pairs [examples], dataset by dataset.

        The differences of one example's pairs depend on each other, so a test counts examples alone.
        """
        means = [differences.mean(1) for differences in self.differences.values()]
        # the empty array gives np.concatenate something to return if no dataset was measured
        means.append(np.zeros(0))
        return np.concatenate(means)

    @property
    def tasks(self) -> dict[str, float]:
        """The mean difference by task, in hundredths: points of 100, per cent, or hundredths of a nat."""
        return {task: 100 * float(differences.mean()) for task, differences in self.differences.items()}

    @property
    def settings(self) -> list[Differences]:
        """The differences of each of the claim's pairs over all datasets [examples]; [] without differences.

        Their mean gives a dataset the weight of its number of examples.
        """
        if not self.differences:
            return []
        return list(np.concatenate(list(self.differences.values())).T)


@dataclass(frozen=True)
class Verdict:
    """The outcome of a claim by one measure: its verdict, the mean difference with its interval, and p-values.

    verdict: one of VERDICTS.
    mean, ci: the mean difference and its 95 % interval in hundredths: points of 100, per cent, or hundredths of a nat.
    p_for: the corrected p-value of the hypothesis that nothing supports the claim.
    p_against: the corrected p-value of the hypothesis that nothing speaks against it.
    p_same: the corrected p-value of the hypothesis that a claimed gain is more than next to nothing (None for other
    claims).
    side: the one of the measure's SIDES on which the mean lies, if the verdict is mixed or fragile; else ''.
    mean_unscaled: the mean difference with the paper's own windows in place of scaled ones, in hundredths; None if that
    was not measured.
    why_not: why there is no mean with the paper's own windows, or why a part of it is missing.
    needs: the number of examples that would decide an undecided claim with a chance of POWER, if their differences had
    the mean and spread seen so far. For NOT_DECIDABLE, the smallest number with which any result could support it.
    """

    claim: Claim
    verdict: str
    evidence: Evidence = field(default_factory=Evidence)
    mean: float | None = None
    ci: tuple[float, float] | None = None
    p_for: float | None = None
    p_against: float | None = None
    p_same: float | None = None
    side: str = ""
    mean_unscaled: float | None = None
    why_not: str = ""
    needs: int | None = None

    @property
    def reason(self) -> str:
        """The reason why there is no verdict, or why data are missing; '' if nothing is missing."""
        return self.claim.why or self.evidence.reason


def choose_deciding_measure(verdicts: Mapping[str, Verdict]) -> str:
    """Return the measure that is shown where a claim has one line, from its verdicts in the order of MEASURES.

    It is the first measure that decides the claim, else the first that leaves it undecided, else the first of all.
    """
    # an undecided verdict says how many examples are needed, which is more than that nothing can be measured
    for words in (DECIDED, (UNDECIDED,)):
        for measure, verdict in verdicts.items():
            if verdict.verdict in words:
                return measure
    # no measure could be taken, and the first one says why
    return next(iter(verdicts))


def load(paper: str) -> tuple[Claim, ...]:
    """Read a paper's claims from its claims.yaml, in the order of the file. Raises KvbenchError for a damaged file."""
    # a paper's name has one file of claims, even with a second folder of papers (KVBENCH_PAPERS_DATA)
    (path,) = data_files(f"{paper}/claims.yaml")
    claims = []
    try:
        for entry in yaml.load(path.read_text(encoding="utf-8"), Loader=YAML_LOADER):
            claim = Claim(paper, **entry)
            # YAML has lists, but a claim must be hashable
            pairs = tuple((first, second) for first, second in claim.pairs)
            claims.append(replace(claim, datasets=tuple(claim.datasets), pairs=pairs))
    except (OSError, TypeError, ValueError, yaml.YAMLError) as error:
        raise KvbenchError(f"{path}: {error}") from None
    return tuple(claims)


def papers_with_claims() -> tuple[str, ...]:
    """Return the papers with claims, in the order of their tables."""
    names_with_claims = {path.parent.name for path in data_files("*/claims.yaml")}
    return tuple(paper for paper in catalogue.papers_in_order() if paper in names_with_claims)


def find_papers(wanted: str) -> tuple[str, ...]:
    """Return the paper named ``wanted``, or all papers for ``all``. Raises UsageError for another name."""
    if wanted == "all":
        return papers_with_claims()
    if wanted not in papers_with_claims():
        raise unknown("paper", wanted, ("all", *papers_with_claims()))
    return (wanted,)


def make_tables_of_sides(claims: Sequence[Claim], scaled: bool = False) -> list[UnprintedTable]:
    """Return the tables to measure for one paper's claims. Claims on the same datasets share a table.

    Each claim compares pairs of methods under some setting. Each method of a pair is a row of the table.

    claims: at least one claim, all of one paper.
    scaled: True if windows are scaled to a model smaller than the paper's. Each row is then added a second time, with
    the windows that the paper prints.
    """
    # claims that no score can decide have no pairs, and so no rows
    sides_by_datasets: dict[tuple[str, ...], list[str]] = {}
    # of claims that name the same datasets in another order, the first one gives the order
    first_order: dict[frozenset[str], tuple[str, ...]] = {}
    for claim in claims:
        columns = first_order.setdefault(frozenset(claim.columns), claim.columns)
        for side in chain.from_iterable(claim.pairs):
            rows = sides_by_datasets.setdefault(columns, [])
            rows.append(side)
            if scaled:
                rows.append(keep_printed_windows(side))
    paper_tables = table_spec.find_tables(claims[0].paper)
    # any table of scores supplies the preset, the averages and the models' names
    template = next(table for table in paper_tables if table.measurable)
    # a claim can compare datasets of several tables, so it gets the workloads of all of them
    workloads: dict[str, Mapping[str, Any]] = {}
    for table in paper_tables:
        workloads.update(table.workloads)
    tables = []
    for columns, rows in sides_by_datasets.items():
        cells = []
        # two claims can compare the same side; it is one row
        for row in dict.fromkeys(rows):
            method, _, setting = row.partition(" ")
            # the cells of a table name one of the paper's models
            model = template.models()[0]
            cells += [UnprintedCell(method, setting, dataset, "mean", model) for dataset in columns]
        tables.append(table_spec.table_of_cells(template, cells, table=TABLE, title=TABLE, workloads=workloads))
    return tables


def keep_printed_windows(side: str) -> str:
    """Return a claim's ``side`` with the setting that keeps the paper's windows, in place of scaled ones."""
    return f"{side};{AS_PRINTED}"


def decide(
    claims: Sequence[Claim],
    evidence_by_claim: Mapping[str, Evidence],
    unscaled_evidence: Mapping[str, Evidence] | None = None,
    family: int | None = None,
    measure: str = POINTS,
    measures: int = 1,
) -> list[Verdict]:
    """Return the verdict on each of ``claims`` by one measure. The p-values of all claims are corrected together.

    Each of a claim's three hypotheses is tested at the level LEVEL / 3 / ``measures``. A decided verdict is fragile if
    the mean of ``unscaled_evidence`` lies on the other side of the claim's bound. It is mixed if a task or a setting
    does.

    evidence_by_claim: the evidence by the claim's id. A claim may have none.
    unscaled_evidence: the evidence for the same claims with the paper's own windows in place of scaled ones; None if
    windows are not scaled.
    family: the number of claims to correct for, at least those that are measured; None for those alone.
    measures: how many measures have verdicts, this one included.
    """
    evidence_of = {claim.id: evidence_by_claim.get(claim.id, Evidence()) for claim in claims}
    measured = [claim for claim in claims if len(evidence_of[claim.id].values)]
    # claims without measurements count, too: the order of measuring must not decide how strict the correction is
    family_size = max(family or 0, len(measured))
    # Bonferroni over the three hypotheses (of ``_PValues``) and over the measures, then Holm over the claims
    level = LEVEL / 3 / measures
    p_values = _correct_p_values(measured, evidence_of, family_size, measure)
    verdicts = []
    for claim in claims:
        evidence = evidence_of[claim.id]
        if claim.id not in p_values:
            verdicts.append(Verdict(claim, _name_gap(evidence), evidence))
            continue
        unscaled = (unscaled_evidence or {}).get(claim.id, Evidence())
        verdicts.append(
            _reach_verdict(
                claim, evidence, unscaled, p_values[claim.id], family=family_size, measure=measure, level=level
            )
        )
    return verdicts


def _reach_verdict(
    claim: Claim, evidence: Evidence, unscaled: Evidence, p: _PValues, *, family: int, measure: str, level: float
) -> Verdict:
    differences, least = evidence.values, claim.least(measure)
    mean_unscaled = 100 * float(unscaled.values.mean()) if len(unscaled.values) else None
    word, side = _choose_verdict(
        claim, evidence, p, mean_unscaled=mean_unscaled, family=family, measure=measure, level=level
    )
    needs = None
    if word == UNDECIDED:
        # the first of a family of claims needs p < level / family (Holm)
        needs = _count_needed_pairs(differences, least, level / family)
    if word == NOT_DECIDABLE:
        needs = _count_decidable_pairs(claim.test, least, level / family)
    return Verdict(
        claim,
        word,
        evidence,
        mean=100 * float(differences.mean()),
        ci=stats.in_percent(stats.mean_interval(differences, (-1.0, 1.0))),
        p_for=p.supports,
        p_against=p.opposes,
        # a claim of losing nothing is not tested for a gain that is next to nothing
        p_same=p.same if claim.test == "better" else None,
        side=side,
        mean_unscaled=mean_unscaled,
        why_not=unscaled.reason,
        needs=needs,
    )


class _PValues(NamedTuple):
    """The corrected p-values of a claim. A low one decides: for the claim, against it, or for no difference.

    supports: of the hypothesis that the mean difference is no higher than the claim's bound.
    opposes: of the hypothesis that the mean difference is no lower than the bound.
    same: of the hypothesis that the mean is further from 0 than NOTHING; 1 for claims of losing nothing.
    """

    supports: float
    opposes: float
    same: float


def _correct_p_values(
    measured: Sequence[Claim], evidence_by_claim: Mapping[str, Evidence], family: int, measure: str
) -> dict[str, _PValues]:
    # Holm's method corrects the three hypotheses separately, each over all claims
    nothing = NOTHING[measure]
    above, below, same = {}, {}, {}
    for claim in measured:
        differences, least = evidence_by_claim[claim.id].values, claim.least(measure)
        # null hypothesis: mean <= least; a low p supports the claim
        above[claim.id] = stats.p_above(differences, least)
        # null hypothesis: mean >= least; a low p speaks against the claim
        below[claim.id] = stats.p_above(-differences, -least)
        same[claim.id] = 1.0
        if claim.test == "better":
            # two one-sided tests: the mean lies in (-nothing, +nothing) only if both reject, so the larger p counts
            same[claim.id] = max(stats.p_above(differences, -nothing), stats.p_above(-differences, -nothing))
    above, below, same = (stats.holm(p_values, family) for p_values in (above, below, same))
    return {claim.id: _PValues(above[claim.id], below[claim.id], same[claim.id]) for claim in measured}


def _name_gap(evidence: Evidence) -> str:
    if evidence.waiting:
        return UNMEASURED
    # if some dataset allows no comparison at all, the floor of the others is not the whole reason
    if evidence.floors and not evidence.unchanged:
        return FLOOR
    return ELSEWHERE


def _count_needed_pairs(differences: Differences, least: float, level: float) -> int | None:
    if len(differences) < 2:
        return None
    distance = abs(float(differences.mean()) - least)
    spread = float(differences.std(ddof=1))
    if distance < SAME or not spread:
        return None
    # a one-sided z test reaches ``level`` with chance POWER at n = ((z(1 - level) + z(POWER)) * spread / distance)^2
    z_sum = stats.normal_quantile(1 - level) + stats.normal_quantile(POWER)
    for_power = ceil((z_sum * spread / distance) ** 2)
    # flipping the signs of n differences cannot give a lower p than 2^-n, so n must be at least -log2(level)
    fewest = ceil(-log2(level))
    return max(fewest, for_power)


@lru_cache  # each step is a permutation test, and many claims have the same arguments
def _count_decidable_pairs(test: str, least: float, level: float) -> int | None:
    if level <= 1 / (1 + stats.FLIPS):
        return None
    count = 10
    while _compute_lowest_p(test, count, least) >= level:
        # from 10 to 11, from 100 to 110
        count += 10 ** (len(str(count)) - 2)
    return count


@lru_cache  # a permutation test takes long, and many claims have the same arguments
def _compute_lowest_p(test: str, examples: int, least: float) -> float:
    best_difference = 0.0 if test == "no_worse" else 1.0
    return stats.p_above(np.full(examples, best_difference), least)


def _choose_verdict(
    claim: Claim,
    evidence: Evidence,
    p: _PValues,
    *,
    mean_unscaled: float | None,
    family: int,
    measure: str,
    level: float,
) -> tuple[str, str]:
    """Return (verdict, side) of a measured claim. The side is '' unless the verdict is mixed or fragile."""
    least = claim.least(measure)
    if claim.test == "better" and p.same < level:
        return NO_DIFFERENCE, ""
    if p.supports >= level and p.opposes >= level:
        # Holm multiplies the smallest p-value by the size of the family
        lowest_corrected = family * _compute_lowest_p(claim.test, evidence.possible, least)
        if lowest_corrected >= level:
            return NOT_DECIDABLE, ""
        return UNDECIDED, ""
    # fragile and mixed verdicts also state the side that the mean takes
    holds, fails = SIDES[measure]
    side, sign = fails, -1
    if p.supports < level:
        side, sign = holds, 1
    if mean_unscaled is not None:
        # the bound is out of 1, the mean in hundredths
        distance_to_bound = sign * (mean_unscaled / 100 - least)
        # unscaled windows lead to the other side of the bound
        if distance_to_bound < -SAME:
            return FRAGILE, side
    # each subset holds differences [examples]: of one task, as means over the pairs, or of one pair in all tasks
    subsets = [differences.mean(1) for differences in evidence.differences.values()]
    subsets += evidence.settings
    if any(_lies_opposite(subset, least, sign) for subset in subsets):
        return MIXED, side
    return side, ""


def _lies_opposite(differences: Differences, least: float, sign: int) -> bool:
    if len(differences) < stats.FEWEST:
        return False
    ci = stats.mean_interval(differences, (-1.0, 1.0))
    assert ci is not None  # there are bounds, and FEWEST differences
    low, high = ci
    if sign > 0:
        return high < least
    return low > least
