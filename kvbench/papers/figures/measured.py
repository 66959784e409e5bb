"""What figures of results are computed from: grids of methods and knobs, measured where missing, read from the store.

A figure declares sweeps; each is one run on one dataset, so that all of its points read every prompt once. On the tiny
model the windows of a paper's preset are scaled to its prompts, as in the paper's tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kvbench.conf import entries
from kvbench.errors import UsageError
from kvbench.methods import registry
from kvbench.methods.chain import Chain
from kvbench.methods.resolve import ChainConfig, chain_of
from kvbench.metrics import metric, stats
from kvbench.papers.figures.figure import Figure
from kvbench.papers.spec import row_knobs, stand_ins
from kvbench.run import config, experiment, presets, summary, words
from kvbench.run.experiment import RunPlan
from kvbench.run.plan import Cell, Group
from kvbench.run.results import CellSummary, share
from kvbench.run.words import split_list

MEAN = "mean"
FULL = "full"
VALUES = ("score", "low", "high", "relative", "relative_low", "relative_high", "n", "kept", "bytes")
COLUMNS = ("series", "x", "task", "metric", *VALUES)


@dataclass(frozen=True)
class Point:
    """One place of a figure: a method with its knobs, under the name of its series, at ``x``."""

    series: str
    x: float
    method: str
    knobs: Mapping[str, Any] = field(default_factory=dict)


FULL_POINT = Point(FULL, 0.0, "full")


@dataclass(frozen=True)
class Sweep:
    """Points that are measured on the same prompts.

    dataset: of the tiny model; published: the paper's own, for any other. arguments: more of ``run``'s, with those of
    ``pretrained`` for any model but the tiny one; options of a dataset go to those that have them. baseline: the full
    cache is measured, too. length: prompt tokens of the paper, by which windows and sizes are scaled for the tiny
    model.
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
        """The dataset that is read unless another is asked for."""
        return self.dataset if tiny else self.published or self.dataset


@dataclass(frozen=True, kw_only=True)
class ResultFigure(Figure["MeasuredFigure"]):
    """A figure of measured scores. ``sweeps``: what it runs; none where it is computed from formulas alone."""

    sweeps: tuple[Sweep, ...] = ()


@dataclass(frozen=True)
class Ran:
    """A sweep with the run that measures it; ``chains`` are those of its points."""

    sweep: Sweep
    run: RunPlan
    chains: tuple[Chain, ...]

    def cells(self) -> Iterator[tuple[Point, Group, Cell]]:
        """Every cell of the sweep, the full cache's first."""
        points = [(FULL_POINT, Chain())] if self.sweep.baseline else []
        for point, chain in [*points, *zip(self.sweep.points, self.chains, strict=True)]:
            for group in self.run.groups:
                yield point, group, next(c for c in group.cells if c.chain == chain)

    def frame(self) -> pd.DataFrame:
        """A row per point and task with what a table shows of it, and one for the mean over tasks.

        Scores as printed, with 95 % intervals; ``relative`` in per cent of the full cache over the same examples;
        tokens kept and, at 16 bits, bytes held in per cent of the prompt's. Cells that were refused, or of which
        nothing is there, are left out; a mean is over all tasks or not at all.
        """
        rows: list[dict[str, Any]] = []
        for point, mine in self._by_point():
            found = [(g, summary.measured(g, c, self.run.store), self._pairs(g, c)) for g, c in mine]
            there = [(g, c.summary, pairs) for g, c, pairs in found if c.summary is not None]
            at = {"series": point.series, "x": point.x}
            for group, value, pairs in there:
                name = group.task.id.partition("/")[2] if len(found) > 1 else group.task.id
                rows.append(
                    {**at, "task": name or group.task.id, **_cell(value), **_relative([pairs], group.task.metric)}
                )
            if len(there) == len(found) > 1:
                rows.append({**at, "task": MEAN, **_mean(there)})
        return pd.DataFrame(rows).reindex(columns=list(COLUMNS)).astype(dict.fromkeys(VALUES, float))

    def _by_point(self) -> list[tuple[Point, list[tuple[Group, Cell]]]]:
        found: dict[int, tuple[Point, list[tuple[Group, Cell]]]] = {}
        for point, group, cell in self.cells():
            found.setdefault(id(point), (point, []))[1].append((group, cell))
        return list(found.values())

    def _pairs(self, group: Group, cell: Cell) -> NDArray[np.float64]:
        """Scores [n, 2] of a cell and of the full cache, over the examples of this run that both have."""
        full = next((c for c in group.cells if not c.chain.stages), cell)
        ours, theirs = self.run.store.samples(cell.id), self.run.store.samples(full.id)
        ids = [e.id for e in group.examples if e.id in ours and e.id in theirs]
        pairs = [(ours[i].score, theirs[i].score) for i in ids]
        return np.array([p for p in pairs if None not in p], dtype=float).reshape(-1, 2)

    def left_out(self) -> list[str]:
        """Cells of which nothing can be shown, with the reason."""
        store, found = self.run.store, []
        for point, group, cell in self.cells():
            reason = store.refusal(cell.id)
            if reason is None and not store.samples(cell.id).keys() & {e.id for e in group.examples}:
                reason = store.status(cell.id).reason or "not measured"
            if reason is not None:
                found.append(f"{point.series} at {point.x:g} on {group.column}: {reason}")
        return found


