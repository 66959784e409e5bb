"""The table of engine rows: scores with paired differences to the baseline, sizes as engines say them, and notes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from kvbench.base.errors import UsageError
from kvbench.engines.rows import EngineRun, stored_rows
from kvbench.plan.cells import Group
from kvbench.report.table import Table, format_number, format_size
from kvbench.store.results import Sample
from kvbench.tasks.metrics import metric, stats
from kvbench.tasks.metrics.stats import FEWEST, Interval


@dataclass(frozen=True, kw_only=True)
class StoredAnswer:
    """An engine's stored answer to one prompt.

    score: from 0 to 1; None if the metric gives this answer no score.
    first: the log-probability of the likeliest first tokens, by their text; {} if the engine does not report them.
    bytes_said: the bytes of the cache as the engine reports them; None if it does not.
    """

    prediction: str
    score: float | None
    first: Mapping[str, float]
    bytes_said: float | None

    @classmethod
    def read(cls, line: Mapping[str, Any]) -> StoredAnswer:
        """Return the answer in a line of a result's file."""
        score, bytes_said = line["score"], line.get("bytes_said")
        if score is not None:
            score = float(score)
        if bytes_said is not None:
            bytes_said = float(bytes_said)
        return cls(
            prediction=line["prediction"],
            score=score,
            first=line.get("first") or {},
            bytes_said=bytes_said,
        )


Answers = Mapping[str, StoredAnswer]
"""A row's answers to one task, by example."""


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """The result of a row on one task.

    column: the task's name in tables.
    n: the number of answers with a score.
    score: the mean score of these answers in printed units; None without any.
    delta: the mean paired difference to the baseline in printed units; None for the baseline, and without pairs.
    ci: the 95 % interval of ``delta``; None for fewer than FEWEST pairs.
    """

    column: str
    n: int
    score: float | None
    delta: float | None = None
    ci: Interval | None = None


@dataclass(frozen=True, kw_only=True)
class FirstChoices:
    """A row's first tokens beside the baseline's, over the prompts for which both engines report them.

    same: the share of prompts with the same likeliest first token.
    change: the mean change of ln p, the log-probability of the baseline's likeliest first token. If the row does not
    list this token, ln p of the least likely token that it lists is taken.
    n: the number of prompts.
    """

    same: float
    change: float
    n: int


@dataclass(frozen=True, kw_only=True)
class EngineResult:
    """One row of the table.

    mean: the mean score over tasks; None unless the row has answered the baseline's prompts.
    delta: the mean over tasks of the paired differences from the baseline; None if a task has none.
    ci: the 95 % interval of ``delta``.
    bytes: the mean bytes of a prompt's cache as the engine reports them; None if it does not, and without a mean.
    empty: the number of empty answers.
    first: the comparison of its first tokens with the baseline's; None if an engine does not report them.
    """

    label: str
    tasks: tuple[TaskResult, ...]
    mean: float | None
    delta: float | None
    ci: Interval | None
    bytes: float | None
    empty: int
    first: FirstChoices | None = None


@dataclass(frozen=True, kw_only=True)
class EngineReport:
    """All rows on the same prompts, the baseline first.

    baseline: the baseline's label.
    columns: the tasks' names, in the order of each row's ``tasks``.
    notes: for each row, how far its answers equal those of kvbench's own full cache.
    """

    baseline: str
    rows: tuple[EngineResult, ...]
    columns: tuple[str, ...]
    notes: tuple[str, ...]


