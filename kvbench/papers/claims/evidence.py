"""The evidence for claims: paired differences of two methods, read from the store for one measure at a time.

A claim's pairs of methods are rows of the measured tables. Both cells of a pair answered the same examples of a
dataset, so their difference is taken example by example.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from kvbench.papers.claims.claims import (
    DIVERGENCE,
    LIKELIHOOD,
    MEASURES,
    POINTS,
    Claim,
    Differences,
    Evidence,
    keep_printed_windows,
)
from kvbench.papers.measured.plan import Line, PaperTable
from kvbench.plan import advice
from kvbench.plan.cells import Group
from kvbench.report.unchanged import is_unchanged
from kvbench.store.cell import Cell
from kvbench.store.labels import label_cell
from kvbench.store.results import Sample
from kvbench.store.sample_reader import SampleReader
from kvbench.store.store import ResultStore
from kvbench.tasks.metrics import metric, stats

SHORT = 128
"""Tasks with answers of at most so many tokens are compared by the likelihood of the reference answer.

A longer reference is one of many good texts, so its likelihood says little about what the model can write.
"""


class NumberReader:
    """The numbers of a store's cells by measure, and which cells are unchanged by compression. Both are kept.

    The samples are not kept, since many claims compare the same cells and all of their samples would fill memory.

    store: the store that is read. Samples that are stored later do not show in what was read before.
    """

    def __init__(self, store: ResultStore) -> None:
        self.store = store
        self._numbers: dict[str, dict[str, dict[str, float]]] = {}
        self._unchanged: dict[tuple[str, tuple[str, ...]], bool] = {}

    def read(self, measure: str, group: Group, cell: Cell) -> dict[str, float]:
        """Return the numbers of a cell by one measure, by example id, in the order of the group's examples."""
        if cell.id not in self._numbers:
            samples = self.store.samples(cell.id)
            self._numbers[cell.id] = {name: take(samples) for name, take in TAKE.items()}
        numbers = self._numbers[cell.id][measure]
        # the store may hold examples of a larger run
        return {example.id: numbers[example.id] for example in group.examples if example.id in numbers}

    def is_unchanged(self, group: Group, cell: Cell) -> bool:
        """Return True if a cell's method compressed nothing on the group's examples."""
        ids = tuple(example.id for example in group.examples)
        if (cell.id, ids) not in self._unchanged:
            # a sample reader keeps all samples that it read, so each cell gets one of its own
            reader = SampleReader(self.store)
            stored = reader.read(cell.id)
            samples = {example_id: stored[example_id] for example_id in ids if example_id in stored}
            self._unchanged[cell.id, ids] = is_unchanged(cell, samples, reader)
        return self._unchanged[cell.id, ids]


class Comparison(NamedTuple):
    """A claim's pairs of cells on one task of a dataset.

    A dataset has a comparison for each of its tasks: MDQA's examples are asked in three ways, with the answer at the
    first, a middle or the last position.

    group: the task with all its measured cells, the full cache's among them.
    pairs: for each pair of the claim, the cells of its first and its second side.
    """

    group: Group
    pairs: tuple[tuple[Cell, Cell], ...]

    def at_floor(self, numbers: NumberReader) -> bool:
        """Return True if the model fails on this task even with the full cache."""
        # the run of a table measures the full cache in every group
        full = next(cell for cell in self.group.cells if cell.chain.is_full)
        return advice.at_floor(self.group.task, list(numbers.read(POINTS, self.group, full).values()))

    @property
    def against_full(self) -> bool:
        """True if a second side is the full cache."""
        return any(second.chain.is_full for _, second in self.pairs)

    @property
    def short(self) -> bool:
        """True if the references are short: answers that are right or wrong, not long texts."""
        # all examples of a paper's task allow answers of the same length
        return self.group.task.examples[0].max_new_tokens <= SHORT


