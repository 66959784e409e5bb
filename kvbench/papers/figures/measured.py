"""Plan and run the sweeps behind figures of results, and read the figures' data from the store.

A figure declares sweeps. Each sweep is one run on one dataset, so all of its points share one reading of each prompt.
On the tiny model the windows of a paper's preset are scaled to its prompts, as in the paper's tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from kvbench.base.conf import entries
from kvbench.base.errors import UsageError
from kvbench.methods.core import registry
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.resolve import ChainConfig, chain_of
from kvbench.papers.figures.figure import OWN_METHODS, Figure
from kvbench.papers.figures.sweep import FULL_POINT, MEAN, ROW, Point, Sweep
from kvbench.papers.measured.plan import split_options, stored_scores
from kvbench.papers.spec import row_knobs, stand_ins
from kvbench.plan import config, presets, run_plan
from kvbench.plan.cells import Group
from kvbench.plan.run_plan import RunPlan
from kvbench.plan.words import split_list
from kvbench.report.of_run import report_cell
from kvbench.report.scatter import line_of
from kvbench.report.settings import describe_settings
from kvbench.run import experiment
from kvbench.store.cell import Cell
from kvbench.store.results import CellSummary, share
from kvbench.store.sample_reader import SampleReader
from kvbench.tasks.metrics import metric, stats

VALUES = ("score", "low", "high", "relative", "relative_low", "relative_high", "n", "kept", "bytes")
COLUMNS = ("series", "x", "task", "metric", *VALUES)
"""The columns of a figure of measured scores; ``SweepRun.frame`` explains them. VALUES are its columns of numbers."""
GAINS = ("gain", "gain_low", "gain_high")
"""The columns that ``SweepRun.gains`` adds to those of ROW: a mean paired difference with its interval."""


Row = dict[str, str | float | None]
"""A row of a figure's data: a point and a task with their numbers, by the names of COLUMNS."""


class _TaskResult(NamedTuple):
    """The numbers of one point on one task.

    group: the task, with the cells that are measured on it.
    means: the means of the point's cell.
    pairs: the scores [n, 2] of the method and of the full cache on the examples that both answered.
    scores: the method's scores by example id.
    """

    group: Group
    means: CellSummary
    pairs: stats.Pairs
    scores: Mapping[str, float]


