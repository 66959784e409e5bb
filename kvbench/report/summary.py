"""Summarise stored samples into a report: scores, paired differences, tokens, bytes and times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np

from kvbench.kv.pages import PagesFreed
from kvbench.methods.core.chain import Chain
from kvbench.plan.advice import LITTLE_LEFT, about_floors, at_floor
from kvbench.plan.cells import Group
from kvbench.report.data import CellResult, Delta, ReportColumn, ReportRow, RowMeans
from kvbench.report.report import Report
from kvbench.store.cell import Cell
from kvbench.store.fidelity import KINDS, FidelitySummary, diverges, summarise_texts
from kvbench.store.labels import fields
from kvbench.store.results import BucketScore, CellSummary, MeanTiming, Sample, share
from kvbench.store.store import ResultStore
from kvbench.store.turns import Contexts, fall_beside, summarise_turns
from kvbench.tasks.longbench import BUCKETS
from kvbench.tasks.metrics import metric, stats
from kvbench.tasks.metrics.means import shown_mean
from kvbench.tasks.metrics.stats import FEWEST

MANY_EMPTY = 0.25
"""The share of empty answers of the full cache from which a note says so."""
UNCHANGED = 0.99
"""The share of prompts on which a method must do what the full cache does for its row to say so."""


def summarise(samples: Sequence[Sample], name: str, of: int) -> CellSummary:
    """Return the means over the samples of one cell. The metric ``name`` scores it, and it has ``of`` examples."""
    show = metric(name).show
    scored = [float(s.score) for s in samples if s.score is not None]
    score, interval = shown_mean(name, scored)
    payload16 = fmean(s.payload16 for s in samples)
    overhead16 = fmean(s.overhead16 for s in samples)
    full16 = fmean(s.full16 for s in samples)
    return CellSummary(
        metric=name,
        n=len(samples),
        of=of,
        unscored=len(samples) - len(scored),
        score=score,
        ci=interval,
        prompt_tokens=fmean(s.n for s in samples),
        kept=fmean(s.kept for s in samples),
        nominal=_mean_if_complete([s.nominal for s in samples]),
        payload=fmean(s.payload for s in samples),
        overhead=fmean(s.overhead for s in samples),
        payload_kv_head=_mean_if_complete([s.payload_kv_head for s in samples]),
        payload_query_head=_mean_if_complete([s.payload_query_head for s in samples]),
        full_bytes=fmean(s.full_bytes for s in samples),
        payload16=payload16,
        overhead16=overhead16,
        full16=full16,
        percent_of_full=share(payload16, overhead16, full16),
        decode_peak=max((s.decode_peak for s in samples if s.decode_peak is not None), default=None),
        cut=sum(s.cut > 0 for s in samples),
        shrunk=sum(s.shrunk for s in samples),
        # an answer of one token attends nothing while decoding
        attended=_mean_of_present([s.attended for s in samples]),
        buckets=_bucket_scores(samples, show),
        timing=_mean_timing(samples),
        new_tokens=fmean(fmean(s.answer_lengths) for s in samples),
        empty=sum(not s.prediction.strip() for s in samples if s.score is not None and not s.turns),
        fidelity=_fidelity(samples),
        questions=summarise_turns(_contexts(samples), name, [s.payload + s.overhead for s in samples]),
        pages_freed=PagesFreed.mean([s.pages_freed for s in samples]),
    )


def _bucket_scores(samples: Sequence[Sample], show: Callable[[float], float]) -> dict[str, BucketScore]:
    """Return the mean score for each of LongBench-E's ranges of length that the samples have."""
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


def _mean_timing(samples: Sequence[Sample]) -> MeanTiming:
    """Return the mean seconds of the samples. Seconds a token = sum of decode seconds / sum of new tokens."""
    decode_s = sum(s.timing.decode_s for s in samples)
    new_tokens = sum(s.new_tokens for s in samples)
    return MeanTiming(
        prefill_s=fmean(s.timing.prefill_s for s in samples),
        compress_s=fmean(s.timing.compress_s for s in samples),
        decode_s_per_token=decode_s / max(1, new_tokens),
        batch_factor=_mean_of_present([s.timing.batch_factor for s in samples]),
    )


def _contexts(samples: Iterable[Sample]) -> Contexts:
    """Return the answers to each context's questions; {} if the samples' prompts have one question."""
    return {s.id: s.turns for s in samples if s.turns}


def _fidelity(samples: Sequence[Sample]) -> dict[str, FidelitySummary]:
    """Return the fidelity of a cell by kind of text, without kinds that no sample has."""
    summaries = {}
    for kind in KINDS:
        summary = summarise_texts([s.fidelity[kind] for s in samples if s.fidelity and kind in s.fidelity])
        if summary is not None:
            summaries[kind] = summary
    return summaries


