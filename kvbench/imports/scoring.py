"""Scores of imported answers: LongBench's metrics over many files, on all cores."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from kvbench.errors import UsageError
from kvbench.example import Example
from kvbench.imports.base import ImportedAnswer, Predictions
from kvbench.metrics import METRICS, metric, score, stats
from kvbench.metrics.stats import FEWEST
from kvbench.tasks import longbench

Score = float | None
Part = tuple[int, str, str, tuple[ImportedAnswer, ...]]
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
    """The metric of a file's dataset, else ``fallback``; UsageError naming the file where that leaves none."""
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
    """Every file under its metric, in order. ``workers`` processes; None: all cores, or none for little text."""
    parts = _parts(files)
    size = sum(map(_size, parts))
    count = (_cores() if size >= PARALLEL_FROM else 1) if workers is None else workers
    with ExitStack() as stack:
        pool = stack.enter_context(_pool(count)) if count > 1 else None
        scores: list[dict[int, list[Score]]] = [{} for _ in files]
        seconds = [0.0] * len(files)
        order = sorted(range(len(parts)), key=lambda i: -_size(parts[i]))
        done = _run(pool, _score_part, [parts[i] for i in order])
        for i, (found, took) in zip(order, done, strict=True):
            scores[parts[i][0]][i] = found
            seconds[parts[i][0]] += took
        flat = [tuple(s for i in sorted(by_part) for s in by_part[i]) for by_part in scores]
        groups = [_buckets(p, s) for (p, _), s in zip(files, flat, strict=True)]
        wanted = [list(s) for s in flat] + [list(s) for by_name in groups for s in by_name.values()]
        intervals = iter(list(_run(pool, _interval, wanted)))
        whole = [next(intervals) for _ in files]
        ranges = [tuple(Bucket(n, s, next(intervals)) for n, s in by_name.items()) for by_name in groups]
    return [Scored(p, name, *rest) for (p, name), *rest in zip(files, flat, whole, ranges, seconds, strict=True)]


def printed(name: str, scores: Sequence[Score]) -> Score:
    """The mean in printed units over those that are not None; None of none.

    Added, scaled and divided in the order of LongBench's evaluator, so that the second digit rounds as there.
    """
    known = [s for s in scores if s is not None]
    return metric(name).scale * sum(known) / len(known) if known else None


def _score_part(part: Part) -> tuple[list[Score], float]:
    start = time.perf_counter()
    _, dataset, name, answers = part
    found = []
    for answer in answers:
        text = answer.prediction
        text = longbench.scored_part(dataset, text) if dataset in longbench.TASKS else text
        found.append(score(name, text, Example("", "", answer.references, 1, answer.classes or ())))
    return found, time.perf_counter() - start


def _interval(scores: Sequence[Score]) -> tuple[float, float] | None:
    known = [s for s in scores if s is not None]
    return stats.bootstrap_ci(known) if len(known) >= FEWEST else None


def _buckets(predictions: Predictions, scores: Sequence[Score]) -> dict[str, tuple[Score, ...]]:
    if not predictions.extended:
        return {}
    found: dict[str, list[Score]] = {name: [] for name, _ in longbench.BUCKETS}
    for answer, value in zip(predictions.answers, scores, strict=True):
        found[longbench.bucket(answer.length or 0)].append(value)
    return {name: tuple(values) for name, values in found.items()}


def _parts(files: Sequence[tuple[Predictions, str]]) -> list[Part]:
    """Runs of answers of one file each, small enough that no process waits long for another."""
    whole = [(i, p.dataset, name, p.answers) for i, (p, name) in enumerate(files)]
    limit = max(1, sum(map(_size, whole)) // (8 * _cores()))
    parts: list[Part] = []
    for i, dataset, name, answers in whole:
        run: list[ImportedAnswer] = []
        held = 0
        for answer in answers:
            run.append(answer)
            held += _size((i, dataset, name, (answer,)))
            if held >= limit:
                parts.append((i, dataset, name, tuple(run)))
                run, held = [], 0
        if run:
            parts.append((i, dataset, name, tuple(run)))
    return parts


def _size(part: Part) -> int:
    """Characters to compare, those of slow metrics several times."""
    _, _, name, answers = part
    return sum(len(a.prediction) + sum(map(len, a.references)) for a in answers) * (4 if name in SLOW_METRICS else 1)


def _run(pool: Executor | None, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterable[Any]:
    return pool.map(function, items) if pool else map(function, items)


def _pool(count: int) -> ProcessPoolExecutor:
    # forked processes share what is imported already; elsewhere than on Linux forking is not safe
    method = "fork" if sys.platform == "linux" else "spawn"
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context(method))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
