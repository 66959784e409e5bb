"""A paper's printed cells as a frame, its numbers as series, and series in words.

The frame has a line for each cell with a number. Its columns are table, model, method, base (the first stage of the
method), row (the row's label), dataset, metric, score (whether it is a score and no average), value and cell, and the
parts of all settings. A row whose setting lacks a part has '' there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

import pandas as pd
from pandas import Series

from kvbench.base.errors import KvbenchError
from kvbench.papers.spec.published_cells import Book


def read_frame(book: Book, paper: str, read: Callable[[str], Any] = float) -> pd.DataFrame:
    """Return the cells of one paper as a frame. ``read`` returns the number for a cell's printed characters."""
    lines = []
    for row in book.rows:
        for (dataset, metric), cell in row.cells.items():
            if row.paper != paper or cell.value is None:
                continue
            # if a part of the setting has the name of another column, that column wins
            place = {"table": row.table, "model": row.model, "method": row.method, "row": row.label}
            place |= {"base": row.method.partition("+")[0], "dataset": dataset, "metric": metric}
            numbers = {"score": row.scores.get(dataset) is cell, "value": read(cell.printed), "cell": cell}
            lines.append(row.settings | place | numbers)
    return pd.DataFrame(lines).fillna("")


def find(cells: pd.DataFrame, **fields: object) -> pd.DataFrame:
    """Return the lines with these values by column: a text with ``*`` for anything, a number, or a list of these."""
    for name, wanted in fields.items():
        patterns = wanted if isinstance(wanted, list) else [wanted]
        cells = cells[[_fits(str(value), patterns) for value in cells[name]]]
    return cells


def _fits(text: str, patterns: Sequence[object]) -> bool:
    return any(fnmatchcase(text, str(pattern)) for pattern in patterns)


def series(cells: pd.DataFrame, by: str | list[str], **fields: object) -> Series[Any]:
    """Return the numbers of the lines that ``find`` finds, by the columns ``by``.

    Raises KvbenchError if two of them agree in all of these columns.
    """
    numbers = find(cells, **fields).set_index(by)["value"]
    if numbers.index.has_duplicates:
        raise KvbenchError(f"{fields} finds several cells of one name")
    return numbers


def number(cells: pd.DataFrame, **fields: object) -> Any:
    """Return the number of the one line that ``find`` finds. Raises KvbenchError for none or several."""
    values = list(find(cells, **fields)["value"])
    if len(values) != 1:
        found = "several cells of one name" if values else "no cell"
        raise KvbenchError(f"{fields} finds {found}")
    return values[0]


def drop(cells: pd.DataFrame, method: str, below: str = "full", **fields: object) -> Any:
    """Return how far the number of ``method`` lies below that of the method ``below``."""
    return number(cells, method=below, **fields) - number(cells, method=method, **fields)


def labels(cells: pd.DataFrame, column: str, **fields: object) -> list[str]:
    """Return the different values of a column among the lines that ``find`` finds, sorted."""
    return sorted(set(find(cells, **fields)[column]))


def subtract(left: Series[Any], right: Series[Any]) -> Series[Any]:
    """Return left - right cell by cell. ``right`` may have fewer levels; cells that it lacks are left out."""
    right = _repeat(right, left)
    return left[right.notna()] - right.dropna()


def divide(left: Series[Any], right: Series[Any]) -> Series[Any]:
    """Return left / right cell by cell. ``right`` may have fewer levels; cells that it lacks are left out."""
    right = _repeat(right, left)
    return left[right.notna()] / right.dropna()


def _repeat(right: Series[Any], left: Series[Any]) -> Series[Any]:
    # a full row, named by its model, stands beside every budget of the model; pandas would sort the cells
    levels = [left.index.get_level_values(name) for name in right.index.names]
    names = levels[0]
    if len(levels) > 1:
        names = pd.MultiIndex.from_arrays(levels)
    return Series(right.reindex(names).to_numpy(), left.index)


def group(values: Series[Any], *levels: str) -> Any:
    """Return pandas' groups of the values by some of their levels, in the order of the paper."""
    return values.groupby(level=list(levels), sort=False)


def group_lines(values: Series[Any]) -> list[tuple[tuple[Any, ...], list[tuple[str, float]]]]:
    """Divide a series into lines along its last level. Return (other labels, (last label, value) of each cell)."""
    lines: dict[tuple[Any, ...], list[tuple[str, float]]] = {}
    for name, value in zip(_list_names(values), values, strict=True):
        lines.setdefault(name[:-1], []).append((name[-1], value))
    return list(lines.items())


def count_rising(values: Series[Any]) -> int:
    """Return the number of lines of a series (see ``group_lines``) that never fall from one value to the next."""
    count = 0
    for _, cells in group_lines(values):
        line = [value for _, value in cells]
        count += line == sorted(line)
    return count


def describe_falls(pattern: str, values: Series[Any], least: float = 0, rising: bool = True) -> list[str]:
    """Return a text for each fall of a line (see ``group_lines``) by more than ``least``.

    pattern: the format of a text, with the line's levels, the values ``a`` and ``b`` before and after the fall, and
    their labels ``first`` and ``then``.
    rising: False if lines should fall, so that the texts are about rises.
    """
    texts = []
    for shared, cells in group_lines(values):
        fields = dict(zip(values.index.names, shared, strict=False))
        for (first, a), (then, b) in pairwise(cells):
            fall = a - b if rising else b - a
            if fall > least:
                texts.append(pattern.format(**fields, a=a, b=b, first=first, then=then))
    return texts


def describe_values(pattern: str, values: Series[Any], sep: str = ", ", **more: Series[Any]) -> str:
    """Return a text for every value, joined by ``sep``.

    pattern: the format of a text, with the series' levels, the number itself as ``value``, and those of ``more``.
    """
    columns = {"value": values} | {name: _repeat(column, values) for name, column in more.items()}
    texts = []
    for i, name in enumerate(_list_names(values)):
        fields = dict(zip(values.index.names, name, strict=True))
        texts.append(pattern.format(**fields, **{key: column.iloc[i] for key, column in columns.items()}))
    return sep.join(texts)


def describe_lines(values: Series[Any], form: str = "{}", sep: str = ", ") -> str:
    """Return a text with the labels and the values of each line (see ``group_lines``). ``form`` formats a value."""
    texts = []
    for shared, cells in group_lines(values):
        line = sep.join(form.format(value) for _, value in cells)
        texts.append(" ".join(list(shared) + [line]))
    return "; ".join(texts)


def _list_names(values: Series[Any]) -> Sequence[tuple[Any, ...]]:
    # with one level, pandas gives the label alone
    if values.index.nlevels > 1:
        return list(values.index)
    return [(label,) for label in values.index]