def _mean_if_complete(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values, or None if one of them is None."""
    present = [x for x in values if x is not None]
    if len(present) < len(values):
        return None
    return fmean(present)


def _mean_of_present(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are not None, or None if all are None."""
    present = [x for x in values if x is not None]
    if not present:
        return None
    return fmean(present)


def collect(groups: Sequence[Group], store: ResultStore) -> Report:
    """Return the report of these groups, without the model and the settings of the run.

    Only the examples of this run count. A delta is the paired difference to the full cache, over the examples that the
    cell and the full cache both have.
    """
    # rows in the order in which the groups name them first
    labels: dict[str, None] = {}
    for group in groups:
        labels |= dict.fromkeys(cell.label for cell in group.cells)
    rows = [_row(label, groups, store) for label in labels]
    columns = []
    for i, group in enumerate(groups):
        # only the full cache's cell says whether its scores are at the floor
        at_floor = any(bool(row.cells[i].floor) for row in rows)
        columns.append(ReportColumn(group.column, group.task.metric, group.task.category, at_floor))
    notes = []
    if len(rows) > 1:
        notes += about_floors([c.task for c in columns if c.floor], len(columns))
    notes += _about_cuts(groups, rows, store)
    notes += _about_unscored(rows)
    notes += _about_empty(groups, rows)
    notes += _about_unended(groups, store)
    # a budget while decoding shows its effect over a long answer, and in when the answer ends
    evictors = []
    for group in groups:
        evictors += [cell.chain.evictor for cell in group.cells]
    if any(evictor is not None and evictor.every for evictor in evictors):
        notes += _about_lengths(rows)
    return Report(
        model="",
        settings="",
        columns=tuple(columns),
        rows=tuple(rows),
        notes=tuple(notes),
        results=str(store.root),
        remarks=tuple(_about_batches(rows)),
        apart=_apart(groups, store),
    )


def _row(label: str, groups: Sequence[Group], store: ResultStore) -> ReportRow:
    """Return the row of the method with a label, over all groups."""
    own_cells = []
    for group in groups:
        own_cells.append(next(cell for cell in group.cells if cell.label == label))
    cells = tuple(measured(group, cell, store) for group, cell in zip(groups, own_cells, strict=True))
    summaries = [c.summary for c in cells if c.summary is not None]
    means = None
    if summaries:
        baseline = None
        if any(cell.chain.stages for cell in own_cells):
            baseline = _scores(groups, "", store)
        means = row_means(summaries, _scores(groups, label, store), baseline)
    is_full = all(not cell.chain.stages for cell in own_cells)
    return ReportRow(label, any(c.evicts for c in cells), cells, means, is_full)


def _about_cuts(groups: Sequence[Group], rows: Sequence[ReportRow], store: ResultStore) -> list[str]:
    """Return a note for each task whose prompts were cut to a small part of their tokens."""
    notes = []
    for i, group in enumerate(groups):
        # all rows read the same prompts, so take the first measured row
        measured_cell = next((r.cells[i].cell for r in rows if r.cells[i].summary is not None), None)
        if measured_cell is None:
            continue
        samples = store.samples(measured_cell)
        cut = [samples[e.id] for e in group.examples if e.id in samples and samples[e.id].cut]
        tokens_left = sum(s.n for s in cut)
        tokens_before = sum(s.n + s.cut for s in cut)
        if tokens_left < LITTLE_LEFT * tokens_before:
            notes.append(
                f"{group.column}: {len(cut)} of {len(group.examples)} prompts were cut, in all to {tokens_left:,} of "
                f"{tokens_before:,} tokens (the model's context or max_length=): what is asked for may be cut out."
            )
    return notes


def _about_unscored(rows: Sequence[ReportRow]) -> list[str]:
    """Return a note for each task with references that its metric cannot score."""
    most_unscored: dict[str, CellSummary] = {}
    for row in rows:
        for cell in row.cells:
            if cell.summary is None or not cell.summary.unscored:
                continue
            known = most_unscored.get(cell.task)
            if known is None or cell.summary.unscored > known.unscored:
                most_unscored[cell.task] = cell.summary
    return [
        f"{task}: {s.unscored} of {s.n} answers have no score: {s.metric} ({metric(s.metric).description}) cannot read "
        "their references. Means are of the others."
        for task, s in most_unscored.items()
    ]


def _about_empty(groups: Sequence[Group], rows: Sequence[ReportRow]) -> list[str]:
    """Return a note for each task with many empty answers of the full cache. The model fails there."""
    notes = []
    for i, group in enumerate(groups):
        full = next((c.label for c in group.cells if not c.chain.stages), None)
        summary = next((r.cells[i].summary for r in rows if r.method == full), None)
        if summary is not None and summary.empty >= MANY_EMPTY * summary.n and not group.task.examples[0].tokens:
            notes.append(
                f"{group.column}: {summary.empty} of {summary.n} answers of the full cache are empty. min_new_tokens=1 "
                "asks for one; prompt=chat may help a chat model."
            )
    return notes


def _about_unended(groups: Sequence[Group], store: ResultStore) -> list[str]:
    """Return a note for each task of worked solutions with answers that were cut off: these may lack a result."""
    notes = []
    for group in groups:
        if not metric(group.task.metric).lengths:
            continue
        most = {example.id: example.max_new_tokens for example in group.examples}
        counts = []
        for cell in group.cells:
            if store.damage(cell.id) is not None:
                continue
            reached: list[bool] = []
            for i, sample in store.samples(cell.id).items():
                # the store may have samples of examples that this run leaves out
                if i in most:
                    reached += [length >= most[i] for length in sample.answer_lengths]
            if any(reached):
                counts.append(f"{cell.label} {sum(reached)} of {len(reached)}")
        if counts:
            notes.append(
                f"{group.column}: answers that reach max_new_tokens={max(most.values())} are cut off there and may "
                f"lack a final result: {', '.join(counts)}."
            )
    return notes


def _apart(groups: Sequence[Group], store: ResultStore) -> tuple[str, ...]:
    """Return the labels of cells that did not share the prefill of the first cell with the same key."""
    labels: dict[str, None] = {}
    for group in groups:
        first: dict[str, dict[str, float]] = {}
        for cell in group.cells:
            times = {i: sample.timing.prefill_s for i, sample in store.samples(cell.id).items()}
            # a user's methods read the prompts apart from all others
            key = f"{cell.chain.foreign_stages} {cell.chain.prefill_key}"
            shared = first.setdefault(key, times)
            if any(shared.get(i, seconds) != seconds for i, seconds in times.items()):
                labels[cell.label] = None
    return tuple(labels)


def _about_batches(rows: Sequence[ReportRow]) -> list[str]:
    """Return the note that decode batches took more memory than their rows' tokens; [] if they did not."""
    factors = []
    for row in rows:
        for cell in row.cells:
            if cell.summary is not None and cell.summary.timing.batch_factor:
                factors.append(cell.summary.timing.batch_factor)
    if not factors or max(factors) < 1.05:
        return []
    least, most = f"{min(factors):.1f}", f"{max(factors):.1f}"
    times = most
    if least != most:
        times = f"{least} to {most}"
    return [
        f"While decoding, a batch took {times} times the key and value bytes of its "
        "rows (padding, free slots, positions, room for the answer); bytes in tables are those of tokens."
    ]


def _about_lengths(rows: Sequence[ReportRow]) -> list[str]:
    """Return the note on the length of each method's answers, and the most tokens that a head held."""
    lengths = []
    for row in rows:
        summaries = [c.summary for c in row.cells if c.summary is not None]
        if summaries:
            tokens = sum((s.new_tokens or 0) * s.n for s in summaries) / sum(s.n for s in summaries)
            peak = max(s.decode_peak or 0 for s in summaries)
            lengths.append(f"{row.method} {tokens:.1f} (at most {peak} held)")
    if not lengths:
        return []
    return [f"Tokens of an answer, mean, and the most that a head held meanwhile: {', '.join(lengths)}."]


def measured(group: Group, cell: Cell, store: ResultStore) -> CellResult:
    """Return the table entry of one cell: its summary over this run's examples, or the reason why it has no summary."""
    result = CellResult(group.column, cell.id, "missing", cell.chain.evicts, fields(cell.identity))
    damage = store.damage(cell.id)
    if damage is not None:
        return replace(result, status="failed", reason=damage, damaged=True)
    refusal = store.refusal(cell.id)
    if refusal is not None:
        return replace(result, status="refused", reason=refusal)
    ids = {e.id for e in group.examples}
    samples = {i: s for i, s in store.samples(cell.id).items() if i in ids}
    if len(samples) < len(ids):
        status = store.status(cell.id)
        if status is not None and status.status == "failed":
            return replace(result, status="failed", reason=status.reason)
    if not samples:
        return result
    floor = None
    if not cell.chain.stages:
        floor = at_floor(group.task, [s.score for s in samples.values() if s.score is not None])
    summary = summarise(list(samples.values()), group.task.metric, len(group.task.examples))
    full_samples = _full_samples(group, cell, store)
    return replace(
        result,
        status="measured",
        floor=floor,
        summary=summary,
        delta=None if full_samples is None else paired_delta(samples, full_samples, group.task.metric),
        fall_beside_full=None if full_samples is None else _fall_beside_full(group, samples, full_samples),
        unchanged=is_unchanged(cell, samples, store),
    )


def is_unchanged(cell: Cell, samples: Mapping[str, Sample], store: ResultStore) -> bool:
    """Return True if a method compressed nothing: for UNCHANGED of prompts, cache and answer equal the full cache's.

    Return False if no prompt has an answer of the full cache, and for a method that fails ``only_compresses``.
    """
    if not only_compresses(cell.chain):
        return False
    if not any(_keeps_all_tokens(sample) for sample in samples.values()):
        # most methods drop tokens of every prompt: then the full cache's answers need not be read
        return False
    baseline = store.samples(cell.full.id)
    by_query_head = cell.chain.per == "query_head"
    equal = [same_as_full(sample, baseline[i], by_query_head) for i, sample in samples.items() if i in baseline]
    return bool(equal) and sum(equal) >= UNCHANGED * len(equal)


def nothing_compressed(group: Group, cell: Cell, store: ResultStore) -> bool:
    """Return ``is_unchanged`` for a cell's stored answers to the examples of a group."""
    ids = {e.id for e in group.examples}
    return is_unchanged(cell, {i: s for i, s in store.samples(cell.id).items() if i in ids}, store)


def only_compresses(chain: Chain) -> bool:
    """Return True if a method did nothing whenever it holds all tokens and bytes and answers as the full cache.

    A method that attends only some of the tokens it holds, or shares logits among heads, does something else.
    """
    if not chain.stages or chain.masks or chain.sharer is not None:
        return False
    # the most tokens held belong to the layer that holds most; if some layers are spared, they hide the others
    return not (chain.evicts and any(getattr(s, "frozen_layers", ()) for s in chain.stages))


def _keeps_all_tokens(sample: Sample) -> bool:
    """Return True if a method kept every token of a prompt."""
    return sample.kept >= sample.n


def same_as_full(sample: Sample, full: Sample, by_query_head: bool = False) -> bool:
    """Return True if a method's sample holds no fewer tokens and bytes than the full cache's, and answers alike.

    With ``by_query_head``, keys and values were repeated for query heads, so the full cache's count as often.
    """
    keeps_all = _keeps_all_tokens(sample) and (sample.decode_peak or 0) >= (full.decode_peak or 0)
    size = full.payload16
    if by_query_head and full.payload_kv_head and full.payload_query_head:
        size *= full.payload_query_head / full.payload_kv_head
    same_answer = (sample.prediction, sample.score) == (full.prediction, full.score)
    differs = any(map(diverges, (sample.fidelity or {}).values()))
    return keeps_all and sample.payload16 >= size and same_answer and not differs


def _full_samples(group: Group, cell: Cell, store: ResultStore) -> dict[str, Sample] | None:
    """Return the full cache's samples, with which those of a method in the group are compared.

    Return None for the full cache itself, and without a full cache to compare with.
    """
    full = next((c for c in group.cells if not c.chain.stages), None)
    if full is None or not cell.chain.stages or store.refusal(full.id) is not None:
        return None
    return store.samples(full.id)


def _fall_beside_full(group: Group, samples: Mapping[str, Sample], full_samples: Mapping[str, Sample]) -> Delta | None:
    """Return a method's fall from a context's first question to its last minus the full cache's, if both exist."""
    difference = fall_beside(_contexts(samples.values()), _contexts(full_samples.values()), group.task.metric)
    if difference is None:
        return None
    mean, interval = difference
    return Delta(mean, interval)


def paired_delta(samples: Mapping[str, Sample], full_samples: Mapping[str, Sample], name: str) -> Delta | None:
    """Return the mean paired difference to the full cache in printed units of the metric ``name``; None without pairs.

    ``samples`` and ``full_samples`` are the method's and the full cache's answers by example.
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
    printed = metric(name)
    if printed.shown is not None:
        return shown_delta(list(zip(ours, full_scores, strict=True)), printed.show)
    mean, ci = stats.paired_difference(ours, full_scores)
    interval = None
    if ci and len(ours) >= FEWEST:
        interval = (printed.scale * ci[0], printed.scale * ci[1])
    return Delta(printed.scale * mean, interval)


def shown_delta(scores: Sequence[tuple[float, float]], show: Callable[[float], float]) -> Delta:
    """Return the difference of two means as they are shown (perplexities), with its interval over pairs."""

    def difference(means: stats.Pairs) -> float:
        return show(float(means[0])) - show(float(means[1]))

    pairs = np.array(scores)
    return Delta(difference(pairs.mean(0)), stats.jackknife_interval(pairs, difference))


def _scores(groups: Sequence[Group], label: str, store: ResultStore) -> list[dict[str, float]]:
    """Return the scores of a method's measured cells by example. With ``label`` '' return the full cache's scores."""
    scores_by_task = []
    for group in groups:
        if label:
            cell = next((c for c in group.cells if c.label == label), None)
        else:
            cell = next((c for c in group.cells if not c.chain.stages), None)
        scores = {}
        if cell is not None and store.refusal(cell.id) is None:
            samples = store.samples(cell.id)
            for example in group.examples:
                sample = samples.get(example.id)
                if sample is not None and sample.score is not None:
                    scores[example.id] = sample.score
        scores_by_task.append(scores)
    return scores_by_task


def _mean_difference(
    scores: Sequence[dict[str, float]], full: Sequence[dict[str, float]], scale: float
) -> Delta | None:
    """Return the mean over tasks of the paired differences to the full cache, with its interval; None without pairs."""
    differences = []
    for ours, full_scores in zip(scores, full, strict=True):
        differences.append([x - full_scores[example] for example, x in ours.items() if example in full_scores])
    if not all(differences):
        return None
    mean, ci = stats.mean_over_tasks(differences, (-1.0, 1.0))
    if ci is None:
        return Delta(scale * mean, None)
    return Delta(scale * mean, (scale * ci[0], scale * ci[1]))


def row_means(
    cells: Sequence[CellSummary], by_task: Sequence[dict[str, float]], full: Sequence[dict[str, float]] | None
) -> RowMeans:
    """Return the means of one method over all its measured cells. Each cell is weighted by its number of prompts.

    ``by_task`` and ``full`` are the method's and the full cache's scores of each task, by example; ``full`` is None for
    the full cache itself.
    """
    total = sum(c.n for c in cells)

    def mean(values: Sequence[float]) -> float:
        return sum(value * c.n for value, c in zip(values, cells, strict=True)) / total

    def mean_if_complete(values: Sequence[float | None]) -> float | None:
        present = [x for x in values if x is not None]
        if len(present) < len(cells):
            return None
        return mean(present)

    def percent(values: Sequence[float | None]) -> float | None:
        tokens = mean_if_complete(values)
        if tokens is None:
            return None
        return 100 * tokens / prompt_tokens

    prompt_tokens = mean([c.prompt_tokens for c in cells])
    payload16 = mean([c.payload16 for c in cells])
    full16 = mean([c.full16 for c in cells])
    overhead16 = mean([c.overhead16 for c in cells])
    scores = [c.score for c in cells if c.score is not None]
    # a mean of points and of perplexities would mean nothing
    one_unit = len(scores) == len(cells) and len({metric(c.metric).shown for c in cells}) == 1
    score_mean, score_ci, delta = None, None, None
    if one_unit:
        score_mean = fmean(scores)
    printed = metric(cells[0].metric)
    if one_unit and printed.shown is None and all(by_task):
        ci = stats.mean_over_tasks([list(scores_of_task.values()) for scores_of_task in by_task])[1]
        if ci is not None:
            score_ci = (printed.scale * ci[0], printed.scale * ci[1])
        if full is not None:
            delta = _mean_difference(by_task, full, printed.scale)
    return RowMeans(
        score_mean=score_mean,
        score_ci=score_ci,
        delta=delta,
        kept_percent=100 * mean([c.kept for c in cells]) / prompt_tokens,
        nominal_percent=percent([c.nominal for c in cells]),
        attended_percent=percent([c.attended for c in cells]),
        payload=mean([c.payload for c in cells]),
        overhead=mean([c.overhead for c in cells]),
        held16=payload16 + overhead16,
        payload_kv_head=mean_if_complete([c.payload_kv_head for c in cells]),
        payload_query_head=mean_if_complete([c.payload_query_head for c in cells]),
        percent_of_full=share(payload16, overhead16, full16),
        payload_percent_of_full=100 * payload16 / full16,
        prefill_ms=1000 * mean([c.timing.prefill_s for c in cells]),
        compress_ms=1000 * mean([c.timing.compress_s for c in cells]),
        decode_ms_per_token=1000 * mean([c.timing.decode_s_per_token for c in cells]),
        pages_freed=PagesFreed.mean([c.pages_freed for c in cells], [c.n for c in cells]),
    )
