"""Queries for a paper's printed cells, and functions that compare their numbers and put them into words.

A query is the fields that cells must have. Fields are model, method, base (its first stage), row (the label), table,
dataset, metric and the parts of the setting, such as kv_size. A field's value in a query is a text with ``*`` for
anything, a number, or a list of them. It is '' for a row without such a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

import pandas as pd

from kvbench.base.errors import KvbenchError
from kvbench.papers.spec.numbers import printed
from kvbench.papers.spec.published import Published
from kvbench.papers.spec.published_cells import Book, PublishedRow

Labels = tuple[Any, ...]
"""The fields of one cell of a series."""


@dataclass(frozen=True)
class PaperCells:
    """The printed cells of one paper. ``read`` makes a number of the printed characters.

    All queries take ``table`` (one or several), ``of`` (datasets, or ``scores`` for all answers), ``without`` (fields
    that a row must not have) and any other field by its name.
    """

    book: Book
    paper: str
    read: Callable[[str], Any] = float

    def with_rounding(self) -> PaperCells:
        """Return the same cells, read as numbers that carry the interval that rounding hides."""
        return replace(self, read=printed)

    def number(self, **query: Any) -> Any:
        """Return the number of the one cell that a query finds. Raises KvbenchError for no cell or several."""
        values = [self.read(cell.printed) for _, _, cell in self.cells(**query)]
        if not values:
            raise KvbenchError(f"{self.paper}: {query} finds no cell")
        if len(values) > 1:
            raise KvbenchError(f"{self.paper}: {query} finds several cells of one name")
        return values[0]

    def drop(self, method: str, below: str = "full", **query: Any) -> Any:
        """Return by how much the number of ``method`` lies below the number of the method ``below``."""
        return self.number(method=below, **query) - self.number(method=method, **query)

    def series(self, by: str | Sequence[str], **query: Any) -> pd.Series[Any]:
        """Return the numbers of all cells that a query finds, named by the fields ``by``.

        Raises KvbenchError if several cells have one name.
        """
        fields_of_name = _as_list(by)
        values: dict[Labels, Any] = {}
        for fields, _, cell in self.cells(**query):
            name = tuple(fields.get(field, "") for field in fields_of_name)
            if name in values:
                raise KvbenchError(f"{self.paper}: {query} finds several cells of one name")
            values[name] = self.read(cell.printed)
        return _series(values, fields_of_name)

    def settings(self, part: str, by: str | Sequence[str], **query: Any) -> pd.Series[float]:
        """Return a part of the setting of all cells that a query finds, named by the fields ``by``."""
        # the cells of a row state one setting, so they may share a name
        fields_of_name = _as_list(by)
        values = {}
        for fields, _, _ in self.cells(**query):
            values[tuple(fields.get(field, "") for field in fields_of_name)] = float(fields[part])
        return _series(values, fields_of_name)

    def labels(self, field: str, **query: Any) -> list[str]:
        """Return the different values of a field in all cells that a query finds, sorted."""
        return sorted({fields.get(field, "") for fields, _, _ in self.cells(**query)})

    def rows(self, table: str) -> list[PublishedRow]:
        """Return the rows of a table."""
        return self.book.table(self.paper, table)

    def cells(
        self,
        table: str | int | Sequence[str | int],
        of: str | Sequence[str] = "*",
        without: Mapping[str, object] | None = None,
        **conditions: object,
    ) -> Iterator[tuple[dict[str, str], PublishedRow, Published]]:
        """Yield the fields, row and cell of every number that a query finds."""
        if of != "scores":
            conditions["dataset"] = of
        for name in _as_list(table):
            for row in self.rows(name):
                for (dataset, metric), cell in row.cells.items():
                    # words are no numbers, and ``scores`` leaves out averages and other metrics
                    if cell.value is None or (of == "scores" and row.scores.get(dataset) is not cell):
                        continue
                    fields = _fields(row, dataset, metric)
                    wanted = [_matches(fields.get(key, ""), patterns) for key, patterns in conditions.items()]
                    unwanted = [_matches(fields.get(key, ""), patterns) for key, patterns in (without or {}).items()]
                    if all(wanted) and not any(unwanted):
                        yield fields, row, cell


def _fields(row: PublishedRow, dataset: str, metric: str) -> dict[str, str]:
    """Return the fields of a cell that a query can name: the parts of its row's setting, and its place."""
    # a field of the place would hide a part of the setting with the same name
    return row.settings | {
        "table": row.table,
        "model": row.model,
        "method": row.method,
        "base": row.method.partition("+")[0],
        "row": row.label,
        "dataset": dataset,
        "metric": metric,
    }


def _matches(value: str, patterns: object) -> bool:
    """Tell whether a value matches a pattern, or one of several."""
    # queries may have numbers where a setting has texts
    return any(fnmatchcase(value, str(pattern)) for pattern in _as_list(patterns))


def _as_list(value: object) -> list[Any]:
    """Return several values as a list, and a single one as a list of one."""
    if isinstance(value, list | tuple):
        return list(value)
    return [value]


def _series(values: Mapping[Labels, Any], fields: Sequence[str]) -> pd.Series[Any]:
    """Return a series with a level for each field of the names. With one field, its names are plain texts."""
    # a query that finds nothing also gets levels, though empty ones
    levels = []
    for i in range(len(fields)):
        levels.append([name[i] for name in values])
    index: pd.Index[Any] = pd.MultiIndex.from_arrays(levels, names=list(fields))
    if len(fields) == 1:
        index = index.get_level_values(0)
    return pd.Series(list(values.values()), index)


