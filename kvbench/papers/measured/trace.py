"""The origin of a number in a paper's table: the stored lines behind it, and the steps from the lines to the number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from kvbench.base.errors import UsageError, unknown
from kvbench.methods.core.chain import Chain
from kvbench.papers.measured.cell_view import CellView, build_view
from kvbench.papers.measured.our_table import OurTable, Parts, TableLine
from kvbench.papers.spec.table_spec import MEANS, Column
from kvbench.report.data import CellResult
from kvbench.store.results import Sample


def trace_number(ours: OurTable, row: str, column: str) -> str:
    """Return lines of text that explain the number in a table's row and column of these names.

    They name the stored result behind the number with each example's score, or the results behind an average.
    Raises UsageError if there is no such row or column, or if the row is not run here.
    """
    line, wanted_column = find_cell(ours, row, column)
    view = build_view(ours)
    lines = [f"{ours.declared.id}, {row}, {column}:"]
    # an average has no stored result of its own: describe those that it averages
    if wanted_column.dataset in MEANS:
        for score_column in ours.declared.scores:
            lines += [f"  {text}" for text in _describe_cells(ours, line, score_column)]
    else:
        lines += _list_examples(ours, line, wanted_column)
    # rows of two models can have one name, so look for the line itself
    entries = next(entries for table_line, entries in view.rows if table_line is line)
    entry = entries[view.columns.index(wanted_column)]
    lines += _describe_entry(entry)
    return "\n".join(lines)


def find_cell(ours: OurTable, row: str, column: str) -> tuple[TableLine, Column]:
    """Return the line and the column of a table with the names ``row`` and ``column``.

    Raises UsageError if the row or the column is missing, or if the row is not run here.
    """
    lines = [line for line in ours.lines if line.row.name == row]
    if not lines:
        raise unknown("row", row, [line.row.name for line in ours.lines])
    # no stored answers stand behind other quantities, such as facts about a dataset
    shown_columns = build_view(ours).columns
    traceable = [shown for shown in shown_columns if shown in ours.declared.scores or shown.dataset in MEANS]
    if not traceable:
        raise UsageError(f"{ours.declared.id} has no numbers of ours to trace: it shows what is printed")
    wanted_column = next((candidate for candidate in traceable if candidate.name == column), None)
    if wanted_column is None:
        raise unknown("column", column, [candidate.name for candidate in traceable])
    # take the row that runs here: two models can have rows of one name
    line = next((candidate for candidate in lines if candidate.chain is not None), lines[0])
    if line.chain is None:
        raise UsageError(f"{row} on {column} is not run here: {line.refused or line.skipped}")
    return line, wanted_column


def _list_examples(ours: OurTable, line: TableLine, column: Column) -> Iterator[str]:
    cells = ours.find_cells(line, column)
    if not cells or ours.run is None:
        raise UsageError(f"{line.row.name} on {column.name} is not run here: {ours.why_absent(line, column)}")
    store = ours.run.store
    yield from _describe_cells(ours, line, column)
    for (group, cell), (_, full_cell) in zip(cells, ours.find_full_cells(line, column), strict=True):
        samples = store.samples(cell.id)
        # a stand-in's number is a share of the full cache's score, so both belong to its origin
        full_samples: Mapping[str, Sample] = {}
        if ours.stand_in:
            full_samples = store.samples(full_cell.id)
        yield f"files: {store.folder(cell.id)}/samples-*.jsonl, cell.json, metrics.json"
        for example in group.examples:
            sample = samples.get(example.id)
            # an example that the run plans but has not answered yet
            if sample is None:
                yield f"  {example.id}: not measured"
                continue
            full_score = ""
            if example.id in full_samples:
                full_score = f"(full {full_samples[example.id].score!s}) "
            yield f"  {example.id}: {sample.score!s:<8} {full_score}{sample.prediction[:60]!r}"


def _describe_cells(ours: OurTable, line: TableLine, column: Column) -> Iterator[str]:
    cells = ours.find_cells(line, column)
    if not cells:
        yield f"{column.name}: not run here"
        return
    tasks = ", ".join(group.column for group, _ in cells)
    yield f"{column.name} ({tasks}): {_describe_result(ours.read_result(line, column), cells)}"
    if ours.stand_in:
        # a full-cache line that reads the same data as this line; a chain without stages is the full cache
        full_line = replace(line, chain=Chain(), refused="", other_chains={})
        full_result = ours.read_result(full_line, column)
        yield f"  full cache: {_describe_result(full_result, ours.find_full_cells(line, column))}"


def _describe_result(result: CellResult, cells: Parts) -> str:
    summary = result.summary
    number = result.status
    if summary is not None and summary.score is not None:
        number = f"{summary.score:.6g} ({summary.metric}, {summary.n} lines)"
    ids = [f"result {cell.id}" for _, cell in cells]
    return ", ".join([number, *ids])


def _describe_entry(entry: CellView) -> Iterator[str]:
    for name, value, share in (
        ("shown", entry.ours, entry.relative),
        ("published", entry.published, entry.published_relative),
    ):
        if value is None:
            continue
        of_full = "" if share is None else f", {share:.6g} % of its full cache"
        yield f"{name}: {value:.6g}{of_full}"
