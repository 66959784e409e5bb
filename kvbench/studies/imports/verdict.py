"""Published values beside scores of imported answers: each lies inside or outside the interval.

A verdict is *indicative* if the answers were made or scored under other conditions than the paper's, or under unknown
ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TypedDict

from kvbench.base.conf import entries
from kvbench.base.errors import unknown
from kvbench.base.formatting import format_number
from kvbench.papers.spec import catalogue, published, table_spec
from kvbench.papers.spec.published import MARKS, Published
from kvbench.studies.imports.scoring import Scored
from kvbench.tasks.longbench import TASKS, task_names

WHOLE = ("full", "n/a", "1.0")
"""Values of a row's setting that leave nothing to choose: the whole cache, or a method without a budget."""


@dataclass(frozen=True)
class PredictionSource:
    """The source of imported answers, as the user states it; None for anything unstated.

    model: the model that made the answers.
    method: the method that made the answers.
    setting: the method's settings as ``key=value;key=value``, '' for none.
    prompt: the entry of conf/prompt for the answers' prompts.
    """

    model: str | None = None
    method: str | None = None
    setting: str = ""
    prompt: str | None = None

    def __post_init__(self) -> None:
        if self.prompt is not None and self.prompt not in entries("prompt"):
            raise unknown("prompt policy", self.prompt, entries("prompt"))


class Judgement(TypedDict):
    """A published value with its verdict, as ``--json`` prints it.

    paper: the paper's id.
    table: the number of the paper's table.
    setting: the setting of the paper's row.
    value: the published value; None if the cell has no number.
    certainty: the kind of the value's first flag: certain, suspect, repaired or missing.
    flag: the kind and the reason, such as ``suspect: ...``; '' for a certain value.
    verdict: inside or outside our 95 % interval; None without a value or an interval.
    indicative: True if the conditions differ from the paper's, or are unknown.
    because: the reasons why the verdict is only indicative.
    matching: how many rows of the paper have the given model, method and setting.
    """

    paper: str
    table: str
    setting: str
    value: float | None
    certainty: str
    flag: str
    verdict: str | None
    indicative: bool
    because: list[str]
    matching: int


class PublishedMean(TypedDict):
    """A paper's mean over LongBench's 16 English tasks; None if the table lacks it.

    stated: the mean as the paper states it.
    of_cells: the mean of the paper's printed cells.
    """

    stated: float | None
    of_cells: float | None


@dataclass(frozen=True)
class MatchingRow:
    """The row of a paper that imported answers are compared with.

    table: the paper's table that has the row.
    cells: the row's printed cells by dataset.
    matching: how many rows of the paper have the source's model, method and setting.
    """

    table: str
    cells: Mapping[str, Published]
    matching: int


def judge_published(
    source: PredictionSource, scored: list[Scored], code_sim: str
) -> dict[tuple[str, str], dict[int, Judgement]]:
    """Compare the scores with published values. Return the judgements by (paper, table) and index in ``scored``.

    Each paper contributes one row. Among the rows of the source's model and method, this is the row that shares most
    datasets. A source that names no model or method has no rows.

    code_sim: the backend of code similarity that scored the answers, levenshtein or difflib.
    """
    judgements: dict[tuple[str, str], dict[int, Judgement]] = {}
    for paper, row in _choose_rows(source, scored).items():
        for i, file in enumerate(scored):
            cell = row.cells.get(file.predictions.dataset)
            # papers print other datasets, too, and we do not know how their scores compare
            if cell is not None and file.predictions.dataset in TASKS:
                judgement = _judge_cell(cell, file, source, code_sim, matching=row.matching)
                judgements.setdefault((paper, row.table), {})[i] = judgement
    return judgements


def read_published_means(source: PredictionSource, scored: list[Scored]) -> dict[tuple[str, str], PublishedMean]:
    """Return the papers' means over LongBench's 16 English tasks by (paper, table).

    A mean is given as the paper states it and as the mean of its cells, since some printed averages do not follow from
    their cells. Either number is None if the table lacks it.
    """
    by_table: dict[tuple[str, str], PublishedMean] = {}
    for paper, row in _choose_rows(source, scored).items():
        values = []
        for name in task_names("en"):
            cell = row.cells.get(name)
            if cell is not None and cell.value is not None:
                values.append(cell.value)
        # a mean of only some of the 16 tasks could not be compared with the stated one
        of_cells = None
        if len(values) == len(task_names("en")):
            of_cells = round(sum(values) / len(values), 2)
        stated = row.cells["avg"].value if "avg" in row.cells else None
        by_table[paper, row.table] = {"stated": stated, "of_cells": of_cells}
    return by_table


