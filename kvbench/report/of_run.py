"""Make the ``Report`` of a run from stored samples. Each cell's samples are read from disk once.

A cell is one method on one task, and a group has the cells of one task. A method is a chain of stages, and the full
cache is the chain without stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from kvbench.plan.advice import about_floors, at_floor
from kvbench.plan.cells import Group
from kvbench.plan.run_plan import RunPlan
from kvbench.report.data import CellResult, Delta, ReportColumn, ReportRow
from kvbench.report.notes import (
    note_batches,
    note_cuts,
    note_empty,
    note_examples,
    note_faults,
    note_lengths,
    note_model,
    note_precision,
    note_reading,
    note_thoughts,
    note_unended,
    note_unscored,
)
from kvbench.report.report import Report
from kvbench.report.settings import describe_settings
from kvbench.report.summary import answers_by_context, paired_delta, summarise, summarise_row
from kvbench.report.unchanged import is_unchanged
from kvbench.store.cell import Cell
from kvbench.store.labels import list_settings
from kvbench.store.provenance import describe_local_changes
from kvbench.store.results import CellSummary, Sample
from kvbench.store.sample_reader import SampleReader
from kvbench.store.store import ResultStore
from kvbench.store.turns import compare_falls

NO_SUMMARIES: Mapping[str, CellSummary] = MappingProxyType({})


def report_run(prepared: RunPlan, summaries: Mapping[str, CellSummary] = NO_SUMMARIES) -> Report:
    """Return the report of all stored samples of this run's cells, measured by this run or by earlier ones.

    summaries: the summaries of all samples of some cells, by cell id. These are not made again.
    """
    cfg = prepared.cfg
    records = prepared.records()
    collected = collect(prepared.groups, prepared.store, summaries)
    notes = list(collected.notes)
    notes += prepared.advice()
    notes += note_model(prepared)
    notes += note_examples(prepared)
    notes += [f"{match} for prompts no shorter than that." for match in prepared.matched]
    # the warnings are complete only now, since ``collect`` reads the samples and adds a warning for each damaged file
    notes += prepared.store.warnings
    # a dict keeps the order of the columns, and prints a note that several tasks share only once
    remarks = list(dict.fromkeys(f"{group.task.note}." for group in prepared.groups if group.task.note))
    remarks += collected.remarks
    remarks += note_precision(prepared, records)
    remarks += note_reading(records)
    changes_note = describe_local_changes(records)
    if changes_note:
        remarks.append(changes_note)
    return Report(
        model=cfg.model.path,
        settings=describe_settings(prepared),
        columns=collected.columns,
        rows=collected.rows + _build_refused_rows(prepared),
        notes=tuple(notes),
        results=str(prepared.store.root),
        remarks=tuple(remarks),
        matched=tuple(prepared.matched),
        apart=collected.apart,
    )


def _build_refused_rows(prepared: RunPlan) -> tuple[ReportRow, ...]:
    """Return a row for each method that cannot run on this model. All its cells state the reason."""
    rows = []
    for label, reason in prepared.refused.items():
        # such a method has no cells and no ids, but its row is as wide as the others
        cells = [CellResult(group.column, cell="", status="refused", reason=reason) for group in prepared.groups]
        rows.append(ReportRow(label, evicts=False, cells=tuple(cells), means=None))
    return tuple(rows)


@dataclass(frozen=True)
class Collected:
    """The parts of a report that stored samples give.

    columns: the tasks.
    rows: the methods, each with a cell for every task.
    notes: what a reader must know to read the scores.
    remarks: how the scores were measured, which a reader need not know.
    apart: the labels of rows that did not share the first row's prefill, so that their times do not compare.
    """

    columns: tuple[ReportColumn, ...]
    rows: tuple[ReportRow, ...]
    notes: tuple[str, ...]
    remarks: tuple[str, ...]
    apart: tuple[str, ...]


def collect(
    groups: Sequence[Group], store: ResultStore, summaries: Mapping[str, CellSummary] = NO_SUMMARIES
) -> Collected:
    """Return the columns, rows and notes of a report on these groups, one group for each task.

    Only the examples of this run count. A delta is the paired difference to the full cache, over the examples that the
    cell and the full cache both have.

    summaries: the summaries of all samples of some cells, by cell id. These are not made again.
    """
    # the samples of one task are in memory at a time: a reader keeps all that it has read
    tasks = [_collect_task(group, SampleReader(store), summaries) for group in groups]
    # two dicts serve as ordered sets: labels stay in the order in which the groups first name them
    labels: dict[str, None] = {}
    apart: dict[str, None] = {}
    for group, task in zip(groups, tasks, strict=True):
        labels |= dict.fromkeys(cell.label for cell in group.cells)
        apart |= dict.fromkeys(task.apart)
    rows = [_build_row(label, groups, tasks) for label in labels]
    columns = []
    for i, group in enumerate(groups):
        # ``floor`` is None for every cell but the full cache's
        floor = any(bool(row.cells[i].floor) for row in rows)
        columns.append(ReportColumn(group.column, group.task.metric, group.task.category, floor))
    return Collected(
        columns=tuple(columns),
        rows=tuple(rows),
        notes=tuple(_list_notes(groups, tasks, columns, rows)),
        remarks=tuple(note_batches(rows)),
        apart=tuple(apart),
    )


def _list_notes(
    groups: Sequence[Group],
    tasks: Sequence[_TaskResults],
    columns: Sequence[ReportColumn],
    rows: Sequence[ReportRow],
) -> list[str]:
    """Return what a reader must know to read the scores: a list of notes, in the order in which they are printed.

    Groups, tasks and columns are three views of the same tasks, in the same order.
    """
    notes = []
    # a task on which the model fails even with the full cache matters only if a method stands beside the full cache
    if len(rows) > 1:
        notes += about_floors([column.task for column in columns if column.floor], len(columns))
    for task in tasks:
        notes += task.about_cuts
    notes += note_unscored(rows)
    notes += note_empty(groups, rows)
    notes += note_thoughts(rows)
    for task in tasks:
        notes += task.about_unended + task.about_faults
    if _has_decoding_budget(groups):
        notes += note_lengths(rows)
    return notes


def _has_decoding_budget(groups: Sequence[Group]) -> bool:
    """Return True if a method has a budget while decoding, so that it chooses again after ``every`` so many tokens.

    Such a budget acts over a long answer, and may change where the answer ends.
    """
    for group in groups:
        for cell in group.cells:
            evictor = cell.chain.evictor
            if evictor is not None and evictor.every:
                return True
    return False


@dataclass(frozen=True)
class _TaskResults:
    """All that a report takes from the samples of one task.

    cells: each method's cell of the table, by label.
    scores: each method's scores by example, by label; empty for a refused cell.
    full_scores: the full cache's scores by example; empty without a full cache.
    about_cuts: the notes on cut prompts.
    about_unended: the notes on answers that were cut off.
    about_faults: the notes on faults of published scripts.
    apart: the labels of the cells that did not share the prefill of the first cell.
    """

    cells: Mapping[str, CellResult]
    scores: Mapping[str, Mapping[str, float]]
    full_scores: Mapping[str, float]
    about_cuts: Sequence[str]
    about_unended: list[str]
    about_faults: list[str]
    apart: Sequence[str]


def _collect_task(group: Group, reader: SampleReader, summaries: Mapping[str, CellSummary]) -> _TaskResults:
    """Return all that a report takes from the samples of one task.

    summaries: the summaries of all samples of some cells, by cell id. These are not made again.
    """
    cells: dict[str, CellResult] = {}
    scores: dict[str, dict[str, float]] = {}
    first_measured = None
    for cell in group.cells:
        # the table has one row for a label: the first of its cells
        if cell.label in cells:
            continue
        cells[cell.label] = report_cell(group, cell, reader, summaries)
        scores[cell.label] = _read_scores(group, cell, reader)
        if first_measured is None and cells[cell.label].summary is not None:
            first_measured = cell
    full_scores: dict[str, float] = {}
    full = group.full_cell
    if full is not None:
        full_scores = scores[full.label]
    about_cuts: list[str] = []
    if first_measured is not None:
        # all cells read the same prompts
        about_cuts = note_cuts(group, reader.read(first_measured.id))
    return _TaskResults(
        cells=cells,
        scores=scores,
        full_scores=full_scores,
        about_cuts=about_cuts,
        about_unended=note_unended(group, reader),
        about_faults=note_faults(group, reader),
        apart=_find_apart(group, reader),
    )


def report_cell(
    group: Group, cell: Cell, reader: SampleReader, summaries: Mapping[str, CellSummary] = NO_SUMMARIES
) -> CellResult:
    """Return the table entry of one cell: its summary over this run's examples, or the reason why it has no summary.

    group: the task's group, to which the cell belongs.
    summaries: the summaries of all samples of some cells, by cell id. These are not made again.
    """
    store = reader.store
    # each outcome below replaces some fields of this one
    unmeasured = CellResult(
        group.column, cell.id, status="missing", evicts=cell.chain.evicts, settings=list_settings(cell.identity)
    )
    damage = store.damage(cell.id)
    if damage is not None:
        return replace(unmeasured, status="failed", reason=damage, damaged=True)
    refusal = store.refusal(cell.id)
    if refusal is not None:
        return replace(unmeasured, status="refused", reason=refusal)
    run_ids = {example.id for example in group.examples}
    samples = {example: sample for example, sample in reader.read(cell.id).items() if example in run_ids}
    # a cell that has all of this run's examples counts as measured, even if it failed on others
    if len(samples) < len(run_ids):
        status = store.status(cell.id)
        if status.status == "failed":
            return replace(unmeasured, status="failed", reason=status.reason)
    if not samples:
        return unmeasured
    floor = None
    # only the full cache tells whether the model fails on the task
    if cell.chain.is_full:
        floor = at_floor(group.task, [sample.score for sample in samples.values() if sample.score is not None])
    summary = summaries.get(cell.id)
    # a summary of all samples also counts stored examples that this run leaves out
    if summary is None or summary.n != len(samples):
        task = group.task
        summary = summarise(list(samples.values()), task.metric, len(task.examples), task.thought)
    measured = replace(
        unmeasured,
        status="measured",
        floor=floor,
        summary=summary,
        unchanged=is_unchanged(cell, samples, reader),
    )
    full = group.full_cell
    # a chain without stages is the full cache itself
    if full is None or not cell.chain.stages or store.refusal(full.id) is not None:
        return measured
    return _compare_with_full(measured, samples, reader.read(full.id), group.task.metric)


def _compare_with_full(
    measured: CellResult, samples: Mapping[str, Sample], full_samples: Mapping[str, Sample], metric_name: str
) -> CellResult:
    """Return a measured table entry with its differences to the full cache; None in place of one that has no pairs.

    Both mappings have the samples by example. The second difference is for contexts with several questions: how far
    the score falls from a context's first question to its last, minus the full cache's fall.
    """
    contexts = answers_by_context(samples.values())
    full_contexts = answers_by_context(full_samples.values())
    fall_beside_full = None
    difference_of_falls = compare_falls(contexts, full_contexts, metric_name)
    if difference_of_falls is not None:
        mean, interval = difference_of_falls
        fall_beside_full = Delta(mean, interval)
    delta = paired_delta(samples, full_samples, metric_name)
    return replace(measured, delta=delta, fall_beside_full=fall_beside_full)


def _read_scores(group: Group, cell: Cell, reader: SampleReader) -> dict[str, float]:
    if reader.store.refusal(cell.id) is not None:
        return {}
    samples = reader.read(cell.id)
    scores = {}
    for example in group.examples:
        sample = samples.get(example.id)
        if sample is not None and sample.score is not None:
            scores[example.id] = sample.score
    return scores


def _build_row(label: str, groups: Sequence[Group], tasks: Sequence[_TaskResults]) -> ReportRow:
    """Return the row of the run's table for the method ``label``: its result on every task, and their means."""
    compresses = False
    for group in groups:
        # every group has one cell for each method of the run
        cell = next(cell for cell in group.cells if cell.label == label)
        compresses = compresses or bool(cell.chain.stages)
    cells = tuple(task.cells[label] for task in tasks)
    summaries = [cell.summary for cell in cells if cell.summary is not None]
    means = None
    if summaries:
        scores_by_task = [task.scores[label] for task in tasks]
        # the full cache is not compared with itself
        full_scores_by_task = [task.full_scores for task in tasks] if compresses else None
        means = summarise_row(summaries, scores_by_task, full_scores_by_task)
    return ReportRow(
        method=label,
        evicts=any(cell.evicts for cell in cells),
        cells=cells,
        means=means,
        is_full=not compresses,
    )


def _find_apart(group: Group, reader: SampleReader) -> list[str]:
    """Return the labels of cells that did not share the prefill of the first cell with the same key.

    Cells with one prefill key can share each prompt's prefill, and then they store equal times. Different times show
    that a cell was measured in another run, or apart from the others.
    """
    # a dict serves as an ordered set
    labels: dict[str, None] = {}
    # the seconds of each prompt's prefill in the first cell with a key
    first_times: dict[tuple[bool, str], dict[str, float]] = {}
    for cell in group.cells:
        times = {example: sample.timing.prefill_s for example, sample in reader.read(cell.id).items()}
        # a user's methods read the prompts apart from kvbench's own
        key = (cell.chain.foreign, cell.chain.prefill_key)
        shared_times = first_times.setdefault(key, times)
        for example, seconds in times.items():
            # an example that the first cell lacks shows nothing
            if example in shared_times and shared_times[example] != seconds:
                labels[cell.label] = None
    return list(labels)
