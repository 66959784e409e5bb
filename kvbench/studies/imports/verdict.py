"""Published values beside scores of imported answers: inside or outside the interval, and how far that can be said.

A verdict is *indicative* where the answers were made, or scored, under other conditions than the paper's, or under
unknown ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from kvbench.base.conf import entries
from kvbench.base.errors import unknown
from kvbench.papers.spec import catalogue, published, table_spec
from kvbench.papers.spec.published import MARKS, Published
from kvbench.studies.imports.scoring import Scored
from kvbench.tasks.longbench import TASKS, names

WHOLE = ("full", "n/a", "1.0")
"""Values of a row's setting that leave nothing to choose: the whole cache, or a method without a budget."""


@dataclass(frozen=True)
class PredictionSource:
    """Where answers come from, as the user says it; None where that was not said."""

    model: str | None = None
    method: str | None = None
    setting: str = ""
    prompt: str | None = None

    def __post_init__(self) -> None:
        if self.prompt is not None and self.prompt not in entries("prompt"):
            raise unknown("prompt policy", self.prompt, entries("prompt"))


def beside(
    source: PredictionSource, scored: list[Scored], code_sim: str
) -> dict[tuple[str, str], dict[int, dict[str, Any]]]:
    """Return (paper, table) -> index of a scored file -> the published value and its verdict, as plain data.

    Of each paper it is the one row of that model and method which shares most datasets; none where the source is not
    said.
    """
    judgements: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for paper, (table, cells, matching) in _rows(source, scored).items():
        for i, s in enumerate(scored):
            cell = cells.get(s.predictions.dataset)
            if cell is not None and s.predictions.dataset in TASKS:
                judged = _judge(cell, s, source, code_sim)
                judgements.setdefault((paper, table), {})[i] = {**judged, "matching": matching}
    return judgements


def means(source: PredictionSource, scored: list[Scored]) -> dict[tuple[str, str], dict[str, float | None]]:
    """Return (paper, table) -> the mean over LongBench's 16 English tasks as ``stated`` there, and that ``of_cells``.

    Some printed averages do not follow from their cells. Either is None where the table does not have it.
    """
    by_table = {}
    for paper, (table, cells, _) in _rows(source, scored).items():
        values = [cells[name].value for name in names("en") if name in cells]
        known = [v for v in values if v is not None]
        of_cells = round(sum(known) / len(known), 2) if len(known) == len(names("en")) else None
        by_table[paper, table] = {"stated": cells["avg"].value if "avg" in cells else None, "of_cells": of_cells}
    return by_table


def _rows(source: PredictionSource, scored: list[Scored]) -> dict[str, tuple[str, dict[str, Published], int]]:
    """Return by paper the table and the row of that model and method which share most datasets with ``scored``.

    The number is how many rows of the paper are of that model and method and hold the setting that was given.
    """
    if source.model is None or source.method is None:
        return {}
    datasets = {s.predictions.dataset for s in scored}
    by_paper: dict[str, list[tuple[str, dict[str, Published]]]] = {}
    for paper, table, cells in published.rows(source.model, source.method, source.setting):
        by_paper.setdefault(paper, []).append((table, cells))
    chosen = {}
    for paper, rows in sorted(by_paper.items()):
        table, cells = max(rows, key=lambda row: len(datasets & row[1].keys()))
        if datasets & cells.keys():
            chosen[paper] = (table, cells, len(rows))
    return chosen


def _judge(cell: Published, scored: Scored, source: PredictionSource, code_sim: str) -> dict[str, Any]:
    reasons = _differences(cell, scored, source, code_sim)
    verdict = None
    if cell.value is not None and scored.interval is not None:
        low, high = (100 * x for x in scored.interval)
        verdict = "inside" if low <= cell.value <= high else "outside"
    return {
        "paper": cell.paper,
        "table": cell.table,
        "setting": cell.setting,
        "value": cell.value,
        "certainty": cell.certainty,
        "flag": cell.flag,
        "verdict": verdict,
        "indicative": bool(reasons),
        "because": reasons,
    }


def _differences(cell: Published, scored: Scored, source: PredictionSource, code_sim: str) -> list[str]:
    """Return the reasons why the published value was not measured as this score was."""
    prompt, dataset = catalogue.paper(cell.paper).prompt, scored.predictions.dataset
    reasons = []
    if not prompt or source.prompt is None:
        whose = "these answers" if prompt else "the paper"
        reasons.append(f"prompt policy of {whose} unknown")
    elif _policy(prompt, source.model) != _policy(source.prompt, source.model):
        reasons.append(f"prompt policy {source.prompt} here, {prompt} there")
    if table_spec.load(cell.paper, cell.table).extended and TASKS[dataset].extended:
        reasons.append("split unknown: the paper's scores fit LongBench-E")
    elif scored.predictions.extended:
        reasons.append("LongBench-E here, the standard split there")
    if TASKS[dataset].metric == "code_sim" and code_sim != "levenshtein":
        reasons.append(f"code_sim by {code_sim} here, by levenshtein there")
    if not source.setting and any(part.partition("=")[2] not in WHOLE for part in cell.setting.split(";") if part):
        reasons.append(f"setting unknown: {cell.setting}")
    return reasons


@cache
def _policy(name: str, model: str | None) -> tuple[tuple[str, Any], ...]:
    """Return the settings of a prompt policy for a model: presets of other names can agree."""
    policy = {k: v for k, v in entries("prompt")[name].items() if k != "name"}
    known = {published.model_id(m): entry.get("prompt_limits") or {} for m, entry in entries("model").items()}
    limits = known.get(published.model_id(model or ""), {})
    policy["limits"] = limits.get(policy["limits"], policy["limits"])
    return tuple(sorted(policy.items()))


def mark(judged: Mapping[str, Any]) -> str:
    """Return a published value with its verdict as tables show it: ``20.99 inside*``, ``31.77? outside``."""
    value = "—" if judged["value"] is None else f"{judged['value']:.2f}"
    verdict = judged["verdict"] or "no interval"
    return f"{value}{MARKS.get(judged['certainty'], '')} {verdict}{'*' if judged['indicative'] else ''}"
