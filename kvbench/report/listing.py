"""List stored cells: a record for each cell, and filters by key=value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime

from kvbench.base.errors import UsageError, unknown
from kvbench.plan.keys import check_choice, parse_pairs
from kvbench.plan.words import split_list
from kvbench.store.labels import describe_differences, label_cell, list_settings
from kvbench.store.results import CellRecord, ScoreSummary, Status
from kvbench.store.store import DAMAGED, STATUSES, ResultStore

FILTERS = ("status", "model", "method", "dataset", "cells")


def read_filters(arguments: Sequence[str], keys: Sequence[str]) -> dict[str, str]:
    """Return the values of ``key=value`` arguments by key. A value is a name, or names with commas.

    Raises UsageError for a key not in ``keys``, for one given twice or without a value, and for an unknown status.
    """
    for argument in arguments:
        if "=" not in argument or argument.partition("=")[0] not in keys:
            # the suggestions end with "=", so that users can type them as printed
            raise unknown("argument", argument, [f"{key}=" for key in keys])
    texts = parse_pairs(arguments)
    for key, text in texts.items():
        # an unset shell variable leaves ``model=`` or ``model=A,``, and these would choose other cells than the user
        # meant
        if "" in split_list(text):
            raise UsageError(f"{key}={text}: a value is missing; write {key}=A or {key}=A,B (is a variable unset?)")
    if "status" in texts:
        statuses = []
        for status in split_list(texts["status"]):
            # earlier versions called the results of a run that ended as asked "partial"
            if status == "partial":
                status = "done"
            statuses.append(check_choice("status", STATUSES, status))
        texts["status"] = ",".join(statuses)
    return texts


@dataclass(frozen=True)
class StoredCell:
    """One stored cell in a list.

    id: the cell's id, which is the name of its folder.
    folder: the path of the cell's folder.
    record: the cell's record; an empty one for a damaged cell.
    status: how far the cell is, and why it failed or was refused.
    summary: the means over all its samples; None if no sample is up to date.
    differs: the settings in which it differs from cells of the same label, dataset and model.
    unchanged: whether nothing was compressed, so that the summary says nothing about the method.
    bytes: the mean bytes of a prompt's cache, keys and values and everything stored beside them; None if not measured.
    percent_of_full: the bytes at 16 bits in per cent of the full cache's; None if not measured.
    """

    id: str
    folder: str
    record: CellRecord
    status: Status
    summary: ScoreSummary | None = None
    differs: str = ""
    unchanged: bool = False
    bytes: float | None = None
    percent_of_full: float | None = None

    @property
    def label(self) -> str:
        """The method with its budgets and knobs; '' for a damaged cell."""
        # a damaged cell's record is empty and gives no label
        if self.status.status == DAMAGED:
            return ""
        return label_cell(self.record.identity, self.record.label)

    @property
    def last_write(self) -> str | None:
        """The time of the last write, in ISO format; None for a cell without files."""
        time_s = self.status.changed
        if time_s is None:
            return None
        # the text has the local time zone and its offset to UTC: 2026-01-31T12:00:00+01:00
        return datetime.fromtimestamp(time_s).astimezone().isoformat("T", "seconds")

    def json(self) -> dict[str, object]:
        """Return the cell as ``--json`` prints it."""
        record: dict[str, object] = {
            "id": self.id,
            "label": self.label,
            "dataset": self.record.column,
            "model": self.record.model,
            "folder": self.folder,
            "imported": self.record.kind == "imported",
            "kind": self.record.kind,
        }
        record |= list_settings(self.record.identity)
        record |= asdict(self.status)
        # the status has the seconds since the epoch, and readers get a date
        record["changed"] = self.last_write
        if self.summary is not None:
            record["metric"] = self.summary.metric
            record["score"] = self.summary.score
            record["ci"] = self.summary.ci
            record["bytes"] = self.bytes
            record["percent_of_full"] = self.percent_of_full
        if self.unchanged:
            record["nothing_compressed"] = True
        record["differs"] = self.differs
        return record


def list_cells(store: ResultStore, filters: Mapping[str, str]) -> list[StoredCell]:
    """Return the cells of a store that pass all ``filters``, sorted by dataset and label."""
    if "cells" in filters:
        # an id that is named twice is listed once; ``find`` refuses ids that the store lacks
        ids = [store.find(name) for name in dict.fromkeys(split_list(filters["cells"]))]
    else:
        ids = store.folders()
    # cells of one label, dataset and model are told apart by their differing settings
    cells_by_name: dict[tuple[str, str, str], list[StoredCell]] = {}
    for cell_id in ids:
        cell = read_cell(store, cell_id)
        if _passes(cell, filters):
            full_name = (cell.label, cell.record.column, cell.record.model)
            cells_by_name.setdefault(full_name, []).append(cell)
    described_cells = []
    for cells in cells_by_name.values():
        differences = describe_differences([cell.record.identity for cell in cells])
        for cell, difference in zip(cells, differences, strict=True):
            described_cells.append(replace(cell, differs=difference))
    return sorted(described_cells, key=_make_sort_key)


def _make_sort_key(cell: StoredCell) -> tuple[str, str, str, str]:
    return cell.record.column, cell.label, cell.differs, cell.id


def read_cell(store: ResultStore, cell_id: str) -> StoredCell:
    """Return one stored cell with its summary. A damaged cell has the status DAMAGED."""
    folder = str(store.folder(cell_id))
    status = store.status(cell_id)
    if status.status == DAMAGED:
        return StoredCell(cell_id, folder, CellRecord(), status)
    try:
        # a cell that was never started has no record, and an empty one stands in for it
        record = store.cell(cell_id) or CellRecord()
        metrics = store.metrics(cell_id)
        summary = ScoreSummary.read(metrics)
        # called only to see whether a label can be made: a damaged identity raises here, not in the caller's list
        label_cell(record.identity, record.label)
    except UsageError as error:
        damaged = Status(DAMAGED, n=0, of=None, reason=str(error))
        return StoredCell(cell_id, folder, CellRecord(), damaged)
    # an interrupted cell's means may cover fewer samples than it has now; a refused cell must not be reported
    is_current = summary is not None and summary.n == status.n and status.status != "refused"
    if not is_current:
        return StoredCell(cell_id, folder, record, status)
    # the score of an engine's answers stands without bytes
    cell_bytes = metrics["payload"] + metrics["overhead"] if "payload" in metrics else None
    return StoredCell(
        cell_id,
        folder,
        record,
        status,
        summary,
        unchanged=metrics.get("nothing_compressed") is True,
        bytes=cell_bytes,
        percent_of_full=metrics.get("percent_of_full"),
    )


def _passes(cell: StoredCell, filters: Mapping[str, str]) -> bool:
    # the part before the first space is the name: swept knobs follow the dataset, and budgets follow the method
    dataset = cell.record.column.partition(" ")[0]
    method = cell.label.partition(" ")[0]
    names = {
        "status": {cell.status.status},
        "method": {method},
        "model": {cell.record.model},
        # dataset=longbench chooses all its tasks, dataset=longbench/qasper one of them
        "dataset": {dataset, dataset.partition("/")[0]},
    }
    for key, names_of_cell in names.items():
        if key in filters and names_of_cell.isdisjoint(split_list(filters[key])):
            return False
    return True
