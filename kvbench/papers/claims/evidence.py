"""The evidence for claims: the paired differences of their two sides, read from the store for one measure at a time.

A claim's pairs of methods are rows of the measured tables. Both cells of a pair answered the same examples of a
dataset, so their difference is taken example by example.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvbench.papers.claims.claims import (
    DIVERGENCE,
    LIKELIHOOD,
    MEASURES,
    POINTS,
    Claim,
    Differences,
    Evidence,
    as_printed,
)
from kvbench.papers.measured.our_table import OurTable, TableLine, stored_scores
from kvbench.plan import advice
from kvbench.plan.cells import Group
from kvbench.report.unchanged import is_unchanged
from kvbench.store.cell import Cell
from kvbench.store.labels import label_cell
from kvbench.store.sample_reader import SampleReader
from kvbench.store.store import ResultStore
from kvbench.tasks.metrics import metric, stats

SHORT = 128
"""The most tokens of an answer whose reference's likelihood says whether the model can give it."""


@dataclass(frozen=True)
class Comparison:
    """One way of asking a dataset's examples, with the two cells of each pair of a claim."""

    group: Group
    pairs: tuple[tuple[Cell, Cell], ...]

    def at_floor(self, store: ResultStore) -> bool:
        """Tell whether the model fails even with the full cache."""
        full = next(cell for cell in self.group.cells if not cell.chain.stages)
        return advice.at_floor(self.group.task, list(stored_scores(store, self.group, full).values()))

    @property
    def short(self) -> bool:
        """Tell whether the references are short: answers that are right or wrong, not long texts."""
        return self.group.task.examples[0].max_new_tokens <= SHORT


@dataclass(frozen=True)
class _Sides:
    """The cells of both sides of a claim, before a measure reads their differences.

    comparisons: by dataset, one for each way in which its examples are asked.
    unchanged: by dataset, the labels of the sides that compressed nothing. Datasets without any are left out.
    absent: the reasons why datasets cannot be read here.
    """

    claim: Claim
    store: ResultStore
    comparisons: Mapping[str, Sequence[Comparison]]
    unchanged: Mapping[str, Sequence[str]]
    absent: Sequence[str]

    def evidence(self, measure: str) -> Evidence:
        """Return the paired differences by one measure, with the datasets that the measure leaves out."""
        floors: list[str] = []
        long: list[str] = []
        unchanged: list[str] = []
        decidable: dict[str, Sequence[Comparison]] = {}
        for dataset, ways in self.comparisons.items():
            # wrong answers of the full cache say nothing about scores, but likelihoods and divergences can still be
            # read
            if measure == POINTS and all(way.at_floor(self.store) for way in ways):
                floors.append(dataset)
            # the reference is one of many good summaries, so its likelihood does not tell whether the model can write
            # one
            elif measure == LIKELIHOOD and not all(way.short for way in ways):
                long.append(dataset)
            elif dataset in self.unchanged:
                unchanged.append(dataset)
            else:
                decidable[dataset] = ways
        differences: dict[str, Differences] = {}
        waiting: list[str] = []
        possible = 0
        for dataset, ways in decidable.items():
            paired = pair_differences(self.store, ways, self.claim.test, measure)
            if len(paired):
                differences[dataset] = paired
            else:
                waiting.append(dataset)
            # an example that is asked in several ways counts as one
            examples: set[str] = set()
            for way in ways:
                examples.update(e.id for e in way.group.task.examples)
            possible += len(examples)
        reasons = []
        if floors:
            reasons.append(f"the model fails on {', '.join(floors)}")
        if long:
            reasons.append(f"references are long in {', '.join(long)}")
        for dataset in unchanged:
            reasons.append(f"{dataset}: nothing was compressed by {', '.join(self.unchanged[dataset])}")
        if waiting:
            reasons.append(f"not measured yet: {', '.join(waiting)}")
        pairs = _cell_pairs(self.comparisons)
        cells: dict[str, None] = {}
        for first, second in pairs:
            cells |= {first.id: None, second.id: None}
        ran = [f"{label_cell(first.identity)} against {label_cell(second.identity)}" for first, second in pairs]
        return Evidence(
            differences=differences,
            floors=tuple(floors),
            waiting=tuple(waiting),
            cells=tuple(cells),
            ran=tuple(dict.fromkeys(ran)),
            possible=possible,
            reason="; ".join(reasons + list(self.absent)),
            unchanged=tuple(unchanged),
        )


