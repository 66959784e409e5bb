"""Scores of imported answers: LongBench's metrics and their intervals."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from kvbench.base.errors import UsageError
from kvbench.base.example import Example
from kvbench.report.export_kvpress import RULER
from kvbench.studies.imports.base import ImportedAnswer, Predictions
from kvbench.tasks import longbench
from kvbench.tasks.metrics import METRICS, check_installed, choose, metric, score, stats
from kvbench.tasks.metrics.stats import FEWEST

Score = float | None
"""The score of an answer in [0, 1], or None if it cannot be scored."""


@dataclass(frozen=True)
class Scored:
    """The scores of one file's answers to one dataset.

    predictions: the answers.
    metric: the name of the metric that scored them.
    scores: the score of each answer, in their order.
    interval: the 95 % interval of the mean, in [0, 1]; None for too few scores.
    buckets: the scores by range of length, for LongBench-E only.
    seconds: the time that scoring took.
    """

    predictions: Predictions
    metric: str
    scores: tuple[Score, ...]
    interval: tuple[float, float] | None
    buckets: tuple[Bucket, ...]
    seconds: float


@dataclass(frozen=True)
class Bucket:
    """The scores of the answers in one of LongBench-E's ranges of length.

    name: the range, one of longbench.BUCKETS.
    scores: the scores of its answers.
    interval: the 95 % interval of the mean, in [0, 1]; None for too few scores.
    """

    name: str
    scores: tuple[Score, ...]
    interval: tuple[float, float] | None


def choose_metric(predictions: Predictions, code_sim: str, fallback: str | None) -> str:
    """Choose the metric for the answers of a file, and return its name.

    A dataset of LongBench has LongBench's metric. Any other dataset has the metric ``fallback``. If the user named
    none, a task of RULER in a file of kvpress has kvpress's metric.

    code_sim: the backend of code similarity, levenshtein or difflib.
    fallback: the metric that the user named; None if the user named no metric.

    Raises UsageError naming the file if no metric is found, or if a package that the metric needs is not installed.
    """
    dataset = predictions.dataset
    name = fallback
    if dataset in longbench.TASKS:
        name = longbench.metric_name(dataset, code_sim)
    elif fallback is None and predictions.layout == "kvpress" and dataset in RULER:
        # RULER's question tasks accept any of the references; its other tasks need all of them
        name = "kvpress_part" if dataset.startswith("qa_") else "kvpress_all"
    if name is None:
        raise UsageError(
            f"{predictions.path}: dataset {dataset!r} has no metric: it is none of LongBench's "
            f"({', '.join(longbench.TASKS)}); give metric=NAME for it, or metric=FILE.py:NAME ({', '.join(METRICS)})"
        )
    name = choose(name).name
    check_installed(name)
    return name


def check_answers(predictions: Predictions, name: str) -> None:
    """Raise UsageError with file and line if an answer lacks a key that the metric ``name`` or the buckets need."""
    for answer in predictions.answers:
        if metric(name).needs_classes and answer.classes is None:
            raise UsageError(f"{predictions.path}, {answer.place}: there is no key 'all_classes', which {name} needs")
        if predictions.extended and answer.length is None:
            raise UsageError(f"{predictions.path}, {answer.place}: there is no 'length', which LongBench-E needs")


def score_file(predictions: Predictions, name: str) -> Scored:
    """Score a file's answers by the metric ``name``, with an interval for all answers and for each range of length."""
    start = time.perf_counter()
    scores = tuple(_score_answer(predictions.dataset, name, answer) for answer in predictions.answers)
    # the seconds are the metric's alone, without the time that the intervals take
    seconds = time.perf_counter() - start
    return Scored(
        predictions=predictions,
        metric=name,
        scores=scores,
        interval=_compute_interval(scores),
        buckets=tuple(_divide_by_length(predictions, scores)),
        seconds=seconds,
    )


def compute_printed_mean(name: str, scores: Sequence[Score]) -> Score:
    """Return the mean of the known scores in the printed units of the metric ``name``; None if no score is known.

    Adding, scaling and dividing follow the order of LongBench's evaluator, so that the second digit rounds as there.
    """
    known = [value for value in scores if value is not None]
    if not known:
        return None
    # (100 * total) / n as in LongBench's eval.py: 100 * (total / n) can differ from it in the last bit
    return metric(name).scale * sum(known) / len(known)


def _score_answer(dataset: str, name: str, answer: ImportedAnswer) -> Score:
    """Return the score of one answer by the metric ``name``, or None if it cannot be scored."""
    # a metric only reads an example's references and labels, so the unknown prompt can be left empty. ``check_answers``
    # has refused answers without the labels that the metric needs
    example = Example(
        id="",
        prompt="",
        answers=answer.references,
        max_new_tokens=1,
        classes=answer.classes or (),
    )
    if dataset in longbench.TASKS:
        # LongBench's evaluator cuts the answers of some tasks at their first line
        return score(name, answer.prediction, example, cut=partial(longbench.scored_part, dataset))
    return score(name, answer.prediction, example)


def _compute_interval(scores: Sequence[Score]) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean score in [0, 1]; None for fewer than FEWEST scores."""
    known = [value for value in scores if value is not None]
    if len(known) < FEWEST:
        return None
    return stats.mean_interval(known)


def _divide_by_length(predictions: Predictions, scores: Sequence[Score]) -> Iterator[Bucket]:
    """Yield the scores in each of LongBench-E's ranges of length; nothing for other predictions."""
    if not predictions.extended:
        return
    # ``check_answers`` has refused answers of LongBench-E without a length, so the 0 is never taken
    ranges = [longbench.length_bucket(answer.length or 0) for answer in predictions.answers]
    for name, _ in longbench.BUCKETS:
        scores_in_range = tuple(score for score, range_name in zip(scores, ranges, strict=True) if range_name == name)
        yield Bucket(name, scores_in_range, _compute_interval(scores_in_range))
