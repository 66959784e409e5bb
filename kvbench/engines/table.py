"""The table of engine rows: scores with paired differences to the baseline, sizes as engines say them, and notes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from kvbench.base.errors import UsageError
from kvbench.base.formatting import format_number, format_percent, format_size, with_interval
from kvbench.engines.rows import EngineRun, find_stored_rows
from kvbench.plan.cells import Group
from kvbench.report.table import Table
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
"""A row's answers to one task, by the example's id."""


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
    cut_thoughts: float
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
    answers_by_label = _read_answers(run)
    if not answers_by_label:
        raise UsageError("no engine has answered these prompts yet")
    # without baseline=, the row that was measured first is the baseline
    baseline = run.baseline or next(iter(answers_by_label))
    if baseline not in answers_by_label:
        raise UsageError(f"baseline={baseline} is no row on these prompts: {', '.join(answers_by_label)}")
    groups = run.plan.groups
    baseline_answers = answers_by_label[baseline]
    rows = [_build_row(groups, baseline, baseline_answers, baseline_answers, is_baseline=True)]
    for label, answers in answers_by_label.items():
        if label != baseline:
            rows.append(_build_row(groups, label, answers, baseline_answers, is_baseline=False))
    return EngineReport(
        baseline=baseline,
        rows=tuple(rows),
        columns=tuple(group.column for group in groups),
        notes=tuple(_compare_with_own(run, answers_by_label)),
    )


def _read_answers(run: EngineRun) -> dict[str, dict[str, Answers]]:
    """Return the stored answers of all engines to this run's prompts, by row and column, the oldest row first."""
    # rows are told apart by their whole identity, as text, because two models may have been measured under one label
    answers_by_identity: dict[str, dict[str, Answers]] = {}
    engines: dict[str, Mapping[str, object]] = {}
    for group in run.plan.groups:
        example_ids = {example.id for example in group.examples}
        for row in find_stored_rows(run, group):
            lines = run.plan.store.lines(row.record.id)
            answers = {}
            for example_id, line in lines.items():
                if example_id in example_ids:
                    answers[example_id] = StoredAnswer.read(line)
            if answers:
                identity = json.dumps(row.engine, sort_keys=True)
                engines[identity] = row.engine
                answers_by_identity.setdefault(identity, {})[group.column] = answers
    names = _name_rows(engines)
    return {names[identity]: answers for identity, answers in answers_by_identity.items()}


def _name_rows(engines: Mapping[str, Mapping[str, object]]) -> dict[str, str]:
    """Return each row's name in the table: its label, followed by its model if several rows have this label.

    engines: the identity of each row's engine, by the same identity as text. The names have the same keys.
    """
    labels = [str(engine["label"]) for engine in engines.values()]
    names = {}
    for identity, engine in engines.items():
        name = str(engine["label"])
        if labels.count(name) > 1:
            # a server says its model's name; a model of llama.cpp is known by the fingerprint of its file
            name += f" ({engine.get('served') or engine.get('gguf')})"
        names[identity] = name
    return names


def _build_row(
    groups: Sequence[Group], label: str, own: Mapping[str, Answers], baseline: Mapping[str, Answers], is_baseline: bool
) -> EngineResult:
    """Return one row of the table, named ``label``, with a result for the task of each group.

    own: the stored answers of the row, by column.
    baseline: the stored answers of the baseline, by column.
    is_baseline: True if the row is the baseline itself, which is compared with nothing.
    """
    tasks: list[TaskResult] = []
    # the paired differences of each task that has some
    differences: list[list[float]] = []
    for group in groups:
        baseline_answers: Answers = {}
        if not is_baseline:
            baseline_answers = baseline.get(group.column, {})
        task, task_differences = _compare_task(group, own.get(group.column, {}), baseline_answers)
        tasks.append(task)
        if task_differences:
            differences.append(task_differences)
    answers: list[StoredAnswer] = []
    has_cut_thought: list[bool] = []
    for group in groups:
        for answer in own.get(group.column, {}).values():
            answers.append(answer)
            has_cut_thought.append(group.task.thought.find_answer(answer.prediction) is None)
    scores = [task.score for task in tasks if task.score is not None]
    sizes = [answer.bytes_said for answer in answers if answer.bytes_said is not None]
    mean, mean_bytes = None, None
    # means over other prompts than the baseline's would not fit the paired difference beside them
    if all(own.get(group.column, {}).keys() == baseline.get(group.column, {}).keys() for group in groups):
        if len(scores) == len(groups):
            mean = fmean(scores)
        if sizes:
            mean_bytes = fmean(sizes)
    mean_delta, mean_ci = _average_differences(groups, differences)
    first = None
    if not is_baseline:
        first = _compare_first_choices(own, baseline)
    return EngineResult(
        label=label,
        tasks=tuple(tasks),
        mean=mean,
        delta=mean_delta,
        ci=mean_ci,
        bytes=mean_bytes,
        empty=sum(not answer.prediction.strip() for answer in answers),
        cut_thoughts=fmean(has_cut_thought) if has_cut_thought else 0.0,
        first=first,
    )


