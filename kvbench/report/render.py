"""Render a report, its tables and its legend, as text, Markdown, CSV or LaTeX."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbench.base.formatting import format_number, format_size, format_sizes, with_interval
from kvbench.report import fidelity, pages, ruler, turns, verdict, writers
from kvbench.report.table import Table
from kvbench.store.labels import explain_budgets
from kvbench.tasks.metrics import metric
from kvbench.tasks.metrics.stats import FEWEST

if TYPE_CHECKING:
    from kvbench.kv.pages import PagesFreed
    from kvbench.report.data import CellResult, Delta, ReportData, ReportRow, RowMeans
    from kvbench.store.results import CellSummary

FORMATS = ("text", "md", "csv", "latex")
BROKEN = ("refused", "failed")
"""The statuses of cells that have a reason in place of a score."""
UNCHANGED = "nothing was\ncompressed"
"""The text in place of the score of a method that held and answered the same as the full cache."""
UNCHANGED_NOTE = (
    "nothing was compressed: tokens, bytes and answers are those of the full cache on 99 % of prompts or more. The "
    "score, which says nothing about the method, is in --json. Give it a smaller budget."
)
CELL_FIELDS = (
    "method",
    "task",
    "status",
    "metric",
    "score",
    "ci_low",
    "ci_high",
    "delta",
    "delta_ci_low",
    "delta_ci_high",
    "n",
    "of",
    "unscored",
    "prompt_tokens",
    "kept",
    "nominal",
    "payload",
    "overhead",
    "full_bytes",
    "percent_of_full",
    "payload_kv_head",
    "payload_query_head",
    "attended",
    "decode_peak",
    "new_tokens",
    "evicts",
    "cell",
    "reason",
    "nothing_compressed",
)
"""The CSV columns that every cell has. The columns of divergences and of several questions follow them."""


def _list_csv_fields() -> tuple[str, ...]:
    """Return the CSV columns: first every cell's, then each text's columns of ``fidelity``, then ``turns``' columns."""
    fields = list(CELL_FIELDS)
    for kind in fidelity.TEXTS:
        fields += [f"{kind}_{name}" for name in fidelity.CSV_FIELDS]
    fields += [f"turns_{name}" for name in turns.CSV_FIELDS]
    return tuple(fields)


CSV_FIELDS = _list_csv_fields()
ATTENDED = "attended\n%"
EVICTS = "evicts"
EVICTING = (
    "keeps to its budget while it answers or is scored, too, so it holds less than a method that compresses the prompt "
    "alone and keeps every token after it."
)
LENGTH = "tokens an\nanswer"
"""The head of a task's mean answer length, where answers are worked solutions."""
SHARE = "% of\nfull at\n16 bits"
STORAGE = ("kept\n%", ATTENDED, "payload", "overhead", SHARE, "prefill\nms")
"""The heads of the storage table's columns after the method."""


@dataclass(frozen=True, kw_only=True)
class Detail:
    """The choice of details that a report shows in addition to verdicts, scores and sizes.

    intervals: intervals and differences of every task.
    notes: the tables of storage and of pages freed, and how the numbers were measured.
    """

    intervals: bool = False
    notes: bool = False


EVERYTHING = Detail(intervals=True, notes=True)


def write_header(report: ReportData) -> list[str]:
    """Return the lines above the tables: a warning about few examples, the settings, and the number of examples."""
    lines = []
    sizes_of_cells = _list_sample_sizes(report)
    if sizes_of_cells:
        fewest = min(n for n, _ in sizes_of_cells)
        if fewest < FEWEST and not _has_mean_interval(report):
            lines.append(
                f"! n = {fewest} a task: a smoke test, too few examples to compare. Intervals begin at n = {FEWEST}."
            )
    settings = report.settings.removesuffix(".")
    if sizes_of_cells:
        settings += f"; n = {_describe_sizes(sizes_of_cells)} examples a task"
    if settings:
        lines.append(f"{settings}.")
    return lines


def _has_mean_interval(report: ReportData) -> bool:
    """Return True if the mean over tasks has an interval, even if single tasks have too few examples for one."""
    if len(report.columns) == 1:
        return False
    return any(row.means is not None and row.means.score_ci is not None for row in report.rows)


