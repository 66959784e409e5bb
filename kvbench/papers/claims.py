"""What papers claim, as tests that a model can decide: two methods on the same examples, and a verdict.

A claim is decided by the paired differences of its two sides over all examples of its tasks, in points of 100.
``better`` asks for a positive mean; ``no_worse`` for one above minus ``margin``; ``no_worse_each`` for that on every
task. Each gives a p-value in both directions, one that supports and one that contradicts (see ``p_above``). All claims
of a ledger are corrected together (Holm), and looks at growing numbers of examples share the error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist

import numpy as np
import yaml
from numpy.typing import NDArray

from kvbench.errors import KvbenchError, unknown
from kvbench.metrics import metric, stats
from kvbench.papers import declared
from kvbench.papers.declared import PAPERS, Given
from kvbench.papers.measured import Ours
from kvbench.plan import Group
from kvbench.store import ResultStore
from kvbench.tasks.longbench import names

TESTS = ("better", "no_worse", "no_worse_each", "elsewhere")
LEVEL = 0.05
POWER = 0.8
DRAWS = 20_000
WORST = 100.0
"""Points by which one pair can differ, either way."""
SUPPORTED, CONTRADICTED, UNDECIDED, ELSEWHERE = "supported", "contradicted", "undecided", "not testable here"

Differences = NDArray[np.float64]


@dataclass(frozen=True)
class Claim:
    """One statement of a paper in our words. ``side`` and ``other`` are a published method and setting each.

    test: one of TESTS. margin: points of 100 that count as nothing. why: of a claim that no score decides.
    """

    paper: str
    id: str
    says: str
    where: str
    test: str
    side: str = ""
    other: str = ""
    margin: float = 1.0
    datasets: tuple[str, ...] = ()
    why: str = ""

    def __post_init__(self) -> None:
        if self.test not in TESTS:
            raise KvbenchError(f"claim {self.id}: test must be one of {', '.join(TESTS)}, not {self.test!r}")

    @property
    def allowed(self) -> float:
        """Points that the first side may lose."""
        return 0.0 if self.test == "better" else self.margin

    @property
    def columns(self) -> tuple[str, ...]:
        """Its datasets: those named, else LongBench's 16 English tasks."""
        return self.datasets or names("en")


@dataclass(frozen=True)
class Verdict:
    """What the examples say: ``verdict`` with the mean difference in points, its interval, and the corrected p-values.

    ``tasks``: mean difference by task. ``would_take``: examples that would decide an undecided claim if the difference
    is what it seems, None where it seems to be none.
    """

    claim: Claim
    verdict: str
    n: int = 0
    mean: float | None = None
    ci: tuple[float, float] | None = None
    p_for: float | None = None
    p_against: float | None = None
    tasks: Mapping[str, float] = field(default_factory=dict)
    would_take: int | None = None
    reason: str = ""


def load(paper: str) -> tuple[Claim, ...]:
    """The claims of a paper, in its file's order; KvbenchError for a damaged file."""
    path = Path(__file__).parent / paper / "claims.yaml"
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
        return tuple(Claim(paper, **{**c, "datasets": tuple(c.get("datasets", ()))}) for c in raw)
    except (OSError, TypeError, yaml.YAMLError) as error:
        raise KvbenchError(f"{path}: {error}") from None


def find(wanted: str) -> tuple[str, ...]:
    """The papers of ``all`` or of one name; UsageError for any other."""
    if wanted == "all":
        return PAPERS
    if wanted not in PAPERS:
        raise unknown("paper", wanted, ("all", *PAPERS))
    return (wanted,)


def sides(paper: str, claims: Sequence[Claim]) -> list[Given]:
    """Tables of all rows that the claims compare, one for each set of datasets."""
    by_columns: dict[tuple[str, ...], list[str]] = {}
    for claim in claims:
        if claim.test != "elsewhere":
            by_columns.setdefault(claim.columns, []).extend((claim.side, claim.other))
    base = next(t for t in declared.find(paper) if t.measurable)
    tables = []
    for columns, rows in by_columns.items():
        written = (row.partition(" ") for row in dict.fromkeys(rows))
        cells = [(base.models()[0], method, setting, c, "mean") for method, _, setting in written for c in columns]
        workloads = {k: v for t in declared.find(paper) for k, v in t.workloads.items()}
        tables.append(declared.given(base, cells, table="claims", title="claims", workloads=workloads))
    return tables


def differences(claim: Claim, tables: Sequence[Ours]) -> tuple[dict[str, Differences], str]:
    """Paired differences in points by task, and why there are none, or not of all datasets."""
    ours = next(t for t in tables if {c.dataset for c in t.declared.scores} == set(claim.columns))
    found: dict[str, Differences] = {}
    lines = {line.row.name: line for line in ours.lines}
    side, other = lines[claim.side], lines[claim.other]
    reason = side.refused or other.refused or side.skipped or other.skipped
    if reason:
        return {}, reason
    absent: list[str] = []
    for column in ours.declared.scores:
        mine, theirs = ours.cells(side, column), ours.cells(other, column)
        if why := ours.why_absent(side, column) or ours.why_absent(other, column):
            absent.append(f"{column.dataset} is not here: {why}")
        for (group, a), (_, b) in zip(mine, theirs, strict=True):
            assert ours.run is not None
            refused = next(filter(None, map(ours.run.store.refusal, (a.id, b.id))), None)
            if refused:
                return {}, refused
            found[group.column] = _paired(ours.run.store, group, a.id, b.id)
    return found, "; ".join(dict.fromkeys(absent))