def build_report(run: EngineRun) -> EngineReport:
    """Return the report on all engines' rows that have answers to this run's prompts.

    Raises UsageError if there is none, and for a baseline that is not among them.
    """
    by_engine: dict[str, dict[str, Answers]] = {}
    engines: dict[str, Mapping[str, object]] = {}
    for group in run.run.groups:
        wanted = {example.id for example in group.examples}
        for engine, record in stored_rows(run, group):
            lines = run.run.store.lines(record.id)
            answers = {i: StoredAnswer.read(line) for i, line in lines.items() if i in wanted}
            if answers:
                # rows are told apart by the whole identity: two models may have been measured under one label
                key = json.dumps(engine, sort_keys=True)
                engines[key] = engine
                by_engine.setdefault(key, {})[group.column] = answers
    names = _names_of_rows(engines)
    by_label = {names[key]: columns for key, columns in by_engine.items()}
    if not by_label:
        raise UsageError("no engine has answered these prompts yet")
    baseline = run.baseline or next(iter(by_label))
    if baseline not in by_label:
        raise UsageError(f"baseline={baseline} is no row on these prompts: {', '.join(by_label)}")
    groups = run.run.groups
    rows = [_build_row(groups, baseline, by_label[baseline], by_label[baseline], is_baseline=True)]
    for label, columns in by_label.items():
        if label != baseline:
            rows.append(_build_row(groups, label, columns, by_label[baseline], is_baseline=False))
    return EngineReport(
        baseline=baseline,
        rows=tuple(rows),
        columns=tuple(group.column for group in groups),
        notes=tuple(_beside_own(run, by_label)),
    )


def _names_of_rows(engines: Mapping[str, Mapping[str, object]]) -> dict[str, str]:
    """Return each row's name in the table: its label, followed by its model if several rows have this label.

    engines: the rows' identities.
    """
    labels = [str(engine["label"]) for engine in engines.values()]
    names = {}
    for key, engine in engines.items():
        name = str(engine["label"])
        if labels.count(name) > 1:
            name += f" ({engine.get('served') or engine.get('gguf')})"
        names[key] = name
    return names


def _build_row(
    groups: Sequence[Group], label: str, own: Mapping[str, Answers], baseline: Mapping[str, Answers], is_baseline: bool
) -> EngineResult:
    """Return one row of the table.

    own: the stored answers of the row, by column.
    baseline: the stored answers of the baseline, by column.
    is_baseline: True if the row is the baseline itself, which is compared with nothing.
    """
    tasks: list[TaskResult] = []
    differences: list[list[float]] = []
    for group in groups:
        baseline_answers: Answers = baseline.get(group.column, {}) if not is_baseline else {}
        task, task_differences = _compare_task(group, own.get(group.column, {}), baseline_answers)
        tasks.append(task)
        if task_differences:
            differences.append(task_differences)
    measured = [task.score for task in tasks if task.score is not None]
    # a mean over other prompts than the baseline's would not fit the paired difference beside it
    mean = None
    is_whole = all(own.get(group.column, {}).keys() == baseline.get(group.column, {}).keys() for group in groups)
    if is_whole and len(measured) == len(groups):
        mean = fmean(measured)
    mean_delta, mean_ci = _mean_difference(groups, differences)
    answers: list[StoredAnswer] = []
    for column_answers in own.values():
        answers.extend(column_answers.values())
    sizes = [answer.bytes_said for answer in answers if answer.bytes_said is not None]
    bytes_said = None
    if sizes and is_whole:
        bytes_said = fmean(sizes)
    first = _first_choices(own, baseline) if not is_baseline else None
    return EngineResult(
        label=label,
        tasks=tuple(tasks),
        mean=mean,
        delta=mean_delta,
        ci=mean_ci,
        bytes=bytes_said,
        empty=sum(not answer.prediction.strip() for answer in answers),
        first=first,
    )


