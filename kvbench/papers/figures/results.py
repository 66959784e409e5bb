"""Our own figures of results: score against bytes with the Pareto front, and score against budget by method."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure as Canvas

from kvbench.papers.figures import curves
from kvbench.papers.figures.measured import COLUMNS, FULL, MeasuredFigure, Point, ResultFigure, Sweep
from kvbench.tables import style

BUDGETS = (0.5, 0.25, 0.125)
SELECTORS = ("pyramidkv", "snapkv", "cake", "h2o", "streamingllm", "tova", "random")
CLOSE = 2.0


def _budgets() -> tuple[Point, ...]:
    return tuple(Point(m, 100 * b, m, {"kv_ratio": b}) for m in SELECTORS for b in BUDGETS)


def _formats() -> tuple[Point, ...]:
    """One point for each method and strength; ``x`` numbers the points of a series."""
    grids: dict[str, list[dict[str, Any]]] = {
        "streamingllm": [{"kv_ratio": b} for b in BUDGETS],
        "h2o": [{"kv_ratio": b} for b in BUDGETS],
        "snapkv": [{"kv_ratio": b} for b in BUDGETS],
        "think": [{"ratio": r} for r in (0.3, 0.4, 0.5, 0.6, 0.7)],
        "kivi": [{"bits": b, "residual": 32} for b in (8, 4, 2)],
        "flexgen": [{"bits": b, "group": 32} for b in (8, 4, 2)],
        "think+kivi": [{"ratio": 0.4, "bits": b, "residual": 32} for b in (8, 4, 2)],
        "snapkv+think": [{"kv_ratio": 0.25, "ratio": 0.4}],
        "h2o+quant": [{"kv_ratio": k, "bits": b} for k in (0.5, 0.25) for b in (8, 4, 3, 2)],
        "qhitter": [{"kv_ratio": k, "bits": b} for k in (0.5, 0.25) for b in (8, 4, 3, 2)],
        "refreekv": [{"T": t} for t in (0.01, 0.05, 0.1, 0.2)],
    }
    return tuple(Point(m, i, m, knobs) for m, grid in grids.items() for i, knobs in enumerate(grid))


def front(data: pd.DataFrame) -> pd.DataFrame:
    """The points that no other beats or equals with fewer bytes, from the smallest on."""
    rows = data.dropna(subset=["score"]).sort_values(["bytes", "score"], ascending=[True, False], kind="stable")
    return rows[rows["score"] > rows["score"].cummax().shift(fill_value=float("-inf"))]


def draw_pareto(data: pd.DataFrame) -> Canvas:
    """Bytes to the right (logarithmic), mean score upwards; the front as a step."""
    counted, data = curves.samples(data), curves.whole(data)
    names = curves.series_of(data)
    fig = style.canvas(style.PAGE, 2.9)
    ax = fig.subplots()
    best = front(data)
    ax.step([*best["bytes"], 100.0], [*best["score"], best["score"].max()], where="post", color=style.GREY, lw=0.8)
    for i, name in enumerate([*names, FULL]):
        rows = data[data["series"] == name]
        k = i % len(style.PALETTE)
        filled = style.PALETTE[k] if i < len(style.PALETTE) else "white"
        look: dict[str, Any] = {"color": style.PALETTE[k], "mfc": filled, "marker": style.MARKERS[k], "mew": 0.9}
        if name == FULL:
            look = {"color": style.GREY, "mfc": style.GREY, "marker": "*", "markersize": 7}
        spread = None
        if rows["low"].notna().all():
            spread = (rows["score"] - rows["low"], rows["high"] - rows["score"])
        ax.errorbar(rows["bytes"], rows["score"], yerr=spread, ls="", lw=0.5, label=name, **look)
    curves.percent_axis(ax, [5, 10, 20, 40, 60, 80, 100], "bytes, % of the full cache's, at 16 bits")
    ax.set_xlim(right=110)
    ax.set_ylabel("score, mean over tasks")
    ax.set_title(f"grey: Pareto front; {counted}", loc="left")
    fig.legend(loc="outside right center")
    return fig


def say_pareto(data: pd.DataFrame) -> str:
    """Who stands on the front, and the fewest bytes at next to no loss."""
    rows = curves.whole(data)
    best = front(rows)
    whole = rows.loc[rows["series"] == FULL, "score"].iloc[0]
    named = ", ".join(f"{r.series} {r.score:.1f} with {r.bytes:.1f} %" for r in best.itertuples() if r.series != FULL)
    near = rows[rows["score"] >= whole - CLOSE].sort_values("bytes").iloc[0]
    return (
        f"On the front: {named}. Fewest bytes within {CLOSE:g} points of the full cache ({whole:.1f}): "
        f"{near['series']} with {near['bytes']:.1f} %; {curves.samples(data)}."
    )


def draw_budgets(data: pd.DataFrame) -> Canvas:
    """A panel for the mean and one for each task: score against tokens kept."""
    names, tasks = curves.series_of(data), curves.tasks_of(data)
    panels = [("mean", curves.whole(data)), *((t, data[data["task"] == t]) for t in tasks if len(tasks) > 1)]
    fig, axes, bottom = style.grid(len(panels), 4, style.PAGE, 1.6, sharex=True, sharey=True)
    for ax, (_, rows) in zip(axes, panels, strict=True):
        curves.level(ax, rows)
        curves.lines(ax, rows, names)
        curves.score_axis(ax, data)
        curves.percent_axis(ax, [100 * b for b in sorted(BUDGETS)], "")
    for ax in bottom:
        ax.set_xlabel("tokens kept, %")
    for ax in axes[::4]:
        ax.set_ylabel("score")
    style.mark_panels(axes, [f"{panels[0][0]}; {curves.samples(data)}", *(t for t, _ in panels[1:])])
    curves.legend_below(fig, axes[0], 8)
    return fig


def say_budgets(data: pd.DataFrame) -> str:
    """Mean scores by method and budget."""
    rows = curves.whole(data)
    said = curves.table(rows, curves.series_of(rows))
    return f"Mean scores at the per cent of tokens kept: {said}; {curves.samples(data)}."


FIGURES = (
    ResultFigure(
        id="results/pareto",
        title="score against bytes held, with the Pareto front",
        shows="Every point is a method at one strength: mean score over the tasks with its 95 % interval against the "
        "bytes that its caches take after the prompt at 16 bits, payload and overhead, in per cent of the full cache's "
        "keys and values. Grey: the best score to be had with so many bytes or fewer. Intervals are within tasks.",
        claim="Ours, not a paper's: what a method is worth is what it keeps of the score for the bytes it takes.",
        unsaid="Bytes are those after the prompt; how they are read while decoding, and how fast, is not shown.",
        columns=COLUMNS,
        compute=MeasuredFigure.frame,
        draw=draw_pareto,
        finding=say_pareto,
        each=8,
        sweeps=(Sweep(_formats(), published="longbench"),),
    ),
    ResultFigure(
        id="results/budget",
        title="score against the budget, by method",
        shows="Score against the tokens kept, mean over the tasks and each task; bands are 95 % intervals, the dashed "
        "line is the full cache.",
        claim="Ours, not a paper's: methods that ask what the end of the prompt attends to keep answers at budgets at "
        "which a window or chance have lost them.",
        unsaid="Budgets are fractions of each prompt, the same for all methods and, by mean, for all layers.",
        columns=COLUMNS,
        compute=MeasuredFigure.frame,
        draw=draw_budgets,
        finding=say_budgets,
        each=8,
        sweeps=(Sweep(_budgets(), published="longbench"),),
    ),
)
