"""The verdict on each method of a report: how much smaller its cache is, and how much its answers lose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from kvbench.base.formatting import format_number, format_percent, format_significant, with_interval
from kvbench.report.table import Table
from kvbench.tasks.metrics import metric
from kvbench.tasks.metrics.stats import FEWEST

if TYPE_CHECKING:
    from kvbench.report.data import Delta, ReportData, ReportRow

MOST_NAMES = 3
"""The most tasks that a verdict names; of more it says how many."""
HEADS = ("method", "size", "tokens", "score", "difference to full", "divergence", "verdict")


@dataclass(frozen=True, kw_only=True)
class MethodVerdict:
    """The savings and losses of one method beside the full cache.

    method: the method's label, without the options that all rows of the method share.
    times_smaller: the full cache's bytes over the method's, both at 16 bits; None if nothing is measured.
    times_smaller_compressed: the same over the layers alone that methods compress; None if no others hold anything.
    kept_percent: the tokens held, in per cent of the prompt's tokens; None if nothing is measured.
    attended_percent: the tokens that a step attends, in per cent of the prompt's tokens; None without masking.
    score: the mean score over tasks in printed units; None if a task has no score, or if nothing was compressed.
    full_score: the full cache's mean score in printed units; None under the same conditions, or without a full cache.
    delta: the mean paired difference to the full cache; None where ``ReportRow.delta`` is.
    divergence: KL from the full cache's next-token distribution, in nats, mean over tasks; None if not compared.
    worse: the tasks on which the method is worse than the full cache by the interval of the paired difference.
    better: the tasks on which it is better by that interval.
    outcome: the conclusion in words.
    """

    method: str
    times_smaller: float | None
    times_smaller_compressed: float | None
    kept_percent: float | None
    attended_percent: float | None
    score: float | None
    full_score: float | None
    delta: Delta | None
    divergence: float | None
    worse: tuple[str, ...]
    better: tuple[str, ...]
    outcome: str

    def texts(self) -> tuple[str, ...]:
        """Return the verdict's columns as texts, one for each of HEADS."""
        # a column stays empty if its number is not known
        size, tokens, score, difference, divergence = "", "", "", "", ""
        if self.times_smaller is not None:
            size = describe_size(self.times_smaller)
            compressed = self.times_smaller_compressed
            if compressed is not None and describe_size(compressed) != size:
                size += f"\n{format_number(compressed)}x in its layers"
        if self.attended_percent is not None:
            tokens = f"attends {format_percent(self.attended_percent)}"
        elif self.kept_percent is not None:
            tokens = describe_tokens(self.kept_percent)
        if self.score is not None:
            score = format_number(self.score)
            if self.full_score is not None:
                score += f" of {format_number(self.full_score)}"
        if self.delta is not None:
            difference = with_interval(self.delta.mean, self.delta.ci, sign=True, gap=" ")
        if self.divergence is not None:
            divergence = f"KL {format_significant(self.divergence, 2)}"
        # the options of a label stand below the method, so that the line fits
        name = self.method.replace(" ", "\n", 1)
        return name, size, tokens, score, difference, divergence, self.outcome


def describe_size(times_smaller: float) -> str:
    """Return in words how much smaller a method's cache is than the full cache. Up to 5 % count as the same size."""
    if times_smaller >= 1.05:
        return f"{format_number(times_smaller)}x smaller"
    if times_smaller > 1 / 1.05:
        return "same size"
    return f"{format_number(1 / times_smaller)}x larger"


def describe_tokens(kept_percent: float) -> str:
    """Return in words how many of a prompt's tokens a method keeps."""
    share = format_percent(kept_percent)
    if share == "100 %":
        return "all tokens"
    return f"{share} of tokens"


def judge_methods(report: ReportData) -> list[MethodVerdict]:
    """Return the verdict on each method of a report except the full cache, in the report's order."""
    full = next((row for row in report.rows if row.is_full), None)
    methods = [row for row in report.rows if not row.is_full]
    names = _shorten([row.method for row in methods])
    return [_judge_row(row, name, full, report) for row, name in zip(methods, names, strict=True)]


def build_table(report: ReportData) -> Table | None:
    """Return the verdicts as a table, a line for each method; None if only the full cache is measured."""
    rows = [verdict.texts() for verdict in judge_methods(report) if verdict.outcome]
    if not rows:
        return None
    # leave out the columns that are empty in all rows
    filled = [i for i in range(len(HEADS)) if any(row[i] for row in rows)]
    filled_heads = tuple(HEADS[i] for i in filled)
    filled_rows = [tuple(row[i] for i in filled) for row in rows]
    return Table(filled_heads, tuple(filled_rows), left=len(filled), bare=True)


