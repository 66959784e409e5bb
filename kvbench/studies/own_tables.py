"""The tables that no paper prints: what each measures, and its sheets, notes and JSON from what is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.plan.run_plan import RunPlan
from kvbench.report.report import Report
from kvbench.report.table import Table
from kvbench.studies import byte_table, leaderboard, ranking, through_cache

NAMES = (*byte_table.ROWS, leaderboard.NAME)


@dataclass(frozen=True)
class OwnTable:
    """A table's sheets, what stands below them, and what ``--json`` prints."""

    sheets: Sequence[Table]
    notes: Sequence[str]
    plain: Any


def prepare(name: str, model: str, options: Mapping[str, str]) -> list[RunPlan]:
    """Plan the runs behind a table. Raises UsageError for a key that it does not take."""
    plans = {m.NAME: m.prepare for m in (leaderboard, ranking, through_cache)}
    return plans[name](model, options) if name in plans else [byte_table.prepare(name, model, options)]


def read(name: str, model: str, runs: Sequence[RunPlan], reports: Sequence[Report]) -> OwnTable:
    """Return a table from what is stored."""
    if name == leaderboard.NAME:
        standings = leaderboard.standings(runs, reports)
        lines = leaderboard.records(standings, model, None)
        return OwnTable(leaderboard.sheets(standings), leaderboard.notes(standings), lines)
    if name == ranking.NAME:
        measures = ranking.read_measures(model, runs, reports)
        opposed = ranking.disagreements(measures)
        ranks = ranking.records(measures, opposed)
        return OwnTable(ranking.sheets(measures), ranking.notes(measures, opposed), ranks)
    if name == through_cache.NAME:
        both = through_cache.both(runs, reports)
        return OwnTable(through_cache.sheets(both), through_cache.notes(both), through_cache.records(both))
    rows = byte_table.lines(name, runs[0], reports[0])
    told = byte_table.pairs(rows)
    records = {"rows": [r.record() for r in rows], "pairs": [vars(p) for p in told]}
    return OwnTable([byte_table.sheet(rows)], byte_table.notes(rows, told), records)
