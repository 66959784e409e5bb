"""Rank methods by budget on RULER with the question withheld, beside methods that see the question."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from kvbench.plan import config, run_plan
from kvbench.plan.run_plan import RunPlan
from kvbench.report.data import ReportRow
from kvbench.report.render import UNCHANGED, UNCHANGED_NOTE
from kvbench.report.report import Report
from kvbench.report.ruler import mean_name
from kvbench.report.table import Table, range_text, with_interval
from kvbench.store.results import CellSummary, share
from kvbench.tasks.metrics.stats import Interval, in_percent, mean_over_tasks

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
"""The default of ``seen=``: the methods that are also measured with the question in sight."""
Answers = Mapping[str, Mapping[str, float]]
"""Scores in [0, 1] by task and then by example."""


@dataclass(frozen=True)
class Standing:
    """One method at one budget under one protocol.

    method: the method's name with its knobs.
    withheld: whether the question came after the compression.
    prompt: the prompt format, as ``labels.list_settings`` names it.
    answers: the scores in [0, 1] by task and example.
    score, ci: the mean over tasks in per cent, and its 95 % interval by ``mean_over_tasks``.
    behind, behind_ci: the mean paired difference to the full cache in points, and its interval.
    kept: the tokens after the prompt, in per cent of the full cache's.
    bytes: the bytes after the prompt at 16 bits, in per cent of the full cache's.
    compress_ms: the mean milliseconds to compress a prompt.
    decode_ms: the mean milliseconds to decode a token.
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
        """The names of RULER's tasks without their lengths, each once: "vt" of "ruler/vt/1024"."""
        return list(dict.fromkeys(task.split("/")[1] for task in self.answers))


def prepare(model: str, options: Mapping[str, str]) -> list[RunPlan]:
    """Plan two runs: one with the question withheld, and one in which the methods of ``seen=`` see the question.

    ``seen=none`` leaves the second run out. Raises UsageError for a key or value that `run` does not take.
    """
    keys = {"model": model}
    keys.update(DEFAULTS)
    keys.update(options)
    # ``seen`` is a key of the leaderboard, and `run` does not know it
    seen = keys.pop("seen", SEEN)
    requests = [keys]
    if seen != "none":
        requests.append(keys | {"method": seen, "query_aware": "true"})
    return [run_plan.prepare(config.configure(request)) for request in requests]


def standings(runs: Sequence[RunPlan], reports: Sequence[Report]) -> list[Standing]:
    """Return the measured methods of each protocol, the best score first. A row that lacks a task is left out.

    Rows that compressed nothing are the last of their protocol.
    """
    entries = []
    for run, report in zip(runs, reports, strict=True):
        # the first row of a run is the full cache; every method is compared with it
        full = run.answers(0)
        for i, row in enumerate(report.rows):
            answers = run.answers(i)
            if answers and answers.keys() == full.keys():
                entries.append(_read_standing(report, row, answers, full))

    def place(entry: Standing) -> tuple[bool, bool, float, float]:
        """Return the sort key. The question withheld comes first, and of equal scores the smaller cache."""
        return not entry.withheld, entry.unchanged, -entry.score, entry.kept

    return sorted(entries, key=place)


def _read_standing(report: Report, row: ReportRow, answers: Answers, full: Answers) -> Standing:
    """Return the entry of a row. ``full`` holds the answers of the full cache to the same tasks."""
    cells = [cell for cell in row.cells if cell.summary is not None]
    summaries = [cell.summary for cell in row.cells if cell.summary is not None]
    # all cells of a run have the same protocol, so take the first one's settings
    settings = cells[0].settings
    score, ci = mean_over_tasks([list(scores.values()) for scores in answers.values()])
    behind: float = 0.0
    behind_ci: Interval | None = None
    # the full cache is not behind itself, and has no interval
    if row is not report.rows[0]:
        behind, behind_ci = points_between(answers, full)
    # kept = tokens after the prompt / tokens of the prompt, each a sum over all prompts
    kept = 100 * _sum_over_prompts(summaries, "kept") / _sum_over_prompts(summaries, "prompt_tokens")
    payload16 = _sum_over_prompts(summaries, "payload16")
    overhead16 = _sum_over_prompts(summaries, "overhead16")
    full16 = _sum_over_prompts(summaries, "full16")
    return Standing(
        method=row.method,
        withheld=not settings["query_aware"],
        prompt=settings["prompt"],
        answers=answers,
        score=100 * score,
        ci=in_percent(ci),
        behind=behind,
        behind_ci=behind_ci,
        kept=kept,
        bytes=share(payload16, overhead16, full16),
        compress_ms=1000 * fmean(summary.timing.compress_s for summary in summaries),
        decode_ms=1000 * fmean(summary.timing.decode_s_per_token for summary in summaries),
        unchanged=all(cell.unchanged for cell in cells),
    )


def _sum_over_prompts(summaries: Iterable[CellSummary], field: str) -> float:
    """Return a field's sum over all prompts: a summary holds the field's mean over its n prompts."""
    return sum(summary.n * getattr(summary, field) for summary in summaries)


def points_between(a: Answers, b: Answers) -> tuple[float, Interval | None]:
    """Return the difference ``a - b`` in points over the examples of both, and its 95 % interval.

    The difference is a mean over tasks. Raises ValueError if ``a`` and ``b`` share no example.
    """
    differences_by_task = []
    # sort, since the interval's last digit depends on the order of tasks and examples
    for task, scores in sorted(_common_answers(a, b).items()):
        differences_by_task.append([score - b[task][i] for i, score in sorted(scores.items())])
    # a difference of two scores in [0, 1] lies in [-1, 1]
    mean, ci = mean_over_tasks(differences_by_task, (-1.0, 1.0))
    return 100 * mean, in_percent(ci)


