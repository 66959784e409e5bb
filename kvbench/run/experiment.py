"""A run from what ``prepared`` found good to its report: the model is loaded, then group after group is measured."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from kvbench.conf import entries
from kvbench.engine import memory, precision
from kvbench.errors import UsageError, ending
from kvbench.models import load
from kvbench.run import presets
from kvbench.run.config import RunConfig
from kvbench.run.display import Display
from kvbench.run.host import Host
from kvbench.run.listener import Listener, Listeners, Status
from kvbench.run.plan import Group
from kvbench.run.provenance import local_changes, provenance
from kvbench.run.results import CellRecord, Facts, Report
from kvbench.run.run_plan import RunPlan as RunPlan
from kvbench.run.run_plan import check_model, context_of, identify, open_session, threads
from kvbench.run.run_plan import prepare as prepare
from kvbench.run.runner import ModelChanged, run_group
from kvbench.run.summary import collect, completed, summarise
from kvbench.tasks.base import Tokenizer
from kvbench.tasks.spread import left_out

ROUNDED = 4
"""Tasks by whose first prompts rounding is measured."""


def calibrate(cfg: RunConfig, quiet: bool = False) -> list[Facts]:
    """Compute what the run's methods need of the model and is not there; the records of all of it.

    Raises UsageError if none of them needs anything.
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
        bound, asked = session.bind(chain, model, quiet), session.requests(chain)
        for stage in bound.stages:
            if stage.calibration is not None:
                file = str(session.path(asked[stage.id]))
                records[file] = {"method": stage.id, "file": file, **stage.calibration.meta}
    return list(records.values())


def measure(prepared: RunPlan, quiet: bool = False, listeners: Sequence[Listener] = ()) -> Report:
    """Measure what is missing, write each cell's metrics, and return the report of this run."""
    fill(prepared, quiet, listeners)
    return report(prepared)


def fill(prepared: RunPlan, quiet: bool = False, listeners: Sequence[Listener] = ()) -> None:
    """Measure what is missing and write each cell's metrics; groups may have different cells."""
    told, left = Listeners([*([] if quiet else [Display()]), *listeners]), list(prepared.groups)
    try:
        told.begin(prepared)
        for group in _measured(prepared, quiet, told):
            _end(prepared, group, told)
            left.pop(0)
    except BaseException as error:
        for group in left:
            _end(prepared, group, told, error)
        raise
    finally:
        told.close()


def settle(prepared: RunPlan, listeners: Sequence[Listener] = ()) -> Report:
    """The report of what the shards of this run measured; each cell's metrics are written from all of it."""
    told = Listeners(listeners)
    try:
        told.begin(prepared)
        for group in prepared.groups:
            _end(prepared, group, told)
    finally:
        told.close()
    return report(prepared)


def _measured(prepared: RunPlan, quiet: bool, told: Listeners) -> Iterator[Group]:
    """Measure group after group, in parts that fit into memory; yield each when all of it is measured."""
    cfg, groups = prepared.cfg, prepared.groups
    if not any(t.answers_to_do for t in prepared.todo()):
        yield from groups
        return
    threads = set_threads(cfg, prepared.source.config)
    model = load.load_weights(cfg.model, prepared.source, load.resolve_device(cfg.device))
    host = make_host(prepared, model)
    facts = {**provenance(model, threads), "model": _model_name(cfg), **_rounding(host, groups)}
    if not quiet and str(facts["commit"]).endswith("+"):
        print(f"kvbench: the code has local changes (commit {facts['commit']}): cells say so", file=sys.stderr)
    for group in prepared.bound(model, quiet):
        for part in prepared.estimate(group).parts(group, host.memory):
            host = _run_part(prepared, host, part, facts, told)
        yield group


def _rounding(host: Host, groups: Sequence[Group]) -> Facts:
    """What rounding alone changes in half precision, for the record; nothing in fp32."""
    if host.model.dtype == torch.float32:
        return {}
    found = None
    with suppress(Exception):  # what is wrong with a prompt or the model is told where it is measured
        read = [host.encode(g.examples[0], g.task).ids for g in groups if g.examples][:ROUNDED]
        found = precision.compare_rounding(host.model, [torch.tensor(ids) for ids in read])
    return {} if found is None else {"rounding": found}


def _run_part(prepared: RunPlan, host: Host, part: Group, facts: Facts, told: Listeners) -> Host:
    """Measure one part; with the model read again, and without the methods that changed it, where some did."""
    cfg = prepared.cfg
    while True:
        try:
            run_group(host, part, prepared.store, facts, cfg.shard, cfg.mix, told)
            return host
        except ModelChanged as changed:
            part = replace(part, cells=tuple(c for c in part.cells if c.id not in changed.cells))
            print(f"kvbench: {changed}: it is read again for the others", file=sys.stderr)
        host = make_host(prepared, load.load_weights(cfg.model, prepared.source, host.model.device))


