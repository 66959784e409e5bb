"""Claims of papers, as tests that a model can decide: pairs of methods on the same examples, and a verdict.

A claim stands in the paper's own words (``quote``), beside what is tested of it in ours. It is decided by the paired
differences of its sides over all examples of its tasks: ``better`` asks for a mean above 0, ``no_worse`` for one above
minus ``margin``. Both directions are tested (see ``stats.p_above``), each at half of LEVEL over all claims of a ledger
together (Holm). A gain is also tested for being next to nothing (``NOTHING``), by two one-sided tests.

Differences are read by three measures, which are never merged: the score of answers in points of 100; the likelihood of
the reference answer; the divergence from the full cache. Each has verdicts of its own, at a third of LEVEL. Tasks
where the full cache is at the floor decide nothing in points and are left out there; the other two measures need no
right answers. Tasks of which a side compressed nothing are left out of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil

import numpy as np
import yaml
from numpy.typing import NDArray

from kvbench.base.errors import KvbenchError, unknown
from kvbench.papers import files
from kvbench.papers.measured.our_table import OurTable, scores
from kvbench.papers.spec import catalogue, table_spec
from kvbench.papers.spec.table_spec import Given
from kvbench.plan.advice import at_floor
from kvbench.plan.cells import Cell, Group
from kvbench.report.summary import nothing_compressed
from kvbench.store.labels import label
from kvbench.store.store import ResultStore
from kvbench.tasks.longbench import names
from kvbench.tasks.metrics import metric, stats

TABLE = "claims"
TESTS = ("better", "no_worse", "elsewhere")
LEVEL = 0.05
"""Chance of a wrong verdict anywhere in a ledger by any of its measures, at most."""
POWER = 0.8
"""The chance with which as many examples as an undecided verdict asks for would decide it."""
POINTS, LIKELIHOOD, DIVERGENCE = "points", "likelihood", "divergence"
MEASURES = (POINTS, LIKELIHOOD, DIVERGENCE)
"""What decides a claim, the first that does: the score; where it cannot, the likelihood of the reference answer; then
the divergence from the full cache."""
NOTHING = {POINTS: 0.01, LIKELIHOOD: 0.01, DIVERGENCE: 0.1}
"""The mean difference that is next to nothing: a point of 100, 0.01 nats a token, 10 % of the divergence."""
SHORT = 128
"""The most tokens of an answer whose reference's likelihood says whether the model can give it."""
SUPPORTED, CONTRADICTED, UNDECIDED = "supported", "contradicted", "undecided"
NO_DIFFERENCE, MIXED, FRAGILE = "no difference", "mixed", "fragile"
NOT_DECIDABLE, FLOOR, ELSEWHERE = "not decidable here", "at the floor", "not testable here"
UNMEASURED = "not measured yet"
DECIDED = (SUPPORTED, CONTRADICTED, NO_DIFFERENCE, MIXED, FRAGILE)
VERDICTS = (*DECIDED, UNDECIDED, NOT_DECIDABLE, FLOOR, UNMEASURED, ELSEWHERE)
NATS = 0.1
"""Nats a token that a claim of losing nothing may lose on the answer, or add to the divergence: its margin there."""
SAME = 1e-9
"""Points by which two means are one."""
AS_PRINTED = "windows=paper"
"""Marks a row whose windows are the paper's on a stand-in that otherwise scales them."""

Differences = NDArray[np.float64]


@dataclass(frozen=True)
class Claim:
    """One statement of a paper as a test. ``pairs`` are the compared methods and settings, as tables write them.

    quote: the paper's words, at ``where``. tested: the part that is tested, in our words. test: one of TESTS. margin:
    points of 100 that count as nothing. why: the reason where no score decides the claim.
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
        """Return the mean difference, of 1 or in nats, that must be exceeded."""
        if self.test == "better":
            return 0.0
        return -self.margin / 100 if measure == POINTS else -NATS

    @property
    def columns(self) -> tuple[str, ...]:
        """Return its datasets: those named, else LongBench's 16 English tasks."""
        return self.datasets or names("en")


