"""Scores of imported answers: LongBench's metrics over many files, on all cores."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice

from kvbench.errors import UsageError
from kvbench.example import Example
from kvbench.imports.base import ImportedAnswer, Predictions
from kvbench.metrics import METRICS, metric, score, stats
from kvbench.metrics.stats import FEWEST
from kvbench.tasks import longbench

Score = float | None
Item = tuple[str, str, ImportedAnswer]
PARALLEL_FROM = 300_000
"""Characters from which starting processes takes less time than it saves."""
SLOW_METRICS = ("rouge_l", "rouge_zh", "qa_f1_zh")


@dataclass(frozen=True)
class Scored:
    """The scores of one file's answers to one dataset, in their order; None where an answer cannot be scored.

    ``interval`` and those of ``buckets`` are 95 % bootstrap intervals of the mean in [0, 1]. ``seconds`` is the time
    that scoring took, summed over processes.
    """

    predictions: Predictions
    metric: str
    scores: tuple[Score, ...]
    interval: tuple[float, float] | None
    buckets: tuple[Bucket, ...]
    seconds: float


@dataclass(frozen=True)
class Bucket:
    """One range of length of LongBench-E."""

    name: str
    scores: tuple[Score, ...]
    interval: tuple[float, float] | None


def choose_metric(predictions: Predictions, code_sim: str, fallback: str | None) -> str:
    """Return the metric of a file's dataset, else ``fallback``; UsageError naming the file where that leaves none."""
    dataset = predictions.dataset
    if dataset in longbench.TASKS:
        return longbench.metric_name(dataset, code_sim)
    if fallback is None:
        raise UsageError(
            f"{predictions.path}: dataset {dataset!r} has no metric: it is none of LongBench's "
            f"({', '.join(longbench.TASKS)}); give metric=NAME for it ({', '.join(METRICS)})"
        )
    return metric(fallback).name


def check(predictions: Predictions, name: str) -> None:
    """Raise UsageError with file and line where an answer lacks what its metric or its buckets need."""
    for answer in predictions.answers:
        if metric(name).needs_classes and answer.classes is None:
            raise UsageError(f"{predictions.path}, {answer.place}: there is no key 'all_classes', which {name} needs")
        if predictions.extended and answer.length is None:
            raise UsageError(f"{predictions.path}, {answer.place}: there is no 'length', which LongBench-E needs")


def score_all(files: Sequence[tuple[Predictions, str]], workers: int | None = None) -> list[Scored]:
    """Score every file under its metric, in order, in ``workers`` processes (None: all cores, or one if short)."""
    items = [(p.dataset, name, answer) for p, name in files for answer in p.answers]
    if workers is None:
        workers = _cores() if sum(map(_size, items)) >= PARALLEL_FROM else 1
    with ExitStack() as stack:
        pool = stack.enter_context(_pool(workers)) if workers > 1 else None
        chunk = max(1, len(items) // (32 * workers))  # small enough that no process waits long for another
        results = iter(list(pool.map(_score, items, chunksize=chunk) if pool else map(_score, items)))
        scored = [list(islice(results, len(p.answers))) for p, _ in files]
        file_scores = [tuple(value for value, _ in of_file) for of_file in scored]
        groups = [_buckets(p, s) for (p, _), s in zip(files, file_scores, strict=True)]
        samples = [*file_scores, *(s for by_name in groups for s in by_name.values())]
        intervals = iter(list(pool.map(_interval, samples) if pool else map(_interval, samples)))
        file_intervals = [next(intervals) for _ in files]
        ranges = [tuple(Bucket(n, s, next(intervals)) for n, s in by_name.items()) for by_name in groups]
    seconds = [sum((took for _, took in of_file), 0.0) for of_file in scored]
    columns = zip(files, file_scores, file_intervals, ranges, seconds, strict=True)
    return [Scored(p, name, values, ci, parts, took) for (p, name), values, ci, parts, took in columns]


def printed(name: str, scores: Sequence[Score]) -> Score:
    """Return the mean in printed units over the scores that are not None; None if there are none.

    It is added, scaled and divided in the order of LongBench's evaluator, so that the second digit rounds as there.
    """
    known = [s for s in scores if s is not None]
    return metric(name).scale * sum(known) / len(known) if known else None


def _score(item: Item) -> tuple[Score, float]:
    """Return an answer's score, and the seconds that it took."""
    start = time.perf_counter()
    dataset, name, answer = item
    text = answer.prediction
    text = longbench.scored_part(dataset, text) if dataset in longbench.TASKS else text
    value = score(name, text, Example("", "", answer.references, 1, answer.classes or ()))
    return value, time.perf_counter() - start


def _interval(scores: Sequence[Score]) -> tuple[float, float] | None:
    known = [s for s in scores if s is not None]
    return stats.bootstrap_ci(known) if len(known) >= FEWEST else None


def _buckets(predictions: Predictions, scores: Sequence[Score]) -> dict[str, tuple[Score, ...]]:
    if not predictions.extended:
        return {}
    scores_by_range: dict[str, list[Score]] = {name: [] for name, _ in longbench.BUCKETS}
    for answer, value in zip(predictions.answers, scores, strict=True):
        scores_by_range[longbench.bucket(answer.length or 0)].append(value)
    return {name: tuple(values) for name, values in scores_by_range.items()}


def _size(item: Item) -> int:
    """Return the characters to compare, those of slow metrics four times."""
    _, name, answer = item
    return (len(answer.prediction) + sum(map(len, answer.references))) * (4 if name in SLOW_METRICS else 1)


def _pool(count: int) -> ProcessPoolExecutor:
    # forked processes share what is imported already; elsewhere than on Linux forking is not safe
    method = "fork" if sys.platform == "linux" else "spawn"
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context(method))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