def _judge_row(row: ReportRow, name: str, full: ReportRow | None, report: ReportData) -> MethodVerdict:
    """Return the verdict on one row. ``full`` is the full cache's row, None if it was not asked for."""
    times_smaller, times_smaller_compressed, kept_percent, attended_percent = None, None, None, None
    score, full_score = None, None
    full_means = full.means if full is not None else None
    if row.means is not None:
        # the full cache's keys and values alone have 100 %
        full_percent = 100.0
        if full_means is not None:
            # the measured full cache has positions beside its keys and values, as every method has
            full_percent = full_means.percent_of_full
        times_smaller = full_percent / row.means.percent_of_full
        if row.means.compressed_percent is not None:
            full_compressed = full_means.compressed_percent if full_means is not None else None
            times_smaller_compressed = (full_compressed or 100.0) / row.means.compressed_percent
        kept_percent = row.means.kept_percent
        attended_percent = row.means.attended_percent
        # a score beside the full cache's would look like a method that loses nothing
        if row.is_complete and not row.is_unchanged:
            score = row.means.score_mean
            if full_means is not None:
                full_score = full_means.score_mean
    worse, better = _find_sure_tasks(row, report)
    return MethodVerdict(
        method=name,
        times_smaller=times_smaller,
        times_smaller_compressed=times_smaller_compressed,
        kept_percent=kept_percent,
        attended_percent=attended_percent,
        score=score,
        full_score=full_score,
        delta=row.delta,
        divergence=_average_divergence(row),
        worse=tuple(worse),
        better=tuple(better),
        outcome=_describe_outcome(row, worse, better),
    )


def _find_sure_tasks(row: ReportRow, report: ReportData) -> tuple[list[str], list[str]]:
    """Return (the tasks on which a method is worse than the full cache, those on which it is better).

    A task counts only if the interval of the paired difference excludes 0.
    """
    worse, better = [], []
    for cell, column, task in zip(row.cells, report.columns, report.task_names, strict=True):
        if cell.delta is None or cell.delta.ci is None:
            continue
        low, high = cell.delta.ci
        # a smaller perplexity is better, and perplexities are the only scores with a ``formula``
        if metric(column.metric).formula is not None:
            low, high = -high, -low
        if high < 0:
            worse.append(task)
        elif low > 0:
            better.append(task)
    return worse, better


def _average_divergence(row: ReportRow) -> float | None:
    """Return a row's mean divergence over its tasks; None unless all of them were compared with the full cache.

    It is None, too, for a report without tasks. An interrupted run may leave the full cache without a current result,
    and then there are none.
    """
    means = []
    for cell in row.cells:
        if cell.summary is None or not cell.summary.fidelity:
            return None
        # a cell is compared on the reference text, on the full cache's own answer, or on both. The answer is preferred
        fidelity_by_text = cell.summary.fidelity
        kind = "greedy" if "greedy" in fidelity_by_text else "reference"
        means.append(fidelity_by_text[kind].kl_mean)
    return fmean(means) if means else None


def _describe_outcome(row: ReportRow, worse: Sequence[str], better: Sequence[str]) -> str:
    """Return in words whether a method is better or worse than the full cache, or why this is not known.

    Return '' if no task is measured, refused or failed.

    worse: the tasks on which the method is worse by an interval.
    better: the tasks on which it is better by an interval.
    """
    broken = Counter(cell.status for cell in row.cells if cell.status in ("refused", "failed"))
    if broken:
        if len(row.cells) == 1:
            return f"✗ {row.cells[0].status}"
        counts = ", ".join(f"{status} in {count}" for status, count in broken.items())
        return f"✗ {counts} of {len(row.cells)} tasks"
    summaries = [cell.summary for cell in row.cells if cell.summary is not None]
    if not summaries:
        return ""
    if len(summaries) < len(row.cells):
        return f"{len(summaries)} of {len(row.cells)} tasks measured"
    if row.is_unchanged:
        return "nothing was compressed"
    if all(cell.delta is None for cell in row.cells):
        return "no full cache to compare with"
    # the mean over several tasks may have an interval even if no task has one
    if min(summary.n for summary in summaries) < FEWEST and (row.delta is None or row.delta.ci is None):
        return "too few examples to compare"
    parts = []
    for word, names in (("worse", worse), ("better", better)):
        if names and len(row.cells) > 1:
            parts.append(f"{word} on {_name_tasks(names, len(row.cells))}")
        elif names:
            parts.append(f"{word} than full")
    if parts:
        return ", ".join(parts)
    if row.delta is None or not row.delta.is_sure:
        return "not told apart"
    if row.delta.mean < 0:
        return "worse in the mean"
    return "better in the mean"


def _name_tasks(tasks: Sequence[str], count: int) -> str:
    """Return the names of ``tasks``, or, if they are many, how many of ``count`` tasks they are."""
    if len(tasks) == count:
        return f"all {count}"
    if len(tasks) > MOST_NAMES:
        return f"{len(tasks)} of {count} tasks"
    return ", ".join(tasks)


def _shorten(labels: Sequence[str]) -> list[str]:
    """Return labels without the options that all rows of a method share: ``snapkv kv_ratio=0.25`` becomes snapkv.

    A label is a method and its options, separated by spaces.
    """
    options_by_method: dict[str, list[list[str]]] = {}
    for label in labels:
        method, *options = label.split(" ")
        options_by_method.setdefault(method, []).append(options)
    names = []
    for label in labels:
        method, *options = label.split(" ")
        # an option that every row of the method has tells none of them apart
        shared = set(options).intersection(*options_by_method[method])
        names.append(" ".join([method, *(option for option in options if option not in shared)]))
    return names
