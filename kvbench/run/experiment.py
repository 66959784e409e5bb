"""Carry out a prepared run: load the model, measure group after group, and report."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from kvbench.base.conf import check, entries
from kvbench.base.errors import KvbenchError, UsageError, ending, say
from kvbench.engine import memory, precision
from kvbench.engine.shared_prefix import SharedPrefix
from kvbench.models import load
from kvbench.plan import presets
from kvbench.plan.cells import Cell, Group, pairs, rounds
from kvbench.plan.config import RunConfig
from kvbench.plan.run_plan import RunPlan as RunPlan
from kvbench.plan.run_plan import check_model, context_of, identify, open_session, threads
from kvbench.plan.run_plan import prepare as prepare
from kvbench.report.report import CellResult, Report, ReportRow
from kvbench.report.summary import collect, is_unchanged, summarise
from kvbench.run.display import Display
from kvbench.run.host import Host
from kvbench.run.listener import Listener, Listeners
from kvbench.run.refusals import ModelChanged
from kvbench.run.runner import run_groups
from kvbench.store.provenance import local_changes, provenance
from kvbench.store.results import CellRecord, Facts
from kvbench.store.store import DAMAGED
from kvbench.tasks.base import Tokenizer
from kvbench.tasks.spread import left_out

WAITING_S, WAITING_SAID_S = 2.0, 60.0
"""Seconds between two looks whether another process has ended, and between two lines that say so."""
ROUNDED = 4
"""The number of tasks whose first prompts are read to measure rounding."""


def calibrate(cfg: RunConfig, quiet: bool = False) -> list[Facts]:
    """Compute the calibrations that the run's methods lack. Return a record of each calibration that they use.

    Raises UsageError if no method needs a calibration.
    """
    device = load.resolve_device(cfg.device)
    source = load.locate(cfg.model)
    check_model(cfg, source)
    tokenizer = cast(Tokenizer, load.load_tokenizer(cfg.model, source))
    session = open_session(cfg, identify(cfg, source, device), tokenizer, context_of(cfg, source))
    chains = [c.chain for c in cfg.chains if session.requests(c.chain)]
    if not chains:
        raise UsageError(f"method={','.join(c.chain.name for c in cfg.chains)} needs no calibration")
    set_threads(cfg, source.config)
    model = load.load_weights(cfg.model, source, device)
    records: dict[str, Facts] = {}
    for chain in chains:
        bound, requests = session.bind(chain, model, quiet), session.requests(chain)
        for stage in bound.stages:
            if stage.calibration is not None:
                file = str(session.path(requests[stage.id]))
                records[file] = {"method": stage.id, "file": file, **stage.calibration.meta}
    return list(records.values())


def measure(prepared: RunPlan, quiet: bool = False, listeners: Sequence[Listener] = ()) -> Report:
    """Measure all missing answers and write each cell's metrics. Return the run's report, as ``report`` does."""
    fill(prepared, quiet, listeners)
    return report(prepared)


def fill(prepared: RunPlan, quiet: bool = False, listeners: Sequence[Listener] = ()) -> None:
    """Measure all missing answers and write each cell's metrics, without a report: groups may have different cells."""
    broadcast = Listeners([*([] if quiet else [Display()]), *listeners])
    unfinished = {(g.column, c.id): replace(g, cells=(c,)) for g in prepared.groups for c in g.cells}
    try:
        broadcast.begin(prepared)
        for group in _measure_groups(prepared, quiet, broadcast):
            _settle_group(prepared, group, broadcast)
            for cell in group.cells:
                unfinished.pop((group.column, cell.id), None)
    except BaseException as error:
        for group in unfinished.values():
            _settle_group(prepared, group, broadcast, error)
        raise
    finally:
        broadcast.close()


def settle(prepared: RunPlan, listeners: Sequence[Listener] = ()) -> Report:
    """Write each cell's metrics from the stored samples of all shards. Return the run's report, as ``report`` does."""
    broadcast = Listeners(listeners)
    try:
        broadcast.begin(prepared)
        for group in prepared.groups:
            _settle_group(prepared, group, broadcast)
    finally:
        broadcast.close()
    return report(prepared)


