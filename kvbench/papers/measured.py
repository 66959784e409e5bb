"""Our side of a paper's table: its rows as chains of one run, measured where missing, and read from the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from kvbench import config, experiment, presets, report
from kvbench.cli.rewrite import entries, rewrite
from kvbench.config import ChainConfig
from kvbench.errors import UsageError
from kvbench.experiment import Prepared
from kvbench.methods import registry
from kvbench.methods.chain import Chain
from kvbench.model import load
from kvbench.model.interface import head_counts
from kvbench.papers import settings, standin, timings
from kvbench.papers.declared import Column, Declared, Row
from kvbench.papers.published import model_id
from kvbench.papers.timings import Timings
from kvbench.plan import Cell, Group
from kvbench.tasks.base import load_tasks
from kvbench.tasks.longbench import TASKS

RESULTS = "results"


@dataclass(frozen=True)
class Line:
    """A row of the paper on our model: its chain, or why it cannot run (``refused``) or does not here (``skipped``)."""

    row: Row
    chain: Chain | None = None
    refused: str = ""
    skipped: str = ""


@dataclass(frozen=True)
class Ours:
    """A paper's table on ``model``: one line per row, the run that measures them, and our task of each column.

    ``stand_in``: the model is none of the table's. ``run`` is None where nothing of the table can be run. ``absent``:
    datasets that cannot be read, with the reason. ``timings``: what was timed, of an efficiency table.
    """

    declared: Declared
    model: str
    stand_in: bool
    lines: tuple[Line, ...]
    run: Prepared | None
    tasks: Mapping[str, str]
    absent: Mapping[str, str] = field(default_factory=dict)
    timings: Timings | None = None

    def cell(self, line: Line, column: Column) -> tuple[Group, Cell] | None:
        """The cell of the store behind a score, with the group that it is measured in."""
        return self._find(line.chain, column) if line.chain is not None else None

    def full(self, column: Column) -> tuple[Group, Cell] | None:
        """The full-cache cell of a column."""
        return self._find(Chain(), column)

    def _find(self, chain: Chain, column: Column) -> tuple[Group, Cell] | None:
        if self.run is None or column.dataset not in self.tasks:
            return None
        group = next(g for g in self.run.groups if g.task.id == self.tasks[column.dataset])
        cell = next((c for c in group.cells if c.chain == chain), None)
        return None if cell is None else (group, cell)

    def value(self, line: Line, column: Column) -> dict[str, Any]:
        """What was measured of a line: ``status`` (measured, refused, missing) with numbers or the reason."""
        if line.refused:
            return {"status": "refused", "reason": line.refused}
        found = self.cell(line, column)
        if found is None:
            return {"status": "missing", "reason": line.skipped}
        assert self.run is not None
        return report.measured(*found, self.run.store)


def printed(declared: Declared, model: str, why: str) -> Ours:
    """The table with the paper's side only; ``why`` says why nothing is measured."""
    if declared.kind == timings.KIND:
        return timed(timings.read(declared, model, Path(RESULTS)))
    lines = tuple(Line(r, skipped=why) for r in declared.rows)
    # what is no score stands as it is printed
    return Ours(declared, model, declared.measurable and _stands_in(declared, model), lines, None, {})


def timed(found: Timings) -> Ours:
    """An efficiency table with what was timed for it."""
    lines = tuple(Line(r) for r in found.table.rows)
    return Ours(found.table, found.bench.model, found.stand_in, lines, None, {}, timings=found)