@dataclass(frozen=True)
class SweepRun:
    """A sweep with the run that measures it. Its methods read the results from the run's store.

    chains: the chain of each of the sweep's points, in the same order.
    """

    sweep: Sweep
    run: RunPlan
    chains: tuple[Chain, ...]

    def points(self) -> Iterator[tuple[Point, list[tuple[Group, Cell]]]]:
        """Yield each point with its (group, cell) on every task. The full cache comes first if it is measured."""
        points = list(zip(self.sweep.points, self.chains, strict=True))
        if self.sweep.baseline:
            points.insert(0, (FULL_POINT, Chain()))
        for point, chain in points:
            # every group has one cell for each chain of the run
            of_chain = []
            for group in self.run.groups:
                of_chain += [(group, cell) for cell in group.cells if cell.chain == chain]
            yield point, of_chain

    def cells(self) -> Iterator[tuple[Point, Group, Cell]]:
        """Yield (point, group, cell) of every point of the sweep on every task."""
        for point, cells in self.points():
            for group, cell in cells:
                yield point, group, cell

    def frame(self) -> pd.DataFrame:
        """Return the scores of the sweep: a row for each point and task, and one for each point's mean over tasks.

        Refused cells and cells without any answer are left out. There is a mean if there are several tasks and all of
        them are measured.

        score, low, high: the score as printed, with its 95 % interval.
        relative, relative_low, relative_high: the score in per cent of the full cache's over the same examples.
        n: the number of examples.
        kept, bytes: tokens kept, and bytes held at 16 bits, in per cent of the full cache's.
        """
        rows: list[Row] = []
        for point, cells in self.points():
            measured = self._list_results(cells)
            # a point without any measured task has no row; ``list_omissions`` names it for the head of the CSV
            if not measured:
                continue
            kept = _count_held([result.means for result in measured])["kept"]
            place: Row = {"series": point.series, "x": point.find_x(kept)}
            for result in measured:
                task = _name_task(result.group, self.run.groups)
                rows.append(place | {"task": task} | _make_task_columns(result))
            # a mean over some of the tasks would compare with none of the other points
            if len(cells) > 1 and len(measured) == len(cells):
                rows.append(place | {"task": MEAN} | _make_mean_columns(measured))
        # reindex: rows may lack columns, and without any row there would be no columns at all
        return pd.DataFrame(rows).reindex(columns=list(COLUMNS)).astype(dict.fromkeys(VALUES, float))

    def gains(self, stage: str) -> pd.DataFrame:
        """Return how many points ``stage`` adds to the score of each method that was measured with and without it.

        There is a row for each point with the stage and each task, and one for the point's mean over tasks. The gain is
        a mean of paired differences: each example's score with the stage minus its score without, as printed. The ends
        of its interval are NaN with fewer than stats.FEWEST examples. Tasks that are measured as perplexity have no
        row.
        """
        cells_by_place = {(point.series, point.x): cells for point, cells in self.points()}
        rows: list[Row] = []
        for (series, x), cells in cells_by_place.items():
            # a chain is named after its stages in order: h2o+vatp has h2o as its base
            base_cells = cells_by_place.get((series.removesuffix(f"+{stage}"), x))
            if not series.endswith(f"+{stage}") or base_cells is None:
                continue
            place: Row = {"series": series, "x": x}
            differences_by_task: list[list[float]] = []
            for group, differences in self._subtract_scores(cells, base_cells):
                scale = metric(group.task.metric).scale
                task = _name_task(group, self.run.groups)
                rows.append(place | {"task": task} | _make_gain_columns([differences], scale))
                differences_by_task.append(differences)
            # a mean over some of the tasks would compare with none of the other points
            if len(cells) > 1 and len(differences_by_task) == len(cells):
                # all metrics but perplexities have one scale, so the scale of the last task will do
                rows.append(place | {"task": MEAN} | _make_gain_columns(differences_by_task, scale))
        return pd.DataFrame(rows).reindex(columns=[*ROW, *GAINS]).astype(dict.fromkeys(("x", *GAINS), float))

    def _subtract_scores(
        self, cells: Sequence[tuple[Group, Cell]], base_cells: Sequence[tuple[Group, Cell]]
    ) -> Iterator[tuple[Group, list[float]]]:
        # columns tell the groups of a grid of a dataset's option apart, which share the task's id
        base_scores = {result.group.column: result.scores for result in self._list_results(base_cells)}
        for result in self._list_results(cells):
            task_metric = metric(result.group.task.metric)
            base = base_scores.get(result.group.column, {})
            common = [example for example in result.scores if example in base]
            # differences of log losses are no points, since a log loss is printed as a perplexity
            if common and not task_metric.formula:
                yield result.group, [task_metric.scale * (result.scores[e] - base[e]) for e in common]

    def _list_results(self, cells: Sequence[tuple[Group, Cell]]) -> list[_TaskResult]:
        # without refused cells and those that have no answer
        results = []
        for group, cell in cells:
            # a reader keeps all samples that it read, so each cell gets a reader of its own
            reader = SampleReader(self.run.store)
            means = report_cell(group, cell, reader).summary
            if means is None:
                continue
            scores = stored_scores(reader, group, cell)
            # a run without the full cache compares the cell with itself, so all shares are 100 %
            full_cell = next((candidate for candidate in group.cells if candidate.chain.is_full), cell)
            full = stored_scores(reader, group, full_cell)
            pairs = [(score, full[example]) for example, score in scores.items() if example in full]
            # without pairs the array still needs its two columns
            results.append(_TaskResult(group, means, np.array(pairs, dtype=float).reshape(-1, 2), scores))
        return results

    def list_omissions(self) -> list[str]:
        """Return ``cell: reason`` as text for each cell whose scores are missing, incomplete or meaningless."""
        reasons = [(group, cell, self._explain_omission(group, cell)) for _, group, cell in self.cells()]
        # the name of a column tells grids of one task apart, which the task's id does not
        return [f"{cell.label} on {group.column}: {reason}" for group, cell, reason in reasons if reason is not None]

    def _explain_omission(self, group: Group, cell: Cell) -> str | None:
        """Return why a cell's scores are missing, incomplete or meaningless; None if all is well."""
        store = self.run.store
        # a refused cell can have older samples, but they are not shown
        refusal = store.refusal(cell.id)
        if refusal is not None:
            return refusal
        # the store may have samples of examples that this run leaves out
        measured = store.samples(cell.id).keys() & {example.id for example in group.examples}
        if not measured:
            return store.status(cell.id).reason or "not measured"
        if len(measured) < len(group.examples):
            return f"{len(measured)} of {len(group.examples)} examples measured"
        return "nothing was compressed" if report_cell(group, cell, SampleReader(store)).unchanged else None


