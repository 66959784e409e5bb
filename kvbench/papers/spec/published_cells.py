"""All published cells by row, as the audit and the exact recomputations read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property

from kvbench.errors import KvbenchError
from kvbench.papers.spec.numbers import Number, printed
from kvbench.papers.spec.published import SCORES, Published, load_table, tables

Key = tuple[str, str]


@dataclass(frozen=True, eq=False)
class PublishedRow:
    """The cells of one model, method and setting in one table, by (dataset, metric); compared by identity."""

    paper: str
    table: str
    model: str
    method: str
    setting: str
    cells: Mapping[Key, Published]

    @cached_property
    def settings(self) -> dict[str, str]:
        """Return ``setting`` as a mapping."""
        return next(iter(self.cells.values())).settings

    @cached_property
    def label(self) -> str:
        """Return the row's name for readers."""
        return " ".join(filter(None, (self.model, self.method, self.setting.replace(";", " "))))

    @cached_property
    def scores(self) -> dict[str, Published]:
        """Return the scores by dataset that are numbers, without averages."""
        return {
            d: c
            for (d, m), c in self.cells.items()
            if m in SCORES and d != "avg" and m != "mean" and c.value is not None
        }


@dataclass(frozen=True, eq=False)
class Book:
    """Published cells of whole papers; compared by identity, as there are thousands."""

    cells: tuple[Published, ...]

    @cached_property
    def papers(self) -> frozenset[str]:
        """Return the papers whose cells are there; nothing is said about others."""
        return frozenset(c.paper for c in self.cells)

    @cached_property
    def rows(self) -> tuple[PublishedRow, ...]:
        """Return every row, in the order of the tables."""
        by_row: dict[tuple[str, str, str, str, str], dict[Key, Published]] = {}
        for c in self.cells:
            by_row.setdefault((c.paper, c.table, c.model, c.method, c.setting), {})[c.dataset, c.metric] = c
        return tuple(PublishedRow(*key, cells) for key, cells in by_row.items())

    @cached_property
    def _tables(self) -> dict[Key, list[PublishedRow]]:
        """Return the rows by (paper, table)."""
        by_table: dict[Key, list[PublishedRow]] = {}
        for row in self.rows:
            by_table.setdefault((row.paper, row.table), []).append(row)
        return by_table

    def table(self, paper: str, table: str | int) -> list[PublishedRow]:
        """Return the rows of one table; none where the book has no such table."""
        return self._tables.get((paper, str(table)), [])

    def cell(
        self,
        paper: str,
        table: str | int,
        dataset: str,
        metric: str = "",
        *,
        model: str = "",
        method: str = "",
        setting: str = "",
    ) -> Published:
        """Return the one cell of a place; '' matches anything, ``setting`` holds parts that the row's must have."""
        parts = set(filter(None, setting.split(";")))
        matches = [
            c
            for row in self.table(paper, table)
            if model in ("", row.model) and method in ("", row.method) and parts <= set(row.setting.split(";"))
            for (d, m), c in row.cells.items()
            if d == dataset and metric in ("", m)
        ]
        if len(matches) != 1:
            place = " ".join(filter(None, (f"{paper}/{table}", model, method, setting, dataset, metric)))
            raise KvbenchError(f"{place}: {len(matches)} published cells, not one")
        return matches[0]

    def number(self, paper: str, table: str | int, dataset: str, metric: str = "", **row: str) -> Number:
        """Return the number printed in that cell, with the interval that rounding hides."""
        return printed(self.cell(paper, table, dataset, metric, **row).printed)


@cache
def published() -> Book:
    """Return the book of everything in papers/data/*/published."""
    return Book(tuple(c for paper, table in tables() for c in load_table(paper, table)))


def book(cells: Iterable[Published]) -> Book:
    """Return a book of any papers' cells, such as altered ones."""
    return Book(tuple(cells))
