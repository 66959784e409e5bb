"""Small formulas over published cells, as statements.yaml has them: queries for cells, expressions and texts.

A query is a mapping: ``table``, one or several; ``of``, datasets, or ``scores`` for all answers; ``metric``; ``by``,
the fields that name each cell; ``not``, fields that rows must not have; and any other field that they must have. Fields
are model, method, base (its first stage), row (the label), table, dataset, metric and the parts of the setting; a value
is a text with ``*`` for anything, or a list of them, and '' where a row has no such part. It gives the numbers by name,
or the one number where there is no ``by``; with ``take`` the numbers in that part of the setting; with ``labels`` the
different values of a field.

An expression combines numbers cell by cell. Functions of numbers by name take the fields that results are by, too.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import pairwise
from string import Formatter
from typing import Any

import pandas as pd

from kvbench.base.errors import KvbenchError
from kvbench.papers.spec.numbers import exactly
from kvbench.papers.spec.published import Published
from kvbench.papers.spec.published_cells import Book, PublishedRow

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
    ast.In: lambda a, b: a in b,
}


def query(book: Book, paper: str, entry: Mapping[str, Any], read: Callable[[str], Any] = float) -> Any:
    """Return the cells that a query finds in a paper's tables, each number as ``read`` from the printed text.

    Raises KvbenchError where several cells have one name, or none is the one that was asked for.
    """
    entry = dict(entry)
    by, take, labels = _list(entry.pop("by", [])), entry.pop("take", ""), entry.pop("labels", "")
    names, values = [], []
    for fields, _, cell in cells(book, paper, entry):
        names.append(tuple(fields.get(name, "") for name in ([labels] if labels else by)))
        values.append(float(fields[take]) if take else read(cell.printed))
    if labels:
        return sorted({name for (name,) in names})
    if not by and not values:
        raise KvbenchError(f"{paper}: {entry} finds no cell")
    if len(set(names)) < len(names) and not take:
        raise KvbenchError(f"{paper}: {entry} finds several cells of one name")
    if not by:
        return values[0]
    by_name = dict(zip(names, values, strict=True))
    levels = [list(level) for level in zip(*by_name, strict=True)] or [[]] * len(by)
    index = pd.MultiIndex.from_arrays(levels, names=by)
    return pd.Series(list(by_name.values()), index if len(by) > 1 else index.get_level_values(0))


def cells(book: Book, paper: str, entry: Mapping[str, Any]) -> Iterator[tuple[dict[str, str], PublishedRow, Published]]:
    """Yield the fields, row and cell of every number that a query names."""
    entry = dict(entry)
    tables, datasets, without = _list(entry.pop("table")), entry.pop("of", "*"), entry.pop("not", {})
    conditions = {**entry, **({} if datasets == "scores" else {"dataset": datasets})}
    for row in (row for table in tables for row in book.table(paper, table)):
        for (dataset, metric), cell in row.cells.items():
            base = row.method.partition("+")[0]
            names = {"table": row.table, "model": row.model, "method": row.method, "base": base, "row": row.label}
            fields = {**row.settings, **names, "dataset": dataset, "metric": metric}
            selected = cell.value is not None and (datasets != "scores" or row.scores.get(dataset) is cell)
            excluded = any(_fits(fields.get(k, ""), v) for k, v in without.items())
            if selected and not excluded and all(_fits(fields.get(k, ""), v) for k, v in conditions.items()):
                yield fields, row, cell


def _fits(value: str, wanted: Any) -> bool:
    """Tell whether a value matches one of the wanted patterns."""
    return any(fnmatchcase(value, str(w)) for w in _list(wanted))


def _list(value: Any) -> list[Any]:
    """Return a list as it is, and any other value as a list of one."""
    return value if isinstance(value, list) else [value]


def evaluate(expression: str, names: Mapping[str, Any]) -> Any:
    """Return the value of an expression of ``names``, numbers, texts, operators and functions of this module."""
    try:
        return _value(ast.parse(expression, mode="eval").body, names)
    except SyntaxError:
        raise KvbenchError(f"{expression!r} is no expression") from None


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return the value of a node of an expression; raise KvbenchError for what a formula cannot have."""

    def of(part: ast.expr) -> Any:
        return _value(part, names)

    match node:
        case ast.Constant():
            return node.value
        case ast.Name() if node.id in names:
            return names[node.id]
        case ast.List() | ast.Tuple():
            return tuple(of(part) for part in node.elts)
        case ast.Subscript():
            return of(node.value)[of(node.slice)]
        case ast.UnaryOp(op=ast.USub()):
            return -of(node.operand)
        case ast.UnaryOp(op=ast.Not()):
            return not of(node.operand)
        case ast.IfExp():
            return of(node.body) if of(node.test) else of(node.orelse)
        case ast.BoolOp():
            for part in node.values:
                result = of(part)
                if bool(result) == isinstance(node.op, ast.Or):
                    break
            return result
        case ast.BinOp() if type(node.op) in OPERATORS:
            return _combined(OPERATORS[type(node.op)], of(node.left), of(node.right))
        case ast.Compare() if all(type(o) in OPERATORS for o in node.ops):
            values = [of(part) for part in (node.left, *node.comparators)]
            result = [_combined(OPERATORS[type(o)], a, b) for o, (a, b) in zip(node.ops, pairwise(values), strict=True)]
            return result[0] if len(result) == 1 else all(result)
        case ast.Call(func=ast.Name(id=name)) if name in FUNCTIONS:
            return FUNCTIONS[name](*map(of, node.args), **{str(k.arg): of(k.value) for k in node.keywords})
    raise KvbenchError(f"{ast.unparse(node)} is not possible in a formula")


