"""Small formulas over published cells, as statements.yaml has them: queries for cells, expressions and texts.

A query is a mapping with these keys:

table: one table or several.
of: datasets, or ``scores`` for all answers.
metric: the metric.
by: the fields that name each cell. Without it, the query gives one number.
not: fields that rows must not have.
take: a part of the setting whose numbers are taken in place of the cells'.
labels: a field whose different values are taken in place of numbers.
Any other key is a field that rows must have.

Fields are model, method, base (its first stage), row (the label), table, dataset, metric and the parts of the setting.
A field's value in a query is a text with ``*`` for anything, or a list of them. It is '' where a row has no such part.

An expression combines numbers cell by cell. Functions of numbers by name take the fields that results are by, too.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from operator import itemgetter
from string import Formatter
from typing import Any

import pandas as pd

from kvbench.base.errors import KvbenchError
from kvbench.papers.spec.numbers import Number, exactly
from kvbench.papers.spec.published import Published
from kvbench.papers.spec.published_cells import Book, PublishedRow


def _is_in(item: Any, values: Any) -> bool:
    """Tell whether a text or a number is among others."""
    return item in values


OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.In: _is_in,
}


def query(book: Book, paper: str, entry: Mapping[str, object], read: Callable[[str], Any] = float) -> Any:
    """Return the cells that a query finds in a paper's tables, each number as ``read`` from the printed text.

    Raises KvbenchError where several cells have one name, or where the one number of a query without ``by`` is missing.
    """
    conditions = dict(entry)
    by = [str(field) for field in _as_list(conditions.pop("by", []))]
    take = str(conditions.pop("take", ""))
    labels = str(conditions.pop("labels", ""))
    # the cells of one label count once, so that no names can collide
    if labels:
        return sorted({fields.get(labels, "") for fields, _, _ in cells(book, paper, conditions)})
    names, values = [], []
    for fields, _, cell in cells(book, paper, conditions):
        names.append(tuple(fields.get(field, "") for field in by))
        values.append(float(fields[take]) if take else read(cell.printed))
    if not by and not values:
        raise KvbenchError(f"{paper}: {conditions} finds no cell")
    # several cells of a row may state one part of its setting
    if len(set(names)) < len(names) and not take:
        raise KvbenchError(f"{paper}: {conditions} finds several cells of one name")
    if not by:
        return values[0]
    # ``take`` allows several cells of one name, and one of them stays
    value_by_name = dict(zip(names, values, strict=True))
    return pd.Series(list(value_by_name.values()), _index(list(value_by_name), by))


def _index(names: Sequence[tuple[str, ...]], fields: Sequence[str]) -> pd.Index[Any]:
    """Return the names of a series, with a level for each field, or plain texts where there is one field."""
    # a query that finds nothing has levels as well, though empty ones
    levels = []
    for i in range(len(fields)):
        levels.append([name[i] for name in names])
    index = pd.MultiIndex.from_arrays(levels, names=list(fields))
    if len(fields) == 1:
        return index.get_level_values(0)
    return index


def cells(
    book: Book, paper: str, entry: Mapping[str, object]
) -> Iterator[tuple[dict[str, str], PublishedRow, Published]]:
    """Yield the fields, row and cell of every number that a query names."""
    # keys that are left in ``conditions`` are fields that a cell must have
    conditions = dict(entry)
    tables = _as_list(conditions.pop("table"))
    datasets = conditions.pop("of", "*")
    exclusions = conditions.pop("not", {})
    assert isinstance(exclusions, Mapping)
    if datasets != "scores":
        conditions["dataset"] = datasets
    for table in tables:
        for row in book.table(paper, table):
            for (dataset, metric), cell in row.cells.items():
                # formulas compute with numbers alone, and ``scores`` leaves out averages and other metrics
                if cell.value is None or (datasets == "scores" and row.scores.get(dataset) is not cell):
                    continue
                fields = _fields(row, dataset, metric)
                wanted = [_matches(fields.get(key, ""), patterns) for key, patterns in conditions.items()]
                unwanted = [_matches(fields.get(key, ""), patterns) for key, patterns in exclusions.items()]
                if all(wanted) and not any(unwanted):
                    yield fields, row, cell


def _fields(row: PublishedRow, dataset: str, metric: str) -> dict[str, str]:
    """Return the fields of a cell that a query can name: the parts of its row's setting, and its place."""
    # a part of the setting called like a field of the place would be hidden by it
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
    # YAML has numbers where a setting has texts
    return any(fnmatchcase(value, str(pattern)) for pattern in _as_list(patterns))


def _as_list(value: object) -> list[Any]:
    """Return a list as it is, and any other value as a list of one."""
    if isinstance(value, list):
        return value
    return [value]


