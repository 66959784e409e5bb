"""Scores of imported answers: LongBench's metrics and their intervals."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.base.errors import UsageError
from kvbench.base.example import Example
from kvbench.report.export_kvpress import RULER
from kvbench.studies.imports.base import ImportedAnswer, Predictions
from kvbench.tasks import longbench
from kvbench.tasks.metrics import METRICS, check_installed, metric, score, stats
from kvbench.tasks.metrics.stats import FEWEST

Score = float | None


@dataclass(frozen=True)
class Scored:
    """The scores of one file's answers to one dataset, in their order; None where an answer cannot be scored.

    interval: the 95 % interval of the mean, in [0, 1]; the buckets have intervals of the same kind.
    buckets: the scores by range of length, for LongBench-E alone.
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
    """The scores of the answers in one range of length of LongBench-E."""

    name: str
    scores: tuple[Score, ...]
    interval: tuple[float, float] | None


def choose_metric(predictions: Predictions, code_sim: str, fallback: str | None) -> str:
    """Return the name of the metric of a file's dataset, or of ``fallback`` if the dataset is none of LongBench's.

    Raises UsageError, which names the file, if it is none and there is no ``fallback``.
    """
    dataset = predictions.dataset
    if dataset in longbench.TASKS:
        fallback = longbench.metric_name(dataset, code_sim)
    if fallback is None and predictions.layout == "kvpress" and dataset in RULER:
        fallback = "kvpress_part" if dataset.startswith("qa_") else "kvpress_all"
    if fallback is None:
        raise UsageError(
            f"{predictions.path}: dataset {dataset!r} has no metric: it is none of LongBench's "
            f"({', '.join(longbench.TASKS)}); give metric=NAME for it ({', '.join(METRICS)})"
        )
    check_installed(fallback)
    return fallback


def check(predictions: Predictions, name: str) -> None:
    """Raise UsageError with file and line where an answer lacks what its metric or its buckets need."""
    for answer in predictions.answers:
        if metric(name).needs_classes and answer.classes is None:
            raise UsageError(f"{predictions.path}, {answer.place}: there is no key 'all_classes', which {name} needs")
        if predictions.extended and answer.length is None:
            raise UsageError(f"{predictions.path}, {answer.place}: there is no 'length', which LongBench-E needs")


def score_file(predictions: Predictions, name: str) -> Scored:
    """Score a file's answers under its metric, with an interval for all and for each range of length."""
    start = time.perf_counter()
    scores = tuple(_score(predictions.dataset, name, answer) for answer in predictions.answers)
    seconds = time.perf_counter() - start
    buckets = tuple(
        Bucket(range_name, values, _interval(values)) for range_name, values in _by_length(predictions, scores).items()
    )
    return Scored(predictions, name, scores, _interval(scores), buckets, seconds)


def printed(name: str, scores: Sequence[Score]) -> Score:
    """Return the mean in printed units over the scores that are not None; None if there are none.

    It is added, scaled and divided in the order of LongBench's evaluator, so that the second digit rounds as there.
    """
    known = [s for s in scores if s is not None]
    return metric(name).scale * sum(known) / len(known) if known else None


def _score(dataset: str, name: str, answer: ImportedAnswer) -> Score:
    text = answer.prediction
    text = longbench.scored_part(dataset, text) if dataset in longbench.TASKS else text
    return score(name, text, Example("", "", answer.references, 1, answer.classes or ()))


def _interval(scores: Sequence[Score]) -> tuple[float, float] | None:
    known = [s for s in scores if s is not None]
    return stats.mean_interval(known) if len(known) >= FEWEST else None


def _by_length(predictions: Predictions, scores: Sequence[Score]) -> dict[str, tuple[Score, ...]]:
    """Return the scores by range of length of LongBench-E; {} if the predictions are not of LongBench-E."""
    if not predictions.extended:
        return {}
    ranges = [longbench.bucket(answer.length or 0) for answer in predictions.answers]
    return {
        name: tuple(value for value, range_name in zip(scores, ranges, strict=True) if range_name == name)
        for name, _ in longbench.BUCKETS
    }
