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

    prediction, answers: the model's answer and the references.
    score: the score by the task's metric; None if the metric gives the answer none.
    new_tokens, decode_s: the tokens of the answer, and the seconds of its decoding.
    bytes: the bytes held of the context and the questions so far, after this answer.
    beside: the scores by the task's further metrics, by the metric's name.
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
    """The mean score of all contexts' first questions, or of all their second questions, and so on.

    n: the number of contexts that have a scored question at this place.
    score: the mean in printed units; None if ``n`` is 0.
    """

    n: int
    score: float | None


@dataclass(frozen=True)
class TurnsSummary:
    """The scores of a cell by question, in printed units. The cell's own score is the mean of its contexts' means.

    contexts, questions: the number of contexts, and of all their questions.
    by_index: the score of each context's first question, second question and so on.
    question_mean: the mean over all questions.
    pairs: the number of contexts with several questions, of which the first and the last have a score.
    first, last: the means over these contexts of the first question's score and of the last question's.
    fall: the mean over these contexts of the last question's score minus the first question's.
    fall_ci: the interval of ``fall`` over contexts; None if there are too few.
    bytes_compressed, bytes_last: the mean bytes held before the first and after the last question.
    beside: the means over contexts by the task's further metrics.
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


def list_first_and_last_scores(contexts: Contexts) -> dict[str, tuple[float, float]]:
    """Return (score of the first question, score of the last question) of each context, by its id.

    Contexts with a single question, and contexts whose first or last question has no score, are left out.
    """
    scores_by_context = {}
    for name, turns in contexts.items():
        first, last = turns[0].score, turns[-1].score
        if len(turns) > 1 and first is not None and last is not None:
            scores_by_context[name] = (first, last)
    return scores_by_context


def summarise_turns(contexts: Contexts, name: str, compressed: Sequence[float]) -> TurnsSummary | None:
    """Return the scores by question of one cell under the metric ``name``; None if there are no contexts.

    contexts: the answers by context, each with at least one question.
    compressed: the bytes of each compressed context, before its first question.
    """
    if not contexts:
        return None
    show, scale = metric(name).show, metric(name).scale
    # scores_by_index[i] has each context's score of question i; contexts may have different numbers of questions
    scores_by_index: list[list[float]] = []
    # zip_longest gives None for questions that a shorter context lacks
    for answers in zip_longest(*contexts.values()):
        scores_by_index.append([a.score for a in answers if a is not None and a.score is not None])
    all_scores: list[float] = []
    for scores in scores_by_index:
        all_scores += scores
    pairs = list(list_first_and_last_scores(contexts).values())
    # a score lies in [0, 1], hence a difference of two in [-1, 1]
    fall, interval = _average([last - first for first, last in pairs], most=1.0)
    # ``show`` prints means and may be more than a factor; a difference is only scaled
    if fall is not None:
        fall *= scale
    return TurnsSummary(
        contexts=len(contexts),
        questions=sum(map(len, contexts.values())),
        by_index=tuple(IndexScore(len(scores), _show_mean(show, scores)) for scores in scores_by_index),
        question_mean=_show_mean(show, all_scores),
        pairs=len(pairs),
        first=_show_mean(show, [first for first, _ in pairs]),
        last=_show_mean(show, [last for _, last in pairs]),
        fall=fall,
        fall_ci=stats.scaled(interval, scale),
        bytes_compressed=fmean(compressed),
        bytes_last=fmean(turns[-1].bytes for turns in contexts.values()),
        beside=_average_beside(contexts),
    )


def _average_beside(contexts: Contexts) -> dict[str, float | None]:
    """Return {metric: mean over contexts} of the further metrics in ``TurnAnswer.beside``, in printed units."""
    # a dict keeps the order in which the metrics first appear, unlike a set
    names: dict[str, None] = {}
    for turns in contexts.values():
        for turn in turns:
            names |= dict.fromkeys(turn.beside)
    means = {}
    for name in names:
        # contexts weigh equally however many questions they have, as they do in the cell's own score
        means_of_contexts = []
        for turns in contexts.values():
            scores_or_none = [turn.beside.get(name) for turn in turns]
            scores = [score for score in scores_or_none if score is not None]
            if scores:
                means_of_contexts.append(fmean(scores))
        means[name] = _show_mean(metric(name).show, means_of_contexts)
    return means


def compare_falls(contexts: Contexts, full: Contexts, name: str) -> tuple[float, stats.Interval | None] | None:
    """Return the mean difference between a method's falls and the full cache's, with its interval, in printed units.

    A fall is the score of a context's last question minus that of its first.

    contexts: the method's answers.
    full: the full cache's answers. Contexts with a fall in both are compared.
    name: the metric of the scores.

    Returns None if no context can be compared.
    """
    scores_of_full = list_first_and_last_scores(full)
    differences = []
    for context, (first, last) in list_first_and_last_scores(contexts).items():
        # pair only contexts that both have answered
        if context in scores_of_full:
            full_first, full_last = scores_of_full[context]
            differences.append((last - first) - (full_last - full_first))
    # a difference of two falls lies in [-2, 2]
    mean, interval = _average(differences, most=2.0)
    if mean is None:
        return None
    scale = metric(name).scale
    return scale * mean, stats.scaled(interval, scale)


def _average(values: Sequence[float], most: float) -> tuple[float | None, stats.Interval | None]:
    """Return the mean of values between ``-most`` and ``most``, with its interval if there are FEWEST or more of them.

    Without values, both are None.
    """
    if not values:
        return None, None
    interval = stats.mean_interval(values, (-most, most)) if len(values) >= FEWEST else None
    return fmean(values), interval


def _show_mean(show: Callable[[float], float], scores: Sequence[float]) -> float | None:
    if not scores:
        return None
    return show(fmean(scores))
