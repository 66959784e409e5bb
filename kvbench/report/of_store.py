"""Make the reports of everything that a results folder holds.

The results of a store have no plan behind them. They are compared by their identities: the results of a method and of
the full cache belong together if they differ in nothing but the method.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.base.conf import check
from kvbench.base.errors import UsageError
from kvbench.methods.core import legal_sets, registry
from kvbench.report.data import CellResult, Delta, ReportColumn, ReportRow
from kvbench.report.listing import FILTERS, StoredCell, list_cells, read_filters
from kvbench.report.report import Report
from kvbench.report.summary import paired_delta, summarise, summarise_row
from kvbench.store.labels import Identity, list_settings
from kvbench.store.results import Sample
from kvbench.store.store import ResultStore

if TYPE_CHECKING:
    import pandas as pd

FULL = "full"
"""The label of the full cache's results."""

Comparable = Mapping[str, StoredCell]
"""Results that differ in the method alone, by the method's label."""


def collect_reports(store: ResultStore, for_verdicts: bool = False) -> list[Report]:
    """Return the reports of all results that kvbench measured into a store, sorted by model and dataset.

    A report is about one model, dataset and kind of prompt. If a task was measured under several settings, the settings
    that most methods share come first, and the others have a report of their own.

    for_verdicts: leave out tasks that the full cache has not answered, and all settings of a task but the first.
    """
    groups_by_report: dict[tuple[str, str, str], list[Comparable]] = {}
    for group in group_comparable(list_cells(store, {})):
        full = group.get(FULL)
        if for_verdicts and (full is None or full.summary is None):
            continue
        first = next(iter(group.values())).record
        # JSON texts, since the parts of an identity cannot be keys; sorted, so that equal parts give equal texts
        prompt = json.dumps([first.identity.get("model"), first.identity.get("prompt")], sort_keys=True)
        groups_by_report.setdefault((first.model, name_dataset(first.column), prompt), []).append(group)
    reports = []
    for groups in groups_by_report.values():
        groups.sort(key=len, reverse=True)
        while groups:
            group_by_task: dict[str, Comparable] = {}
            other_settings = []
            for group in groups:
                task = next(iter(group.values())).record.column
                if task in group_by_task:
                    other_settings.append(group)
                else:
                    group_by_task[task] = group
            reports.append(_build_report(store, dict(sorted(group_by_task.items()))))
            groups = [] if for_verdicts else other_settings
    return sorted(reports, key=lambda report: (report.model, name_dataset(report.columns[0].task)))


def name_dataset(column: str) -> str:
    """Return the dataset of a column, which is named dataset/task, with swept options behind a space."""
    return column.partition("/")[0].partition(" ")[0]


def group_comparable(cells: Iterable[StoredCell]) -> list[Comparable]:
    """Return groups of stored results that differ in the method alone."""
    groups: dict[str, dict[str, StoredCell]] = {}
    for cell in cells:
        identity = cell.record.identity
        # a result that was imported from another program has no chain in its identity
        if cell.record.kind is not None or "chain" not in identity:
            continue
        other_parts = {key: value for key, value in identity.items() if key != "chain"}
        same_but_chain = json.dumps([cell.record.model, cell.record.column, other_parts], sort_keys=True)
        groups.setdefault(same_but_chain, {})[cell.label] = cell
    return list(groups.values())


def _build_report(store: ResultStore, group_by_task: Mapping[str, Comparable]) -> Report:
    # the keys are the methods' labels in order; the full cache comes first, as in the report of a run
    labels: dict[str, None] = {}
    if any(FULL in group for group in group_by_task.values()):
        labels[FULL] = None
    # samples of each result, by task and the method's label
    samples_of: dict[str, dict[str, Mapping[str, Sample]]] = {}
    columns = []
    for task, group in group_by_task.items():
        labels |= dict.fromkeys(group)
        samples_of[task] = {}
        metric_name = ""
        for label, cell in group.items():
            if cell.summary is not None:
                samples_of[task][label] = store.samples(cell.id)
                metric_name = cell.summary.metric
        # a task of refused and failed results alone has no metric to show
        identity = next(iter(group.values())).record.identity
        columns.append(ReportColumn(task, metric_name or identity["metric"]["name"], category="", floor=False))
    rows = [_make_row(label, columns, group_by_task, samples_of) for label in labels]
    first = next(iter(group_by_task[columns[0].task].values()))
    settings = list_settings(first.record.identity)
    words = [f"Model {first.record.model}", str(settings["dtype"])]
    if settings["query_aware"] is False:
        words.append("query_aware=false")
    # what tells results of one label, dataset and model apart
    if first.differs:
        words.append(first.differs)
    return Report(
        model=first.record.model,
        settings=", ".join(words),
        columns=tuple(columns),
        rows=tuple(rows),
        notes=(),
        results=str(store.root),
    )