def evidence_by_measure(
    claim: Claim, tables: Iterable[OurTable], measures: Sequence[str] = MEASURES, windows_as_printed: bool = False
) -> dict[str, Evidence]:
    """Return, by measure, the paired differences of all examples that all sides of a claim have in ``tables``.

    ``windows_as_printed`` reads the rows that run with the paper's own windows in place of scaled ones.
    """
    # claims.tables_of_sides makes one table for each set of datasets
    ours = next(table for table in tables if _datasets(table) == set(claim.columns))
    lines = {line.row.name: line for line in ours.lines}
    pairs: list[tuple[TableLine, TableLine]] = []
    for first, second in claim.pairs:
        if windows_as_printed:
            first, second = as_printed(first), as_printed(second)
        pairs.append((lines[first], lines[second]))
    reason = ""
    for pair in pairs:
        for line in pair:
            reason = reason or line.refused or line.skipped
    if reason or ours.run is None:
        reason = reason or "; ".join(dict.fromkeys(ours.absent.values()))
        return dict.fromkeys(measures, Evidence(reason=reason))
    store = ours.run.store
    comparisons = _compare_rows(ours, pairs)
    for cell_pair in _cell_pairs(comparisons):
        for cell in cell_pair:
            refusal = store.refusal(cell.id)
            if refusal:
                return dict.fromkeys(measures, Evidence(reason=refusal))
    # whether a side compressed anything does not depend on the measure, so it is asked once
    unchanged = {}
    for dataset, ways in comparisons.items():
        labels = _unchanged_sides(ways, store)
        if labels:
            unchanged[dataset] = labels
    absent = _why_absent(ours, pairs)
    sides = _Sides(claim, store, comparisons, unchanged=unchanged, absent=absent)
    return {measure: sides.evidence(measure) for measure in measures}


def _datasets(ours: OurTable) -> set[str]:
    """Return the datasets of a table's scores."""
    return {column.dataset for column in ours.declared.scores}


def _compare_rows(ours: OurTable, pairs: Sequence[tuple[TableLine, TableLine]]) -> dict[str, list[Comparison]]:
    """Return, by dataset, the comparisons of a claim's pairs of rows, one for each way of asking its examples."""
    comparisons: dict[str, list[Comparison]] = {}
    tasks_seen: set[tuple[str, ...]] = set()
    for column in ours.declared.scores:
        parts_by_pair = []
        for first, second in pairs:
            parts_by_pair.append(zip(ours.cells(first, column), ours.cells(second, column), strict=True))
        ways = []
        # the i-th part of each row is the i-th way of asking: MDQA has one for each position of the answer
        for parts in zip(*parts_by_pair, strict=True):
            (group, _), _ = parts[0]
            cells = tuple((first_cell, second_cell) for (_, first_cell), (_, second_cell) in parts)
            ways.append(Comparison(group, cells))
        # on the tiny model, several of the paper's datasets share one task; count it once
        tasks = tuple(way.group.column for way in ways)
        if ways and tasks not in tasks_seen:
            tasks_seen.add(tasks)
            comparisons[column.dataset] = ways
    return comparisons


def _cell_pairs(comparisons: Mapping[str, Sequence[Comparison]]) -> list[tuple[Cell, Cell]]:
    """Return the pairs of cells of all datasets."""
    pairs: list[tuple[Cell, Cell]] = []
    for ways in comparisons.values():
        for way in ways:
            pairs.extend(way.pairs)
    return pairs


