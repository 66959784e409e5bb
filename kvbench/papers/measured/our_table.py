"""Our side of a paper's table: its rows as chains of one run, measured where missing, and read from the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import yaml

from kvbench.base.conf import entries
from kvbench.base.errors import UsageError
from kvbench.methods.core import registry
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.resolve import ChainConfig, chain_of
from kvbench.models import load, traits
from kvbench.papers.spec import row_knobs, stand_ins
from kvbench.papers.spec.published import model_id
from kvbench.papers.spec.table_spec import Column, Given, TableRow, TableSpec
from kvbench.papers.spec.workloads import FAMILIES, INSTEAD, Reader, TableWorkload, composed, labels
from kvbench.papers.timed import timings
from kvbench.papers.timed.timings import Timings
from kvbench.plan import presets
from kvbench.plan.cells import Cell, Group
from kvbench.plan.run_plan import context_of
from kvbench.report import summary
from kvbench.report.report import CellResult
from kvbench.run import experiment
from kvbench.run.experiment import RunPlan
from kvbench.store.store import ResultStore
from kvbench.tasks.base import Tokenizer

RESULTS = "results"
_READING = ("max_length", "template", "truncation", "system", "query_aware", "bos")
CONDITIONS = frozenset((*_READING, "min_new_tokens", "max_new_tokens", "temperature"))
"""Keys of ``run`` without which prompts are read, and answers made, as a paper's own."""


@dataclass(frozen=True)
class TableLine:
    """A row of the paper on our model: its chain, or why it is ``refused`` on it or ``skipped`` here.

    ``reads``: the workload of each of the table's datasets. ``others``: chains of datasets that have one of their own.
    """

    row: TableRow
    chain: Chain | None = None
    refused: str = ""
    skipped: str = ""
    reads: Mapping[str, TableWorkload] = field(default_factory=dict)
    others: Mapping[str, Chain] = field(default_factory=dict)

    def chain_of(self, dataset: str) -> Chain | None:
        """Return the chain that is measured on a dataset."""
        return self.others.get(dataset, self.chain)


Parts = tuple[tuple[Group, Cell], ...]
"""The cells of the store behind one number, a task each, with the group that each is measured in."""


