"""A run from its configuration to its report: everything that can be checked first, then the model, then the groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from kvbench import match, memory, presets
from kvbench.calibration.session import DEFAULT_FOLDER, Session
from kvbench.cli.rewrite import entries
from kvbench.config import RunConfig
from kvbench.errors import UsageError
from kvbench.estimate import Estimate, estimate
from kvbench.listener import Listener, Listeners, Status
from kvbench.model import load
from kvbench.model.interface import head_counts
from kvbench.plan import Cell, Group, build_groups, pending
from kvbench.progress import Display
from kvbench.provenance import provenance
from kvbench.report import collect, summarise
from kvbench.runner import ROWS_CPU, ROWS_GPU, Host, run_group
from kvbench.shape import from_config
from kvbench.store import ResultStore
from kvbench.tasks.base import Tokenizer
from kvbench.tasks.prompt import encode
from kvbench.types import Example

SMALL_MODEL = 256


@dataclass(frozen=True)
class Prepared:
    """A run whose configuration, data, checkpoint and results folder were found good; no weights are loaded yet."""

    cfg: RunConfig
    source: load.Source
    tokenizer: Tokenizer
    groups: tuple[Group, ...]
    context: int | None
    dtype: str
    store: ResultStore
    session: Session
    matched: tuple[match.Matched, ...] = ()

    def left(self, group: Group) -> dict[str, list[Cell]]:
        """Example id -> the cells that still need it."""
        return pending(group, {c.id: list(self.store.samples(c.id)) for c in group.cells})

    def plan(self) -> dict[str, Any]:
        """``todo`` with what each group takes, and the memory that it must fit into, before the model is loaded."""
        weights = load.weight_bytes(self.source)
        free = memory.limit(self.cfg.memory, load.resolve_device(self.cfg.device))
        room = free if self.cfg.memory is not None else max(0, free - int(memory.USED_SHARE * weights))
        planned = []
        for group, facts in zip(self.groups, self.todo(), strict=True):
            found = self.estimate(group)
            parts = found.parts(group, room)
            takes = {
                "prompt_tokens": found.prompt_tokens,
                "bytes": max((found.bytes(p.cells, room) for p in parts), default=0),
                "seconds": found.seconds,
                "parts": [[c.label for c in p.cells] for p in parts],
                "too_large": [c.label for p in parts for c in p.cells if found.alone(c) > room],
            }
            again = self._prefills(group, parts) - facts["prefills"]
            saved = {"prefills": facts["prefills"] + again, "prefills_saved": facts["prefills_saved"] - again}
            planned.append({**facts, **takes, **saved})
        return {"memory": room, "groups": planned}

    def _prefills(self, group: Group, parts: Sequence[Group]) -> int:
        """Prompts read where the group runs in ``parts``."""
        mine = [{c.id for c in p.cells} for p in parts]
        return sum(
            len({c.chain.prefill_key for c in cells if c.id in ids})
            for cells in self.left(group).values()
            for ids in mine
        )

    def estimate(self, group: Group) -> Estimate:
        """What is left of a group takes."""
        config, dtype = self.source.config, getattr(torch, self.dtype)
        device = load.resolve_device(self.cfg.device)

        def tokens(example: Example) -> int:
            if example.tokens:
                return len(example.tokens)
            room = None if self.context is None else self.context - example.max_new_tokens
            return len(encode(self.tokenizer, example, group.task, self.cfg.prompt, room))

        samples = {c.id: self.store.samples(c.id) for c in group.cells}
        rows = self.cfg.batch_rows or (ROWS_GPU if device.type == "cuda" else ROWS_CPU)
        shape, hidden = from_config(config), int(config.hidden_size)
        return estimate(group, self.left(group), samples, shape, dtype.itemsize, hidden, rows, tokens)

    def todo(self) -> list[dict[str, Any]]:
        """Per group: prompts to read and answers to decode, and what is done already."""
        plans = []
        for group in self.groups:
            left = self.left(group)
            answers = sum(len(cells) for cells in left.values())
            prefills = sum(len({c.chain.prefill_key for c in cells}) for cells in left.values())
            plans.append(
                {
                    "task": group.column,
                    "methods": [c.label for c in group.cells],
                    "cells": [c.id for c in group.cells],
                    "examples": len(group.examples),
                    "of": len(group.task.examples),
                    "answers_to_do": answers,
                    "answers_done": len(group.cells) * len(group.examples) - answers,
                    "prefills": prefills,
                    "prefills_saved": answers - prefills,
                    "calibrations": self._uncalibrated(c for cells in left.values() for c in cells),
                }
            )
        return plans

    def _uncalibrated(self, cells: Iterable[Cell]) -> list[str]:
        """What will be computed before any answer, in words."""
        missing = {r.key: r for c in cells for r in self.session.missing(c.chain)}
        return [
            f"{r.recipe.kind} ({r.recipe.samples} samples of {r.recipe.tokens} tokens, {r.text})"
            for r in missing.values()
        ]

    def bound(self, model: PreTrainedModel, quiet: bool) -> tuple[Group, ...]:
        """The groups with every chain bound to its calibration; what is missing of it is computed now."""
        chains = list(dict.fromkeys(c.chain for g in self.groups for c in g.cells))
        ready = {chain: self.session.bind(chain, model, quiet) for chain in chains}
        return tuple(replace(g, cells=tuple(replace(c, chain=ready[c.chain]) for c in g.cells)) for g in self.groups)


def calibrate(cfg: RunConfig, quiet: bool = False) -> list[dict[str, Any]]:
    """Compute what the run's methods need of the model and is not there; the records of all of it.

    Raises UsageError if none of them needs anything.
    """
    device = load.resolve_device(cfg.device)
    source = load.locate(cfg.model)
    _check_model(cfg, source)
    tokenizer = cast(Tokenizer, load.load_tokenizer(cfg.model, source))
    session = _session(cfg, _identity(cfg, source, device), tokenizer, _context(cfg, source))
    chains = [c.chain for c in cfg.chains if session.requests(c.chain)]
    if not chains:
        raise UsageError(f"method={','.join(c.chain.name for c in cfg.chains)} needs no calibration")
    set_threads(cfg, source.config)
    model = load.load_weights(cfg.model, source, device)
    records: dict[str, dict[str, Any]] = {}
    for chain in chains:
        bound, asked = session.bind(chain, model, quiet), session.requests(chain)
        for stage in bound.stages:
            if stage.calibration is not None:
                file = str(session.path(asked[stage.id]))
                records[file] = {"method": stage.id, "file": file, **stage.calibration.meta}
    return list(records.values())


def _check_model(cfg: RunConfig, source: load.Source) -> None:
    """Raise UsageError for a method that cannot run on this model."""
    c = source.config
    for entry in cfg.chains:
        entry.chain.check_model(str(c.model_type), int(c.num_hidden_layers), head_counts(c))


def _identity(cfg: RunConfig, source: load.Source, device: torch.device) -> dict[str, Any]:
    """What identifies the model in a cell."""
    return {
        "fingerprint": source.fingerprint,
        "weights": cfg.model.weights,
        "attention": cfg.model.attention,
        "rope_scaling": cfg.model.rope_scaling,
        "dtype": str(load.resolve_dtype(cfg.model, device, source.config)).removeprefix("torch."),
    }


def _context(cfg: RunConfig, source: load.Source) -> int | None:
    return cfg.model.context or getattr(source.config, "max_position_embeddings", None)


def _session(cfg: RunConfig, identity: Mapping[str, Any], tokenizer: Tokenizer, context: int | None) -> Session:
    return Session(
        Path(cfg.calibration or Path(cfg.results) / DEFAULT_FOLDER).expanduser(),
        identity,
        tokenizer,
        context,
        cfg.model.path == "embedded:tiny",
        cfg.calibration_text,
        cfg.data_root,
    )


def prepare(cfg: RunConfig, reading: bool = False) -> Prepared:
    """Check all that can be checked before weights are loaded; raises UsageError naming key and value.

    ``reading``: nothing will be written, so the results folder need not be writable.
    """
    store = ResultStore(Path(cfg.results).expanduser())
    if not reading:
        store.check()
    device = load.resolve_device(cfg.device)
    source = load.locate(cfg.model)
    precision = load.resolve_dtype(cfg.model, device, source.config)
    cfg, matched = match.settle(cfg, from_config(source.config), precision.itemsize)
    _check_model(cfg, source)
    tokenizer = cast(Tokenizer, load.load_tokenizer(cfg.model, source))
    identity, context = _identity(cfg, source, device), _context(cfg, source)
    session = _session(cfg, identity, tokenizer, context)
    groups = build_groups(cfg, identity, tokenizer, context, session.chain_identity)
    return Prepared(cfg, source, tokenizer, tuple(groups), context, identity["dtype"], store, session, matched)


def measure(prepared: Prepared, quiet: bool = False, listeners: Sequence[Listener] = ()) -> dict[str, Any]:
    """Measure what is missing, write each cell's metrics, and return the report of this run."""
    told = Listeners([*([] if quiet else [Display()]), *listeners])
    ended: set[str] = set()
    try:
        told.begin(prepared)
        _measure_groups(prepared, quiet, told, ended)
    except BaseException as error:
        for group in prepared.groups:
            _end(prepared, replace(group, cells=tuple(c for c in group.cells if c.id not in ended)), told, error)
        raise
    finally:
        told.close()
    return report(prepared)