@dataclass(frozen=True)
class Evidence:
    """Measurements for a claim under one scaling, by one measure.

    differences: of 1, or in nats of which none counts for more than 1, by dataset, [examples, pairs of the claim]; an
    example that is asked several times (MDQA's three positions) counts once. floors: datasets left out. unchanged:
    those left out because a side compressed nothing. waiting: datasets without measurements. cells: ids of both sides.
    ran: each pair as run on this model. possible: the number of examples in the data. reason: why some measurements, or
    all of them, are missing.
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
        """Return each example's difference, the mean over the claim's pairs: only these are independent."""
        return np.concatenate([*(d.mean(1) for d in self.differences.values()), np.zeros(0)])

    @property
    def tasks(self) -> dict[str, float]:
        """Return the mean difference by task, in points."""
        return {task: 100 * float(d.mean()) for task, d in self.differences.items()}

    @property
    def settings(self) -> list[float]:
        """Return the mean difference by pair of the claim, in points."""
        return [] if not self.differences else list(100 * np.concatenate(list(self.differences.values())).mean(0))


@dataclass(frozen=True)
class Verdict:
    """The outcome of a claim by one measure: one of VERDICTS, the mean difference with its interval, and p-values.

    mean, ci, elsewhere: in hundredths, which are points of 100, per cent, or hundredths of a nat.
    p_for, p_against, p_same: corrected p-values of the hypotheses that nothing supports the claim, that nothing speaks
    against it, and that the difference of a claimed gain is more than next to nothing (None of other claims).
    side: supported or contradicted in the mean, where the verdict is mixed or fragile.
    elsewhere: the mean under the other scaling; why_not: the reason where there is none.
    needs: the pairs that would decide an undecided claim at the difference seen, with a chance of POWER.
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
    elsewhere: float | None = None
    why_not: str = ""
    needs: int | None = None

    @property
    def reason(self) -> str:
        """Return the reason why there is no verdict, or why data are missing."""
        return self.claim.why or self.evidence.reason


def deciding(verdicts: Mapping[str, Verdict]) -> str:
    """Return the measure whose verdict is a claim's: the first that decides it, else the first that was tried."""
    decided = [m for m, v in verdicts.items() if v.verdict in DECIDED]
    tried = [m for m, v in verdicts.items() if v.verdict == UNDECIDED]
    return [*decided, *tried, *verdicts][0]


def load(paper: str) -> tuple[Claim, ...]:
    """Read the claims of a paper, in its file's order; raise KvbenchError for a damaged file."""
    (path,) = files(f"{paper}/claims.yaml")
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
        claims = (Claim(paper, **entry) for entry in raw)
        return tuple(replace(c, datasets=tuple(c.datasets), pairs=tuple((a, b) for a, b in c.pairs)) for c in claims)
    except (OSError, TypeError, ValueError, yaml.YAMLError) as error:
        raise KvbenchError(f"{path}: {error}") from None


def papers() -> tuple[str, ...]:
    """Return the papers that have claims, in the order of their tables."""
    names_with_claims = {path.parent.name for path in files("*/claims.yaml")}
    return tuple(p for p in catalogue.in_place() if p in names_with_claims)


def find(wanted: str) -> tuple[str, ...]:
    """Return the papers of ``all`` or of one name; raise UsageError for any other."""
    if wanted not in ("all", *papers()):
        raise unknown("paper", wanted, ("all", *papers()))
    return papers() if wanted == "all" else (wanted,)


def sides(claims: Sequence[Claim], scaled: bool = False) -> list[Given]:
    """Return tables of the rows that a paper's claims compare: one table for each set of datasets.

    ``scaled``: the model runs with scaled-down windows, so each row is added again with the paper's own.
    """
    sides_by_datasets: dict[tuple[str, ...], list[str]] = {}
    for claim in claims:
        for side in (s for pair in claim.pairs for s in pair):
            sides_by_datasets.setdefault(claim.columns, []).extend((side, as_printed(side)) if scaled else (side,))
    paper_tables = table_spec.find(claims[0].paper)
    template = next(t for t in paper_tables if t.measurable)
    workloads = {k: v for t in paper_tables for k, v in t.workloads.items()}
    tables = []
    for columns, rows in sides_by_datasets.items():
        row_parts = (row.partition(" ") for row in dict.fromkeys(rows))
        cells = [
            (template.models()[0], method, setting, dataset, "mean")
            for method, _, setting in row_parts
            for dataset in columns
        ]
        tables.append(table_spec.given(template, cells, table=TABLE, title=TABLE, workloads=workloads))
    return tables


