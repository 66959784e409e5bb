"""Several questions on one compressed context: the answers as they are stored, and the scores by question."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import fmean

from kvbench.tasks.metrics import metric, stats
from kvbench.tasks.metrics.stats import FEWEST


@dataclass(frozen=True)
class TurnAnswer:
    """The answer to one of a context's questions.

    bytes: what was held of the context and the questions so far once this was answered.
    beside: the scores by other metrics than the task's.
    """

    prediction: str
    score: float | None
    answers: tuple[str, ...]
    new_tokens: int
    decode_s: float
    bytes: int
    beside: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class IndexScore:
    """The mean score of the questions with one index, over the ``n`` contexts that have one with a score."""

    n: int
    score: float | None


@dataclass(frozen=True)
class TurnsSummary:
    """The scores of a cell by question, in printed units. A cell's own score is the mean over contexts of their means.

    contexts, questions: how many there are.
    by_index: the score of each context's first question, second question and so on.
    question_mean: the mean over all questions.
    pairs: the contexts with several questions, of which ``first``, ``last`` and ``fall`` are means.
    fall: the score of a context's last question minus that of its first; its interval is over contexts.
    bytes_compressed, bytes_last: the mean bytes held before the first and after the last question.
    beside: the means over contexts by other metrics.
    """

    contexts: int
    questions: int
    by_index: tuple[IndexScore, ...]
    question_mean: float | None
    pairs: int
    first: float | None
    last: float | None
    fall: float | None
    fall_ci: stats.Interval | None
    bytes_compressed: float
    bytes_last: float
    beside: Mapping[str, float | None]


Contexts = Mapping[str, Sequence[TurnAnswer]]
"""The answers to each context's questions, by the context's id."""


def falls(contexts: Contexts) -> dict[str, tuple[float, float]]:
    """Return (score of the first question, of the last) of each context that has several and a score for both."""
    ends = {name: (turns[0].score, turns[-1].score) for name, turns in contexts.items() if len(turns) > 1}
    return {name: (a, b) for name, (a, b) in ends.items() if a is not None and b is not None}


def summarise_turns(contexts: Contexts, name: str, compressed: Sequence[float]) -> TurnsSummary | None:
    """Return the scores by question of one cell, which is scored by the metric ``name``; None without questions.

    ``compressed`` holds the bytes of each compressed context.
    """
    if not contexts:
        return None
    show, scale = metric(name).show, metric(name).scale
    columns = list(zip_longest(*([t.score for t in turns] for turns in contexts.values())))
    by_index = [[x for x in column if x is not None] for column in columns]
    every = [x for column in by_index for x in column]
    pairs = list(falls(contexts).values())
    fall, interval = _mean([last - first for first, last in pairs], 1.0)
    beside = {}
    for other in dict.fromkeys(m for turns in contexts.values() for t in turns for m in t.beside):
        scores = [[s for t in turns if (s := t.beside.get(other)) is not None] for turns in contexts.values()]
        beside[other] = _shown(metric(other).show, [fmean(some) for some in scores if some])
    return TurnsSummary(
        contexts=len(contexts),
        questions=sum(map(len, contexts.values())),
        by_index=tuple(IndexScore(len(some), _shown(show, some)) for some in by_index),
        question_mean=_shown(show, every),
        pairs=len(pairs),
        first=_shown(show, [first for first, _ in pairs]),
        last=_shown(show, [last for _, last in pairs]),
        fall=None if fall is None else scale * fall,
        fall_ci=interval and (scale * interval[0], scale * interval[1]),
        bytes_compressed=fmean(compressed),
        bytes_last=fmean(turns[-1].bytes for turns in contexts.values()),
        beside=beside,
    )


def fall_beside(contexts: Contexts, full: Contexts, name: str) -> tuple[float, stats.Interval | None] | None:
    """Return a method's fall minus the full cache's over the contexts of both, in printed units, with its interval."""
    ours, theirs = falls(contexts), falls(full)
    differences = [(b - a) - (theirs[i][1] - theirs[i][0]) for i, (a, b) in ours.items() if i in theirs]
    mean, interval = _mean(differences, 2.0)
    scale = metric(name).scale
    return None if mean is None else (scale * mean, interval and (scale * interval[0], scale * interval[1]))


def _mean(values: Sequence[float], most: float) -> tuple[float | None, stats.Interval | None]:
    """Return the mean of values between ``-most`` and ``most`` with its interval, where there are enough for one."""
    interval = stats.mean_interval(values, (-most, most)) if len(values) >= FEWEST else None
    return (fmean(values) if values else None), interval


def _shown(show: Callable[[float], float], scores: Sequence[float]) -> float | None:
    return show(fmean(scores)) if scores else None