def read_evidence(
    claim: Claim,
    tables: Iterable[PaperTable],
    measures: Sequence[str] = MEASURES,
    windows_as_printed: bool = False,
    numbers: NumberReader | None = None,
) -> dict[str, Evidence]:
    """Return the evidence for a claim by measure: paired differences, or the reason why there are none.

    tables: the measured tables of the claim's paper.
    windows_as_printed: True for the rows that run with the paper's own windows in place of scaled ones. Only the tiny
    model's tables have such rows.
    numbers: the reader of the tables' store, if the caller reads evidence for several claims.
    """
    # claims.make_tables_of_sides makes one table for each choice of datasets, so the claim's table is among them
    table = next(t for t in tables if _name_datasets(t) == set(claim.columns))
    line_of = {line.name: line for line in table.lines}
    pairs: list[tuple[Line, Line]] = []
    for first, second in claim.pairs:
        if windows_as_printed:
            first, second = keep_printed_windows(first), keep_printed_windows(second)
        pairs.append((line_of[first], line_of[second]))
    # the first reason is enough: without one side of a pair the claim has no evidence at all
    for line in chain.from_iterable(pairs):
        if line.refused or line.skipped:
            return dict.fromkeys(measures, Evidence(reason=line.refused or line.skipped))
    # every row could run, so there is no run because no dataset can be read
    if table.run is None:
        return dict.fromkeys(measures, Evidence(reason="; ".join(dict.fromkeys(table.absent.values()))))
    numbers = numbers or NumberReader(table.run.store)
    comparisons_of = _compare_rows(table, pairs)
    cell_pairs: list[tuple[Cell, Cell]] = []
    for comparison in chain.from_iterable(comparisons_of.values()):
        cell_pairs += comparison.pairs
    # several pairs and datasets can share a cell: name each once
    cells = {cell.id: cell for cell in chain.from_iterable(cell_pairs)}
    for cell in cells.values():
        # a run can refuse a cell that its plan allowed
        refusal = table.run.store.refusal(cell.id)
        if refusal:
            return dict.fromkeys(measures, Evidence(reason=refusal))
    # whether a side compressed anything is the same for all measures, so it is read once
    unchanged = {dataset: _list_unchanged_sides(some, numbers) for dataset, some in comparisons_of.items()}
    absent = _list_missing_datasets(table, pairs)
    ran = [f"{label_cell(first.identity)} against {label_cell(second.identity)}" for first, second in cell_pairs]
    evidence_of = {}
    for measure in measures:
        evidence_of[measure] = _read_measure(
            measure,
            numbers,
            comparisons_of,
            unchanged,
            absent,
            cells=tuple(cells),
            ran=tuple(dict.fromkeys(ran)),
        )
    return evidence_of


def _read_measure(
    measure: str,
    numbers: NumberReader,
    comparisons_of: Mapping[str, Sequence[Comparison]],
    unchanged_sides: Mapping[str, Sequence[str]],
    absent: Sequence[str],
    *,
    cells: tuple[str, ...],
    ran: tuple[str, ...],
) -> Evidence:
    """Return the paired differences by one measure, with the datasets that the measure leaves out."""
    floors: list[str] = []
    long: list[str] = []
    from_full: list[str] = []
    unchanged: list[str] = []
    decidable: list[str] = []
    for dataset, comparisons in comparisons_of.items():
        against_full = any(comparison.against_full for comparison in comparisons)
        # scores say nothing if the full cache fails, but likelihoods and divergences still do
        if measure == POINTS and all(comparison.at_floor(numbers) for comparison in comparisons):
            floors.append(dataset)
        # a long reference is one of many good texts: its likelihood does not tell whether the model can write one
        elif measure == LIKELIHOOD and not all(comparison.short for comparison in comparisons):
            long.append(dataset)
        # the full cache does not diverge from itself, so that every method loses its whole divergence to it
        elif measure == DIVERGENCE and against_full:
            from_full.append(dataset)
        elif unchanged_sides[dataset]:
            unchanged.append(dataset)
        else:
            decidable.append(dataset)
    paired = {dataset: pair_differences(numbers, comparisons_of[dataset], measure) for dataset in decidable}
    waiting = [dataset for dataset, differences in paired.items() if not len(differences)]
    reasons = []
    if floors:
        reasons.append(f"the model fails on {', '.join(floors)}")
    if long:
        reasons.append(f"references are long in {', '.join(long)}")
    if from_full:
        reasons.append("a side is the full cache, whose divergence from itself is 0")
    reasons += [f"{name}: nothing was compressed by {', '.join(unchanged_sides[name])}" for name in unchanged]
    if waiting:
        reasons.append(f"not measured yet: {', '.join(waiting)}")
    possible = 0
    for dataset in decidable:
        # an example that is asked in several ways counts as one
        ids: set[str] = set()
        for comparison in comparisons_of[dataset]:
            ids.update(example.id for example in comparison.group.task.examples)
        possible += len(ids)
    return Evidence(
        differences={dataset: differences for dataset, differences in paired.items() if len(differences)},
        floors=tuple(floors),
        waiting=tuple(waiting),
        cells=cells,
        ran=ran,
        possible=possible,
        reason="; ".join(reasons + list(absent)),
        unchanged=tuple(unchanged),
    )


def _name_datasets(table: PaperTable) -> set[str]:
    return {column.dataset for column in table.spec.scores}


def _compare_rows(table: PaperTable, pairs: Sequence[tuple[Line, Line]]) -> dict[str, list[Comparison]]:
    """Return a claim's comparisons by dataset, one for each way of asking the dataset's examples."""
    comparisons_of: dict[str, list[Comparison]] = {}
    tasks_seen: set[tuple[str, ...]] = set()
    for column in table.spec.scores:
        parts_by_pair = []
        for first, second in pairs:
            parts_by_pair.append(zip(table.find_parts(first, column), table.find_parts(second, column), strict=True))
        comparisons = []
        # a part is (group, cell) of one task; the i-th parts of all rows belong to one group, and so to the i-th way of
        # asking, such as MDQA's i-th position of the answer
        for parts in zip(*parts_by_pair, strict=True):
            (group, _), _ = parts[0]
            cells = tuple((first_cell, second_cell) for (_, first_cell), (_, second_cell) in parts)
            comparisons.append(Comparison(group, cells))
        # on the tiny model, several of the paper's datasets share one task; count it once
        tasks = tuple(comparison.group.column for comparison in comparisons)
        if comparisons and tasks not in tasks_seen:
            tasks_seen.add(tasks)
            comparisons_of[column.dataset] = comparisons
    return comparisons_of