def _make_row(
    label: str,
    columns: Sequence[ReportColumn],
    group_by_task: Mapping[str, Comparable],
    samples_of: Mapping[str, Mapping[str, Mapping[str, Sample]]],
) -> ReportRow:
    """Return the row of one method, or of the full cache: a cell for each of ``columns``, and the means over them.

    group_by_task, samples_of: the results and their samples, by task and the method's label.
    """
    cells = []
    for column in columns:
        cells.append(_report_result(group_by_task[column.task].get(label), column, samples_of[column.task]))
    summaries = [cell.summary for cell in cells if cell.summary is not None]
    means = None
    if summaries:
        # the full cache is not compared with itself
        full_scores = None
        if label != FULL:
            full_scores = [_read_known_scores(samples_of[column.task].get(FULL, {})) for column in columns]
        own_scores = [_read_known_scores(samples_of[column.task].get(label, {})) for column in columns]
        means = summarise_row(summaries, own_scores, full_scores)
    evicts = any(cell.evicts for cell in cells)
    return ReportRow(label, evicts=evicts, cells=tuple(cells), means=means, is_full=label == FULL)


def _report_result(
    cell: StoredCell | None, column: ReportColumn, samples_of: Mapping[str, Mapping[str, Sample]]
) -> CellResult:
    """Return a stored result as a cell of a report. Without a result (None) the cell has the status ``missing``.

    samples_of: the samples of the cell's task, by the method's label.
    """
    if cell is None:
        return CellResult(column.task, cell="", status="missing")
    identity = cell.record.identity
    unmeasured = CellResult(
        column.task, cell.id, status="missing", evicts=_evicts(identity), settings=list_settings(identity)
    )
    if cell.summary is None:
        if cell.status.status in ("refused", "failed"):
            return replace(unmeasured, status=cell.status.status, reason=cell.status.reason)
        return unmeasured
    samples = samples_of[cell.label]
    delta = None
    if cell.label != FULL:
        delta = paired_delta(samples, samples_of.get(FULL, {}), column.metric)
    # a record may not state the number of the task's examples
    examples_of_task = cell.record.of or len(samples)
    return replace(
        unmeasured,
        status="measured",
        summary=summarise(list(samples.values()), column.metric, examples_of_task),
        delta=delta,
        unchanged=cell.unchanged,
    )


def _evicts(identity: Identity) -> bool:
    """Return True if the method of a stored result also drops tokens while it answers; False if it is not here."""
    try:
        stages = [registry.make_stage(stage["id"], stage["knobs"]) for stage in identity["chain"]["stages"]]
    except UsageError:
        return False
    return any(legal_sets.evicts(stage) for stage in stages)


def _read_known_scores(samples: Mapping[str, Sample]) -> dict[str, float]:
    """Return the scores by example id, without examples that have no score."""
    return {example: float(sample.score) for example, sample in samples.items() if sample.score is not None}


def results(folder: str | Path = "results", **filters: str) -> pd.DataFrame:
    """Return a DataFrame with one row for each result in the results folder ``folder``.

    Its columns are the values of ``list runs --json``, and ``delta`` with its 95 % interval ``delta_ci``: the mean
    paired difference to the full cache's result under the same settings, in the units of ``score``.

    ``filters`` choose results by the keys of ``list runs``: ``status``, ``model``, ``method``, ``dataset`` or
    ``cells``. A filter is one name, or several names separated by commas. Raises UsageError for another key or an
    unknown status, and for a missing folder.
    """
    import pandas as pd

    check("folder", folder, isinstance(folder, (str, Path)) and bool(str(folder)), "a folder of results")
    for key, value in filters.items():
        check(key, value, isinstance(value, str), "a name, or names with commas")
    checked_filters = read_filters([f"{key}={value}" for key, value in filters.items()], FILTERS)
    store = ResultStore(Path(folder).expanduser())
    store.check_there()
    # a filter may leave the full cache out, with which the chosen results are compared
    deltas = dict(_compare_with_full(store, list_cells(store, {})))
    records = []
    for cell in list_cells(store, checked_filters):
        delta = deltas.get(cell.id)
        record = cell.json()
        record["delta"] = delta.mean if delta is not None else None
        record["delta_ci"] = delta.ci if delta is not None else None
        records.append(record)
    return pd.DataFrame(records)


def _compare_with_full(store: ResultStore, cells: Iterable[StoredCell]) -> Iterator[tuple[str, Delta | None]]:
    """Yield (id, paired difference to the full cache) of each method's result beside one of the full cache."""
    for group in group_comparable(cells):
        full = group.get(FULL)
        if full is None or full.summary is None:
            continue
        full_samples = store.samples(full.id)
        for label, cell in group.items():
            # nothing compressed is no difference of 0
            if label != FULL and cell.summary is not None and not cell.unchanged:
                yield cell.id, paired_delta(store.samples(cell.id), full_samples, cell.summary.metric)
