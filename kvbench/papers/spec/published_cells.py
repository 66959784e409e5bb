"""All published cells by row, for the audit and the exact recomputations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property

from kvbench.papers.spec.published import AVERAGE, SCORES, Published, load_table, table_ids

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
        """The settings by key, such as {"kv_size": "128", "ratio": "0.4"}."""
        # all cells of a row have one setting, since Book.rows puts cells together by it
        first_cell = next(iter(self.cells.values()))
        return first_cell.settings

    @cached_property
    def label(self) -> str:
        """The row's name for readers: model, method and settings, as far as the row has them."""
        parts = (self.model, self.method, self.setting.replace(";", " "))
        return " ".join(part for part in parts if part)

    @cached_property
    def scores(self) -> dict[str, Published]:
        """The numeric scores by dataset, without averages."""
        scores = {}
        for (dataset, metric), cell in self.cells.items():
            # only averages have the metric ``mean``
            is_score = metric in SCORES and metric != "mean" and dataset != AVERAGE
            if is_score and cell.value is not None:
                scores[dataset] = cell
        return scores

    @cached_property
    def averages(self) -> dict[str, Published]:
        """The numeric averages by metric: ``mean``, or the quantity of the averaged columns."""
        cells = self.cells.items()
        return {metric: cell for (dataset, metric), cell in cells if dataset == AVERAGE and cell.value is not None}

    def averaged(self, metric: str) -> list[Published]:
        """Return the cells over which the row's printed average ``metric`` is taken.

        An average called ``mean``, and the only average of scores in a row, covers all scores of the row. Any other
        average covers the row's cells with its own metric. These can be scores, bytes or times.
        """
        # the only average covers all scores, even if it is called f1 and stands beside accuracies
        score_averages = [name for name in self.averages if name in SCORES]
        if metric == "mean" or score_averages == [metric]:
            return list(self.scores.values())
        of_metric = [cell for (_, name), cell in self.cells.items() if name == metric]
        return [cell for cell in of_metric if cell.dataset != AVERAGE and cell.value is not None]


@dataclass(frozen=True, eq=False)
class Book:
    """The published cells of whole papers, which the audit reads.

    A book has thousands of cells, so books are compared by identity.
    """

    cells: tuple[Published, ...]

    @cached_property
    def papers(self) -> frozenset[str]:
        """The ids of the papers that have cells in this book. The audit can say nothing about other papers."""
        return frozenset(cell.paper for cell in self.cells)

    @cached_property
    def rows(self) -> tuple[PublishedRow, ...]:
        """All rows, in the order of the tables."""
        # the dictionary keeps the order in which rows appear, and joins cells of a row that stand apart
        cells_by_row: dict[tuple[str, str, str, str, str], dict[Key, Published]] = {}
        for cell in self.cells:
            row_key = (cell.paper, cell.table, cell.model, cell.method, cell.setting)
            cells_by_row.setdefault(row_key, {})[cell.dataset, cell.metric] = cell
        rows = []
        for (paper, table, model, method, setting), cells in cells_by_row.items():
            rows.append(PublishedRow(paper, table, model, method=method, setting=setting, cells=cells))
        return tuple(rows)

    def table(self, paper: str, table: str | int) -> list[PublishedRow]:
        """Return the rows of one table; [] if the book has no such table."""
        # callers may write a number, but files and figures have texts
        return [row for row in self.rows if (row.paper, row.table) == (paper, str(table))]


@cache
def read_published() -> Book:
    """Return the book of everything in papers/data/*/published."""
    cells: list[Published] = []
    for paper, table in table_ids():
        cells.extend(load_table(paper, table))
    return Book(tuple(cells))
