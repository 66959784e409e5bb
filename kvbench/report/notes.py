"""The notes of a report: what a reader must know to read the scores, and how they were measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter

from kvbench.base.formatting import format_number, format_percent
from kvbench.engine import precision
from kvbench.models import load
from kvbench.plan.advice import LITTLE_LEFT
from kvbench.plan.cells import Group
from kvbench.plan.run_plan import RunPlan
from kvbench.report.data import ReportRow
from kvbench.store.results import CellRecord, CellSummary, Sample
from kvbench.store.sample_reader import SampleReader
from kvbench.tasks.metrics import metric
from kvbench.tasks.spread import describe_left_out

MANY_EMPTY = 0.25
"""If at least this share of the full cache's answers is empty, a note says so."""


def note_model(prepared: RunPlan) -> list[str]:
    """Return notes on a model whose scores say little: the tiny model on real text, and random weights."""
    cfg = prepared.cfg
    notes = []
    # a task named "tiny" is made for the tiny model, whatever dataset it belongs to
    real_datasets = {dataset.name for dataset in cfg.datasets if set(dataset.tasks) != {"tiny"}} - {"tiny"}
    if cfg.model.path == "embedded:tiny" and real_datasets:
        names = ", ".join(sorted(real_datasets))
        notes.append(f"The tiny model was trained on synthetic text only, not on text like that of {names}.")
    if cfg.model.weights == "random":
        notes.append("Random weights: scores mean nothing, only bytes and times do.")
    return notes


def note_examples(prepared: RunPlan) -> list[str]:
    """Return notes on examples that do not count, since another shard has them or ``limit`` leaves them out."""
    cfg = prepared.cfg
    if cfg.shards > 1:
        # a shard lacks most examples anyway, so a list of those beyond the limit would mislead
        return [f"Shard {cfg.shard} of {cfg.shards}: the other shards' examples are not counted here."]
    notes = []
    for group in prepared.groups:
        missing_parts = describe_left_out(group.examples, group.task.examples, group.task.grid)
        if missing_parts:
            parts = " and ".join(missing_parts)
            notes.append(f"{group.task.id}: limit={len(group.examples)} leaves out {parts}.")
    return notes


def note_precision(prepared: RunPlan, records: Sequence[CellRecord]) -> list[str]:
    """Return notes on the dtype: whether another suits this machine better, and how much rounding alone changes."""
    configured = prepared.cfg.model.dtype
    device = load.resolve_device(prepared.cfg.device)
    notes = []
    # the tiny model is fast in any dtype, so its default needs no advice
    is_tiny_default = prepared.cfg.model.path == "embedded:tiny" and configured == "auto"
    if not is_tiny_default and precision.has_better_dtype(configured, prepared.dtype, device):
        notes.append(f"Dtype {precision.explain_dtype(configured, prepared.dtype, device)}.")
    # a run may have compared its dtype with another one, to see how much rounding alone changes
    comparisons = []
    for record in records:
        comparisons += [facts["rounding"] for facts in record.provenance if "rounding" in facts]
    # the comparison with most prompts is the most reliable of several runs'
    if comparisons:
        largest = max(comparisons, key=itemgetter("prompts"))
        notes.append(precision.describe_rounding(largest, prepared.dtype))
    return notes


def note_reading(records: Sequence[CellRecord]) -> list[str]:
    """Return the note that prompts were read in pieces; [] if none was."""
    # samples may come from several runs with different sizes of pieces
    sizes = set()
    for record in records:
        for facts in record.provenance:
            batch = facts.get("batch", {})
            if "shared_prefix" in batch:
                sizes.add(int(batch["shared_prefix"]))
    if not sizes:
        return []
    pieces = " and ".join(str(size) for size in sorted(sizes))
    return [
        f"Prompts were read in pieces of {pieces} tokens (shared_prefix). Pieces that a prompt shares with the one "
        "before it were read once; prefill ms counts them for both."
    ]


def note_cuts(group: Group, samples: Mapping[str, Sample]) -> list[str]:
    """Return the note that a task's prompts were cut to a small part of their tokens; [] if they were not.

    ``samples`` are the samples of one cell by example. All methods read the same prompts, so any cell will do.
    """
    cut_samples = []
    for example in group.examples:
        sample = samples.get(example.id)
        if sample is not None and sample.cut:
            cut_samples.append(sample)
    tokens_left = sum(sample.n for sample in cut_samples)
    tokens_before = sum(sample.n + sample.cut for sample in cut_samples)
    # if no prompt was cut, both are 0
    if tokens_left >= LITTLE_LEFT * tokens_before:
        return []
    return [
        f"{group.column}: {len(cut_samples)} of {len(group.examples)} prompts were cut, in all to {tokens_left:,} of "
        f"{tokens_before:,} tokens (the model's context or max_length=): what is asked for may be cut out."
    ]


def note_unscored(rows: Sequence[ReportRow]) -> list[str]:
    """Return a note for each task with references that its metric cannot score.

    Methods may have answered different numbers of prompts, so the note is about the row with most unscored answers.
    """
    most_unscored: dict[str, CellSummary] = {}
    for row in rows:
        for cell in row.cells:
            if cell.summary is None or not cell.summary.unscored:
                continue
            previous = most_unscored.get(cell.task)
            if previous is None or cell.summary.unscored > previous.unscored:
                most_unscored[cell.task] = cell.summary
    notes = []
    for task, summary in most_unscored.items():
        metric_text = f"{summary.metric} ({metric(summary.metric).description})"
        notes.append(
            f"{task}: {summary.unscored} of {summary.n} answers have no score: {metric_text} cannot read their "
            "references. Means are of the others."
        )
    return notes


