"""Sweeps of one knob: VATP's figure 3 (budget), and ReFreeKV's figures 2 and 3 (threshold)."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure as Canvas

from kvbench.papers.figures import curves
from kvbench.papers.figures.measured import COLUMNS, FULL, MeasuredFigure, Point, ResultFigure, Sweep
from kvbench.tables import style

RATIOS = (0.1, 0.2, 0.3, 0.5, 0.7)
VATP = ("h2o", "h2o+vatp", "scissorhands", "scissorhands+vatp")
THRESHOLDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6)
PAPERS = (0.1, 5.0)  # the range of the paper's figures, per cent
CHOSEN = 1.0  # per cent, the paper's
TICKS = (0.1, 0.5, 1, 5, 20, 60)
FIVE = "gsm8k,coqa,longbench/narrativeqa,longbench/musique,longbench/qmsum"  # those of table 5


def draw_ratios(data: pd.DataFrame) -> Canvas:
    """Score against tokens kept, a line per method."""
    rows = curves.whole(data)
    fig = style.canvas(style.COLUMN, 2.4)
    ax = fig.subplots()
    curves.level(ax, rows)
    curves.lines(ax, rows, curves.series_of(data))
    ax.set_xlabel("tokens kept, %")
    ax.set_ylabel("score")
    ax.set_title(f"{curves.tasks_of(data)[0]}; {curves.samples(data)}", loc="left")
    curves.legend_below(fig, ax, 3)
    return fig


def say_ratios(data: pd.DataFrame) -> str:
    """What VATP adds to each of its bases at every budget."""
    rows = curves.whole(data)
    scores = rows.pivot_table(index="x", columns="series", values="score")
    parts = []
    for base in (s for s in curves.series_of(rows) if f"{s}+vatp" in scores):
        gains = (scores[f"{base}+vatp"] - scores[base]).dropna()
        parts.append(f"{base} " + ", ".join(f"{g:+.1f} at {x:g} %" for x, g in gains.items()))
    said = curves.table(rows, curves.series_of(rows), at=lambda x: f"{x:g} %")
    return f"VATP adds, in points, to {'; to '.join(parts)}. Scores: {said}; {curves.samples(data)}."


def draw_relative(data: pd.DataFrame) -> Canvas:
    """Score in per cent of the full cache's against the threshold; the paper's range is shaded."""
    rows = curves.whole(data)
    fig = style.canvas(style.COLUMN, 2.1)
    ax = fig.subplots()
    ax.axvspan(*PAPERS, color=style.PALE, alpha=0.4, lw=0)
    curves.level(ax, rows, "relative")
    curves.lines(ax, rows, curves.series_of(rows), "relative", "relative_low", "relative_high")
    ax.axvline(CHOSEN, color=style.GREY, lw=0.6, ls=":")
    curves.percent_axis(ax, TICKS, "threshold T, %")
    ax.set_ylabel("score, % of the full cache's")
    ax.set_title(f"mean over tasks; {curves.samples(data)}; grey: the paper's range", loc="left", fontsize=6.5)
    return fig


def draw_trade(data: pd.DataFrame) -> Canvas:
    """(a) score of each task in per cent of the full cache's, (b) the budget that the threshold leads to."""
    rows = data[data["series"] != FULL]
    tasks = curves.tasks_of(rows)
    fig = style.canvas(style.PAGE, 2.4)
    axes = fig.subplots(1, 2)
    for ax, y in zip(axes, ("relative", "kept"), strict=True):
        for i, task in enumerate(tasks):
            mine = rows[rows["task"] == task].sort_values("x")
            look = style.series(i, 1) | {"linestyle": "-" if y == "relative" else "--"}
            ax.plot(mine["x"], mine[y], label=task, **look)
        ax.axvline(CHOSEN, color=style.GREY, lw=0.6, ls=":")
        curves.percent_axis(ax, TICKS, "threshold T, %")
    axes[0].set_ylabel("score, % of the full cache's")
    axes[1].set_ylabel("tokens kept, %")
    axes[0].set_ylim(0, max(104, 1.04 * rows["relative"].max()))
    axes[1].set_ylim(0, 104)
    style.mark_panels(axes, [f"score; {curves.samples(data)}", "budget"])
    curves.legend_below(fig, axes[0], 6)
    return fig


