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
    """Yield the cells of each entry of exact.yaml, with the values of its formula."""
    for paper, entry in _entries():
        if paper not in book.papers:
            continue
        names: dict[str, Any] = {k: query(book, paper, v, printed) for k, v in entry["values"].items()}
        value = evaluate(entry["is"], names)
        for fields, row, cell in cells(book, paper, entry["cells"]):
            recomputed = value  # one number for all cells, or a series with one for each by its fields
            if isinstance(value, pd.Series):
                key = tuple(fields[name] for name in value.index.names)
                recomputed = value[key if len(key) > 1 else key[0]]
            yield Exact(cell, row.label, entry["formula"], recomputed)


@cache
def _entries() -> list[tuple[str, dict[str, Any]]]:
    """Return (paper, entry) of every formula in the papers' exact.yaml."""
    paths = sorted(DATA.glob("*/exact.yaml"))
    return [(p.parent.name, entry) for p in paths for entry in yaml.safe_load(p.read_text(encoding="utf-8"))]