def build_tables(report: ReportData, detail: Detail = Detail(), folded: bool = True) -> list[Table]:
    """Return the tables of verdicts, scores, divergences from the full cache, storage and pages freed.

    A table for which the report has no numbers is left out.

    folded: cut the tables of scores and of storage into several if they are wider than 100 characters, for output as
    text.
    """
    tables = []
    verdicts = verdict.build_table(report)
    if verdicts is not None:
        tables.append(verdicts)
    score_table = _build_score_table(report, detail)
    tables += list(score_table.folded()) if folded else [score_table]
    tables += ruler.build_tables(report)
    tables += turns.build_tables(report)
    tables += fidelity.build_tables(report)
    if detail.notes:
        storage_table = _build_storage_table(report)
        tables += list(storage_table.folded()) if folded else [storage_table]
        freed = _list_pages_freed(report)
        if freed:
            tables.append(pages.build_table(freed))
    return tables


@dataclass(frozen=True)
class _ScoreLayout:
    """The optional columns of a report's table of scores.

    has_mean: whether the mean over tasks has a column, for a report of several tasks.
    has_deltas: whether the difference to the full cache has a column, behind the mean or else behind the only task.
    has_sizes: whether the bytes held have a column.
    """

    has_mean: bool
    has_deltas: bool
    has_sizes: bool


def _build_score_table(report: ReportData, detail: Detail) -> Table:
    """Return the table of scores: the mean over tasks, its difference to the full cache, each task, and the size.

    The mean length of answers stands behind the score of a task with worked solutions.
    """
    layout = _ScoreLayout(
        has_mean=len(report.columns) > 1,
        has_deltas=any(row.delta is not None for row in report.rows),
        has_sizes=any(row.means is not None for row in report.rows),
    )
    # all sizes are written together, since they share one unit
    bytes_held = [row.means.held16 if row.means is not None else None for row in report.rows]
    rows = []
    for row, size_text in zip(report.rows, format_sizes(bytes_held), strict=True):
        rows.append(tuple(_write_score_row(row, report, layout, detail, size_text)))
    return Table(tuple(_list_score_heads(report, layout)), tuple(rows), ruled=detail.intervals)


def _list_score_heads(report: ReportData, layout: _ScoreLayout) -> list[str]:
    """Return the heads of the table of scores. ``_write_score_row`` writes a text below each."""
    heads = ["method"]
    if layout.has_mean:
        heads.append("mean")
        if layout.has_deltas:
            heads.append("Δ")
    for task, column in zip(report.task_names, report.columns, strict=True):
        heads.append(f"{task}\n{column.metric}")
        if layout.has_deltas and not layout.has_mean:
            heads.append("Δ")
        if metric(column.metric).lengths:
            heads.append(LENGTH)
    if layout.has_sizes:
        heads.append("size")
    return heads


def _write_score_row(
    row: ReportRow, report: ReportData, layout: _ScoreLayout, detail: Detail, size_text: str
) -> list[str]:
    """Return one method's row of the table of scores, a text for each of ``_list_score_heads``."""
    texts = [_wrap(row.method)]
    if layout.has_mean:
        texts.append(_write_mean(row, detail))
        if layout.has_deltas:
            texts.append(_write_delta(row.delta, detail))
    for cell, column in zip(row.cells, report.columns, strict=True):
        # with intervals, the differences of several tasks stand below their scores
        texts.append(_write_score(cell, detail, with_delta=layout.has_mean))
        if layout.has_deltas and not layout.has_mean:
            texts.append(_write_delta(row.delta, detail))
        if metric(column.metric).lengths:
            length = cell.summary.new_tokens if cell.summary is not None else None
            texts.append(format_number(length))
    if layout.has_sizes:
        if row.evicts and row.means is not None:
            size_text += f"\n{EVICTS}"
        texts.append(size_text)
    return texts


def _build_storage_table(report: ReportData) -> Table:
    """Return the table of tokens, bytes and times of each measured method, as means over its cells."""
    heads = ["method"]
    heads += STORAGE
    rows = []
    for row in report.rows:
        if row.means is not None:
            texts = [_wrap(row.method)]
            texts += _write_storage(row.means, row.evicts)
            rows.append(texts)
    # few methods mask tokens that they hold; without one, every row of this column would show a dash
    if not _has_masks(report):
        attended = heads.index(ATTENDED)
        del heads[attended]
        for texts in rows:
            del texts[attended]
    return Table(tuple(heads), tuple(map(tuple, rows)))


def _list_pages_freed(report: ReportData) -> list[tuple[str, PagesFreed]]:
    """Return (method, shares of pages freed) of each row. Results of older versions do not have them."""
    freed = []
    for row in report.rows:
        if row.means is not None and row.means.pages_freed is not None:
            freed.append((row.method, row.means.pages_freed))
    return freed


