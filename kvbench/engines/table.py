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
from kvbench.report.render import size
from kvbench.report.table import Table, number
from kvbench.store.results import Sample
from kvbench.tasks.metrics import metric, stats
from kvbench.tasks.metrics.stats import FEWEST, Interval

Lines = Mapping[str, Mapping[str, Any]]
"""Stored answers by example."""


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """A row's answers to one task. delta, ci: the paired difference to the baseline in printed units."""

    column: str
    n: int
    score: float | None
    delta: float | None = None
    ci: Interval | None = None


@dataclass(frozen=True, kw_only=True)
class FirstChoices:
    """A row's first tokens beside the baseline's, on prompts of which both engines said them.

    same: the share of prompts with the same likeliest first token. change: the mean change of ln p of the baseline's
    likeliest first token, with the least likely listed one in place of a token that is not listed. n: the prompts.
    """

    same: float
    change: float
    n: int


@dataclass(frozen=True, kw_only=True)
class EngineResult:
    """One row of the table. delta, ci: the mean difference over tasks. bytes: a cache as the engine says it."""

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
    """All rows on the same prompts, the baseline first. alike: notes on answers beside kvbench's own full cache."""

    baseline: str
    rows: tuple[EngineResult, ...]
    columns: tuple[str, ...]
    notes: tuple[str, ...]


def report(run: EngineRun) -> EngineReport:
    """Return all rows that engines answered on this run's prompts. Raises UsageError for an unknown baseline."""
    by_engine: dict[str, dict[str, Lines]] = {}
    engines: dict[str, Mapping[str, Any]] = {}
    for group in run.run.groups:
        wanted = {example.id for example in group.examples}
        for engine, record in stored_rows(run, group):
            lines = run.run.store.lines(record.id)
            here = {i: line for i, line in lines.items() if i in wanted}
            if here:
                # not by the label: two models may have been measured under one
                key = json.dumps(engine, sort_keys=True)
                engines[key] = engine
                by_engine.setdefault(key, {})[group.column] = here
    names = _names(engines)
    by_label = {names[key]: columns for key, columns in by_engine.items()}
    if not by_label:
        raise UsageError("no engine has answered these prompts yet")
    labels = list(by_label)
    baseline = run.baseline or labels[0]
    if baseline not in labels:
        raise UsageError(f"baseline={baseline} is no row on these prompts: {', '.join(labels)}")
    labels.remove(baseline)
    rows = []
    for label in [baseline, *labels]:
        rows.append(_row(run.run.groups, label, by_label[label], by_label[baseline], is_baseline=label == baseline))
    return EngineReport(
        baseline=baseline,
        rows=tuple(rows),
        columns=tuple(group.column for group in run.run.groups),
        notes=tuple(_beside_own(run, by_label)),
    )