@dataclass(frozen=True)
class OurTable:
    """A paper's table on ``model``: one line per row, and the run that measures them.

    stand_in: whether the model is none of the table's.
    run: the run of all lines; None if nothing of the table can be run.
    groups: the groups of the run by workload.
    absent: for each workload that cannot be read, the reason.
    notes: what readers must know about the data that are read.
    timings: the timed rows of an efficiency table.
    typed: the user's arguments that change how prompts are read and answered.
    """

    declared: TableSpec
    model: str
    stand_in: bool
    lines: tuple[TableLine, ...]
    run: RunPlan | None
    groups: Mapping[TableWorkload, tuple[Group, ...]] = field(default_factory=dict)
    absent: Mapping[TableWorkload, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    timings: Timings | None = None
    typed: tuple[str, ...] = ()

    def cells(self, line: TableLine, column: Column, chain: Chain | None = None) -> Parts:
        """Return the store's cells of a line's chain, or of ``chain``, in a column; none if it is not measured."""
        wanted_chain = line.chain_of(column.dataset) if chain is None else chain
        workload = line.reads.get(column.dataset)
        if wanted_chain is None or workload is None:
            return ()
        return tuple((g, c) for g in self.groups.get(workload, ()) for c in g.cells if c.chain == wanted_chain)

    def full(self, line: TableLine, column: Column) -> Parts:
        """Return the full-cache cells of a line's workload in a column."""
        return self.cells(line, column, Chain())

    def why_absent(self, line: TableLine, column: Column) -> str:
        """Return why a line's workload in a column cannot be read; '' where it can."""
        workload = line.reads.get(column.dataset)
        return self.absent.get(workload, "") if workload is not None else ""

    def value(self, line: TableLine, column: Column) -> CellResult:
        """Return the result of a line in a column, over all tasks together where the dataset has several."""
        if line.refused:
            return CellResult("", "", "refused", reason=line.refused)
        cells = self.cells(line, column)
        if not cells:
            return CellResult("", "", "missing", reason=line.skipped or self.why_absent(line, column))
        assert self.run is not None
        store = self.run.store
        parts = [summary.measured(g, c, store) for g, c in cells]
        failure = next((p for p in parts if p.status in ("refused", "failed")), None)
        measured = [(g, c) for (g, c), p in zip(cells, parts, strict=True) if p.status == "measured"]
        if len(cells) == 1 or failure is not None or not measured:
            return failure or parts[0]
        samples = [store.samples(c.id)[e.id] for g, c in measured for e in g.examples if e.id in store.samples(c.id)]
        pooled = summary.summarise(samples, cells[0][0].task.metric, sum(len(g.task.examples) for g, _ in cells))
        unchanged = all(p.unchanged for p in parts if p.status == "measured")
        return CellResult("", " ".join(c.id for _, c in cells), "measured", summary=pooled, unchanged=unchanged)


def scores(store: ResultStore, group: Group, cell: Cell) -> dict[str, float]:
    """Return the stored scores of a cell by example, in the order of the group's examples."""
    samples = store.samples(cell.id)
    return {e.id: x for e in group.examples if e.id in samples and (x := samples[e.id].score) is not None}


def printed(declared: TableSpec, model: str, why: str) -> OurTable:
    """Build the table with the paper's side only; ``why`` says why nothing is measured."""
    if declared.kind == timings.KIND:
        return timed(timings.read(declared, model, Path(RESULTS)))
    lines = tuple(TableLine(r, skipped=why) for r in declared.rows)
    # other numbers than scores stand as printed, so that no model stands in for them
    return OurTable(declared, model, declared.measurable and stands_in(declared, model), lines, None)


def timed(found: Timings) -> OurTable:
    """Build an efficiency table from its measured rows."""
    lines = tuple(TableLine(r) for r in found.table.rows)
    return OurTable(found.table, found.bench.model, found.stand_in, lines, None, timings=found)


def prepare(declared: TableSpec, model: str, arguments: Sequence[str] = ()) -> OurTable:
    """Plan the table on ``model`` (an entry of conf/model, a folder or a hub id); ``arguments`` are ``run``'s.

    Rows of other models are skipped. A model that is none of the table's stands in for all of them; tiny does so with
    tasks and budgets of its own. No ``model`` is tiny. Datasets that cannot be read are left out and listed in
    ``absent``; where that is all, ``run`` is None. ``longbench=`` (full, mini) chooses the source of LongBench's
    columns. An efficiency table shows the rows stored in ``results=``; tiny gives way to the paper's own model where
    there are rows of it. Raises UsageError for arguments that are not possible.
    """
    options = dict(a.partition("=")[::2] for a in arguments)
    if declared.kind == timings.KIND:
        chosen = "" if model == stand_ins.MODEL else model
        return timed(timings.read(declared, chosen, Path(options.get("results", RESULTS))))
    model, family = model or stand_ins.MODEL, options.pop("longbench", "")
    if not declared.measurable:
        return printed(declared, model, f"its numbers are no scores ({declared.kind})")
    stand_in, tiny = stands_in(declared, model), model == stand_ins.MODEL
    preset = [f"preset={declared.preset}"] if declared.preset else []
    written = (f"model={model}", *preset, "method=full", *(f"{k}={v}" for k, v in options.items()))
    base = composed(written, [c.dataset for c in declared.scores], tiny)
    if "max_length" not in options and {c.dataset for c in declared.scores} <= declared.workloads.keys() & {"needle"}:
        # texts of given lengths are not cut; limits of prompts are those of LongBench
        base = replace(base, prompt=replace(base.prompt, max_length=None))
    source = load.locate(base.model)
    size = stand_ins.size(source.config, declared.length if tiny else None) if stand_in else None
    values = presets.values(declared.preset, model if model in entries("model") else "") if preset else {}
    lines = tuple(
        _line(declared, row, values, size, tiny, source.config)
        if stand_in or model_id(declared.entry(row.model)) == model_id(model)
        else TableLine(row, skipped=f"a row of {row.model}")
        for row in declared.rows
    )
    notes: list[str] = []
    if size is not None and tiny and not isinstance(declared, Given):
        notes += stand_ins.notes(declared)
        declared, lines = _distinct(declared, lines, size)
    elif size is not None and stand_ins.depths(size) and any("uncomp-stage" in line.row.method for line in lines):
        notes.append(f"uncomp-stage: the paper's schedule is of other numbers of layers than {size.layers}; relative.")
    if size is not None and not tiny:
        frozen_layers = (row_knobs.parse(line.row.setting).get("frozen", "none") for line in lines)
        too_deep = dict.fromkeys(f for f in frozen_layers if f != "none" and max(map(int, f.split("+"))) >= size.layers)
        notes += [f"frozen={f}: layers that this model of {size.layers} does not have are its last." for f in too_deep]
    tokenizer = cast(Tokenizer, load.load_tokenizer(base.model, source))
    reader = Reader(declared, base, written, tokenizer, context_of(base, source), tiny)
    lines, absent, reading_notes = _reading(reader, lines, family, stand_in)
    notes += reading_notes
    workloads = dict.fromkeys(w for line in lines if line.chain is not None for w in line.reads.values())
    reads = [w for w in workloads if w not in absent]
    if not reads:
        return OurTable(declared, model, stand_in, lines, None, {}, absent, tuple(notes))
    run, groups = _plan(reader, lines, reads)
    mini_sizes = [len(g.task.examples) for w, members in groups.items() for g in members if w.entry == FAMILIES["mini"]]
    if mini_sizes:
        notes.append(f"LongBench columns: MiniLongBench's examples, {min(mini_sizes)} to {max(mini_sizes)} a task.")
    typed = tuple(f"{k}={v}" for k, v in options.items() if k.removeprefix("prompt.") in CONDITIONS)
    return OurTable(declared, model, stand_in, lines, run, groups, absent, tuple(notes), typed=typed)


def _plan(
    reader: Reader, lines: Sequence[TableLine], reads: Sequence[TableWorkload]
) -> tuple[RunPlan, dict[TableWorkload, tuple[Group, ...]]]:
    """Plan the run of the cells behind printed numbers, and of the full cache; return it with groups by workload."""
    label_of = labels(w.whole for w in reads)
    datasets = []
    for whole, label in label_of.items():
        parts = dict.fromkeys(p for w in reads if w.whole == whole for p in w.parts or ())
        datasets.append(reader.config(replace(whole, parts=tuple(parts) or None), label))
    chains: dict[Chain, str] = {}
    for line in lines:
        for chain in (line.chain, *line.others.values()):
            if chain is not None:
                chains.setdefault(chain, line.row.name if chain.stages else "full")
    chain_configs = tuple(ChainConfig(chain, name) for chain, name in chains.items())
    run = experiment.prepare(replace(reader.cfg, chains=chain_configs, datasets=tuple(datasets)))
    groups = []
    for group in run.groups:
        chains_here = {Chain()} | {
            line.chain_of(d)
            for line in lines
            for d, w in line.reads.items()
            if line.chain is not None and w.owns(group, label_of.get(w.whole, "-"))
        }
        groups.append(replace(group, cells=tuple(c for c in group.cells if c.chain in chains_here)))
    by_workload = {w: tuple(g for g in groups if w.owns(g, label_of[w.whole])) for w in reads}
    return replace(run, groups=tuple(groups)), by_workload


def _distinct(
    declared: TableSpec, lines: Sequence[TableLine], size: row_knobs.StandIn
) -> tuple[Given, tuple[TableLine, ...]]:
    """Return the tiny model's own table: its tasks as columns, and each chain once with the knobs that it has."""
    first: dict[object, tuple[TableLine, str]] = {}
    for line in lines:
        setting = stand_ins.settled(line.row, size)
        first.setdefault(line.chain if line.chain is not None else (line.row.method, setting), (line, setting))
    table = stand_ins.own_table(declared, ((line.row.method, setting) for line, setting in first.values()))
    rows = zip(table.rows, first.values(), strict=True)
    return table, tuple(
        replace(line, row=row, others={stand_ins.task_of(d, declared): c for d, c in line.others.items()})
        for row, (line, _) in rows
    )


def _reading(
    reader: Reader, lines: Sequence[TableLine], family: str, stand_in: bool
) -> tuple[tuple[TableLine, ...], dict[TableWorkload, str], list[str]]:
    """Return (lines with workloads, reason by workload that cannot be read, notes on what is read instead)."""
    datasets = list(dict.fromkeys(c.dataset for c in reader.declared.scores))
    family_name = reader.family(datasets, family)
    absent: dict[TableWorkload, str] = {}
    seen: set[TableWorkload] = set()
    notes: dict[str, None] = {}
    new_lines = []
    for line in lines:
        reads = {}
        for dataset in (c.dataset for c in reader.declared.scores if c.name in line.row.cells):
            workload = reader.workload(line.row, dataset, family_name)
            if workload not in seen and not reader.small:
                seen.add(workload)
                if why := reader.why_not(workload):
                    absent[workload] = why
            if workload in absent and stand_in and dataset in INSTEAD:
                substitute, note = INSTEAD[dataset]
                instead = replace(workload, name=substitute)
                if instead in seen or not reader.why_not(instead):
                    seen.add(instead)
                    notes[note] = None
                    workload = instead
            if line.chain is not None and not reader.small and (too_long := reader.beyond(line.row, dataset)):
                lengths = ", ".join(map(str, too_long))
                prompts = f"{dataset}: prompts of {lengths} tokens, which rows of {line.row.model} have,"
                notes[f"{prompts} are beyond the model's context."] = None
            reads[dataset] = workload
        new_lines.append(replace(line, reads=reads))
    used = {w for line in new_lines for w in line.reads.values()}
    return tuple(new_lines), {w: why for w, why in absent.items() if w in used}, list(notes)


def stands_in(declared: TableSpec, model: str) -> bool:
    """Tell whether a model is none of those whose numbers a table prints."""
    return model_id(model) not in [model_id(declared.entry(m)) for m in declared.models()]


def _line(
    declared: TableSpec,
    row: TableRow,
    values: Mapping[str, Any],
    size: row_knobs.StandIn | None,
    tiny: bool = False,
    model: Any = None,
) -> TableLine:
    """Build a row's line with its chain; it is refused where no chain is possible or the model cannot run it."""
    setting = row_knobs.parse(row.setting)
    method = row_knobs.method_of(row.method, setting)
    if size is not None and "windows" in setting:
        size = replace(size, windows=setting["windows"])
    if method == "full":
        return TableLine(row, Chain())
    columns = {c.dataset for c in declared.scores if c.name in row.cells}
    try:
        stages = registry.split(method)
        knobs: row_knobs.Knobs = {}
        if size is not None:
            knobs |= row_knobs.scaled_windows(values, stages, size)
            stage_knobs = {**stand_ins.SAMPLES, **declared.stand_in} if tiny else stand_ins.depths(size)
            knobs |= {f"method.{s}.{k}": v for s in stages for k, v in stage_knobs.get(s, {}).items()}
        knobs |= declared.arguments.get(row.method, {})

        def chain(more: str = "") -> Chain:
            """Build the row's chain, with ``more`` settings of a dataset before its own."""
            texts = knobs | row_knobs.knobs(row.method, ";".join(filter(None, (more, row.setting))), size)
            return chain_of({"method": method, **{k: yaml.safe_load(v) for k, v in texts.items()}}, preset=values)

        line = TableLine(row, chain(), others={d: chain(more) for d, more in declared.settings.items() if d in columns})
        if line.chain is not None and model is not None:
            line.chain.check_model(traits.of_config(model))
    except UsageError as reason:
        return TableLine(row, refused=str(reason))
    return line
