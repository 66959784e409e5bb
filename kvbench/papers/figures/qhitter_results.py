"""Q-Hitter's figures of results: perplexity by cache size (5), scores by bits (7), streaming (8), lambda (9), and keys
or values alone in few bits (10).

Zhang et al., MLSys 2024. Budgets are the paper's: a cache 5, 2.5 and 2 times smaller for XSUM, CNN-DailyMail and MDQA.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import LogLocator, NullLocator

from kvbench.papers.figures import curves
from kvbench.papers.figures.measured import COLUMNS, FULL, MeasuredFigure, Point, ResultFigure, Sweep
from kvbench.tables import style

BITS = (8, 4, 3, 2)
SIZES = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8)
STAR = "outliers alone"
WIDE = 10  # highest over lowest perplexity, from where on its axis is logarithmic
OUTLIERS, NEWEST = 0.01, 0.002
"""Of the tokens, those with the most attention: about as many as have several times the mean; and the newest of 512."""
FACTORS = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
DATASETS = (("tiny/listing", "xsum", 0.2), ("tiny/hop", "cnn_dailymail", 0.4), ("tiny/needle", "mdqa", 0.5))
CACHE = 256
LOCAL = 240
HALVES = {"keys alone": "keys", "values alone": "values", "both": None}
HEAD = 128  # channels of a group: with these many a token of a head is one, as Q-Hitter packs it
LENGTHS = (512, 1024, 2048, 4096, 8192)


def draw_bits(data: pd.DataFrame) -> Canvas:
    """A panel per task: score against bits, from many to few."""
    tasks, names = curves.tasks_of(data), curves.series_of(data)
    fig = style.canvas(style.PAGE, 2.1)
    axes = fig.subplots(1, len(tasks), sharey=True, squeeze=False)[0]
    for ax, task in zip(axes, tasks, strict=True):
        rows = data[data["task"] == task]
        curves.level(ax, rows)
        curves.lines(ax, rows, names)
        ax.set_xticks(sorted(rows.loc[rows["series"] != FULL, "x"].unique()))
        ax.invert_xaxis()
        ax.set_xlabel("bits")
    axes[0].set_ylabel(f"score, {curves.samples(data)}")
    curves.score_axis(axes[0], data)
    kept = [data.loc[(data["task"] == t) & (data["series"] != FULL), "kept"].mean() for t in tasks]
    titles = [f"{t}, {k:.0f} % kept" for t, k in zip(tasks, kept, strict=True)]
    style.mark_panels(axes, titles)
    curves.legend_below(fig, axes[0], 4)
    return fig


def say_bits(data: pd.DataFrame) -> str:
    """Scores by task, method and bits."""
    parts = []
    for task in curves.tasks_of(data):
        rows = data[data["task"] == task]
        whole = rows.loc[rows["series"] == FULL, "score"]
        full = f" (full {whole.iloc[0]:.1f})" if len(whole) else ""
        parts.append(f"{task}{full}: " + curves.table(rows, curves.series_of(rows), at=lambda x: f"{x:g} bits"))
    return f"{'. '.join(parts)}; {curves.samples(data)}."


def draw_halves(data: pd.DataFrame) -> Canvas:
    """Score against bits, from many to few: keys alone, values alone, both."""
    rows, names = curves.whole(data), curves.series_of(data)
    fig = style.canvas(style.COLUMN, 2.4)
    ax = fig.subplots()
    curves.level(ax, rows)
    curves.lines(ax, rows, names)
    ax.set_xticks(sorted(rows.loc[rows["series"] != FULL, "x"].unique()))
    ax.invert_xaxis()
    ax.set_xlabel("bits of what is packed")
    ax.set_ylabel("score")
    tasks = curves.tasks_of(data)
    ax.set_title(f"{'mean over tasks' if len(tasks) > 1 else tasks[0]}; {curves.samples(data)}", loc="left")
    curves.legend_below(fig, ax, 4)
    return fig


def say_halves(data: pd.DataFrame) -> str:
    """Mean scores by what is packed and bits, and on how many tasks keys lose more than values at the fewest bits."""
    rows = curves.whole(data)
    said = curves.table(rows, curves.series_of(rows), at=lambda x: f"{x:g} bits")
    fewest = data[(data["series"] != FULL) & data["task"].isin(curves.tasks_of(data))]
    fewest = fewest[fewest["x"] == fewest["x"].min()].pivot_table(index="task", columns="series", values="score")
    keys, values = fewest["keys alone"], fewest["values alone"]
    return (
        f"{said}. At {data.loc[data['series'] != FULL, 'x'].min():g} bits keys lose more than values on "
        f"{int((keys < values).sum())} of {len(fewest)} tasks, less on {int((keys > values).sum())}; "
        f"{curves.samples(data)}."
    )


def draw_factors(data: pd.DataFrame) -> Canvas:
    """Score against lambda, a thin line per task and the mean."""
    tasks = curves.tasks_of(data)
    rows = data[data["series"] != FULL]
    fig = style.canvas(style.COLUMN, 2.5)
    ax = fig.subplots()
    for i, task in enumerate(tasks):
        mine = rows[rows["task"] == task].sort_values("x")
        ax.plot(mine["x"], mine["score"], label=task, **(style.series(i, 1) | {"lw": 0.7, "markersize": 2.5}))
    whole = curves.whole(data)
    mean = whole[whole["series"] != FULL].sort_values("x")
    ax.plot(mean["x"], mean["score"], color="black", lw=1.8, label="mean")
    known = mean.dropna(subset=["low"])
    ax.fill_between(known["x"], known["low"], known["high"], color="black", alpha=0.12, linewidth=0)
    curves.level(ax, whole)
    ax.axvline(0.5, color=style.GREY, lw=0.6, ls=":")
    ax.set_xlabel(r"$\lambda$, weight of attention")
    ax.set_ylabel("score")
    ax.set_title(f"3 bits; {curves.samples(data)}", loc="left")
    curves.legend_below(fig, ax, 4)
    return fig


def say_factors(data: pd.DataFrame) -> str:
    """Mean scores by lambda, and where the best is on each task."""
    rows = data[data["series"] != FULL]
    best = rows[rows["task"].isin(curves.tasks_of(data))]
    best = best.loc[best.groupby("task", sort=False)["score"].idxmax()]
    said = ", ".join(f"{r.task} {r.x:g}" for r in best.itertuples())
    mean = curves.whole(rows).sort_values("x")
    scores = ", ".join(f"{r.score:.1f} at {r.x:g}" for r in mean.itertuples())
    return f"Mean over tasks: {scores}. Best (the smallest of equals): {said}; {curves.samples(data)}."


def _perplexities(data: pd.DataFrame, ticks: Sequence[float], label: str, star: pd.DataFrame | None = None) -> Canvas:
    rows, names = curves.whole(data), [s for s in curves.series_of(data) if s != STAR]
    fig = style.canvas(style.COLUMN, 2.4)
    ax = fig.subplots()
    full = rows[rows["series"] == FULL]
    if full["x"].nunique() == 1:
        curves.level(ax, rows)
    curves.lines(ax, rows, names)
    if star is not None and len(star):
        spread = (star["score"] - star["low"], star["high"] - star["score"])
        look: dict[str, Any] = {"marker": "*", "markersize": 9, "color": "black", "lw": 0.6, "ls": ""}
        ax.errorbar(star["x"], star["score"], yerr=spread if star["low"].notna().all() else None, label=STAR, **look)
    curves.percent_axis(ax, ticks, label)
    if data["score"].max() > WIDE * data["score"].min():
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        ax.yaxis.set_minor_locator(NullLocator())
    ax.set_ylabel("perplexity")
    ax.set_title(f"{curves.tasks_of(data)[0]}; {curves.samples(data)}", loc="left")
    curves.legend_below(fig, ax, 3)
    return fig


def draw_sizes(data: pd.DataFrame) -> Canvas:
    """Perplexity against the cache's share of the text read so far; a star where only outliers of attention stay."""
    star = data[data["series"] == STAR]
    ticks = [100 * s for s in (*([OUTLIERS] if len(star) else []), *SIZES)]
    return _perplexities(data, ticks, "cache, % of the prefix", star)


