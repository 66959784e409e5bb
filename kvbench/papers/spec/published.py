"""The values that papers print: one line per cell in the files of papers/data/<paper>/published/.

``table<N>.csv`` are tables, ``fig<N>.csv`` numbers printed in a figure, and ``text.csv`` those stated in prose.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path

from kvbench.base.errors import KvbenchError, unknown
from kvbench.papers import files
from kvbench.papers.spec.numbers import decimals, fixed

COLUMNS = ("paper", "table", "model", "method", "setting", "dataset", "metric", "value", "unit", "row_order", "flag")
MARKS = {"suspect": "?", "repaired": "~", "missing": ""}
FRACTION = "fraction"
SCORES = ("f1", "rouge_l", "accuracy", "edit_sim", "bleu", "mean")
"""Metrics of answers; the others measure bytes, times and budgets."""

AVERAGE = "avg"
"""What stands in place of a dataset in the cell that averages a row."""


@dataclass(frozen=True)
class Published:
    """One printed cell of a paper.

    ``setting`` is ``key=value;key=value``. ``row`` is the line of the paper's table, from 1. ``printed`` are the
    characters on the page, ``value`` their number: None where the cell is text or empty. ``flag`` is empty for a
    certain value, else ``suspect:``, ``repaired:`` or ``missing:`` with the reason.
    """

    paper: str
    table: str
    model: str
    method: str
    setting: str
    dataset: str
    metric: str
    value: float | None
    unit: str
    flag: str
    printed: str
    row: int

    @property
    def settings(self) -> dict[str, str]:
        """Return ``setting`` as a mapping."""
        return dict(part.split("=", 1) for part in self.setting.split(";") if part)

    @property
    def flags(self) -> dict[str, str]:
        """Return the reasons by kind of flag (suspect, repaired, missing); a cell can have two flags."""
        return dict(part.split(":", 1) for part in self.flag.split(" | ") if part)

    @property
    def points(self) -> float | None:
        """Return ``value`` in the unit of our scores: a printed fraction in per cent."""
        return self.value if self.value is None or self.unit != FRACTION else 100 * self.value

    @property
    def shown(self) -> str:
        """Return ``printed`` in the unit of our scores: 0.171 as 17.1."""
        if self.value is None or self.unit != FRACTION:
            return self.printed
        return fixed(100 * Fraction(self.printed), max(0, decimals(self.printed) - 2))

    @property
    def certainty(self) -> str:
        """Return the kind of the first flag: certain, suspect, repaired or missing."""
        return self.flag.partition(":")[0] or "certain"


def tables() -> list[tuple[str, str]]:
    """Return (paper, table) of every file: numbered tables in their order, then ``fig6`` and ``text``."""
    names = ((p.parent.parent.name, p.stem.removeprefix("table")) for p in files("*/published/*.csv"))
    return sorted(names, key=lambda f: (f[0], not f[1].isdigit(), f[1].zfill(3)))


@cache
def load_table(paper: str, table: str) -> tuple[Published, ...]:
    """Return the cells of one table in the paper's order; raise KvbenchError with file and line of damage."""
    stem = f"table{table}" if table.isdigit() else table
    path = next(iter(files(f"{paper}/published/{stem}.csv")), None)
    if path is None:
        raise unknown("table", f"{paper}/{table}", [f"{p}/{t}" for p, t in tables()])
    with path.open(encoding="utf-8", newline="") as lines:
        reader = csv.DictReader(lines)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise KvbenchError(f"{path}: its columns must be {','.join(COLUMNS)}")
        return tuple(_cell(path, reader.line_num, row) for row in reader)


def rows(model: str, method: str, setting: str = "") -> Iterator[tuple[str, str, dict[str, Published]]]:
    """Yield (paper, table, scores by dataset) of every printed row of a method on a model.

    A row's setting must hold all parts of ``setting``. Only scores in per cent of numbered tables count. A table with
    several such rows gives each of them.
    """
    parts = set(filter(None, setting.split(";")))
    for paper, table in tables():
        if not table.isdigit():
            continue
        by_setting: dict[str, dict[str, Published]] = {}
        for cell in load_table(paper, table):
            is_row = model_id(cell.model) == model_id(model) and cell.method == method
            if is_row and cell.metric in SCORES and cell.unit == "pct" and parts <= set(cell.setting.split(";")):
                by_setting.setdefault(cell.setting, {})[cell.dataset] = cell
        for cells in by_setting.values():
            yield paper, table, cells


def model_id(name: str) -> str:
    """Return one name for the papers' ``llama-2-7b-chat`` and kvbench's ``llama2-7b-chat``."""
    return re.sub(r"^llama-(\d)", r"llama\1", name.strip().lower())


def _cell(path: Path, line: int, row: dict[str, str]) -> Published:
    """Parse one line of a file; raise KvbenchError for a bad number."""
    try:
        value = float(row["value"]) if row["value"] and row["unit"] != "text" else None
        order = int(row["row_order"])
    except ValueError:
        raise KvbenchError(f"{path}, line {line}: {row['value']!r} is not a number, or the row's is not") from None
    dataset = row["dataset"]
    if dataset != AVERAGE and dataset.strip(" .").lower() in (AVERAGE, "average", "mean"):
        raise KvbenchError(
            f"{path}, line {line}: the dataset {dataset!r} would be one more score of its row: write {AVERAGE} for an "
            "average, which is audited and computed"
        )
    texts = {key: row[key] for key in COLUMNS if key not in ("value", "row_order")}
    return Published(value=value, printed=row["value"], row=order, **texts)
