"""Render a report, its tables and its legend, as text, Markdown, CSV or LaTeX."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvbench.report import fidelity, ruler, turns, writers
from kvbench.report.table import Table
from kvbench.report.table import size as size
from kvbench.tasks.metrics import metric
from kvbench.tasks.metrics.stats import FEWEST

if TYPE_CHECKING:
    from kvbench.report.report import CellResult, Delta, Report, ReportColumn, ReportRow, RowMeans

FORMATS = ("text", "md", "csv", "latex")
BROKEN = ("refused", "failed")
UNCHANGED = "nothing was\ncompressed"
"""What stands in place of the score of a method that held and answered what the full cache does."""
UNCHANGED_NOTE = (
    "nothing was compressed: tokens, bytes and answers are those of the full cache on 99 % of prompts or more. The "
    "score, which says nothing about the method, is in --json. Give it a smaller budget."
)
ENDS = ((0, "low"), (1, "high"))
CSV_FIELDS = (
    *("method", "task", "status", "metric", "score", "ci_low", "ci_high", "delta", "delta_ci_low", "delta_ci_high"),
    *("n", "of", "unscored", "prompt_tokens", "kept", "nominal", "payload", "overhead", "full_bytes"),
    *("percent_of_full", "payload_kv_head", "payload_query_head", "attended", "decode_peak", "evicts"),
    *("cell", "reason", "nothing_compressed"),
    *(f"{kind}_{name}" for kind in fidelity.TEXTS for name in fidelity.CSV_FIELDS),
    *(f"turns_{name}" for name in turns.CSV_FIELDS),
)
ATTENDED = "attended\n%"
EVICTS = "evicts"
EVICTING = (
    "keeps to its budget while it answers or is scored, too, so it holds less than a method that compresses the prompt "
    "alone and keeps every token after it."
)
SHARE = "% of\nfull at\n16 bits"
STORAGE = ("kept\n%", ATTENDED, "payload", "overhead", SHARE, "prefill\nms", "compress\nms", "ms/token")


def sheets(report: Report) -> list[Table]:
    """Return the tables of scores, of divergences from the full cache and of storage, folded to fit 100 columns."""
    columns, rows = report.columns, report.rows
    tasks = [c.task for c in columns]
    prefix = tasks[0].partition("/")[0] + "/"
    # "token" alone would not name a text
    shared = all(t.startswith(prefix) for t in tasks) and not any(map(_falls, columns))
    short = [t.removeprefix(prefix) for t in tasks] if shared else tasks
    names = ("method", *(_wrap(r.method) for r in rows))
    table = [
        (f"{name}\n{c.metric}", *(_score_text(r.cells[i]) for r in rows))
        for i, (name, c) in enumerate(zip(short, columns, strict=True))
    ]
    if len(columns) > 1:
        complete = [r.means if all(c.summary is not None for c in r.cells) else None for r in rows]
        table.append(("mean", *map(_mean_text, rows, complete)))
    out = list(Table(*_transposed(names, table), ruled=True).folded())
    measured = [(r, r.means) for r in rows if r.means is not None]
    storage = list(zip(STORAGE, *(_storage_text(means, r.evicts) for r, means in measured), strict=True))
    if not _masks(report):
        storage = [c for c in storage if c[0] != ATTENDED]
    names = ("method", *(_wrap(r.method) for r, _ in measured))
    return [
        *out,
        *ruler.sheets(report),
        *turns.sheets(report),
        *fidelity.sheets(report),
        *Table(*_transposed(names, storage)).folded(),
    ]


def _mean_text(row: ReportRow, means: RowMeans | None) -> str:
    """Return the mean score of a row as text; ``means`` is None unless all of its cells are measured."""
    if means is None:
        return "—"
    if all(cell.unchanged for cell in row.cells):
        return UNCHANGED
    return "\n".join(_with_difference(means.score_mean, means.score_ci, means.delta))


def _with_difference(score: float | None, ci: tuple[float, float] | None, delta: Delta | None) -> list[str]:
    """Return the lines of a score: itself, its interval, its difference to the full cache and whether it is told."""
    lines = [_number(score)]
    if ci:
        lines.append(f"[{ci[0]:.0f}, {ci[1]:.0f}]")
    if delta is not None:
        sure = "*" if delta.ci is not None and not delta.ci[0] <= 0 <= delta.ci[1] else ""
        lines.append(f"Δ {_number(delta.mean, sign=True)}{sure}")
    return lines


def _falls(column: ReportColumn) -> bool:
    """Return True for a perplexity, of which less is better."""
    return metric(column.metric).shown is not None


def _transposed(names: tuple[str, ...], columns: Iterable[tuple[str, ...]]) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Return (heads, rows) of columns, each a head above its cells, with the rows' names in front."""
    header, *body = zip(names, *columns, strict=True)
    return header, tuple(body)


def _masks(report: Report) -> bool:
    """Return True if any method attends fewer tokens than it holds."""
    return any(r.means is not None and r.means.attended_percent is not None for r in report.rows)


def _wrap(label: str) -> str:
    """Return a label in lines: the method on the first, one knob on each below."""
    return label.replace(" ", "\n")


def _score_text(cell: CellResult) -> str:
    if cell.status in BROKEN:
        return f"✗ {cell.status}"
    summary = cell.summary
    if summary is None or summary.score is None:
        return "—"
    if cell.unchanged:
        return UNCHANGED
    lines = _with_difference(summary.score, summary.ci, cell.delta)
    lines += [f"{name} {_number(bucket.score)}" for name, bucket in summary.buckets.items()]
    return "\n".join(lines)


