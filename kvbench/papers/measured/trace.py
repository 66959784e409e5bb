"""The origin of a number in a paper's table: the stored lines behind it, and the steps from them to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvbench.base.errors import UsageError, unknown
from kvbench.methods.core.chain import Chain
from kvbench.papers.measured.cell_view import CellView, view
from kvbench.papers.measured.our_table import OurTable, Parts, TableLine
from kvbench.papers.spec.table_spec import MEANS, Column
from kvbench.report.report import CellResult


def trace(ours: OurTable, row: str, column: str) -> str:
    """Return the cell behind a number with each example's score, or the cells behind an average; else UsageError."""
    line, wanted = find(ours, row, column)
    seen = view(ours)
    origin = list(_lines(ours, line, wanted)) if wanted.dataset not in MEANS else []
    for behind in ours.declared.scores if wanted.dataset in MEANS else ():
        origin += [f"  {text}" for text in _place(ours, line, behind)]
    entry = next(entries for table_line, entries in seen.rows if table_line is line)[seen.columns.index(wanted)]
    return "\n".join([f"{ours.declared.id}, {row}, {column}:", *origin, *_shown(entry, ours.stand_in)])


def find(ours: OurTable, row: str, column: str) -> tuple[TableLine, Column]:
    """Return the row and the column of these names. Raises UsageError for one that is not there or not run here."""
    lines = [line for line in ours.lines if line.row.name == row]
    if not lines:
        raise unknown("row", row, [line.row.name for line in ours.lines])
    columns = [c for c in view(ours).columns if c in ours.declared.scores or c.dataset in MEANS]
    if not columns:
        raise UsageError(f"{ours.declared.id} has no numbers of ours to trace: it shows what is printed")
    wanted = next((c for c in columns if c.name == column), None)
    if wanted is None:
        raise unknown("column", column, [c.name for c in columns])
    # of rows with one name, as of two models, the one that is run here
    line = next((x for x in lines if x.chain is not None), lines[0])
    if line.chain is None:
        raise UsageError(f"{row} on {column} is not run here: {line.refused or line.skipped}")
    return line, wanted


def _lines(ours: OurTable, line: TableLine, column: Column) -> Iterator[str]:
    """Yield every example's line of a cell, with the full cache's score beside it on a stand-in."""
    cells = ours.cells(line, column)
    if not cells or ours.run is None:
        raise UsageError(f"{line.row.name} on {column.name} is not run here: {ours.why_absent(line, column)}")
    store = ours.run.store
    yield from _place(ours, line, column)
    for (group, cell), (_, full_cell) in zip(cells, ours.full(line, column), strict=True):
        samples, full_samples = store.samples(cell.id), store.samples(full_cell.id) if ours.stand_in else {}
        yield f"files: {store.folder(cell.id)}/samples-*.jsonl, cell.json, metrics.json"
        for example in group.examples:
            sample, full_sample = samples.get(example.id), full_samples.get(example.id)
            if sample is None:
                yield f"  {example.id}: not measured"
            else:
                full = "" if full_sample is None else f"(full {full_sample.score!s}) "
                yield f"  {example.id}: {sample.score!s:<8} {full}{sample.prediction[:60]!r}"


def _place(ours: OurTable, line: TableLine, column: Column) -> Iterator[str]:
    """Yield a number's cells with their mean and number of lines; on a stand-in the full cache's, too."""
    cells = ours.cells(line, column)
    if not cells:
        yield f"{column.name}: not run here"
        return
    tasks = ", ".join(g.column for g, _ in cells)
    yield f"{column.name} ({tasks}): {_named(ours.value(line, column), cells)}"
    if ours.stand_in:
        full_value = ours.value(replace(line, chain=Chain(), refused="", others={}), column)
        yield f"  full cache: {_named(full_value, ours.full(line, column))}"


def _named(value: CellResult, cells: Parts) -> str:
    """Return a number with its cells."""
    score, summary = value.status, value.summary
    if summary is not None and summary.score is not None:
        score = f"{summary.score:.6g} ({summary.metric}, {summary.n} lines)"
    return ", ".join([score, *(f"cell {c.id}" for _, c in cells)])


def _shown(entry: CellView, stand_in: bool) -> Iterator[str]:
    """Yield the values that the table shows for a cell."""
    value = entry.relative if stand_in else entry.ours
    if stand_in and entry.floor:
        yield "shown: floor, the full cache scores too little for a share of it"
    elif value is not None:
        yield f"shown: {value:.6g}{' % of the full cache' if stand_in else ''}"
    if entry.published is not None:
        share = entry.published_relative
        share_text = f", {share:.6g} % of its full cache" if stand_in and share is not None else ""
        yield f"published: {entry.published:.6g}{share_text}"