@dataclass(frozen=True)
class MeasuredFigure:
    """The runs of a figure's sweeps, in their order."""

    ran: tuple[Ran, ...]

    def frame(self) -> pd.DataFrame:
        """The rows of all sweeps."""
        return pd.concat([r.frame() for r in self.ran], ignore_index=True)

    def measure(self, quiet: bool = False) -> None:
        """Measure what is missing."""
        for r in self.ran:
            experiment.measure(r.run, quiet)

    def facts(self) -> dict[str, Any]:
        """What the data are from, for the head of the CSV."""
        if not self.ran:
            return {}
        left = [reason for r in self.ran for reason in r.left_out()]
        said = [experiment.settings(r.run).removesuffix(".") for r in self.ran]
        counts = sorted({len(g.examples) for r in self.ran for g in r.run.groups})
        return {
            "runs": " | ".join(dict.fromkeys(said)),
            "weights": self.ran[0].run.source.fingerprint,
            "examples": f"{' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} of each task",
            **({"left out": "; ".join(left)} if left else {}),
        }


def prepare(figure: ResultFigure, arguments: Sequence[str]) -> MeasuredFigure:
    """The runs of a figure, checked before any model is loaded.

    ``arguments`` are ``run``'s: model=, dataset= in place of the figure's own (of those that it has where each has a
    budget), limit=, results=, data.root=, ... Raises UsageError for a model, a dataset or an argument that is not
    possible.
    """
    given = dict(a.partition("=")[::2] for a in arguments)
    model = given.get("model", stand_ins.MODEL)
    own = list(dict.fromkeys(s.reads(model == stand_ins.MODEL) for s in figure.sweeps))
    named = split_list(given["dataset"]) if "dataset" in given else own
    wrong = [n for n in named if len(own) > 1 and not any(_within(n, dataset) for dataset in own)]
    if wrong:
        raise UsageError(
            f"dataset={wrong[0]} is not possible with {figure.id}, which has a budget for each of its datasets: "
            f"{', '.join(own)}"
        )
    if given and not figure.sweeps and set(given) - {"results", "limit"}:
        raise UsageError(f"{next(iter(given))}= is not possible with {figure.id}: it is computed from formulas alone")
    ran = []
    for sweep in figure.sweeps:
        mine = [n for n in named if len(own) == 1 or _within(n, sweep.reads(model == stand_ins.MODEL))]
        if mine:
            ran.append(_ran(sweep, model, {**given, "dataset": ",".join(mine)}, figure.each))
    return MeasuredFigure(tuple(ran))


def _within(name: str, dataset: str) -> bool:
    """Whether ``name`` is the dataset or one of its tasks."""
    return name == dataset or name.startswith(f"{dataset}/")


