"""Which measured row stands for which cell of a paper's efficiency table: kvbench/papers/<paper>/bench<N>.yaml.

    python -m kvbench.bench.papers        the tables' rows that are declared and not run, with the reason

A paper's absolute values are of its own devices: what compares is a ratio, ours to our base row, theirs to theirs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

import kvbench.papers
from kvbench.bench import records
from kvbench.bench.records import MEASURED, Row
from kvbench.errors import KvbenchError, unknown
from kvbench.papers import published
from kvbench.papers.published import Published

GB, MB, MIB = 1e9, 1e6, 2**20
UNITS = {"s": 1.0, "ms": 1e-3, "ms/token": 1e-3, "s/100token": 0.01, "GB": GB, "MB": MB, "MiB": MIB, "pct": 0.01}
"""Our seconds, bytes and fractions per printed unit."""


class Cell(NamedTuple):
    """One cell: ``value`` is ours in the printed ``unit``, ``ratio`` over our base row, ``published_ratio`` theirs.

    ``value`` and ``ratio`` are None where nothing was measured; ``marks`` say why, and what else the reader must know.
    """

    row: str
    column: str
    value: float | None
    unit: str
    ratio: float | None
    published_ratio: float | None
    marks: tuple[str, ...]
    model: str = ""
    published: float | None = None


@dataclass(frozen=True)
class Declared:
    """One table. ``workload`` has the names of its rows' settings in braces, or ``workloads`` one per dataset.

    methods: our row by published method, with as many of its settings as it takes to tell it apart. quantities: ours by
    published metric. base: the published method that ratios are to. not_run: reasons by model, method or dataset.
    """

    results: str
    model: str
    base: str
    methods: Mapping[str, str]
    quantities: Mapping[str, str]
    workload: str = ""
    workloads: Mapping[str, str] = field(default_factory=dict)
    marks: Sequence[str] = ()
    not_run: Mapping[str, str] = field(default_factory=dict)

    def ours(self, cell: Published, method: str | None = None) -> tuple[str, str] | None:
        """(workload, method) of our row for a published cell; None where there is none."""
        given = settings(cell)
        if cell.dataset in self.workloads:
            workload = self.workloads[cell.dataset]
        elif not self.workload:
            return None
        else:
            try:
                workload = self.workload.format(**given)
            except KeyError:
                return None
        name = self._method(method or cell.method, given)
        return None if name is None else (workload, name)

    def _method(self, method: str, given: Mapping[str, str]) -> str | None:
        facts = {f"{k}={v}" for k, v in given.items()}
        fitting = [w for w in self.methods if w.split()[0] == method and set(w.split()[1:]) <= facts]
        return self.methods[max(fitting, key=lambda w: len(w.split()))] if fitting else None

    def why_not(self, cell: Published) -> str:
        """The reason why a published cell is not run; '' if it is."""
        return next((self.not_run[k] for k in (cell.model, cell.method, cell.dataset) if k in self.not_run), "")


def settings(cell: Published) -> dict[str, str]:
    """A published row's setting by key."""
    return dict(part.partition("=")[::2] for part in cell.setting.split(";") if part)


def tables() -> list[tuple[str, str]]:
    """(paper, table) of every declaration."""
    found = [(p.parent.name, p.stem.removeprefix("bench")) for p in _root().glob("*/bench[0-9]*.yaml")]
    return sorted(found, key=lambda t: (t[0], int(t[1])))


@cache
def load(paper: str, table: str) -> Declared:
    """One declaration; UsageError for one that is not there, KvbenchError for a damaged file."""
    path = _root() / paper / f"bench{table}.yaml"
    if not path.exists():
        raise unknown("efficiency table", f"{paper}/{table}", [f"{p}/{t}" for p, t in tables()])
    try:
        return Declared(**yaml.safe_load(path.read_text(encoding="utf-8")))
    except (TypeError, yaml.YAMLError) as error:
        raise KvbenchError(f"{path}: {error}") from None


def measured(paper: str, table: str, folder: Path) -> list[Cell]:
    """Every printed cell of an efficiency table with what was measured for it in ``folder`` (results/gpu)."""
    declared = load(paper, table)
    rows = records.read(folder / f"{declared.results}.jsonl")
    printed = [c for c in published.load_table(paper, table) if c.dataset != "avg"]
    return [_cell(c, declared, printed, rows) for c in printed]


