"""All published cells by row, as the audit and the exact recomputations read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property

from kvbench.papers.spec.published import AVERAGE, SCORES, Published, load_table, tables

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
            if m in SCORES and d != AVERAGE and m != "mean" and c.value is not None
        }

    @cached_property
    def averages(self) -> dict[str, Published]:
        """Return the averages that are numbers, by metric: ``mean``, or what the averaged columns measure."""
        return {m: c for (d, m), c in self.cells.items() if d == AVERAGE and c.value is not None}

    def averaged(self, metric: str) -> list[Published]:
        """Return the cells that an average called ``metric`` is of.

        Those are all scores where the row has one average of scores; where it has several, and of what is no score
        (bytes, times), the cells of that metric.
        """
        of_scores = [m for m in self.averages if m in SCORES]
        if metric == "mean" or of_scores == [metric]:
            return list(self.scores.values())
        return [c for (d, m), c in self.cells.items() if m == metric and d != AVERAGE and c.value is not None]


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

    def table(self, paper: str, table: str | int) -> list[PublishedRow]:
        """Return the rows of one table; none where the book has no such table."""
        return [row for row in self.rows if (row.paper, row.table) == (paper, str(table))]


@cache
def published() -> Book:
    """Return the book of everything in papers/data/*/published."""
    return Book(tuple(c for paper, table in tables() for c in load_table(paper, table)))
