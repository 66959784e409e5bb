"""Findings of the audit: places where the papers' numbers disagree, and facts that a reader must know."""

from __future__ import annotations

from dataclasses import asdict, dataclass

WEIGHTS = ("wrong", "doubt", "note")
"""The certainty of findings, the gravest first."""


@dataclass(frozen=True)
class Finding:
    """One finding of the audit, about one cell or about several.

    check: the kind of check.
    weight: its certainty, one of WEIGHTS. ``wrong``: the page contradicts itself. ``doubt``: a number is unlikely, or
        impossible by an assumption that ``why`` names. ``note``: nothing is wrong, but a number's meaning changes.
    paper, table: where the number is printed. Several are joined by ``+``.
    row: the name of the row.
    cell: the dataset. Several are joined by ``+``.
    printed: the number's text in the paper.
    recomputed: the text of the audit's own value; '' if the audit knows no other value.
    why: the reason, for readers.
    """

    check: str
    weight: str
    paper: str
    table: str
    row: str
    cell: str
    printed: str
    recomputed: str
    why: str

    @property
    def id(self) -> str:
        """The finding's name: its check and its place. It stays the same if only values change."""
        # a corrected number is still the same finding, so numbers are no part of the name
        return f"{self.check}:{self.paper}/{self.table}:{self.row}:{self.cell}"

    def as_json(self) -> dict[str, str]:
        """Return the fields and the id as plain data."""
        return {"id": self.id} | asdict(self)


def name_table(table: str) -> str:
    """Return the name of a table for readers: ``2`` is table 2, ``fig6`` is figure 6, ``text`` is prose."""
    # published numbers of figure 6 are in fig6.csv
    if table.startswith("fig"):
        return f"figure {table[3:]}"
    if table == "text":
        return "prose"
    return f"table {table}"
