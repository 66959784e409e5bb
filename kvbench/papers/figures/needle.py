"""Needle in a haystack: score by length of the text and depth of the needle, a map per method."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from kvbench.metrics import metric
from kvbench.papers.figures.figure import Code, Fact
from kvbench.papers.figures.measured import MeasuredFigure
from kvbench.tables import heatmap

LOST = 50
COLUMNS = ("series", "length", "depth", "score", "n")


def maps(measured: MeasuredFigure) -> pd.DataFrame:
    """Return the mean score and the number of prompts of every method, length and depth."""
    points: dict[str, list[tuple[float, float, float]]] = {}
    for ran in measured.ran:
        for point, group, cell in ran.cells():
            ids = {e.id for e in group.examples}
            samples = [s for i, s in ran.run.store.samples(cell.id).items() if i in ids]
            if group.task.category == "needle" and samples and ran.run.store.refusal(cell.id) is None:
                points.setdefault(point.series, []).extend(heatmap.points(samples, metric(group.task.metric).show))
    rows = [(name, *row) for name, series_points in points.items() for row in heatmap.heat_map(series_points).rows()]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def with_means(data: pd.DataFrame) -> pd.DataFrame:
    """Add the ``mean`` of each map and, in words, how many prompts are ``behind`` a field."""
    behind = " to ".join(str(int(n)) for n in dict.fromkeys((data["n"].min(), data["n"].max())))
    return data.assign(mean=data["series"].map(_means(data, "series").map("{:.1f}".format)), behind=behind)


def needle_facts(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield the mean score by method, and where the needle is lost."""
    yield Fact("Mean score", _means(data, "series"))
    by_depth = _means(data, ["series", "depth"])
    if (by_depth < LOST).any():
        yield Fact(f"Depths with a mean below {LOST}", by_depth[by_depth < LOST], at="{:g} %")
    fields = data.groupby(["length", "depth"]).ngroups
    yield Fact("Examples", f"{int(data['n'].min())} prompts in each of {fields} fields")


def _means(data: pd.DataFrame, by: str | list[str]) -> pd.Series[float]:
    """Return the mean score over prompts."""
    sums = data.assign(total=data["score"] * data["n"]).groupby(by, sort=False)[["total", "n"]].sum()
    return sums["total"] / sums["n"]


CODE = {"needle/heatmap": Code(maps, needle_facts, with_means)}
