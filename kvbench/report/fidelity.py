"""The table of divergences from the full cache: a block for each task and kind of text, a line for each method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvbench.base.formatting import format_number, format_significant, with_interval
from kvbench.report.table import Table
from kvbench.store.fidelity import CODED

if TYPE_CHECKING:
    from kvbench.report.data import CellResult, ReportData
    from kvbench.store.fidelity import FidelitySummary

HEADS = ("method", "KL\nnats", "median", "99 %", "most", "same\nchoice %", "Δp\npoints", "perplexity\nratio")
# a column of CSV begins with the kind of text, for example reference_kl_mean
CSV_FIELDS = (
    "kl_mean",
    "kl_low",
    "kl_high",
    "kl_median",
    "kl_p90",
    "kl_p99",
    "kl_p999",
    "kl_max",
    "top1",
    "top1_low",
    "top1_high",
    "shift_rms",
    "ppl_ratio",
    "ppl_ratio_low",
    "ppl_ratio_high",
    "floor",
    "n_tokens",
)
TEXTS = {"reference": "on the reference text", "greedy": "on the full cache's own answer"}
"""The texts of a block, by their kind."""


def build_tables(report: ReportData) -> list[Table]:
    """Return the table of divergences, or [] if no cell was compared with the full cache."""
    rows: list[tuple[str, ...]] = []
    headings: dict[int, str] = {}
    for i, column in enumerate(report.columns):
        for kind, text in TEXTS.items():
            block_start = len(rows)
            for row in report.rows:
                fidelity = _find_divergences(row.cells[i]).get(kind)
                if fidelity is None:
                    continue
                # all methods of a block are compared on the same texts, so any of them gives their length
                if len(rows) == block_start:
                    headings[block_start] = f"{column.task} {text}, {fidelity.n_tokens} tokens"
                rows.append(_build_line(row.method, fidelity))
    if not rows:
        return []
    return [Table(HEADS, tuple(rows), headings=headings)]


def _find_divergences(cell: CellResult) -> Mapping[str, FidelitySummary]:
    if cell.summary is None:
        return {}
    return cell.summary.fidelity


def _build_line(method: str, fidelity: FidelitySummary) -> tuple[str, ...]:
    """Return a line of the table, a text for each of HEADS: numbers with their intervals below them."""
    mean = with_interval(fidelity.kl_mean, fidelity.ci, 3, significant=True)
    # rounding alone makes as much, so the number would say nothing about the method
    if fidelity.at_floor:
        mean = "≤ rounding" if fidelity.kl_max else "0"
    return (
        # one knob below the other keeps the first column narrow
        method.replace(" ", "\n"),
        mean,
        format_significant(fidelity.kl_median, 2),
        # None: a percentile of few tokens would be their maximum
        format_significant(fidelity.kl_p99, 2),
        format_significant(fidelity.kl_max, 2),
        with_interval(fidelity.top1, fidelity.top1_ci),
        format_number(fidelity.shift_rms, 2),
        with_interval(fidelity.ppl_ratio, fidelity.ppl_ratio_ci, 4),
    )


def record_distances(cell: CellResult) -> dict[str, object]:
    """Return one cell's divergences for a row of CSV, by kind of text and field, such as ``reference_kl_mean``."""
    values: dict[str, object] = {}
    for kind, summary in _find_divergences(cell).items():
        fields: dict[str, object] = dict(vars(summary))
        # the summary has intervals as pairs, but CSV has a column for each end
        intervals = {"kl": summary.ci, "top1": summary.top1_ci, "ppl_ratio": summary.ppl_ratio_ci}
        for name, ci in intervals.items():
            if ci is not None:
                fields[f"{name}_low"], fields[f"{name}_high"] = ci
        # an interval that is None has no ends among the fields
        for name in CSV_FIELDS:
            if name in fields:
                values[f"{kind}_{name}"] = fields[name]
    return values


def explain_distances(report: ReportData) -> list[str]:
    """Return the line below the table, in a list; [] if no cell was compared with the full cache.

    The line explains the columns and the intervals, and says how large a divergence rounding alone makes.
    """
    floors: list[float] = []
    for cell in report.cells:
        floors += [fidelity.floor for fidelity in _find_divergences(cell).values()]
    if not floors:
        return []
    return [
        "KL: divergence of the next-token distribution from the full cache's, in nats, mean over the tokens of a text "
        "that is forced on both. [a, b]: 95 % interval over prompts. Same choice: equal likeliest token. Δp: "
        "root mean square change of the true token's probability. Perplexity ratio: over the full cache's. Rounding "
        f"alone makes at most {format_significant(max(floors), 1)} nats here: the change of the full cache when one "
        "element of each key of the first layer moves by one unit in the last place. Means below 3 times as much say "
        f"nothing and are shown as ≤ rounding. {CODED}"
    ]