def say_sizes(data: pd.DataFrame) -> str:
    """Perplexity by method and cache size, and the full cache's."""
    rows = curves.whole(data)
    full = rows.loc[rows["series"] == FULL, "score"].iloc[0]
    said = curves.table(rows, curves.series_of(rows), at=lambda x: f"{x:g} %")
    return f"Full cache {full:.1f}. {said}; {curves.samples(data)}."


def draw_streams(data: pd.DataFrame) -> Canvas:
    """Perplexity of a text against its length."""
    return _perplexities(data, LENGTHS, "tokens of the text")


def say_streams(data: pd.DataFrame) -> str:
    """Perplexity by method and length of the text."""
    rows = curves.whole(data)
    return f"Perplexity up to so many tokens: {curves.table(rows, curves.series_of(rows))}; {curves.samples(data)}."


def _by_bits() -> tuple[Sweep, ...]:
    return tuple(
        Sweep(
            tuple(Point(m, b, m, {"kv_ratio": r, "bits": b}) for m in ("qhitter", "h2o+quant") for b in BITS),
            dataset=dataset,
            published=published,
            preset="qhitter",
        )
        for dataset, published, r in DATASETS
    )


def _streams() -> tuple[Sweep, ...]:
    """One sweep per length: all hold the same beginning of the same text."""
    split = {"heavy_ratio": (CACHE - LOCAL) / CACHE, "recent_ratio": LOCAL / CACHE}
    streaming: tuple[str, dict[str, Any]] = ("streamingllm", {"kv_size": CACHE, "mode": "rolled"})
    chosen: tuple[str, dict[str, Any]] = ("h2o", {**split, "positions": "rolled"})
    packed: tuple[str, dict[str, Any]] = ("qhitter", {**split, "first_ratio": 0.0, "bits": 4})
    found = []
    for length in LENGTHS:
        named: dict[str, tuple[str, dict[str, Any]]] = {
            "StreamingLLM": streaming,
            f"H2O, {CACHE - LOCAL} chosen": chosen,
        }
        if length <= 4096:  # packed keys keep the positions that they were rotated to
            named |= {f"Q-Hitter, {CACHE - LOCAL} chosen": packed, "full cache": ("full", {})}
        found.append(
            Sweep(
                tuple(Point(name, length, method, knobs) for name, (method, knobs) in named.items()),
                dataset="tiny_stream",
                published="pg19",
                preset="qhitter",
                arguments=(f"length={length}", f"prefix={CACHE}", "chunk=64"),
                baseline=False,
            )
        )
    return tuple(found)


