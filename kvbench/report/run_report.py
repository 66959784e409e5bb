"""The report of a planned run: what is stored of its cells, with notes on how it was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvbench.base.conf import entries
from kvbench.engine import precision
from kvbench.models import load
from kvbench.plan import presets
from kvbench.plan.run_plan import RunPlan
from kvbench.report.records import CellResult, ReportRow
from kvbench.report.report import Report
from kvbench.report.summary import collect
from kvbench.store.provenance import local_changes
from kvbench.store.results import CellRecord
from kvbench.tasks.spread import left_out


def report(prepared: RunPlan) -> Report:
    """Return the report of all stored samples of this run's cells, measured by this run or by earlier ones."""
    cfg = prepared.cfg
    records = prepared.records()
    notes = [*prepared.advice(), *_precision_notes(prepared, records), *_reading_notes(records)]
    real_datasets = sorted({d.name for d in cfg.datasets if set(d.tasks) != {"tiny"}} - {"tiny"})
    if cfg.model.path == "embedded:tiny" and real_datasets:
        notes.append(
            f"The tiny model was trained on synthetic text only, not on text like that of {', '.join(real_datasets)}."
        )
    if cfg.model.weights == "random":
        notes.append("Random weights: scores mean nothing, only bytes and times do.")
    if cfg.shards > 1:
        notes.append(f"Shard {cfg.shard} of {cfg.shards}: the other shards' examples are not counted here.")
    else:
        notes += [
            f"{g.task.id}: limit={len(g.examples)} leaves out {' and '.join(out)}."
            for g in prepared.groups
            if (out := left_out(g.examples, g.task.examples, g.task.grid))
        ]
    notes += [f"{m} for prompts no shorter than that." for m in prepared.matched]
    notes += filter(None, [local_changes(records)])
    collected = collect(prepared.groups, prepared.store)
    failed = [
        ReportRow(
            label, False, tuple(CellResult(g.column, "", "failed", reason=reason) for g in prepared.groups), means=None
        )
        for label, reason in prepared.unplanned.items()
    ]
    of_tasks = dict.fromkeys(f"{g.task.note}." for g in prepared.groups if g.task.note)
    return replace(
        collected,
        rows=(*collected.rows, *failed),
        model=cfg.model.path,
        settings=settings(prepared),
        matched=tuple(prepared.matched),
        notes=(*of_tasks, *collected.notes, *notes, *prepared.store.warnings),
    )


def _precision_notes(prepared: RunPlan, records: Sequence[CellRecord]) -> list[str]:
    """Return notes on the dtype: that another is better on this machine, and how much rounding alone changes."""
    configured = prepared.cfg.model.dtype
    device = load.resolve_device(prepared.cfg.device)
    tiny = prepared.cfg.model.path == "embedded:tiny"
    better = precision.has_better_dtype(configured, prepared.dtype, device) and not (tiny and configured == "auto")
    comparisons = [p["rounding"] for r in records for p in r.provenance if "rounding" in p]
    largest = max(comparisons, key=lambda f: f["prompts"], default=None)
    return [
        *([f"Dtype {precision.dtype_reason(configured, prepared.dtype, device)}."] if better else []),
        *([precision.rounding_note(largest, prepared.dtype)] if largest else []),
    ]


def _reading_notes(records: Sequence[CellRecord]) -> list[str]:
    """Return the note that prompts were read in pieces, or []."""
    batches = [p.get("batch", {}) for r in records for p in r.provenance]
    sizes = {int(b["shared_prefix"]) for b in batches if "shared_prefix" in b}
    if not sizes:
        return []
    pieces = " and ".join(map(str, sorted(sizes)))
    return [
        f"Prompts were read in pieces of {pieces} tokens (shared_prefix), and those with which one begins as the one "
        "before once; prefill ms counts them in each."
    ]


def settings(prepared: RunPlan) -> str:
    """Return the run's settings as one line of text, by which tables with the same rows and columns are told apart."""
    cfg = prepared.cfg
    defaults = entries("dataset")
    parts = [f"Model {cfg.model_name}, {prepared.dtype}"]
    if cfg.preset:
        untouched_methods = presets.untouched(
            cfg.preset, cfg.model.name, (s.id for c in cfg.chains for s in c.chain.stages)
        )
        parts.append(
            f"preset {cfg.preset}" + (f" (sets nothing of {', '.join(untouched_methods)})" if untouched_methods else "")
        )
    for d in cfg.datasets:
        changed = {
            k: v for k, v in d.knobs.items() if k in defaults[d.name] and v != defaults[d.name][k] and k[0] != "_"
        }
        knobs = " ".join(f"{k}={','.join(map(str, v)) if isinstance(v, list) else v}" for k, v in changed.items())
        parts.append(f"dataset {d.name} {knobs}".strip())
    limit = cfg.prompt.max_length
    prompt = [f"prompt {cfg.prompt.name}", f"at most {limit} tokens" if limit else "cut to the context only"]
    if cfg.prompt.template != "off":
        prompt.append(f"template {cfg.prompt.template}")
    if not cfg.prompt.bos:
        prompt.append("no special tokens")
    # by dataset, and by its knobs where these are a grid
    columns = {" ".join([g.task.id.partition("/")[0], *g.column.split()[1:]]): g.task for g in prepared.groups}
    withheld = [name for name, task in columns.items() if not cfg.prompt.aware(task)]
    if withheld:
        prompt.append("question withheld" + ("" if len(withheld) == len(columns) else f" in {' and '.join(withheld)}"))
    parts.append(", ".join(prompt))
    if cfg.sampling.temperature:
        parts.append(f"temperature {cfg.sampling.temperature:g}, top_p {cfg.sampling.top_p:g}")
    return "; ".join(dict.fromkeys(parts)) + "."
