"""Our side of a paper's table: its rows as chains of one run, measured if missing, and read from the store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

import yaml

from kvbench.base.conf import YAML_LOADER, entries
from kvbench.base.errors import UsageError
from kvbench.methods.core import registry
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.resolve import ChainConfig, chain_of
from kvbench.models import load, traits
from kvbench.models.traits import ModelTraits
from kvbench.papers.spec import row_knobs, stand_ins
from kvbench.papers.spec.published import model_id
from kvbench.papers.spec.table_spec import Column, TableRow, TableSpec, UnprintedTable
from kvbench.papers.spec.workloads import (
    FAMILIES,
    INSTEAD,
    TableWorkload,
    WorkloadChooser,
    configure_run,
    label_workloads,
)
from kvbench.papers.timed import timings
from kvbench.papers.timed.timings import Timings
from kvbench.plan import presets, run_plan
from kvbench.plan.cells import Group
from kvbench.plan.config import RunConfig
from kvbench.plan.inputs import Inputs
from kvbench.plan.run_plan import RunPlan
from kvbench.report.data import CellResult
from kvbench.report.of_run import report_cell
from kvbench.report.summary import summarise
from kvbench.store.cell import Cell
from kvbench.store.sample_reader import SampleReader

RESULTS = "results"
"""The results folder if the user names none."""
_READING_KEYS = frozenset(("max_length", "template", "truncation", "system", "query_aware", "bos"))
CONDITIONS = _READING_KEYS | {"min_new_tokens", "max_new_tokens", "temperature"}
"""Keys of ``run`` that change how prompts are read and answered, so that scores differ from the paper's."""


@dataclass(frozen=True)
class TableLine:
    """A row of the paper on our model: its chain, or the reason why it has no chain.

    row: the paper's row with its printed cells.
    chain: the row's method or combination of methods with its options; None for a refused or skipped row.
    refused: why the model cannot run the row, '' if it can.
    skipped: why the row is not run here, '' if it is.
    reads: the data that the row reads, by dataset of the table.
    other_chains: chains that replace ``chain``, by the dataset for which the paper states other settings.
    """

    row: TableRow
    chain: Chain | None = None
    refused: str = ""
    skipped: str = ""
    reads: Mapping[str, TableWorkload] = field(default_factory=dict)
    other_chains: Mapping[str, Chain] = field(default_factory=dict)

    def chain_of(self, dataset: str) -> Chain | None:
        """Return the chain that is measured on a dataset; None for a refused or skipped row."""
        return self.other_chains.get(dataset, self.chain)


Parts = tuple[tuple[Group, Cell], ...]
"""The results in the store behind one number: one cell per task, each with the group in which it is measured."""


