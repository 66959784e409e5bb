"""The table of divergences from the full cache: a block for each task and kind of text, a line for each method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

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
    """Return a cell's divergences by kind of text; {} if it is not measured."""
    if cell.summary is None:
        return {}
    return cell.summary.fidelity


def _build_line(method: str, fidelity: FidelitySummary) -> tuple[str, ...]:
    """Return a line of the table, a text for each of HEADS: numbers with their intervals below them."""
    mean = _add_interval(f"{fidelity.kl_mean:.3g}", fidelity.ci, ".2g")
    # rounding alone makes as much, so the number would say nothing about the method
    if fidelity.at_floor:
        mean = "≤ rounding" if fidelity.kl_max else "0"
    # a percentile of few tokens would be their maximum
    p99 = f"{fidelity.kl_p99:.2g}" if fidelity.kl_p99 is not None else "—"
    return (
        # one knob below the other keeps the first column narrow
        method.replace(" ", "\n"),
        mean,
        f"{fidelity.kl_median:.2g}",
        p99,
        f"{fidelity.kl_max:.2g}",
        _add_interval(f"{fidelity.top1:.1f}", fidelity.top1_ci, ".0f"),
        f"{fidelity.shift_rms:.2f}",
        _add_interval(f"{fidelity.ppl_ratio:.4f}", fidelity.ppl_ratio_ci, ".3f"),
    )


def _add_interval(text: str, ci: tuple[float, float] | None, style: str) -> str:
    """Return a number with its interval on a line below; ``style`` is the format of the interval's ends."""
    if ci is None:
        return text
    low, high = ci
    return f"{text}\n[{low:{style}}, {high:{style}}]"


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
        f"alone makes at most {max(floors):.1g} nats here: the change of the full cache when one element of each key "
        "of the first layer moves by one unit in the last place. Means below 3 times as much say nothing and are shown "
        f"as ≤ rounding. {CODED}"
    ]
