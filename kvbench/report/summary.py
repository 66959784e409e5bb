"""Summarise stored samples: the scores, tokens, bytes and times of a cell and of a row, and paired differences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

import numpy as np

from kvbench.kv.pages import PagesFreed
from kvbench.report.data import Delta, RowMeans
from kvbench.store.fidelity import KINDS, FidelitySummary, summarise_texts
from kvbench.store.results import BucketScore, CellSummary, MeanTiming, Sample, share
from kvbench.store.turns import Contexts, summarise_turns
from kvbench.tasks.longbench import BUCKETS
from kvbench.tasks.metrics import metric, stats
from kvbench.tasks.metrics.stats import FEWEST
from kvbench.tasks.thoughts import THOUGHT, Thought


def summarise(samples: Sequence[Sample], metric_name: str, n_examples: int, thought: Thought = THOUGHT) -> CellSummary:
    """Return the means over one cell's samples, at least one.

    metric_name: the name of the metric that gave the scores.
    n_examples: the number of the task's examples, of which the cell may have answered only some.
    thought: the marks of thoughts in answers.
    """
    scores = [float(s.score) for s in samples if s.score is not None]
    score, interval = show_mean(metric_name, scores)
    # the bytes at 16 bits, whatever dtype the run had
    payload16 = fmean(s.payload16 for s in samples)
    overhead16 = fmean(s.overhead16 for s in samples)
    full16 = fmean(s.full16 for s in samples)
    return CellSummary(
        metric=metric_name,
        n=len(samples),
        of=n_examples,
        unscored=len(samples) - len(scores),
        score=score,
        ci=interval,
        prompt_tokens=fmean(s.n for s in samples),
        kept=fmean(s.kept for s in samples),
        nominal=_average_if_complete([s.nominal for s in samples]),
        payload=fmean(s.payload for s in samples),
        overhead=fmean(s.overhead for s in samples),
        payload_kv_head=_average_if_complete([s.payload_kv_head for s in samples]),
        payload_query_head=_average_if_complete([s.payload_query_head for s in samples]),
        full_bytes=fmean(s.full_bytes for s in samples),
        payload16=payload16,
        overhead16=overhead16,
        full16=full16,
        percent_of_full=share(payload16, overhead16, full16),
        decode_peak=max((s.decode_peak for s in samples if s.decode_peak is not None), default=None),
        cut=sum(s.cut > 0 for s in samples),
        shrunk=sum(s.shrunk for s in samples),
        # an answer of one token attends nothing while decoding, so samples without a number are left out
        attended=_average_present([s.attended for s in samples]),
        buckets=_summarise_buckets(samples, metric(metric_name).show),
        timing=_summarise_timing(samples),
        new_tokens=fmean(fmean(s.answer_lengths) for s in samples),
        # an answer to several questions is stored by question, and has no text of its own
        empty=sum(not s.prediction.strip() for s in samples if s.score is not None and not s.turns),
        cut_thoughts=fmean(fmean(thought.find_answer(text) is None for text in s.texts) for s in samples),
        fidelity=_summarise_fidelity(samples),
        questions=summarise_turns(answers_by_context(samples), metric_name, [s.payload + s.overhead for s in samples]),
        pages_freed=PagesFreed.mean([s.pages_freed for s in samples]),
        compressed_percent=_average_if_complete([s.compressed_percent for s in samples]),
    )


def show_mean(name: str, scores: Sequence[float]) -> tuple[float | None, tuple[float, float] | None]:
    """Return (the mean of the scores, its 95 % interval), both in printed units.

    name: the name of the metric that gave the scores.

    Without a score both are None. The interval is None for fewer than ``stats.FEWEST`` scores. It is also None if the
    scores have no bounds and are all equal.
    """
    chosen_metric = metric(name)
    if not scores:
        return None, None
    mean = chosen_metric.show(fmean(scores))
    if len(scores) < stats.FEWEST:
        return mean, None
    # a likelihood is shown by a formula of its own, and its log losses have no bounds
    bounds: stats.Bounds | None = (0.0, 1.0) if chosen_metric.formula is None else None
    interval = stats.mean_interval(scores, bounds=bounds)
    if interval is None:
        return mean, None
    low, high = interval
    return mean, (chosen_metric.show(low), chosen_metric.show(high))


def _summarise_buckets(samples: Sequence[Sample], show: Callable[[float], float]) -> dict[str, BucketScore]:
    """Return the mean score for each of LongBench-E's ranges of length that the samples have.

    show: the metric's function from a mean score to printed units.
    """
    buckets = {}
    for bucket, _ in BUCKETS:
        in_bucket = [s for s in samples if s.meta.get("bucket") == bucket]
        if not in_bucket:
            continue
        scores = [s.score for s in in_bucket if s.score is not None]
        # a sum over a number, not fmean, since committed tables have its rounding
        mean = show(sum(scores) / len(scores)) if scores else None
        buckets[bucket] = BucketScore(len(in_bucket), mean)
    return buckets


def _summarise_timing(samples: Sequence[Sample]) -> MeanTiming:
    """Return the mean seconds of the samples. Seconds a token = sum of decode seconds / sum of new tokens."""
    decode_s = sum(s.timing.decode_s for s in samples)
    new_tokens = sum(s.new_tokens for s in samples)
    return MeanTiming(
        prefill_s=fmean(s.timing.prefill_s for s in samples),
        compress_s=fmean(s.timing.compress_s for s in samples),
        # there may be no new token to divide by
        decode_s_per_token=decode_s / max(1, new_tokens),
        batch_factor=_average_present([s.timing.batch_factor for s in samples]),
    )


def answers_by_context(samples: Iterable[Sample]) -> Contexts:
    """Return the answers to each context's questions; {} if the samples' prompts have one question."""
    return {s.id: s.turns for s in samples if s.turns}


def _summarise_fidelity(samples: Sequence[Sample]) -> dict[str, FidelitySummary]:
    """Return the fidelity of a cell by kind of text, without kinds that no sample has."""
    summaries = {}
    for kind in KINDS:
        texts = [s.fidelity[kind] for s in samples if s.fidelity and kind in s.fidelity]
        summary = summarise_texts(texts)
        if summary is not None:
            summaries[kind] = summary
    return summaries


def _average_if_complete(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    if len(present) < len(values):
        return None
    return fmean(present)


def _average_present(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    if not present:
        return None
    return fmean(present)


def paired_delta(samples: Mapping[str, Sample], full_samples: Mapping[str, Sample], metric_name: str) -> Delta | None:
    """Return the mean paired difference to the full cache in the metric's printed units; None without pairs.

    ``samples`` and ``full_samples`` are the method's and the full cache's answers by example. A pair is an example to
    which both have an answer with a score.
    """
    ours, full_scores = [], []
    for example, sample in samples.items():
        if example not in full_samples:
            continue
        full_score = full_samples[example].score
        if sample.score is not None and full_score is not None:
            ours.append(float(sample.score))
            full_scores.append(float(full_score))
    if not ours:
        return None
    score_metric = metric(metric_name)
    # a perplexity is no multiple of the mean: the difference is taken between two printed means
    if score_metric.formula is not None:
        return shown_delta(list(zip(ours, full_scores, strict=True)), score_metric.show)
    mean, ci = stats.paired_difference(ours, full_scores)
    # an interval over few pairs would say nothing
    if len(ours) < FEWEST:
        ci = None
    return Delta(score_metric.scale * mean, stats.scaled(ci, score_metric.scale))


def shown_delta(scores: Sequence[tuple[float, float]], show: Callable[[float], float]) -> Delta:
    """Return the difference of two means as they are shown, such as perplexities, with its interval over pairs.

    scores: the pairs (the method's score, the full cache's).
    show: the function from a mean to the number shown.
    """

    def difference(means: stats.Pairs) -> float:
        method_mean, full_mean = means
        return show(float(method_mean)) - show(float(full_mean))

    # [examples, 2]
    pairs = np.array(scores)
    return Delta(difference(pairs.mean(0)), stats.jackknife_interval(pairs, difference))


def _average_differences(
    by_task: Sequence[Mapping[str, float]], full_by_task: Sequence[Mapping[str, float]], scale: float
) -> Delta | None:
    """Return the mean over tasks of the paired differences to the full cache, with its interval.

    by_task: the method's scores in [0, 1] of each task, by example.
    full_by_task: the full cache's scores, in the same form.
    scale: the factor from scores to printed units.

    Return None if a task has no pairs.
    """
    # each task has a difference for each example that both answered
    differences: list[list[float]] = []
    for scores, full_scores in zip(by_task, full_by_task, strict=True):
        paired = [example for example in scores if example in full_scores]
        differences.append([scores[example] - full_scores[example] for example in paired])
    if not all(differences):
        return None
    # a difference of two scores in [0, 1] lies in [-1, 1]
    mean, ci = stats.mean_over_tasks(differences, bounds=(-1.0, 1.0))
    return Delta(scale * mean, stats.scaled(ci, scale))


def summarise_row(
    cells: Sequence[CellSummary],
    by_task: Sequence[Mapping[str, float]],
    full_by_task: Sequence[Mapping[str, float]] | None,
) -> RowMeans:
    """Return the means of one method over all its measured cells, at least one.

    by_task: the method's scores of each task, by example.
    full_by_task: the full cache's scores in the same form; None for the full cache itself.

    Tokens, bytes and seconds are weighted by each cell's number of prompts. The score counts every cell alike.
    """
    score_mean, score_ci, delta = _average_scores(cells, by_task, full_by_task)
    weights = [c.n for c in cells]
    prompt_tokens = _average_weighted([c.prompt_tokens for c in cells], weights)
    payload16 = _average_weighted([c.payload16 for c in cells], weights)
    overhead16 = _average_weighted([c.overhead16 for c in cells], weights)
    full16 = _average_weighted([c.full16 for c in cells], weights)
    nominal = _average_weighted_if_complete([c.nominal for c in cells], weights)
    attended = _average_weighted_if_complete([c.attended for c in cells], weights)
    return RowMeans(
        score_mean=score_mean,
        score_ci=score_ci,
        delta=delta,
        kept_percent=100 * _average_weighted([c.kept for c in cells], weights) / prompt_tokens,
        nominal_percent=_in_percent(nominal, prompt_tokens),
        attended_percent=_in_percent(attended, prompt_tokens),
        payload=_average_weighted([c.payload for c in cells], weights),
        overhead=_average_weighted([c.overhead for c in cells], weights),
        held16=payload16 + overhead16,
        payload_kv_head=_average_weighted_if_complete([c.payload_kv_head for c in cells], weights),
        payload_query_head=_average_weighted_if_complete([c.payload_query_head for c in cells], weights),
        percent_of_full=share(payload16, overhead16, full16),
        payload_percent_of_full=100 * payload16 / full16,
        prefill_ms=1000 * _average_weighted([c.timing.prefill_s for c in cells], weights),
        compress_ms=1000 * _average_weighted([c.timing.compress_s for c in cells], weights),
        decode_ms_per_token=1000 * _average_weighted([c.timing.decode_s_per_token for c in cells], weights),
        pages_freed=PagesFreed.mean([c.pages_freed for c in cells], weights),
        compressed_percent=_average_weighted_if_complete([c.compressed_percent for c in cells], weights),
    )


def _average_scores(
    cells: Sequence[CellSummary],
    by_task: Sequence[Mapping[str, float]],
    full_by_task: Sequence[Mapping[str, float]] | None,
) -> tuple[float | None, stats.Interval | None, Delta | None]:
    """Return the mean over tasks of a method's scores, its interval, and its difference to the full cache.

    All are None if the tasks' scores have no common unit, or if a cell has no score. The parameters are those of
    ``summarise_row``.
    """
    scores = [c.score for c in cells if c.score is not None]
    # a mean of points and of perplexities would mean nothing
    has_one_unit = len({metric(c.metric).formula for c in cells}) == 1
    if len(scores) < len(cells) or not has_one_unit:
        return None, None, None
    # any of the cells' metrics will do, since all print scores in one unit
    score_metric = metric(cells[0].metric)
    interval, delta = None, None
    # a perplexity is a function of a mean, so its interval is no mean of scores; a task without scores has no spread
    if score_metric.formula is None and all(by_task):
        _, ci = stats.mean_over_tasks([list(scores_of_task.values()) for scores_of_task in by_task])
        interval = stats.scaled(ci, score_metric.scale)
        if full_by_task is not None:
            delta = _average_differences(by_task, full_by_task, score_metric.scale)
    return fmean(scores), interval, delta


def _average_weighted(values: Sequence[float], weights: Sequence[int]) -> float:
    """Return the mean of the values, each weighted by its number of prompts: sum_i w_i x_i / sum_i w_i."""
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


def _average_weighted_if_complete(values: Sequence[float | None], weights: Sequence[int]) -> float | None:
    """Return the weighted mean of the values, or None if one of them is None."""
    present = [value for value in values if value is not None]
    if len(present) < len(values):
        return None
    return _average_weighted(present, weights)


def _in_percent(tokens: float | None, prompt_tokens: float) -> float | None:
    if tokens is None:
        return None
    return 100 * tokens / prompt_tokens