def _compare_task(group: Group, own: Answers, baseline: Answers) -> tuple[TaskResult, list[float]]:
    """Return a row's result on one task, and its difference from the baseline on each prompt that both have answered.

    The differences are in [-1, 1]. Without answers in ``baseline`` there are none.
    """
    task_metric = metric(group.task.metric)
    scores, baseline_scores = _known_scores(own), _known_scores(baseline)
    score, delta, ci = None, None, None
    if scores:
        score = task_metric.show(fmean(scores.values()))
    differences: list[float] = []
    # the pairs are the prompts that both rows have answered
    shared = [i for i in scores if i in baseline_scores]
    if shared:
        own_shared = [scores[i] for i in shared]
        baseline_shared = [baseline_scores[i] for i in shared]
        differences = [a - b for a, b in zip(own_shared, baseline_shared, strict=True)]
        difference, interval = stats.paired_difference(own_shared, baseline_shared)
        delta = task_metric.scale * difference
        if interval is not None and len(shared) >= FEWEST:
            ci = (task_metric.scale * interval[0], task_metric.scale * interval[1])
    return TaskResult(column=group.column, n=len(scores), score=score, delta=delta, ci=ci), differences


def _mean_difference(
    groups: Sequence[Group], differences: Sequence[list[float]]
) -> tuple[float | None, tuple[float, float] | None]:
    """Return the mean over tasks of the differences from the baseline, and its interval, in printed units.

    differences: the differences of the tasks that have some, in [-1, 1].
    Both are None unless every task has differences, and all metrics have one unit.
    """
    scales = {metric(group.task.metric).scale for group in groups}
    if len(differences) < len(groups) or len(scales) > 1:
        return None, None
    (scale,) = scales
    mean, interval = stats.mean_over_tasks(differences, bounds=(-1.0, 1.0))
    if interval is None:
        return scale * mean, None
    return scale * mean, (scale * interval[0], scale * interval[1])


def _known_scores(answers: Answers) -> dict[str, float]:
    """Return the scores in [0, 1] by example id, without answers that cannot be scored."""
    return {i: answer.score for i, answer in sorted(answers.items()) if answer.score is not None}


def _first_choices(own: Mapping[str, Answers], baseline: Mapping[str, Answers]) -> FirstChoices | None:
    """Compare a row's first tokens with the baseline's; None if one of the two engines does not report any."""
    same, changes = [], []
    for column, answers in own.items():
        baseline_answers = baseline.get(column, {})
        for i, answer in answers.items():
            if i not in baseline_answers:
                continue
            ours, theirs = answer.first, baseline_answers[i].first
            if not ours or not theirs:
                continue
            # {text of a token: its ln p}: the key with the largest value is the first choice
            choice = max(theirs, key=theirs.__getitem__)
            same.append(max(ours, key=ours.__getitem__) == choice)
            # a token that is not listed is at most as likely as the least likely listed one, whose ln p stands for it
            changes.append(ours.get(choice, min(ours.values())) - theirs[choice])
    if not same:
        return None
    return FirstChoices(same=fmean(same), change=fmean(changes), n=len(same))


def _beside_own(run: EngineRun, by_label: Mapping[str, Mapping[str, Answers]]) -> list[str]:
    """Return a note for each row: which share of its answers' tokens equals those of kvbench's own full cache.

    Rows on prompts that kvbench's full cache has not answered have no note. ``by_label`` has the rows' answers by
    column.
    """
    full_samples: dict[str, Mapping[str, Sample]] = {}
    for group in run.run.groups:
        # the plan has one cell for each task, the full cache's
        samples = run.run.samples(group, group.cells[0])
        if samples:
            full_samples[group.column] = samples
    notes = []
    for label, columns in by_label.items():
        shares = []
        for column, answers in columns.items():
            own_samples = full_samples.get(column, {})
            for i, answer in answers.items():
                if i in own_samples:
                    shares.append(equal_tokens(run.run.tokenizer, answer.prediction, own_samples[i].prediction))
        if shares:
            notes.append(
                f"{label}: {100 * fmean(shares):.0f} % of the answers' tokens are those of kvbench's own full cache "
                f"(n = {len(shares)} answers, place by place)."
            )
    return notes


