"""Plan and read kvbench's own tables, which no paper prints: cache formats, and formats read through the cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvbench.plan.run_plan import RunPlan
from kvbench.report.report import Report
from kvbench.report.table import Table
from kvbench.studies import format_table, through_cache

NAMES = tuple(format_table.TABLES)
"""The names of the tables, in the order in which they are listed."""


@dataclass(frozen=True)
class OwnTable:
    """The parts of a table.

    sheets: its tables of texts.
    notes: the lines below them.
    plain: its values for ``--json``, in dicts and lists.
    """

    sheets: Sequence[Table]
    notes: Sequence[str]
    plain: object


def prepare(name: str, model: str, options: Mapping[str, str]) -> list[RunPlan]:
    """Plan the runs behind a table. Raises UsageError for a key that the table does not take."""
    if name == through_cache.NAME:
        return through_cache.prepare(model, options)
    return [format_table.prepare(name, model, options)]


def read_own_table(name: str, runs: Sequence[RunPlan], reports: Sequence[Report]) -> OwnTable:
    """Return a table from its stored results.

    runs: the runs that ``prepare`` planned for the table.
    reports: the reports on these runs, in the same order.
    """
    if name == through_cache.NAME:
        comparisons = through_cache.compare_formats(runs, reports)
        return OwnTable(
            sheets=through_cache.build_tables(comparisons),
            notes=through_cache.write_notes(comparisons),
            plain=through_cache.make_records(comparisons),
        )
    # the other table has one run
    (run,), (report,) = runs, reports
    rows = format_table.read_lines_of_table(name, run, report)
    # compare pairs on the reference, not on the full cache's own answer
    pairs = format_table.compare_pairs(rows)
    return OwnTable(
        sheets=[format_table.build_table(rows)],
        notes=format_table.write_notes(rows, pairs),
        plain={"rows": [row.record() for row in rows], "pairs": [vars(pair) for pair in pairs]},
    )
