"""All published cells by row, as the audit and the exact recomputations read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property

from kvbench.papers.spec.published import AVERAGE, SCORES, Published, load_table, tables

Key = tuple[str, str]
"""(dataset, metric) of a cell in its row."""


@dataclass(frozen=True, eq=False)
class PublishedRow:
    """The cells of one model, method and setting in one table, by (dataset, metric). Rows are compared by identity."""

    paper: str
    table: str
    model: str
    method: str
    setting: str
    cells: Mapping[Key, Published]

    @cached_property
    def settings(self) -> dict[str, str]:
        """Return ``setting`` as a mapping."""
        # all cells of a row have one setting, by which Book.rows puts them together
        first_cell = next(iter(self.cells.values()))
        return first_cell.settings

    @cached_property
    def label(self) -> str:
        """Return the row's name for readers."""
        parts = (self.model, self.method, self.setting.replace(";", " "))
        return " ".join(part for part in parts if part)

    @cached_property
    def scores(self) -> dict[str, Published]:
        """Return the scores by dataset that are numbers, without averages."""
        scores = {}
        for (dataset, metric), cell in self.cells.items():
            # ``mean`` is the metric of averages alone
            is_score = metric in SCORES and metric != "mean" and dataset != AVERAGE
            if is_score and cell.value is not None:
                scores[dataset] = cell
        return scores

    @cached_property
    def averages(self) -> dict[str, Published]:
        """Return the averages that are numbers, by metric: ``mean``, or what the averaged columns measure."""
        averages = {}
        for (dataset, metric), cell in self.cells.items():
            if dataset == AVERAGE and cell.value is not None:
                averages[metric] = cell
        return averages

    def averaged(self, metric: str) -> list[Published]:
        """Return the cells whose average the row prints as ``metric``.

        These are all scores where the row has one average of scores. Where it has several, they are the cells of that
        metric, and so they are for an average of bytes or times.
        """
        # a lone average is over all scores even where it is called f1 and stands beside accuracies
        score_averages = [name for name in self.averages if name in SCORES]
        if metric == "mean" or score_averages == [metric]:
            return list(self.scores.values())
        cells = []
        for (dataset, cell_metric), cell in self.cells.items():
            if cell_metric == metric and dataset != AVERAGE and cell.value is not None:
                cells.append(cell)
        return cells


@dataclass(frozen=True, eq=False)
class Book:
    """Published cells of whole papers. Books are compared by identity, as they have thousands of cells."""

    cells: tuple[Published, ...]

    @cached_property
    def papers(self) -> frozenset[str]:
        """Return the papers whose cells are there. Nothing is said about others."""
        return frozenset(cell.paper for cell in self.cells)

    @cached_property
    def rows(self) -> tuple[PublishedRow, ...]:
        """Return every row, in the order of the tables."""
        # the dictionary keeps the order in which rows come up, and puts cells together that stand apart
        cells_by_row: dict[tuple[str, str, str, str, str], dict[Key, Published]] = {}
        for cell in self.cells:
            row = (cell.paper, cell.table, cell.model, cell.method, cell.setting)
            cells_by_row.setdefault(row, {})[cell.dataset, cell.metric] = cell
        rows = []
        for (paper, table, model, method, setting), cells in cells_by_row.items():
            rows.append(PublishedRow(paper, table, model, method=method, setting=setting, cells=cells))
        return tuple(rows)

    def table(self, paper: str, table: str | int) -> list[PublishedRow]:
        """Return the rows of one table, or none where the book has no such table."""
        # callers may write a number, where files and figures have texts
        return [row for row in self.rows if (row.paper, row.table) == (paper, str(table))]


@cache
def published() -> Book:
    """Return the book of everything in papers/data/*/published."""
    cells: list[Published] = []
    for paper, table in tables():
        cells.extend(load_table(paper, table))
    return Book(tuple(cells))
