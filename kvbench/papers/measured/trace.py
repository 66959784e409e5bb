"""Where a number of a paper's table comes from: the stored lines behind it, and how it follows from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvbench.errors import UsageError, unknown
from kvbench.methods.chain import Chain
from kvbench.papers.measured.cell_view import CellView, view
from kvbench.papers.measured.our_table import OurTable, Parts, TableLine
from kvbench.papers.spec.table_spec import MEANS, Column
from kvbench.run.results import CellResult


def trace(ours: OurTable, row: str, column: str) -> str:
    """The cell behind a number with each example's score, or the cells behind an average. UsageError for no such."""
    lines = [line for line in ours.lines if line.row.name == row]
    if not lines:
        raise unknown("row", row, [line.row.name for line in ours.lines])
    seen = view(ours)
    columns = [c for c in seen.columns if c in ours.declared.scores or c.dataset in MEANS]
    if not columns:
        raise UsageError(f"{ours.declared.id} has no numbers of ours to trace: it shows what is printed")
    chosen = next((c for c in columns if c.name == column), None)
    if chosen is None:
        raise unknown("column", column, [c.name for c in columns])
    # of rows with one name, as of two models, the one that is run here
    line = next((x for x in lines if x.chain is not None), lines[0])
    if line.chain is None:
        raise UsageError(f"{row} on {column} is not run here: {line.refused or line.skipped}")
    found = _average(ours, line) if chosen.dataset in MEANS else _lines(ours, line, chosen)
    entry = next(entries for other, entries in seen.rows if other is line)[seen.columns.index(chosen)]
    return "\n".join([f"{ours.declared.id}, {row}, {column}:", *found, *_shown(entry, ours.stand_in)])


def _average(ours: OurTable, line: TableLine) -> Iterator[str]:
    """The cells of an average."""
    for column in ours.declared.scores:
        yield from (f"  {text}" for text in _place(ours, line, column))


def _lines(ours: OurTable, line: TableLine, column: Column) -> Iterator[str]:
    """Every example's line of a cell, with the full cache's score beside it on a stand-in."""
    cells = ours.cells(line, column)
    if not cells or ours.run is None:
        raise UsageError(f"{line.row.name} on {column.name} is not run here: {ours.why_absent(line, column)}")
    store = ours.run.store
    yield from _place(ours, line, column)
    for (group, cell), (_, whole) in zip(cells, ours.full(line, column), strict=True):
        samples, beside = store.samples(cell.id), store.samples(whole.id) if ours.stand_in else {}
        yield f"files: {store.folder(cell.id)}/samples-*.jsonl, cell.json, metrics.json"
        for example in group.examples:
            sample, other = samples.get(example.id), beside.get(example.id)
            if sample is None:
                yield f"  {example.id}: not measured"
            else:
                full = "" if other is None else f"(full {other.score!s}) "
                yield f"  {example.id}: {sample.score!s:<8} {full}{sample.prediction[:60]!r}"


def _place(ours: OurTable, line: TableLine, column: Column) -> Iterator[str]:
    """A number's cells with their mean and how many lines they have; on a stand-in the full cache's, too."""
    cells = ours.cells(line, column)
    if not cells:
        yield f"{column.name}: not run here"
        return
    tasks = ", ".join(g.column for g, _ in cells)
    yield f"{column.name} ({tasks}): {_named(ours.value(line, column), cells)}"
    if ours.stand_in:
        whole = ours.value(replace(line, chain=Chain(), refused="", others={}), column)
        yield f"  full cache: {_named(whole, ours.full(line, column))}"


def _named(value: CellResult, cells: Parts) -> str:
    """A number with its cells."""
    mean, means = value.status, value.summary
    if means is not None and means.score is not None:
        mean = f"{means.score:.6g} ({means.metric}, {means.n} lines)"
    return ", ".join([mean, *(f"cell {c.id}" for _, c in cells)])


def _shown(entry: CellView, stand_in: bool) -> Iterator[str]:
    """What the table shows of it."""
    value = entry.relative if stand_in else entry.ours
    if stand_in and entry.floor:
        yield "shown: floor, the full cache scores too little for a share of it"
    elif value is not None:
        yield f"shown: {value:.6g}{' % of the full cache' if stand_in else ''}"
    if entry.published is not None:
        share = entry.published_relative
        beside = f", {share:.6g} % of its full cache" if stand_in and share is not None else ""
        yield f"published: {entry.published:.6g}{beside}"
