"""RULER with the question withheld: methods by budget, beside the same methods that see the question."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from kvbench.plan import config
from kvbench.plan.run_plan import RunPlan
from kvbench.report.records import ReportRow
from kvbench.report.render import UNCHANGED, UNCHANGED_NOTE
from kvbench.report.report import Report
from kvbench.report.ruler import mean_name
from kvbench.report.table import Table
from kvbench.run import experiment
from kvbench.store.results import CellSummary, share
from kvbench.tasks.metrics.stats import Interval, mean_over_tasks

NAME = "leaderboard"
DEFAULTS: Mapping[str, str] = {
    "dataset": "ruler",
    "lengths": "1024",
    "preset": "kvpress",
    "method": "random,keynorm,streamingllm,snapkv,pyramidkv,adakv,expectedattention",
    "kv_ratio": "0.75,0.5,0.25,0.125",
    "limit": "8",
}
"""The keys of `run` behind the leaderboard: kvpress's protocol, at the ratios of kvpress's leaderboard."""
SEEN = "snapkv,keynorm"
"""The methods that are measured with the question in sight, too (``seen=``)."""
Answers = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Standing:
    """One method at one budget under one protocol.

    withheld: whether the question came after the compression.
    prompt: how prompts were made, as ``labels.fields`` says it.
    answers: the scores in [0, 1] by task and example.
    score, ci: the mean over tasks in per cent; the interval is of ``mean_over_tasks``.
    behind, behind_ci: its mean paired difference to the full cache, in points.
    kept, bytes: after the prompt, in per cent of the full cache's, bytes at 16 bits.
    compress_ms, decode_ms: means a prompt and a token.
    unchanged: whether nothing was compressed, so that the score is the full cache's.
    """

    method: str
    withheld: bool
    prompt: object
    answers: Answers
    score: float
    ci: Interval | None
    behind: float
    behind_ci: Interval | None
    kept: float
    bytes: float | None
    compress_ms: float
    decode_ms: float
    unchanged: bool = False

    @property
    def n(self) -> int:
        """The number of prompts."""
        return sum(map(len, self.answers.values()))

    @property
    def tasks(self) -> list[str]:
        """The names of RULER's tasks without their lengths, each once."""
        return list(dict.fromkeys(task.split("/")[1] for task in self.answers))


def prepare(model: str, options: Mapping[str, str]) -> list[RunPlan]:
    """Plan the run with the question withheld, and the one of the methods of ``seen=`` that see it (none: leave out).

    Raises UsageError for what `run` does not take.
    """
    keys = {"model": model, **DEFAULTS, **options}
    seen = keys.pop("seen", SEEN)
    requests = [keys] + ([{**keys, "method": seen, "query_aware": "true"}] if seen != "none" else [])
    return [experiment.prepare(config.configure(wanted)) for wanted in requests]


def standings(runs: Sequence[RunPlan], reports: Sequence[Report]) -> list[Standing]:
    """Return what is measured, the best score of each protocol first; rows that lack a task are left out.

    Those that compressed nothing are last.
    """
    measured = []
    for run, report in zip(runs, reports, strict=True):
        full = run.answers(0)
        for i, row in enumerate(report.rows):
            answers = run.answers(i)
            if answers and answers.keys() == full.keys():
                measured.append(_standing(report, row, answers, full))
    return sorted(measured, key=lambda e: (not e.withheld, e.unchanged, -e.score, e.kept))


def _standing(report: Report, row: ReportRow, answers: Answers, full: Answers) -> Standing:
    summaries = [cell.summary for cell in row.cells if cell.summary is not None]
    score, ci = mean_over_tasks([[*scores.values()] for scores in answers.values()])
    behind, behind_ci = difference(answers, full) if row is not report.rows[0] else (0.0, None)
    settings = next(cell.settings for cell in row.cells if cell.summary is not None)
    return Standing(
        row.method,
        not settings["query_aware"],
        settings["prompt"],
        answers,
        100 * score,
        percent(ci),
        behind,
        behind_ci,
        100 * _weighted(summaries, "kept") / _weighted(summaries, "prompt_tokens"),
        share(*(_weighted(summaries, field) for field in ("payload16", "overhead16", "full16"))),
        1000 * fmean(s.timing.compress_s for s in summaries),
        1000 * fmean(s.timing.decode_s_per_token for s in summaries),
        all(cell.unchanged for cell in row.cells if cell.summary is not None),
    )


def _weighted(summaries: Iterable[CellSummary], field: str) -> float:
    return sum(s.n * getattr(s, field) for s in summaries)


def difference(a: Answers, b: Answers) -> tuple[float, Interval | None]:
    """Return the mean difference a - b in points over the examples that both have, a mean over tasks, and its interval.

    Raises ValueError where they share none.
    """
    pairs = [[x - b[task][i] for i, x in sorted(own.items())] for task, own in sorted(_common(a, b).items())]
    mean, ci = mean_over_tasks(pairs, (-1.0, 1.0))
    return 100 * mean, percent(ci)


