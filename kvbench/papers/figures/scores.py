"""Measured scores as figures show and tell them: over tasks or their mean, and needles by length and depth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd

from kvbench.papers.figures.figure import Code, Fact
from kvbench.papers.figures.measured import FULL, MEAN, MeasuredFigure
from kvbench.report import heatmap
from kvbench.tasks.metrics import metric

CLOSE = 2.0
LOST = 50  # a mean score below which a needle is lost
FRONT = "Pareto front"


def series_of(data: pd.DataFrame) -> list[str]:
    """Return the names of the lines in the order of the data, without the full cache."""
    return [s for s in dict.fromkeys(data["series"]) if s != FULL]


def tasks_of(data: pd.DataFrame) -> list[str]:
    """Return the tasks in the order of the data, without their mean."""
    return [t for t in dict.fromkeys(data["task"]) if t != MEAN]


def samples(data: pd.DataFrame) -> str:
    """Return the number of examples behind each point, in words: n = 8 of each task."""
    counts = data.loc[data["task"] != MEAN, "n"].astype(int)
    each = " to ".join(str(n) for n in dict.fromkeys((counts.min(), counts.max())))
    return f"n = {each} a task" if len(tasks_of(data)) > 1 else f"n = {each}"


def chosen(data: pd.DataFrame, tasks: str) -> pd.DataFrame:
    """Select the rows of the ``mean`` over tasks, of ``each`` task, or of ``all`` of these.

    Where there is only one task, its rows are selected. Columns for titles are added: ``samples``, ``over`` (mean
    over tasks, or the only task) and ``share`` (per cent of tokens kept).
    """
    names = tasks_of(data)
    several = len(names) > 1
    share = data[data["series"] != FULL].groupby("task")["kept"].mean()
    shown = data.assign(samples=samples(data), over="mean over tasks" if several else names[0])
    shown["share"] = data["task"].map(share).round()
    if tasks == "mean":
        return shown[shown["task"] == (MEAN if several else names[0])]
    each = shown[shown["task"] != MEAN]
    return each if tasks == "each" or not several else pd.concat([shown[shown["task"] == MEAN], each])


def front(data: pd.DataFrame) -> pd.DataFrame:
    """Return the points that no other equals or beats with fewer bytes, smallest first."""
    rows = data.dropna(subset=["score"]).sort_values(["bytes", "score"], ascending=[True, False], kind="stable")
    return rows[rows["score"] > rows["score"].cummax().shift(fill_value=float("-inf"))]


def with_front(data: pd.DataFrame) -> pd.DataFrame:
    """Return the data and, as one more series, the Pareto front up to all bytes."""
    best = front(data).assign(series=FRONT, low=float("nan"))
    return pd.concat([data, best, best.iloc[-1:].assign(bytes=100.0)])


def table(
    data: pd.DataFrame,
    label: str,
    y: str = "score",
    tasks: str = "mean",
    x: float | None = None,
    at: str = "{:g}",
    form: str = "{:.1f}",
) -> Fact:
    """Build a fact of ``y`` by series and x, or by task, series and x; of one ``x`` by task alone."""
    rows = chosen(data[data["series"] != FULL], tasks).sort_values("x", kind="stable")
    if x is not None:
        return Fact(label, rows[rows["x"] == x].set_index("task")[y], form)
    names = ["task"] * (rows["task"].nunique() > 1) + ["series"] * (len(series_of(data)) > 1)
    return Fact(label, rows.set_index([*names, "x"])[y], form, at if names else f"{at}:")


def told(
    data: pd.DataFrame, says: Sequence[Mapping[str, Any]], more: Callable[[pd.DataFrame], Iterable[Fact]]
) -> Iterator[Fact]:
    """Yield the facts below a figure: the full cache's scores, a table per entry of ``says``, ``more``, and n."""
    full = data[data["series"] == FULL]
    if len(full):
        yield Fact("Full cache", full.set_index("task")["score"])
    yield from (table(data, **entry) for entry in says)
    yield from more(data)
    yield Fact("Examples", samples(data))


