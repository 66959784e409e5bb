"""Findings of the audit: places where the papers' numbers disagree, and facts that a reader must know."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from kvbench.papers.spec.published_cells import PublishedRow

WEIGHTS = ("wrong", "doubt", "note")
"""The certainty of findings, the gravest first."""


@dataclass(frozen=True)
class Finding:
    """One finding of the audit, about one cell or about several.

    check: the kind of check.
    weight: its certainty, one of WEIGHTS. ``wrong``: the page contradicts itself. ``doubt``: a number is unlikely, or
        impossible by an assumption that ``why`` names. ``note``: nothing is wrong, but a number's meaning changes.
    paper, table, cell: where the number is printed, cell being the dataset. Several are joined by ``+``.
    recomputed: the text of the audit's own value; '' if the audit knows no other value.
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
        return f"{self.check}:{self.paper}/{self.table}:{self.row}:{self.cell}"

    def as_json(self) -> dict[str, str]:
        """Return the fields and the id as plain data."""
        return {"id": self.id} | asdict(self)


def doubt(row: PublishedRow, check: str, cell: str, printed: str, why: str, recomputed: str = "") -> Finding:
    """Return a finding that a number of a printed row is unlikely."""
    return Finding(
        check=check,
        weight="doubt",
        paper=row.paper,
        table=row.table,
        row=row.label,
        cell=cell,
        printed=printed,
        recomputed=recomputed,
        why=why,
    )


def name_table(table: str) -> str:
    """Return the name of a table for readers: ``2`` is table 2, ``fig6`` is figure 6, ``text`` is prose."""
    if table.startswith("fig"):
        return f"figure {table[3:]}"
    return "prose" if table == "text" else f"table {table}"
