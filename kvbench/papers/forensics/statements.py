"""(e) and (g): statements of the papers against their numbers, and arithmetic facts about those numbers.

Each paper's statements.yaml says where a statement stands, what it says, and by which formulas it holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import yaml

from kvbench.papers import DATA
from kvbench.papers.forensics import special_facts
from kvbench.papers.forensics.finding import Finding
from kvbench.papers.forensics.formulas import evaluate, query, text
from kvbench.papers.spec.published_cells import Book

PAPERS = ("think", "refreekv", "uncomp", "vatp", "qhitter")
HOLDS, PARTLY, FAILS, NOTE = "holds", "partly", "does not hold", "note"
WEIGHT = {PARTLY: "doubt", FAILS: "wrong", NOTE: "note"}


@dataclass(frozen=True)
class Statement:
    """One statement of a paper in our words, with the formulas that decide it.

    place: where the paper makes it. table: where its numbers are. values: queries and formulas by name, after those of
    the facts that ``uses`` names. holds: the formula that decides; without one it is no statement of the paper but a
    NOTE, an arithmetic fact that a reader must know. Where it does not hold, the verdict is PARTLY if ``partly`` does,
    else ``otherwise``. shown: the recomputed figures.
    """

    paper: str
    place: str
    table: str
    text: str
    shown: str
    values: Mapping[str, Any] = field(default_factory=dict)
    uses: str = ""
    holds: str = ""
    partly: str = "not 1"
    otherwise: str = FAILS

    def judge(self, book: Book) -> Judged:
        """Return the verdict by the cells of ``book``."""
        names: dict[str, Any] = getattr(special_facts, self.uses)(book) if self.uses else {}
        for name, entry in self.values.items():
            names[name] = query(book, self.paper, entry) if isinstance(entry, dict) else evaluate(str(entry), names)
        verdict = NOTE
        if self.holds:
            otherwise = PARTLY if evaluate(self.partly, names) else self.otherwise
            verdict = HOLDS if evaluate(self.holds, names) else otherwise
        return Judged(self, verdict, text(self.shown, names))


@dataclass(frozen=True)
class Judged:
    """A statement with its verdict and the figures behind it."""

    statement: Statement
    verdict: str
    shown: str

    def finding(self) -> Finding | None:
        """Return the statement as a finding; None where it holds."""
        if self.verdict == HOLDS:
            return None
        s = self.statement
        check = "accounting" if self.verdict == NOTE else "statement"
        why = s.place if self.verdict == NOTE else f"{s.place}: {self.verdict}"
        return Finding(check, WEIGHT[self.verdict], s.paper, s.table, s.text, "", s.text, self.shown, why)


@cache
def _statements() -> tuple[Statement, ...]:
    """Return all statements, by paper."""
    paths = {paper: DATA / paper / "statements.yaml" for paper in PAPERS}
    entries = {paper: yaml.safe_load(path.read_text(encoding="utf-8")) for paper, path in paths.items()}
    return tuple(Statement(paper, **entry) for paper, items in entries.items() for entry in items)


def judged(book: Book) -> list[Judged]:
    """Return every statement of the book's papers with its verdict, in order."""
    return [s.judge(book) for s in _statements() if s.paper in book.papers]


def statements(book: Book) -> Iterator[Finding]:
    """Yield statements that do not hold, or only partly, and facts to know."""
    yield from filter(None, (j.finding() for j in judged(book)))
