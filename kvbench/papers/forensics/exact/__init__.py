"""Printed cells that can be recomputed without a model, from first principles or from other cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

from kvbench.papers.forensics.exact import averages, ratios, sizes
from kvbench.papers.forensics.exact.base import Exact
from kvbench.papers.spec import published_cells as books
from kvbench.papers.spec.published_cells import Book

__all__ = ["Exact", "exact", "everything"]

RULES: tuple[Callable[[Book], Iterator[Exact]], ...] = (
    averages.means,
    averages.ratios,
    averages.relative,
    averages.times,
    averages.layers,
    sizes.memory,
    sizes.equal_sizes,
    sizes.caches,
    sizes.shares,
    sizes.schedules,
    sizes.benchmark,
    ratios.ratios,
)


def exact(paper: str, table: str, book: Book | None = None) -> list[Exact]:
    """Return the cells of one table (``2``, ``text``) that can be recomputed; none where all need a model."""
    return [e for e in everything(book or books.published()) if (e.cell.paper, e.cell.table) == (paper, table)]


@lru_cache(maxsize=4)
def everything(book: Book) -> tuple[Exact, ...]:
    """Return every cell of a book that can be recomputed, with its value."""
    return tuple(e for rule in RULES for e in rule(book))