def _combined(op: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """Apply ``op`` cell by cell; ``right`` may have fewer fields, and cells that it lacks are left out."""
    if isinstance(left, pd.Series) and isinstance(right, pd.Series):
        right = _like(left, right)
        left, right = left[right.notna()], right.dropna()
    return op(left, right)


def _like(left: pd.Series[Any], right: pd.Series[Any]) -> pd.Series[Any]:
    """Return the values of ``right`` under the names of ``left``."""
    fields = list(right.index.names)
    levels = [left.index.get_level_values(f) for f in fields]
    names = levels[0] if len(fields) == 1 else pd.MultiIndex.from_arrays(levels)
    return pd.Series(right.reindex(names).to_numpy(), left.index)


def text(template: str, names: Mapping[str, Any]) -> str:
    """Return ``template`` with the values of the expressions in braces."""
    parts = []
    for literal, field, form, _ in Formatter().parse(template):
        parts.append(literal)
        if field is not None:
            parts.append(format(evaluate(field, names), form or ""))
    return "".join(parts)


def listed(pattern: str, values: pd.Series[Any], *more: pd.Series[Any], sep: str = ", ") -> str:
    """Format ``pattern`` for every value, with its labels, itself and those of ``more`` series."""
    parts = [_like(values, m) for m in more]
    lines = zip(values.index, values, *parts, strict=True)
    return sep.join(pattern.format(*(name if isinstance(name, tuple) else (name,)), *v) for name, *v in lines)


def falls(pattern: str, values: pd.Series[Any], least: float = 0, rising: bool = True) -> list[str]:
    """Format ``pattern`` (labels, ``a``, ``b``, ``first``, ``then``) for each fall by more than ``least`` in a row.

    With ``rising`` false it is formatted for each rise.
    """
    texts = []
    for name, series in _rows(values):
        for (first, a), (then, b) in pairwise(series):
            if (a - b if rising else b - a) > least:
                texts.append(pattern.format(*name, a=a, b=b, first=first, then=then))
    return texts


def rises(values: pd.Series[Any]) -> int:
    """Count the rows (all fields but the last) that rise or stay level."""
    return sum([v for _, v in series] == sorted(v for _, v in series) for _, series in _rows(values))


def rows(values: pd.Series[Any], form: str = "{}", sep: str = ", ") -> str:
    """Return each row's labels with its values."""
    return "; ".join(" ".join([*name, sep.join(form.format(v) for _, v in series)]) for name, series in _rows(values))


def winners(values: pd.Series[Any]) -> pd.Series[Any]:
    """Return the label of the smallest value of each row."""
    return pd.Series([min(series, key=lambda s: s[1])[0] for _, series in _rows(values)])


def _rows(values: pd.Series[Any]) -> list[tuple[tuple[str, ...], list[tuple[str, float]]]]:
    """Return the (last label, value) pairs of each row, by its other labels."""
    by_row: dict[tuple[str, ...], list[tuple[str, float]]] = {}
    for name, value in values.items():
        *row, last = name if isinstance(name, tuple) else (name,)
        by_row.setdefault(tuple(row), []).append((last, value))
    return list(by_row.items())


def _by(how: str) -> Callable[..., Any]:
    """Return a function of values, by the fields given or of all of them."""

    def function(values: pd.Series[Any], *fields: str) -> Any:
        """Aggregate values by ``fields``, or all of them."""
        return getattr(values.groupby(level=list(fields), sort=False) if fields else values, how)()

    return function


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{"min": _by("min"), "max": _by("max"), "mean": _by("mean"), "sum": _by("sum"), "size": _by("size")},
    **{"abs": abs, "len": len, "round": round, "list": tuple, "set": lambda v: tuple(sorted(set(v)))},
    **{
        "sorted": sorted,
        "best": lambda v: v.idxmax(),
        "worst": lambda v: v.idxmin(),
        "only": lambda v, w: v[w if isinstance(w, pd.Series) else list(w)],
    },
    **{"drop": lambda v, name: v.drop(name), "join": lambda v, sep=", ": sep.join(map(str, v))},
    **{"numbers": lambda v: pd.Series([float(n) for n in v.index], v.index), "falls": falls, "rises": rises},
    **{"paired": lambda a, b: pd.Series(a.to_numpy() - b.to_numpy(), a.index), "listed": listed, "rows": rows},
    **{"most": lambda v: max(v, key=float), "inverse": lambda v: v.map(lambda n: exactly(1) / n)},
    **{"winners": winners, "level": lambda v, field: sorted(set(v.index.get_level_values(field)))},
}
