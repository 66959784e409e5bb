"""A paper's part of the audit: functions that judge its statements, and functions that recompute printed cells.

The modules think, refreekv, uncomp, vatp and qhitter have such functions, registered by decorators of ``PaperAudit``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvbench.papers.forensics.queries import PaperCells

HOLDS, PARTLY, FAILS, NOTE = "holds", "partly", "does not hold", "note"

Outcome = tuple[str, str]
"""(verdict, recomputed numbers in words). The verdict is HOLDS, PARTLY, FAILS or NOTE."""
Judge = Callable[[PaperCells], Outcome]
"""A function that judges a statement by the paper's cells."""
Recompute = Callable[[PaperCells], Any]
"""A function that recomputes printed cells from the paper's other cells (see ``Formula``)."""


@dataclass(frozen=True)
class Statement:
    """One statement of a paper, with the function that judges it.

    paper: the paper's name, as in conf/preset.
    place: where the paper makes the statement, such as ``section 5.4``.
    table: the table with the statement's numbers, such as ``2``, or ``text`` for the prose.
    text: the statement in our words.
    judge: returns the verdict and the recomputed numbers in words.
    """

    paper: str
    place: str
    table: str
    text: str
    judge: Judge


@dataclass(frozen=True)
class Formula:
    """Printed cells that follow from other printed cells, with the function that recomputes them.

    query: the fields of the recomputed cells by name, as arguments of ``PaperCells.cells``.
    words: the formula for readers.
    recompute: returns one number for all cells, or a series with a number for each cell, indexed by the cells' fields.
    The numbers that it reads carry the interval that rounding hides.
    """

    query: Mapping[str, Any]
    words: str
    recompute: Recompute


@dataclass(frozen=True)
class PaperAudit:
    """The statements and formulas of one paper, in the order of the functions that decorators register."""

    paper: str
    statements: list[Statement] = field(default_factory=list)
    formulas: list[Formula] = field(default_factory=list)

    def states(self, place: str, table: str, text: str) -> Callable[[Judge], Judge]:
        """Return a decorator that adds a statement. The decorated function judges it.

        The parameters are the fields of ``Statement``.
        """

        def add(judge: Judge) -> Judge:
            self.statements.append(Statement(self.paper, place, table, text=text, judge=judge))
            return judge

        return add

    def recomputes(self, words: str, **query: object) -> Callable[[Recompute], Recompute]:
        """Return a decorator that adds a formula. The decorated function recomputes the formula's cells.

        words: the formula for readers.
        query: the fields of the cells to recompute, such as ``table="text", metric="speedup"``.
        """

        def add(recompute: Recompute) -> Recompute:
            self.formulas.append(Formula(query, words, recompute))
            return recompute

        return add


def decide(holds: object, shown: str, otherwise: str = FAILS) -> Outcome:
    """Return the outcome of a judgement: (HOLDS, shown) if the statement ``holds``, else (``otherwise``, shown).

    holds: a bool, or one of numpy's, which a comparison of numpy's numbers gives.
    shown: the recomputed numbers in words.
    """
    if holds:
        return HOLDS, shown
    return otherwise, shown