@dataclass(frozen=True)
class MeasuredFigure:
    """The planned runs behind a figure, one for each of its sweeps, in the order of the sweeps."""

    runs: tuple[SweepRun, ...]

    def frame(self) -> pd.DataFrame:
        """Return the scores of all sweeps in one table (see ``SweepRun.frame``)."""
        return pd.concat([sweep_run.frame() for sweep_run in self.runs], ignore_index=True)

    def gains(self, stage: str) -> pd.DataFrame:
        """Return the gains by ``stage`` of all sweeps in one table (see ``SweepRun.gains``)."""
        return pd.concat([sweep_run.gains(stage) for sweep_run in self.runs], ignore_index=True)

    def measure(self, quiet: bool = False) -> None:
        """Measure the answers that the store does not have yet. ``quiet``: True to show no progress."""
        for sweep_run in self.runs:
            experiment.measure(sweep_run.run, quiet=quiet)

    def facts(self) -> dict[str, Any]:
        """Return the origin of the data by key, for the head of the CSV: settings, weights, examples, missing cells.

        A figure that is computed from formulas has no runs, and no facts.
        """
        if not self.runs:
            return {}
        settings = dict.fromkeys(describe_settings(sweep_run.run).removesuffix(".") for sweep_run in self.runs)
        counts: set[int] = set()
        own_methods: list[str] = []
        omissions: list[str] = []
        for sweep_run in self.runs:
            counts.update(len(group.examples) for group in sweep_run.run.groups)
            # methods that the user named have nan in place of a declared x
            own_methods += [point.method for point in sweep_run.sweep.points if math.isnan(point.x)]
            omissions += sweep_run.list_omissions()
        facts = {"runs": " | ".join(settings)}
        if own_methods:
            facts[OWN_METHODS] = ", ".join(own_methods)
        # all runs of a figure are on one model
        facts["weights"] = self.runs[0].run.source.fingerprint
        examples = f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
        facts["examples"] = f"{examples} of each task"
        if omissions:
            facts["left out"] = "; ".join(omissions)
        return facts


