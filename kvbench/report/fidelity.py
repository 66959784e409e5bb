"""The table of divergences from the full cache: a block for each task and kind of text, a line for each method."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbench.report.table import Table

if TYPE_CHECKING:
    from kvbench.report.report import CellResult, Report
    from kvbench.store.fidelity import FidelitySummary

HEADS = ("method", "KL\nnats", "median", "99 %", "most", "same\nchoice %", "Δp\npoints", "perplexity\nratio")
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
"""What a block's texts are, by kind."""


def sheets(report: Report) -> list[Table]:
    """Return the table of divergences, or [] if no cell was compared with the full cache."""
    rows: list[tuple[str, ...]] = []
    headings: dict[int, str] = {}
    for i, column in enumerate(report.columns):
        for kind, text in TEXTS.items():
            cells = [(row.method, row.cells[i].summary) for row in report.rows]
            compared = [(method, s.fidelity[kind]) for method, s in cells if s is not None and kind in s.fidelity]
            if compared:
                headings[len(rows)] = f"{column.task} {text}, {compared[0][1].n_tokens} tokens"
                rows += [(method.replace(" ", "\n"), *_texts(fidelity)) for method, fidelity in compared]
    return [Table(HEADS, tuple(rows), headings=headings)] if rows else []


def _texts(fidelity: FidelitySummary) -> tuple[str, ...]:
    """Return a line of the table: numbers with their intervals below them."""
    if fidelity.at_floor:
        mean = "0" if not fidelity.kl_max else "≤ floor"
    else:
        mean = _with_interval(f"{fidelity.kl_mean:.3g}", fidelity.ci, ".2g")
    return (
        mean,
        f"{fidelity.kl_median:.2g}",
        "—" if fidelity.kl_p99 is None else f"{fidelity.kl_p99:.2g}",
        f"{fidelity.kl_max:.2g}",
        _with_interval(f"{fidelity.top1:.1f}", fidelity.top1_ci, ".0f"),
        f"{fidelity.shift_rms:.2f}",
        _with_interval(f"{fidelity.ppl_ratio:.4f}", fidelity.ppl_ratio_ci, ".3f"),
    )


def _with_interval(text: str, ci: tuple[float, float] | None, style: str) -> str:
    return text if ci is None else f"{text}\n[{ci[0]:{style}}, {ci[1]:{style}}]"


def record(cell: CellResult) -> dict[str, object]:
    """Return the divergences of one cell by kind of text and name of CSV_FIELDS."""
    texts = cell.summary.fidelity if cell.summary is not None else {}

    def ends(s: FidelitySummary) -> dict[str, float]:
        intervals = {"kl": s.ci, "top1": s.top1_ci, "ppl_ratio": s.ppl_ratio_ci}
        return {
            f"{name}_{end}": x
            for name, ci in intervals.items()
            if ci
            for end, x in zip(("low", "high"), ci, strict=True)
        }

    values = {kind: {**vars(summary), **ends(summary)} for kind, summary in texts.items()}
    return {f"{kind}_{name}": value[name] for kind, value in values.items() for name in CSV_FIELDS if name in value}


def legend(report: Report) -> list[str]:
    """Return the lines below the table: what is compared, intervals and the floor."""
    summaries = [c.summary.fidelity for c in report.cells if c.summary is not None and c.summary.fidelity]
    if not summaries:
        return []
    floor = max(f.floor for fidelity in summaries for f in fidelity.values())
    return [
        "KL: divergence of the next-token distribution from the full cache's, in nats, mean over the tokens of a text "
        "that is forced on both; [a, b]: 95 % interval over prompts. Same choice: equal likeliest token. Δp: "
        "root mean square change of the true token's probability. Perplexity ratio: over the full cache's. Floor: what "
        "moving one element of each key of the first layer by one unit in the last place does, at most "
        f"{floor:.1g} nats here; means below 3 times it say nothing."
    ]