def _list_unchanged_sides(comparisons: Sequence[Comparison], numbers: NumberReader) -> list[str]:
    # ids keep each side once, since several pairs of a claim can share it
    sides = {}
    for comparison in comparisons:
        for cell in chain.from_iterable(comparison.pairs):
            sides[cell.id] = comparison.group, cell
    labels = [label_cell(cell.identity) for group, cell in sides.values() if numbers.is_unchanged(group, cell)]
    return list(dict.fromkeys(labels))


def _list_missing_datasets(table: PaperTable, pairs: Sequence[tuple[Line, Line]]) -> list[str]:
    reasons: dict[str, None] = {}
    for column in table.spec.scores:
        for line in chain.from_iterable(pairs):
            reason = table.why_absent(line, column)
            if reason:
                reasons[f"{column.dataset} is missing: {reason}"] = None
    return list(reasons)


def _take_scores(samples: Mapping[str, Sample]) -> dict[str, float]:
    return {example: sample.score for example, sample in samples.items() if sample.score is not None}


def _take_divergences(samples: Mapping[str, Sample]) -> dict[str, float]:
    # the mean divergence from the full cache in nats a token, or its rounding floor if higher: two divergences below
    # the floor of the arithmetic cannot be told apart
    means = {}
    for example, sample in samples.items():
        if sample.fidelity:
            # on the full cache's own answer if that was compared, else on the reference answer
            text = sample.fidelity.get("greedy") or sample.fidelity["reference"]
            means[example] = max(float(np.mean(text.kl)), text.floor)
    return means


def _take_nats_lost(samples: Mapping[str, Sample]) -> dict[str, float]:
    # (ln p(answer) - ln q(answer)) / tokens, with p behind the full cache and q behind the compressed one
    lost = {}
    for example, sample in samples.items():
        # an empty reference has no tokens to compare
        if sample.fidelity and "reference" in sample.fidelity:
            text = sample.fidelity["reference"]
            # kl has one number for each token
            lost[example] = text.log_ratio / len(text.kl)
    return lost


TAKE = {POINTS: _take_scores, LIKELIHOOD: _take_nats_lost, DIVERGENCE: _take_divergences}
"""By measure, the function that takes the numbers of a cell from its samples, by example id."""


def compare_nearness(first: float, second: float) -> float:
    """Return, from -1 to 1, how much nearer the first of two methods is to the full cache; above 0 if it is nearer.

    first, second: the methods' divergences from the full cache, in nats a token.

    It is the contrast ``(second - first) / (second + first)``. The divergences of prompts differ by orders of
    magnitude, and each prompt must count alike.
    """
    # two methods that both equal the full cache exactly have no ratio
    if first == second == 0:
        return 0.0
    return (second - first) / (second + first)


def pair_differences(numbers: NumberReader, comparisons: Sequence[Comparison], measure: str) -> Differences:
    """Return one dataset's differences between the two sides of each pair, example by example: [examples, pairs].

    A difference is above 0 if the first side of a pair is the better one. It is in scores out of 1, in nats a token of
    the reference, or as ``compare_nearness`` compares divergences. It is limited to -1 ... 1. An example counts in a
    comparison if all cells answered it there, and its row is the mean over the comparisons.
    """
    differences_by_example: dict[str, list[list[float]]] = {}
    for group, pairs in comparisons:
        # lost nats and log losses are better if smaller; only metrics of log losses have a ``formula``
        less_is_better = measure == LIKELIHOOD or metric(group.task.metric).formula is not None
        # for each pair of the claim, the values of its two sides by example id
        values = []
        for first_cell, second_cell in pairs:
            values.append((numbers.read(measure, group, first_cell), numbers.read(measure, group, second_cell)))
        for example in group.examples:
            if not all(example.id in side for side in chain.from_iterable(values)):
                continue
            row = []
            for first_values, second_values in values:
                first, second = first_values[example.id], second_values[example.id]
                # the tests and intervals of ``stats`` need bounded differences, and nats have no bound
                if measure == DIVERGENCE:
                    row.append(compare_nearness(first, second))
                else:
                    difference = second - first if less_is_better else first - second
                    row.append(min(1.0, max(-1.0, difference)))
            differences_by_example.setdefault(example.id, []).append(row)
    return stats.average_by_example(differences_by_example, len(comparisons[0].pairs))