def percent(ci: Interval | None) -> Interval | None:
    """Return an interval of fractions in per cent."""
    return None if ci is None else (100 * ci[0], 100 * ci[1])


def sheets(standings: Sequence[Standing]) -> list[Table]:
    """Return the table of methods with the question withheld, and the one of what withholding it costs."""
    withheld = [e for e in standings if e.withheld]
    if not withheld:
        return []
    heads = ("method", mean_name(withheld[0].tasks), "Δ full", "kept %", "bytes %", "compress\nms", "ms/token")
    rows = [
        (
            *(e.method.replace(" ", "\n", 1), UNCHANGED if e.unchanged else with_interval(e.score, e.ci)),
            "" if e.method == "full" or e.unchanged else with_interval(e.behind, e.behind_ci, "+"),
            *(f"{e.kept:.1f}", "—" if e.bytes is None else f"{e.bytes:.1f}"),
            *(f"{e.compress_ms:.0f}", f"{e.decode_ms:.1f}"),
        )
        for e in withheld
    ]
    return [Table(heads, tuple(rows), headings={0: "question withheld"}), *_costs(standings)]


def _costs(standings: Sequence[Standing]) -> list[Table]:
    """Return the table of what withholding the question costs, without methods that compressed nothing; [] if empty."""
    compressing = [e for e in standings if not e.unchanged]
    seen = {e.method: e for e in compressing if not e.withheld}
    both = [(e, seen[e.method]) for e in compressing if e.withheld and e.method in seen]
    both = [(a, b) for a, b in both if _common(a.answers, b.answers)]
    rows = []
    for withheld, visible in both:
        shared = [_common(a.answers, b.answers) for a, b in ((visible, withheld), (withheld, visible))]
        scores = (mean_over_tasks([[*scores.values()] for scores in answers.values()]) for answers in shared)
        cost = difference(withheld.answers, visible.answers)
        means = (with_interval(100 * mean, percent(ci)) for mean, ci in scores)
        rows.append((withheld.method.replace(" ", "\n", 1), *means, with_interval(*cost, "+")))
    heads = ("method", "seen", "withheld", "withheld − seen")
    return [Table(heads, tuple(rows), headings={0: "what withholding the question costs"})] if rows else []


def _common(a: Answers, b: Answers) -> Answers:
    """Return the answers of ``a`` to prompts that ``b`` answers, too."""
    common = {task: {i: x for i, x in scores.items() if i in b.get(task, {})} for task, scores in a.items()}
    return {task: scores for task, scores in common.items() if scores}


def with_interval(value: float, ci: Interval | None, sign: str = "") -> str:
    """Return a value with its interval below it; ``sign`` "+" shows the sign of positive ones."""
    interval = "" if ci is None else f"\n[{ci[0]:{sign}.0f}, {ci[1]:{sign}.0f}]"
    return f"{value:{sign}.1f}{interval}".replace("-", "−")


def range_text(counts: Collection[int]) -> str:
    """Return the smallest and the largest count as "2–5", one number if they are equal, and "0" without counts."""
    if not counts:
        return "0"
    low, high = min(counts), max(counts)
    if low == high:
        return str(low)
    return f"{low}–{high}"


def notes(standings: Sequence[Standing]) -> list[str]:
    """Return what stands below the tables."""
    counts = sorted({len(scores) for e in standings for scores in e.answers.values()})
    n = "–".join(str(c) for c in dict.fromkeys((counts[0], counts[-1]))) if counts else "0"
    unchanged = [UNCHANGED_NOTE] if any(e.unchanged for e in standings) else []
    return [
        f"n = {n} prompts a task and length. Scores are means over tasks, with 95 % intervals from the "
        "spread within tasks; differences are paired by prompt. kept, bytes: after the prompt, in per cent of the "
        "full cache's, bytes at 16 bits. The question and the beginning of the answer are read after the compression "
        "and kept whole.",
        *unchanged,
    ]


def records(standings: Sequence[Standing], model: str, commit: str | None) -> list[dict[str, Any]]:
    """Return a line of the open format (run/open_results.py) for each entry, its mean over tasks."""
    return [
        {
            **{"model": model, "method": e.method, "dataset": mean_name(e.tasks)},
            **{"metric": "string_match_all", "score": e.score, "interval": e.ci, "n": e.n},
            "protocol": {"query_aware": not e.withheld, "prompt": e.prompt},
            **{"delta_full": e.behind, "delta_full_interval": e.behind_ci},
            **{"kept_percent": e.kept, "percent_of_full": e.bytes},
            **({"nothing_compressed": True} if e.unchanged else {}),
            "seconds": {"compress_s": e.compress_ms / 1000, "decode_s_per_token": e.decode_ms / 1000},
            "commit": commit,
        }
        for e in standings
    ]