def _compare_task(group: Group, own: Answers, baseline: Answers) -> tuple[TaskResult, list[float]]:
    """Return a row's result on one task, and its difference from the baseline on each prompt that both have answered.

    The differences are in [-1, 1]. Without answers in ``baseline`` there are none.
    """
    task_metric = metric(group.task.metric)
    scores, baseline_scores = _list_scores(own), _list_scores(baseline)
    score, delta, ci = None, None, None
    if scores:
        score = task_metric.show(fmean(scores.values()))
    # scores are paired on the prompts that both rows have answered
    shared_ids = [example_id for example_id in scores if example_id in baseline_scores]
    own_shared = [scores[example_id] for example_id in shared_ids]
    baseline_shared = [baseline_scores[example_id] for example_id in shared_ids]
    differences = [ours - theirs for ours, theirs in zip(own_shared, baseline_shared, strict=True)]
    if differences:
        mean_difference, interval = stats.paired_difference(own_shared, baseline_shared)
        # scores are stored from 0 to 1, and printed in the metric's unit
        delta = task_metric.scale * mean_difference
        if interval is not None and len(differences) >= FEWEST:
            low, high = interval
            ci = (task_metric.scale * low, task_metric.scale * high)
    return TaskResult(column=group.column, n=len(scores), score=score, delta=delta, ci=ci), differences


def _average_differences(
    groups: Sequence[Group], differences: Sequence[list[float]]
) -> tuple[float | None, Interval | None]:
    """Return the mean over tasks of the differences from the baseline, and its interval, in printed units.

    Both are None unless every task has differences, and all metrics have one unit. The interval is also None if there
    are too few differences for it.

    differences: the differences of each task that has some, in [-1, 1].
    """
    scales = {metric(group.task.metric).scale for group in groups}
    if len(differences) < len(groups) or len(scales) > 1:
        return None, None
    (scale,) = scales
    mean, interval = stats.mean_over_tasks(differences, bounds=(-1.0, 1.0))
    if interval is None:
        return scale * mean, None
    low, high = interval
    return scale * mean, (scale * low, scale * high)


def _list_scores(answers: Answers) -> dict[str, float]:
    """Return {example id: score in [0, 1]}, in the order of ids. Answers that cannot be scored are left out."""
    return {example_id: answer.score for example_id, answer in sorted(answers.items()) if answer.score is not None}


def _compare_first_choices(own: Mapping[str, Answers], baseline: Mapping[str, Answers]) -> FirstChoices | None:
    """Return how a row's first tokens compare with the baseline's; None if one of the two reports none.

    own, baseline: the stored answers of the row and of the baseline, by column.
    """
    same, changes = [], []
    for column, answers in own.items():
        baseline_answers = baseline.get(column, {})
        for example_id, answer in answers.items():
            if example_id not in baseline_answers:
                continue
            # {text of a token: its ln p}
            ours, theirs = answer.first, baseline_answers[example_id].first
            if not ours or not theirs:
                continue
            their_choice = max(theirs, key=theirs.__getitem__)
            our_choice = max(ours, key=ours.__getitem__)
            same.append(our_choice == their_choice)
            # a token that is not listed is at most as likely as the least likely listed one, whose ln p stands for it
            our_lnp = ours.get(their_choice, min(ours.values()))
            changes.append(our_lnp - theirs[their_choice])
    if not same:
        return None
    return FirstChoices(same=fmean(same), change=fmean(changes), n=len(same))


def _compare_with_own(run: EngineRun, answers_by_label: Mapping[str, Mapping[str, Answers]]) -> list[str]:
    """Return a note for each row: which share of its answers' tokens equals those of kvbench's own full cache.

    Rows on prompts that kvbench's full cache has not answered have no note.

    answers_by_label: the answers of each row, by column.
    """
    full_samples: dict[str, Mapping[str, Sample]] = {}
    for group in run.plan.groups:
        # the plan has one cell for each task, the full cache's
        samples = run.plan.samples(group, group.cells[0])
        if samples:
            full_samples[group.column] = samples
    notes = []
    for label, answers_by_column in answers_by_label.items():
        # each number is the share of an answer's tokens that equal the full cache's
        shares = []
        for column, answers in answers_by_column.items():
            own_samples = full_samples.get(column, {})
            for example_id, answer in answers.items():
                if example_id in own_samples:
                    own_text = own_samples[example_id].prediction
                    shares.append(compute_equal_share(run.plan.tokenizer, answer.prediction, own_text))
        if shares:
            notes.append(
                f"{label}: {format_percent(100 * fmean(shares))} of the answers' tokens are those of kvbench's own "
                f"full cache (n = {len(shares)} answers, place by place)."
            )
    return notes