@dataclass(frozen=True)
class OurTable:
    """A paper's table on ``model``: one line per row, and the run that measures the lines.

    declared: the paper's table.
    stand_in: whether the table has no numbers of the model, so that the model is a substitute.
    run: the run of all lines; None if nothing of the table can be run.
    groups: the run's groups of cells by workload: one for each task of the workload.
    absent: by workload that cannot be read, the reason.
    notes: sentences for readers about the data that are read.
    timings: the timed rows of an efficiency table; None for a table of scores.
    typed: the user's arguments (``key=value``) that change how prompts are read and answered.
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

    def find_cells(self, line: TableLine, column: Column, chain: Chain | None = None) -> Parts:
        """Return the cells that measure a line in a column, with their groups; () if the run has none.

        chain: the chain to look for in place of the line's own.
        """
        wanted_chain = chain if chain is not None else line.chain_of(column.dataset)
        workload = line.reads.get(column.dataset)
        # a refused or skipped line has no chain, and a line reads no data for a cell that the paper does not print
        if wanted_chain is None or workload is None:
            return ()
        parts = []
        # a workload that could not be read has no groups
        for group in self.groups.get(workload, ()):
            parts += [(group, cell) for cell in group.cells if cell.chain == wanted_chain]
        return tuple(parts)

    def find_full_cells(self, line: TableLine, column: Column) -> Parts:
        """Return the full-cache cells of a line's workload in a column."""
        # a chain without stages is the full cache
        return self.find_cells(line, column, Chain())

    def why_absent(self, line: TableLine, column: Column) -> str:
        """Return why a line's workload in a column cannot be read; '' if it can."""
        workload = line.reads.get(column.dataset)
        if workload is None:
            return ""
        return self.absent.get(workload, "")

    def read_result(self, line: TableLine, column: Column, reader: SampleReader | None = None) -> CellResult:
        """Return a line's stored result in a column. If the dataset has several tasks, their examples are pooled.

        A line that is not measured has a result with a status (refused, failed, missing) and its reason.

        reader: the reader of the run's samples, if the caller reads some of them, too.
        """
        # a table names its columns itself, so its results name no task; a line without cells has no id either
        if line.refused:
            return CellResult(task="", cell="", status="refused", reason=line.refused)
        cells = self.find_cells(line, column)
        if not cells:
            reason = line.skipped or self.why_absent(line, column)
            return CellResult(task="", cell="", status="missing", reason=reason)
        # cells come from the run's groups
        assert self.run is not None
        reader = reader or SampleReader(self.run.store)
        results = [report_cell(group, cell, reader) for group, cell in cells]
        for result in results:
            # one task without a number leaves none for the dataset
            if result.status in ("refused", "failed"):
                return result
        # one task needs no pooling; if none is measured, all results say the same
        if len(cells) == 1 or all(result.status != "measured" for result in results):
            return results[0]
        return _pool_results(cells, results, reader)


def _pool_results(cells: Parts, results: Sequence[CellResult], reader: SampleReader) -> CellResult:
    samples = []
    unchanged = True
    for (group, cell), result in zip(cells, results, strict=True):
        if result.status != "measured":
            continue
        stored = reader.read(cell.id)
        samples += [stored[example.id] for example in group.examples if example.id in stored]
        unchanged = unchanged and result.unchanged
    total = sum(len(group.task.examples) for group, _ in cells)
    # the tasks of one dataset have one metric
    first_group, _ = cells[0]
    pooled = summarise(samples, first_group.task.metric, total)
    ids = " ".join(cell.id for _, cell in cells)
    return CellResult(task="", cell=ids, status="measured", summary=pooled, unchanged=unchanged)


def stored_scores(reader: SampleReader, group: Group, cell: Cell) -> dict[str, float]:
    """Return the stored scores of a cell by example id, in the order of the group's examples."""
    samples = reader.read(cell.id)
    score_by_example = {}
    for example in group.examples:
        # an example may have no answer yet, or an answer that could not be scored
        score = samples[example.id].score if example.id in samples else None
        if score is not None:
            score_by_example[example.id] = score
    return score_by_example


def split_options(arguments: Iterable[str]) -> dict[str, str]:
    """Return arguments of the form ``key=value`` as a mapping. A later one replaces an earlier one with its key."""
    options = {}
    for argument in arguments:
        key, _, value = argument.partition("=")
        options[key] = value
    return options


def make_printed_table(declared: TableSpec, model: str, why: str) -> OurTable:
    """Return a table whose rows are all skipped, so that it shows the paper's side only.

    An efficiency table has its stored rows nevertheless.

    why: the reason that the skipped rows give.
    """
    if declared.kind == timings.KIND:
        return make_timed_table(timings.read_timings(declared, model, Path(RESULTS)))
    lines = tuple(TableLine(row, skipped=why) for row in declared.rows)
    # in a table without scores all values stand as printed, so no model stands in for the paper's
    stand_in = declared.measurable and stands_in(declared, model)
    return OurTable(declared, model, stand_in, lines=lines, run=None)