def _measure_groups(prepared: RunPlan, quiet: bool, broadcast: Listeners) -> Iterator[Group]:
    """Measure the groups round after round, in parts that fit into memory. Yield each group of a round when it is done.

    One prompt with its question in view and withheld is read once, where both fit into memory whole.
    """
    cfg = prepared.cfg
    if not any(t.answers_to_do for t in prepared.todo()):
        yield from prepared.groups
        return
    threads = set_threads(cfg, prepared.source.config)
    model = prepared.load_model()
    host = make_host(prepared, model)
    facts = {**provenance(model, threads), "model": cfg.model_name, **_rounding_fact(host, prepared.groups)}
    if not quiet and str(facts["commit"]).endswith("+"):
        say(f"the code has local changes (commit {facts['commit']}): cells say so")
    for groups in rounds(prepared.groups):
        shared: list[tuple[tuple[Group, ...], list[Cell]]] = []  # groups with the cells that another process measures
        for pair in pairs(prepared.bound(groups, host.model, quiet)):
            usable = [prepared.usable(group) for group in pair]
            host, busy = _measure_pair(prepared, host, usable, facts, broadcast)
            if busy:
                shared.append((pair, busy))
            else:
                yield from pair
        for pair, busy in shared:
            host = _measure_left(prepared, host, pair, busy, facts, broadcast, quiet)
            yield from pair


def _measure_left(
    prepared: RunPlan,
    host: Host,
    pair: Sequence[Group],
    busy: Sequence[Cell],
    facts: Facts,
    broadcast: Listeners,
    quiet: bool,
) -> Host:
    """Wait for the process that measures the cells ``busy``, and measure what it leaves. Return the host to go on."""
    waited = 0.0
    while busy:
        if waited % WAITING_SAID_S == 0 and not quiet:
            say(f"waiting for another run, which measures {_named(busy)}; what it leaves is measured here")
        time.sleep(WAITING_S)
        waited += WAITING_S
        ids = {c.id for c in busy}
        rest = [replace(g, cells=tuple(c for c in g.cells if c.id in ids)) for g in pair]
        host, busy = _measure_pair(prepared, host, rest, facts, broadcast)
    return host


def _measure_pair(
    prepared: RunPlan, host: Host, pair: Sequence[Group], facts: Facts, broadcast: Listeners
) -> tuple[Host, list[Cell]]:
    """Measure a group, or a task with its question in view and withheld, in parts that fit into memory.

    Return the host to go on with, and the cells that are left out since another process measures them.
    """
    split = [prepared.estimate(group).parts(group, host.memory) for group in pair]
    if all(len(parts) == 1 for parts in split):
        together = [[part for parts in split for part in parts]]
    else:
        together = [[part] for parts in split for part in parts]
    busy: list[Cell] = []
    for parts in together:
        host, left_out = _run_parts(prepared, host, parts, facts, broadcast)
        busy += left_out
    return host, busy


def _named(cells: Sequence[Cell]) -> str:
    """Return the first of some cells in words, and how many others there are."""
    first = f"{cells[0].label} on {cells[0].column}"
    return first if len(cells) == 1 else f"{first} and {len(cells) - 1} other cells"


def _rounding_fact(host: Host, groups: Sequence[Group]) -> Facts:
    """Return {"rounding": effect of rounding alone in half precision}, or {} in fp32 or if it cannot be measured."""
    if host.model.dtype == torch.float32:
        return {}
    comparison = None
    with suppress(Exception):  # measuring reports any error of a prompt or of the model
        prompts = [host.encode(g.examples[0], g.task).ids for g in groups if g.examples][:ROUNDED]
        comparison = precision.compare_rounding(host.model, [torch.tensor(ids) for ids in prompts])
    return {} if comparison is None else {"rounding": comparison}