def sheets(standings: Sequence[Standing]) -> list[Table]:
    """Return the table of methods with the question withheld, and the table of what withholding the question costs."""
    # only a few methods have the second protocol, so it appears only in the table of costs
    withheld = [entry for entry in standings if entry.withheld]
    if not withheld:
        return []
    heads = ("method", mean_name(withheld[0].tasks), "Δ full", "kept %", "bytes %", "compress\nms", "ms/token")
    rows = tuple(_row_texts(entry) for entry in withheld)
    tables = [Table(heads, rows, headings={0: "question withheld"})]
    tables += _cost_tables(standings)
    return tables


def _row_texts(entry: Standing) -> tuple[str, ...]:
    """Return the texts of an entry in the order of the table's heads."""
    score = with_interval(entry.score, entry.ci)
    behind = with_interval(entry.behind, entry.behind_ci, "+")
    if entry.unchanged:
        score = UNCHANGED
    # all others are compared with the full cache, so it has no difference
    if entry.method == "full" or entry.unchanged:
        behind = ""
    byte_text = "—"
    if entry.bytes is not None:
        byte_text = f"{entry.bytes:.1f}"
    return (
        _two_lines(entry.method),
        score,
        behind,
        f"{entry.kept:.1f}",
        byte_text,
        f"{entry.compress_ms:.0f}",
        f"{entry.decode_ms:.1f}",
    )


def _cost_tables(standings: Sequence[Standing]) -> list[Table]:
    """Return the table of what withholding the question costs each method, or [] if no method has both protocols.

    Methods that compressed nothing are left out.
    """
    compressing = [entry for entry in standings if not entry.unchanged]
    seen_by_method = {entry.method: entry for entry in compressing if not entry.withheld}
    rows = []
    for withheld in compressing:
        if not withheld.withheld or withheld.method not in seen_by_method:
            continue
        seen = seen_by_method[withheld.method]
        # both scores are means over the prompts that both protocols have, and so is their difference
        seen_answers = _common_answers(seen.answers, withheld.answers)
        withheld_answers = _common_answers(withheld.answers, seen.answers)
        # incomplete runs may share no prompt
        if withheld_answers:
            cost, cost_ci = points_between(withheld.answers, seen.answers)
            row = (
                _two_lines(withheld.method),
                _mean_text(seen_answers),
                _mean_text(withheld_answers),
                with_interval(cost, cost_ci, "+"),
            )
            rows.append(row)
    if not rows:
        return []
    heads = ("method", "seen", "withheld", "withheld − seen")
    return [Table(heads, tuple(rows), headings={0: "what withholding the question costs"})]


def _mean_text(answers: Answers) -> str:
    """Return the text of a mean over tasks in per cent, with its interval."""
    mean, ci = mean_over_tasks([list(scores.values()) for scores in answers.values()])
    return with_interval(100 * mean, in_percent(ci))


def _two_lines(method: str) -> str:
    """Return a method's name on the first line and its knobs on the second."""
    return method.replace(" ", "\n", 1)


def _common_answers(a: Answers, b: Answers) -> Answers:
    """Return the answers of ``a`` to prompts that ``b`` answers, too. Tasks without such a prompt are left out."""
    answers: dict[str, Mapping[str, float]] = {}
    for task, scores in a.items():
        other_scores = b.get(task, {})
        common_scores = {i: score for i, score in scores.items() if i in other_scores}
        if common_scores:
            answers[task] = common_scores
    return answers


def notes(standings: Sequence[Standing]) -> list[str]:
    """Return the notes below the tables: numbers of prompts and units."""
    counts: set[int] = set()
    for entry in standings:
        counts.update(len(scores) for scores in entry.answers.values())
    texts = [
        f"n = {range_text(counts)} prompts a task and length. "
        "Scores are means over tasks, with 95 % intervals from the "
        "spread within tasks; differences are paired by prompt. kept, bytes: after the prompt, in per cent of the "
        "full cache's, bytes at 16 bits. The question and the beginning of the answer are read after the compression "
        "and kept whole.",
    ]
    if any(entry.unchanged for entry in standings):
        texts.append(UNCHANGED_NOTE)
    return texts


def records(standings: Sequence[Standing], model: str, commit: str | None) -> list[dict[str, object]]:
    """Return a record of the open format (report/open_results.py) for each entry. Its score is the mean over tasks."""
    return [_record_of_entry(entry, model, commit) for entry in standings]


def _record_of_entry(entry: Standing, model: str, commit: str | None) -> dict[str, object]:
    """Return an entry's record of the open format."""
    record: dict[str, object] = {
        "model": model,
        "method": entry.method,
        "dataset": mean_name(entry.tasks),
        "metric": "string_match_all",
        "score": entry.score,
        "interval": entry.ci,
        "n": entry.n,
        "protocol": {"query_aware": not entry.withheld, "prompt": entry.prompt},
        "delta_full": entry.behind,
        "delta_full_interval": entry.behind_ci,
        "kept_percent": entry.kept,
        "percent_of_full": entry.bytes,
    }
    # write the key only where it is true, so that records of ordinary entries stay short
    if entry.unchanged:
        record["nothing_compressed"] = True
    # the open format has seconds, but an entry has milliseconds
    record["seconds"] = {"compress_s": entry.compress_ms / 1000, "decode_s_per_token": entry.decode_ms / 1000}
    record["commit"] = commit
    return record