def evaluate(expression: str, names: Mapping[str, object]) -> Any:
    """Return the value of an expression of ``names``, numbers, texts, operators and functions of this module."""
    # the tree is walked here instead of compiled, so that a file of a paper can run no other code
    try:
        return _evaluate_node(ast.parse(expression, mode="eval").body, names)
    except SyntaxError:
        raise KvbenchError(f"{expression!r} is no expression") from None


def _evaluate_node(node: ast.expr, names: Mapping[str, object]) -> Any:
    """Return the value of a node of an expression. Raises KvbenchError for a node that a formula cannot have."""

    def value_of(part: ast.expr) -> Any:
        return _evaluate_node(part, names)

    match node:
        case ast.Constant():
            return node.value
        case ast.Name() if node.id in names:
            return names[node.id]
        case ast.List() | ast.Tuple():
            return tuple(value_of(part) for part in node.elts)
        case ast.Subscript():
            return value_of(node.value)[value_of(node.slice)]
        case ast.UnaryOp(op=ast.USub()):
            return -value_of(node.operand)
        case ast.UnaryOp(op=ast.Not()):
            return not value_of(node.operand)
        case ast.IfExp():
            if value_of(node.test):
                return value_of(node.body)
            return value_of(node.orelse)
        case ast.BoolOp():
            # ``or`` ends with the first true part, ``and`` with the first false one, as in Python
            for part in node.values:
                result = value_of(part)
                if bool(result) == isinstance(node.op, ast.Or):
                    break
            return result
        case ast.BinOp() if type(node.op) in OPERATORS:
            return _combine_cells(OPERATORS[type(node.op)], value_of(node.left), value_of(node.right))
        case ast.Compare() if all(type(op) in OPERATORS for op in node.ops):
            return _compare(node, names)
        case ast.Call(func=ast.Name(id=name)) if name in FUNCTIONS:
            arguments = [value_of(part) for part in node.args]
            keywords = {str(keyword.arg): value_of(keyword.value) for keyword in node.keywords}
            return FUNCTIONS[name](*arguments, **keywords)
    raise KvbenchError(f"{ast.unparse(node)} is not possible in a formula")


def _compare(node: ast.Compare, names: Mapping[str, object]) -> Any:
    """Return ``a < b`` of numbers or cell by cell, and whether all of ``a < b < c`` hold."""
    parts = [node.left]
    parts.extend(node.comparators)
    values = [_evaluate_node(part, names) for part in parts]
    results = []
    for op, (left, right) in zip(node.ops, pairwise(values), strict=True):
        results.append(_combine_cells(OPERATORS[type(op)], left, right))
    if len(results) == 1:
        return results[0]
    return all(results)