def settle(prepared: Prepared, listeners: Sequence[Listener] = ()) -> dict[str, Any]:
    """The report of what the shards of this run measured; each cell's metrics are written from all of it."""
    told = Listeners(listeners)
    try:
        told.begin(prepared)
        for group in prepared.groups:
            _end(prepared, group, told)
    finally:
        told.close()
    return report(prepared)


def _measure_groups(prepared: Prepared, quiet: bool, told: Listeners, ended: set[str]) -> None:
    """Measure group after group, in parts that fit into memory; ``ended`` gets the cells that the run is through with.

    Metrics of a group are written when all of it is measured.
    """
    cfg, store = prepared.cfg, prepared.store
    groups = prepared.groups
    host, facts = None, {}
    if any(t["answers_to_do"] for t in prepared.todo()):
        threads = set_threads(cfg, prepared.source.config)
        model = load.load_weights(cfg.model, prepared.source, load.resolve_device(cfg.device))
        host, facts = make_host(prepared, model), {**provenance(model, threads), "model": _model_name(cfg)}
        groups = prepared.bound(model, quiet)
    for group in groups:
        if host is not None:
            for part in prepared.estimate(group).parts(group, host.memory):
                run_group(host, part, store, facts, cfg.shard, cfg.mix, told)
        _end(prepared, group, told)
        ended.update(c.id for c in group.cells)


