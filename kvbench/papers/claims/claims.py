"""Claims of papers, as tests that a model can decide: pairs of methods on the same examples, and a verdict.

A claim stands in the paper's own words (``quote``), beside what is tested of it in ours. It is decided by the paired
differences of its sides over all examples of its tasks, in points of 100: ``better`` asks for a mean above 0,
``no_worse`` for one above minus ``margin``. Both directions are tested (see ``stats.p_above``), each at half of LEVEL
over all claims of a ledger together (Holm). Tasks where the full cache is at the floor decide nothing and are left out,
and so are those of which a side compressed nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import yaml
from numpy.typing import NDArray

from kvbench.errors import KvbenchError, unknown
from kvbench.metrics import metric, stats
from kvbench.papers import files
from kvbench.papers.measured.our_table import OurTable, scores
from kvbench.papers.spec import catalogue, table_spec
from kvbench.papers.spec.table_spec import Given
from kvbench.run.advice import at_floor
from kvbench.run.labels import label
from kvbench.run.plan import Cell, Group
from kvbench.run.store import ResultStore
from kvbench.run.summary import nothing_compressed
from kvbench.tasks.longbench import names

TABLE = "claims"
TESTS = ("better", "no_worse", "elsewhere")
LEVEL = 0.05
"""Chance of a wrong verdict of either kind anywhere in a ledger, at most."""
SUPPORTED, CONTRADICTED, UNDECIDED = "supported", "contradicted", "undecided"
MIXED, FRAGILE = "mixed", "fragile"
NOT_DECIDABLE, FLOOR, ELSEWHERE = "not decidable here", "at the floor", "not testable here"
UNMEASURED = "not measured yet"
VERDICTS = (SUPPORTED, CONTRADICTED, MIXED, FRAGILE, UNDECIDED, NOT_DECIDABLE, FLOOR, UNMEASURED, ELSEWHERE)
NATS = 0.1
"""Mean divergence in nats that a claim of losing nothing may add: its margin where it is told in nats."""
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

    @property
    def least(self) -> float:
        """Return the mean difference, of 1, that must be exceeded."""
        return 0.0 if self.test == "better" else -self.margin / 100

    @property
    def columns(self) -> tuple[str, ...]:
        """Return its datasets: those named, else LongBench's 16 English tasks."""
        return self.datasets or names("en")


@dataclass(frozen=True)
class Evidence:
    """Measurements for a claim under one scaling.

    differences: of 1, by dataset, [examples, pairs of the claim]; an example that is asked several times (MDQA's three
    positions) counts once. floors: datasets left out. unchanged: those left out because a side compressed nothing.
    waiting: datasets without measurements. cells: ids of both sides. ran: each pair as run on this model. possible: the
    number of examples in the data. reason: why some measurements, or all of them, are missing.
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
    """The outcome of a claim: one of VERDICTS, the mean difference in points with its interval, and p-values.

    p_for, p_against: corrected p-values of the hypotheses that nothing supports the claim, and that nothing speaks
    against it. side: supported or contradicted in the mean, where the verdict is mixed or fragile. elsewhere: the mean
    under the other scaling; why_not: the reason where there is none.
    """

    claim: Claim
    verdict: str
    evidence: Evidence = field(default_factory=Evidence)
    mean: float | None = None
    ci: tuple[float, float] | None = None
    p_for: float | None = None
    p_against: float | None = None
    side: str = ""
    elsewhere: float | None = None
    why_not: str = ""

    @property
    def reason(self) -> str:
        """Return the reason why there is no verdict, or why data are missing."""
        return self.claim.why or self.evidence.reason


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
    claim: Claim, tables: Iterable[OurTable], windows_as_printed: bool = False, in_nats: bool = False
) -> Evidence:
    """Collect the paired differences of all examples that all sides of a claim have in ``tables``.

    ``in_nats``: of divergences from the full cache in place of scores (``nearer``); no full cache is at a floor.
    """
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
    floors = [name for name, ways in by_task.values() if not in_nats and all(a.floored(store) for a in ways)]
    idle = {name: sides for name, ways in by_task.values() if (sides := _unchanged(ways, store)) and name not in floors}
    decidable = {name: ways for name, ways in by_task.values() if name not in floors and name not in idle}
    differences = {name: _paired(store, ways, claim.test if in_nats else "") for name, ways in decidable.items()}
    waiting = [name for name, d in differences.items() if not len(d)]
    reasons = [f"{name}: the full cache is at the floor" for name in floors]
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


def divergences(store: ResultStore, group: Group, cell: Cell) -> dict[str, float]:
    """Return by example the mean divergence in nats, its floor at least, on the full cache's own answer if compared."""
    samples = {i: s.fidelity for i, s in store.samples(cell.id).items() if s.fidelity}
    texts = {i: texts.get("greedy") or texts["reference"] for i, texts in samples.items()}
    return {e.id: max(float(np.mean(texts[e.id].kl)), texts[e.id].floor) for e in group.examples if e.id in texts}