def note_empty(groups: Sequence[Group], rows: Sequence[ReportRow]) -> list[str]:
    """Return a note for each task with many empty answers of the full cache. The model fails there."""
    notes = []
    for i, group in enumerate(groups):
        full = group.full_cell
        if full is None:
            continue
        full_row = next(row for row in rows if row.method == full.label)
        summary = full_row.cells[i].summary
        # a text that is scored by its likelihood has no answer, and so no empty one
        if summary is None or group.task.examples[0].scored:
            continue
        if summary.empty >= MANY_EMPTY * summary.n:
            notes.append(
                f"{group.column}: {summary.empty} of {summary.n} answers of the full cache are empty. min_new_tokens=1 "
                "asks for one; prompt=chat may help a chat model."
            )
    return notes


def note_thoughts(rows: Sequence[ReportRow]) -> list[str]:
    """Return a note for each task with answers that end inside their thought: which share of each method's."""
    shares: dict[str, list[str]] = {}
    for row in rows:
        for cell in row.cells:
            if cell.summary is not None and cell.summary.cut_thoughts:
                shares.setdefault(cell.task, []).append(
                    f"{row.method} {format_percent(100 * cell.summary.cut_thoughts)}"
                )
    notes = []
    for task, texts in shares.items():
        notes.append(f"{task}: answers that end inside their thought, and score as empty ones: {', '.join(texts)}.")
    return notes


def note_faults(group: Group, reader: SampleReader) -> list[str]:
    """Return the note on the fault of published scripts that a task's scores keep: which share of answers it concerns.

    Return [] if there is none, or if it concerns no answer.
    """
    task, rule = group.task, metric(group.task.metric)
    fault, remedy = rule.fault, f"metric {rule.mended}, rules=mended of LongBench's datasets"
    if task.lead:
        fault, remedy = "the given beginning of a sentence is scored with each answer", "rules=mended"
    if not fault:
        return []
    shares = []
    for cell in group.cells:
        if reader.store.damage(cell.id) is not None:
            continue
        samples = reader.read(cell.id)
        concerned: list[bool] = []
        for example in group.examples:
            if example.id not in samples:
                continue
            texts = samples[example.id].texts
            # the questions of a context have references of their own
            questions = [example.asked(i) for i in range(len(example.turns))] or [example] * len(texts)
            for text, question in zip(texts, questions, strict=True):
                concerned.append(
                    bool(task.lead) or task.score(text, question, rule.mended) != task.score(text, question)
                )
        if any(concerned):
            shares.append(f"{cell.label} {format_percent(100 * sum(concerned) / len(concerned))}")
    if not shares:
        return []
    return [
        f"{group.column}: as in published scripts, {fault} ({remedy} mends it). Answers that this concerns: "
        f"{', '.join(shares)}."
    ]


def note_unended(group: Group, reader: SampleReader) -> list[str]:
    """Return the note that answers of worked solutions were cut off, and may lack a result; [] if none was."""
    # ``lengths`` marks the metrics that read worked solutions
    if not metric(group.task.metric).lengths:
        return []
    most_tokens = {example.id: example.max_new_tokens for example in group.examples}
    counts = []
    for cell in group.cells:
        if reader.store.damage(cell.id) is not None:
            continue
        # each entry says whether an answer was cut off
        reached_end: list[bool] = []
        for example, sample in reader.read(cell.id).items():
            # the store may have samples of examples that this run leaves out
            if example in most_tokens:
                reached_end += [length >= most_tokens[example] for length in sample.answer_lengths]
        if any(reached_end):
            counts.append(f"{cell.label} {sum(reached_end)} of {len(reached_end)}")
    if not counts:
        return []
    return [
        f"{group.column}: answers that reach max_new_tokens={max(most_tokens.values())} are cut off there and may "
        f"lack a final result: {', '.join(counts)}."
    ]


def note_batches(rows: Sequence[ReportRow]) -> list[str]:
    """Return the note that decode batches took more memory than their rows' tokens; [] if they did not."""
    factors = []
    for row in rows:
        for cell in row.cells:
            if cell.summary is not None and cell.summary.timing.batch_factor:
                factors.append(cell.summary.timing.batch_factor)
    # a few per cent more are not worth a note
    if not factors or max(factors) < 1.05:
        return []
    least, most = format_number(min(factors)), format_number(max(factors))
    times = f"{least} to {most}" if least != most else most
    return [
        f"While decoding, a batch took {times} times the key and value bytes of its "
        "rows (padding, free slots, positions, room for the answer); bytes in tables are those of tokens."
    ]


def note_lengths(rows: Sequence[ReportRow]) -> list[str]:
    """Return the note on the length of each method's answers, and the most tokens that a head held."""
    lengths = []
    for row in rows:
        summaries = [c.summary for c in row.cells if c.summary is not None]
        if summaries:
            # cells have means over n answers each, so weight them by n; a number that samples lack counts as 0
            all_tokens = sum((s.new_tokens or 0) * s.n for s in summaries)
            tokens = all_tokens / sum(s.n for s in summaries)
            peak = max(s.decode_peak or 0 for s in summaries)
            lengths.append(f"{row.method} {format_number(tokens)} (at most {peak} held)")
    if not lengths:
        return []
    return [f"Mean number of tokens of an answer, and the most that a head held meanwhile: {', '.join(lengths)}."]
