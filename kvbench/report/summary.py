"""Summarise stored samples into a report: scores, paired differences, tokens, bytes and times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np

from kvbench.methods.core.chain import Chain
from kvbench.plan.advice import LITTLE_LEFT, about_floors, at_floor
from kvbench.plan.cells import Cell, Group
from kvbench.report.report import CellResult, Delta, Report, ReportColumn, ReportRow, RowMeans
from kvbench.store.fidelity import KINDS, FidelitySummary, diverges, summarise_texts
from kvbench.store.labels import fields
from kvbench.store.results import BucketScore, CellSummary, MeanTiming, Sample, share
from kvbench.store.store import ResultStore
from kvbench.store.turns import Contexts, fall_beside, summarise_turns
from kvbench.tasks.longbench import BUCKETS
from kvbench.tasks.metrics import metric, stats
from kvbench.tasks.metrics.stats import FEWEST

MANY_EMPTY = 0.25
"""The share of empty answers of the full cache from which a note says so."""
UNCHANGED = 0.99
"""The share of prompts on which a method must do what the full cache does for its row to say so."""


def summarise(samples: Sequence[Sample], name: str, of: int) -> CellSummary:
    """Return the means over the samples of one cell, which is scored by the metric ``name`` and has ``of`` examples."""
    show = metric(name).show
    scored = [float(s.score) for s in samples if s.score is not None]
    # an answer of one token attends nothing while decoding
    attended = [s.attended for s in samples if s.attended is not None]
    # a likelihood has no bounds
    bounds = None if metric(name).shown else (0.0, 1.0)
    interval = stats.mean_interval(scored, bounds=bounds) if len(scored) >= FEWEST else None
    payload16, overhead16, full16 = (
        fmean(values) for values in zip(*((s.payload16, s.overhead16, s.full16) for s in samples), strict=True)
    )
    factors = [s.timing.batch_factor for s in samples if s.timing.batch_factor is not None]
    buckets = {}
    for bucket, _ in BUCKETS:
        scores = [s.score for s in samples if s.meta.get("bucket") == bucket]
        known_scores = [x for x in scores if x is not None]
        if scores:
            buckets[bucket] = BucketScore(
                len(scores), show(sum(known_scores) / len(known_scores)) if known_scores else None
            )
    return CellSummary(
        metric=name,
        n=len(samples),
        of=of,
        unscored=len(samples) - len(scored),
        score=show(fmean(scored)) if scored else None,
        ci=(show(interval[0]), show(interval[1])) if interval else None,
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
        attended=fmean(attended) if attended else None,
        buckets=buckets,
        timing=MeanTiming(
            prefill_s=fmean(s.timing.prefill_s for s in samples),
            compress_s=fmean(s.timing.compress_s for s in samples),
            decode_s_per_token=sum(s.timing.decode_s for s in samples) / max(1, sum(s.new_tokens for s in samples)),
            batch_factor=fmean(factors) if factors else None,
        ),
        new_tokens=fmean(s.new_tokens for s in samples),
        empty=sum(not s.prediction.strip() for s in samples if s.score is not None and not s.turns),
        fidelity=_fidelity(samples),
        questions=summarise_turns(_contexts(samples), name, [s.payload + s.overhead for s in samples]),
    )


def _contexts(samples: Iterable[Sample]) -> Contexts:
    """Return the answers to each context's questions, {} if the samples are of prompts with one."""
    return {s.id: s.turns for s in samples if s.turns}


def _fidelity(samples: Sequence[Sample]) -> dict[str, FidelitySummary]:
    """Return the fidelity of a cell by kind of text, without the kinds that no sample has."""
    texts = {kind: [s.fidelity[kind] for s in samples if s.fidelity and kind in s.fidelity] for kind in KINDS}
    summaries = {kind: summarise_texts(some) for kind, some in texts.items()}
    return {kind: summary for kind, summary in summaries.items() if summary is not None}