def compute_equal_share(tokenizer: Any, text: str, other_text: str) -> float:
    """Return the share of positions at which two texts have the same token, out of the longer text's positions."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    other_ids = tokenizer.encode(other_text, add_special_tokens=False)
    longest = max(len(ids), len(other_ids))
    # two empty texts are equal
    if not longest:
        return 1.0
    # zip ends with the shorter text: behind its end, no token is the same
    same = sum(token == other_token for token, other_token in zip(ids, other_ids, strict=False))
    return same / longest


def build_verdict_table(answered: EngineReport) -> Table | None:
    """Return a table with a line for each row except the baseline: its size, score, difference and verdict.

    Return None if there is only the baseline.
    """
    baseline, *others = answered.rows
    lines = []
    for row in others:
        size = ""
        if row.bytes and baseline.bytes:
            size = f"{format_number(baseline.bytes / row.bytes)}x smaller, says the engine"
        delta = _format_signed(row.delta, row.ci) if row.delta is not None else ""
        lines.append(
            (
                row.label,
                size,
                f"{format_number(row.mean)} of {format_number(baseline.mean)}",
                delta,
                _state_verdict(row, answered.baseline),
            )
        )
    if not lines:
        return None
    heads = ("row", "size", "score", "difference", "verdict")
    return Table(heads, tuple(lines), left=len(heads), bare=True)


def _state_verdict(row: EngineResult, baseline: str) -> str:
    """Return in words whether the interval of a row's difference shows it to be better or worse than the baseline."""
    if row.mean is None:
        return "not all prompts are answered"
    if row.ci is None:
        return "too few answers to tell"
    low, high = row.ci
    if high < 0:
        return f"worse than {baseline}"
    if low > 0:
        return f"better than {baseline}"
    return f"not told apart from {baseline}"


def _format_signed(delta: float, ci: Interval | None) -> str:
    """Return a difference with its sign, and its interval in brackets if there is one."""
    return with_interval(delta, ci, sign=True, gap=" ")


def build_tables(answered: EngineReport) -> list[Table]:
    """Return the tables to print: the verdicts, if there is more than the baseline, and the scores."""
    heads = ["row"]
    for column in answered.columns:
        heads += [column, "Δ"]
    heads += ["n", "size, says the engine"]
    rows = []
    for row in answered.rows:
        texts = [row.label]
        for task in row.tasks:
            texts += [format_number(task.score), _format_difference(task)]
        texts.append(str(sum(task.n for task in row.tasks)))
        if row.bytes is not None:
            texts.append(format_size(row.bytes))
        else:
            texts.append("unknown")
        rows.append(tuple(texts))
    scores = Table(tuple(heads), tuple(rows), breaks=True)
    verdicts = build_verdict_table(answered)
    if verdicts is None:
        return [scores]
    return [verdicts, scores]


def _format_difference(task: TaskResult) -> str:
    """Return a task's difference from the baseline as text; a dash for the baseline itself."""
    if task.delta is None:
        return "—"
    return _format_signed(task.delta, task.ci)


def build_notes(answered: EngineReport) -> list[str]:
    """Return the notes below the table: the meaning of its columns, empty answers, and first tokens."""
    lines = [
        f"Δ: paired difference to {answered.baseline} on the same prompts, with its 95 % interval from {FEWEST} "
        "prompts on. Greedy answers. Sizes are the engine's own word: kvbench has not seen its cache."
    ]
    for row in answered.rows:
        if row.empty:
            lines.append(f"{row.label}: {row.empty} answers are empty.")
        if row.cut_thoughts:
            share = format_percent(100 * row.cut_thoughts)
            lines.append(f"{row.label}: {share} of the answers end inside their thought, and score as empty ones.")
        if row.first is not None:
            same, change = format_percent(100 * row.first.same), format_number(row.first.change, 3, sign=True)
            lines.append(
                f"{row.label}: the likeliest first token is {answered.baseline}'s in {same} of {row.first.n} prompts; "
                f"ln p of that token changes by {change}."
            )
    return lines + list(answered.notes)