def _storage_text(row: RowMeans, evicts: bool) -> tuple[str, ...]:
    return (
        _kept(row.kept_percent, row.nominal_percent, evicts),
        _number(row.attended_percent),
        _payload(row.payload, row.payload_kv_head, row.payload_query_head),
        size(row.overhead),
        f"{row.percent_of_full:.1f}",
        f"{row.prefill_ms:.1f}",
        f"{row.compress_ms:.1f}",
        f"{row.decode_ms_per_token:.2f}",
    )


def _kept(kept_percent: float, asked_percent: float | None, evicts: bool) -> str:
    """Return the kept tokens in per cent, the budget asked for if it differs or is missing, and a mark for evicting."""
    end = f"\n{EVICTS}" if evicts else ""
    if asked_percent is None:
        return f"{kept_percent:.1f}\nasked —{end}"
    # the fewest digits that tell the two apart; None if they are equal to three digits
    digits = next((d for d in (1, 2, 3) if f"{kept_percent:.{d}f}" != f"{asked_percent:.{d}f}"), None)
    if digits is None:
        return f"{kept_percent:.1f}{end}"
    return f"{kept_percent:.{digits}f}\nasked {asked_percent:.{digits}f}{end}"


def _payload(held_payload: float, kv: float | None, query: float | None) -> str:
    """Return the payload held as text and, if it differs, the payload that heads of the other kind would hold."""
    if kv is None or query is None or kv == query:
        return size(held_payload)
    other = f"kv {size(kv)}" if held_payload == query else f"q {size(query)}"
    return f"{size(held_payload)}\n{other}"


def _number(value: float | None, sign: bool = False) -> str:
    if value is None:
        return "—"
    text = f"{value:+.1f}" if sign else f"{value:.1f}"
    return text.replace("-", "−")


def _by_chance(deltas: Sequence[Delta]) -> str:
    """Return a note on how many stars to expect if no difference were real; '' for fewer than ten intervals."""
    shown = sum(d.ci is not None for d in deltas)
    return f" (of {shown} about {math.ceil(0.05 * shown)} would by chance alone)" if shown >= 10 else ""


def legend(report: Report) -> list[str]:
    """Return the lines below the tables: n, intervals, refusals with reasons, caveats and the results folder."""
    cells = report.cells
    summaries = [c.summary for c in cells if c.summary is not None]
    means = [r.means for r in report.rows if r.means is not None]
    counts = list(dict.fromkeys((s.n, s.of) for s in summaries))
    lines = [f"✗ {c.task}: {c.reason}" for c in cells if c.status in BROKEN]
    lines += [report.settings] if report.settings else []
    if counts:
        n = "; ".join(f"{n_cell} of {of_cell}" if n_cell < of_cell else f"all {of_cell}" for n_cell, of_cell in counts)
        facts = [f"n = {n} examples per cell"]
        if any(s.ci for s in summaries):
            facts.append("[a, b]: 95 % interval")
        deltas = [c.delta for c in cells if c.delta is not None]
        if len(report.columns) > 1:
            deltas += [m.delta for m in means if m.delta is not None]
        if any(d.ci for d in deltas):
            facts.append(f"Δ: paired difference to full; * its 95 % interval excludes 0{_by_chance(deltas)}")
        elif deltas:
            facts.append("Δ: paired difference to full")
        if min(counts)[0] < FEWEST:
            facts.append(f"Below {FEWEST} examples no interval is shown")
        lines.append(". ".join(facts) + ".")
        lines.append(
            "Bytes are held after prefill, mean per prompt. % of full: payload and overhead over the full cache's keys "
            "and values, both at 16 bits by formula, whatever the run held; full has positions beside them, hence "
            "above 100. compress ms: what methods share is counted with the first of them. ms/token is a share of the "
            "decode batch that all methods ran in; speed claims come from `make bench-overhead`."
        )
    lines += [*turns.legend(report), *fidelity.legend(report)]
    if any("\n" in _payload(m.payload, m.payload_kv_head, m.payload_query_head) for m in means):
        lines.append(
            "q, kv: payload of as many tokens under per=query_head or kv_head, by formula; % of full is of those held."
        )
    if any(c.unchanged for c in cells):
        lines.append(UNCHANGED_NOTE)
    falling = dict.fromkeys(c.metric for c in report.columns if _falls(c))
    if falling:
        lines.append(f"{' and '.join(falling)}: lower is better.")
    if any(r.evicts for r in report.rows):
        lines.append(f"{EVICTS}: {EVICTING}")
    if _masks(report):
        lines.append("attended %: what a decode step attends where a method masks, new tokens too, against the prompt.")
    for count, text in (
        (max((s.cut for s in summaries), default=0), "cut in the middle to the length allowed"),
        (
            max((s.shrunk for s in summaries), default=0),
            "given a budget below a method's window, which was cut to fit",
        ),
    ):
        if count:
            lines.append(f"Up to {count} prompts of a task were {text}.")
    lines += report.notes
    lines.append(f"Samples and metrics: {report.results}/cells/<cell>/ ({len(cells)} cells; ids with --json).")
    return lines


def render(report: Report, style: str = "text") -> str:
    """Return the whole report as text; ``style`` is text, md, csv or latex."""
    if style == "csv":
        return writers.csv(CSV_FIELDS, records(report))
    return writers.compose(sheets(report), legend(report), style)


def records(report: Report) -> Iterator[dict[str, Any]]:
    """Yield a record of each cell with the names of CSV_FIELDS as keys; numbers are not rounded."""
    for row in report.rows:
        for cell in row.cells:
            intervals = {"ci": cell.summary and cell.summary.ci, "delta_ci": cell.delta and cell.delta.ci}
            ends = {f"{k}_{end}": ci[i] for k, ci in intervals.items() if ci for i, end in ENDS}
            yield {"method": row.method, **cell.record(), **ends, **fidelity.record(cell), **turns.record(cell)}