def _paired(store: ResultStore, group: Group, mine: str, theirs: str) -> Differences:
    """Differences in points over the group's examples that both cells have; of log losses less is better."""
    a, b = store.samples(mine), store.samples(theirs)
    sign = -1.0 if metric(group.task.metric).shown is not None else 1.0
    both = [(a[e.id]["score"], b[e.id]["score"]) for e in group.examples if e.id in a and e.id in b]
    return 100 * sign * np.array([x - y for x, y in both if x is not None and y is not None])


def decide(
    claims: Sequence[Claim],
    found: Mapping[str, tuple[dict[str, Differences], str]],
    looks: int = 1,
    family: int | None = None,
) -> list[Verdict]:
    """The verdicts on ``claims``, corrected together: Holm's steps over ``family`` claims of which these are left.

    ``looks``: how often the examples are looked at in all.
    """
    ps: dict[str, tuple[float, float]] = {}
    for claim in claims:
        by_task, _ = found.get(claim.id, ({}, ""))
        if by_task and sum(map(len, by_task.values())):
            ps[claim.id] = _p_values(claim, by_task)
    count = max(family or 0, len(ps))
    corrected = [holm({i: p[k] for i, p in ps.items()}, count) for k in (0, 1)]
    verdicts = []
    for claim in claims:
        if claim.id not in ps:
            reason = claim.why or found.get(claim.id, ({}, ""))[1] or "nothing was measured"
            verdicts.append(Verdict(claim, ELSEWHERE, reason=reason))
            continue
        by_task = found[claim.id][0]
        p_for, p_against = (min(1.0, looks * c[claim.id]) for c in corrected)
        verdict = SUPPORTED if p_for < LEVEL else CONTRADICTED if p_against < LEVEL else UNDECIDED
        every = np.concatenate(list(by_task.values()))
        verdicts.append(
            Verdict(
                claim,
                verdict,
                len(every),
                float(every.mean()),
                stats.bootstrap_ci(every, bounds=(-100.0, 100.0)),
                p_for,
                p_against,
                {t: float(d.mean()) for t, d in by_task.items()},
                _would_take(claim, by_task, count * looks) if verdict == UNDECIDED else None,
                found[claim.id][1],
            )
        )
    return verdicts


def _p_values(claim: Claim, by_task: Mapping[str, Differences]) -> tuple[float, float]:
    """(that there is nothing to support the claim, that there is nothing against it)."""
    least = -claim.allowed
    if claim.test == "no_worse_each":
        # every task must pass, so the worst one decides for it; against it, one failing of so many
        each = [(p_above(d, least), p_above(-d, -least)) for d in by_task.values()]
        return max(p for p, _ in each), min(1.0, len(each) * min(p for _, p in each))
    every = np.concatenate(list(by_task.values()))
    return p_above(every, least), p_above(-every, -least)


def p_above(values: Differences, least: float) -> float:
    """p of the null hypothesis that ``values`` are from a distribution whose mean is not above ``least``.

    The share of random weights (Dirichlet, all 1) under which the mean of the values and of one more, as bad as a pair
    can be, is not above it (Gaffke; Learned-Miller and Thomas, arXiv 1905.06208). Nothing is taken to be symmetric: 40
    pairs without a difference do not exclude that one of a hundred loses everything, and p of a mean above -1 is
    0.99^40; where all pairs are at an end of the scale it is the binomial test.
    """
    rng = np.random.default_rng(0)
    worst = -max(WORST, float(np.abs(values).max()))
    shifted = np.append(values, worst) - least
    sums = np.concatenate([rng.standard_exponential((1000, len(shifted))) @ shifted for _ in range(DRAWS // 1000)])
    return (int((sums <= 1e-9).sum()) + 1) / (DRAWS + 1)


def holm(ps: Mapping[str, float], family: int) -> dict[str, float]:
    """p-values corrected for ``family`` of them (Holm's step-down); those that are not here count as larger."""
    order = sorted(ps, key=lambda i: ps[i])
    corrected: dict[str, float] = {}
    largest = 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (family - rank) * ps[i]))
        corrected[i] = largest
    return corrected


def _would_take(claim: Claim, by_task: Mapping[str, Differences], tests: int) -> int | None:
    """Pairs in all that would decide at POWER, by the mean and spread seen; None where the mean seems to be nothing."""
    if claim.test == "no_worse_each":
        worst = min(by_task.values(), key=lambda d: float(d.mean()))
        needed = _pairs_needed(worst, claim.allowed, tests)
        return None if needed is None else needed * len(by_task)
    return _pairs_needed(np.concatenate(list(by_task.values())), claim.allowed, tests)


def _pairs_needed(values: Differences, allowed: float, tests: int) -> int | None:
    """The more of what the spread asks for, and of what even pairs without any would take (see ``p_above``)."""
    mean, spread = float(values.mean()) + allowed, float(values.std(ddof=1)) if len(values) > 1 else 0.0
    if abs(mean) < 1e-9:
        return None
    normal, level = NormalDist(), LEVEL / max(1, tests)
    room = WORST - allowed if mean > 0 else WORST + allowed
    z = normal.inv_cdf(1 - level) + normal.inv_cdf(POWER)
    alike = math.log(level) / math.log(room / (room + abs(mean)))
    return max(len(values) + 1, math.ceil((z * spread / mean) ** 2), math.ceil(alike))
