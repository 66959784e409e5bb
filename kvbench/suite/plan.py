"""The runs of a suite: one for each part, with all rows, so that each prompt is read once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvbench.base.errors import UsageError
from kvbench.kv.model_shape import Shape
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.resolve import ChainConfig
from kvbench.models import load, traits
from kvbench.plan import config, run_plan
from kvbench.plan.run_plan import RunPlan
from kvbench.plan.words import value_of
from kvbench.store.cell import Cell
from kvbench.suite.definition import Suite, SuitePart
from kvbench.suite.rows import SuiteRow, make_rows
from kvbench.suite.scores import PartSamples, RowSamples


@dataclass(frozen=True, kw_only=True)
class PartRun:
    """The run of one part, with the rows that it measures.

    part: the part.
    plan: the plan of the run, over the full cache and all ``rows``.
    rows: the rows that the part can measure. A part with long answers leaves out the rows of methods without a budget
        while decoding.
    """

    part: SuitePart
    plan: RunPlan
    rows: tuple[SuiteRow, ...]


@dataclass(frozen=True, kw_only=True)
class SuiteRun:
    """A suite with a user's methods, ready to be measured.

    suite: the edition of the suite.
    rows: the rows of all parts, controls first.
    parts: the run of each part, in the suite's order.
    """

    suite: Suite
    rows: tuple[SuiteRow, ...]
    parts: tuple[PartRun, ...]

    @property
    def plans(self) -> list[RunPlan]:
        """The plans of all parts. They have one model, one dtype and one store of results."""
        return [part.plan for part in self.parts]


def prepare(
    suite: Suite,
    methods: Sequence[str],
    options: Mapping[str, object],
    settings: Mapping[str, object],
) -> SuiteRun:
    """Plan a suite without loading weights.

    methods: the user's methods, beside the suite's own controls.
    options: options of the user's methods.
    settings: keys of `run` about folders, devices and memory, and ``model`` in the open division.

    Raises UsageError for a method that the suite cannot measure, and for texts that are not on this machine.
    """
    shared_settings = _build_settings(suite, settings)
    suite_rows = tuple(list_rows(suite, methods, options, settings))
    parts = []
    for part in suite.parts:
        cfg = config.configure(shared_settings | dict(part.keys))
        measurable = []
        # a run measures each combination once, even if several rows have it
        chains: dict[Chain, ChainConfig] = {}
        for row in suite_rows:
            chain_config = row.config_in(part)
            # a method without a budget while decoding has no row in parts with long answers
            if chain_config is not None:
                measurable.append(row)
                chains.setdefault(chain_config.chain, chain_config)
        planned = run_plan.prepare(replace(cfg, chains=tuple(chains.values())))
        parts.append(PartRun(part=part, plan=planned, rows=tuple(measurable)))
    return SuiteRun(suite=suite, rows=suite_rows, parts=tuple(parts))


def list_rows(
    suite: Suite, methods: Sequence[str], options: Mapping[str, object], settings: Mapping[str, object]
) -> list[SuiteRow]:
    """Return the rows of a suite, its controls first. Of the model's checkpoint, only the configuration is read."""
    return make_rows(suite, methods, options, find_shape(suite, settings))


def find_shape(suite: Suite, settings: Mapping[str, object]) -> Shape:
    """Return the shape of the cache of the suite's model, or of the ``model`` in the settings."""
    cfg = config.configure(_build_settings(suite, settings))
    return traits.shape_of(load.locate(cfg.model).config)


def find_rows(suite: Suite, name: str, settings: Mapping[str, object]) -> list[SuiteRow]:
    """Return the rows that a method of this name has: at each budget that it can reach.

    name: as a row's ``name``, for example ``snapkv+think ratio=0.4``. Raises UsageError if no such method is here.
    """
    method, *words = name.split(" ")
    options = {}
    for word in words:
        key, _, text = word.partition("=")
        options[key] = value_of(text)
    return [row for row in list_rows(suite, [method], options, settings) if row.name == name]


def _build_settings(suite: Suite, settings: Mapping[str, object]) -> dict[str, object]:
    """Return the keys of `run` that all parts have. The method is a placeholder, which the suite's rows replace."""
    return {"model": suite.model, "model.dtype": suite.dtype, "method": "full"} | dict(settings)


def find_cells(part_run: PartRun, row: SuiteRow | None) -> dict[str, Cell]:
    """Return the cells of a row in a part, by the task's column. ``row=None`` stands for the full cache."""
    if row is None:
        chain = Chain()
    else:
        chain_config = row.config_in(part_run.part)
        assert chain_config is not None, "the part leaves out rows that it cannot measure"
        chain = chain_config.chain
    cells = {}
    for group in part_run.plan.groups:
        for cell in group.cells:
            if cell.chain == chain:
                cells[group.column] = cell
    return cells


def collect_samples(run: SuiteRun) -> tuple[list[RowSamples], dict[str, PartSamples]]:
    """Return the samples of all completely measured rows, and the full cache's samples by part.

    A row is completely measured if every part that can measure it has all its answers. Raises UsageError if the full
    cache itself is not measured.
    """
    full: dict[str, PartSamples] = {}
    for part_run in run.parts:
        samples = _read_samples(part_run, row=None)
        if samples is None:
            raise UsageError(f"{run.suite.name}: the full cache is not measured in the part {part_run.part.name}")
        full[part_run.part.name] = samples
    measured_rows = []
    for row in run.rows:
        parts: dict[str, PartSamples] = {}
        parts_of_row = [part_run for part_run in run.parts if row in part_run.rows]
        for part_run in parts_of_row:
            samples = _read_samples(part_run, row)
            if samples is not None:
                parts[part_run.part.name] = samples
        # a mean over only some of a row's parts could not be compared with other rows' means
        if parts and len(parts) == len(parts_of_row):
            measured_rows.append(RowSamples(name=row.name, budget=row.budget, role=row.role, parts=parts))
    return measured_rows, full


def _read_samples(part_run: PartRun, row: SuiteRow | None) -> PartSamples | None:
    """Return a row's samples in a part by column and example; None unless every prompt has a sample.

    ``row=None`` stands for the full cache.
    """
    cells = find_cells(part_run, row)
    samples_by_column = {}
    for group in part_run.plan.groups:
        samples = part_run.plan.samples(group, cells[group.column])
        if len(samples) < len(group.examples):
            return None
        samples_by_column[group.column] = samples
    return samples_by_column