def make_timed_table(measured: Timings) -> OurTable:
    """Return an efficiency table as an OurTable. ``measured`` has its declaration and its measured rows."""
    # timed rows have no chains: ``measured`` matches them to the printed cells
    lines = tuple(TableLine(row) for row in measured.table.rows)
    return OurTable(measured.table, measured.bench.model, measured.stand_in, lines=lines, run=None, timings=measured)


def prepare(declared: TableSpec, model: str, arguments: Sequence[str] = (), inputs: Inputs | None = None) -> OurTable:
    """Plan a paper's table on one model: return its lines, and the run that measures them, without measuring.

    model: an entry of conf/model, a folder or a hub id; '' for the tiny model.
    arguments: key=value arguments of ``run``, and ``longbench=`` (full, mini), the source of LongBench's columns.
    inputs: the tokenizers and tasks that the caller's other tables have read; None: there are none.

    If the table prints numbers of the model, rows of other models are skipped. If it prints none, the model stands in
    for all of its models. The tiny model does so with tasks and budgets of its own.

    Datasets that cannot be read are left out and listed in ``absent``. If none can be read, ``run`` is None. An
    efficiency table shows the rows stored in ``results=``. Without a model, or for the tiny one, rows of the paper's
    own model come first.

    Raises UsageError for impossible arguments.
    """
    options = split_options(arguments)
    if declared.kind == timings.KIND:
        # without a given model, rows of the paper's own model are shown before the tiny model's
        timed_model = "" if model == stand_ins.MODEL else model
        return make_timed_table(timings.read_timings(declared, timed_model, Path(options.get("results", RESULTS))))
    model = model or stand_ins.MODEL
    # tables of facts, or of sizes, have no scores to compare with
    if not declared.measurable:
        return make_printed_table(declared, model, f"its numbers are no scores ({declared.kind})")
    return _prepare_scores(declared, model, options, inputs or Inputs())


def _prepare_scores(declared: TableSpec, model: str, options: dict[str, str], inputs: Inputs) -> OurTable:
    family = options.pop("longbench", "")
    stand_in, tiny = stands_in(declared, model), model == stand_ins.MODEL
    settings: dict[str, object] = {"model": model}
    if declared.preset:
        settings["preset"] = declared.preset
    # a configuration needs a method; ``_plan_run`` replaces it by the chains of the table's rows
    settings["method"] = "full"
    settings |= options
    base = _compose_run(declared, settings, tiny)
    source = load.locate(base.model)
    # the sizes for scaling the paper's numbers of tokens and layers; the paper's own models need none
    size = None
    if stand_in:
        size = stand_ins.find_stand_in_size(source.config, scaled_from=declared.length if tiny else None)
    lines = _build_lines(declared, model, size, source.config)
    notes: list[str] = []
    # rows declared by claims have tiny's tasks as columns already
    if size is not None and tiny and not isinstance(declared, UnprintedTable):
        notes += stand_ins.write_notes(declared)
        declared, lines = _make_tiny_table(declared, lines, size)
    elif size is not None:
        notes += _note_missing_layers(lines, size, tiny)
    context = traits.context_length(source.config, base.model.context)
    tokenizer = inputs.tokenizer(base.model, source)
    chooser = WorkloadChooser(declared, base, settings, tokenizer, inputs=inputs, context=context, small=tiny)
    lines, absent, reading_notes = _choose_workloads(chooser, lines, family, stand_in)
    notes += reading_notes
    planned = OurTable(declared, model, stand_in, lines=lines, run=None, absent=absent, notes=tuple(notes))
    readable = _list_readable_workloads(lines, absent)
    # without data, or without a row for this model, there is nothing to run
    if not readable:
        return planned
    run, groups = _plan_run(chooser, lines, readable)
    notes += _note_minilongbench(groups)
    typed = [f"{key}={value}" for key, value in options.items() if key.removeprefix("prompt.") in CONDITIONS]
    return replace(planned, run=run, groups=groups, notes=tuple(notes), typed=tuple(typed))


