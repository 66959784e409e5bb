"""Stored cells as a list: a record for each, filters by key=value, and all of them as a DataFrame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.base.conf import check
from kvbench.base.errors import UsageError, unknown
from kvbench.base.extras import require
from kvbench.plan.keys import one_of, pairs
from kvbench.plan.words import split_list
from kvbench.store.labels import differences, fields, label
from kvbench.store.results import CellRecord, ScoreSummary, Status
from kvbench.store.store import DAMAGED, STATUSES, ResultStore

if TYPE_CHECKING:
    import pandas as pd

FILTERS = ("status", "model", "method", "dataset", "cells")


def given(arguments: Sequence[str], keys: Sequence[str]) -> dict[str, str]:
    """Return the values of ``key=value`` arguments by key.

    Raises UsageError for a key not in ``keys``, for one given twice or without a value, and for an unknown status.
    """
    for argument in arguments:
        if "=" not in argument or argument.partition("=")[0] not in keys:
            raise unknown("argument", argument, [f"{k}=" for k in keys])
    texts = pairs(arguments)
    for key, text in texts.items():
        if "" in split_list(text):
            raise UsageError(f"{key}={text}: a value is missing; write {key}=A or {key}=A,B (is a variable unset?)")
    for status in split_list(texts["status"]) if "status" in texts else ():
        one_of("status", STATUSES, status)
    return texts


@dataclass(frozen=True)
class StoredCell:
    """One stored cell in a list.

    summary: the means over all its samples; None if there are none that are up to date.
    differs: the settings in which it differs from cells of the same label, dataset and model.
    unchanged: whether nothing was compressed, so that the summary says nothing about the method.
    """

    id: str
    folder: str
    record: CellRecord
    status: Status
    summary: ScoreSummary | None = None
    differs: str = ""
    unchanged: bool = False

    @property
    def label(self) -> str:
        """Return the method with its budgets and knobs."""
        damaged = self.status.status == DAMAGED
        return "" if damaged else label(self.record.identity, self.record.label)

    @property
    def changed(self) -> str | None:
        """Return the time of the last write, in ISO format."""
        time_s = self.status.changed
        return None if time_s is None else datetime.fromtimestamp(time_s).astimezone().isoformat("T", "seconds")

    def json(self) -> dict[str, object]:
        """Return the cell as ``--json`` prints it."""
        score = self.summary
        return {
            "id": self.id,
            "label": self.label,
            "dataset": self.record.column,
            "model": self.record.model,
            "folder": self.folder,
            "imported": self.record.kind == "imported",
            **fields(self.record.identity),
            **asdict(self.status),
            "changed": self.changed,
            **({"metric": score.metric, "score": score.score, "ci": score.ci} if score is not None else {}),
            **({"nothing_compressed": True} if self.unchanged else {}),
            "differs": self.differs,
        }


def rows(store: ResultStore, filters: Mapping[str, str]) -> list[StoredCell]:
    """Return the cells of a store that pass all ``filters``, sorted by dataset and label."""
    chosen = filters.get("cells")
    names = store.folders() if chosen is None else [store.find(name) for name in dict.fromkeys(split_list(chosen))]
    alike: dict[tuple[str, ...], list[StoredCell]] = {}
    for cell in map(partial(row, store), names):
        if _passes(cell, filters):
            alike.setdefault((cell.label, cell.record.column, cell.record.model), []).append(cell)
    labelled = [
        replace(cell, differs=words)
        for some in alike.values()
        for cell, words in zip(some, differences([c.record.identity for c in some]), strict=True)
    ]
    return sorted(labelled, key=lambda c: (c.record.column, c.label, c.differs, c.id))


def row(store: ResultStore, name: str) -> StoredCell:
    """Return one stored cell with its summary. A damaged cell has the status DAMAGED."""
    folder = str(store.folder(name))
    status = store.status(name)
    if status.status == DAMAGED:
        return StoredCell(name, folder, CellRecord(), status)
    try:
        record = store.cell(name) or CellRecord()
        metrics = store.metrics(name)
        summary = ScoreSummary.read(metrics)
        label(record.identity, record.label)
    except UsageError as error:
        return StoredCell(name, folder, CellRecord(), Status(DAMAGED, 0, None, str(error)))
    # the means of an interrupted cell may be of fewer samples than it has now
    current = summary is not None and summary.n == status.n and status.status != "refused"
    if not current:
        return StoredCell(name, folder, record, status)
    return StoredCell(name, folder, record, status, summary, unchanged=metrics.get("nothing_compressed") is True)


def results(folder: str | Path = "results", **filters: str) -> pd.DataFrame:
    """Return the cells below a results folder, a row each, with what ``list runs --json`` prints.

    ``filters`` are its keys: ``status``, ``model``, ``method``, ``dataset`` or ``cells``, each a name or names with
    commas. Raises UsageError for another key or an unknown status, for a folder that is not there, and if pandas is
    missing.
    """
    require("pandas", "kvbench.results")
    import pandas as pd

    check("folder", folder, isinstance(folder, (str, Path)) and bool(str(folder)), "a folder of results")
    for key, value in filters.items():
        check(key, value, isinstance(value, str), "a name, or names with commas")
    chosen = given([f"{key}={value}" for key, value in filters.items()], FILTERS)
    store = ResultStore(Path(folder).expanduser())
    store.check_there()
    return pd.DataFrame([cell.json() for cell in rows(store, chosen)])


def _passes(cell: StoredCell, filters: Mapping[str, str]) -> bool:
    dataset, method = cell.record.column.partition(" ")[0], cell.label.partition(" ")[0]
    names = {
        "status": {cell.status.status},
        "method": {method},
        "model": {cell.record.model},
        "dataset": {dataset, dataset.partition("/")[0]},
    }
    return all(values & set(split_list(filters[key])) for key, values in names.items() if key in filters)