def difference(left: pd.Series[Any], right: pd.Series[Any]) -> pd.Series[Any]:
    """Return left - right cell by cell. ``right`` may have fewer fields; cells that it lacks are left out."""
    left, right = _align(left, right)
    return left - right


def ratio(left: pd.Series[Any], right: pd.Series[Any]) -> pd.Series[Any]:
    """Return left / right cell by cell. ``right`` may have fewer fields; cells that it lacks are left out."""
    left, right = _align(left, right)
    return left / right


def _align(left: pd.Series[Any], right: pd.Series[Any]) -> tuple[pd.Series[Any], pd.Series[Any]]:
    """Return the cells of ``left`` that ``right`` has, and the values of ``right`` under their names."""
    right = _reindex_like(left, right)
    return left[right.notna()], right.dropna()


def _reindex_like(left: pd.Series[Any], right: pd.Series[Any]) -> pd.Series[Any]:
    """Return the values of ``right`` under the names of ``left``."""
    # pandas alone aligns only series with the same fields, and sorts them; here the fields of right are a part of those
    # of left: a full row by model stands beside each budget of a model
    fields = list(right.index.names)
    levels = [left.index.get_level_values(field) for field in fields]
    names = levels[0] if len(fields) == 1 else pd.MultiIndex.from_arrays(levels)
    return pd.Series(right.reindex(names).to_numpy(), left.index)


def by_field(values: pd.Series[Any], *fields: str) -> Any:
    """Return the values grouped by some of their fields, in the order of the paper."""
    return values.groupby(level=list(fields), sort=False)


def labels_of(values: pd.Series[Any], field: str) -> list[Any]:
    """Return the different labels of a field, sorted."""
    return sorted(set(values.index.get_level_values(field)))


def numeric_labels(values: pd.Series[Any]) -> pd.Series[float]:
    """Return the labels of a series as its values. The labels are numbers such as budgets."""
    return pd.Series([float(label) for label in values.index], values.index)


def group_lines(values: pd.Series[Any]) -> list[tuple[Labels, list[tuple[str, float]]]]:
    """Return the lines of a series: cells that agree in all fields but the last.

    Each line has its labels, and (last label, value) of each cell.
    """
    cells_by_line: dict[Labels, list[tuple[str, float]]] = {}
    for name, value in values.items():
        # the last field runs along a line, as budgets do behind models and methods
        labels = _as_labels(name)
        cells_by_line.setdefault(labels[:-1], []).append((labels[-1], value))
    return list(cells_by_line.items())


def count_rising(values: pd.Series[Any]) -> int:
    """Return the number of lines that never fall from one value to the next."""
    count = 0
    for _, cells in group_lines(values):
        numbers = [value for _, value in cells]
        if numbers == sorted(numbers):
            count += 1
    return count


def describe_falls(pattern: str, values: pd.Series[Any], least: float = 0, rising: bool = True) -> list[str]:
    """Return a text for each place at which a line falls by more than ``least`` instead of rising.

    pattern: the format of a text. It may name the line's fields, such as ``{model}``, the values ``a`` and ``b`` before
    and after the fall, and their places ``first`` and ``then``.
    rising: False for lines that should fall. The texts are then about their rises.
    """
    texts = []
    for labels, cells in group_lines(values):
        fields = _named_labels(values, labels)
        for (first, a), (then, b) in pairwise(cells):
            fall = a - b
            if not rising:
                fall = b - a
            if fall > least:
                texts.append(pattern.format(**fields, a=a, b=b, first=first, then=then))
    return texts


def describe_values(pattern: str, values: pd.Series[Any], sep: str = ", ", **more: pd.Series[Any]) -> str:
    """Format ``pattern`` for every value, and return the texts in one line.

    The pattern names the fields of the series, such as ``{model}``, the number itself as ``{value}``, and numbers of
    ``more`` series by their keywords. These series may have fewer fields, and then their numbers repeat.
    """
    columns = {"value": values}
    for keyword, series in more.items():
        columns[keyword] = _reindex_like(values, series)
    texts = []
    for i, labels in enumerate(values.index):
        fields = _named_labels(values, _as_labels(labels))
        numbers = {keyword: column.iloc[i] for keyword, column in columns.items()}
        texts.append(pattern.format(**fields, **numbers))
    return sep.join(texts)


def _named_labels(values: pd.Series[Any], labels: Labels) -> dict[str, object]:
    """Return the labels of one cell of a series, or its first labels, by the names of their fields."""
    return {str(field): label for field, label in zip(values.index.names, labels, strict=False)}


def describe_lines(values: pd.Series[Any], form: str = "{}", sep: str = ", ") -> str:
    """Return a text with each line's labels and values, formatted by ``form``."""
    texts = []
    for labels, cells in group_lines(values):
        numbers = sep.join(form.format(value) for _, value in cells)
        texts.append(" ".join(list(labels) + [numbers]))
    return "; ".join(texts)


def _as_labels(name: Any) -> Labels:
    """Return the labels of a cell as a tuple. pandas gives a single label alone."""
    if isinstance(name, tuple):
        return name
    return (name,)
