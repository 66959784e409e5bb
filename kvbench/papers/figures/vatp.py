"""VATP's figure 1: attention against the norms of the values that it fetches (arXiv 2406.12335)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure as Canvas
from torch import Tensor

from kvbench.cache.exact_attention import causal_softmax
from kvbench.cache.observation import Needs, Observation
from kvbench.cache.segment import per_head
from kvbench.papers.figures.figure import Figure, percent
from kvbench.papers.figures.reading import Prompt, Reading
from kvbench.tables import style

SHOWN = 48  # first tokens of the first prompt whose attention is drawn
SINK = 0.3  # of all attention that a head pays: more to one token makes that a sink
FLOOR = 1e-4  # of the colour scale, as a fraction of a query's attention
DEPTHS = (0.0, 0.5, -1.0)


def value_norms(reading: Reading) -> pd.DataFrame:
    """Attention and norms of a few heads, and the most attended token of every head.

    Rows of ``quantity``: ``attention`` of a query to a token and ``norm``, ||v||_1 of a token, for the first ``SHOWN``
    tokens of the first prompt and the chosen heads; ``share``, the part of all attention that a head's most attended
    token receives (its accumulated attention over the number of queries), and ``ratio``, that token's ||v||_1 over the
    median of the head's tokens, for every prompt, layer and head.
    """
    layers = reading.layers(DEPTHS)
    asked = reading.knobs.get("heads")
    chosen = reading.chosen_heads([0], reading.heads[1])
    found: list[dict[str, Any]] = []
    for number, prompt in enumerate(reading.prompts):
        ids = reading.ids(prompt)

        def on_layer(
            obs: Observation, k: Tensor, v: Tensor, prompt: Prompt = prompt, number: int = number, ids: Tensor = ids
        ) -> None:
            assert obs.colsums is not None
            queries = obs.colsums.shape[0]
            norms = per_head(v.float().abs().sum(dim=-1), queries).cpu()
            share = obs.colsums.cpu() / obs.n
            top = share.argmax(dim=1)
            of_top = norms.gather(1, top[:, None])[:, 0] / norms.median(dim=1).values
            at = {"source": prompt.source, "prompt": number, "layer": obs.layer}
            for h in range(queries):
                here = {**at, "head": h, "token": int(top[h])}
                found.append({**here, "quantity": "share", "value": float(share[h, top[h]])})
                found.append({**here, "quantity": "ratio", "value": float(of_top[h])})
            if number == 0 and obs.layer in layers:
                heads = chosen if asked else [int(share.amax(dim=1).argmax())]
                for h in heads:
                    found.extend(_pattern(obs, k, norms[h], h, {**at, "head": h}, ids, reading))

        reading.read(ids, Needs(last_q=len(ids), colsums=True), on_layer)
        reading.tick()
    return pd.DataFrame(found).reindex(columns=list(COLUMNS))


def _pattern(
    obs: Observation, k: Tensor, norms: Tensor, head: int, at: dict[str, Any], ids: Tensor, reading: Reading
) -> list[dict[str, Any]]:
    """One head's attention rows [m, m] and value norms [m] of the first m tokens, as rows of the data."""
    m = min(SHOWN, obs.n)
    group = obs.queries(obs.n).shape[0] // k.shape[0]
    query, keys = obs.queries(obs.n)[head : head + 1, :m], k[head // group : head // group + 1, :m]
    rows = causal_softmax(query, keys, obs.scale)[0].cpu()
    found = [
        {**at, "quantity": "attention", "query": i, "token": j, "value": float(rows[i, j])}
        for i in range(m)
        for j in range(i + 1)
    ]
    for j in range(m):
        text = repr(reading.decode(int(ids[j])))
        found.append({**at, "quantity": "norm", "token": j, "text": text, "value": float(norms[j])})
    return found


def draw_norms(data: pd.DataFrame) -> Canvas:
    """Up to three heads as a map with their norms below, and all heads as points."""
    maps = data[data["quantity"] == "attention"]
    shown = list(maps.groupby(["layer", "head"]))[:3]
    fig = style.canvas(style.PAGE, 2.35)
    halves: Any = fig.subfigures(1, 2, width_ratios=[2.7 if len(shown) > 1 else 1.4, 1.25])
    left, right = halves
    parts = left.subplots(2, len(shown), height_ratios=[3.2, 1], squeeze=False)
    image: Any = None
    for i, ((layer, head), rows) in enumerate(shown):
        table = rows.pivot(index="query", columns="token", values="value").to_numpy()
        ax, strip = parts[0][i], parts[1][i]
        image = ax.imshow(np.clip(table, FLOOR, None), norm=LogNorm(FLOOR, 1), aspect="auto")
        ax.tick_params(labelbottom=False, labelleft=i == 0)
        ax.set_title(f"({chr(97 + i)}) layer {layer}, head {head}", loc="left")
        norms = data[(data["quantity"] == "norm") & (data["layer"] == layer) & (data["head"] == head)]
        sinks = np.nansum(table, axis=0) / len(table) >= SINK
        colours = [style.VERMILLION if s else style.GREY for s in sinks]
        strip.bar(norms["token"], norms["value"], width=0.8, color=colours)
        strip.set_xlim(ax.get_xlim())
        strip.set_xlabel("token")
        if i == 0:
            ax.set_ylabel("query")
            strip.set_ylabel(r"$\Vert\mathbf{v}\Vert_1$")
    bar = left.colorbar(image, ax=list(parts[0]), aspect=14, pad=0.01)
    bar.outline.set_visible(False)
    bar.set_label("attention")
    _draw_points(right, data, len(shown))
    return fig


def _draw_points(fig: Any, data: pd.DataFrame, place: int) -> None:
    """A point per head, mean over prompts."""
    heads = _heads(data)
    layers = sorted(heads["layer"].unique())
    ax = fig.subplots()
    points = ax.scatter(heads["share"], heads["ratio"], c=heads["layer"], s=11, linewidths=0.3, edgecolors="black")
    ax.axhline(1, color=style.GREY, lw=0.6, ls="--")
    ax.axvline(SINK, color=style.GREY, lw=0.6, ls=":")
    ax.set_xscale("log")
    ax.set_xlim(right=1.3)
    ax.set_yscale("log", base=2)
    ax.yaxis.set_major_formatter(lambda y, _: f"{y:.3g}")
    ax.set_title(f"({chr(97 + place)}) most attended tokens", loc="left")
    ax.set_xlabel("share of the head's attention")
    ax.set_ylabel(r"$\Vert\mathbf{v}\Vert_1$ / median")
    bar = fig.colorbar(points, ax=ax, aspect=20, pad=0.02, ticks=[layers[i] for i in style.integer_ticks(layers, 6)[0]])
    bar.outline.set_visible(False)
    bar.set_label("layer")


def _heads(data: pd.DataFrame) -> pd.DataFrame:
    """Per layer and head: mean share and (geometric) mean ratio over prompts, and how often that token is the first."""
    rows = data[data["quantity"].isin(("share", "ratio"))]
    wide = rows.pivot(index=["prompt", "layer", "head", "token"], columns="quantity", values="value").reset_index()
    wide = wide.assign(first=wide["token"] == 0, ratio=np.log(wide["ratio"].clip(lower=1e-9)))
    mean = wide.groupby(["layer", "head"])[["share", "ratio", "first"]].mean().reset_index()
    return mean.assign(ratio=np.exp(mean["ratio"]))


def say_norms(data: pd.DataFrame) -> str:
    """How many heads have a sink, and how small its value is."""
    heads = _heads(data)
    sinks = heads[heads["share"] >= SINK]
    text = f"{len(sinks)} of {len(heads)} heads pay {percent(SINK)} or more of all attention to one token"
    if len(sinks):
        small = int((sinks["ratio"] < 0.5).sum())
        text += (
            f"; its value's norm is {sinks['ratio'].median():.2f} times the median of its head (median over these "
            f"heads, {sinks['ratio'].min():.2f} to {sinks['ratio'].max():.2f}), below half of it in {small}; it is "
            f"the first token in {percent(sinks['first'].mean())} of cases"
        )
    others = heads[heads["share"] < SINK]
    if len(others):
        text += f". In the other heads the most attended token's is {others['ratio'].median():.2f} times the median"
    norms = data[data["quantity"] == "norm"].groupby(["layer", "head"])["value"]
    spread = [f"{s / m:.2f}" for s, m in zip(norms.std(ddof=0), norms.mean(), strict=True)]
    return text + f". Norms of the heads drawn vary by {', '.join(spread)} of their mean (standard deviation)."


COLUMNS = ("quantity", "source", "prompt", "layer", "head", "query", "token", "text", "value")
FIGURES = (
    Figure(
        id="vatp/fig1",
        title="attention against the norms of values: sinks",
        shows=f"Attention (logarithmic) among the first {SHOWN} tokens of the first prompt and, below, the l1 norms of "
        f"their values, red where a token receives {percent(SINK)} or more of it. Heads: of the first, the middle and "
        "the last layer that which attends one token most (layers=, heads=). Right: each head's most attended token, "
        "mean over prompts: its share of all attention and its norm over the median of the head.",
        claim="Norms vary widely over tokens in all heads; in most heads from layer 3 on the sinks, with massive "
        "attention, have norms close to 0; some heads of the last layer have a token with little attention and a large "
        "norm.",
        unsaid="The paper does not say which heads and text it draws; the panel on the right is ours, to count heads.",
        columns=COLUMNS,
        compute=value_norms,
        draw=draw_norms,
        finding=say_norms,
        knobs={"layers": None, "heads": None, "tokens": None},
    ),
)
