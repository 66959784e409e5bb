"""Plan and read kvbench's own tables, not printed by any paper: byte tables, the ranking and the leaderboard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvbench.plan.run_plan import RunPlan
from kvbench.report.report import Report
from kvbench.report.table import Table
from kvbench.studies import byte_table, leaderboard, ranking, through_cache

NAMES = tuple(byte_table.ROWS) + (leaderboard.NAME,)
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
    if name == leaderboard.NAME:
        return leaderboard.prepare(model, options)
    if name == ranking.NAME:
        return ranking.prepare(model, options)
    if name == through_cache.NAME:
        return through_cache.prepare(model, options)
    return [byte_table.prepare(name, model, options)]


def read_own_table(name: str, model: str, runs: Sequence[RunPlan], reports: Sequence[Report]) -> OwnTable:
    """Return a table from the stored results of its ``runs``. ``prepare`` planned them."""
    if name == leaderboard.NAME:
        standings = leaderboard.standings(runs, reports)
        return OwnTable(
            sheets=leaderboard.sheets(standings),
            notes=leaderboard.notes(standings),
            # scripts/leaderboard.py names the commits of the samples; a table printed from a store does not
            plain=leaderboard.records(standings, model, commit=None),
        )
    if name == ranking.NAME:
        measures = ranking.read_measures(model, runs, reports)
        # notes and JSON both list the pairs on which measures disagree
        opposed = ranking.disagreements(measures)
        return OwnTable(
            sheets=ranking.sheets(measures),
            notes=ranking.notes(measures, opposed),
            plain=ranking.records(measures, opposed),
        )
    if name == through_cache.NAME:
        comparisons = through_cache.compare_formats(runs, reports)
        return OwnTable(
            sheets=through_cache.sheets(comparisons),
            notes=through_cache.notes(comparisons),
            plain=through_cache.records(comparisons),
        )
    # all other tables are byte tables, and these have one run
    rows = byte_table.lines_of_rows(name, runs[0], reports[0])
    # compare pairs on the reference, not on the full cache's own answer
    pairs = byte_table.pairs_in_blocks(rows)
    return OwnTable(
        sheets=[byte_table.sheet(rows)],
        notes=byte_table.notes(rows, pairs),
        plain={"rows": [row.record() for row in rows], "pairs": [vars(pair) for pair in pairs]},
    )
