"""(d) Accuracies over n questions are k/n: printed values that no whole number of right answers gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from kvbench.papers.forensics.finding import Finding
from kvbench.papers.forensics.identity import identity
from kvbench.papers.spec.numbers import decimals, fixed, printed
from kvbench.papers.spec.published import Published
from kvbench.papers.spec.published_cells import Book, PublishedRow


@dataclass(frozen=True)
class ScoreGrid:
    """A dataset whose scores are k/n per cent in one paper. ``why`` says where n comes from.

    ``holds``: cells off the grid are findings; False tries an n that is not believed, to show that it does not fit.
    """

    paper: str
    dataset: str
    n: int
    why: str
    holds: bool = True


GRIDS = (
    ScoreGrid("refreekv", "gsm8k", 1319, "GSM8K's test set; the paper states no n"),
    ScoreGrid("refreekv", "gpqa", 448, "GPQA's main set; the paper states no n"),
    ScoreGrid("refreekv", "theoremqa", 747, "TheoremQA without pictures; the paper states no n"),
    ScoreGrid("refreekv", "theoremqa", 800, "all of TheoremQA", holds=False),
    ScoreGrid("think", "trec", 200, "LongBench"),
    ScoreGrid("uncomp", "trec", 200, "LongBench, table 5"),
    ScoreGrid("vatp", "trec", 200, "the paper's table 5", holds=False),
    ScoreGrid("vatp", "trec", 300, "LongBench-E, whose TREC has 300 questions"),
)
FEW = Fraction(1, 2)
"""An n that fewer than this share of cells fits is not the n of the paper."""


@dataclass(frozen=True)
class Fit:
    """The distinct cells of a grid, and those of them that lie off it."""

    grid: ScoreGrid
    cells: tuple[tuple[PublishedRow, Published], ...]
    off: tuple[tuple[PublishedRow, Published], ...]

    @property
    def chance(self) -> float:
        """Return the share of two-decimal values from 0 to 100 that are k/n."""
        n = self.grid.n
        return len({fixed(Fraction(100 * k, n), 2) for k in range(n + 1)}) / 10001


def attainable(text: str, n: int) -> bool:
    """Tell whether some k/n in per cent can be printed as these characters."""
    shown = printed(text)
    k = round(shown.value * n / 100)
    unit = Fraction(1, 2 * 10 ** decimals(text))
    return any(abs(Fraction(100 * i, n) - shown.value) <= unit for i in (k - 1, k, k + 1) if 0 <= i <= n)


def fits(book: Book) -> list[Fit]:
    """Return every grid with its cells; a measurement printed twice with the same value counts once."""
    grid_fits = []
    for grid in GRIDS:
        cells: dict[tuple[object, ...], tuple[PublishedRow, Published]] = {}
        for row in book.rows:
            cell = row.cells.get((grid.dataset, "accuracy"))
            if row.paper == grid.paper and row.table.isdigit() and cell is not None and cell.unit == "pct":
                cells.setdefault((*identity(row), cell.value), (row, cell))
        distinct = tuple(cells.values())
        grid_fits.append(Fit(grid, distinct, tuple((r, c) for r, c in distinct if not attainable(c.printed, grid.n))))
    return grid_fits


def granularity(book: Book) -> Iterator[Finding]:
    """Yield cells off their grid one by one, and a stated n that most cells do not fit as a whole."""
    for fit in fits(book):
        g = fit.grid
        on = len(fit.cells) - len(fit.off)
        if not g.holds:
            if fit.cells and Fraction(on, len(fit.cells)) < FEW:
                table = "5" if g.paper == "vatp" else fit.cells[0][1].table
                why = f"{on} of {len(fit.cells)} scores are k/{g.n} ({g.why}), {100 * fit.chance:.0f} % would by chance"
                believed = (f for f in fits(book) if f.grid.holds)
                better = next((f for f in believed if (f.grid.paper, f.grid.dataset) == (g.paper, g.dataset)), None)
                if better is not None:
                    why += f"; {len(better.cells) - len(better.off)} are k/{better.grid.n} ({better.grid.why})"
                better_n = str(better.grid.n) if better else ""
                yield Finding("sample-count", "doubt", g.paper, table, "", g.dataset, f"n={g.n}", better_n, why)
            continue
        for row, cell in fit.off:
            exact = printed(cell.printed).value * g.n / 100
            neighbours = [fixed(Fraction(100 * k, g.n), 2) for k in (int(exact), int(exact) + 1)]
            why = f"no k/{g.n} ({g.why}); the nearest are {' and '.join(neighbours)}"
            place = (g.paper, cell.table, row.label, g.dataset)
            yield Finding("granularity", "doubt", *place, cell.printed, " or ".join(neighbours), why)