def _list_readable_workloads(lines: Sequence[TableLine], absent: Mapping[TableWorkload, str]) -> list[TableWorkload]:
    workloads: dict[TableWorkload, None] = {}
    for line in lines:
        if line.chain is not None:
            workloads |= dict.fromkeys(line.reads.values())
    return [workload for workload in workloads if workload not in absent]


def _compose_run(declared: TableSpec, settings: Mapping[str, object], tiny: bool) -> RunConfig:
    datasets = [column.dataset for column in declared.scores]
    base = configure_run(settings, datasets, tiny)
    # true if the needle test is the only dataset and the table declares its knobs, and thus the lengths of its texts
    has_stated_lengths = set(datasets) <= declared.workloads.keys() & {"needle"}
    if has_stated_lengths and "max_length" not in settings:
        # such texts are read whole: the limits of prompts are meant for LongBench
        base = replace(base, prompt=replace(base.prompt, max_length=None))
    return base


def _build_lines(
    declared: TableSpec, model: str, size: row_knobs.StandIn | None, config: object
) -> tuple[TableLine, ...]:
    values: Mapping[str, object] = {}
    if declared.preset:
        # a preset can state values for single models; a folder or hub id gets the values for any model
        values = presets.values(declared.preset, model if model in entries("model") else "")
    tiny = model == stand_ins.MODEL
    # the rows have one model, whose traits are looked up by the text of its configuration
    find_traits = cache(partial(traits.of_config, config))
    lines = []
    for row in declared.rows:
        if size is not None or model_id(declared.model_entry(row.model)) == model_id(model):
            lines.append(_build_line(declared, row, values, size=size, tiny=tiny, find_traits=find_traits))
        else:
            lines.append(TableLine(row, skipped=f"a row of {row.model}"))
    return tuple(lines)


def _note_missing_layers(lines: Sequence[TableLine], size: row_knobs.StandIn, tiny: bool) -> list[str]:
    notes = []
    if stand_ins.choose_depth_knobs(size) and any("uncomp-stage" in line.row.method for line in lines):
        notes.append(f"uncomp-stage: the paper has no schedule for {size.layers} layers, so this is schedule=relative.")
    # the tiny model's rows show their scaled settings
    if tiny:
        return notes
    too_deep: dict[str, None] = {}
    for line in lines:
        # a row names the layers that it leaves uncompressed, as 0+1+31
        frozen = row_knobs.parse_setting(line.row.setting).get("frozen", "none")
        if frozen != "none" and max(map(int, frozen.split("+"))) >= size.layers:
            too_deep[frozen] = None
    for frozen in too_deep:
        notes.append(f"frozen={frozen}: layers that this model of {size.layers} does not have are its last.")
    return notes


def _note_minilongbench(groups: Mapping[TableWorkload, Sequence[Group]]) -> list[str]:
    sizes = []
    for workload, workload_groups in groups.items():
        if workload.entry == FAMILIES["mini"]:
            sizes += [len(group.task.examples) for group in workload_groups]
    if not sizes:
        return []
    return [f"LongBench's columns have MiniLongBench's examples, {min(sizes)} to {max(sizes)} a task."]


def _plan_run(
    chooser: WorkloadChooser, lines: Sequence[TableLine], workloads: Sequence[TableWorkload]
) -> tuple[RunPlan, dict[TableWorkload, tuple[Group, ...]]]:
    # rows read different lengths of a needle test, and the run reads all of them as one dataset
    label_of = label_workloads(workload.whole for workload in workloads)
    datasets = []
    for whole, label in label_of.items():
        parts: dict[str, None] = {}
        for workload in workloads:
            if workload.whole == whole:
                parts |= dict.fromkeys(workload.parts or ())
        # a dataset without parts is read as a whole
        datasets.append(chooser.configure_dataset(replace(whole, parts=tuple(parts) or None), label))
    chain_configs = _label_chains(lines)
    # one run, so that every prompt is read once for all rows
    run = run_plan.prepare(replace(chooser.cfg, chains=chain_configs, datasets=tuple(datasets)), inputs=chooser.inputs)
    groups = []
    for group in run.groups:
        chains = _choose_chains_of_group(group, lines, label_of)
        groups.append(replace(group, cells=tuple(cell for cell in group.cells if cell.chain in chains)))
    groups_by_workload = {}
    for workload in workloads:
        label = label_of[workload.whole]
        groups_by_workload[workload] = tuple(group for group in groups if workload.owns(group, label))
    return replace(run, groups=tuple(groups)), groups_by_workload


