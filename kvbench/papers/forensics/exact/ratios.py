"""Times, rates and drops that follow from others: the formulas of each paper's exact.yaml."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pandas as pd
import yaml

from kvbench.papers import DATA
from kvbench.papers.forensics.exact.base import Exact
from kvbench.papers.forensics.formulas import cells, evaluate, query
from kvbench.papers.spec.numbers import printed
from kvbench.papers.spec.published_cells import Book


def ratios(book: Book) -> Iterator[Exact]:
    """The cells that an entry names ``by`` some fields, with its formula of numbers by the same fields, or of one."""
    for paper, entry in _entries():
        if paper not in book.papers:
            continue
        names: dict[str, Any] = {k: query(book, paper, v, printed) for k, v in entry["values"].items()}
        value = evaluate(entry["is"], names)
        for fields, row, cell in cells(book, paper, entry["cells"]):
            found = value
            if isinstance(value, pd.Series):
                at = tuple(fields[name] for name in value.index.names)
                found = value[at if len(at) > 1 else at[0]]
            yield Exact(cell, row.label, entry["formula"], found)


@cache
def _entries() -> list[tuple[str, dict[str, Any]]]:
    paths = sorted(DATA.glob("*/exact.yaml"))
    return [(p.parent.name, entry) for p in paths for entry in yaml.safe_load(p.read_text(encoding="utf-8"))]
