"""Grids of methods and knobs behind figures of results, measured where missing and read from the store.

A figure declares sweeps; each is one run on one dataset, so that all of its points read every prompt once. On the tiny
model the windows of a paper's preset are scaled to its prompts, as in the paper's tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kvbench.base.conf import entries
from kvbench.base.errors import UsageError
from kvbench.methods.core import registry
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.resolve import ChainConfig, chain_of
from kvbench.papers.figures.figure import OWN_METHODS, Figure
from kvbench.papers.measured.our_table import scores
from kvbench.papers.spec import row_knobs, stand_ins
from kvbench.plan import config, presets, words
from kvbench.plan.cells import Cell, Group
from kvbench.plan.words import split_list
from kvbench.report import summary
from kvbench.report.scatter import line_of
from kvbench.run import experiment
from kvbench.run.experiment import RunPlan
from kvbench.store.results import CellSummary, share
from kvbench.tasks.metrics import metric, stats

MEAN = "mean"
FULL = "full"
VALUES = ("score", "low", "high", "relative", "relative_low", "relative_high", "n", "kept", "bytes")
COLUMNS = ("series", "x", "task", "metric", *VALUES)


@dataclass(frozen=True)
class Point:
    """One place of a figure: a method with its knobs, under the name of its series, at ``x``.

    An ``x`` that is nan stands for the per cent of tokens that were kept.
    """

    series: str
    x: float
    method: str
    knobs: Mapping[str, Any] = field(default_factory=dict)


FULL_POINT = Point(FULL, 0.0, "full")


@dataclass(frozen=True)
class Sweep:
    """Points that are measured on the same prompts.

    dataset: the tiny model's. published: the paper's own, for any other model. arguments: more arguments of ``run``,
    with those of ``pretrained`` for any model but the tiny one; options of a dataset go to those that have them.
    baseline: True where the full cache is measured, too. length: prompt tokens of the paper, by which windows and sizes
    are scaled for the tiny model.
    """

    points: tuple[Point, ...]
    dataset: str = "tiny"
    published: str = ""
    preset: str | None = None
    arguments: tuple[str, ...] = ()
    pretrained: tuple[str, ...] = ()
    baseline: bool = True
    length: int = stand_ins.PROMPT

    def reads(self, tiny: bool) -> str:
        """Return the dataset that is read unless another is asked for."""
        return self.dataset if tiny else self.published or self.dataset


@dataclass(frozen=True)
class Ran:
    """A sweep with the run that measures it; ``chains`` are those of its points."""

    sweep: Sweep
    run: RunPlan
    chains: tuple[Chain, ...]

    def points(self) -> Iterator[tuple[Point, list[tuple[Group, Cell]]]]:
        """Yield every point of the sweep with its cells and their groups, the full cache first."""
        full = [(FULL_POINT, Chain())] if self.sweep.baseline else []
        for point, chain in [*full, *zip(self.sweep.points, self.chains, strict=True)]:
            yield point, [(g, next(c for c in g.cells if c.chain == chain)) for g in self.run.groups]

    def cells(self) -> Iterator[tuple[Point, Group, Cell]]:
        """Yield every cell with its point."""
        yield from ((point, group, cell) for point, cells in self.points() for group, cell in cells)

    def frame(self) -> pd.DataFrame:
        """Return a row per point and task with its numbers, and one for the mean over tasks.

        Scores as printed, with 95 % intervals; ``relative`` in per cent of the full cache over the same examples;
        tokens kept and, at 16 bits, bytes held in per cent of the prompt's. Cells that were refused, or of which
        nothing is there, are left out; a mean is over all tasks or not at all.
        """
        rows: list[dict[str, Any]] = []
        for point, cells in self.points():
            results = [(g, summary.measured(g, c, self.run.store), self._pairs(g, c)) for g, c in cells]
            measured = [(g, c.summary, pairs) for g, c, pairs in results if c.summary is not None]
            if not measured:
                continue
            kept = _held([means for _, means, _ in measured])["kept"]
            place = {"series": point.series, "x": float(f"{kept:.2g}") if math.isnan(point.x) else point.x}
            for group, means, pairs in measured:
                name = group.task.id.partition("/")[2] if len(results) > 1 else group.task.id
                low, high = means.ci or (None, None)
                numbers = {"metric": means.metric, "score": means.score, "low": low, "high": high, "n": means.n}
                relative = _relative([pairs], group.task.metric)
                rows.append({**place, "task": name or group.task.id, **numbers, **_held([means]), **relative})
            if len(measured) == len(results) > 1:
                rows.append({**place, "task": MEAN, **_mean(measured)})
        return pd.DataFrame(rows).reindex(columns=list(COLUMNS)).astype(dict.fromkeys(VALUES, float))

    def _pairs(self, group: Group, cell: Cell) -> NDArray[np.float64]:
        """Return the scores [n, 2] of a cell and of the full cache, over the examples of this run that both have."""
        full_cell = next((c for c in group.cells if not c.chain.stages), cell)
        own, full = (scores(self.run.store, group, c) for c in (cell, full_cell))
        return np.array([(x, full[e]) for e, x in own.items() if e in full], dtype=float).reshape(-1, 2)

    def left_out(self) -> list[str]:
        """Return the cells that are not shown, shown in part, or show nothing about their method, with the reason."""
        store, reasons = self.run.store, []
        for _, group, cell in self.cells():
            reason, measured = store.refusal(cell.id), store.samples(cell.id).keys() & {e.id for e in group.examples}
            if reason is None and not measured:
                reason = store.status(cell.id).reason or "not measured"
            elif reason is None and len(measured) < len(group.examples):
                reason = f"{len(measured)} of {len(group.examples)} examples measured"
            elif reason is None and summary.measured(group, cell, store).unchanged:
                reason = "nothing was compressed"
            if reason is not None:
                reasons.append(f"{cell.label} on {group.column}: {reason}")
        return reasons


@dataclass(frozen=True)
class MeasuredFigure:
    """The runs of a figure's sweeps, in their order."""

    ran: tuple[Ran, ...]

    def frame(self) -> pd.DataFrame:
        """Return the rows of all sweeps."""
        return pd.concat([r.frame() for r in self.ran], ignore_index=True)

    def measure(self, quiet: bool = False) -> None:
        """Measure what is missing."""
        for r in self.ran:
            experiment.measure(r.run, quiet)

    def facts(self) -> dict[str, Any]:
        """Return the origin of the data, for the head of the CSV."""
        if not self.ran:
            return {}
        omissions = [reason for r in self.ran for reason in r.left_out()]
        settings = [experiment.settings(r.run).removesuffix(".") for r in self.ran]
        own = [p.method for r in self.ran for p in r.sweep.points if math.isnan(p.x)]
        counts = sorted({len(g.examples) for r in self.ran for g in r.run.groups})
        return {
            "runs": " | ".join(dict.fromkeys(settings)),
            **({OWN_METHODS: ", ".join(own)} if own else {}),
            "weights": self.ran[0].run.source.fingerprint,
            "examples": f"{' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} of each task",
            **({"left out": "; ".join(omissions)} if omissions else {}),
        }