def _label_chains(lines: Sequence[TableLine]) -> tuple[ChainConfig, ...]:
    label_of: dict[Chain, str] = {}
    for line in lines:
        for chain in (line.chain, *line.other_chains.values()):
            if chain is not None:
                # a chain without stages is the full cache
                label_of.setdefault(chain, line.row.name if chain.stages else "full")
    return tuple(ChainConfig(chain, label) for chain, label in label_of.items())


def _choose_chains_of_group(
    group: Group, lines: Sequence[TableLine], label_of: Mapping[TableWorkload, str]
) -> set[Chain | None]:
    chains: set[Chain | None] = {Chain()}
    for line in lines:
        if line.chain is None:
            continue
        for dataset, workload in line.reads.items():
            # no group has the label "-": a workload that cannot be read owns none
            if workload.owns(group, label_of.get(workload.whole, "-")):
                chains.add(line.chain_of(dataset))
    return chains


def _make_tiny_table(
    declared: TableSpec, lines: Sequence[TableLine], size: row_knobs.StandIn
) -> tuple[UnprintedTable, tuple[TableLine, ...]]:
    # scaled to short prompts, rows of two budgets can become one chain: keep the first line of each, with its setting
    first_lines: dict[object, tuple[TableLine, str]] = {}
    for line in lines:
        setting = stand_ins.scale_setting(line.row, size)
        # refused rows have no chain to compare
        identity: object = (line.row.method, setting) if line.chain is None else line.chain
        first_lines.setdefault(identity, (line, setting))
    methods_and_settings = [(line.row.method, setting) for line, setting in first_lines.values()]
    table = stand_ins.make_tiny_table(declared, methods_and_settings)
    tiny_lines = []
    for row, (line, _) in zip(table.rows, first_lines.values(), strict=True):
        # chains of single datasets move to the tasks that stand for these datasets
        other_chains = {}
        for dataset, chain in line.other_chains.items():
            other_chains[stand_ins.choose_tiny_task(dataset, declared)] = chain
        tiny_lines.append(replace(line, row=row, other_chains=other_chains))
    return table, tuple(tiny_lines)


def _choose_workloads(
    chooser: WorkloadChooser, lines: Sequence[TableLine], family: str, stand_in: bool
) -> tuple[tuple[TableLine, ...], dict[TableWorkload, str], list[str]]:
    columns = chooser.table.scores
    family_name = chooser.choose_family(list(dict.fromkeys(column.dataset for column in columns)), family)
    # why each workload cannot be read, '' if it can: each is tried once, since a try can take long
    reasons: dict[TableWorkload, str] = {}
    notes: dict[str, None] = {}
    new_lines = []
    for line in lines:
        reads = {}
        for column in columns:
            # a line reads nothing for a cell that the paper does not print
            if column.name not in line.row.cells:
                continue
            workload = chooser.choose_workload(line.row, column.dataset, family_name)
            # the tiny model's tasks come with kvbench, so they can be read and have no lengths
            if not chooser.small:
                unreadable = _try_reading(chooser, workload, reasons)
                # on the paper's own model only the paper's data are allowed
                if unreadable and stand_in:
                    workload, substitute_note = _find_substitute(chooser, workload, reasons)
                    notes[substitute_note] = None
                if line.chain is not None:
                    notes[chooser.note_long_prompts(line.row, column.dataset)] = None
            reads[column.dataset] = workload
        new_lines.append(replace(line, reads=reads))
    # a workload that was replaced by another is not missing
    used: set[TableWorkload] = set()
    for line in new_lines:
        used.update(line.reads.values())
    absent = {workload: reason for workload, reason in reasons.items() if reason and workload in used}
    return tuple(new_lines), absent, [note for note in notes if note]