def prepare(figure: Figure, options: Mapping[str, str]) -> MeasuredFigure:
    """Plan the runs of a figure and check them, before any model is loaded.

    ``options`` are options of ``run`` as the user typed them, by key. ``dataset=`` and ``method=`` replace the figure's
    own. A figure with a budget for each dataset takes only its own datasets. Raises UsageError for a model, a dataset
    or an option that is not possible.
    """
    sweeps = figure.sweeps or ()
    model = options.get("model", stand_ins.MODEL)
    tiny = model == stand_ins.MODEL
    datasets = list(dict.fromkeys(sweep.reads(tiny) for sweep in sweeps))
    names = split_list(options["dataset"]) if "dataset" in options else datasets
    # a figure with several datasets has a budget for each, so the user can choose among them but name no other
    has_budget_by_dataset = len(datasets) > 1
    for name in names:
        if has_budget_by_dataset and not any(_is_within(name, dataset) for dataset in datasets):
            raise UsageError(
                f"dataset={name} is not possible with {figure.id}, which has a budget for each of its datasets: "
                f"{', '.join(datasets)}"
            )
    # results= only names the folder, and limit= may be meant for other figures of the same command
    options_of_runs = [key for key in options if key not in ("results", "limit")]
    if options_of_runs and not sweeps:
        raise UsageError(f"{options_of_runs[0]}= is not possible with {figure.id}: it is computed from formulas alone")
    sweep_runs = []
    for sweep in sweeps:
        read = [name for name in names if not has_budget_by_dataset or _is_within(name, sweep.reads(tiny))]
        # a sweep without any of the user's datasets is not run
        if read:
            sweep_runs.append(_plan_sweep(figure, sweep, model, dict(options) | {"dataset": ",".join(read)}))
    return MeasuredFigure(tuple(sweep_runs))


def _is_within(name: str, dataset: str) -> bool:
    return name == dataset or name.startswith(f"{dataset}/")


def _plan_sweep(figure: Figure, sweep: Sweep, model: str, options: Mapping[str, str]) -> SweepRun:
    """Plan the run of one sweep on a model, with the methods that the user names or else with the sweep's points."""
    cfg = config.configure(_merge_options(figure, sweep, model, options))
    if "method" in options:
        # the full cache has no stages and is no point of its own
        own = [chain_config for chain_config in cfg.chains if chain_config.chain.stages]
        # a figure with an x axis draws several budgets of a method as one line
        points = _make_own_points([chain_config.label for chain_config in own], several="x" in figure.columns)
        chains = tuple(chain_config.chain for chain_config in own)
        return SweepRun(replace(sweep, points=points), run_plan.prepare(cfg), chains)
    preset_values: Mapping[str, object] = {}
    if sweep.preset:
        # a preset can have values for single models of conf/model; a folder or hub id gets the values for any model
        preset_values = presets.values(sweep.preset, model if model in entries("model") else "")
    stand_in = None
    if model == stand_ins.MODEL:
        stand_in = replace(stand_ins.TINY, paper_length=sweep.length)
    chains = tuple(_build_chain(point, preset_values, stand_in) for point in sweep.points)
    # scaling can make two points one chain, which is measured once
    labels = {chain: f"{point.series} {point.x:g}" for point, chain in zip(sweep.points, chains, strict=True)}
    cfg = replace(cfg, chains=tuple(ChainConfig(chain, label) for chain, label in labels.items()))
    return SweepRun(sweep, run_plan.prepare(cfg), chains)


def _merge_options(figure: Figure, sweep: Sweep, model: str, options: Mapping[str, str]) -> dict[str, object]:
    # the user's ``options`` replace the figure's
    merged: dict[str, object] = {"model": model, "limit": figure.each}
    arguments = list(sweep.arguments)
    if model != stand_ins.MODEL:
        arguments += sweep.pretrained
    # a run refuses an option that one of its datasets does not have, so such options of the figure are dropped
    known = [entries("dataset").get(name.partition("/")[0], {}) for name in split_list(options["dataset"])]
    for key, value in split_options(arguments).items():
        if all(key in options_of_dataset for options_of_dataset in known):
            merged[key] = value
    if sweep.preset:
        merged["preset"] = sweep.preset
    # a run needs a method; the chains of the sweep's points replace it, unless the user names methods
    return merged | {"method": "full", "baseline": sweep.baseline} | dict(options)


def _make_own_points(labels: Sequence[str], several: bool) -> tuple[Point, ...]:
    # each line is a label without its budgets: a clear name if no other method has the same. Methods whose labels
    # differ only in budgets share a series if a series can have several points
    lines = [line_of(label) for label in labels]
    names = [line if several or lines.count(line) == 1 else label for label, line in zip(labels, lines, strict=True)]
    return tuple(Point(name, math.nan, label) for name, label in zip(names, labels, strict=True))


