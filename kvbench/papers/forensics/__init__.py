"""Contradictions in and between the papers' printed numbers. A pure function of the published cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvbench.papers.forensics.copies import breaks, copies, gains, twins
from kvbench.papers.forensics.derived import derived, ranking
from kvbench.papers.forensics.finding import Finding
from kvbench.papers.forensics.granularity import granularity
from kvbench.papers.forensics.repeats import full_rows, repeats
from kvbench.papers.forensics.statements import statements
from kvbench.papers.spec import catalogue
from kvbench.papers.spec.published_cells import Book, published

CHECKS: tuple[Callable[[Book], Iterator[Finding]], ...] = (
    *(derived, ranking, repeats, copies, twins, gains, breaks, granularity, statements, full_rows),
)


def audit(book: Book | None = None, paper: str = "all") -> list[Finding]:
    """Return the findings about a paper, a table (``think/7``) or all; by paper, in the order of the checks."""
    book = book or published()
    name, _, table = paper.partition("/")
    findings = [f for check in CHECKS for f in check(book)]
    papers = [p.id for p in catalogue.chosen(name)]
    matches = [f for f in findings if set(f.paper.split("+")) & set(papers) and table in ("", *f.table.split("+"))]
    # findings about several papers stand behind those about one
    return sorted(matches, key=lambda f: papers.index(f.paper) if f.paper in papers else len(papers))