def _combine_cells(op: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """Apply ``op`` cell by cell. ``right`` may have fewer fields, and cells that it lacks are left out."""
    # two series, or a series and a number; pandas alone would align series of the same fields only
    if isinstance(left, pd.Series) and isinstance(right, pd.Series):
        right = _reindex_like(left, right)
        left, right = left[right.notna()], right.dropna()
    return op(left, right)


def _reindex_like(left: pd.Series[Any], right: pd.Series[Any]) -> pd.Series[Any]:
    """Return the values of ``right`` under the names of ``left``."""
    # the fields of right are a part of those of left: a full row by model stands beside each budget of a model
    fields = list(right.index.names)
    levels = [left.index.get_level_values(field) for field in fields]
    names = levels[0] if len(fields) == 1 else pd.MultiIndex.from_arrays(levels)
    return pd.Series(right.reindex(names).to_numpy(), left.index)


def text(template: str, names: Mapping[str, object]) -> str:
    """Return ``template`` with the values of the expressions in braces."""
    parts = []
    for literal, expression, form, _ in Formatter().parse(template):
        parts.append(literal)
        # None behind the last braces
        if expression is not None:
            parts.append(format(evaluate(expression, names), form or ""))
    return "".join(parts)


Row = tuple[tuple[str, ...], list[tuple[str, float]]]
"""The cells of a series that agree in all fields but the last: their labels, and (last label, value) of each cell."""


def _rows(values: pd.Series[Any]) -> list[Row]:
    """Return the cells of a series by row, in their order."""
    cells_by_row: dict[tuple[str, ...], list[tuple[str, float]]] = {}
    for name, value in values.items():
        # the last field runs along a row, as budgets do behind models and methods
        *row, last = _labels(name)
        cells_by_row.setdefault(tuple(row), []).append((last, value))
    return list(cells_by_row.items())


def _labels(name: Any) -> tuple[Any, ...]:
    """Return the labels of a cell as a tuple, which pandas does not make where there is one field."""
    if isinstance(name, tuple):
        return name
    return (name,)


def listed(pattern: str, values: pd.Series[Any], *more: pd.Series[Any], sep: str = ", ") -> str:
    """Format ``pattern`` for every value, with its labels, itself and those of ``more`` series."""
    # the series may have fewer fields than values: their numbers repeat
    columns = [values] + [_reindex_like(values, series) for series in more]
    texts = []
    for name, *numbers in zip(values.index, *columns, strict=True):
        texts.append(pattern.format(*_labels(name), *numbers))
    return sep.join(texts)


def falls(pattern: str, values: pd.Series[Any], least: float = 0, rising: bool = True) -> list[str]:
    """Format ``pattern`` (labels, ``a``, ``b``, ``first``, ``then``) for each fall by more than ``least`` in a row.

    With ``rising`` false it is formatted for each rise.
    """
    texts = []
    for labels, row_cells in _rows(values):
        for (first, a), (then, b) in pairwise(row_cells):
            # a is the earlier value and b the one behind it
            fall = a - b if rising else b - a
            if fall > least:
                texts.append(pattern.format(*labels, a=a, b=b, first=first, then=then))
    return texts


def rises(values: pd.Series[Any]) -> int:
    """Count the rows (all fields but the last) that rise or stay level."""
    count = 0
    for _, row_cells in _rows(values):
        numbers = [value for _, value in row_cells]
        if numbers == sorted(numbers):
            count += 1
    return count


def rows(values: pd.Series[Any], form: str = "{}", sep: str = ", ") -> str:
    """Return each row's labels with its values."""
    texts = []
    for labels, row_cells in _rows(values):
        numbers = sep.join(form.format(value) for _, value in row_cells)
        texts.append(" ".join((*labels, numbers)))
    return "; ".join(texts)


def winners(values: pd.Series[Any]) -> pd.Series[Any]:
    """Return the label of the smallest value of each row."""
    labels = []
    for _, row_cells in _rows(values):
        label, _ = min(row_cells, key=itemgetter(1))
        labels.append(label)
    return pd.Series(labels)


def best(values: pd.Series[Any]) -> Any:
    """Return the label of the largest value."""
    return values.idxmax()


def worst(values: pd.Series[Any]) -> Any:
    """Return the label of the smallest value."""
    return values.idxmin()


def only(values: pd.Series[Any], wanted: Any) -> pd.Series[Any]:
    """Return the values of some labels, or those where a series of comparisons is true."""
    if isinstance(wanted, pd.Series):
        return values[wanted]
    return values[list(wanted)]


def drop(values: pd.Series[Any], label: str) -> pd.Series[Any]:
    """Return the values without that of a label."""
    return values.drop(label)


def join(texts: Iterable[object], sep: str = ", ") -> str:
    """Return texts or numbers in one text."""
    return sep.join(map(str, texts))


def distinct(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return the different values, sorted."""
    return tuple(sorted(set(values)))


def numbers(values: pd.Series[Any]) -> pd.Series[Any]:
    """Return the labels of a series as its values, which are numbers, such as budgets."""
    return pd.Series([float(label) for label in values.index], values.index)


def paired(left: pd.Series[Any], right: pd.Series[Any]) -> pd.Series[Any]:
    """Return left less right in their order, whatever the labels of right are."""
    return pd.Series(left.to_numpy() - right.to_numpy(), left.index)


def most(values: Iterable[Any]) -> Any:
    """Return the largest of printed numbers, with its rounding."""
    return max(values, key=float)


def inverse(values: pd.Series[Any]) -> pd.Series[Any]:
    """Return 1 over each printed number, with its rounding."""

    def one_over(number: Number) -> Number:
        return exactly(1) / number

    return values.map(one_over)


def level(values: pd.Series[Any], field: str) -> list[Any]:
    """Return the different labels of a field, sorted."""
    return sorted(set(values.index.get_level_values(field)))


def _aggregate(how: str) -> Callable[..., Any]:
    """Return a function of values, by the fields given or of all of them."""

    def function(values: pd.Series[Any], *fields: str) -> Any:
        """Aggregate values by ``fields``, or all of them."""
        # sort=False keeps the groups in the order of the paper
        if not fields:
            return getattr(values, how)()
        return getattr(values.groupby(level=list(fields), sort=False), how)()

    return function


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": _aggregate("min"),
    "max": _aggregate("max"),
    "mean": _aggregate("mean"),
    "sum": _aggregate("sum"),
    "size": _aggregate("size"),
    "abs": abs,
    "len": len,
    "round": round,
    "list": tuple,
    "set": distinct,
    "sorted": sorted,
    "best": best,
    "worst": worst,
    "only": only,
    "drop": drop,
    "join": join,
    "numbers": numbers,
    "falls": falls,
    "rises": rises,
    "paired": paired,
    "listed": listed,
    "rows": rows,
    "most": most,
    "inverse": inverse,
    "winners": winners,
    "level": level,
}
"""The functions of formulas by the name that YAML has for them."""
