"""A paper's table on a model: its rows as chains of one run, which is measured if missing and read from the store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import pandas as pd
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
CONDITIONS = {"max_length", "template", "truncation", "system", "query_aware", "bos"} | {
    "min_new_tokens",
    "max_new_tokens",
    "temperature",
}
"""Keys of ``run`` that change how prompts are read and answered, so that scores differ from the paper's."""

Line = Any
"""A line of ``PaperTable.rows``, as pandas' ``itertuples`` gives it."""
Parts = tuple[tuple[Group, Cell], ...]
"""The results in the store behind one number: one cell per task, each with the group in which it is measured."""


@dataclass(frozen=True)
class PaperTable:
    """A paper's table on ``model``: its rows, the run that measures them, and its cells once they are read.

    stand_in: whether the table has no numbers of the model, so that the model is a substitute.
    rows: a line for each row, with its model, method, setting, name and printed cells (``printed``, by column); its
    chain (None if it has none), why the model cannot run it (``refused``), why it is not run here (``skipped``), the
    workload by dataset that it reads (``reads``), and other chains by dataset (``chains``).
    run: the run of all rows; None if nothing of the table can be run.
    groups: the run's groups of cells by workload: one for each task of the workload.
    absent: by workload that cannot be read, the reason.
    notes: sentences for readers about the data that are read.
    timings: the timed rows of an efficiency table; None for a table of scores.
    typed: the user's arguments (``key=value``) that change how prompts are read and answered.
    columns, cells: the columns that are shown, and both sides of each cell (see ``cells.read_cells``).
    """

    spec: TableSpec
    model: str
    stand_in: bool
    rows: pd.DataFrame
    run: RunPlan | None = None
    groups: Mapping[TableWorkload, tuple[Group, ...]] = field(default_factory=dict)
    absent: Mapping[TableWorkload, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    timings: Timings | None = None
    typed: tuple[str, ...] = ()
    columns: tuple[Column, ...] = ()
    cells: pd.DataFrame = field(default_factory=pd.DataFrame)

    @property
    def lines(self) -> list[Line]:
        """The lines of ``rows``."""
        return list(self.rows.itertuples())

    @cached_property
    def pairs(self) -> list[Any]:
        """Both sides of each cell beside each other: the columns of ``cells``, those of the paper behind ``paper_``."""
        # a cell stands twice in ``cells``, in the same order on both sides
        ours, paper = (self.cells[self.cells["side"] == side].reset_index(drop=True) for side in ("ours", "paper"))
        return list(ours.join(paper.drop(columns=["row", "column"]).add_prefix("paper_")).itertuples(index=False))

    def pairs_of(self, line: Line) -> list[Any]:
        """Return the cells of a line, one for each of ``columns``."""
        start = line.Index * len(self.columns)
        return self.pairs[start : start + len(self.columns)]

    def find_parts(self, line: Line, column: Column, chain: Chain | None = None) -> Parts:
        """Return the results that measure a line in a column, with their groups; () if the run has none.

        chain: the chain to look for in place of the line's own. A chain without stages is the full cache.
        """
        wanted = chain if chain is not None else line.chains.get(column.dataset, line.chain)
        workload = line.reads.get(column.dataset)
        # a refused or skipped line has no chain, and a line reads no data for a cell that the paper does not print
        if wanted is None or workload is None:
            return ()
        # a workload that could not be read has no groups
        groups = self.groups.get(workload, ())
        parts: list[tuple[Group, Cell]] = []
        for group in groups:
            parts += [(group, cell) for cell in group.cells if cell.chain == wanted]
        return tuple(parts)

    def why_absent(self, line: Line, column: Column) -> str:
        """Return why a line's workload in a column cannot be read; '' if it can."""
        workload = line.reads.get(column.dataset)
        if workload is None:
            return ""
        return self.absent.get(workload, "")

    def read_result(
        self, line: Line, column: Column, reader: SampleReader | None = None, chain: Chain | None = None
    ) -> CellResult:
        """Return a line's stored result in a column. If the dataset has several tasks, their examples are pooled.

        A line that is not measured has a result with a status (refused, failed, missing) and its reason.

        reader: the reader of the run's samples, if the caller reads some of them, too.
        chain: as in ``find_parts``.
        """
        # a table names its columns itself, so its results name no task; a line without cells has no id either
        if line.refused and chain is None:
            return CellResult(task="", cell="", status="refused", reason=line.refused)
        parts = self.find_parts(line, column, chain)
        if not parts:
            return CellResult(task="", cell="", status="missing", reason=line.skipped or self.why_absent(line, column))
        assert self.run is not None
        reader = reader or SampleReader(self.run.store)
        results = [report_cell(group, cell, reader) for group, cell in parts]
        for result in results:
            # one task without a number leaves none for the dataset
            if result.status in ("refused", "failed"):
                return result
        # one task needs no pooling; if none is measured, all results say the same
        if len(parts) == 1 or all(result.status != "measured" for result in results):
            return results[0]
        return _pool_results(parts, results, reader)


def _pool_results(parts: Parts, results: Sequence[CellResult], reader: SampleReader) -> CellResult:
    # each example of the measured tasks counts the same
    samples = []
    unchanged = True
    for (group, cell), result in zip(parts, results, strict=True):
        if result.status == "measured":
            stored = reader.read(cell.id)
            samples += [stored[example.id] for example in group.examples if example.id in stored]
            unchanged = unchanged and result.unchanged
    total = sum(len(group.task.examples) for group, _ in parts)
    # the tasks of one dataset have one metric
    first_group, _ = parts[0]
    pooled = summarise(samples, first_group.task.metric, total)
    ids = " ".join(cell.id for _, cell in parts)
    return CellResult(task="", cell=ids, status="measured", summary=pooled, unchanged=unchanged)


def stored_scores(reader: SampleReader, group: Group, cell: Cell) -> dict[str, float]:
    """Return the stored scores of a cell by example id, in the order of the group's examples."""
    samples = reader.read(cell.id)
    scores = {}
    for example in group.examples:
        # an example may have no answer yet, or an answer that could not be scored
        sample = samples.get(example.id)
        if sample is not None and sample.score is not None:
            scores[example.id] = sample.score
    return scores


def split_options(arguments: Iterable[str]) -> dict[str, str]:
    """Return arguments of the form ``key=value`` as a mapping. A later one replaces an earlier one with its key."""
    pairs = [argument.partition("=") for argument in arguments]
    return {key: value for key, _, value in pairs}


def make_printed_table(spec: TableSpec, model: str, why: str) -> PaperTable:
    """Return a table whose rows are all skipped, so that it shows the paper's side only.

    An efficiency table has its stored rows nevertheless.

    why: the reason that the skipped rows give.
    """
    if spec.kind == timings.KIND:
        return make_timed_table(timings.read_timings(spec, model, Path(RESULTS)))
    # in a table without scores all values stand as printed, so no model stands in for the paper's
    stand_in = spec.measurable and stands_in(spec, model)
    return PaperTable(spec, model, stand_in, _make_rows([_make_line(row, skipped=why) for row in spec.rows]))


def make_timed_table(measured: Timings) -> PaperTable:
    """Return an efficiency table. ``measured`` has its declaration and its measured rows."""
    # timed rows have no chains: ``measured`` matches them to the printed cells
    rows = _make_rows([_make_line(row) for row in measured.table.rows])
    return PaperTable(measured.table, measured.bench.model, measured.stand_in, rows, timings=measured)


def _make_line(row: TableRow, chain: Chain | None = None, refused: str = "", skipped: str = "") -> dict[str, Any]:
    place = {"model": row.model, "method": row.method, "setting": row.setting, "name": row.name, "printed": row.cells}
    return place | {"chain": chain, "refused": refused, "skipped": skipped, "reads": {}, "chains": {}}


def _make_rows(lines: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    # objects, so that a chain that is missing stays None
    return pd.DataFrame(list(lines), dtype=object)


def prepare(spec: TableSpec, model: str, arguments: Sequence[str] = (), inputs: Inputs | None = None) -> PaperTable:
    """Plan a paper's table on one model: return its rows, and the run that measures them, without measuring.

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
    if spec.kind == timings.KIND:
        # without a given model, rows of the paper's own model are shown before the tiny model's
        timed_model = "" if model == stand_ins.MODEL else model
        return make_timed_table(timings.read_timings(spec, timed_model, Path(options.get("results", RESULTS))))
    model = model or stand_ins.MODEL
    # tables of facts, or of sizes, have no scores to compare with
    if not spec.measurable:
        return make_printed_table(spec, model, f"its numbers are no scores ({spec.kind})")
    return _prepare_scores(spec, model, options, inputs or Inputs())


def _prepare_scores(spec: TableSpec, model: str, options: dict[str, str], inputs: Inputs) -> PaperTable:
    # ``run`` does not have this key
    family = options.pop("longbench", "")
    stand_in, tiny = stands_in(spec, model), model == stand_ins.MODEL
    settings: dict[str, object] = {"model": model}
    if spec.preset:
        settings["preset"] = spec.preset
    # a configuration needs a method; ``_plan_run`` replaces it by the chains of the table's rows
    settings |= {"method": "full"} | options
    base = _compose_run(spec, settings, tiny)
    source = load.locate(base.model)
    # the sizes for scaling the paper's numbers of tokens and layers; the paper's own models need none
    size = None
    if stand_in:
        size = stand_ins.find_stand_in_size(source.config, scaled_from=spec.length if tiny else None)
    lines = _build_lines(spec, model, size, source.config)
    notes: list[str] = []
    # rows declared by claims have tiny's tasks as columns already
    if size is not None and tiny and not isinstance(spec, UnprintedTable):
        notes += stand_ins.write_notes(spec)
        spec, lines = _make_tiny_table(spec, lines, size)
    elif size is not None:
        notes += _note_missing_layers(lines, size, tiny)
    chooser = WorkloadChooser(
        spec,
        base,
        settings,
        inputs.tokenizer(base.model, source),
        inputs=inputs,
        context=traits.context_length(source.config, base.model.context),
        small=tiny,
    )
    absent, reading_notes = _choose_workloads(chooser, lines, family, stand_in)
    notes += reading_notes
    planned = PaperTable(spec, model, stand_in, _make_rows(lines), absent=absent, notes=tuple(notes))
    workloads: dict[TableWorkload, None] = {}
    for line in lines:
        if line["chain"] is not None:
            workloads |= dict.fromkeys(line["reads"].values())
    readable = [workload for workload in workloads if workload not in absent]
    # without data, or without a row for this model, there is nothing to run
    if not readable:
        return planned
    run, groups = _plan_run(chooser, planned.lines, readable)
    sizes = []
    for workload, of_workload in groups.items():
        if workload.entry == FAMILIES["mini"]:
            sizes += [len(group.task.examples) for group in of_workload]
    if sizes:
        notes.append(f"LongBench's columns have MiniLongBench's examples, {min(sizes)} to {max(sizes)} a task.")
    typed = [f"{key}={value}" for key, value in options.items() if key.removeprefix("prompt.") in CONDITIONS]
    return replace(planned, run=run, groups=groups, notes=tuple(notes), typed=tuple(typed))


def _compose_run(spec: TableSpec, settings: Mapping[str, object], tiny: bool) -> RunConfig:
    # with every dataset that can serve the table's columns
    datasets = [column.dataset for column in spec.scores]
    base = configure_run(settings, datasets, tiny)
    # true if the needle test is the only dataset and the table declares its knobs, and thus the lengths of its texts
    has_stated_lengths = set(datasets) <= spec.workloads.keys() & {"needle"}
    if has_stated_lengths and "max_length" not in settings:
        # such texts are read whole: the limits of prompts are meant for LongBench
        base = replace(base, prompt=replace(base.prompt, max_length=None))
    return base


def _build_lines(spec: TableSpec, model: str, size: row_knobs.StandIn | None, config: object) -> list[dict[str, Any]]:
    values: Mapping[str, object] = {}
    if spec.preset:
        # a preset can state values for single models; a folder or hub id gets the values for any model
        values = presets.values(spec.preset, model if model in entries("model") else "")
    tiny = model == stand_ins.MODEL
    # the rows have one model, whose traits are looked up by the text of its configuration
    find_traits = cache(partial(traits.of_config, config))
    lines = []
    for row in spec.rows:
        # a stand-in runs the rows of all models
        if size is not None or model_id(spec.model_entry(row.model)) == model_id(model):
            lines.append(_build_line(spec, row, values, size=size, tiny=tiny, find_traits=find_traits))
        else:
            lines.append(_make_line(row, skipped=f"a row of {row.model}"))
    return lines


def _build_line(
    spec: TableSpec,
    row: TableRow,
    values: Mapping[str, object],
    *,
    size: row_knobs.StandIn | None,
    tiny: bool = False,
    find_traits: Callable[[], ModelTraits] | None = None,
) -> dict[str, Any]:
    # refused if no chain is possible or the model cannot run it; ``values``: those of the paper's preset by full key
    setting = row_knobs.parse_setting(row.setting)
    method = row_knobs.translate_method(row.method, setting)
    # claims also run rows with the paper's windows as printed, without scaling them
    if size is not None and "windows" in setting:
        size = replace(size, windows=setting["windows"])
    if method == "full":
        return _make_line(row, Chain())
    try:
        stages = list(registry.read_method(method).entries)
        # each source replaces earlier ones: scaled windows, a stand-in's arguments, the table's, the row's own
        knobs: row_knobs.Knobs = {}
        if size is not None:
            knobs |= row_knobs.scale_windows(values, stages, size)
            # a table's own arguments replace those of SAMPLES
            own = stand_ins.SAMPLES | dict(spec.stand_in) if tiny else stand_ins.choose_depth_knobs(size)
            for stage in stages:
                knobs |= {f"method.{stage}.{key}": value for key, value in own.get(stage, {}).items()}
        knobs |= spec.arguments.get(row.method, {})

        def build_chain(dataset_setting: str = "") -> Chain:
            # the later one of two settings with one key counts
            full_setting = ";".join(text for text in (dataset_setting, row.setting) if text)
            texts = knobs | row_knobs.run_arguments(row.method, full_setting, size)
            entry: dict[str, object] = {"method": method}
            # arguments are texts as a user types them, but a chain takes their values
            entry |= {key: yaml.load(text, Loader=YAML_LOADER) for key, text in texts.items()}
            return chain_of(entry, preset=values)

        line = _make_line(row, build_chain())
        datasets = {column.dataset for column in spec.scores if column.name in row.cells}
        for dataset, dataset_setting in spec.settings.items():
            if dataset in datasets:
                line["chains"][dataset] = build_chain(dataset_setting)
        if find_traits is not None:
            line["chain"].check_model(find_traits())
    except UsageError as reason:
        return _make_line(row, refused=str(reason))
    return line


def _note_missing_layers(lines: Sequence[Mapping[str, Any]], size: row_knobs.StandIn, tiny: bool) -> list[str]:
    # of a stand-in that is shallower than the paper's models
    notes = []
    if stand_ins.choose_depth_knobs(size) and any("uncomp-stage" in line["method"] for line in lines):
        notes.append(f"uncomp-stage: the paper has no schedule for {size.layers} layers, so this is schedule=relative.")
    # the tiny model's rows show their scaled settings
    if tiny:
        return notes
    # a row names the layers that it leaves uncompressed, as 0+1+31
    for frozen in dict.fromkeys(row_knobs.parse_setting(line["setting"]).get("frozen", "none") for line in lines):
        if frozen != "none" and max(map(int, frozen.split("+"))) >= size.layers:
            notes.append(f"frozen={frozen}: layers that this model of {size.layers} does not have are its last.")
    return notes


def _plan_run(
    chooser: WorkloadChooser, lines: Sequence[Line], workloads: Sequence[TableWorkload]
) -> tuple[RunPlan, dict[TableWorkload, tuple[Group, ...]]]:
    """Plan one run of the full cache and of all lines, limited to cells behind printed numbers.

    Return the run, and its groups by the workload that they belong to.

    workloads: those that can be read. Cells of other workloads are not in the run.
    """
    # rows read different lengths of a needle test, and the run reads all of them as one dataset
    label_of = label_workloads(workload.whole for workload in workloads)
    datasets = []
    for whole, label in label_of.items():
        # a dataset without parts is read as a whole
        parts: dict[str, None] = {}
        for workload in workloads:
            if workload.whole == whole:
                parts |= dict.fromkeys(workload.parts or ())
        datasets.append(chooser.configure_dataset(replace(whole, parts=tuple(parts) or None), label))
    # each chain once, labelled with the name of the first row that has it; a chain without stages is the full cache
    names: dict[Chain, str] = {}
    for line in lines:
        for chain in (line.chain, *line.chains.values()):
            if chain is not None:
                names.setdefault(chain, line.name if chain.stages else "full")
    chains = tuple(ChainConfig(chain, name) for chain, name in names.items())
    # one run, so that every prompt is read once for all rows
    run = run_plan.prepare(replace(chooser.cfg, chains=chains, datasets=tuple(datasets)), inputs=chooser.inputs)
    groups = []
    for group in run.groups:
        # the full cache, and the chains of lines that read the group's task
        measured = {Chain()}
        for line in lines:
            for dataset, workload in line.reads.items():
                # no group has the label "-": a workload that cannot be read owns none
                if line.chain is not None and workload.owns(group, label_of.get(workload.whole, "-")):
                    measured.add(line.chains.get(dataset, line.chain))
        groups.append(replace(group, cells=tuple(cell for cell in group.cells if cell.chain in measured)))
    groups_by_workload = {}
    for workload in workloads:
        label = label_of[workload.whole]
        groups_by_workload[workload] = tuple(group for group in groups if workload.owns(group, label))
    return replace(run, groups=tuple(groups)), groups_by_workload


def _make_tiny_table(
    spec: TableSpec, lines: Sequence[dict[str, Any]], size: row_knobs.StandIn
) -> tuple[UnprintedTable, list[dict[str, Any]]]:
    """Return the tiny model's own table and its lines: tasks as columns, each chain once, under its scaled knobs."""
    # scaled to short prompts, rows of two budgets can become one chain: keep the first line of each, with its setting
    first_lines: dict[object, tuple[dict[str, Any], str]] = {}
    for line, row in zip(lines, spec.rows, strict=True):
        setting = stand_ins.scale_setting(row, size)
        # refused rows have no chain to compare
        identity: object = (row.method, setting) if line["chain"] is None else line["chain"]
        first_lines.setdefault(identity, (line, setting))
    table = stand_ins.make_tiny_table(spec, [(line["method"], setting) for line, setting in first_lines.values()])
    tiny_lines = []
    for row, (line, _) in zip(table.rows, first_lines.values(), strict=True):
        # chains of single datasets move to the tasks that stand for these datasets
        chains = {stand_ins.choose_tiny_task(dataset, spec): chain for dataset, chain in line["chains"].items()}
        tiny_lines.append(_make_line(row, line["chain"], line["refused"], line["skipped"]) | {"chains": chains})
    return table, tiny_lines


def _choose_workloads(
    chooser: WorkloadChooser, lines: Sequence[dict[str, Any]], family: str, stand_in: bool
) -> tuple[dict[TableWorkload, str], list[str]]:
    """Put the data that each line reads into the lines, and try whether they can be read here.

    family: the user's choice of the source of LongBench's columns, a key of FAMILIES; '' for none.
    stand_in: True for a substitute model, which may read a replacement for a dataset that is missing.

    Return the reason for each workload that cannot be read, and notes for readers.
    """
    columns = chooser.table.scores
    family_name = chooser.choose_family(list(dict.fromkeys(column.dataset for column in columns)), family)
    # each workload is tried once, since a try can take long
    why_unreadable = cache(chooser.why_unreadable)
    notes: dict[str, None] = {}
    absent: dict[TableWorkload, str] = {}
    for line, row in zip(lines, chooser.table.rows, strict=True):
        for column in columns:
            # a line reads nothing for a cell that the paper does not print
            if column.name not in row.cells:
                continue
            workload = chooser.choose_workload(row, column.dataset, family_name)
            # the tiny model's tasks come with kvbench, so they can be read and have no lengths
            if not chooser.small:
                # on the paper's own model only the paper's data are allowed
                if stand_in and column.dataset in INSTEAD and why_unreadable(workload):
                    name, note = INSTEAD[column.dataset]
                    substitute = replace(workload, name=name)
                    if not why_unreadable(substitute):
                        workload = substitute
                        notes[note] = None
                if why_unreadable(workload):
                    absent[workload] = why_unreadable(workload)
                if line["chain"] is not None:
                    notes[chooser.note_long_prompts(row, column.dataset)] = None
            line["reads"][column.dataset] = workload
    return absent, [note for note in notes if note]


def stands_in(spec: TableSpec, model: str) -> bool:
    """Return True if a table prints no numbers of ``model``, so that this model can only stand in for the table's."""
    return model_id(model) not in [model_id(spec.model_entry(name)) for name in spec.models()]
