"""The evidence for claims: paired differences of two methods, read from the store for one measure at a time.

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


@dataclass(frozen=True)
class Comparison:
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
        # the run of a table measures the full cache in every group; its chain has no stages
        full = next(cell for cell in self.group.cells if cell.chain.is_full)
        return advice.at_floor(self.group.task, list(numbers.read(POINTS, self.group, full).values()))

    @property
    def short(self) -> bool:
        """True if the references are short: answers that are right or wrong, not long texts."""
        # all examples of a paper's task allow answers of the same length
        return self.group.task.examples[0].max_new_tokens <= SHORT


@dataclass(frozen=True)
class _Sides:
    """The cells of both sides of a claim. ``read_evidence`` reads their differences by one measure.

    comparisons_of: by dataset, a comparison for each way in which its examples are asked.
    unchanged: by dataset, the labels of the sides that compressed nothing. A dataset on which every side compressed
    has no entry.
    absent: the reasons why datasets cannot be read here.
    """

    claim: Claim
    numbers: NumberReader
    comparisons_of: Mapping[str, Sequence[Comparison]]
    unchanged: Mapping[str, Sequence[str]]
    absent: Sequence[str]

    def read_evidence(self, measure: str) -> Evidence:
        """Return the paired differences by one measure, with the datasets that the measure leaves out."""
        floors: list[str] = []
        long: list[str] = []
        unchanged: list[str] = []
        from_full: list[str] = []
        decidable: list[str] = []
        for dataset, comparisons in self.comparisons_of.items():
            # scores say nothing if the full cache fails, but likelihoods and divergences still do
            if measure == POINTS and all(comparison.at_floor(self.numbers) for comparison in comparisons):
                floors.append(dataset)
            # a long reference is one of many good texts: its likelihood does not tell whether the model can write one
            elif measure == LIKELIHOOD and not all(comparison.short for comparison in comparisons):
                long.append(dataset)
            # the full cache does not diverge from itself, so that every method loses its whole divergence to it
            elif measure == DIVERGENCE and _is_against_full(comparisons):
                from_full.append(dataset)
            elif dataset in self.unchanged:
                unchanged.append(dataset)
            else:
                decidable.append(dataset)
        differences: dict[str, Differences] = {}
        waiting: list[str] = []
        for dataset in decidable:
            paired = pair_differences(self.numbers, self.comparisons_of[dataset], measure)
            if len(paired):
                differences[dataset] = paired
            else:
                waiting.append(dataset)
        pairs = _list_cell_pairs(self.comparisons_of)
        cell_ids = [cell.id for pair in pairs for cell in pair]
        ran = [f"{label_cell(first.identity)} against {label_cell(second.identity)}" for first, second in pairs]
        return Evidence(
            differences=differences,
            floors=tuple(floors),
            waiting=tuple(waiting),
            # several pairs and datasets can share a cell: name each once
            cells=tuple(dict.fromkeys(cell_ids)),
            ran=tuple(dict.fromkeys(ran)),
            possible=sum(_count_examples(self.comparisons_of[dataset]) for dataset in decidable),
            reason=self._join_reasons(
                floors=floors, long=long, from_full=from_full, unchanged=unchanged, waiting=waiting
            ),
            unchanged=tuple(unchanged),
        )

    def _join_reasons(
        self,
        *,
        floors: Sequence[str],
        long: Sequence[str],
        from_full: Sequence[str],
        unchanged: Sequence[str],
        waiting: Sequence[str],
    ) -> str:
        """Return why measurements on some datasets are missing; '' if none are."""
        reasons = []
        if floors:
            reasons.append(f"the model fails on {', '.join(floors)}")
        if long:
            reasons.append(f"references are long in {', '.join(long)}")
        if from_full:
            reasons.append("a side is the full cache, whose divergence from itself is 0")
        for dataset in unchanged:
            reasons.append(f"{dataset}: nothing was compressed by {', '.join(self.unchanged[dataset])}")
        if waiting:
            reasons.append(f"not measured yet: {', '.join(waiting)}")
        reasons.extend(self.absent)
        return "; ".join(reasons)


def _is_against_full(comparisons: Iterable[Comparison]) -> bool:
    return any(second.chain.is_full for comparison in comparisons for _, second in comparison.pairs)


def _count_examples(comparisons: Iterable[Comparison]) -> int:
    ids: set[str] = set()
    for comparison in comparisons:
        ids.update(example.id for example in comparison.group.task.examples)
    return len(ids)


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
    ours = next(table for table in tables if _list_datasets(table) == set(claim.columns))
    line_of = {line.name: line for line in ours.lines}
    pairs: list[tuple[Line, Line]] = []
    for first, second in claim.pairs:
        if windows_as_printed:
            first, second = keep_printed_windows(first), keep_printed_windows(second)
        pairs.append((line_of[first], line_of[second]))
    # the first reason is enough: without one side of a pair the claim has no evidence at all
    reason = ""
    for pair in pairs:
        for line in pair:
            reason = reason or line.refused or line.skipped
    if reason or ours.run is None:
        # if every row could run, there is no run because no dataset can be read
        reason = reason or "; ".join(dict.fromkeys(ours.absent.values()))
        return dict.fromkeys(measures, Evidence(reason=reason))
    store = ours.run.store
    if numbers is None:
        numbers = NumberReader(store)
    comparisons_of = _compare_rows(ours, pairs)
    for cell_pair in _list_cell_pairs(comparisons_of):
        for cell in cell_pair:
            # a run can refuse a cell that its plan allowed
            refusal = store.refusal(cell.id)
            if refusal:
                return dict.fromkeys(measures, Evidence(reason=refusal))
    # whether a side compressed anything is the same for all measures, so it is read once
    unchanged = {}
    for dataset, comparisons in comparisons_of.items():
        labels = _list_unchanged_sides(comparisons, numbers)
        if labels:
            unchanged[dataset] = labels
    absent = _list_missing_datasets(ours, pairs)
    sides = _Sides(claim, numbers, comparisons_of, unchanged=unchanged, absent=absent)
    return {measure: sides.read_evidence(measure) for measure in measures}


def _list_datasets(ours: PaperTable) -> set[str]:
    return {column.dataset for column in ours.spec.scores}


def _compare_rows(ours: PaperTable, pairs: Sequence[tuple[Line, Line]]) -> dict[str, list[Comparison]]:
    comparisons_of: dict[str, list[Comparison]] = {}
    tasks_seen: set[tuple[str, ...]] = set()
    for column in ours.spec.scores:
        parts_by_pair = []
        for first, second in pairs:
            parts_by_pair.append(zip(ours.find_parts(first, column), ours.find_parts(second, column), strict=True))
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


def _list_cell_pairs(comparisons_of: Mapping[str, Sequence[Comparison]]) -> list[tuple[Cell, Cell]]:
    pairs: list[tuple[Cell, Cell]] = []
    for comparisons in comparisons_of.values():
        for comparison in comparisons:
            pairs.extend(comparison.pairs)
    return pairs


def _list_unchanged_sides(comparisons: Sequence[Comparison], numbers: NumberReader) -> list[str]:
    # ids keep each side once, since several pairs of a claim can share it
    sides: dict[str, tuple[Group, Cell]] = {}
    for comparison in comparisons:
        for pair in comparison.pairs:
            for cell in pair:
                sides[cell.id] = (comparison.group, cell)
    labels: dict[str, None] = {}
    for group, cell in sides.values():
        if numbers.is_unchanged(group, cell):
            labels[label_cell(cell.identity)] = None
    return list(labels)


def _list_missing_datasets(ours: PaperTable, pairs: Sequence[tuple[Line, Line]]) -> list[str]:
    reasons: dict[str, None] = {}
    for column in ours.spec.scores:
        for pair in pairs:
            for line in pair:
                reason = ours.why_absent(line, column)
                if reason:
                    reasons[f"{column.dataset} is missing: {reason}"] = None
    return list(reasons)


def _take_scores(samples: Mapping[str, Sample]) -> dict[str, float]:
    return {example: sample.score for example, sample in samples.items() if sample.score is not None}


def _take_divergences(samples: Mapping[str, Sample]) -> dict[str, float]:
    means = {}
    for example, sample in samples.items():
        # each name has the texts whose tokens were compared with the full cache's predictions
        texts = sample.fidelity
        if texts:
            text = texts.get("greedy") or texts["reference"]
            # two divergences below the floor of the arithmetic cannot be told apart
            means[example] = max(float(np.mean(text.kl)), text.floor)
    return means


def _take_nats_lost(samples: Mapping[str, Sample]) -> dict[str, float]:
    lost = {}
    for example, sample in samples.items():
        texts = sample.fidelity
        # an empty reference has no tokens to compare
        if texts and "reference" in texts:
            text = texts["reference"]
            # kl has one number for each token
            tokens = len(text.kl)
            lost[example] = text.log_ratio / tokens
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

    comparisons: those of the dataset, one for each way of asking, at least one.
    measure: one of MEASURES.
    """
    differences_by_example: dict[str, list[list[float]]] = {}
    for comparison in comparisons:
        group = comparison.group
        # lost nats and log losses are better if smaller; only metrics of log losses have a ``formula``
        less_is_better = measure == LIKELIHOOD or metric(group.task.metric).formula is not None
        # one entry for each pair of the claim: the values of its two sides by example id
        values_by_pair = []
        for first_cell, second_cell in comparison.pairs:
            first_values = numbers.read(measure, group, first_cell)
            second_values = numbers.read(measure, group, second_cell)
            values_by_pair.append((first_values, second_values))
        for example in group.examples:
            if not all(example.id in first and example.id in second for first, second in values_by_pair):
                continue
            # row: one difference for each pair of the claim
            row = []
            for first_values, second_values in values_by_pair:
                first, second = first_values[example.id], second_values[example.id]
                # the tests and intervals of ``stats`` need bounded differences, and nats have no bound
                if measure == DIVERGENCE:
                    row.append(compare_nearness(first, second))
                elif less_is_better:
                    row.append(min(1.0, max(-1.0, second - first)))
                else:
                    row.append(min(1.0, max(-1.0, first - second)))
            differences_by_example.setdefault(example.id, []).append(row)
    pairs = len(comparisons[0].pairs)
    return stats.average_by_example(differences_by_example, pairs)