def _build_chain(point: Point, preset_values: Mapping[str, object], stand_in: row_knobs.StandIn | None) -> Chain:
    entry: dict[str, Any] = {"method": point.method}
    if stand_in is not None:
        scaled = row_knobs.scale_windows(preset_values, registry.read_method(point.method).entries, stand_in)
        entry |= {key: int(value) for key, value in scaled.items()}
    # the point's own knobs win over the preset's scaled windows
    entry |= point.knobs
    # a figure states kv_size in tokens of the paper's prompts, as its preset does
    if stand_in is not None and "kv_size" in entry:
        entry["kv_size"] = stand_in.scale_tokens(entry["kv_size"])
    return chain_of(entry, preset=preset_values)


def _name_task(group: Group, groups: Sequence[Group]) -> str:
    # the name of a group's task in a figure's data, which no other group of the run has
    task_id = group.task.id
    if len(groups) == 1:
        return task_id
    # an id is dataset/part if the dataset has several tasks; a dataset with one task has no parts
    name = task_id.partition("/")[2] or task_id
    if [other.task.id for other in groups].count(task_id) > 1:
        # the groups of a grid have the swept values behind the id of their task
        name += group.column.removeprefix(task_id)
    return name


def _make_gain_columns(differences_by_task: Sequence[Sequence[float]], scale: float) -> Row:
    # ``scale``: the best score minus the worst, as printed, which bounds a difference
    gain, interval = stats.mean_over_tasks(differences_by_task, bounds=(-scale, scale))
    low, high = interval or (None, None)
    return {"gain": gain, "gain_low": low, "gain_high": high}


def _count_held(summaries: Sequence[CellSummary]) -> dict[str, float]:
    # over all prompts of the cells: a sum over all prompts is the sum of n * mean over cells
    sums = {}
    for name in ("kept", "prompt_tokens", "payload16", "overhead16", "full16"):
        sums[name] = float(sum(summary.n * getattr(summary, name) for summary in summaries))
    kept = 100 * sums.pop("kept") / sums.pop("prompt_tokens")
    return {"kept": kept, "bytes": share(**sums)}


def _make_task_columns(result: _TaskResult) -> Row:
    means = result.means
    low, high = means.ci or (None, None)
    row: Row = {"metric": means.metric, "score": means.score, "low": low, "high": high, "n": means.n}
    return row | _count_held([means]) | _make_relative_columns([result.pairs], result.group.task.metric)


def _make_mean_columns(results: Sequence[_TaskResult]) -> Row:
    # every task has the same weight, and the interval comes from the spread of the scores within each task
    means = [result.means for result in results]
    row: Row = {"metric": MEAN, "n": sum(task_means.n for task_means in means)}
    row |= _count_held(means)
    # a perplexity is stated as a log loss, and the mean of a log loss and a score has no meaning
    if any(metric(task_means.metric).formula or task_means.score is None for task_means in means):
        return row
    # all metrics but perplexities have one scale, so the name of any task's metric will do; scores are stored from 0
    # to 1, and shown in the metric's unit
    scale = metric(means[0].metric).scale
    score, interval = stats.mean_over_tasks([result.pairs[:, 0] for result in results])
    low, high = stats.scaled(interval, scale) or (None, None)
    row |= {"score": scale * score, "low": low, "high": high}
    return row | _make_relative_columns([result.pairs for result in results], means[0].metric)


def _make_relative_columns(pairs_by_task: Sequence[stats.Pairs], metric_name: str) -> Row:
    # a perplexity has no share of the full cache's, so its columns are None
    relative = stats.Share() if metric(metric_name).formula else stats.share_of_full(pairs_by_task)
    low, high = relative.ci or (None, None)
    return {"relative": relative.point, "relative_low": low, "relative_high": high}
