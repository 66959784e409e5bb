"""(e) What a paper says about its own numbers, each with the computation that decides it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvbench.papers.forensics.finding import Finding
from kvbench.papers.spec.numbers import printed
from kvbench.papers.spec.published_cells import Book

HOLDS, PARTLY, FAILS, NOTE = "holds", "partly", "does not hold", "note"
WEIGHT = {PARTLY: "doubt", FAILS: "wrong", NOTE: "note"}
Decision = tuple[str, str]
"""The verdict and the recomputed figures as shown."""


@dataclass(frozen=True)
class Statement:
    """``text`` is the statement in our words, ``place`` where the paper makes it, ``table`` where its numbers are.

    A verdict NOTE is no statement of the paper but an arithmetic fact about its numbers that a reader must know.
    """

    paper: str
    place: str
    table: str
    text: str
    decide: Callable[[Book], Decision]


@dataclass(frozen=True)
class Judged:
    """A statement with its verdict and the figures behind it."""

    statement: Statement
    verdict: str
    shown: str

    def finding(self) -> Finding | None:
        """None where the statement holds."""
        if self.verdict == HOLDS:
            return None
        s = self.statement
        check = "accounting" if self.verdict == NOTE else "statement"
        why = s.place if self.verdict == NOTE else f"{s.place}: {self.verdict}"
        return Finding(check, WEIGHT[self.verdict], s.paper, s.table, s.text, "", s.text, self.shown, why)


def verdict(holds: bool, otherwise: str = FAILS) -> str:
    """HOLDS or the other one."""
    return HOLDS if holds else otherwise


def scores(book: Book, paper: str, table: str | int, dataset: str, metric: str = "", **where: str) -> dict[str, float]:
    """A column by row label, of the rows with these fields (model, method, setting parts)."""
    asked = set(filter(None, where.get("setting", "").split(";")))
    return {
        f"{row.model} {row.method} {row.setting}": float(printed(c.printed))
        for row in book.table(paper, table)
        if where.get("model", row.model) == row.model and where.get("method", row.method) == row.method
        if asked <= set(row.setting.split(";"))
        for (d, m), c in row.cells.items()
        if d == dataset and metric in ("", m) and c.value is not None
    }


def value(book: Book, paper: str, table: str | int, dataset: str, metric: str = "", **where: str) -> float:
    """One cell's printed number."""
    return float(book.number(paper, table, dataset, metric, **where))


def listed(values: Mapping[str, float], digits: int = 2) -> str:
    """``name value, name value``."""
    return ", ".join(f"{name} {v:.{digits}f}" for name, v in values.items())