def prepare(declared: Declared, model: str, arguments: Sequence[str] = ()) -> Ours:
    """The table on ``model`` (an entry of conf/model, a folder or a hub id); ``arguments`` are more of ``run``'s.

    Rows of other models are skipped, unless the model is none of the table's: then it stands in for all of them, and
    the tiny model with tasks and budgets of its own. Columns whose dataset is not there are left out. An efficiency
    table shows what is stored in ``results=``, and tiny gives way to the paper's own model where there are rows of it.
    No ``model`` is tiny. Raises UsageError for what is not possible, or where no dataset is there.
    """
    if declared.kind == timings.KIND:
        given = dict(a.partition("=")[::2] for a in arguments)
        chosen = "" if model == standin.MODEL else model
        return timed(timings.read(declared, chosen, Path(given.get("results", RESULTS))))
    model = model or standin.MODEL
    stand_in = _stands_in(declared, model)
    if not declared.measurable:
        return printed(declared, model, f"its numbers are no scores ({declared.kind})")
    small = replace(standin.TINY, of=declared.length) if model == standin.MODEL else None
    values = presets.values(declared.preset, model if model in entries("model") else "")
    lines = tuple(
        _line(declared, row, values, small)
        if stand_in or model_id(declared.entry(row.model)) == model_id(model)
        else Line(row, skipped=f"a row of {row.model}")
        for row in declared.rows
    )
    datasets = list(dict.fromkeys(c.dataset for c in declared.scores))
    tasks = {d: f"tiny/{standin.task_of(d)}" if small else _dataset(d) for d in datasets}
    written = [f"model={model}", f"preset={declared.preset}", "method=full", *arguments]
    source = load.locate(_composed(written).model)
    missing: dict[str, str] = {}
    if not small:
        missing = {d: why for d, task in tasks.items() if (why := _missing([*written, f"dataset={task}"]))}
        if len(missing) == len(tasks):
            raise UsageError(f"{declared.id}: none of its datasets can be read; {next(iter(missing.values()))}")
    wanted = dict.fromkeys(task for d, task in tasks.items() if d not in missing)
    base = _composed([*written, f"dataset={','.join(wanted)}"])
    lines = tuple(_checked(line, source.config) for line in lines)
    chains = dict.fromkeys(line.chain for line in lines if line.chain is not None)
    labels = {line.chain: line.row.name for line in reversed(lines)}
    cfg = replace(base, chains=tuple(ChainConfig(c, labels[c] if c.stages else "full") for c in chains))
    there = {d: task for d, task in tasks.items() if d not in missing}
    return Ours(declared, model, stand_in, lines, experiment.prepare(cfg), there, missing)


def _stands_in(declared: Declared, model: str) -> bool:
    return model_id(model) not in [model_id(declared.entry(m)) for m in declared.models()]


def _composed(arguments: Sequence[str]) -> config.RunConfig:
    return config.parse(config.compose_config(rewrite(arguments).runs[0]))


def _missing(arguments: Sequence[str]) -> str:
    """Why a run's dataset cannot be read; '' if it can."""
    try:
        cfg = _composed(arguments)
        (dataset,) = cfg.datasets
        load_tasks(dataset.name, dataset.knobs, dataset.tasks, None, cfg.data_root)
    except UsageError as reason:
        return str(reason)
    return ""


def _dataset(name: str) -> str:
    """``run``'s name for a published dataset."""
    return f"longbench/{name}" if name in TASKS else name


def _line(declared: Declared, row: Row, values: Mapping[str, Any], small: settings.StandIn | None) -> Line:
    method = settings.method_of(row.method, settings.parse(row.setting))
    if method == "full":
        return Line(row, Chain())
    try:
        stages = registry.split(method)
        knobs: settings.Knobs = {}
        if small is not None:
            knobs |= settings.scaled_windows(values, stages, small)
            own = {**standin.SAMPLES, **declared.stand_in}
            knobs |= {f"method.{s}.{k}": v for s in stages for k, v in own.get(s, {}).items()}
        knobs |= declared.arguments.get(row.method, {})
        knobs |= settings.knobs(row.method, row.setting, small)
        return Line(row, registry.parse({"method": method, **_read(knobs)}, preset=values))
    except UsageError as reason:
        return Line(row, refused=str(reason))


def _read(knobs: Mapping[str, str]) -> dict[str, Any]:
    return {k: yaml.safe_load(v) for k, v in knobs.items()}


def _checked(line: Line, model: Any) -> Line:
    """The line, refused if its method cannot run on a model of this configuration."""
    if line.chain is None:
        return line
    try:
        line.chain.check_model(str(model.model_type), int(model.num_hidden_layers), head_counts(model))
    except UsageError as reason:
        return Line(line.row, refused=str(reason))
    return line
