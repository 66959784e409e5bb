"""Queries for a paper's printed cells, and functions that compare their numbers and put them into words.

A query names fields that cells must have, with their values. Fields are model, method, base (the first stage of the
method), row (the row's label), table, dataset and metric. The parts of the setting, such as kv_size, are fields, too.
A value in a query is a text with ``*`` for anything, a number, or a list of these. The value '' finds rows whose
setting lacks the part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

import pandas as pd

from kvbench.base.errors import KvbenchError
from kvbench.papers.spec.numbers import printed_number
from kvbench.papers.spec.published import Published
from kvbench.papers.spec.published_cells import Book, PublishedRow

Labels = tuple[Any, ...]
"""The values of the fields that name one number of a series, in the order of the series' index."""


@dataclass(frozen=True)
class PaperCells:
    """The printed cells of one paper, and queries for them.

    All queries take ``table`` (one or several), ``of`` (datasets, or ``scores`` for all answers) and any other field by
    its name. ``without`` has the fields that a row must not have.

    book: the published cells, of this paper and others.
    paper: the paper's name.
    read: returns the number for a cell's printed characters.
    """

    book: Book
    paper: str
    read: Callable[[str], Any] = float

    def with_rounding(self) -> PaperCells:
        """Return the same cells, read as numbers that carry the interval that rounding hides."""
        return replace(self, read=printed_number)

    def number(self, **query: Any) -> Any:
        """Return the number of the one cell that a query finds. Raises KvbenchError for no cell or several."""
        values = [self.read(cell.printed) for _, _, cell in self.cells(**query)]
        if not values:
            raise KvbenchError(f"{self.paper}: {query} finds no cell")
        if len(values) > 1:
            raise KvbenchError(f"{self.paper}: {query} finds several cells of one name")
        return values[0]

    def drop(self, method: str, below: str = "full", **query: Any) -> Any:
        """Return how far the number of ``method`` lies below that of the method ``below``.

        query: the fields that both numbers have in common.
        """
        return self.number(method=below, **query) - self.number(method=method, **query)

    def series(self, by: str | Sequence[str], **query: Any) -> pd.Series[Any]:
        """Return the numbers of all cells that a query finds, as a series indexed by the fields ``by``.

        A cell without one of these fields has '' there.

        Raises KvbenchError if several cells agree in all of these fields.
        """
        fields_of_name = _as_list(by)
        values: dict[Labels, Any] = {}
        for fields, _, cell in self.cells(**query):
            name = tuple(fields.get(field, "") for field in fields_of_name)
            if name in values:
                raise KvbenchError(f"{self.paper}: {query} finds several cells of one name")
            values[name] = self.read(cell.printed)
        return _make_series(values, fields_of_name)

    def settings(self, part: str, by: str | Sequence[str], **query: Any) -> pd.Series[float]:
        """Return a part of the setting, such as ``kv_size``, of all cells that a query finds, by the fields ``by``.

        Every cell must have the part, and it must be a number.
        """
        fields_of_name = _as_list(by)
        values: dict[Labels, float] = {}
        # cells of one row can share a name, but they have the same setting, so the last one may win
        for fields, _, _ in self.cells(**query):
            name = tuple(fields.get(field, "") for field in fields_of_name)
            values[name] = float(fields[part])
        return _make_series(values, fields_of_name)

    def labels(self, field: str, **query: Any) -> list[str]:
        """Return the different values of a field among all cells that a query finds, sorted.

        A cell without the field counts with ''.
        """
        return sorted({fields.get(field, "") for fields, _, _ in self.cells(**query)})

    def rows(self, table: str) -> list[PublishedRow]:
        """Return the rows of one of the paper's tables."""
        return self.book.table(self.paper, table)

    def cells(
        self,
        table: str | int | Sequence[str | int],
        of: str | Sequence[str] = "*",
        without: Mapping[str, object] | None = None,
        **conditions: object,
    ) -> Iterator[tuple[dict[str, str], PublishedRow, Published]]:
        """Yield (fields, row, cell) of every cell with a number that a query finds. Fields are values by name.

        The parameters are those of all queries, as the class explains them.
        """
        exclusions = without or {}
        scores_only = of == "scores"
        if not scores_only:
            conditions["dataset"] = of
        for name in _as_list(table):
            for row in self.rows(name):
                for (dataset, metric), cell in row.cells.items():
                    # a cell with words has no number
                    if cell.value is None:
                        continue
                    # ``scores`` leaves out averages and metrics that are no scores
                    if scores_only and row.scores.get(dataset) is not cell:
                        continue
                    fields = _list_fields(row, dataset, metric)
                    meets_all = all(_matches(fields.get(key, ""), patterns) for key, patterns in conditions.items())
                    is_excluded = any(_matches(fields.get(key, ""), patterns) for key, patterns in exclusions.items())
                    if meets_all and not is_excluded:
                        yield fields, row, cell


def _list_fields(row: PublishedRow, dataset: str, metric: str) -> dict[str, str]:
    # if a part of the setting has the name of a field of the place, the place wins
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
    # a query may have a number where the setting has its text
    return any(fnmatchcase(value, str(pattern)) for pattern in _as_list(patterns))


def _as_list(value: object) -> list[Any]:
    if isinstance(value, list | tuple):
        return list(value)
    return [value]