def _cell(cell: Published, declared: Declared, printed: Sequence[Published], rows: Sequence[Row]) -> Cell:
    row, column = f"{cell.method} {cell.setting}".strip(), f"{cell.dataset}/{cell.metric}"
    base = _printed_base(cell, declared, printed)
    theirs = cell.value / base.value if base is not None and base.value and cell.value is not None else None
    marks = list(declared.marks)
    why = declared.why_not(cell)
    at, quantity = declared.ours(cell), declared.quantities.get(cell.metric)
    if why or at is None or quantity is None:
        marks.append(f"not run: {why or 'no row is declared for it'}")
        return Cell(row, column, None, cell.unit, None, theirs, tuple(marks), cell.model, cell.value)
    found = _row(rows, declared, *at)
    if found is None:
        marks.append("not run: no row is there")
        return Cell(row, column, None, cell.unit, None, theirs, tuple(marks), cell.model, cell.value)
    if found["status"] != MEASURED:
        marks.append(f"{found['status']}: {found['reason']}".rstrip(": "))
    marks += [*found["marks"], str(found["facts"]["device"])]
    value, ratio = _value(found, rows, quantity), None
    beside = declared.ours(cell, declared.base)
    to = records.base(found, rows, beside[1]) if beside is not None else None
    if to is not None:
        other = _value(to, rows, quantity)
        ratio = value / other if value is not None and other else None
    shown = None if value is None else value / UNITS.get(cell.unit, 1.0)
    return Cell(row, column, shown, cell.unit, ratio, theirs, tuple(marks), cell.model, cell.value)


def _row(rows: Sequence[Row], declared: Declared, workload: str, method: str) -> Row | None:
    alike = {"model": declared.model, "workload": workload, "method": method}
    return next((r for r in reversed(rows) if all(r.get(k) == v for k, v in alike.items())), None)


def _printed_base(cell: Published, declared: Declared, printed: Sequence[Published]) -> Published | None:
    """The printed cell of the base method on the same model, dataset, device and workload."""

    def place(c: Published) -> tuple[Any, ...]:
        at = declared.ours(c, declared.base)
        return (c.model, c.dataset, c.metric, settings(c).get("gpu"), at and at[0])

    return next((c for c in printed if c.method == declared.base and place(c) == place(cell)), None)


def _value(row: Row, rows: Sequence[Row], quantity: str) -> float | None:
    if quantity in DERIVED:
        return DERIVED[quantity](row, rows)
    return records.value(row, quantity)


def _per(quantity: str, by: Callable[[Row], float]) -> Callable[[Row, Sequence[Row]], float | None]:
    def found(row: Row, rows: Sequence[Row]) -> float | None:
        value = records.value(row, quantity)
        return None if value is None else value / by(row)

    return found


DERIVED: dict[str, Callable[[Row, Sequence[Row]], float | None]] = {
    "token_time": _per("tpot", lambda r: float(r["batch"])),
    "first_token_time": _per("ttft", lambda r: float(r["batch"])),
    "latency": _per("total", lambda r: float(r["new"])),
    "kept": lambda r, rows: records.ratio(r, records.base(r, rows), "cache_bytes"),
    "speedup": lambda r, rows: records.ratio(r, records.base(r, rows), "throughput"),
}
"""Seconds of a token of one row; of one prompt's first token; of a token of all rows; and shares of the full cache."""


def not_run(paper: str, table: str) -> list[str]:
    """One line per reason why cells of a table are declared and not run."""
    return [f"{paper}/{table}: not run: {what}: {why}" for what, why in load(paper, table).not_run.items()]


def files(script: str) -> dict[str, list[str]]:
    """The arguments of ``bench time`` by file of results, as scripts/gpu_tables.sh prints them with --dry-run."""
    found: dict[str, list[str]] = {}
    for name, arguments in re.findall(r"^== (\S+), .*?: bench time (.*)$", script, re.M):
        found.setdefault(name, []).append(arguments)
    return found


@cache
def _root() -> Path:
    return Path(next(iter(kvbench.papers.__path__)))


def main() -> int:
    """Print what is declared and not run."""
    for paper, table in tables():
        for line in not_run(paper, table):
            print(line)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
