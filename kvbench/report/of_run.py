"""Make the ``Report`` of a planned run: the stored results of its cells, with notes on how they were measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter

from kvbench.base.conf import entries
from kvbench.engine import precision
from kvbench.models import load
from kvbench.plan import presets
from kvbench.plan.config import DatasetConfig, RunConfig
from kvbench.plan.run_plan import RunPlan
from kvbench.report.collect import NO_SUMMARIES, collect
from kvbench.report.data import CellResult, ReportRow
from kvbench.report.report import Report
from kvbench.store.provenance import describe_local_changes
from kvbench.store.results import CellRecord, CellSummary
from kvbench.tasks.spread import describe_left_out


def report_run(prepared: RunPlan, summaries: Mapping[str, CellSummary] = NO_SUMMARIES) -> Report:
    """Return the report of all stored samples of this run's cells, measured by this run or by earlier ones.

    summaries: the summaries of all samples of some cells, by cell id. These are not made again.
    """
    cfg = prepared.cfg
    records = prepared.records()
    collected = collect(prepared.groups, prepared.store, summaries)
    notes = list(collected.notes)
    notes += prepared.advice()
    notes += _note_model(prepared)
    notes += _note_examples(prepared)
    notes += [f"{match} for prompts no shorter than that." for match in prepared.matched]
    # the warnings are complete only now, since ``collect`` reads the samples and adds a warning for each damaged file
    notes += prepared.store.warnings
    # a dict keeps the order of the columns, and prints a note that several tasks share only once
    remarks = list(dict.fromkeys(f"{group.task.note}." for group in prepared.groups if group.task.note))
    remarks += collected.remarks
    remarks += _note_precision(prepared, records)
    remarks += _note_reading(records)
    changes_note = describe_local_changes(records)
    if changes_note:
        remarks.append(changes_note)
    return Report(
        model=cfg.model.path,
        settings=describe_settings(prepared),
        columns=collected.columns,
        rows=collected.rows + _build_unplanned_rows(prepared),
        notes=tuple(notes),
        results=str(prepared.store.root),
        remarks=tuple(remarks),
        matched=tuple(prepared.matched),
        apart=collected.apart,
    )


def _build_unplanned_rows(prepared: RunPlan) -> tuple[ReportRow, ...]:
    """Return a row for each method that could not be planned. All its cells state the reason."""
    rows = []
    for label, reason in prepared.unplanned.items():
        # an unplanned method has no cells and no ids, but its row is as wide as the others
        cells = [CellResult(group.column, cell="", status="failed", reason=reason) for group in prepared.groups]
        rows.append(ReportRow(label, evicts=False, cells=tuple(cells), means=None))
    return tuple(rows)


def _note_model(prepared: RunPlan) -> list[str]:
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


def _note_examples(prepared: RunPlan) -> list[str]:
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


def _note_precision(prepared: RunPlan, records: Sequence[CellRecord]) -> list[str]:
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


def _note_reading(records: Sequence[CellRecord]) -> list[str]:
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


def describe_settings(prepared: RunPlan) -> str:
    """Return the run's settings as one line of text. It tells tables with the same rows and columns apart."""
    cfg = prepared.cfg
    parts = [f"Model {cfg.model_name}, {prepared.dtype}"]
    if cfg.preset:
        parts.append(_describe_preset(cfg.preset, cfg))
    default_entries = entries("dataset")
    for dataset in cfg.datasets:
        parts.append(_describe_dataset(dataset, default_entries[dataset.name]))
    parts.append(_describe_prompt(prepared))
    if cfg.sampling.temperature:
        parts.append(f"temperature {cfg.sampling.temperature:g}, top_p {cfg.sampling.top_p:g}")
    if cfg.sampling.samples_per_prompt > 1:
        parts.append(f"score of a prompt: mean over {cfg.sampling.samples_per_prompt} answers")
    # a dataset that is named twice with different tasks has the same text both times; say it once
    return "; ".join(dict.fromkeys(parts)) + "."


def _describe_preset(preset: str, cfg: RunConfig) -> str:
    """Return the name of the run's preset, with the methods of the run that the preset does not configure."""
    methods: list[str] = []
    for configured in cfg.chains:
        methods += [stage.id for stage in configured.chain.stages]
    untouched_methods = presets.untouched(preset, cfg.model.name, methods)
    if not untouched_methods:
        return f"preset {preset}"
    return f"preset {preset} (sets nothing of {', '.join(untouched_methods)})"


def _describe_dataset(dataset: DatasetConfig, default_entry: Mapping[str, object]) -> str:
    """Return the name of a dataset with its knobs that differ from the defaults.

    default_entry: the dataset's entry in conf/dataset, with the default of each knob.
    """
    words = [f"dataset {dataset.name}"]
    for knob, value in dataset.knobs.items():
        # entries that begin with an underscore, such as _target_, are no knobs
        if knob.startswith("_") or knob not in default_entry or value == default_entry[knob]:
            continue
        if isinstance(value, list):
            words.append(f"{knob}={','.join(str(item) for item in value)}")
        else:
            words.append(f"{knob}={value}")
    return " ".join(words)


def _describe_prompt(prepared: RunPlan) -> str:
    """Return the prompt policy in words: its name, its length, and its departures from the defaults."""
    prompt = prepared.cfg.prompt
    parts = [f"prompt {prompt.name}"]
    if prompt.max_length:
        parts.append(f"at most {prompt.max_length} tokens")
    else:
        parts.append("cut to the context only")
    if prompt.template != "off":
        parts.append(f"template {prompt.template}")
    if not prompt.bos:
        parts.append("no special tokens")
    # tasks of one dataset agree on whether the question is withheld; if several values were asked for, each column of
    # the dataset names its value behind the task's name
    query_aware_by_name = {}
    for group in prepared.groups:
        dataset = group.task.id.partition("/")[0]
        swept_values = group.column.split()[1:]
        query_aware_by_name[" ".join([dataset, *swept_values])] = group.task.query_aware
    withheld = [name for name, query_aware in query_aware_by_name.items() if not query_aware]
    if withheld and len(withheld) == len(query_aware_by_name):
        parts.append("question withheld")
    elif withheld:
        parts.append(f"question withheld in {' and '.join(withheld)}")
    return ", ".join(parts)