def _make_series(values: Mapping[Labels, Any], fields: Sequence[str]) -> pd.Series[Any]:
    # levels are built one by one, since from_tuples could not tell how many an empty index has
    levels = []
    for i in range(len(fields)):
        levels.append([labels[i] for labels in values])
    index: pd.Index[Any] = pd.MultiIndex.from_arrays(levels, names=list(fields))
    # with one field, the labels themselves are easier to look up than tuples of one label
    if len(fields) == 1:
        index = index.get_level_values(0)
    return pd.Series(list(values.values()), index)


def subtract_cells(left: pd.Series[Any], right: pd.Series[Any]) -> pd.Series[Any]:
    """Return left - right cell by cell. ``right`` may have fewer fields; cells that it lacks are left out."""
    left, right = _align(left, right)
    return left - right


def divide_cells(left: pd.Series[Any], right: pd.Series[Any]) -> pd.Series[Any]:
    """Return left / right cell by cell. ``right`` may have fewer fields; cells that it lacks are left out."""
    left, right = _align(left, right)
    return left / right


def _align(left: pd.Series[Any], right: pd.Series[Any]) -> tuple[pd.Series[Any], pd.Series[Any]]:
    right = _reindex_like(left, right)
    return left[right.notna()], right.dropna()


def _reindex_like(left: pd.Series[Any], right: pd.Series[Any]) -> pd.Series[Any]:
    """Return the values of ``right`` with the index of ``left``; NaN where ``right`` has none."""
    # right may have only some of the fields of left: a full row, named by its model, stands beside every budget of the
    # model; pandas by itself aligns only series with the same fields, and sorts them
    levels = [left.index.get_level_values(field) for field in right.index.names]
    # the labels of each cell of left in the fields of right; with one field, labels are no tuples
    labels = levels[0] if len(levels) == 1 else pd.MultiIndex.from_arrays(levels)
    return pd.Series(right.reindex(labels).to_numpy(), left.index)


def group_by_field(values: pd.Series[Any], *fields: str) -> Any:
    """Return pandas' groups of the values by some of their fields, in the order of the paper."""
    return values.groupby(level=list(fields), sort=False)


def list_labels(values: pd.Series[Any], field: str) -> list[Any]:
    """Return the different labels of a field in the index of a series, sorted."""
    return sorted(set(values.index.get_level_values(field)))


def read_numeric_labels(values: pd.Series[Any]) -> pd.Series[float]:
    """Return a series whose values are its own labels as numbers, such as budgets."""
    return pd.Series([float(label) for label in values.index], values.index)


def group_lines(values: pd.Series[Any]) -> list[tuple[Labels, list[tuple[str, float]]]]:
    """Divide a series into lines, and return (labels, cells) of each line.

    The cells of a line agree in all fields but the last, along which the line runs. ``labels`` are those that the cells
    share. A cell is (last label, value).
    """
    cells_by_line: dict[Labels, list[tuple[str, float]]] = {}
    for name, value in values.items():
        *shared_labels, last_label = _as_labels(name)
        cells_by_line.setdefault(tuple(shared_labels), []).append((last_label, value))
    return list(cells_by_line.items())


def count_rising(values: pd.Series[Any]) -> int:
    """Return the number of lines of a series (see ``group_lines``) that never fall from one value to the next."""
    count = 0
    for _, cells in group_lines(values):
        numbers = [value for _, value in cells]
        if numbers == sorted(numbers):
            count += 1
    return count


def describe_falls(pattern: str, values: pd.Series[Any], least: float = 0, rising: bool = True) -> list[str]:
    """Return a text for each fall of a line (see ``group_lines``) by more than ``least``.

    pattern: the format of a text. It may name the line's fields, such as ``{model}``, the values ``a`` and ``b`` before
    and after the fall, and their labels ``first`` and ``then``.
    rising: True if lines should rise, so that falls are exceptions. With False the texts are about rises.
    """
    texts = []
    for labels, cells in group_lines(values):
        fields = _named_labels(values, labels)
        for (first, a), (then, b) in pairwise(cells):
            fall = a - b if rising else b - a
            if fall > least:
                texts.append(pattern.format(**fields, a=a, b=b, first=first, then=then))
    return texts


def describe_values(pattern: str, values: pd.Series[Any], sep: str = ", ", **more: pd.Series[Any]) -> str:
    """Return a text for every value, joined by ``sep``.

    pattern: the format of a text. It may name the fields of the series, such as ``{model}``, the number itself as
    ``{value}``, and numbers of the ``more`` series by their keywords.
    more: further series. One with fewer fields repeats its numbers.
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
    return {str(field): label for field, label in zip(values.index.names, labels, strict=False)}


def describe_lines(values: pd.Series[Any], form: str = "{}", sep: str = ", ") -> str:
    """Return a text with the labels and the values of each line (see ``group_lines``). ``form`` formats a value."""
    texts = []
    for labels, cells in group_lines(values):
        numbers = sep.join(form.format(value) for _, value in cells)
        texts.append(" ".join(list(labels) + [numbers]))
    return "; ".join(texts)


def _as_labels(name: Any) -> Labels:
    if isinstance(name, tuple):
        return name
    return (name,)
