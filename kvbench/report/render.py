"""Render a report, its tables and its legend, as text, Markdown, CSV or LaTeX."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvbench.report import fidelity, ruler, turns, writers
from kvbench.report.table import Table
from kvbench.report.table import size as size
from kvbench.tasks.metrics import metric
from kvbench.tasks.metrics.stats import FEWEST

if TYPE_CHECKING:
    from kvbench.report.report import CellResult, Delta, Report, ReportColumn, ReportRow, RowMeans
    from kvbench.store.results import CellSummary

FORMATS = ("text", "md", "csv", "latex")
BROKEN = ("refused", "failed")
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
    "evicts",
    "cell",
    "reason",
    "nothing_compressed",
)
"""The columns of CSV that every cell has, before those of divergences and of several questions."""


def _csv_fields() -> tuple[str, ...]:
    """Return the columns of CSV, the cell's before those of ``fidelity`` and of ``turns``."""
    fields = list(CELL_FIELDS)
    for kind in fidelity.TEXTS:
        fields += [f"{kind}_{name}" for name in fidelity.CSV_FIELDS]
    fields += [f"turns_{name}" for name in turns.CSV_FIELDS]
    return tuple(fields)


CSV_FIELDS = _csv_fields()
ATTENDED = "attended\n%"
EVICTS = "evicts"
EVICTING = (
    "keeps to its budget while it answers or is scored, too, so it holds less than a method that compresses the prompt "
    "alone and keeps every token after it."
)
SHARE = "% of\nfull at\n16 bits"
STORAGE = ("kept\n%", ATTENDED, "payload", "overhead", SHARE, "prefill\nms", "compress\nms", "ms/token")
"""The heads of the table of storage, behind the method."""


def sheets(report: Report) -> list[Table]:
    """Return the tables of scores, of divergences from the full cache and of storage, folded to fit 100 columns."""
    tables = list(_score_table(report).folded())
    tables += ruler.sheets(report)
    tables += turns.sheets(report)
    tables += fidelity.sheets(report)
    tables += _storage_table(report).folded()
    return tables


def _score_table(report: Report) -> Table:
    """Return the table of scores: a column for each task, and their mean if there are several tasks."""
    tasks = [column.task for column in report.columns]
    # "longbench/qasper" is headed "qasper" where all tasks are of LongBench
    prefix = tasks[0].partition("/")[0] + "/"
    is_shared = all(task.startswith(prefix) for task in tasks)
    # fidelity's tasks are perplexities of texts: "token" alone would not name a text
    if is_shared and not any(map(_lower_is_better, report.columns)):
        tasks = [task.removeprefix(prefix) for task in tasks]
    heads = ["method"]
    for task, column in zip(tasks, report.columns, strict=True):
        heads.append(f"{task}\n{column.metric}")
    has_mean = len(report.columns) > 1
    if has_mean:
        heads.append("mean")
    rows = []
    for row in report.rows:
        texts = [_wrap(row.method)]
        texts += [_score_text(cell) for cell in row.cells]
        if has_mean:
            texts.append(_mean_text(row))
        rows.append(tuple(texts))
    return Table(tuple(heads), tuple(rows), ruled=True)


def _storage_table(report: Report) -> Table:
    """Return the table of tokens, bytes and times of each method that was measured, means over its cells."""
    heads = ["method"]
    heads += STORAGE
    rows = []
    for row in report.rows:
        if row.means is not None:
            texts = [_wrap(row.method)]
            texts += _storage_text(row.means, row.evicts)
            rows.append(texts)
    # few methods mask tokens that they hold: without one, the column would repeat a dash
    if not _has_masks(report):
        attended = heads.index(ATTENDED)
        del heads[attended]
        for texts in rows:
            del texts[attended]
    return Table(tuple(heads), tuple(map(tuple, rows)))


def _mean_text(row: ReportRow) -> str:
    """Return the mean score of a row as text; a dash unless all of its cells are measured."""
    # the mean over some of the tasks would not compare with other rows' means
    is_complete = all(cell.summary is not None for cell in row.cells)
    if row.means is None or not is_complete:
        return "—"
    if all(cell.unchanged for cell in row.cells):
        return UNCHANGED
    return "\n".join(_with_difference(row.means.score_mean, row.means.score_ci, row.means.delta))


