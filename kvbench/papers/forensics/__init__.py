"""Find contradictions in and between the papers' printed numbers. The audit reads published cells alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvbench.papers.forensics.copies import find_breaks, find_copies, find_gains, find_twins
from kvbench.papers.forensics.derived import find_wrong_orders, find_wrong_values
from kvbench.papers.forensics.finding import Finding
from kvbench.papers.forensics.granularity import find_impossible_scores
from kvbench.papers.forensics.repeats import compare_full_rows, find_repeats
from kvbench.papers.forensics.statements import find_doubtful_statements
from kvbench.papers.spec import catalogue
from kvbench.papers.spec.published_cells import Book, read_published

CHECKS: tuple[Callable[[Book], Iterator[Finding]], ...] = (
    find_wrong_values,
    find_wrong_orders,
    find_repeats,
    find_copies,
    find_twins,
    find_gains,
    find_breaks,
    find_impossible_scores,
    find_doubtful_statements,
    compare_full_rows,
)
"""The checks of the audit in the order of its findings. Each yields findings about a book of published cells."""


def audit(book: Book | None = None, paper: str = "all") -> list[Finding]:
    """Run all checks, and return the findings about a paper, one of its tables or all papers.

    They are sorted by paper, and for each paper by the order of the checks. Findings about several papers come last.

    book: the published cells to read; None for those of all papers.
    paper: a paper (``think``), a table of a paper (``think/7``) or ``all``.
    """
    book = book or read_published()
    paper_name, _, table = paper.partition("/")
    papers = [entry.id for entry in catalogue.choose_papers(paper_name)]
    findings = []
    for check in CHECKS:
        for finding in check(book):
            # several papers or tables are joined by +
            about_paper = not set(finding.paper.split("+")).isdisjoint(papers)
            if about_paper and (not table or table in finding.table.split("+")):
                findings.append(finding)
    # the name of several papers is none of ``papers``, and their findings come after those about one
    places = {name: place for place, name in enumerate(papers)}
    return sorted(findings, key=lambda finding: places.get(finding.paper, len(papers)))
