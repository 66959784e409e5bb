"""Papers' tables for the page: every cell with both sides, so that the reader can switch views and sort."""

from __future__ import annotations

import html
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench.papers.measured import our_table
from kvbench.papers.measured.cell_view import View, view
from kvbench.papers.measured.grid import Grid, TextGrid, grid, notes, title
from kvbench.papers.measured.page import spans_html
from kvbench.papers.spec import stand_ins, table_spec
from kvbench.papers.spec.table_spec import TableSpec
from kvbench.run import archive
from kvbench.run.store import ResultStore

FACTS = ("model", "device", "dtype", "torch", "transformers", "kvbench", "commit")
VIEWS = ("ours", "beside", "published", "delta")
"""What a cell can show: our side, the printed one beside it (as a share on a stand-in), that alone, the difference."""


@dataclass(frozen=True)
class ReportPart:
    """One table for the page: its paper, its title, its HTML, and what the samples behind it were measured with."""

    paper: str
    title: str
    content: str
    measured: MeasuredTable | None = None


@dataclass(frozen=True)
class MeasuredTable:
    """How many cells and answers are behind a table, and the values that their provenance has, by key."""

    table: str
    cells: int
    answers: int
    facts: dict[str, str]


def parts(model: str, results: str, samples: Path, arguments: Sequence[str] = ()) -> list[ReportPart]:
    """Every declared table: from the samples committed in ``samples``, else from the store."""
    return [_part(t, model, results, samples, arguments) for t in table_spec.find("all")]


def _part(table: TableSpec, model: str, results: str, samples: Path, arguments: Sequence[str]) -> ReportPart:
    packed = samples / f"{table.paper}-{table.table}.samples.jsonl.gz"
    if table.measurable and packed.exists():
        with tempfile.TemporaryDirectory() as folder:
            store = ResultStore(Path(folder))
            cells = archive.unpack(packed, store)
            counts = [len(store.samples(c)) for c in cells]
            limit = [f"limit={max(counts)}"] if model == stand_ins.MODEL else []
            ours = our_table.prepare(table, model, [f"results={folder}", *limit, *arguments])
            if ours.run is not None and {c.id for g in ours.run.groups for c in g.cells} & set(cells):
                seen = view(ours)
                behind = MeasuredTable(table.id, len(cells), sum(counts), provenance(store, cells))
                return ReportPart(table.paper, title(seen), fragment(seen), behind)
    if table.measurable:
        seen = view(our_table.prepare(table, model, [f"results={results}", *arguments]))
    else:
        seen = view(our_table.prepare(table, model, [f"results={results}"]))
    return ReportPart(table.paper, title(seen), fragment(seen))


def provenance(store: ResultStore, cells: Sequence[str]) -> dict[str, str]:
    """The values of FACTS over all ``cells``, each once."""
    entries = [p for c in cells if (record := store.cell(c)) is not None for p in record.provenance]
    return {key: ", ".join(dict.fromkeys(str(e[key]) for e in entries if e.get(key))) for key in FACTS}


def fragment(seen: View) -> str:
    """One table as HTML: three spans a cell, of which the page shows what its view asks for."""
    grids = {show: grid(seen, show) for show in VIEWS}
    first = grids["ours"]
    out = ['<div class="scroll"><table class="paper"><thead>']
    if any(first.groups):
        out.append(f'<tr class="groups">{spans_html(first.groups)}</tr>')
    out.append("<tr>" + "".join(f"<th>{html.escape(n)}</th>" for n in first.names) + "</tr></thead>")
    for b, (heading, rows) in enumerate(first.blocks):
        out.append("<tbody>")
        if heading:
            out.append(f'<tr class="block"><th colspan="{len(first.names)}">{html.escape(heading)}</th></tr>')
        out += [_row(grids, b, r) for r in range(len(rows))]
        out.append("</tbody>")
    said = "".join(f"<li>{html.escape(n)}</li>" for n in notes(seen, "beside"))
    return "\n".join([*out, f"</table></div><ul class='notes'>{said}</ul>"])


def _row(grids: dict[str, Grid], block: int, row: int) -> str:
    label = grids["ours"].blocks[block][1][row][0]
    cells = []
    for c in range(1, len(grids["ours"].names)):
        texts = {show: grids[show].blocks[block][1][row][c] for show in VIEWS}
        spans = "".join(f'<span class="{show}">{_lines(texts[show])}</span>' for show in VIEWS)
        cells.append(f"<td>{spans}</td>")
    name, *facts = label.lines
    small = "".join(f"<small>{html.escape(f)}</small>" for f in facts)
    return f"<tr><th>{html.escape(name)}{small}</th>{''.join(cells)}</tr>"


def _lines(text: TextGrid) -> str:
    first, *rest = [html.escape(line) for line in text.lines] or [""]
    return (f"<b>{first}</b>" if text.bold else first) + "".join(f"<small>{line}</small>" for line in rest)