def _write_mean(row: ReportRow, detail: Detail) -> str:
    if row.means is None or not row.is_complete:
        return "—"
    if row.is_unchanged:
        return UNCHANGED
    return with_interval(row.means.score_mean, row.means.score_ci if detail.intervals else None)


def _write_delta(delta: Delta | None, detail: Detail) -> str:
    """Return a difference to the full cache as text, with a star if its interval excludes 0; a dash for None."""
    if delta is None:
        return "—"
    ci = delta.ci if detail.intervals else None
    return with_interval(delta.mean, ci, sign=True, mark="*" if delta.is_sure else "")


def _has_masks(report: ReportData) -> bool:
    """Return True if any method attends fewer tokens than it holds."""
    return any(row.means is not None and row.means.attended_percent is not None for row in report.rows)


def _wrap(label: str) -> str:
    """Return a label in lines: the method on the first, one knob on each below."""
    return label.replace(" ", "\n")


def _write_score(cell: CellResult, detail: Detail, with_delta: bool = True) -> str:
    """Return a cell of the table of scores: the score, or the reason why there is no score.

    With intervals, the score's interval stands below it and, ``with_delta``, its difference to the full cache. Without
    them, the score has a star if its difference is sure.
    """
    if cell.status in BROKEN:
        return f"✗ {cell.status}"
    summary = cell.summary
    if summary is None or summary.score is None:
        return "—"
    # a score beside the full cache's would look like a method that loses nothing
    if cell.unchanged:
        return UNCHANGED
    text = with_interval(summary.score, summary.ci if detail.intervals else None)
    if with_delta and cell.delta is not None:
        if detail.intervals:
            text += f"\nΔ {format_number(cell.delta.mean, sign=True)}"
        if cell.delta.is_sure:
            text += "*"
    # LongBench-E's ranges of length stand below the score of all lengths
    for name, bucket in summary.buckets.items():
        text += f"\n{name} {format_number(bucket.score)}"
    return text


def _write_storage(means: RowMeans, evicts: bool) -> tuple[str, ...]:
    """Return a line of the table of storage, a text for each head of STORAGE."""
    return (
        _write_kept(means.kept_percent, means.nominal_percent, evicts),
        format_number(means.attended_percent),
        format_size(means.payload),
        format_size(means.overhead),
        format_number(means.percent_of_full),
        format_number(means.prefill_ms),
    )


def _write_kept(kept_percent: float, asked_percent: float | None, evicts: bool) -> str:
    """Return the kept tokens in per cent, the requested budget if it differs, and a mark for evicting.

    A row without a budget (None) shows a dash in the budget's place.
    """
    mark = f"\n{EVICTS}" if evicts else ""
    if asked_percent is None:
        return f"{format_number(kept_percent)}\nasked —{mark}"
    # use the fewest digits that tell the two numbers apart
    for digits in (1, 2, 3):
        kept, budget = format_number(kept_percent, digits), format_number(asked_percent, digits)
        if kept != budget:
            return f"{kept}\nasked {budget}{mark}"
    return f"{format_number(kept_percent)}{mark}"


def _note_chance(deltas: Sequence[Delta]) -> str:
    """Return a note on how many stars to expect if no difference were real; '' for fewer than ten intervals."""
    count = sum(delta.ci is not None for delta in deltas)
    # among fewer intervals, less than half a star is to be expected
    if count < 10:
        return ""
    # one in twenty 95 % intervals excludes the true value
    return f"; of {count} differences about {math.ceil(0.05 * count)} would by chance alone"


def write_legend(report: ReportData, detail: Detail = Detail()) -> list[str]:
    """Return the lines below the tables: the meaning of marks that occur, warnings, and where to find more.

    With notes, they also say how the numbers were measured.
    """
    cells = report.cells
    summaries = [cell.summary for cell in cells if cell.summary is not None]
    lines = [f"✗ {cell.task}: {cell.reason}" for cell in cells if cell.status in BROKEN]
    lines += _note_stars(report)
    if detail.intervals and any(summary.ci for summary in summaries):
        lines.append("[a, b]: 95 % interval. Δ: paired difference to full.")
    fewest = min((summary.n for summary in summaries), default=FEWEST)
    if fewest < FEWEST and _has_mean_interval(report):
        lines.append(f"A task of fewer than {FEWEST} examples has no interval, and no star.")
    if any(cell.unchanged for cell in cells):
        lines.append(UNCHANGED_NOTE)
    # only perplexities are printed as a function (a formula) of their mean
    metrics = dict.fromkeys(column.metric for column in report.columns)
    lower_is_better = [name for name in metrics if metric(name).formula is not None]
    if lower_is_better:
        lines.append(f"{' and '.join(lower_is_better)}: lower is better.")
    if any(row.evicts for row in report.rows):
        lines.append(f"{EVICTS}: {EVICTING}")
    lines += explain_budgets(row.method for row in report.rows)
    lines += turns.explain_questions(report)
    lines += fidelity.explain_distances(report)
    most_shrunk = max((summary.shrunk for summary in summaries), default=0)
    if most_shrunk:
        lines.append(
            f"Up to {most_shrunk} prompts of a task were given a budget below a method's window, which was cut to fit."
        )
    lines += report.notes
    if detail.notes:
        lines += _note_storage(report, summaries)
        lines += report.remarks
    line = f"Samples and metrics: {report.results}/cells ({len(report.cells)} results)."
    hidden = []
    if not detail.intervals:
        hidden.append("--intervals")
    if not detail.notes:
        hidden.append("--notes (storage, how it was measured)")
    hidden.append("--json (everything)")
    lines.append(f"{line} More: {', '.join(hidden)}.")
    return lines


