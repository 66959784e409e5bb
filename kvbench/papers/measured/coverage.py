"""Counts of the measured cells of each paper's table, committed beside the tables in a small file."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.base.errors import KvbenchError
from kvbench.papers.spec.table_spec import MEANS
from kvbench.report import writers

if TYPE_CHECKING:
    from kvbench.papers.measured.cell_view import View

FILE = "counts.csv"
STATES = ("measured", "refused", "missing")
FIELDS = ("table", "model", *STATES)
_STATE = {"measured": "measured", "OOM": "measured", "refused": "refused", "failed": "refused", "missing": "missing"}

Counts = Mapping[str, str]


def count(seen: View) -> dict[str, str]:
    """Return a table's line: its model, and the numbers of cells that are measured, refused or missing, each once.

    Several rows and columns can show one cell of the store. Means do not count; out of memory counts as measured.
    """
    cells: set[tuple[str, object]] = set()
    for line, row in seen.rows:
        for column, e in zip(seen.columns, row, strict=True):
            chain = line.chain_of(column.dataset)
            # what is not in the store is told apart by its chain and its workload, or else its row
            position = (chain, line.reads.get(column.dataset)) if chain is not None else (line.row.model, line.row.name)
            if column.dataset not in MEANS and e.status in _STATE:
                cells.add((_STATE[e.status], e.cell or (*position, column)))
    counts = Counter(state for state, _ in cells)
    return {"table": seen.ours.declared.id, "model": seen.ours.model, **{s: str(counts[s]) for s in STATES}}


def read(folder: Path) -> dict[str, Counts]:
    """Return the counts in ``folder`` by table; {} if it has no file. Raises KvbenchError if the file is damaged."""
    path = folder / FILE
    if not path.exists():
        return {}
    reader = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8")))
    if tuple(reader.fieldnames or ()) != FIELDS:
        raise KvbenchError(f"{path}: its columns must be {','.join(FIELDS)}; make tables writes it")
    return {line["table"]: line for line in reader}


def write(folder: Path, line: Counts) -> None:
    """Write one table's line to the file of ``folder``, in place of the table's old one."""
    lines = {**read(folder), line["table"]: line}
    order = sorted(lines, key=lambda table: (table.partition("/")[0], int(table.partition("/")[2])))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(writers.csv(FIELDS, (lines[table] for table in order)), encoding="utf-8")
