"""Papers' tables for the page: every cell with both sides, so that the reader can switch views and sort."""

from __future__ import annotations

import html
import tempfile
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from kvbench.base.progress import progress
from kvbench.papers.claims import claim_runner, claims
from kvbench.papers.measured import page, plan
from kvbench.papers.measured.cells import read_cells
from kvbench.papers.measured.plan import PaperTable
from kvbench.papers.measured.text import format_cells, write_notes, write_title
from kvbench.papers.spec import catalogue, stand_ins, table_spec
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


def build_tables(model: str, results: str, samples: Path, arguments: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Build every declared table for the page: from its committed samples, or else from the store.

    results: the folder of the store.
    samples: the folder of the committed samples.
    arguments: further key=value arguments of ``run``, such as data.root=.

    Each table has its paper's name (``paper``), its ``title``, its ``content`` as HTML and as ``plain`` data, the
    committed samples behind it (``measured``; None if it shows the user's own store), and the ids of all results that
    it uses, measured or not (``cells``).
    """
    specs = table_spec.find_tables("all")
    parts = []
    # a table with thousands of samples takes minutes to build, so a progress line is shown
    with progress({"tables": len(specs)}, unit="tables") as tick:
        for spec in specs:
            part = _build_committed_part(spec, model, samples, arguments) if spec.measurable else None
            if part is None:
                words = [f"results={results}"] + (list(arguments) if spec.measurable else [])
                part = _make_part(plan.prepare(spec, model, words))
            parts.append(part)
            tick("tables", 1)
    return parts


def list_cells(parts: Sequence[Mapping[str, Any]], model: str, results: str, arguments: Sequence[str] = ()) -> set[str]:
    """Return the ids of all results that the papers' tables and claims use on a model.

    parts: all tables of the page. The others are as in ``build_tables``.
    """
    ids: set[str] = set()
    for part in parts:
        ids |= part["cells"]
    words = [f"results={results}", *arguments]
    for tables in claim_runner.prepare(claims.papers_with_claims(), model, words).values():
        for table in tables:
            ids |= _list_cells_of_table(table)
    return ids


def _list_cells_of_table(table: PaperTable) -> set[str]:
    # a table that cannot be run has no results
    if table.run is None:
        return set()
    return {cell.id for cell in chain.from_iterable(group.cells for group in table.run.groups)}


def _build_committed_part(
    spec: TableSpec, model: str, samples: Path, arguments: Sequence[str]
) -> dict[str, Any] | None:
    """Build a table from its committed samples. Return None without such samples, or if all are of other versions."""
    packed = samples / f"{spec.paper}-{spec.table}.samples.jsonl.gz"
    if not packed.exists():
        return None
    # unpack the samples into a store of their own, since a report must not change the user's results
    with tempfile.TemporaryDirectory() as folder:
        store = ResultStore(Path(folder))
        cells = list(archive.unpack(packed, store, temporary=True))
        counts = [len(store.samples(cell)) for cell in cells]
        words = [f"results={folder}", *arguments]
        if model == stand_ins.MODEL:
            # the tiny suite's tables show as many examples as are committed, whatever the default limit is
            words.insert(1, f"limit={max(counts)}")
        table = plan.prepare(spec, model, words)
        # nothing of the table can be run here, such as for lack of data; or the samples are of another version of the
        # methods, and belong to cells that this one does not have
        if _list_cells_of_table(table).isdisjoint(cells):
            return None
        facts = join_facts(store, cells)
        measured = {"table": spec.id, "cells": len(cells), "answers": sum(counts), "facts": facts}
        return _make_part(table) | {"measured": measured}


def _make_part(planned: PaperTable) -> dict[str, Any]:
    table = read_cells(planned)
    return {
        "paper": catalogue.read_paper(table.spec.paper).called,
        "title": write_title(table),
        "content": render_table(table),
        "plain": page.as_json(table),
        "measured": None,
        "cells": _list_cells_of_table(table),
    }


def join_facts(store: ResultStore, cells: Sequence[str]) -> dict[str, str]:
    """Return the facts of FACTS (model, device, ...) by key, each as text: its different values in all cells."""
    # a cell that was measured in several sessions has facts of each
    records = [store.cell(cell) for cell in cells]
    sessions = list(chain.from_iterable(record.provenance for record in records if record is not None))
    facts = {}
    for key in FACTS:
        facts[key] = ", ".join(dict.fromkeys(str(session[key]) for session in sessions if session.get(key)))
    return facts


def render_table(table: PaperTable) -> str:
    """Return one table with its notes as HTML. Each cell has a span for every one of VIEWS; the page shows one view."""
    by_view = {show: format_cells(table, show, intervals=True) for show in VIEWS}

    def render_cell(row: int, column: int) -> str:
        # the labels in the first column are the same in all views
        if column == 0:
            return writers.html_lines(by_view["ours"].rows[row][0], small=True)
        texts = {show: writers.html_lines(view.rows[row][column], small=True) for show, view in by_view.items()}
        return "".join(f'<span class="{show}">{text}</span>' for show, text in texts.items())

    items = "".join(f"<li>{html.escape(note)}</li>" for note in write_notes(table, "beside"))
    # take heads and groups from one view, as all views have the same columns
    content = writers.html(by_view["ours"], kind="paper", cell=render_cell)
    return f'<div class="scroll">{content}</div><ul class="notes">{items}</ul>'
