"""Checks (e) and (g) of the audit: the papers' statements against their numbers, and facts about those numbers.

Each paper has a module here, whose functions judge the paper's statements by its cells.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from kvbench.papers.forensics.finding import Finding
from kvbench.papers.forensics.paper_audit import FAILS, HOLDS, NOTE, PARTLY, Statement
from kvbench.papers.forensics.queries import PaperCells
from kvbench.papers.forensics.registry import PAPERS
from kvbench.papers.spec.published_cells import Book

WEIGHT = {PARTLY: "doubt", FAILS: "wrong", NOTE: "note"}
"""The weight of a finding by the verdict on its statement. A statement that holds is no finding."""


@dataclass(frozen=True)
class Judged:
    """A statement with its verdict.

    verdict: HOLDS, PARTLY, FAILS or NOTE.
    shown: the recomputed numbers behind the verdict, in words.
    """

    statement: Statement
    verdict: str
    shown: str

    def make_finding(self) -> Finding | None:
        """Return the statement as a finding; None if it holds."""
        if self.verdict == HOLDS:
            return None
        if self.verdict == NOTE:
            # a note says nothing against the paper
            check, why = "accounting", self.statement.place
        else:
            check, why = "statement", f"{self.statement.place}: {self.verdict}"
        return Finding(
            check=check,
            weight=WEIGHT[self.verdict],
            paper=self.statement.paper,
            table=self.statement.table,
            # the statement is both the place and the printed text of the finding
            row=self.statement.text,
            cell="",
            printed=self.statement.text,
            recomputed=self.shown,
            why=why,
        )


@lru_cache(maxsize=4)
def judge_statements(book: Book) -> tuple[Judged, ...]:
    """Return every statement of the book's papers with its verdict, in order.

    The verdicts are cached, since an audit's page asks for them several times and they depend on the book alone.
    """
    judgements = []
    for audit in PAPERS:
        # a paper's functions need the paper's cells
        if audit.paper in book.papers:
            for statement in audit.statements:
                verdict, shown = statement.judge(PaperCells(book, audit.paper))
                judgements.append(Judged(statement, verdict, shown))
    return tuple(judgements)


def find_doubtful_statements(book: Book) -> Iterator[Finding]:
    """Yield a finding for each statement that does not wholly hold, and for each fact that readers must know."""
    for judgement in judge_statements(book):
        finding = judgement.make_finding()
        if finding is not None:
            yield finding