def _unchanged_sides(ways: Sequence[Comparison], store: ResultStore) -> list[str]:
    """Return the labels of the sides that compressed nothing of a dataset."""
    sides: dict[str, tuple[Group, Cell]] = {}
    for way in ways:
        for pair in way.pairs:
            for cell in pair:
                sides[cell.id] = (way.group, cell)
    labels: dict[str, None] = {}
    for group, cell in sides.values():
        reader = SampleReader(store)
        ids = {example.id for example in group.examples}
        samples = {i: sample for i, sample in reader.read(cell.id).items() if i in ids}
        if is_unchanged(cell, samples, reader):
            labels[label_cell(cell.identity)] = None
    return list(labels)


def _why_absent(ours: OurTable, pairs: Sequence[tuple[TableLine, TableLine]]) -> list[str]:
    """Return the reasons why datasets of a claim's rows cannot be read here, each once."""
    reasons: dict[str, None] = {}
    for column in ours.declared.scores:
        for pair in pairs:
            for line in pair:
                why = ours.why_absent(line, column)
                if why:
                    reasons[f"{column.dataset} is not here: {why}"] = None
    return list(reasons)


def divergences(store: ResultStore, group: Group, cell: Cell) -> dict[str, float]:
    """Return, by example, the mean divergence from the full cache in nats, or its floor if that is higher.

    The divergence is on the full cache's own answer if that was compared, else on the reference answer.
    """
    samples = store.samples(cell.id)
    means = {}
    for e in group.examples:
        texts = samples[e.id].fidelity if e.id in samples else None
        if texts:
            text = texts.get("greedy") or texts["reference"]
            # two divergences below the floor of the arithmetic cannot be told apart
            means[e.id] = max(float(np.mean(text.kl)), text.floor)
    return means


def nats_lost(store: ResultStore, group: Group, cell: Cell) -> dict[str, float]:
    """Return, by example, how much less likely the reference answer is than behind the full cache, in nats a token.

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


READ = {POINTS: stored_scores, LIKELIHOOD: nats_lost, DIVERGENCE: divergences}
"""The function by which each measure reads the numbers of a cell, by example."""


def nearness(test: str, x: float, y: float) -> float:
    """Return how much nearer to the full cache a divergence ``x`` is than ``y``, from -1 to 1.

    For a claimed gain this is ``(y - x) / (y + x)``: prompts differ by orders of magnitude and must count alike. For a
    claim of losing nothing it is ``y - x`` in nats, at most one nat each.
    """
    if test == "better":
        return (y - x) / (y + x)
    return min(1.0, y) - min(1.0, x)


def pair_differences(store: ResultStore, ways: Sequence[Comparison], test: str, measure: str) -> Differences:
    """Return differences [examples, pairs] over the examples that all cells of a way have, as the mean over ways.

    A difference is above 0 if the first side of a pair is the better one. It is in scores out of 1, in nats a token of
    the reference, or as ``nearness`` compares divergences. It is limited to -1 ... 1.
    """
    differences_by_example: dict[str, list[list[float]]] = {}
    for way in ways:
        # smaller is better for lost nats and for log losses
        less_is_better = measure == LIKELIHOOD or metric(way.group.task.metric).shown is not None
        read = READ[measure]
        # for each pair the values of both sides by example
        values_by_pair = []
        for first_cell, second_cell in way.pairs:
            values_by_pair.append((read(store, way.group, first_cell), read(store, way.group, second_cell)))
        for e in way.group.examples:
            if not all(e.id in first and e.id in second for first, second in values_by_pair):
                continue
            # one difference for each pair of the claim
            row = []
            for first, second in values_by_pair:
                x, y = first[e.id], second[e.id]
                if measure == DIVERGENCE:
                    row.append(nearness(test, x, y))
                elif less_is_better:
                    row.append(min(1.0, max(-1.0, y - x)))
                else:
                    row.append(min(1.0, max(-1.0, x - y)))
            differences_by_example.setdefault(e.id, []).append(row)
    return stats.by_example(differences_by_example, len(ways[0].pairs))
