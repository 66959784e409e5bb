"""Values that papers print, as data: one line per cell in papers/<paper>/published/.

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

from kvbench.errors import KvbenchError, unknown
from kvbench.papers import files
from kvbench.papers.spec.numbers import decimals, fixed

COLUMNS = ("paper", "table", "model", "method", "setting", "dataset", "metric", "value", "unit", "row_order", "flag")
MARKS = {"suspect": "?", "repaired": "~", "missing": ""}
FRACTION = "fraction"
SCORES = ("f1", "rouge_l", "accuracy", "edit_sim", "bleu", "mean")
"""Metrics of answers; the others measure bytes, times and budgets."""


@dataclass(frozen=True)
class Published:
    """One printed cell. ``setting`` is ``key=value;key=value``, ``row`` the line of the paper's table, from 1.

    ``printed`` are the characters on the page, ``value`` their number: None where the cell is text or empty.
    ``flag`` is empty for a certain value, else ``suspect:``, ``repaired:`` or ``missing:`` with the reason.
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
        """``setting`` as a mapping."""
        return dict(part.split("=", 1) for part in self.setting.split(";") if part)

    @property
    def flags(self) -> dict[str, str]:
        """The reason by kind of flag (suspect, repaired, missing); a cell can have two."""
        return dict(part.split(":", 1) for part in self.flag.split(" | ") if part)

    @property
    def points(self) -> float | None:
        """``value`` in the unit of our scores: a printed fraction in per cent."""
        return self.value if self.value is None or self.unit != FRACTION else 100 * self.value

    @property
    def shown(self) -> str:
        """``printed`` in the unit of our scores: 0.171 as 17.1."""
        if self.value is None or self.unit != FRACTION:
            return self.printed
        return fixed(100 * Fraction(self.printed), max(0, decimals(self.printed) - 2))

    @property
    def certainty(self) -> str:
        """certain, suspect, repaired or missing."""
        return self.flag.partition(":")[0] or "certain"


def tables() -> list[tuple[str, str]]:
    """(paper, table) of every file there is: numbered tables in their order, then ``fig6`` and ``text``."""
    found = ((p.parent.parent.name, p.stem.removeprefix("table")) for p in files("*/published/*.csv"))
    return sorted(found, key=lambda f: (f[0], not f[1].isdigit(), f[1].zfill(3)))


@cache
def load_table(paper: str, table: str) -> tuple[Published, ...]:
    """The cells of one table in the paper's order; KvbenchError naming file and line for a damaged one."""
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
    """(paper, table, scores by dataset) of every row for that model and method whose setting holds all of ``setting``.

    Scores in per cent of numbered tables; a table with several such rows gives each, ``setting`` tells them apart.
    """
    asked = set(filter(None, setting.split(";")))
    for paper, table in tables():
        if not table.isdigit():
            continue
        found: dict[str, dict[str, Published]] = {}
        for cell in load_table(paper, table):
            mine = model_id(cell.model) == model_id(model) and cell.method == method
            if mine and cell.metric in SCORES and cell.unit == "pct" and asked <= set(cell.setting.split(";")):
                found.setdefault(cell.setting, {})[cell.dataset] = cell
        for cells in found.values():
            yield paper, table, cells


def model_id(name: str) -> str:
    """The papers' ``llama-2-7b-chat`` and kvbench's ``llama2-7b-chat`` as one name."""
    return re.sub(r"^llama-(\d)", r"llama\1", name.strip().lower())


def _cell(path: Path, line: int, row: dict[str, str]) -> Published:
    try:
        value = float(row["value"]) if row["value"] and row["unit"] != "text" else None
        order = int(row["row_order"])
    except ValueError:
        raise KvbenchError(f"{path}, line {line}: {row['value']!r} is not a number, or the row's is not") from None
    own = {key: row[key] for key in COLUMNS if key not in ("value", "row_order")}
    return Published(value=value, printed=row["value"], row=order, **own)