def say_thresholds(data: pd.DataFrame) -> str:
    """Score and budget at every threshold, mean over tasks, and where a task first loses."""
    rows = curves.whole(data)
    rows = rows[rows["series"] != FULL].sort_values("x")
    said = ", ".join(f"T = {r.x:g} %: {r.relative:.1f} with {r.kept:.0f} % of the tokens" for r in rows.itertuples())
    each = data[(data["series"] != FULL) & (data["x"] == CHOSEN) & data["task"].isin(curves.tasks_of(data))]
    budgets = ", ".join(f"{r.task} {r.kept:.0f}" for r in each.itertuples())
    return (
        f"Score in per cent of the full cache's, mean over tasks: {said}. Budgets at {CHOSEN:g} %: {budgets}; "
        f"{curves.samples(data)}."
    )


_THRESHOLDS = Sweep(
    tuple(Point("refreekv", 100 * t, "refreekv", {"T": t}) for t in THRESHOLDS), published=FIVE, preset="refreekv"
)
FIGURES = (
    ResultFigure(
        id="vatp/fig3",
        title="score against the budget, with and without VATP",
        shows="Score of H2O and Scissorhands with and without VATP against the share of tokens kept, on 2WikiMQA "
        "(the tiny model: the task that stands for it); bands are 95 % intervals, the dashed line is the full cache. "
        "Half of a budget is recent tokens, as in the paper.",
        claim="Scissorhands with VATP is best at nearly all ratios, far above Scissorhands at small ones; VATP "
        "improves H2O mainly at larger ratios.",
        unsaid="The paper prints no values and no list of ratios; ours are 10, 20, 30, 50 and 70 %.",
        columns=COLUMNS,
        compute=MeasuredFigure.frame,
        draw=draw_ratios,
        finding=say_ratios,
        each=24,
        sweeps=(
            Sweep(
                tuple(Point(m, 100 * r, m, {"kv_ratio": r}) for m in VATP for r in RATIOS),
                dataset="tiny/hop",
                published="longbench/2wikimqa",
                preset="vatp",
                length=4096,
            ),
        ),
    ),
    ResultFigure(
        id="refreekv/fig2",
        title="relative score against the threshold",
        shows="Mean score over the tasks in per cent of the full cache's against the threshold T, with its 95 % "
        "interval over pairs; shaded: the range of the paper, 0.1 to 5 %, beyond which we go on to 60 %.",
        claim="Below 1 % all three models stay close to the full cache's score; 1 % balances little loss with much "
        "eviction.",
        unsaid="The paper prints no values, and does not name the datasets of this figure; here those of table 5 "
        "unless dataset= says otherwise, on the tiny model all six tasks.",
        columns=COLUMNS,
        compute=MeasuredFigure.frame,
        draw=draw_relative,
        finding=say_thresholds,
        each=8,
        sweeps=(_THRESHOLDS,),
    ),
    ResultFigure(
        id="refreekv/fig3",
        title="score and budget against the threshold, by dataset",
        shows="(a) Each task's score in per cent of the full cache's (their 95 % intervals, wide with so few prompts, "
        "are in the CSV; that of the mean is drawn in figure 2); (b) tokens kept, mean over layers and prompts. Layers "
        "0 and 1 keep everything. The dotted line is the paper's threshold.",
        claim="1 % balances both: at 0.1 % budgets grow and scores gain little, at 10 % more goes and scores fall "
        "significantly.",
        unsaid="The paper prints no values; on the tiny model the tasks of its suite stand for the five datasets.",
        columns=COLUMNS,
        compute=MeasuredFigure.frame,
        draw=draw_trade,
        finding=say_thresholds,
        each=8,
        sweeps=(_THRESHOLDS,),
    ),
)