def _find_substitute(
    chooser: WorkloadChooser, workload: TableWorkload, reasons: dict[TableWorkload, str]
) -> tuple[TableWorkload, str]:
    """Return the readable replacement in INSTEAD of a workload, and its note; else the workload itself and ''."""
    if workload.dataset in INSTEAD:
        name, note = INSTEAD[workload.dataset]
        substitute = replace(workload, name=name)
        if not _try_reading(chooser, substitute, reasons):
            return substitute, note
    return workload, ""


def _try_reading(chooser: WorkloadChooser, workload: TableWorkload, reasons: dict[TableWorkload, str]) -> str:
    """Return why a workload cannot be read, or '' if it can. A new answer is added to ``reasons``."""
    if workload not in reasons:
        reasons[workload] = chooser.why_unreadable(workload)
    return reasons[workload]


def stands_in(declared: TableSpec, model: str) -> bool:
    """Return True if a table prints no numbers of ``model``, so that this model can only stand in for the table's."""
    own_models = [model_id(declared.model_entry(name)) for name in declared.models()]
    return model_id(model) not in own_models


def _build_line(
    declared: TableSpec,
    row: TableRow,
    values: Mapping[str, object],
    *,
    size: row_knobs.StandIn | None,
    tiny: bool = False,
    find_traits: Callable[[], ModelTraits] | None = None,
) -> TableLine:
    setting = row_knobs.parse_setting(row.setting)
    method = row_knobs.translate_method(row.method, setting)
    # claims also run rows with the paper's windows as printed, without scaling them
    if size is not None and "windows" in setting:
        size = replace(size, windows=setting["windows"])
    if method == "full":
        return TableLine(row, Chain())
    datasets = {column.dataset for column in declared.scores if column.name in row.cells}
    try:
        stages = list(registry.read_method(method).entries)
        # each source replaces earlier ones: scaled windows, a stand-in's arguments, the table's, the row's own
        knobs: row_knobs.Knobs = {}
        if size is not None:
            knobs |= row_knobs.scale_windows(values, stages, size)
            knobs |= _list_stand_in_knobs(declared, stages, size, tiny)
        knobs |= declared.arguments.get(row.method, {})

        def build_chain(dataset_setting: str = "") -> Chain:
            # the later one of two settings with one key counts
            full_setting = ";".join(text for text in (dataset_setting, row.setting) if text)
            texts = knobs | row_knobs.run_arguments(row.method, full_setting, size)
            entry: dict[str, object] = {"method": method}
            # arguments are texts as a user types them, but a chain takes their values
            for key, text in texts.items():
                entry[key] = yaml.load(text, Loader=YAML_LOADER)
            return chain_of(entry, preset=values)

        chain = build_chain()
        other_chains = {}
        for dataset, dataset_setting in declared.settings.items():
            if dataset in datasets:
                other_chains[dataset] = build_chain(dataset_setting)
        if find_traits is not None:
            chain.check_model(find_traits())
    except UsageError as reason:
        return TableLine(row, refused=str(reason))
    return TableLine(row, chain, other_chains=other_chains)


def _list_stand_in_knobs(
    declared: TableSpec, stages: Sequence[str], size: row_knobs.StandIn, tiny: bool
) -> row_knobs.Knobs:
    knobs_by_stage = stand_ins.choose_depth_knobs(size)
    if tiny:
        # a table's own arguments replace those of SAMPLES
        knobs_by_stage = stand_ins.SAMPLES | dict(declared.stand_in)
    knobs: row_knobs.Knobs = {}
    for stage in stages:
        for key, value in knobs_by_stage.get(stage, {}).items():
            knobs[f"method.{stage}.{key}"] = value
    return knobs