def equal_tokens(tokenizer: Any, a: str, b: str) -> float:
    """Return the share of positions at which two texts have the same token, out of the longer text's positions."""
    a_ids = tokenizer.encode(a, add_special_tokens=False)
    b_ids = tokenizer.encode(b, add_special_tokens=False)
    longest = max(len(a_ids), len(b_ids))
    # two empty texts are equal
    if not longest:
        return 1.0
    # zip ends with the shorter text: behind its end, no token is the same
    same = sum(x == y for x, y in zip(a_ids, b_ids, strict=False))
    return same / longest


def verdict_lines(answered: EngineReport) -> Table | None:
    """Return a table with a line for each row except the baseline: its size, score, difference and verdict.

    Return None if there is only the baseline.
    """
    baseline = answered.rows[0]
    lines = []
    for row in answered.rows[1:]:
        size = ""
        if row.bytes and baseline.bytes:
            size = f"{baseline.bytes / row.bytes:.1f}x smaller, says the engine"
        delta = _signed_text(row.delta, row.ci) if row.delta is not None else ""
        lines.append(
            (
                row.label,
                size,
                f"{format_number(row.mean)} of {format_number(baseline.mean)}",
                delta,
                _outcome_text(row, answered.baseline),
            )
        )
    if not lines:
        return None
    heads = ("row", "size", "score", "difference", "verdict")
    return Table(heads, tuple(lines), left=len(heads), bare=True)


def _outcome_text(row: EngineResult, baseline: str) -> str:
    """Return in words whether a row is better or worse than the baseline by an interval."""
    if row.mean is None:
        return "not all prompts are answered"
    if row.ci is None:
        return "too few answers to tell"
    if row.ci[1] < 0:
        return f"worse than {baseline}"
    if row.ci[0] > 0:
        return f"better than {baseline}"
    return f"not told apart from {baseline}"


def _signed_text(delta: float, ci: Interval | None) -> str:
    """Return a difference with its sign, and its interval in brackets if there is one."""
    text = format_number(delta, sign=True)
    if ci is not None:
        text += f" [{format_number(ci[0])}, {format_number(ci[1])}]"
    return text


def tables(answered: EngineReport) -> list[Table]:
    """Return the tables to print: the verdicts, if there is more than the baseline, and the scores."""
    heads = ["row"]
    for column in answered.columns:
        heads += [column, "Δ"]
    heads += ["n", "size, says the engine"]
    rows = []
    for row in answered.rows:
        texts = [row.label]
        for task in row.tasks:
            texts += [format_number(task.score), _difference_text(task)]
        texts.append(str(sum(task.n for task in row.tasks)))
        if row.bytes is not None:
            texts.append(format_size(row.bytes))
        else:
            texts.append("unknown")
        rows.append(tuple(texts))
    scores = Table(tuple(heads), tuple(rows), breaks=True)
    above = verdict_lines(answered)
    if above is None:
        return [scores]
    return [above, scores]


def _difference_text(task: TaskResult) -> str:
    """Return a task's difference from the baseline as text; a dash for the baseline itself."""
    if task.delta is None:
        return "—"
    return _signed_text(task.delta, task.ci)


def notes(answered: EngineReport) -> list[str]:
    """Return the notes below the table: the meaning of its columns, empty answers, and first tokens."""
    lines = [
        f"Δ: paired difference to {answered.baseline} on the same prompts, with its 95 % interval from {FEWEST} "
        "prompts on. Greedy answers. Sizes are the engine's own word: kvbench has not seen its cache."
    ]
    for row in answered.rows:
        if row.empty:
            lines.append(f"{row.label}: {row.empty} answers are empty.")
        if row.first is not None:
            change = f"{row.first.change:+.3f}".replace("-", "−")
            lines.append(
                f"{row.label}: the likeliest first token is {answered.baseline}'s in {100 * row.first.same:.0f} % of "
                f"{row.first.n} prompts; ln p of that token changes by {change}."
            )
    return lines + list(answered.notes)