def _choose_rows(source: PredictionSource, scored: list[Scored]) -> dict[str, MatchingRow]:
    """Return, by paper, the row of the source's model and method that shares most datasets with ``scored``.

    A paper is left out if none of its rows shares a dataset.
    """
    if source.model is None or source.method is None:
        return {}
    datasets = {file.predictions.dataset for file in scored}
    rows_by_paper: dict[str, list[tuple[str, dict[str, Published]]]] = {}
    for paper, table, cells in published.rows_with_scores(source.model, source.method, source.setting):
        rows_by_paper.setdefault(paper, []).append((table, cells))

    def count_shared(row: tuple[str, dict[str, Published]]) -> int:
        _, cells = row
        return len(datasets & cells.keys())

    # a paper may print a row in several tables, or under several settings
    row_by_paper = {}
    for paper, rows in sorted(rows_by_paper.items()):
        # max takes the first of several rows that share equally many datasets
        best = max(rows, key=count_shared)
        if count_shared(best) > 0:
            table, cells = best
            row_by_paper[paper] = MatchingRow(table, cells, len(rows))
    return row_by_paper


def _judge_cell(cell: Published, scored: Scored, source: PredictionSource, code_sim: str, matching: int) -> Judgement:
    """Judge whether a published value lies in the interval of our score, ends included, and return the judgement.

    code_sim: the backend of code similarity that scored the answers.
    matching: how many rows of the paper have the source's model, method and setting.
    """
    reasons = _list_differences(cell, scored, source, code_sim)
    verdict = None
    if cell.value is not None and scored.interval is not None:
        # papers print LongBench's scores from 0 to 100
        low, high = (100 * end for end in scored.interval)
        is_inside = low <= cell.value <= high
        verdict = "inside" if is_inside else "outside"
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
        "matching": matching,
    }


def _list_differences(cell: Published, scored: Scored, source: PredictionSource, code_sim: str) -> list[str]:
    """Return in words how the conditions of our score differ from those of the published value; [] if they agree."""
    dataset = scored.predictions.dataset
    prompt = catalogue.read_paper(cell.paper).prompt
    reasons = []
    # another template or another cut of long prompts changes scores by as much as a method does
    if not prompt:
        reasons.append("prompt policy of the paper unknown")
    elif source.prompt is None:
        reasons.append("prompt policy of these answers unknown")
    elif _read_policy(prompt, source.model) != _read_policy(source.prompt, source.model):
        reasons.append(f"prompt policy {source.prompt} here, {prompt} there")
    # some tables state no split and seem to come from LongBench-E, which has only some of LongBench's tasks
    if table_spec.load(cell.paper, cell.table).extended and TASKS[dataset].extended:
        reasons.append("split unknown: the paper's scores fit LongBench-E")
    elif scored.predictions.extended:
        reasons.append("LongBench-E here, the standard split there")
    # LongBench's fuzzywuzzy falls back to difflib if python-Levenshtein is missing, and difflib gives other ratios
    if TASKS[dataset].metric == "code_sim" and code_sim != "levenshtein":
        reasons.append(f"code_sim by {code_sim} here, by levenshtein there")
    if not source.setting and _leaves_choice(cell.setting):
        reasons.append(f"setting unknown: {cell.setting}")
    return reasons


def _leaves_choice(setting: str) -> bool:
    """Return True if a row's setting (``key=value;key=value``) has a value that other rows may set differently.

    A value in WHOLE, such as the whole cache, leaves nothing to choose.
    """
    for part in setting.split(";"):
        _, _, value = part.partition("=")
        if part and value not in WHOLE:
            return True
    return False


@cache
def _read_policy(name: str, model: str | None) -> tuple[tuple[str, object], ...]:
    """Return the settings of a prompt policy for a model, without its name, so that two policies can be compared."""
    policy = {key: value for key, value in entries("prompt")[name].items() if key != "name"}
    limits_by_model = {}
    for entry_name, entry in entries("model").items():
        limits_by_model[published.model_id(entry_name)] = entry.get("prompt_limits") or {}
    # ``limits`` names one of the model's prompt_limits: replace the name by the limit, so that two names of one limit
    # are equal
    limits = limits_by_model.get(published.model_id(model or ""), {})
    policy["limits"] = limits.get(policy["limits"], policy["limits"])
    return tuple(sorted(policy.items()))


def write_verdict(judgement: Judgement) -> str:
    """Return a published value with its verdict as tables show it: ``20.99 inside*``, ``31.77? outside``."""
    value = format_number(judgement["value"], 2)
    certainty_mark = MARKS.get(judgement["certainty"], "")
    verdict = judgement["verdict"] or "no interval"
    if judgement["indicative"]:
        verdict += "*"
    return f"{value}{certainty_mark} {verdict}"