def prepare(figure: Figure, arguments: Sequence[str]) -> MeasuredFigure:
    """Plan the runs of a figure, checked before any model is loaded.

    ``arguments`` are ``run``'s: model=, dataset= in place of the figure's own (of those that it has where each has a
    budget), method= with its knobs likewise, limit=, results=, data.root=, ... Raises UsageError for a model, a dataset
    or an argument that is not possible.
    """
    options, sweeps = dict(a.partition("=")[::2] for a in arguments), figure.sweeps or ()
    model = options.get("model", stand_ins.MODEL)
    datasets = list(dict.fromkeys(s.reads(model == stand_ins.MODEL) for s in sweeps))
    wanted = split_list(options["dataset"]) if "dataset" in options else datasets
    strange = [n for n in wanted if len(datasets) > 1 and not any(_within(n, dataset) for dataset in datasets)]
    if strange:
        raise UsageError(
            f"dataset={strange[0]} is not possible with {figure.id}, which has a budget for each of its datasets: "
            f"{', '.join(datasets)}"
        )
    if options and not sweeps and set(options) - {"results", "limit"}:
        raise UsageError(f"{next(iter(options))}= is not possible with {figure.id}: it is computed from formulas alone")
    ran = []
    for sweep in sweeps:
        names = [n for n in wanted if len(datasets) == 1 or _within(n, sweep.reads(model == stand_ins.MODEL))]
        if names:
            ran.append(_ran(figure, sweep, model, {**options, "dataset": ",".join(names)}))
    return MeasuredFigure(tuple(ran))


def _within(name: str, dataset: str) -> bool:
    """Tell whether ``name`` is the dataset or one of its tasks."""
    return name == dataset or name.startswith(f"{dataset}/")