def _mean_if_complete(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values, or None if one of them is None."""
    present = [x for x in values if x is not None]
    return fmean(present) if len(present) == len(values) else None


def collect(groups: Sequence[Group], store: ResultStore) -> Report:
    """Return the report of these groups, with neither the model nor the settings of the run.

    Only the examples of this run count. A delta is the paired difference to the full cache, over the examples that the
    cell and the full cache both have.
    """
    rows = []
    for label in dict.fromkeys(c.label for g in groups for c in g.cells):
        cells = tuple(measured(g, next(c for c in g.cells if c.label == label), store) for g in groups)
        summaries = [c.summary for c in cells if c.summary is not None]
        means = None
        if summaries:
            is_full = not any(c.chain.stages for g in groups for c in g.cells if c.label == label)
            baseline = None if is_full else _scores(groups, "", store)
            means = _row_means(summaries, _scores(groups, label, store), baseline)
        rows.append(ReportRow(label, any(c.evicts for c in cells), cells, means))
    columns = tuple(
        ReportColumn(g.column, g.task.metric, g.task.category, any(bool(r.cells[i].floor) for r in rows))
        for i, g in enumerate(groups)
    )
    notes = about_floors([c.task for c in columns if c.floor], len(columns)) if len(rows) > 1 else []
    notes += [*_about_cuts(groups, rows, store), *_about_unscored(rows), *_about_empty(groups, rows)]
    notes += _about_batches(rows)
    # what a budget while decoding does shows over a long answer, and in when it ends
    if any(c.chain.evictor is not None and c.chain.evictor.every for g in groups for c in g.cells):
        notes += _about_lengths(rows)
    return Report("", "", columns, tuple(rows), tuple(notes), str(store.root), apart=_apart(groups, store))


def _about_cuts(groups: Sequence[Group], rows: Sequence[ReportRow], store: ResultStore) -> list[str]:
    """Return a note for each task whose prompts were cut to a small part of their tokens."""
    notes = []
    for i, group in enumerate(groups):
        measured_cell = next((r.cells[i].cell for r in rows if r.cells[i].summary is not None), None)
        samples = store.samples(measured_cell) if measured_cell is not None else {}
        cut = [s for e in group.examples if (s := samples.get(e.id)) is not None and s.cut]
        left, whole = sum(s.n for s in cut), sum(s.n + s.cut for s in cut)
        if left < LITTLE_LEFT * whole:
            notes.append(
                f"{group.column}: {len(cut)} of {len(group.examples)} prompts were cut, in all to {left:,} of "
                f"{whole:,} tokens (the model's context or max_length=): what is asked for may be cut out."
            )
    return notes


def _about_unscored(rows: Sequence[ReportRow]) -> list[str]:
    """Return a note for each task with references that its metric cannot score."""
    most: dict[str, CellSummary] = {}
    for cell in (c for r in rows for c in r.cells):
        if cell.summary is not None and cell.summary.unscored > (most[cell.task].unscored if cell.task in most else 0):
            most[cell.task] = cell.summary
    return [
        f"{task}: {s.unscored} of {s.n} answers have no score: {s.metric} ({metric(s.metric).description}) cannot read "
        "their references. Means are of the others."
        for task, s in most.items()
    ]


def _about_empty(groups: Sequence[Group], rows: Sequence[ReportRow]) -> list[str]:
    """Return a note for each task of which many of the full cache's answers are empty: the model says nothing there."""
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
    """Return the note that decode batches took more memory than their rows' tokens, or [] if they did not."""
    summaries = [c.summary for r in rows for c in r.cells if c.summary is not None]
    factors = [s.timing.batch_factor for s in summaries if s.timing.batch_factor]
    if not factors or max(factors) < 1.05:
        return []
    least, most = f"{min(factors):.1f}", f"{max(factors):.1f}"
    times = most if least == most else f"{least} to {most}"
    return [
        f"While decoding, a batch took {times} times the key and value bytes of its "
        "rows (padding, free slots, positions, room for the answer); bytes in tables are those of tokens."
    ]


def _about_lengths(rows: Sequence[ReportRow]) -> list[str]:
    """Return the note on how long each method's answers are, and how many tokens a head held at most."""
    lengths = []
    for row in rows:
        summaries = [c.summary for c in row.cells if c.summary is not None]
        if summaries:
            tokens = sum((s.new_tokens or 0) * s.n for s in summaries) / sum(s.n for s in summaries)
            peak = max(s.decode_peak or 0 for s in summaries)
            lengths.append(f"{row.method} {tokens:.1f} (at most {peak} held)")
    return (
        [f"Tokens of an answer, mean, and the most that a head held meanwhile: {', '.join(lengths)}."]
        if lengths
        else []
    )


def measured(group: Group, cell: Cell, store: ResultStore) -> CellResult:
    """Return the table entry of one cell: its summary over this run's examples, or the reason why there is none."""
    result = CellResult(group.column, cell.id, "missing", cell.chain.evicts, fields(cell.identity))
    damage = store.damage(cell.id)
    if damage is not None:
        return replace(result, status="failed", reason=damage, damaged=True)
    refusal = store.refusal(cell.id)
    if refusal is not None:
        return replace(result, status="refused", reason=refusal)
    ids = {e.id for e in group.examples}
    samples = {i: s for i, s in store.samples(cell.id).items() if i in ids}
    status = store.status(cell.id) if len(samples) < len(ids) else None
    if status is not None and status.status == "failed":
        return replace(result, status="failed", reason=status.reason)
    if not samples:
        return result
    floor = None
    if not cell.chain.stages:
        floor = at_floor(group.task, [s.score for s in samples.values() if s.score is not None])
    summary = summarise(list(samples.values()), group.task.metric, len(group.task.examples))
    return replace(
        result,
        status="measured",
        floor=floor,
        summary=summary,
        delta=_delta(group, cell, samples, store),
        fall_beside_full=_fall_beside_full(group, cell, samples, store),
        unchanged=is_unchanged(cell, samples, store),
    )


def is_unchanged(cell: Cell, samples: Mapping[str, Sample], store: ResultStore) -> bool:
    """Return True if a method compressed nothing: on UNCHANGED of prompts its cache and answer are the full cache's.

    Return False where no prompt has an answer of the full cache, and for a method that ``only_compresses`` is not true
    of.
    """
    if not only_compresses(cell.chain):
        return False
    baseline = store.samples(cell.full.id)
    by_query_head = cell.chain.per == "query_head"
    equal = [_same_as_full(sample, baseline[i], by_query_head) for i, sample in samples.items() if i in baseline]
    return bool(equal) and sum(equal) >= UNCHANGED * len(equal)


def nothing_compressed(group: Group, cell: Cell, store: ResultStore) -> bool:
    """Return ``is_unchanged`` of a cell's stored answers to the examples of a group."""
    ids = {e.id for e in group.examples}
    return is_unchanged(cell, {i: s for i, s in store.samples(cell.id).items() if i in ids}, store)


def only_compresses(chain: Chain) -> bool:
    """Return True for a method that has done nothing where it holds all tokens and bytes and answers as the full cache.

    One that attends only some of the tokens that it holds, or shares logits among heads, does something else.
    """
    if not chain.stages or chain.masks or chain.sharer is not None:
        return False
    # the most tokens held are of the layer that holds most: where some layers are spared, that tells nothing of others
    return not (chain.evicts and any(getattr(s, "frozen_layers", ()) for s in chain.stages))


def _same_as_full(sample: Sample, full: Sample, by_query_head: bool) -> bool:
    """Return True if a method's sample holds no token and no byte less than the full cache's, and answers alike.

    ``by_query_head`` says that keys and values were repeated for query heads, so that the full cache's count as often.
    """
    whole = sample.kept >= sample.n and (sample.decode_peak or 0) >= (full.decode_peak or 0)
    size = full.payload16
    if by_query_head and full.payload_kv_head and full.payload_query_head:
        size *= full.payload_query_head / full.payload_kv_head
    same_answer = (sample.prediction, sample.score) == (full.prediction, full.score)
    differs = any(map(diverges, (sample.fidelity or {}).values()))
    return whole and sample.payload16 >= size and same_answer and not differs


def _fall_beside_full(group: Group, cell: Cell, samples: dict[str, Sample], store: ResultStore) -> Delta | None:
    """Return a method's fall from a context's first question to its last minus the full cache's, if there are both."""
    full = next((c for c in group.cells if not c.chain.stages), None)
    if full is None or not cell.chain.stages or store.refusal(full.id) is not None:
        return None
    contexts = _contexts(samples.values())
    difference = fall_beside(contexts, _contexts(store.samples(full.id).values()), group.task.metric)
    return None if difference is None else Delta(*difference)


def _delta(group: Group, cell: Cell, samples: dict[str, Sample], store: ResultStore) -> Delta | None:
    """Return the paired difference to the full cache in printed units.

    Return None for the full cache itself, without a full cache to compare with, or if no example is scored by both.
    """
    full = next((c for c in group.cells if not c.chain.stages), None)
    if full is None or not cell.chain.stages or store.refusal(full.id) is not None:
        return None
    baseline = store.samples(full.id)
    pairs = [(s.score, baseline[i].score) for i, s in samples.items() if i in baseline]
    scores = [(float(a), float(b)) for a, b in pairs if a is not None and b is not None]
    if not scores:
        return None
    printed = metric(group.task.metric)
    if printed.shown is not None:
        return shown_delta(scores, printed.show)
    mean, ci = stats.paired_difference([a for a, _ in scores], [b for _, b in scores])
    interval = (printed.scale * ci[0], printed.scale * ci[1]) if ci and len(scores) >= FEWEST else None
    return Delta(printed.scale * mean, interval)


def shown_delta(scores: Sequence[tuple[float, float]], show: Callable[[float], float]) -> Delta:
    """Return the difference of two means as they are shown (perplexities), with its interval over pairs."""

    def difference(means: stats.Pairs) -> float:
        return show(float(means[0])) - show(float(means[1]))

    pairs = np.array(scores)
    return Delta(difference(pairs.mean(0)), stats.jackknife_interval(pairs, difference))


def _scores(groups: Sequence[Group], label: str, store: ResultStore) -> list[dict[str, float]]:
    """Return the scores of a method's measured cells by example; those of the full cache where ``label`` is ''."""
    measured_cells = []
    for group in groups:
        cell = next((c for c in group.cells if (c.label == label if label else not c.chain.stages)), None)
        if cell is not None and store.refusal(cell.id) is None:
            samples = store.samples(cell.id)
            found = {e.id: x for e in group.examples if e.id in samples and (x := samples[e.id].score) is not None}
            measured_cells.append(found)
        else:
            measured_cells.append({})
    return measured_cells


def _mean_difference(
    scores: Sequence[dict[str, float]], full: Sequence[dict[str, float]], scale: float
) -> Delta | None:
    """Return the mean over tasks of the paired differences to the full cache, with its interval; None without pairs."""
    differences = []
    for ours, theirs in zip(scores, full, strict=True):
        differences.append([x - theirs[i] for i, x in ours.items() if i in theirs])
    if not all(differences):
        return None
    mean, ci = stats.mean_over_tasks(differences, (-1.0, 1.0))
    return Delta(scale * mean, ci and (scale * ci[0], scale * ci[1]))


def _row_means(
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
        return mean(present) if len(present) == len(cells) else None

    def percent(values: Sequence[float | None]) -> float | None:
        value = mean_if_complete(values)
        return None if value is None else 100 * value / prompt_tokens

    prompt_tokens = mean([c.prompt_tokens for c in cells])
    payload16, full16 = mean([c.payload16 for c in cells]), mean([c.full16 for c in cells])
    scores = [c.score for c in cells if c.score is not None]
    one_unit = len(scores) == len(cells) and len({metric(c.metric).shown for c in cells}) == 1
    score_ci, delta = None, None
    printed = metric(cells[0].metric)
    if one_unit and printed.shown is None and all(by_task):
        ci = stats.mean_over_tasks([list(some.values()) for some in by_task])[1]
        score_ci = ci and (printed.scale * ci[0], printed.scale * ci[1])
        if full is not None:
            delta = _mean_difference(by_task, full, printed.scale)
    return RowMeans(
        score_mean=fmean(scores) if one_unit else None,
        score_ci=score_ci,
        delta=delta,
        kept_percent=100 * mean([c.kept for c in cells]) / prompt_tokens,
        nominal_percent=percent([c.nominal for c in cells]),
        attended_percent=percent([c.attended for c in cells]),
        payload=mean([c.payload for c in cells]),
        overhead=mean([c.overhead for c in cells]),
        payload_kv_head=mean_if_complete([c.payload_kv_head for c in cells]),
        payload_query_head=mean_if_complete([c.payload_query_head for c in cells]),
        percent_of_full=share(payload16, mean([c.overhead16 for c in cells]), full16),
        payload_percent_of_full=100 * payload16 / full16,
        prefill_ms=1000 * mean([c.timing.prefill_s for c in cells]),
        compress_ms=1000 * mean([c.timing.compress_s for c in cells]),
        decode_ms_per_token=1000 * mean([c.timing.decode_s_per_token for c in cells]),
    )