def _with_difference(score: float | None, ci: tuple[float, float] | None, delta: Delta | None) -> list[str]:
    """Return the lines of a score: itself, its interval, its difference to the full cache with a star if it is sure."""
    lines = [_number(score)]
    if ci:
        lines.append(f"[{ci[0]:.0f}, {ci[1]:.0f}]")
    if delta is not None:
        text = _number(delta.mean, sign=True)
        # the star: the interval of the paired difference lies wholly above or below 0
        if delta.ci is not None and not delta.ci[0] <= 0 <= delta.ci[1]:
            text += "*"
        lines.append(f"Δ {text}")
    return lines


def _lower_is_better(column: ReportColumn) -> bool:
    """Return True for a perplexity, the one metric that is printed as a function of its mean."""
    return metric(column.metric).shown is not None


def _has_masks(report: Report) -> bool:
    """Return True if any method attends fewer tokens than it holds."""
    return any(row.means is not None and row.means.attended_percent is not None for row in report.rows)


def _wrap(label: str) -> str:
    """Return a label in lines: the method on the first, one knob on each below."""
    return label.replace(" ", "\n")


def _score_text(cell: CellResult) -> str:
    """Return a cell of the table of scores: the score with interval and difference, or why there is none."""
    if cell.status in BROKEN:
        return f"✗ {cell.status}"
    summary = cell.summary
    if summary is None or summary.score is None:
        return "—"
    # a score beside the full cache's would look like a method that loses nothing
    if cell.unchanged:
        return UNCHANGED
    lines = _with_difference(summary.score, summary.ci, cell.delta)
    lines += [f"{name} {_number(bucket.score)}" for name, bucket in summary.buckets.items()]
    return "\n".join(lines)


def _storage_text(means: RowMeans, evicts: bool) -> tuple[str, ...]:
    """Return a line of the table of storage, a text for each head of STORAGE."""
    return (
        _kept_text(means.kept_percent, means.nominal_percent, evicts),
        _number(means.attended_percent),
        _payload_text(means.payload, means.payload_kv_head, means.payload_query_head),
        size(means.overhead),
        f"{means.percent_of_full:.1f}",
        f"{means.prefill_ms:.1f}",
        f"{means.compress_ms:.1f}",
        f"{means.decode_ms_per_token:.2f}",
    )


def _kept_text(kept_percent: float, asked_percent: float | None, evicts: bool) -> str:
    """Return the kept tokens in per cent, the budget asked for if it differs or is missing, and a mark for evicting."""
    mark = f"\n{EVICTS}" if evicts else ""
    if asked_percent is None:
        return f"{kept_percent:.1f}\nasked —{mark}"
    # the fewest digits that tell the two apart
    for digits in (1, 2, 3):
        kept, budget = f"{kept_percent:.{digits}f}", f"{asked_percent:.{digits}f}"
        if kept != budget:
            return f"{kept}\nasked {budget}{mark}"
    return f"{kept_percent:.1f}{mark}"


def _payload_text(held_payload: float, kv: float | None, query: float | None) -> str:
    """Return the payload held as text and, if it differs, the payload that heads of the other kind would hold.

    ``kv`` and ``query`` are the bytes of as many tokens a head under per=kv_head and per=query_head, by formula.
    """
    if kv is None or query is None or kv == query:
        return size(held_payload)
    other = f"q {size(query)}"
    if held_payload == query:
        other = f"kv {size(kv)}"
    return f"{size(held_payload)}\n{other}"


def _number(value: float | None, sign: bool = False) -> str:
    """Return a number with one digit, with ``sign`` also with a plus sign; a dash for none."""
    if value is None:
        return "—"
    text = f"{value:+.1f}" if sign else f"{value:.1f}"
    # U+2212 is as wide as a plus sign, the hyphen is not
    return text.replace("-", "−")


def _chance_note(deltas: Sequence[Delta]) -> str:
    """Return a note on how many stars to expect if no difference were real; '' for fewer than ten intervals."""
    count = sum(delta.ci is not None for delta in deltas)
    if count < 10:
        return ""
    # one in twenty 95 % intervals excludes the true value
    return f" (of {count} about {math.ceil(0.05 * count)} would by chance alone)"


