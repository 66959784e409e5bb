"""Lines of measured points with their 95 % intervals as bands, and what such lines say in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from kvbench.papers.figures.measured import FULL, MEAN
from kvbench.tables import style


def lines(
    ax: Axes, data: pd.DataFrame, names: Sequence[str], y: str = "score", low: str = "low", high: str = "high"
) -> None:
    """A line per series over ``x``, in the look of its place in ``names``, with a band where there are intervals."""
    for name in names:
        rows = data[data["series"] == name].sort_values("x")
        if rows.empty:
            continue
        look = style.series(names.index(name), 1)
        ax.plot(rows["x"], rows[y], label=name, **look)
        known = rows.dropna(subset=[low, high])
        ax.fill_between(known["x"], known[low], known[high], color=look["color"], alpha=0.13, linewidth=0)


def level(ax: Axes, data: pd.DataFrame, y: str = "score", label: str = "full cache") -> None:
    """The full cache's value as a dashed level with its band."""
    rows = data[data["series"] == FULL].dropna(subset=[y])
    if rows.empty:
        return
    ax.axhline(float(rows[y].iloc[0]), color=style.GREY, ls="--", lw=0.9, label=label, zorder=0)


def series_of(data: pd.DataFrame) -> list[str]:
    """The names of the lines in the order of the data, the full cache's apart."""
    return [s for s in dict.fromkeys(data["series"]) if s != FULL]


def tasks_of(data: pd.DataFrame) -> list[str]:
    """The tasks in the order of the data, their mean apart."""
    return [t for t in dict.fromkeys(data["task"]) if t != MEAN]


def whole(data: pd.DataFrame) -> pd.DataFrame:
    """The rows of the mean over tasks; those of the only task where there is one."""
    tasks = tasks_of(data)
    return data[data["task"] == (MEAN if (data["task"] == MEAN).any() else tasks[0])]


def samples(data: pd.DataFrame) -> str:
    """How many examples are behind each point, in words: n = 8 of each task."""
    counts = data.loc[data["task"] != MEAN, "n"].astype(int)
    low, high = int(counts.min()), int(counts.max())
    each = f"n = {low}" if low == high else f"n = {low} to {high}"
    return f"{each} a task" if len(tasks_of(data)) > 1 else each


def percent_axis(ax: Axes, ticks: Sequence[float], label: str) -> None:
    """A logarithmic axis of per cents with these ticks and no others."""
    ax.set_xscale("log")
    ax.set_xticks(ticks, [f"{t:g}" for t in ticks])
    ax.minorticks_off()
    ax.set_xlabel(label)


def score_axis(ax: Axes, data: pd.DataFrame) -> None:
    """Scores upwards from 0 to 100, or to the highest where all are far below."""
    most = data[["score", "high"]].max().max()
    top = 100.0 if most > 60 else float(most)
    ax.set_ylim(-0.04 * top, 1.04 * top)


def legend_below(fig: Any, ax: Axes, columns: int) -> None:
    """One legend for all panels, below them."""
    handles, labels = ax.get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=min(columns, len(labels)), columnspacing=1.2)


def table(
    data: pd.DataFrame, names: Sequence[str], y: str = "score", at: Callable[[float], str] = lambda x: f"{x:g}"
) -> str:
    """The values of each line in words: snapkv 98.0 at 12.5, 98.7 at 25; h2o ..."""
    parts = []
    for name in names:
        rows = data[(data["series"] == name) & data[y].notna()].sort_values("x")
        if not rows.empty:
            values = ", ".join(f"{v:.1f} at {at(x)}" for x, v in zip(rows["x"], rows[y], strict=True))
            parts.append(f"{name} {values}")
    return "; ".join(parts)
