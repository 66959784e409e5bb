"""(e) and (g): statements of the papers against their numbers, and arithmetic facts about those numbers."""

from __future__ import annotations

from collections.abc import Iterator

from kvbench.papers.forensics.finding import Finding
from kvbench.papers.forensics.statements import qhitter, refreekv, think, uncomp, vatp
from kvbench.papers.forensics.statements.base import Judged, Statement
from kvbench.papers.spec.published_cells import Book

STATEMENTS: tuple[Statement, ...] = tuple(s for m in (think, refreekv, uncomp, vatp, qhitter) for s in m.STATEMENTS)


def judged(book: Book) -> list[Judged]:
    """Every statement of the book's papers with its verdict, in order."""
    return [Judged(s, *s.decide(book)) for s in STATEMENTS if s.paper in book.papers]


def statements(book: Book) -> Iterator[Finding]:
    """Statements that do not hold, or only partly, and facts to know."""
    yield from filter(None, (j.finding() for j in judged(book)))
