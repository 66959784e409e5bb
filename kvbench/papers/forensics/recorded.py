"""The table as it was recorded: a fingerprint of its printed cells, so that no change of the data goes unseen.

This is no check of the papers. It says that a file of kvbench was altered, and covers cells that no arithmetic reaches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from kvbench.papers.forensics.finding import Finding
from kvbench.papers.spec import catalogue
from kvbench.papers.spec.published import Published
from kvbench.papers.spec.published_cells import Book


def fingerprint(cells: Iterable[Published]) -> str:
    """Return twelve hexadecimal digits over all that is printed; flags are our own words and stay out."""
    lines = (
        "\t".join((c.model, c.method, c.setting, c.dataset, c.metric, c.printed, c.unit, str(c.row))) for c in cells
    )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def recorded(book: Book) -> Iterator[Finding]:
    """Yield tables that differ from the fingerprint in their paper.yaml."""
    for paper in catalogue.chosen("all"):
        for entry in paper.entries:
            if entry.is_figure or paper.id not in book.papers:
                continue
            current = fingerprint(c for row in book.table(paper.id, entry.id) for c in row.cells.values())
            if current != entry.recorded:
                why = f"the cells are not those that were recorded in papers/{paper.id}/paper.yaml"
                yield Finding("recorded", "wrong", paper.id, entry.id, "", "", current, entry.recorded, why)
