"""The printed values of papers: one line per cell in the files of papers/data/<paper>/published/.

``table<N>.csv`` hold tables, ``fig<N>.csv`` numbers printed in a figure, and ``text.csv`` numbers stated in prose.
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
from kvbench.papers import data_files
from kvbench.papers.spec.numbers import decimals, format_fixed

COLUMNS = ("paper", "table", "model", "method", "setting", "dataset", "metric", "value", "unit", "row_order", "flag")
MARKS = {"suspect": "?", "repaired": "~", "missing": ""}
"""The sign behind a printed value by the kind of its flag."""
FRACTION = "fraction"
"""The unit of scores that the paper prints as fractions of 1."""
SCORES = ("f1", "rouge_l", "accuracy", "edit_sim", "bleu", "mean")
"""The metrics that score answers. All others measure bytes, times and budgets."""

AVERAGE = "avg"
"""The dataset of a cell that averages its row."""


@dataclass(frozen=True)
class Published:
    """One printed cell of a paper.

    table: the id of the table: a number, ``fig6`` or ``text``.
    model, method, dataset: their published names; '' where the cell has none.
    setting: the row's settings as ``key=value;key=value``.
    metric: the printed quantity, such as ``f1`` or ``ttft``.
    value: the printed number; None if the cell is text or empty.
    unit: the unit of the printed number, such as ``pct``, ``fraction`` or ``ms``.
    flag: '' for a certain value, or else ``suspect:``, ``repaired:`` or ``missing:`` with the reason. `` | `` separates
    two flags.
    printed: the characters on the page.
    row: the line of the paper's table, from 1.
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
        """The settings by key, such as {"kv_size": "128", "ratio": "0.4"}."""
        return dict(part.split("=", 1) for part in self.setting.split(";") if part)

    @property
    def flags(self) -> dict[str, str]:
        """The reasons by kind of flag (suspect, repaired, missing). A cell can have two flags."""
        # a reason may hold further colons
        return dict(part.split(":", 1) for part in self.flag.split(" | ") if part)

    @property
    def points(self) -> float | None:
        """The printed number, a fraction in per cent as our scores are; None if there is no number."""
        if self.value is None or self.unit != FRACTION:
            return self.value
        return 100 * self.value

    @property
    def shown(self) -> str:
        """The printed characters in the unit of our scores: 0.171 as 17.1."""
        if self.value is None or self.unit != FRACTION:
            return self.printed
        # times 100 moves two digits before the point; an exact fraction, since a float could change the last digit
        return format_fixed(100 * Fraction(self.printed), max(0, decimals(self.printed) - 2))

    @property
    def certainty(self) -> str:
        """The kind of the first flag (suspect, repaired or missing), or ``certain`` without a flag."""
        return self.flag.partition(":")[0] or "certain"


def table_ids() -> list[tuple[str, str]]:
    """Return (paper, table) of every file: numbered tables in their order, then ``fig6`` and ``text``."""
    names = [(path.parent.parent.name, path.stem.removeprefix("table")) for path in data_files("*/published/*.csv")]
    # numbers are ordered as texts of three characters: 010 comes behind 009
    return sorted(names, key=lambda name: (name[0], not name[1].isdigit(), name[1].zfill(3)))


@cache
def load_table(paper: str, table: str) -> tuple[Published, ...]:
    """Return the cells of one table in the order of its file.

    Raises UsageError for an unknown table, and KvbenchError with the file and the line of damage.
    """
    # table7.csv, fig6.csv and text.csv
    stem = f"table{table}" if table.isdigit() else table
    path = next(iter(data_files(f"{paper}/published/{stem}.csv")), None)
    if path is None:
        raise unknown("table", f"{paper}/{table}", ["/".join(name) for name in table_ids()])
    # newline="" leaves line ends inside quotes to the reader, as the csv module asks
    with path.open(encoding="utf-8", newline="") as lines:
        reader = csv.DictReader(lines)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise KvbenchError(f"{path}: its columns must be {','.join(COLUMNS)}")
        return tuple(_read_cell(path, reader.line_num, fields) for fields in reader)


def rows_with_scores(model: str, method: str, setting: str = "") -> Iterator[tuple[str, str, dict[str, Published]]]:
    """Yield every printed row of scores of a method on a model: (paper, table, cells by dataset).

    setting: ``key=value`` pairs, separated by semicolons, that a row must have among its settings.
    Only scores in per cent from numbered tables count.
    """
    wanted_settings = {part for part in setting.split(";") if part}
    for paper, table in table_ids():
        if not table.isdigit():
            continue
        # a method under several budgets has a row for each
        by_setting: dict[str, dict[str, Published]] = {}
        for cell in load_table(paper, table):
            is_row = model_id(cell.model) == model_id(model) and cell.method == method
            is_score = cell.metric in SCORES and cell.unit == "pct"
            if is_row and is_score and wanted_settings <= set(cell.setting.split(";")):
                by_setting.setdefault(cell.setting, {})[cell.dataset] = cell
        for cells in by_setting.values():
            yield paper, table, cells


def model_id(name: str) -> str:
    """Return kvbench's name of a model: ``llama2-7b-chat`` for the papers' ``llama-2-7b-chat``. Other names stay."""
    return re.sub(r"^llama-(\d)", r"llama\1", name.strip().lower())


def _read_cell(path: Path, line: int, fields: dict[str, str]) -> Published:
    # a metric's name, as in LongBench's tables, is a cell of text and has no value
    value = None
    try:
        if fields["value"] and fields["unit"] != "text":
            value = float(fields["value"])
        row = int(fields["row_order"])
    except ValueError:
        raise KvbenchError(f"{path}, line {line}: {fields['value']!r} is not a number, or the row's is not") from None
    dataset = fields["dataset"]
    # another spelling of an average would count as a dataset, and be averaged with the others
    if dataset != AVERAGE and dataset.strip(" .").lower() in (AVERAGE, "average", "mean"):
        raise KvbenchError(
            f"{path}, line {line}: the dataset {dataset!r} would be one more score of its row: write {AVERAGE} for an "
            "average, which is audited and computed"
        )
    texts = {name: text for name, text in fields.items() if name not in ("value", "row_order")}
    return Published(**texts, value=value, printed=fields["value"], row=row)
