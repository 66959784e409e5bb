"""The origin of a number in a paper's table: the stored lines behind it, and the steps from the lines to the number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvbench.base.errors import UsageError, unknown
from kvbench.methods.core.chain import Chain
from kvbench.papers.measured.cells import read_cells
from kvbench.papers.measured.plan import Line, PaperTable, Parts
from kvbench.papers.spec.table_spec import MEANS, Column
from kvbench.report.data import CellResult
from kvbench.store.results import Sample


def trace_number(table: PaperTable, row: str, column: str) -> str:
    """Return lines of text that explain the number in a table's row and column of these names.

    They name the stored result behind the number with each example's score, or the results behind an average.
    Raises UsageError if there is no such row or column, or if the row is not run here.
    """
    line, wanted = find_cell(table, row, column)
    texts = [f"{table.spec.id}, {row}, {column}:"]
    # an average has no stored result of its own: describe those that it averages
    if wanted.dataset in MEANS:
        for score_column in table.spec.scores:
            texts += [f"  {text}" for text in _describe_parts(table, line, score_column)]
    else:
        texts += _list_examples(table, line, wanted)
    read = read_cells(table)
    cell = read.pairs_of(line)[read.columns.index(wanted)]
    sides = {"shown": (cell.value, cell.share), "published": (cell.paper_value, cell.paper_share)}
    for name, (value, share) in sides.items():
        if value is not None:
            texts.append(f"{name}: {value:.6g}")
            if share is not None:
                texts[-1] += f", {share:.6g} % of its full cache"
    return "\n".join(texts)


def find_cell(table: PaperTable, row: str, column: str) -> tuple[Line, Column]:
    """Return the line and the column of a table with the names ``row`` and ``column``.

    Raises UsageError if the row or the column is missing, or if the row is not run here.
    """
    lines = [line for line in table.lines if line.name == row]
    if not lines:
        raise unknown("row", row, list(table.rows["name"]))
    # no stored answers stand behind other quantities, such as facts about a dataset
    columns = read_cells(table).columns
    traceable = [shown for shown in columns if shown in table.spec.scores or shown.dataset in MEANS]
    if not traceable:
        raise UsageError(f"{table.spec.id} has no numbers of ours to trace: it shows what is printed")
    wanted = next((candidate for candidate in traceable if candidate.name == column), None)
    if wanted is None:
        raise unknown("column", column, [candidate.name for candidate in traceable])
    # take the row that runs here: two models can have rows of one name
    line = next((candidate for candidate in lines if candidate.chain is not None), lines[0])
    if line.chain is None:
        raise UsageError(f"{row} on {column} is not run here: {line.refused or line.skipped}")
    return line, wanted


def _list_examples(table: PaperTable, line: Line, column: Column) -> Iterator[str]:
    parts = table.find_parts(line, column)
    if not parts or table.run is None:
        raise UsageError(f"{line.name} on {column.name} is not run here: {table.why_absent(line, column)}")
    store = table.run.store
    yield from _describe_parts(table, line, column)
    for (group, cell), (_, full_cell) in zip(parts, table.find_parts(line, column, Chain()), strict=True):
        samples = store.samples(cell.id)
        # a stand-in's number is a share of the full cache's score, so both belong to its origin
        full_samples: Mapping[str, Sample] = store.samples(full_cell.id) if table.stand_in else {}
        yield f"files: {store.folder(cell.id)}/samples-*.jsonl, cell.json, metrics.json"
        for example in group.examples:
            sample = samples.get(example.id)
            # an example that the run plans but has not answered yet
            if sample is None:
                yield f"  {example.id}: not measured"
                continue
            full = ""
            if example.id in full_samples:
                full = f"(full {full_samples[example.id].score!s}) "
            yield f"  {example.id}: {sample.score!s:<8} {full}{sample.prediction[:60]!r}"


def _describe_parts(table: PaperTable, line: Line, column: Column) -> Iterator[str]:
    parts = table.find_parts(line, column)
    if not parts:
        yield f"{column.name}: not run here"
        return
    tasks = ", ".join(group.column for group, _ in parts)
    yield f"{column.name} ({tasks}): {_describe_result(table.read_result(line, column), parts)}"
    if table.stand_in:
        # a chain without stages is the full cache
        full_result = table.read_result(line, column, chain=Chain())
        yield f"  full cache: {_describe_result(full_result, table.find_parts(line, column, Chain()))}"


def _describe_result(result: CellResult, parts: Parts) -> str:
    summary = result.summary
    number = result.status
    if summary is not None and summary.score is not None:
        number = f"{summary.score:.6g} ({summary.metric}, {summary.n} lines)"
    return ", ".join([number, *(f"result {cell.id}" for _, cell in parts)])