def as_printed(side: str) -> str:
    """Return the name of a side's row that runs with the paper's own windows."""
    return f"{side};{AS_PRINTED}"


def evidence(
    claim: Claim, tables: Iterable[OurTable], windows_as_printed: bool = False, measure: str = POINTS
) -> Evidence:
    """Collect the paired differences by one measure of all examples that all sides of a claim have in ``tables``."""
    ours = next(t for t in tables if {c.dataset for c in t.declared.scores} == set(claim.columns))
    lines = {line.row.name: line for line in ours.lines}
    pairs = [tuple(lines[as_printed(s) if windows_as_printed else s] for s in pair) for pair in claim.pairs]
    reason = next(filter(None, (why for pair in pairs for line in pair for why in (line.refused, line.skipped))), "")
    if reason or ours.run is None:
        return Evidence(reason=reason or "; ".join(dict.fromkeys(ours.absent.values())))
    absent = {
        f"{column.dataset} is not here: {why}": None
        for column in ours.declared.scores
        for pair in pairs
        for line in pair
        if (why := ours.why_absent(line, column))
    }
    store = ours.run.store
    by_task: dict[tuple[str, ...], tuple[str, list[Asked]]] = {}
    for column in ours.declared.scores:
        cells_by_pair = (zip(ours.cells(a, column), ours.cells(b, column), strict=True) for a, b in pairs)
        ways = [
            Asked(sides[0][0][0], tuple((a, b) for (_, a), (_, b) in sides))
            for sides in zip(*cells_by_pair, strict=True)
        ]
        if ways:  # on tiny several datasets are one task
            by_task.setdefault(tuple(a.group.column for a in ways), (column.dataset, ways))
    compared = [pair for _, ways in by_task.values() for asked in ways for pair in asked.pairs]
    cells = [cell for pair in compared for cell in pair]
    if refused := next(filter(None, (store.refusal(c.id) for c in cells)), None):
        return Evidence(reason=refused)
    floors = [name for name, ways in by_task.values() if measure == POINTS and all(a.floored(store) for a in ways)]
    long = [name for name, ways in by_task.values() if measure == LIKELIHOOD and not all(a.short for a in ways)]
    left_out = {*floors, *long}
    idle = {n: sides for n, ways in by_task.values() if (sides := _unchanged(ways, store)) and n not in left_out}
    decidable = {name: ways for name, ways in by_task.values() if name not in left_out and name not in idle}
    differences = {name: _paired(store, ways, claim.test, measure) for name, ways in decidable.items()}
    waiting = [name for name, d in differences.items() if not len(d)]
    reasons = [f"{name}: the full cache is at the floor" for name in floors]
    reasons += [f"{name}: its references are long" for name in long]
    reasons += [f"{name}: nothing was compressed by {', '.join(sides)}" for name, sides in idle.items()]
    reasons += [f"{name}: not measured yet" for name in waiting]
    return Evidence(
        {name: d for name, d in differences.items() if len(d)},
        tuple(floors),
        tuple(waiting),
        tuple(dict.fromkeys(c.id for c in cells)),
        tuple(dict.fromkeys(f"{label(a.identity)} against {label(b.identity)}" for a, b in compared)),
        sum(len({e.id for a in ways for e in a.group.task.examples}) for ways in decidable.values()),
        "; ".join([*reasons, *absent]),
        tuple(idle),
    )


def _unchanged(asked: Sequence[Asked], store: ResultStore) -> list[str]:
    """Return the labels of the sides that compressed nothing of a dataset."""
    sides = {cell.id: (a.group, cell) for a in asked for pair in a.pairs for cell in pair}
    idle = [label(cell.identity) for group, cell in sides.values() if nothing_compressed(group, cell, store)]
    return list(dict.fromkeys(idle))


