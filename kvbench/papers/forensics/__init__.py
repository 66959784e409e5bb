"""Contradictions in and between the papers' printed numbers. A pure function of the published cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from kvbench.papers.forensics.copies import breaks, copies, gains, twins
from kvbench.papers.forensics.derived import derived, ranking
from kvbench.papers.forensics.finding import Finding
from kvbench.papers.forensics.granularity import granularity
from kvbench.papers.forensics.recorded import recorded
from kvbench.papers.forensics.repeats import full_rows, repeats
from kvbench.papers.forensics.statements import statements
from kvbench.papers.spec import catalogue
from kvbench.papers.spec.published_cells import Book, published

__all__ = ["CHECKS", "Finding", "audit"]

CHECKS: Mapping[str, tuple[str, Callable[[Book], Iterator[Finding]]]] = {
    "derived": ("cells that follow from others", derived),
    "ranking": ("orders that follow from wrong averages", ranking),
    "repeats": ("cells that are printed more than once", repeats),
    "copies": ("rows that share scores", copies),
    "twins": ("one value in two places of a table", twins),
    "gains": ("compressed caches far above the full one", gains),
    "breaks": ("scores that fall out of a series", breaks),
    "granularity": ("accuracies that are no k/n", granularity),
    "statements": ("statements against numbers, and what numbers count", statements),
    "full_rows": ("the full cache of one model in several papers", full_rows),
    "recorded": ("tables as they were recorded", recorded),
}
"""Every check by name, with its subject and the function that yields its findings."""


def audit(book: Book | None = None, paper: str = "all", checks: tuple[str, ...] = tuple(CHECKS)) -> list[Finding]:
    """Return the findings about a paper, a table (``think/7``) or all; by paper, in the order of the checks."""
    book = book or published()
    name, _, table = paper.partition("/")
    findings = [f for check in checks for f in CHECKS[check][1](book)]
    papers = [p.id for p in catalogue.chosen(name)]
    matches = [f for f in findings if set(f.paper.split("+")) & set(papers) and table in ("", *f.table.split("+"))]
    # findings about several papers stand behind those about one
    return sorted(matches, key=lambda f: papers.index(f.paper) if f.paper in papers else len(papers))
