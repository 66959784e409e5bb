"""Checks (b) and (f) of the audit: numbers that a paper prints twice, and full-cache scores that papers share.

Check (b) compares cells that print one measurement, check (f) the full-cache rows of one model in several papers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import NamedTuple

from kvbench.papers.forensics.finding import Finding, name_table
from kvbench.papers.forensics.identity import identity
from kvbench.papers.spec.numbers import format_fixed, printed_number
from kvbench.papers.spec.published import AVERAGE, Published
from kvbench.papers.spec.published_cells import Book, PublishedRow

Places = list[tuple[PublishedRow, Published]]
"""The rows that print one measurement, each with its cell."""


class Measurement(NamedTuple):
    """The measurement that a cell prints. Cells that agree in all fields must have one value.

    setting: the parts of the setting that tell measurements apart (``identity``).
    tasks: the datasets that an average covers; '' for other cells.
    """

    paper: str
    model: str
    method: str
    setting: str
    dataset: str
    metric: str
    unit: str
    tasks: str


def find_repeated_places(book: Book) -> dict[Measurement, Places]:
    """Return the places of every number that is printed more than once, by its measurement."""
    places_by_measurement: dict[Measurement, Places] = {}
    for row in book.rows:
        paper, model, method, settings = identity(row)
        setting = " ".join(f"{key}={value}" for key, value in settings)
        for (dataset, metric), cell in row.cells.items():
            # words, and cells of no method, such as facts about datasets, are no measurements; prose states speed-ups
            # for several workloads without naming the workload
            if cell.value is None or not method or metric.startswith("speedup"):
                continue
            # two averages are one measurement only if they cover the same tasks
            tasks = ",".join(sorted(row.scores)) if dataset == AVERAGE else ""
            measurement = Measurement(
                paper, model, method, setting=setting, dataset=dataset, metric=metric, unit=cell.unit, tasks=tasks
            )
            places_by_measurement.setdefault(measurement, []).append((row, cell))
    return {measurement: places for measurement, places in places_by_measurement.items() if len(places) > 1}


def find_repeats(book: Book) -> Iterator[Finding]:
    """Yield a finding for each measurement that is printed in several places with different values."""
    for measurement, places in find_repeated_places(book).items():
        # group by the value to four decimals, since 41.9 and 41.90 are the same
        tables_by_value: dict[str, list[str]] = {}
        for row, cell in places:
            value = _trim_zeros(format_fixed(printed_number(cell.printed).value, 4))
            tables_by_value.setdefault(value, []).append(row.table)
        if len(tables_by_value) == 1:
            continue
        # the most frequent value is likely the right one, unless another is as frequent
        counts = Counter({value: len(tables) for value, tables in tables_by_value.items()})
        (likely, most), (_, second_most) = counts.most_common(2)
        row_parts = (measurement.model, measurement.method, measurement.setting)
        values = [f"{value} ({', '.join(map(name_table, tables))})" for value, tables in tables_by_value.items()]
        yield Finding(
            check="repeat",
            weight="wrong",
            paper=measurement.paper,
            table="+".join(dict.fromkeys(row.table for row, _ in places)),
            row=" ".join(part for part in row_parts if part),
            cell=measurement.dataset,
            printed="; ".join(values),
            recomputed=likely if most > second_most else "",
            why="the same measurement, printed with different values",
        )


def collect_baselines(book: Book) -> dict[tuple[str, str], dict[str, Published]]:
    """Return the full cache's scores on each (model family, dataset) that several papers print.

    The scores of one such pair are cells by the paper's name. Only scores in per cent in numbered tables count, and of
    a paper only the first.
    """
    cells: dict[tuple[str, str], dict[str, Published]] = {}
    for row in book.rows:
        if row.method != "full" or not row.table.isdigit():
            continue
        # mistral-7b-instruct-v0.2 is a version of mistral-7b-instruct
        family = "mistral-7b-instruct" if row.model.startswith("mistral-7b-instruct") else row.model
        for dataset, cell in row.scores.items():
            if cell.unit == "pct":
                # take the score from a paper's first table; ``find_repeats`` checks that its tables agree
                cells.setdefault((family, dataset), {}).setdefault(row.paper, cell)
    return {key: cell_by_paper for key, cell_by_paper in cells.items() if len(cell_by_paper) > 1}


def compare_full_rows(book: Book) -> Iterator[Finding]:
    """Yield a note on each dataset on which papers print different full-cache scores of one model."""
    for (model, dataset), cell_by_paper in collect_baselines(book).items():
        spread = find_largest_gap(cell_by_paper)
        if not spread:
            continue
        why = f"the full cache of one model, {format_fixed(spread, 2)} points apart between papers"
        versions = {cell.model for cell in cell_by_paper.values()}
        if len(versions) > 1:
            why += f" ({', '.join(sorted(versions))})"
        values = [f"{cell.printed} ({paper} {name_table(cell.table)})" for paper, cell in cell_by_paper.items()]
        yield Finding(
            check="baseline",
            weight="note",
            paper="+".join(cell_by_paper),
            table="",
            row=model,
            cell=dataset,
            printed="; ".join(values),
            recomputed="",
            why=why,
        )


def find_largest_gap(cell_by_paper: Mapping[str, Published]) -> Fraction:
    """Return the largest difference in points between the scores that papers print."""
    values = [printed_number(cell.printed).value for cell in cell_by_paper.values()]
    return max(values) - min(values)


def _trim_zeros(value: str) -> str:
    """Return a number with four decimals without its last zeros, but with at least two decimals."""
    head, _, tail = value.partition(".")
    return f"{head}.{tail[:2]}{tail[2:].rstrip('0')}"
