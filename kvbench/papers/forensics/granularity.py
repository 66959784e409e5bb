"""Check (d) of the audit: an accuracy over n questions is k/n, but some printed ones are k/n for no whole k."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from kvbench.papers.forensics.finding import Finding, doubt
from kvbench.papers.forensics.identity import identity
from kvbench.papers.spec.numbers import decimals, format_fixed, printed_number
from kvbench.papers.spec.published import Published
from kvbench.papers.spec.published_cells import Book, PublishedRow


class ScoreGrid(NamedTuple):
    """The values that a dataset's accuracies can take in one paper: 100 k/n for k = 0, 1, ..., n.

    n: the number of questions.
    why: the source of n.
    holds: True if n is believed, so that cells off the grid are findings. False if n is doubted, and the grid only
    shows how few cells fit it.
    """

    paper: str
    dataset: str
    n: int
    why: str
    holds: bool = True


GRIDS = (
    ScoreGrid("refreekv", "gsm8k", 1319, why="GSM8K's test set; the paper states no n"),
    ScoreGrid("refreekv", "gpqa", 448, why="GPQA's main set; the paper states no n"),
    ScoreGrid("refreekv", "theoremqa", 747, why="TheoremQA without pictures; the paper states no n"),
    ScoreGrid("refreekv", "theoremqa", 800, why="all of TheoremQA", holds=False),
    ScoreGrid("think", "trec", 200, why="LongBench"),
    ScoreGrid("uncomp", "trec", 200, why="LongBench, table 5"),
    ScoreGrid("vatp", "trec", 200, why="the paper's table 5", holds=False),
    ScoreGrid("vatp", "trec", 300, why="LongBench-E, whose TREC has 300 questions"),
)
FEW = Fraction(1, 2)
"""A doubted n is wrong if less than this share of the cells fits it."""


class Fit(NamedTuple):
    """The fit of a dataset's printed cells to a grid.

    cells: all different measurements of the dataset, each with its row.
    off: those of ``cells`` that are k/n for no whole k.
    """

    grid: ScoreGrid
    cells: list[tuple[PublishedRow, Published]]
    off: list[tuple[PublishedRow, Published]]

    @property
    def attained(self) -> int:
        """The number of cells that fit the grid."""
        return len(self.cells) - len(self.off)

    @property
    def chance(self) -> float:
        """The chance that a random value from 0.00 to 100.00 fits the grid: the share of such values that do."""
        n = self.grid.n
        # a set, since rounding to two decimals makes some 100 k / n equal if n is above 10,000
        values = {format_fixed(Fraction(100 * k, n), 2) for k in range(n + 1)}
        # there are 10,001 values 0.00, 0.01, ..., 100.00
        return len(values) / 10001


def is_attainable(text: str, n: int) -> bool:
    """Return True if some k/n in per cent, with a whole k from 0 to n, can be printed as ``text``."""
    score = printed_number(text).value
    half_unit = Fraction(1, 2 * 10 ** decimals(text))
    # |100 k / n - score| <= half a unit of the last digit; only the k nearest to score * n / 100 can fulfil this
    nearest = round(score * n / 100)
    return any(
        0 <= k <= n and abs(Fraction(100 * k, n) - score) <= half_unit for k in (nearest - 1, nearest, nearest + 1)
    )


def fit_grids(book: Book) -> list[Fit]:
    """Return the fit of a book's cells to each of GRIDS. A measurement printed twice with one value counts once."""
    grid_fits = []
    for grid in GRIDS:
        # repeated numbers would give a grid more support than it has
        cells: dict[object, tuple[PublishedRow, Published]] = {}
        for row in book.rows:
            cell = row.cells.get((grid.dataset, "accuracy"))
            # numbered tables have the measurements, and a paper's text repeats some of them
            if row.paper == grid.paper and row.table.isdigit() and cell is not None and cell.unit == "pct":
                cells.setdefault((identity(row), cell.value), (row, cell))
        off = [(row, cell) for row, cell in cells.values() if not is_attainable(cell.printed, grid.n)]
        grid_fits.append(Fit(grid, list(cells.values()), off))
    return grid_fits


def find_impossible_scores(book: Book) -> Iterator[Finding]:
    """Yield a finding for each cell off the grid of a believed n, and for each doubted n that most cells do not fit."""
    grid_fits = fit_grids(book)
    believed = {(fit.grid.paper, fit.grid.dataset): fit for fit in reversed(grid_fits) if fit.grid.holds}
    for fit in grid_fits:
        if fit.grid.holds:
            yield from _report_cells_off_grid(fit)
        elif fit.cells and Fraction(fit.attained, len(fit.cells)) < FEW:
            yield _report_sample_count(fit, believed.get((fit.grid.paper, fit.grid.dataset)))


def _report_cells_off_grid(fit: Fit) -> Iterator[Finding]:
    grid = fit.grid
    for row, cell in fit.off:
        # k = score * n / 100 is no whole number, so the two around it give the nearest scores
        k = int(printed_number(cell.printed).value * grid.n / 100)
        near = [format_fixed(Fraction(100 * number, grid.n), 2) for number in (k, k + 1)]
        why = f"no k/{grid.n} ({grid.why}); the nearest are {' and '.join(near)}"
        yield doubt(row, "granularity", grid.dataset, cell.printed, why, " or ".join(near))


def _report_sample_count(fit: Fit, believed: Fit | None) -> Finding:
    grid = fit.grid
    why = f"{fit.attained} of {len(fit.cells)} scores are k/{grid.n} ({grid.why})"
    why += f", {100 * fit.chance:.0f} % would by chance"
    if believed is not None:
        why += f"; {believed.attained} are k/{believed.grid.n} ({believed.grid.why})"
    _, first_cell = fit.cells[0]
    return Finding(
        check="sample-count",
        weight="doubt",
        paper=grid.paper,
        # VATP states its numbers of questions in table 5, the other papers state none
        table="5" if grid.paper == "vatp" else first_cell.table,
        row="",
        cell=grid.dataset,
        printed=f"n={grid.n}",
        recomputed="" if believed is None else str(believed.grid.n),
        why=why,
    )