@dataclass(frozen=True)
class Asked:
    """One way of asking a dataset's examples, with the cells of each pair of a claim."""

    group: Group
    pairs: tuple[tuple[Cell, Cell], ...]

    def floored(self, store: ResultStore) -> bool:
        """Tell whether the full cache is at the floor."""
        full = next(c for c in self.group.cells if not c.chain.stages)
        return at_floor(self.group.task, list(scores(store, self.group, full).values()))

    @property
    def short(self) -> bool:
        """Tell whether the references are short: answers that a model has or has not, no long texts."""
        return self.group.task.examples[0].max_new_tokens <= SHORT


def divergences(store: ResultStore, group: Group, cell: Cell) -> dict[str, float]:
    """Return by example the mean divergence in nats, its floor at least, on the full cache's own answer if compared."""
    samples = {i: s.fidelity for i, s in store.samples(cell.id).items() if s.fidelity}
    texts = {i: texts.get("greedy") or texts["reference"] for i, texts in samples.items()}
    return {e.id: max(float(np.mean(texts[e.id].kl)), texts[e.id].floor) for e in group.examples if e.id in texts}


def nats_lost(store: ResultStore, group: Group, cell: Cell) -> dict[str, float]:
    """Return by example how much less likely the reference answer is than behind the full cache, in nats a token.

    It is ``(ln p(answer) - ln q(answer)) / tokens``, with p behind the full cache and q behind the compressed one.
    """
    samples = store.samples(cell.id)
    lost = {}
    for e in group.examples:
        texts = samples[e.id].fidelity if e.id in samples else None
        if texts and "reference" in texts:  # a reference may be empty
            text = texts["reference"]
            lost[e.id] = text.log_ratio / len(text.kl)
    return lost


READ = {POINTS: scores, LIKELIHOOD: nats_lost, DIVERGENCE: divergences}
"""What each measure reads of a cell, by example."""


def nearer(test: str, x: float, y: float) -> float:
    """Return how much nearer to the full cache a divergence ``x`` is than ``y``, from -1 to 1.

    A claim of a gain: ``(y - x) / (y + x)``, as prompts differ by orders of magnitude and are to count alike. A claim
    of losing nothing: ``y - x`` in nats, each one nat at most.
    """
    return (y - x) / (y + x) if test == "better" else min(1.0, y) - min(1.0, x)


def _paired(store: ResultStore, asked: Sequence[Asked], test: str, measure: str) -> Differences:
    """Return differences [examples, pairs] over the examples that all cells of a way have, the mean over ways.

    They are above 0 where the first side of a pair is the better one. No difference counts for more than 1, a nat.
    """
    ways: dict[str, list[list[float]]] = {}
    for a in asked:
        # less is better of nats that are lost, and of log losses
        less = measure == LIKELIHOOD or metric(a.group.task.metric).shown is not None

        def difference(x: float, y: float, less: bool = less) -> float:
            if measure == DIVERGENCE:
                return nearer(test, x, y)
            return min(1.0, max(-1.0, y - x if less else x - y))

        by_pair = [[READ[measure](store, a.group, cell) for cell in pair] for pair in a.pairs]
        for e in a.group.examples:
            if all(e.id in s for pair in by_pair for s in pair):
                ways.setdefault(e.id, []).append([difference(x[e.id], y[e.id]) for x, y in by_pair])
    return stats.by_example(ways, len(asked[0].pairs))


