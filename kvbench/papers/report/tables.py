"""Papers' tables for the page: every cell with both sides, so that the reader can switch views and sort."""

from __future__ import annotations

import html
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvbench.base.progress import progress
from kvbench.papers.claims import claim_runner, claims
from kvbench.papers.measured import our_table, page
from kvbench.papers.measured.cell_view import View, build_view
from kvbench.papers.measured.grid import format_cells, write_notes, write_title
from kvbench.papers.measured.our_table import OurTable
from kvbench.papers.report.page import MeasuredTable, ReportPart
from kvbench.papers.spec import stand_ins, table_spec
from kvbench.papers.spec.table_spec import TableSpec
from kvbench.report import writers
from kvbench.store import archive
from kvbench.store.store import ResultStore

FACTS = ("model", "device", "dtype", "torch", "transformers", "kvbench", "commit")
"""The keys of provenance that the page shows for the samples behind a table."""
VIEWS = ("ours", "beside", "published", "delta")
"""The four views of a cell.

They are our side, the printed value to stand beside ours, the printed value alone, and the difference.
"""


def build_tables(model: str, results: str, samples: Path, arguments: Sequence[str] = ()) -> list[ReportPart]:
    """Build every declared table for the page: from its committed samples, or else from the store.

    results: the folder of the store.
    samples: the folder of the committed samples.
    arguments: further key=value arguments of ``run``, such as data.root=.
    """
    tables = table_spec.find_tables("all")
    report_parts = []
    # a table with thousands of samples takes minutes to build, so a progress line is shown
    with progress({"tables": len(tables)}, unit="tables") as tick:
        for table in tables:
            part = None
            if table.measurable:
                part = _build_committed_part(table, model, samples, arguments)
            if part is None:
                part = _build_stored_part(table, model, results, arguments)
            report_parts.append(part)
            tick("tables", 1)
    return report_parts


def list_cells(parts: Sequence[ReportPart], model: str, results: str, arguments: Sequence[str] = ()) -> set[str]:
    """Return the ids of all results that the papers' tables and claims use on a model.

    parts: all tables of the page.
    results: the folder of the store.
    arguments: further key=value arguments of ``run``.
    """
    ids: set[str] = set()
    for part in parts:
        ids |= part.cells
    words = [f"results={results}", *arguments]
    for claim_tables in claim_runner.prepare(claims.papers_with_claims(), model, words).values():
        for ours in claim_tables:
            ids |= _list_cells_of_table(ours)
    return ids


def _list_cells_of_table(ours: OurTable) -> frozenset[str]:
    # a table that cannot be run has no results
    if ours.run is None:
        return frozenset()
    return frozenset(cell.id for group in ours.run.groups for cell in group.cells)


def _build_committed_part(table: TableSpec, model: str, samples: Path, arguments: Sequence[str]) -> ReportPart | None:
    """Build a table from its committed samples. Return None without such samples, or if all are of other versions."""
    packed = samples / f"{table.paper}-{table.table}.samples.jsonl.gz"
    if not packed.exists():
        return None
    # unpack the samples into a store of their own, since a report must not change the user's results
    with tempfile.TemporaryDirectory() as folder:
        store = ResultStore(Path(folder))
        cells = list(archive.unpack(packed, store, temporary=True))
        answer_counts = [len(store.samples(cell)) for cell in cells]
        words = [f"results={folder}"]
        if model == stand_ins.MODEL:
            # the tiny suite's tables show as many examples as are committed, whatever the default limit is
            words.append(f"limit={max(answer_counts)}")
        words.extend(arguments)
        ours = our_table.prepare(table, model, words)
        # nothing of the table can be run here, such as for lack of data
        if ours.run is None:
            return None
        # samples of another version of the methods belong to cells that this one does not have
        if _list_cells_of_table(ours).isdisjoint(cells):
            return None
        measured = MeasuredTable(table.id, len(cells), sum(answer_counts), join_facts(store, cells))
        return _make_part(build_view(ours), measured)


def _build_stored_part(table: TableSpec, model: str, results: str, arguments: Sequence[str]) -> ReportPart:
    words = [f"results={results}"]
    if table.measurable:
        words.extend(arguments)
    return _make_part(build_view(our_table.prepare(table, model, words)))


def _make_part(view: View, measured: MeasuredTable | None = None) -> ReportPart:
    return ReportPart(
        paper=view.ours.declared.paper,
        title=write_title(view),
        content=render_table(view),
        plain=page.as_json(view),
        measured=measured,
        cells=_list_cells_of_table(view.ours),
    )


def join_facts(store: ResultStore, cells: Sequence[str]) -> dict[str, str]:
    """Return the facts of FACTS (model, device, ...) by key, each as text: its different values in all cells.

    cells: the ids of the cells.
    """
    # a cell that was measured in several sessions has facts of each
    facts_of_sessions: list[Mapping[str, object]] = []
    for cell in cells:
        record = store.cell(cell)
        if record is not None:
            facts_of_sessions.extend(record.provenance)
    facts = {}
    for key in FACTS:
        values = [str(session[key]) for session in facts_of_sessions if session.get(key)]
        facts[key] = ", ".join(dict.fromkeys(values))
    return facts


def render_table(view: View) -> str:
    """Return one table with its notes as HTML. Each cell has a span for every one of VIEWS; the page shows one view."""
    tables_by_view = {show: format_cells(view, show, intervals=True) for show in VIEWS}

    def render_cell(row: int, column: int) -> str:
        if column == 0:
            return writers.html_lines(tables_by_view["ours"].rows[row][0], small=True)
        spans = ""
        for show, table in tables_by_view.items():
            spans += f'<span class="{show}">{writers.html_lines(table.rows[row][column], small=True)}</span>'
        return spans

    items = "".join(f"<li>{html.escape(note)}</li>" for note in write_notes(view, "beside"))
    # take heads and groups from one view, as all views have the same columns
    table = writers.html(tables_by_view["ours"], kind="paper", cell=render_cell)
    return f'<div class="scroll">{table}</div><ul class="notes">{items}</ul>'
