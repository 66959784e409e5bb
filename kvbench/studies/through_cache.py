"""Formats on the same tokens twice: the prompt read exactly, and read through the cache as engines do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.plan.config import THROUGH_CACHE
from kvbench.plan.run_plan import RunPlan
from kvbench.report.report import Report
from kvbench.report.table import Table
from kvbench.store.fidelity import KINDS, log_ratio_of_means
from kvbench.studies import byte_table
from kvbench.studies.byte_table import Line
from kvbench.tasks.metrics.stats import Interval

NAME = THROUGH_CACHE
DATASETS = {"tiny": "fidelity/tiny", "": "fidelity/wikitext2"}
REFERENCE = KINDS[0]


@dataclass(frozen=True)
class Both:
    """A format read exactly and through the cache.

    log_ratio, ci: ln of the mean divergence through the cache over that of an exact prompt, on the windows of both.
    """

    exact: Line
    through: Line
    log_ratio: float | None
    ci: Interval | None


def prepare(model: str, options: Mapping[str, str]) -> list[RunPlan]:
    """Plan the two runs behind the table: prompts read exactly, then through the cache."""
    keys = {"dataset": DATASETS.get(model, DATASETS[""]), **options}
    return [
        byte_table.prepare(NAME, model, {**keys, "windows": "halves"}),
        byte_table.prepare(NAME, model, keys, THROUGH_CACHE),
    ]


def both(runs: Sequence[RunPlan], reports: Sequence[Report]) -> list[Both]:
    """Return the formats that are measured in both ways, the full cache left out."""
    exact, through = (
        {line.label: line for line in byte_table.lines(NAME, run, report) if REFERENCE in line.fidelity}
        for run, report in zip(runs, reports, strict=True)
    )
    return [_both(exact[x], through[x]) for x in exact if x in through and exact[x].fidelity[REFERENCE].kl_max]


def _both(exact: Line, through: Line) -> Both:
    ours, theirs = through.texts[REFERENCE], exact.texts[REFERENCE]
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        return Both(exact, through, None, None)
    return Both(exact, through, *log_ratio_of_means([ours[t] for t in common], [theirs[t] for t in common]))


def sheets(rows: Sequence[Both]) -> list[Table]:
    """Return the table of the formats."""
    heads = ("method", "KL, prompt\nread exactly", "KL, through\nthe cache", "ln of\ntheir ratio")
    same = ("same choice %,\nread exactly", "same choice %,\nthrough the cache")
    texts = [
        (
            row.exact.label.replace(" ", "\n", 1),
            *(byte_table.nats(line.fidelity[REFERENCE]) for line in (row.exact, row.through)),
            "—" if row.log_ratio is None else f"{row.log_ratio:.2f}" + byte_table.below(row.ci, ".2f"),
            *(byte_table.same_choice(line.fidelity[REFERENCE]) for line in (row.exact, row.through)),
        )
        for row in rows
    ]
    return [Table((*heads, *same), tuple(texts), headings=byte_table.headings([row.exact for row in rows]))]


def notes(rows: Sequence[Both]) -> list[str]:
    """Return what stands below the table."""
    counts = [f"n = {f.n} windows, {f.n_tokens} tokens" for f in (row.through.fidelity[REFERENCE] for row in rows[-1:])]
    return [
        "KL: mean divergence of the next-token distribution from the full cache's in nats, over the second half of "
        "each window of llama.cpp's perplexity tool. Read exactly: the first half is read, then compressed. Through "
        "the cache: from the second token on every token is stored before a later one reads it. [95 % intervals over "
        f"documents.] {''.join(counts)}.",
    ]


def records(rows: Sequence[Both]) -> dict[str, Any]:
    """Return the table as ``--json`` prints it."""
    return {
        "rows": [
            {
                "label": row.exact.label,
                "exact": vars(row.exact.fidelity[REFERENCE]),
                NAME: vars(row.through.fidelity[REFERENCE]),
                **{"log_ratio": row.log_ratio, "ci": row.ci},
            }
            for row in rows
        ]
    }