def decide(
    claims: Sequence[Claim],
    found: Mapping[str, Evidence],
    others: Mapping[str, Evidence] | None = None,
    family: int | None = None,
    measure: str = POINTS,
    measures: int = 1,
) -> list[Verdict]:
    """Return the verdicts on ``claims`` by one measure, corrected together over ``family`` of them (all measured).

    Each direction is decided at half of LEVEL over the number of ``measures`` that are tried in turn.
    ``others``: what the same claims show under another scaling. A verdict that they do not share is fragile; one that
    tasks or settings do not share is mixed.
    """
    measured = {c.id: c for c in claims if len(found.get(c.id, Evidence()).values)}
    count = max(family or 0, len(measured))
    nothing, level = NOTHING[measure], LEVEL / 2 / measures
    above, below, same = {}, {}, {}
    for i, claim in measured.items():
        differences, least = found[i].values, claim.least(measure)
        above[i] = stats.p_above(differences, least)
        below[i] = stats.p_above(-differences, -least)
        same[i] = 1.0
        if claim.test == "better":  # two one-sided tests: the difference is above -nothing, and below it
            same[i] = max(stats.p_above(differences, -nothing), stats.p_above(-differences, -nothing))
    p_for, p_against, p_same = (stats.holm(ps, count) for ps in (above, below, same))
    verdicts = []
    for claim in claims:
        evidence = found.get(claim.id, Evidence())
        if claim.id not in measured:
            verdict = FLOOR if evidence.floors and not evidence.unchanged else ELSEWHERE
            if evidence.waiting:
                verdict = UNMEASURED
            verdicts.append(Verdict(claim, verdict, evidence))
            continue
        corrected = p_for[claim.id], p_against[claim.id], p_same[claim.id]
        other = (others or {}).get(claim.id, Evidence())
        elsewhere = 100 * float(other.values.mean()) if len(other.values) else None
        word, side = _word(claim, evidence, corrected, elsewhere, count, measure, level)
        ci = stats.mean_interval(evidence.values, (-1.0, 1.0))
        verdicts.append(
            Verdict(
                claim,
                word,
                evidence,
                mean=100 * float(evidence.values.mean()),
                ci=None if ci is None else (100 * ci[0], 100 * ci[1]),
                p_for=corrected[0],
                p_against=corrected[1],
                p_same=corrected[2] if claim.test == "better" else None,
                side=side,
                elsewhere=elsewhere,
                why_not=other.reason,
                needs=_needed(evidence.values, claim.least(measure), level / count) if word == UNDECIDED else None,
            )
        )
    return verdicts


def _needed(differences: Differences, least: float, level: float) -> int | None:
    """Return how many pairs would decide at the mean and spread that were seen; None where nothing differs from least.

    ``n = ((z(level) + z(power)) * spread / distance)^2``, at the level that Holm asks of the first of a family.
    """
    distance = abs(float(differences.mean()) - least)
    spread = float(differences.std(ddof=1)) if len(differences) > 1 else 0.0
    if distance < SAME or not spread:
        return None
    return ceil(((stats.normal_quantile(1 - level) + stats.normal_quantile(POWER)) * spread / distance) ** 2)


@lru_cache
def _best_p(test: str, pairs: int, least: float) -> float:
    """Return the p-value if no pair differed, or of a claim of gains all gained everything."""
    return stats.p_above(np.full(pairs, 0.0 if test == "no_worse" else 1.0), least)


def _word(
    claim: Claim,
    evidence: Evidence,
    ps: tuple[float, float, float],
    elsewhere: float | None,
    family: int,
    measure: str,
    level: float,
) -> tuple[str, str]:
    """Return (verdict, side); the side, supported or contradicted, is '' unless the verdict is mixed or fragile."""
    p_for, p_against, p_same = ps
    least = claim.least(measure)
    if claim.test == "better" and p_same < level:
        return NO_DIFFERENCE, ""
    if p_for >= level and p_against >= level:
        best = _best_p(claim.test, evidence.possible, least)
        return (NOT_DECIDABLE if family * best >= level else UNDECIDED), ""
    decided, side = (SUPPORTED, 1) if p_for < level else (CONTRADICTED, -1)
    if elsewhere is not None and side * (elsewhere / 100 - least) < -SAME:
        return FRAGILE, decided
    parts = [d.mean(1) for d in evidence.differences.values()]
    if evidence.differences:
        parts += list(np.concatenate(list(evidence.differences.values())).T)
    return (MIXED, decided) if any(_opposite(part, least, side) for part in parts) else (decided, "")


def _opposite(differences: Differences, least: float, side: int) -> bool:
    """Tell whether a task or setting of its own is told to lie on the other side of ``least``: not by its mean alone.

    The means of a few examples lie on the other side by chance: every claim of sixteen tasks would be mixed.
    """
    if len(differences) < stats.FEWEST:
        return False
    ci = stats.mean_interval(differences, (-1.0, 1.0))
    assert ci is not None  # there are bounds, and FEWEST differences
    return ci[1] < least if side > 0 else ci[0] > least
