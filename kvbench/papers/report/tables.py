"""Papers' tables for the page: every cell with both sides, so that the reader can switch views and sort."""

from __future__ import annotations

import html
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.base.progress import progress
from kvbench.papers.measured import our_table, page
from kvbench.papers.measured.cell_view import View, view
from kvbench.papers.measured.grid import grid, notes, title
from kvbench.papers.spec import stand_ins, table_spec
from kvbench.papers.spec.table_spec import TableSpec
from kvbench.report import writers
from kvbench.store import archive
from kvbench.store.store import ResultStore

FACTS = ("model", "device", "dtype", "torch", "transformers", "kvbench", "commit")
VIEWS = ("ours", "beside", "published", "delta")
"""Views of a cell: our side, the printed one beside it (as a share on a stand-in), that alone, the difference."""


@dataclass(frozen=True)
class ReportPart:
    """One table for the page: its HTML, its plain data, and the provenance of the samples behind it."""

    paper: str
    title: str
    content: str
    plain: dict[str, Any]
    measured: MeasuredTable | None = None


@dataclass(frozen=True)
class MeasuredTable:
    """The numbers of cells and answers behind a table, and the values of their provenance by key."""

    table: str
    cells: int
    answers: int
    facts: dict[str, str]


def parts(model: str, results: str, samples: Path, arguments: Sequence[str] = ()) -> list[ReportPart]:
    """Build every declared table: from the samples committed in ``samples``, else from the store."""
    tables, built = table_spec.find("all"), []
    with progress({"tables": len(tables)}, unit="tables") as tick:
        for table in tables:
            built.append(_part(table, model, results, samples, arguments))
            tick("tables", 1)
    return built


def _part(table: TableSpec, model: str, results: str, samples: Path, arguments: Sequence[str]) -> ReportPart:
    """Build one table, from committed samples where there are any that it shows."""
    packed = samples / f"{table.paper}-{table.table}.samples.jsonl.gz"
    if table.measurable and packed.exists():
        with tempfile.TemporaryDirectory() as folder:
            store = ResultStore(Path(folder))
            cells = list(archive.unpack(packed, store))
            counts = [len(store.samples(c)) for c in cells]
            limit = [f"limit={max(counts)}"] if model == stand_ins.MODEL else []
            ours = our_table.prepare(table, model, [f"results={folder}", *limit, *arguments])
            if ours.run is not None and {c.id for g in ours.run.groups for c in g.cells} & set(cells):
                measured = MeasuredTable(table.id, len(cells), sum(counts), provenance(store, cells))
                return _of(view(ours), measured)
    extra = arguments if table.measurable else ()
    return _of(view(our_table.prepare(table, model, [f"results={results}", *extra])))


def _of(seen: View, behind: MeasuredTable | None = None) -> ReportPart:
    """Build the part of a table that was read."""
    return ReportPart(seen.ours.declared.paper, title(seen), fragment(seen), page.as_json(seen), behind)


def provenance(store: ResultStore, cells: Sequence[str]) -> dict[str, str]:
    """Return each fact of FACTS (model, device, ...) over the cells with these ids: its distinct values, joined."""
    entries = [p for c in cells if (record := store.cell(c)) is not None for p in record.provenance]
    return {key: ", ".join(dict.fromkeys(str(e[key]) for e in entries if e.get(key))) for key in FACTS}


def fragment(seen: View) -> str:
    """Return one table as HTML: four spans a cell, of which the page shows what its view asks for."""
    views = {show: grid(seen, show) for show in VIEWS}

    def cell(row: int, column: int) -> str:
        """Return a cell's spans, one for each view; the first column is the same in all."""
        if not column:
            return writers.html_lines(views["ours"].rows[row][0], small=True)
        texts = ((show, writers.html_lines(table.rows[row][column], small=True)) for show, table in views.items())
        return "".join(f'<span class="{show}">{text}</span>' for show, text in texts)

    items = "".join(f"<li>{html.escape(n)}</li>" for n in notes(seen, "beside"))
    table = writers.html(views["ours"], "paper", cell)
    return f'<div class="scroll">{table}</div><ul class="notes">{items}</ul>'
