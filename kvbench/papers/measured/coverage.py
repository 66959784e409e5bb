"""Counts of the measured cells of each paper's table. A small file beside the committed tables holds them."""

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
"""The name of the file in the folder of the tables."""
STATES = ("measured", "refused", "missing")
FIELDS = ("table", "model", *STATES)
"""The columns of the file: a table, the model it shows, and its number of cells in each of STATES."""
_STATE = {"measured": "measured", "OOM": "measured", "refused": "refused", "failed": "refused", "missing": "missing"}
"""One of STATES for each status of a cell."""

Counts = Mapping[str, str]
"""A line of the file: a text for each of FIELDS."""


def count_cells(view: View) -> dict[str, str]:
    """Count the measured, refused and missing cells of a table, and return them as a line of the file.

    A result of the store counts once, even if several rows and columns show it. Means do not count. A cell that ran
    out of memory counts as measured.
    """
    # (state, identity) of each cell: in a set, entries that show one cell count once
    cells: set[tuple[str, object]] = set()
    for line, entries in view.rows:
        for column, entry in zip(view.columns, entries, strict=True):
            # an entry with the status ``none`` is a cell that the paper's table does not have
            if column.dataset in MEANS or entry.status not in _STATE:
                continue
            chain = line.chain_of(column.dataset)
            # a cell outside the store has no id: its chain and its workload identify it, or else its row
            identity: object = (line.row.model, line.row.name, column)
            if chain is not None:
                identity = (chain, line.reads.get(column.dataset), column)
            cells.add((_STATE[entry.status], entry.cell or identity))
    counts = Counter(state for state, _ in cells)
    record = {"table": view.ours.declared.id, "model": view.ours.model}
    for state in STATES:
        record[state] = str(counts[state])
    return record


def read_counts(folder: Path) -> dict[str, Counts]:
    """Return the counts in ``folder`` by table; {} if it has no file. Raises KvbenchError if the file is damaged."""
    path = folder / FILE
    if not path.exists():
        return {}
    reader = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8")))
    if tuple(reader.fieldnames or ()) != FIELDS:
        raise KvbenchError(f"{path}: its columns must be {','.join(FIELDS)}; make tables writes it")
    return {line["table"]: line for line in reader}


def write_counts(folder: Path, line: Counts) -> None:
    """Write one table's line to the file of ``folder``, in place of the table's old line."""
    # other tables of the folder keep their lines, so that a table can be written alone
    line_by_table = read_counts(folder)
    line_by_table[line["table"]] = line
    folder.mkdir(parents=True, exist_ok=True)
    in_order = [line_by_table[table] for table in sorted(line_by_table, key=_paper_and_number)]
    (folder / FILE).write_text(writers.csv(FIELDS, in_order), encoding="utf-8")


def _paper_and_number(table: str) -> tuple[str, int]:
    """Return the sort key (paper, number) of a table's address, such as ``think/2``: table 10 comes behind table 2."""
    paper, _, number = table.partition("/")
    return paper, int(number)
