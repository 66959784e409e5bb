"""What each paper's table has: its measured cells and their agreement with the paper, in a small file beside tables."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.base.errors import KvbenchError
from kvbench.papers.measured.agreement import (
    REVERSED,
    SEEN,
    UNTOLD,
    count_filled,
    differences_of_rows,
    mean_tau,
    order_of_rows,
)
from kvbench.papers.spec.table_spec import MEANS
from kvbench.report import writers

if TYPE_CHECKING:
    from kvbench.papers.measured.plan import PaperTable

FILE = "counts.csv"
"""The name of the file in the folder of the tables."""
STATES = ("measured", "refused", "missing")
AGREEMENT = ("printed", "filled", "tau", "tau_low", "tau_high", "seen", "reversed", "untold")
FIELDS = ("table", "model", *STATES, *AGREEMENT)
"""The columns of the file: a table, the model it shows, its results in each of STATES, its printed cells, how many of
them hold a number of ours, Kendall's tau between the two orders of rows with its interval, and how many of the paper's
differences are seen here, reversed, or not told apart."""
NUMBERS_FILE = "numbers.csv"
"""The name of the file with the numbers of all filled cells, in the folder of a pretrained model's tables."""
NUMBERS = ("table", "row", "column", "n", "ours", "full", "published", "published_full")
"""Its columns: a cell, its examples, our score and that of the full cache, and what the paper prints for both."""
_STATE = {"measured": "measured", "OOM": "measured", "refused": "refused", "failed": "refused", "missing": "missing"}
"""One of STATES for each status of a cell."""

Counts = Mapping[str, str]
"""A line of the file: a text for each of FIELDS."""


def count_cells(table: PaperTable) -> dict[str, str]:
    """Count the measured, refused and missing cells of a table, and return them as a line of the file.

    A result of the store counts once, even if several rows and columns show it. Means do not count. A cell that ran
    out of memory counts as measured.
    """
    # (state, identity) of each cell: in a set, entries that show one cell count once
    cells: set[tuple[str, object]] = set()
    for line in table.lines:
        for column, cell in zip(table.columns, table.pairs_of(line), strict=True):
            # a cell with the status ``none`` is one that the paper's table does not have
            if column.dataset in MEANS or cell.status not in _STATE:
                continue
            chain = line.chains.get(column.dataset, line.chain)
            # a cell outside the store has no id: its chain and its workload identify it, or else its row
            identity: object = (line.model, line.name, column)
            if chain is not None:
                identity = (chain, line.reads.get(column.dataset), column)
            cells.add((_STATE[cell.status], cell.cell or identity))
    counts = Counter(state for state, _ in cells)
    record = {"table": table.spec.id, "model": table.model} | {state: str(counts[state]) for state in STATES}
    record |= dict.fromkeys(AGREEMENT, "")
    if table.timings is not None:
        return record
    filled, printed = count_filled(table)
    record |= {"filled": str(filled), "printed": str(printed)}
    taus = list(order_of_rows(table).values())
    if taus:
        mean, interval = mean_tau(taus)
        record["tau"] = f"{mean:.2f}"
        if interval is not None:
            record["tau_low"], record["tau_high"] = (f"{end:.2f}" for end in interval)
    verdicts = Counter(verdict for _, _, verdict in differences_of_rows(table))
    return record | {name: str(verdicts[v]) for name, v in (("seen", SEEN), ("reversed", REVERSED), ("untold", UNTOLD))}


def list_numbers(table: PaperTable) -> list[dict[str, str]]:
    """Return a line of NUMBERS_FILE for each printed cell that holds a number of ours, without means and full rows."""
    lines = []
    for line in table.lines:
        for column, cell in zip(table.columns, table.pairs_of(line), strict=True):
            numbers = (cell.score, cell.full, cell.paper_value, cell.paper_full)
            if line.method == "full" or column.dataset in MEANS or None in numbers:
                continue
            record = {"table": table.spec.id, "row": line.name, "column": column.name, "n": str(cell.n)}
            record |= {name: f"{number:.2f}" for name, number in zip(NUMBERS[4:], numbers, strict=True)}
            lines.append(record)
    return lines


def read_counts(folder: Path) -> dict[str, Counts]:
    """Return the counts in ``folder`` by table; {} if it has no file. Raises KvbenchError if the file is damaged."""
    return {line["table"]: line for line in _read(folder / FILE, FIELDS)}


def read_numbers(folder: Path) -> list[Counts]:
    """Return the lines of NUMBERS_FILE in ``folder``; [] if it has no file. Raises KvbenchError if it is damaged."""
    return _read(folder / NUMBERS_FILE, NUMBERS)


def write_counts(folder: Path, line: Counts) -> None:
    """Write one table's line to the file of ``folder``, in place of the table's old line."""
    _replace(folder / FILE, FIELDS, line["table"], [line])


def write_numbers(folder: Path, table: str, lines: Sequence[Counts]) -> None:
    """Write one table's lines to NUMBERS_FILE in ``folder``, in place of the table's old lines."""
    _replace(folder / NUMBERS_FILE, NUMBERS, table, lines)


def _read(path: Path, fields: Sequence[str]) -> list[Counts]:
    if not path.exists():
        return []
    reader = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8")))
    if tuple(reader.fieldnames or ()) != tuple(fields):
        raise KvbenchError(f"{path}: its columns must be {','.join(fields)}; make tables writes it")
    return list(reader)


def _replace(path: Path, fields: Sequence[str], table: str, lines: Sequence[Counts]) -> None:
    def place_of(line: Counts) -> tuple[str, int]:
        # table 10 comes behind table 2
        paper, _, number = line["table"].partition("/")
        return paper, int(number)

    # other tables keep their lines, so that one can be written alone
    kept = [line for line in _read(path, fields) if line["table"] != table]
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = sorted(kept + list(lines), key=place_of)
    path.write_text(writers.csv(fields, kept), encoding="utf-8")