def _ran(sweep: Sweep, model: str, given: Mapping[str, str], each: int) -> Ran:
    tiny = model == stand_ins.MODEL
    fixed = dict(a.partition("=")[::2] for a in (*sweep.arguments, *(() if tiny else sweep.pretrained)))
    known = [entries("dataset").get(n.partition("/")[0], {}) for n in split_list(given["dataset"])]
    plain = {
        "model": model,
        "limit": str(each),
        **{key: value for key, value in fixed.items() if all(key in options for options in known)},
        **({"preset": sweep.preset} if sweep.preset else {}),
        "method": "full",
        "baseline": str(sweep.baseline).lower(),
    }
    merged = {**plain, **given}
    (run,) = words.read([f"{k}={v}" for k, v in merged.items()]).runs
    cfg = config.parse(run)
    values = presets.values(sweep.preset, model if model in entries("model") else "") if sweep.preset else {}
    small = replace(stand_ins.TINY, of=sweep.length) if tiny else None
    chains = tuple(_chain(p, values, small) for p in sweep.points)
    labels = {c: f"{p.series} {p.x:g}" for p, c in zip(sweep.points, chains, strict=True)}
    cfg = replace(cfg, chains=tuple(ChainConfig(c, label) for c, label in labels.items()))
    return Ran(sweep, experiment.prepare(cfg), chains)


def _chain(point: Point, values: Mapping[str, Any], small: row_knobs.StandIn | None) -> Chain:
    stages = registry.split(point.method)
    scaled = row_knobs.scaled_windows(values, stages, small) if small else {}
    knobs = {**{k: int(v) for k, v in scaled.items()}, **point.knobs}
    if small and "kv_size" in knobs:
        knobs["kv_size"] = small.tokens(knobs["kv_size"])
    return chain_of({"method": point.method, **knobs}, preset=values)


def _cell(means: CellSummary) -> dict[str, Any]:
    low, high = means.ci or (None, None)
    return {"metric": means.metric, "score": means.score, "low": low, "high": high, "n": means.n} | _held([means])


def _held(cells: Sequence[CellSummary]) -> dict[str, float]:
    """Tokens kept and, at 16 bits, bytes held in per cent of the prompts', over all of them."""
    kept, prompts, *halves = (
        float(sum(c.n * x for c, x in zip(cells, values, strict=True)))
        for values in zip(*((c.kept, c.prompt_tokens, c.payload16, c.overhead16, c.full16) for c in cells), strict=True)
    )
    return {"kept": 100 * kept / prompts, "bytes": share(*halves)}


def _mean(found: Sequence[tuple[Group, CellSummary, NDArray[np.float64]]]) -> dict[str, Any]:
    """The mean over tasks, each of the same weight, where all are measured in the same unit."""
    values = [v for _, v, _ in found]
    names = {v.metric for v in values}
    base = {"metric": MEAN, "n": sum(v.n for v in values), **_held(values)}
    if any(metric(n).shown for n in names) or any(v.score is None for v in values):
        return base
    name = next(iter(names))
    return {**base, **_scored([p for _, _, p in found], name), **_relative([p for _, _, p in found], name)}


def _scored(tasks: Sequence[NDArray[np.float64]], name: str) -> dict[str, Any]:
    scale = metric(name).scale
    point = scale * float(np.mean([t[:, 0].mean() for t in tasks]))
    low, high = stats.stratified_ci(tasks, lambda means: scale * np.mean([m[:, 0] for m in means], axis=0), scale) or (
        None,
        None,
    )
    return {"score": point, "low": low, "high": high}


def _relative(tasks: Sequence[stats.Pairs], name: str) -> dict[str, Any]:
    """Score in per cent of the full cache's, the mean over tasks of the one over that of the other."""
    found = stats.Share() if metric(name).shown else stats.share(tasks)
    return (
        {} if found.point is None else {"relative": found.point, "relative_low": found.low, "relative_high": found.high}
    )