def legend(report: Report) -> list[str]:
    """Return the lines below the tables: n, intervals, refusals with reasons, caveats and the results folder."""
    cells = report.cells
    summaries = [cell.summary for cell in cells if cell.summary is not None]
    lines = [f"✗ {cell.task}: {cell.reason}" for cell in cells if cell.status in BROKEN]
    if report.settings:
        lines.append(report.settings)
    if summaries:
        lines.append(_sample_facts(report, summaries))
        lines.append(
            "Bytes are held after prefill, mean per prompt. % of full: payload and overhead over the full cache's keys "
            "and values, both at 16 bits by formula, whatever the run held; full has positions beside them, hence "
            "above 100. compress ms: what methods share is counted with the first of them. ms/token is a share of the "
            "decode batch that all methods ran in; speed claims come from `make bench-overhead`."
        )
    lines += turns.legend(report)
    lines += fidelity.legend(report)
    # a second line of a payload begins with q or kv
    means = [row.means for row in report.rows if row.means is not None]
    if any("\n" in _payload_text(m.payload, m.payload_kv_head, m.payload_query_head) for m in means):
        lines.append(
            "q, kv: payload of as many tokens under per=query_head or kv_head, by formula; % of full is of those held."
        )
    if any(cell.unchanged for cell in cells):
        lines.append(UNCHANGED_NOTE)
    # dict.fromkeys keeps the order of the columns, which a set would not
    falling = dict.fromkeys(column.metric for column in report.columns if _lower_is_better(column))
    if falling:
        lines.append(f"{' and '.join(falling)}: lower is better.")
    if any(row.evicts for row in report.rows):
        lines.append(f"{EVICTS}: {EVICTING}")
    if _has_masks(report):
        lines.append("attended %: what a decode step attends where a method masks, new tokens too, against the prompt.")
    most_cut = max((summary.cut for summary in summaries), default=0)
    if most_cut:
        lines.append(f"Up to {most_cut} prompts of a task were cut in the middle to the length allowed.")
    most_shrunk = max((summary.shrunk for summary in summaries), default=0)
    if most_shrunk:
        lines.append(
            f"Up to {most_shrunk} prompts of a task were given a budget below a method's window, which was cut to fit."
        )
    lines += report.notes
    lines.append(f"Samples and metrics: {report.results}/cells/<cell>/ ({len(cells)} cells; ids with --json).")
    return lines


def _sample_facts(report: Report, summaries: Sequence[CellSummary]) -> str:
    """Return the line on the number of examples, on intervals and on differences to the full cache."""
    # cells that are measured in part have fewer examples: each count that occurs is named once
    counts = list(dict.fromkeys((summary.n, summary.of) for summary in summaries))
    sizes = []
    for n, of in counts:
        sizes.append(f"{n} of {of}" if n < of else f"all {of}")
    facts = [f"n = {'; '.join(sizes)} examples per cell"]
    if any(summary.ci for summary in summaries):
        facts.append("[a, b]: 95 % interval")
    deltas = [cell.delta for cell in report.cells if cell.delta is not None]
    # the means of rows are a column of the table only if there are several tasks
    if len(report.columns) > 1:
        deltas += [row.means.delta for row in report.rows if row.means is not None and row.means.delta is not None]
    if any(delta.ci for delta in deltas):
        facts.append(f"Δ: paired difference to full; * its 95 % interval excludes 0{_chance_note(deltas)}")
    elif deltas:
        facts.append("Δ: paired difference to full")
    if min(counts)[0] < FEWEST:
        facts.append(f"Below {FEWEST} examples no interval is shown")
    return ". ".join(facts) + "."


def render(report: Report, style: str = "text") -> str:
    """Return the whole report as text; ``style`` is text, md, csv or latex."""
    if style == "csv":
        return writers.csv(CSV_FIELDS, records(report))
    return writers.compose(sheets(report), legend(report), style)


def records(report: Report) -> Iterator[dict[str, object]]:
    """Yield a record of each cell with the names of CSV_FIELDS as keys; numbers are not rounded."""
    for row in report.rows:
        for cell in row.cells:
            record: dict[str, object] = {"method": row.method}
            record |= cell.record()
            # the cell's own record has intervals as pairs, CSV has a column for each end
            if cell.summary is not None and cell.summary.ci is not None:
                record["ci_low"], record["ci_high"] = cell.summary.ci
            if cell.delta is not None and cell.delta.ci is not None:
                record["delta_ci_low"], record["delta_ci_high"] = cell.delta.ci
            record |= fidelity.record(cell)
            record |= turns.record(cell)
            yield record
