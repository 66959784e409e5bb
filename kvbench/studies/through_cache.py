"""Compare cache formats on the same tokens: the prompt is read exactly, or through the cache as in engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvbench.base.formatting import with_interval
from kvbench.plan.config import THROUGH_CACHE
from kvbench.plan.run_plan import RunPlan
from kvbench.report.report import Report
from kvbench.report.table import Table
from kvbench.store.fidelity import KINDS, FidelitySummary, log_ratio_of_means
from kvbench.studies import format_table
from kvbench.studies.format_table import Line
from kvbench.tasks.metrics.stats import Interval

NAME = THROUGH_CACHE
DATASETS = {"tiny": "fidelity/tiny", "": "fidelity/wikitext2"}
"""The default of ``dataset=`` by model. The key "" stands for every other model."""
REFERENCE = KINDS[0]
"""The kind of text that is compared: the reference text, not the full cache's own answer."""


@dataclass(frozen=True)
class FormatComparison:
    """One format with its prompts read exactly and through the cache.

    exact: its row with each prompt read exactly and then compressed.
    through: its row with each token stored before a later one reads it.
    log_ratio: ln(mean divergence of ``through`` / mean divergence of ``exact``), over the windows of both. It is None
    if they share no window.
    ci: the 95 % interval of ``log_ratio``.
    """

    exact: Line
    through: Line
    log_ratio: float | None
    ci: Interval | None

    @property
    def exact_summary(self) -> FidelitySummary:
        """The divergences of prompts that are read exactly."""
        return self.exact.fidelity[REFERENCE]

    @property
    def through_summary(self) -> FidelitySummary:
        """The divergences of prompts that are read through the cache."""
        return self.through.fidelity[REFERENCE]


def prepare(model: str, options: Mapping[str, str]) -> list[RunPlan]:
    """Plan the two runs behind the table: prompts read exactly, then prompts read through the cache."""
    keys = {"dataset": DATASETS.get(model, DATASETS[""])}
    keys.update(options)
    # both runs score the second half of each window, so that they compare the same tokens. ``second_half`` reads the
    # first half exactly, and a run with THROUGH_CACHE chooses the windows of llama.cpp itself
    exact_run = format_table.prepare(NAME, model, keys | {"windows": "second_half"})
    through_run = format_table.prepare(NAME, model, keys, THROUGH_CACHE)
    return [exact_run, through_run]


def compare_formats(runs: Sequence[RunPlan], reports: Sequence[Report]) -> list[FormatComparison]:
    """Return the formats that are measured in both ways.

    runs: the two runs that ``prepare`` planned, in its order.
    reports: the reports on these runs, in the same order.
    """
    exact_run, through_run = runs
    exact_report, through_report = reports
    exact_lines = _read_compared_lines(exact_run, exact_report)
    through_lines = _read_compared_lines(through_run, through_report)
    comparisons = []
    for label, exact in exact_lines.items():
        # a row that diverges nowhere, such as the full cache, has no ratio
        if label in through_lines and exact.fidelity[REFERENCE].kl_max:
            comparisons.append(_compare_rows(exact, through_lines[label]))
    return comparisons


def _read_compared_lines(run: RunPlan, report: Report) -> dict[str, Line]:
    """Return the rows that were compared with the full cache on the reference, by label."""
    lines = format_table.read_lines_of_table(NAME, run, report)
    return {line.label: line for line in lines if REFERENCE in line.fidelity}


def _compare_rows(exact: Line, through: Line) -> FormatComparison:
    """Return the comparison of one format's two rows over the windows that both have."""
    exact_texts = exact.texts[REFERENCE]
    through_texts = through.texts[REFERENCE]
    # sort, since the interval's last digit depends on the order of windows
    windows = sorted(through_texts.keys() & exact_texts.keys())
    # incomplete runs may share no window
    if not windows:
        return FormatComparison(exact, through, log_ratio=None, ci=None)
    log_ratio, ci = log_ratio_of_means([through_texts[w] for w in windows], [exact_texts[w] for w in windows])
    return FormatComparison(exact, through, log_ratio, ci)


def build_tables(comparisons: Sequence[FormatComparison]) -> list[Table]:
    """Return the table, alone in a list: a row for each format, with its divergence for both ways to read a prompt."""
    heads = (
        "method",
        "KL, prompt\nread exactly",
        "KL, through\nthe cache",
        "ln of\ntheir ratio",
        "same choice %,\nread exactly",
        "same choice %,\nthrough the cache",
    )
    rows = []
    for comparison in comparisons:
        row = (
            comparison.exact.label.replace(" ", "\n", 1),
            format_table.write_nats(comparison.exact_summary),
            format_table.write_nats(comparison.through_summary),
            _write_ratio(comparison),
            format_table.write_same_choice(comparison.exact_summary),
            format_table.write_same_choice(comparison.through_summary),
        )
        rows.append(row)
    headings = format_table.find_headings([comparison.exact for comparison in comparisons])
    return [Table(heads, tuple(rows), headings=headings)]


def _write_ratio(comparison: FormatComparison) -> str:
    """Return the text of the log ratio, with its interval below it."""
    return with_interval(comparison.log_ratio, comparison.ci, 2)


def write_notes(comparisons: Sequence[FormatComparison]) -> list[str]:
    """Return the note below the table: units, both ways to read a prompt, and the number of windows."""
    count_text = ""
    # all formats are measured on the same windows, so any one gives the number
    if comparisons:
        summary = comparisons[-1].through_summary
        count_text = f"n = {summary.n} windows, {summary.n_tokens} tokens"
    return [
        "KL: mean divergence of the next-token distribution from the full cache's in nats, over the second half of "
        "each window of llama.cpp's perplexity tool. Read exactly: the first half is read, then compressed. Through "
        "the cache: from the second token on every token is stored before a later one reads it. [95 % intervals over "
        f"documents.] {count_text}.",
    ]


def make_records(comparisons: Sequence[FormatComparison]) -> dict[str, object]:
    """Return the table as ``--json`` prints it."""
    rows = []
    for comparison in comparisons:
        row: dict[str, object] = {
            "label": comparison.exact.label,
            "exact": vars(comparison.exact_summary),
            NAME: vars(comparison.through_summary),
            "log_ratio": comparison.log_ratio,
            "ci": comparison.ci,
        }
        rows.append(row)
    return {"rows": rows}