def _names(engines: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the name of each row: its label, and behind it its model where a label stands for several."""
    labels = [engine["label"] for engine in engines.values()]
    names = {}
    for key, engine in engines.items():
        name = str(engine["label"])
        if labels.count(name) > 1:
            name += f" ({engine.get('served') or engine.get('gguf')})"
        names[key] = name
    return names


def _row(
    groups: Sequence[Group], label: str, own: Mapping[str, Lines], baseline: Mapping[str, Lines], is_baseline: bool
) -> EngineResult:
    """Return one row from its stored answers and the baseline's, by column."""
    tasks = []
    differences: list[list[float]] = []
    for group in groups:
        lines = own.get(group.column, {})
        shown = metric(group.task.metric)
        scores = _scores(lines)
        score, delta, ci = None, None, None
        if scores:
            score = shown.show(fmean(scores.values()))
        # the pairs are the prompts that both rows have answered
        other = _scores(baseline.get(group.column, {}))
        shared = [i for i in scores if i in other]
        if shared and not is_baseline:
            differences.append([scores[i] - other[i] for i in shared])
            delta, interval = stats.paired_difference([scores[i] for i in shared], [other[i] for i in shared])
            delta = shown.scale * delta
            if interval is not None and len(shared) >= FEWEST:
                ci = (shown.scale * interval[0], shown.scale * interval[1])
        tasks.append(TaskResult(column=group.column, n=len(scores), score=score, delta=delta, ci=ci))
    measured = [task.score for task in tasks if task.score is not None]
    # a mean over other prompts than the baseline's would not fit its difference
    mean = None
    is_whole = all(own.get(group.column, {}).keys() == baseline.get(group.column, {}).keys() for group in groups)
    if is_whole and len(measured) == len(groups):
        mean = fmean(measured)
    mean_delta, mean_ci = None, None
    # differences of two units have no mean
    scales = {metric(group.task.metric).scale for group in groups}
    if len(differences) == len(groups) and len(scales) == 1:
        (scale,) = scales
        mean_difference, interval = stats.mean_over_tasks(differences, bounds=(-1.0, 1.0))
        mean_delta = scale * mean_difference
        if interval is not None:
            mean_ci = (scale * interval[0], scale * interval[1])
    all_lines = [line for lines in own.values() for line in lines.values()]
    said = [float(line["bytes_said"]) for line in all_lines if "bytes_said" in line]
    bytes_said = None
    if said and is_whole:
        bytes_said = fmean(said)
    first = None
    if not is_baseline:
        first = _first_choices(own, baseline)
    return EngineResult(
        label=label,
        tasks=tuple(tasks),
        mean=mean,
        delta=mean_delta,
        ci=mean_ci,
        bytes=bytes_said,
        empty=sum(not line["prediction"].strip() for line in all_lines),
        first=first,
    )


def _scores(lines: Lines) -> dict[str, float]:
    """Return the scores in [0, 1] by example, without answers that cannot be scored."""
    return {i: float(line["score"]) for i, line in sorted(lines.items()) if line["score"] is not None}


def _first_choices(own: Mapping[str, Lines], baseline: Mapping[str, Lines]) -> FirstChoices | None:
    """Return a row's first tokens beside the baseline's; None if one of the two engines does not say them."""
    same, changes = [], []
    for column, lines in own.items():
        for i, line in lines.items():
            ours, theirs = line.get("first"), baseline.get(column, {}).get(i, {}).get("first")
            if not ours or not theirs:
                continue
            # {text of a token: its ln p}: the key with the largest value is the first choice
            choice = max(theirs, key=theirs.__getitem__)
            same.append(max(ours, key=ours.__getitem__) == choice)
            # a token that is not listed is at most as likely as the least likely listed one
            changes.append(ours.get(choice, min(ours.values())) - theirs[choice])
    if not same:
        return None
    return FirstChoices(same=fmean(same), change=fmean(changes), n=len(same))


def _beside_own(run: EngineRun, by_label: Mapping[str, Mapping[str, Lines]]) -> list[str]:
    """Return, for each row, how many tokens of its answers are those of kvbench's own full cache, if that is stored."""
    own: dict[str, Mapping[str, Sample]] = {}
    for group in run.run.groups:
        samples = run.run.samples(group, group.cells[0])
        if samples:
            own[group.column] = samples
    notes = []
    for label, columns in by_label.items():
        shares = []
        for column, lines in columns.items():
            for i, line in lines.items():
                if i in own.get(column, {}):
                    shares.append(equal_tokens(run.run.tokenizer, line["prediction"], own[column][i].prediction))
        if shares:
            notes.append(
                f"{label}: {100 * fmean(shares):.0f} % of the answers' tokens are those of kvbench's own full cache "
                f"(n = {len(shares)} answers, place by place)."
            )
    return notes


def equal_tokens(tokenizer: Any, a: str, b: str) -> float:
    """Return the share of places at which two texts have the same token, of the longer one's places."""
    ids = tokenizer.encode(a, add_special_tokens=False), tokenizer.encode(b, add_special_tokens=False)
    longest = max(map(len, ids))
    if not longest:
        return 1.0
    return sum(x == y for x, y in zip(*ids, strict=False)) / longest


def verdicts(answered: EngineReport) -> Table | None:
    """Return a line for each row but the baseline: its size, its score and what that says."""
    baseline = answered.rows[0]
    lines = []
    for row in answered.rows[1:]:
        times = ""
        if row.bytes and baseline.bytes:
            times = f"{baseline.bytes / row.bytes:.1f}x smaller, says the engine"
        delta = ""
        if row.delta is not None:
            delta = _signed(row.delta, row.ci)
        lines.append(
            (
                row.label,
                times,
                f"{number(row.mean)} of {number(baseline.mean)}",
                delta,
                _outcome(row, answered.baseline),
            )
        )
    if not lines:
        return None
    return Table(("row", "size", "score", "difference", "verdict"), tuple(lines), left=5, bare=True)


def _outcome(row: EngineResult, baseline: str) -> str:
    """Return in words whether a row is told apart from the baseline."""
    if row.mean is None:
        return "not all prompts are answered"
    if row.ci is None:
        return "too few answers to tell"
    if row.ci[1] < 0:
        return f"worse than {baseline}"
    if row.ci[0] > 0:
        return f"better than {baseline}"
    return f"not told apart from {baseline}"


def _signed(delta: float, ci: Interval | None) -> str:
    text = number(delta, sign=True)
    if ci is not None:
        text += f" [{number(ci[0])}, {number(ci[1])}]"
    return text


def tables(answered: EngineReport) -> list[Table]:
    """Return the verdicts, and the table of scores."""
    heads = ["row"]
    for column in answered.columns:
        heads += [column, "Δ"]
    heads += ["n", "size, says the engine"]
    rows = []
    for row in answered.rows:
        texts = [row.label]
        for task in row.tasks:
            texts += [number(task.score), _difference(task)]
        said = "unknown"
        if row.bytes is not None:
            said = size(row.bytes)
        rows.append((*texts, str(sum(task.n for task in row.tasks)), said))
    scores = Table(tuple(heads), tuple(rows), breaks=True)
    above = verdicts(answered)
    if above is None:
        return [scores]
    return [above, scores]


def _difference(task: TaskResult) -> str:
    """Return a task's difference to the baseline as text; a dash for the baseline itself."""
    if task.delta is None:
        return "—"
    return _signed(task.delta, task.ci)


def notes(answered: EngineReport) -> list[str]:
    """Return what the numbers mean."""
    lines = [
        f"Δ: paired difference to {answered.baseline} on the same prompts, with its 95 % interval from {FEWEST} "
        "prompts on. Greedy answers. Sizes are the engine's own word: kvbench has not seen its cache."
    ]
    for row in answered.rows:
        if row.empty:
            lines.append(f"{row.label}: {row.empty} answers are empty.")
        if row.first is not None:
            text = (
                f"{row.label}: the likeliest first token is {answered.baseline}'s in {100 * row.first.same:.0f} % of "
            )
            text += f"{row.first.n} prompts; ln p of that token changes by "
            text += f"{row.first.change:+.3f}".replace("-", "−")
            lines.append(text + ".")
    return lines + list(answered.notes)