def _end(prepared: Prepared, group: Group, told: Listeners, stopped: BaseException | None = None) -> None:
    """Write the metrics of a group's cells and say how each ended; ``stopped`` ended the run before its time."""
    store = prepared.store
    left = {c.id for some in prepared.left(group).values() for c in some}
    for cell in group.cells:
        begun = stopped is None or cell.id in store.writers
        metrics = _write_metrics(prepared, group, cell) if begun else None
        found = store.status(cell.id)
        status: Status = "interrupted" if stopped is not None and cell.id in left else "partial"
        if found.status in ("complete", "refused", "failed", "interrupted"):
            status = cast(Status, found.status)
        reason = found.reason or (str(stopped) or type(stopped).__name__ if status == "interrupted" else None)
        told.ended(cell, status, metrics, reason)


def make_host(prepared: Prepared, model: PreTrainedModel) -> Host:
    """The loaded model with everything about prompts and answers that the run settled."""
    cfg = prepared.cfg
    stop = stop_tokens(prepared)
    return Host(
        model,
        prepared.tokenizer,
        cfg.prompt,
        stop,
        prepared.context,
        cfg.sampling,
        cfg.batch_rows,
        cfg.model.attention == "eager",
        memory.limit(cfg.memory, model.device),
    )


def report(prepared: Prepared) -> dict[str, Any]:
    """The report of what the store holds for this run's cells, measured now or before."""
    cfg = prepared.cfg
    notes = []
    foreign = sorted({d.name for d in cfg.datasets} - {"tiny"})
    if cfg.model.path == "embedded:tiny" and foreign:
        notes.append(
            f"The tiny model was trained on synthetic text only, not on text like that of {', '.join(foreign)}."
        )
    if cfg.model.weights == "random":
        notes.append("Random weights: scores mean nothing, only bytes and times do.")
    if cfg.shards > 1:
        notes.append(f"Shard {cfg.shard} of {cfg.shards}: the other shards' examples are not counted here.")
    notes += [f"{m} for prompts no shorter than that." for m in prepared.matched]
    collected = collect(prepared.groups, prepared.store, notes)
    matched = {"matched": [asdict(m) for m in prepared.matched]} if prepared.matched else {}
    return {"model": cfg.model.path, "settings": settings(prepared), **matched, **collected}


def _model_name(cfg: RunConfig) -> str:
    return cfg.model.name if cfg.model.name != "hf" else cfg.model.path


def settings(prepared: Prepared) -> str:
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
    parts.append(", ".join(prompt + ([] if cfg.prompt.query_aware else ["question withheld"])))
    if cfg.sampling.temperature:
        parts.append(f"temperature {cfg.sampling.temperature:g}, top_p {cfg.sampling.top_p:g}")
    return "; ".join(parts) + "."


def _write_metrics(prepared: Prepared, group: Group, cell: Cell) -> dict[str, Any] | None:
    """Write metrics.json of a cell from all its samples, atomically; None where there are none, or none to report."""
    samples = list(prepared.store.samples(cell.id).values())
    if not samples or prepared.store.refusal(cell.id) is not None:
        return None
    metrics = summarise(samples, group.task.metric, len(group.task.examples))
    status = "complete" if metrics["n"] == metrics["of"] else "partial"
    prepared.store.write_metrics(cell.id, {"status": status, **metrics})
    return metrics


def stop_tokens(prepared: Prepared) -> frozenset[int]:
    """End-of-sequence ids of tokenizer and checkpoint, and the last token of each of the model's stop texts."""
    found = load.end_tokens(prepared.cfg.model, prepared.source)
    own = getattr(prepared.tokenizer, "eos_token_id", None)
    if own is not None:
        found.add(own)
    for text in prepared.cfg.model.stop:
        found.add(prepared.tokenizer.encode(text, add_special_tokens=False)[-1])
    return frozenset(found)


def set_threads(cfg: RunConfig, config: Any) -> int:
    """Threads as asked; a model of tiny matrices runs faster on one, since threads mostly wait for each other."""
    if cfg.threads is not None:
        torch.set_num_threads(cfg.threads)
    elif int(getattr(config, "hidden_size", SMALL_MODEL)) < SMALL_MODEL:
        torch.set_num_threads(1)
    return torch.get_num_threads()