def nearer(test: str, x: float, y: float) -> float:
    """Return how much nearer to the full cache a divergence ``x`` is than ``y``, from -1 to 1.

    A claim of a gain: ``(y - x) / (y + x)``, as prompts differ by orders of magnitude and are to count alike. A claim
    of losing nothing: ``y - x`` in nats, each one nat at most.
    """
    return (y - x) / (y + x) if test == "better" else min(1.0, y) - min(1.0, x)


def _paired(store: ResultStore, asked: Sequence[Asked], in_nats: str = "") -> Differences:
    """Return differences [examples, pairs] over the examples that all cells of a way have, the mean over ways.

    Less is better of log losses. No difference counts for more than 1, a nat. ``in_nats``: the test of divergences.
    """
    ways: dict[str, list[list[float]]] = {}
    read = divergences if in_nats else scores
    for a in asked:
        sign = -1.0 if not in_nats and metric(a.group.task.metric).shown is not None else 1.0

        def difference(x: float, y: float, sign: float = sign) -> float:
            return nearer(in_nats, x, y) if in_nats else min(1.0, max(-1.0, sign * (x - y)))

        by_pair = [[read(store, a.group, cell) for cell in pair] for pair in a.pairs]
        for e in a.group.examples:
            if all(e.id in s for pair in by_pair for s in pair):
                ways.setdefault(e.id, []).append([difference(x[e.id], y[e.id]) for x, y in by_pair])
    return stats.by_example(ways, len(asked[0].pairs))


def decide(
    claims: Sequence[Claim],
    found: Mapping[str, Evidence],
    others: Mapping[str, Evidence] | None = None,
    family: int | None = None,
) -> list[Verdict]:
    """Return the verdicts on ``claims``, corrected together over ``family`` of them (all that are measured).

    ``others``: what the same claims show under another scaling. A verdict that they do not share is fragile; one that
    tasks or settings do not share is mixed.
    """
    measured = {c.id: c for c in claims if len(found.get(c.id, Evidence()).values)}
    count = max(family or 0, len(measured))
    # p-values of both directions; the sign turns a test for less into one for more
    corrected = [
        stats.holm({i: stats.p_above(sign * found[i].values, sign * c.least) for i, c in measured.items()}, count)
        for sign in (1, -1)
    ]
    verdicts = []
    for claim in claims:
        evidence = found.get(claim.id, Evidence())
        if claim.id not in measured:
            verdict = FLOOR if evidence.floors and not evidence.unchanged else ELSEWHERE
            if evidence.waiting:
                verdict = UNMEASURED
            verdicts.append(Verdict(claim, verdict, evidence))
            continue
        p_for, p_against = (c[claim.id] for c in corrected)
        other = (others or {}).get(claim.id, Evidence())
        elsewhere = 100 * float(other.values.mean()) if len(other.values) else None
        word, side = _word(claim, evidence, p_for, p_against, elsewhere, count)
        mean, ci = 100 * float(evidence.values.mean()), stats.betting_ci(evidence.values)
        points = (100 * ci[0], 100 * ci[1])
        verdicts.append(Verdict(claim, word, evidence, mean, points, p_for, p_against, side, elsewhere, other.reason))
    return verdicts


def _word(
    claim: Claim, evidence: Evidence, p_for: float, p_against: float, elsewhere: float | None, family: int
) -> tuple[str, str]:
    """Return (verdict, side); the side, supported or contradicted, is '' unless the verdict is mixed or fragile."""
    decided = UNDECIDED
    if p_for < LEVEL / 2 or p_against < LEVEL / 2:
        decided = SUPPORTED if p_for < LEVEL / 2 else CONTRADICTED
    if decided == UNDECIDED:
        # even if no pair of all that the data would give differed, or of a claim of gains all gained everything
        most_possible = np.full(evidence.possible, 0.0 if claim.test == "no_worse" else 1.0)
        return (NOT_DECIDABLE if family * stats.p_above(most_possible, claim.least) >= LEVEL / 2 else UNDECIDED), ""
    side = 1 if decided == SUPPORTED else -1
    least = 100 * claim.least
    if elsewhere is not None and side * (elsewhere - least) < -SAME:
        return FRAGILE, decided
    opposite = any(side * (m - least) < -SAME for m in (*evidence.settings, *evidence.tasks.values()))
    return (MIXED, decided) if opposite else (decided, "")