def _ran(figure: Figure, sweep: Sweep, model: str, given: Mapping[str, str]) -> Ran:
    """Plan the run of one sweep on a model."""
    tiny = model == stand_ins.MODEL
    sweep_options = dict(a.partition("=")[::2] for a in (*sweep.arguments, *(() if tiny else sweep.pretrained)))
    dataset_options = [entries("dataset").get(n.partition("/")[0], {}) for n in split_list(given["dataset"])]
    defaults = {
        "model": model,
        "limit": str(figure.each),
        **{key: value for key, value in sweep_options.items() if all(key in options for options in dataset_options)},
        **({"preset": sweep.preset} if sweep.preset else {}),
        "method": "full",
        "baseline": str(sweep.baseline).lower(),
    }
    merged = {**defaults, **given}
    (run,) = words.read([f"{k}={v}" for k, v in merged.items()]).runs
    cfg = config.parse(run)
    if "method" in given:
        own = [c for c in cfg.chains if c.chain.stages]
        points = _own_points([c.label for c in own], several="x" in figure.columns)
        return Ran(replace(sweep, points=points), experiment.prepare(cfg), tuple(c.chain for c in own))
    values = presets.values(sweep.preset, model if model in entries("model") else "") if sweep.preset else {}
    small = replace(stand_ins.TINY, of=sweep.length) if tiny else None
    chains = tuple(_chain(p, values, small) for p in sweep.points)
    labels = {c: f"{p.series} {p.x:g}" for p, c in zip(sweep.points, chains, strict=True)}
    cfg = replace(cfg, chains=tuple(ChainConfig(c, label) for c, label in labels.items()))
    return Ran(sweep, experiment.prepare(cfg), chains)


def _own_points(labels: Sequence[str], several: bool) -> tuple[Point, ...]:
    """Return a point per label of a method; labels that differ in budgets alone share a series if ``several`` may."""
    lines = [line_of(label) for label in labels]
    names = [line if several or lines.count(line) == 1 else label for label, line in zip(labels, lines, strict=True)]
    return tuple(Point(name, math.nan, label) for name, label in zip(names, labels, strict=True))


def _chain(point: Point, values: Mapping[str, Any], small: row_knobs.StandIn | None) -> Chain:
    """Build the chain of a point, with windows and sizes scaled to a ``small`` model."""
    stages = registry.split(point.method)
    scaled = row_knobs.scaled_windows(values, stages, small) if small else {}
    knobs = {**{k: int(v) for k, v in scaled.items()}, **point.knobs}
    if small and "kv_size" in knobs:
        knobs["kv_size"] = small.tokens(knobs["kv_size"])
    return chain_of({"method": point.method, **knobs}, preset=values)


def _held(cells: Sequence[CellSummary]) -> dict[str, float]:
    """Return tokens kept and bytes held at 16 bits, in per cent of the prompts', over all of them."""
    tokens_kept, prompts, *byte_counts = (
        float(sum(c.n * x for c, x in zip(cells, values, strict=True)))
        for values in zip(*((c.kept, c.prompt_tokens, c.payload16, c.overhead16, c.full16) for c in cells), strict=True)
    )
    return {"kept": 100 * tokens_kept / prompts, "bytes": share(*byte_counts)}


def _mean(results: Sequence[tuple[Group, CellSummary, NDArray[np.float64]]]) -> dict[str, Any]:
    """Return the columns of the mean over tasks of equal weight; a score only where all have one metric's unit.

    Its interval is stratified by task.
    """
    values = [v for _, v, _ in results]
    names = {v.metric for v in values}
    columns = {"metric": MEAN, "n": sum(v.n for v in values), **_held(values)}
    if any(metric(n).shown for n in names) or any(v.score is None for v in values):
        return columns
    name, tasks = next(iter(names)), [pairs for _, _, pairs in results]
    scale = metric(name).scale
    score, interval = stats.mean_over_tasks([t[:, 0] for t in tasks])
    low, high = (scale * interval[0], scale * interval[1]) if interval else (None, None)
    return {**columns, "score": scale * score, "low": low, "high": high, **_relative(tasks, name)}


def _relative(tasks: Sequence[stats.Pairs], name: str) -> dict[str, Any]:
    """Return the score in per cent of the full cache's: the mean over tasks of one over that of the other."""
    share = stats.Share() if metric(name).shown else stats.share(tasks)
    low, high = share.ci or (None, None)
    return {"relative": share.point, "relative_low": low, "relative_high": high}
