"""A paper's part of the audit: functions that judge its statements, and functions that recompute printed cells.

The modules think, refreekv, uncomp, vatp and qhitter have such functions, registered by the decorators ``states`` and
``recomputes``. They take the paper's cells (``frame.read_frame``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pandas as pd

HOLDS, PARTLY, FAILS, NOTE = "holds", "partly", "does not hold", "note"

Outcome = tuple[str, str]
"""(verdict, recomputed numbers in words). The verdict is HOLDS, PARTLY, FAILS or NOTE."""
Judge = Callable[[pd.DataFrame], Outcome]
Recompute = Callable[[pd.DataFrame], Any]


class Statement(NamedTuple):
    """One statement of a paper, with the function that judges it.

    place: where the paper makes the statement, such as ``section 5.4``.
    table: the table with the statement's numbers, such as ``2``, or ``text`` for the prose.
    text: the statement in our words.
    """

    paper: str
    place: str
    table: str
    text: str
    judge: Judge


class Formula(NamedTuple):
    """Printed cells that follow from other printed cells, with the function that recomputes them.

    words: the formula for readers.
    fields: the values of the recomputed cells by column.
    recompute: returns one number for all cells, or a series with a number for each cell. The numbers that it reads
    carry the interval that rounding hides.
    """

    paper: str
    words: str
    fields: Mapping[str, object]
    recompute: Recompute


STATEMENTS: list[Statement] = []
FORMULAS: list[Formula] = []


def states(paper: str, place: str, table: str, text: str) -> Callable[[Judge], Judge]:
    """Return a decorator that adds a statement. The decorated function judges it."""

    def add(judge: Judge) -> Judge:
        STATEMENTS.append(Statement(paper, place, table, text, judge))
        return judge

    return add


def recomputes(paper: str, words: str, **fields: object) -> Callable[[Recompute], Recompute]:
    """Return a decorator that adds a formula. The decorated function recomputes the cells with these ``fields``."""

    def add(recompute: Recompute) -> Recompute:
        FORMULAS.append(Formula(paper, words, fields, recompute))
        return recompute

    return add


def decide(holds: object, shown: str, otherwise: str = FAILS) -> Outcome:
    """Return the outcome of a judgement: (HOLDS, shown) if the statement ``holds``, else (``otherwise``, shown)."""
    return (HOLDS if holds else otherwise), shown