def _note_stars(report: ReportData) -> list[str]:
    """Return the note on stars; [] if the table has no stars."""
    deltas = [cell.delta for cell in report.cells if cell.delta is not None]
    # with a single task, the table has no column of means
    if len(report.columns) > 1:
        deltas += [row.means.delta for row in report.rows if row.means is not None and row.means.delta is not None]
    if not any(delta.is_sure for delta in deltas):
        return []
    return [f"* differs from full: the 95 % interval of the paired difference excludes 0{_note_chance(deltas)}."]


def _note_storage(report: ReportData, summaries: Sequence[CellSummary]) -> list[str]:
    """Return the notes on the table of storage and on prompts that were cut."""
    if not summaries:
        return []
    lines = [
        "size: the mean bytes that are held of a prompt after prefill, if its numbers have 16 bits. payload and "
        "overhead: the bytes in the run's own dtype. full stores positions beside its keys and values, hence above "
        "100 %. Times of compression and decoding: kvbench bench time."
    ]
    if _list_pages_freed(report):
        lines += pages.NOTES
    if _has_masks(report):
        lines.append(
            "attended %: the tokens that a decode step attends to where a method masks, new ones too, per token of the "
            "prompt."
        )
    most_cut = max(summary.cut for summary in summaries)
    if most_cut:
        lines.append(f"Up to {most_cut} prompts of a task were cut in the middle to the length allowed.")
    if report.apart:
        names = ", ".join(report.apart)
        lines.append(f"Measured in another run or part, so that times do not compare: {names}.")
    return lines


def _list_sample_sizes(report: ReportData) -> list[tuple[int, int]]:
    # a partly measured cell has fewer examples
    summaries = [cell.summary for cell in report.cells if cell.summary is not None]
    return list(dict.fromkeys((summary.n, summary.of) for summary in summaries))


def _describe_sizes(counts: Sequence[tuple[int, int]]) -> str:
    """Return numbers of examples in words: ``50 of 200``, or ``all 50``. More than three are given as a range.

    counts: the pairs (examples measured, examples of the task) of ``_list_sample_sizes``.
    """
    if len(counts) > 3:
        measured = [n for n, _ in counts]
        return f"{min(measured)} to {max(measured)}"
    sizes_in_words = []
    for n, total in counts:
        sizes_in_words.append(f"{n} of {total}" if n < total else f"all {total}")
    return " or ".join(sizes_in_words)


def render_report(report: ReportData, style: str = "text", detail: Detail = Detail()) -> str:
    """Return the whole report as text; ``style`` is text, md, csv or latex."""
    if style == "csv":
        return writers.csv(CSV_FIELDS, list_records(report))
    tables = build_tables(report, detail, folded=style == "text")
    return writers.compose(tables, write_legend(report, detail), style, above=write_header(report))


def list_records(report: ReportData) -> Iterator[dict[str, object]]:
    """Yield a record of each cell with the names of CSV_FIELDS as keys; numbers are not rounded."""
    for row in report.rows:
        for cell in row.cells:
            record: dict[str, object] = {"method": row.method}
            record |= cell.record()
            # the cell's own record has intervals as pairs, but CSV has a column for each end
            if cell.summary is not None and cell.summary.ci is not None:
                record["ci_low"], record["ci_high"] = cell.summary.ci
            if cell.delta is not None and cell.delta.ci is not None:
                record["delta_ci_low"], record["delta_ci_high"] = cell.delta.ci
            record |= fidelity.record_distances(cell)
            record |= turns.record_questions(cell)
            yield record