FIGURES = (
    ResultFigure(
        id="qhitter/fig5",
        title="perplexity against cache size",
        shows="Perplexity of WikiText-2 windows of 1,024 tokens: 512 are read and compressed, the others scored with "
        "eviction going on, 16 at a time. H2O as in the paper, half of the cache recent tokens, and StreamingLLM; the "
        "dashed line is the full cache, bands are 95 % intervals over windows. The star is a cache of nothing but the "
        f"{100 * OUTLIERS:g} % of tokens with the most accumulated attention.",
        claim="Perplexity stays near the full cache's down to about a fifth of it and rises steeply below; keeping the "
        "outliers of attention alone about doubles it on Pythia-70M.",
        unsaid="The paper names neither the prefix nor the sizes, nor from where on a token is an outlier: the star is "
        f"H2O with {100 * OUTLIERS:g} % of the prefix in every head and the newest token, and reads 4 tokens "
        "at a time, since no more fit.",
        columns=COLUMNS,
        compute=MeasuredFigure.frame,
        draw=draw_sizes,
        finding=say_sizes,
        each=8,
        sweeps=(
            Sweep(
                tuple(Point(m, 100 * s, m, {"kv_ratio": s}) for m in ("h2o", "streamingllm") for s in SIZES),
                dataset="wikitext2",
                preset="qhitter",
                arguments=("chunk=16",),
            ),
            Sweep(
                (Point(STAR, 100 * OUTLIERS, "h2o", {"heavy_ratio": OUTLIERS, "recent_ratio": NEWEST}),),
                dataset="wikitext2",
                preset="qhitter",
                arguments=("chunk=4",),
                baseline=False,
            ),
        ),
    ),
    ResultFigure(
        id="qhitter/fig7",
        title="scores of Q-Hitter and of H2O with quantisation, by bits",
        shows="Score against bits on XSUM, CNN-DailyMail and MDQA (the tiny model: tasks that stand for them), at the "
        "paper's budgets of a fifth, two fifths and half of the prompt; bands are 95 % intervals, the dashed line is "
        "the full cache.",
        claim="At 4 and at 3 bits Q-Hitter is ahead of H2O followed by quantisation on every task and model, and at 4 "
        "bits it loses nothing to the full model.",
        unsaid="The paper has 4 and 3 bits; 8 and 2 are ours.",
        columns=COLUMNS,
        compute=MeasuredFigure.frame,
        draw=draw_bits,
        finding=say_bits,
        each=8,
        sweeps=_by_bits(),
    ),
    ResultFigure(
        id="qhitter/fig8",
        title="perplexity of a stream that is longer than the cache",
        shows=f"Perplexity of a text from its {CACHE + 1}th token on, by its length, with a cache of {CACHE} tokens: "
        f"{CACHE - LOCAL} chosen and {LOCAL} local ones (the paper: 128 and 1,920 of 2,048). StreamingLLM holds the "
        "first four and local ones. On the tiny model the text is made of its own tasks, and its context is 4,096.",
        claim="With 128 chosen tokens in 2,048 Q-Hitter streams four million tokens of PG-19 as StreamingLLM does, "
        "without perplexity rising.",
        unsaid="Q-Hitter's packed keys keep the positions that they were rotated to, as in its released code, so that "
        "it and the full cache are drawn up to 4,096 tokens; H2O with rolled positions shows what chosen tokens do "
        "beyond them.",
        columns=COLUMNS,
        compute=MeasuredFigure.frame,
        draw=draw_streams,
        finding=say_streams,
        each=2,
        sweeps=_streams(),
    ),
    ResultFigure(
        id="qhitter/fig9",
        title="score against the balance factor lambda",
        shows="Score of Q-Hitter with 3 bits and a fifth of the tokens against the weight of attention in the score "
        "that chooses tokens, each task and their mean with its 95 % interval; the dashed line is the full cache.",
        claim="Quality rises with lambda, peaks at 0.5 and falls again: both friendliness to quantisation alone and "
        "attention alone are worse.",
        unsaid="The paper does not say which tasks and budgets it shows; here the budget of XSUM and that task "
        "unless dataset= says otherwise, on the tiny model all six.",
        columns=COLUMNS,
        compute=MeasuredFigure.frame,
        draw=draw_factors,
        finding=say_factors,
        each=8,
        sweeps=(
            Sweep(
                tuple(Point("qhitter", x, "qhitter", {"lam": x, "bits": 3, "kv_ratio": 0.2}) for x in FACTORS),
                published="xsum",
                preset="qhitter",
            ),
        ),
    ),
    ResultFigure(
        id="qhitter/fig10",
        title="keys alone or values alone in few bits",
        shows="Mean score over the tasks against bits where all tokens stay and only their keys, only their values, "
        "or both are packed, each token of a head as one group with its own scale and minimum; bands are "
        "95 % intervals, the dashed line is the full cache.",
        claim="With keys alone in few bits quality falls sooner than with values alone: keys are harder to quantise.",
        unsaid="The paper shows XSUM, which is read here unless dataset= says otherwise, on the tiny model all six "
        "tasks; it does not say whether tokens were evicted as well: here none are. Packed by FlexGen with one group a "
        "head (Q-Hitter's own rounding has an integer zero point). 8 and 2 bits and both together are ours.",
        columns=COLUMNS,
        compute=MeasuredFigure.frame,
        draw=draw_halves,
        finding=say_halves,
        each=12,
        sweeps=(
            Sweep(
                tuple(
                    Point(name, b, "flexgen", {"bits": b, "group": HEAD, **({"only": half} if half else {})})
                    for name, half in HALVES.items()
                    for b in BITS
                ),
                published="xsum",
                preset="qhitter",
            ),
        ),
    ),
)