def front_facts(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield the points on the front, and the fewest bytes at next to no loss."""
    rows = chosen(data, "mean")
    best = front(rows)
    points = ", ".join(f"{r.series} {r.bytes:.1f} % with {r.score:.1f}" for r in best.itertuples())
    yield Fact("Bytes and score on the front", points)
    full_score = rows.loc[rows["series"] == FULL, "score"].iloc[0]
    least = rows[rows["score"] >= full_score - CLOSE].sort_values("bytes").iloc[0]
    yield Fact(f"Fewest bytes within {CLOSE:g} points of the full cache", {least["series"]: least["bytes"]}, "{:.1f} %")


def gain_facts(data: pd.DataFrame, stage: str, at: str) -> Iterator[Fact]:
    """Yield the points that ``stage`` adds at every x to each series that has it."""
    scores = chosen(data, "mean").pivot_table(index="x", columns="series", values="score")
    bases = [s for s in series_of(data) if f"{s}+{stage}" in scores]
    gains = {base: (scores[f"{base}+{stage}"] - scores[base]).dropna() for base in bases}
    yield Fact(f"Points that {stage} adds", pd.concat(gains), "{:+.1f}", at)


def best_facts(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield the x of the best score of each task, the smallest of equals."""
    rows = chosen(data[data["series"] != FULL], "each")
    best = rows.loc[rows.groupby("task", sort=False)["score"].idxmax()]
    yield Fact("Best (the smallest of equals)", best.set_index("task")["x"], "{:g}")


def half_facts(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield the number of tasks on which keys lose more than values at the fewest bits."""
    rows = chosen(data[data["series"] != FULL], "each")
    scores = rows[rows["x"] == rows["x"].min()].pivot_table(index="task", columns="series", values="score")
    lost = scores["keys alone"] - scores["values alone"]
    counts = {"more than values": (lost < 0).sum(), "less": (lost > 0).sum()}
    yield Fact(f"Tasks of {len(lost)} on which keys lose at {rows['x'].min():g} bits", counts, "{:d}")


def needle_maps(measured: MeasuredFigure) -> pd.DataFrame:
    """Return the mean score and the number of prompts of every method, length and depth."""
    points: dict[str, list[tuple[float, float, float]]] = {}
    for ran in measured.ran:
        for point, group, cell in ran.cells():
            samples = [*ran.run.samples(group, cell).values()]
            if group.task.category == "needle" and samples and ran.run.store.refusal(cell.id) is None:
                points.setdefault(point.series, []).extend(heatmap.points(samples, metric(group.task.metric).show))
    rows = [(name, *row) for name, series_points in points.items() for row in heatmap.heat_map(series_points).rows()]
    return pd.DataFrame(rows, columns=["series", "length", "depth", "score", "n"])


def with_map_means(data: pd.DataFrame) -> pd.DataFrame:
    """Add the ``mean`` of each map and, in words, how many prompts are ``behind`` a field."""
    behind = " to ".join(str(int(n)) for n in dict.fromkeys((data["n"].min(), data["n"].max())))
    return data.assign(mean=data["series"].map(_prompt_means(data, "series").map("{:.1f}".format)), behind=behind)


def needle_facts(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield the mean score by method, and where the needle is lost."""
    yield Fact("Mean score", _prompt_means(data, "series"))
    by_depth = _prompt_means(data, ["series", "depth"])
    if (by_depth < LOST).any():
        yield Fact(f"Depths with a mean below {LOST}", by_depth[by_depth < LOST], at="{:g} %")
    fields = data.groupby(["length", "depth"]).ngroups
    least = int(data["n"].min())
    yield Fact("Examples", f"{least} prompt{'s' * (least > 1)} at each of {fields} pairs of length and depth")


def _prompt_means(data: pd.DataFrame, by: str | list[str]) -> pd.Series[float]:
    """Return the mean score over prompts."""
    sums = data.assign(total=data["score"] * data["n"]).groupby(by, sort=False)[["total", "n"]].sum()
    return sums["total"] / sums["n"]


CODE = {
    "needle/heatmap": Code(needle_maps, needle_facts, with_map_means),
    "results/pareto": Code(None, front_facts, with_front),
    "vatp/fig3": Code(None, partial(gain_facts, stage="vatp", at="{:g} %")),
    "think/fig3a": Code(None, partial(gain_facts, stage="think", at="pair {:g}")),
    "qhitter/fig9": Code(None, best_facts),
    "qhitter/fig10": Code(None, half_facts),
}