def _run_parts(
    prepared: RunPlan, host: Host, parts: Sequence[Group], facts: Facts, broadcast: Listeners
) -> tuple[Host, list[Cell]]:
    """Measure parts together. If methods change the model, load it again and go on without them.

    Return the last host, and the cells that are left out since another process measures them.
    """
    cfg = prepared.cfg
    while True:
        try:
            return host, run_groups(host, parts, prepared.store, facts, cfg.shard, cfg.mix, broadcast)
        except ModelChanged as changed:
            parts = [replace(p, cells=tuple(c for c in p.cells if c.id not in changed.cells)) for p in parts]
            if prepared.model is not None:
                raise KvbenchError(f"{changed}: load it again, and leave out what changes it") from None
            say(f"{changed}: it is read again for the others")
        host = make_host(prepared, load.load_weights(cfg.model, prepared.source, host.model.device))


def _settle_group(prepared: RunPlan, group: Group, broadcast: Listeners, error: BaseException | None = None) -> None:
    """Write the metrics of a group's cells and tell the listeners how each cell ended.

    ``error`` is what ended the run early, if anything did. A cell that has no samples or is refused gets no metrics.
    """
    store = prepared.store
    unfinished = {c.id for some in prepared.left(group).values() for c in some}
    for cell in group.cells:
        summary = None
        begun = (error is None or cell.id in store.writers) and store.damage(cell.id) is None
        samples = list(store.samples(cell.id).values()) if begun else []
        if samples and store.refusal(cell.id) is None:
            summary = summarise(samples, group.task.metric, len(group.task.examples))
            completeness = "complete" if summary.n == summary.of else "partial"
            # scores of a method that compressed nothing are the full cache's, whoever reads them later
            unchanged = is_unchanged(cell, {s.id: s for s in samples}, store)
            verdict = {"nothing_compressed": True} if unchanged else {}
            store.write_metrics(cell.id, {"status": completeness, **summary.record(), **verdict})
        stored = store.status(cell.id)
        status = "interrupted" if error is not None and cell.id in unfinished else "partial"
        if stored.status in ("complete", "refused", "failed", "interrupted"):
            status = stored.status
        elif stored.status == DAMAGED:
            status = "failed"
        reason = stored.reason or (ending(error) if error is not None and status == "interrupted" else None)
        broadcast.ended(cell, status, summary, reason)


def make_host(prepared: RunPlan, model: PreTrainedModel) -> Host:
    """Return the host of this run: the loaded model with its settings for prompts and answers."""
    cfg = prepared.cfg
    return Host(
        model=model,
        tokenizer=prepared.tokenizer,
        policy=cfg.prompt,
        stop=stop_tokens(prepared),
        context=prepared.context,
        sampling=cfg.sampling,
        batch_rows=cfg.batch_rows,
        plain=cfg.model.attention == "eager",
        memory=memory.cache_limit(cfg.memory, memory.device_shares(model)),
        prefix=None if cfg.shared_prefix is None else SharedPrefix(model, cfg.shared_prefix),
    )


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


def stop_tokens(prepared: RunPlan) -> frozenset[int]:
    """Return the token ids that end an answer: end-of-sequence ids and the last token of each stop text."""
    cfg, tokenizer = prepared.cfg.model, prepared.tokenizer
    end = getattr(tokenizer, "eos_token_id", None)
    ends = {text: tokenizer.encode(text, add_special_tokens=False)[-1:] for text in cfg.stop}
    for text, end_ids in ends.items():
        check("model.stop", text, bool(end_ids), "texts that the tokenizer has a token for")
    last = {end_ids[0] for end_ids in ends.values()}
    of_model = load.end_tokens(cfg, prepared.source)
    if prepared.model is not None:
        ids = getattr(prepared.model.generation_config, "eos_token_id", None)
        of_model |= {ids} if isinstance(ids, int) else set(ids or ())
    return frozenset(of_model | last | ({end} if end is not None else set()))


def set_threads(cfg: RunConfig, config: Any) -> int:
    """Set PyTorch's number of threads for the run and return it."""
    torch.set_num_threads(threads(cfg, config))
    return torch.get_num_threads()