def _end(prepared: RunPlan, group: Group, told: Listeners, stopped: BaseException | None = None) -> None:
    """Write the metrics of a group's cells and say how each ended; ``stopped`` ended the run before its time.

    Of a cell without samples, or refused, there are no metrics.
    """
    store = prepared.store
    left = {c.id for some in prepared.left(group).values() for c in some}
    for cell in group.cells:
        summary, samples = None, list(store.samples(cell.id).values())
        begun = stopped is None or cell.id in store.writers
        if begun and samples and store.refusal(cell.id) is None:
            summary = summarise(completed(cell, samples), group.task.metric, len(group.task.examples))
            whole = "complete" if summary.n == summary.of else "partial"
            store.write_metrics(cell.id, {"status": whole, **summary.record()})
        found = store.status(cell.id)
        status: Status = "interrupted" if stopped is not None and cell.id in left else "partial"
        if found.status in ("complete", "refused", "failed", "interrupted"):
            status = cast(Status, found.status)
        reason = found.reason or (ending(stopped) if stopped is not None and status == "interrupted" else None)
        told.ended(cell, status, summary, reason)


def make_host(prepared: RunPlan, model: PreTrainedModel) -> Host:
    """The loaded model with everything about prompts and answers that the run settled."""
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
    )


def report(prepared: RunPlan) -> Report:
    """The report of what the store holds for this run's cells, measured now or before."""
    cfg = prepared.cfg
    records = prepared.records()
    notes = [*prepared.advice(), *_precision(prepared, records)]
    foreign = sorted({d.name for d in cfg.datasets} - {"tiny"})
    if cfg.model.path == "embedded:tiny" and foreign:
        notes.append(
            f"The tiny model was trained on synthetic text only, not on text like that of {', '.join(foreign)}."
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
    of_tasks = dict.fromkeys(f"{g.task.note}." for g in prepared.groups if g.task.note)
    return replace(
        collected,
        model=cfg.model.path,
        settings=settings(prepared),
        matched=tuple(prepared.matched),
        notes=(*of_tasks, *collected.notes, *notes, *prepared.store.warnings),
    )


def _precision(prepared: RunPlan, records: Sequence[CellRecord]) -> list[str]:
    """What a reader must know of the dtype: a better one for this machine, what rounding alone changed."""
    asked, device = prepared.cfg.model.dtype, load.resolve_device(prepared.cfg.device)
    tiny = prepared.cfg.model.path == "embedded:tiny"
    better = precision.has_better_dtype(asked, prepared.dtype, device) and not (tiny and asked == "auto")
    found = [p["rounding"] for r in records for p in r.provenance if "rounding" in p]
    most = max(found, key=lambda f: f["prompts"], default=None)
    return [
        *([f"Dtype {precision.dtype_reason(asked, prepared.dtype, device)}."] if better else []),
        *([precision.rounding_note(most, prepared.dtype)] if most else []),
    ]


def _model_name(cfg: RunConfig) -> str:
    return cfg.model.name if cfg.model.name != "hf" else cfg.model.path


def settings(prepared: RunPlan) -> str:
    """One line that tells apart two tables with the same rows and columns."""
    cfg, plain = prepared.cfg, entries("dataset")
    parts = [f"Model {_model_name(cfg)}, {prepared.dtype}"]
    if cfg.preset:
        plainly = presets.untouched(cfg.preset, cfg.model.name, (s.id for c in cfg.chains for s in c.chain.stages))
        parts.append(f"preset {cfg.preset}" + (f" (sets nothing of {', '.join(plainly)})" if plainly else ""))
    for d in cfg.datasets:
        changed = {k: v for k, v in d.knobs.items() if k in plain[d.name] and v != plain[d.name][k] and k[0] != "_"}
        knobs = " ".join(f"{k}={v}" for k, v in changed.items())
        parts.append(f"dataset {d.name} {knobs}".strip())
    limit = cfg.prompt.max_length
    prompt = [f"prompt {cfg.prompt.name}", f"at most {limit} tokens" if limit else "cut to the context only"]
    if cfg.prompt.template != "off":
        prompt.append(f"template {cfg.prompt.template}")
    if not cfg.prompt.bos:
        prompt.append("no special tokens")
    parts.append(", ".join(prompt + ([] if cfg.prompt.query_aware else ["question withheld"])))
    if cfg.sampling.temperature:
        parts.append(f"temperature {cfg.sampling.temperature:g}, top_p {cfg.sampling.top_p:g}")
    return "; ".join(parts) + "."


def stop_tokens(prepared: RunPlan) -> frozenset[int]:
    """Return the end-of-sequence ids of tokenizer and checkpoint, and the last token of each stop text of the model."""
    cfg, tokenizer = prepared.cfg.model, prepared.tokenizer
    end = getattr(tokenizer, "eos_token_id", None)
    last = {tokenizer.encode(text, add_special_tokens=False)[-1] for text in cfg.stop}
    return frozenset(load.end_tokens(cfg, prepared.source) | last | ({end} if end is not None else set()))


def set_threads(cfg: RunConfig, config: Any) -> int:
    """Take as many threads as the run is to have; how many those are."""
    torch.set_num_threads(threads(cfg, config))
    return torch.get_num_threads()
