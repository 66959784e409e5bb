"""Checks (e) and (g) of the audit: the papers' statements against their numbers, and facts about those numbers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

# importing the papers' modules registers their statements
from kvbench.papers.forensics import qhitter, refreekv, think, uncomp, vatp  # noqa: F401
from kvbench.papers.forensics.finding import Finding
from kvbench.papers.forensics.frame import read_frame
from kvbench.papers.forensics.paper_audit import FAILS, HOLDS, NOTE, PARTLY, STATEMENTS, Statement
from kvbench.papers.spec import catalogue
from kvbench.papers.spec.published_cells import Book

WEIGHT = {PARTLY: "doubt", FAILS: "wrong", NOTE: "note"}
"""The weight of a finding by the verdict on its statement. A statement that holds is no finding."""


class Judged(NamedTuple):
    """A statement with its verdict (HOLDS, PARTLY, FAILS or NOTE) and the recomputed numbers behind it, in words."""

    statement: Statement
    verdict: str
    shown: str


@lru_cache(maxsize=4)
def judge_statements(book: Book) -> tuple[Judged, ...]:
    """Return every statement of the book's papers with its verdict, in order."""
    judgements = []
    for paper in catalogue.papers_in_order():
        # a paper's functions need the paper's cells
        if paper in book.papers:
            cells = read_frame(book, paper)
            judgements += [Judged(s, *s.judge(cells)) for s in STATEMENTS if s.paper == paper]
    return tuple(judgements)


def find_doubtful_statements(book: Book) -> Iterator[Finding]:
    """Yield a finding for each statement that does not wholly hold, and for each fact that readers must know."""
    for statement, verdict, shown in judge_statements(book):
        if verdict == HOLDS:
            continue
        # a note says nothing against the paper
        check, why = "accounting", statement.place
        if verdict != NOTE:
            check, why = "statement", f"{statement.place}: {verdict}"
        # the statement is both the place and the printed text of the finding
        yield Finding(
            paper=statement.paper,
            table=statement.table,
            row=statement.text,
            check=check,
            weight=WEIGHT[verdict],
            cell="",
            printed=statement.text,
            recomputed=shown,
            why=why,
        )
