"""ThinK's figures 4 and 5: channel magnitudes of the cache, and singular values of attention (arXiv 2407.21018)."""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure as Canvas
from torch import Tensor

from kvbench.cache.exact_attention import causal_softmax
from kvbench.cache.observation import Needs, Observation
from kvbench.papers.figures.figure import Figure, percent
from kvbench.papers.figures.reading import Reading
from kvbench.tables import style

DEPTHS = (14 / 32, 20 / 32)  # layers 14 and 20 of LLaMA-2-7B's 32
NAMES = {"k": "keys", "v": "values"}
BINS = 48  # rows of a map: consecutive tokens, whose magnitudes are averaged
SHOWN = 128  # largest singular values that are kept
HIGH, ENOUGH, FIRST = 0.01, 0.9, 50


def magnitudes(reading: Reading) -> pd.DataFrame:
    """Mean |K| and |V| per channel over runs of tokens: per layer, kv head, channel and first token of the run."""
    layers = reading.layers(DEPTHS)
    heads = reading.chosen_heads([0], reading.heads[0])
    found: list[dict[str, Any]] = []
    ids = reading.ids(reading.prompts[0])

    def on_layer(obs: Observation, k: Tensor, v: Tensor) -> None:
        if obs.layer not in layers:
            return
        step = -(-obs.n // BINS)
        for what, rows in (("k", k), ("v", v)):
            for h in heads:
                for start in range(0, obs.n, step):
                    means = rows[h, start : start + step].float().abs().mean(dim=0).tolist()
                    at = {"layer": obs.layer, "head": h, "what": what, "token": start}
                    found.extend({**at, "channel": c, "magnitude": m} for c, m in enumerate(means))

    reading.read(ids, Needs(), on_layer)
    reading.tick()
    return pd.DataFrame(found)


def draw_magnitudes(data: pd.DataFrame) -> Canvas:
    """A row per layer and head, keys at the left, values at the right: the map, and the mean over tokens above it."""
    heads = list(data.groupby(["layer", "head"]))
    fig = style.canvas(style.PAGE, 1.75 * len(heads))
    style.tighten(fig)
    parts = fig.subplots(2 * len(heads), 2, height_ratios=[1, 3] * len(heads), squeeze=False, sharex="col")
    for i, ((layer, head), rows) in enumerate(heads):
        most = 1.08 * max(_relative(part).max() for _, part in rows.groupby("what"))
        for j, what in enumerate(NAMES):
            part = rows[rows["what"] == what]
            table = part.pivot(index="token", columns="channel", values="magnitude")
            top, ax = parts[2 * i][j], parts[2 * i + 1][j]
            image = style.heat(ax, table, list(table.index), list(table.columns))
            style.token_ticks(ax, list(table.index))
            mean = _relative(part)
            top.bar(mean.index, mean, width=0.8, color=style.GREY)
            top.axhline(1, color=style.BLACK, lw=0.5)
            top.set_ylim(0, most)
            top.tick_params(labelbottom=False, bottom=False)
            apart = "\n" if i else ""
            top.set_title(f"{apart}({chr(97 + 2 * i + j)}) {NAMES[what]}, layer {layer}, head {head}", loc="left")
            if j == 0:
                top.set_ylabel("times\nthe mean")
                ax.set_ylabel("token")
            if i == len(heads) - 1:
                ax.set_xlabel("channel")
            else:
                ax.tick_params(labelbottom=False)
            bar = fig.colorbar(image, ax=[top, ax], aspect=22, pad=0.01)
            bar.outline.set_visible(False)
            bar.set_label(f"|{what.upper()}|")
    return fig


def _relative(part: pd.DataFrame) -> pd.Series[float]:
    """The mean magnitude of each channel over that of all channels."""
    mean = part.groupby("channel")["magnitude"].mean()
    return mean / mean.mean()


def say_magnitudes(data: pd.DataFrame) -> str:
    """How unequal channels are, of keys and of values."""
    parts = []
    for (layer, head), rows in data.groupby(["layer", "head"]):
        found = {w: _relative(rows[rows["what"] == w]) for w in NAMES}
        parts.append(
            f"layer {layer}, head {head}: "
            + "; ".join(
                f"{NAMES[w]}: largest channel {r.max():.1f} times the mean, variation {r.std(ddof=0):.2f}"
                for w, r in found.items()
            )
        )
    return "Mean magnitudes of channels (variation: standard deviation over mean). " + ". ".join(parts) + "."


def energies(reading: Reading) -> pd.DataFrame:
    """Energies of singular values, largest first, of each head's attention and keys, mean over prompts.

    Energy i is s_i^2 over the sum of all squares. One head's attention [n, n] is held at a time.
    """
    layers = reading.layers(DEPTHS)
    sums: dict[tuple[int, str, int], Tensor] = {}
    heads = reading.chosen_heads(range(reading.heads[1]), reading.heads[1])

    def add(at: tuple[int, str, int], matrix: Tensor) -> None:
        found = energy(matrix)[:SHOWN].cpu()
        held = sums.get(at)
        size = len(found) if held is None else min(len(found), len(held))
        sums[at] = found if held is None else held[:size] + found[:size]

    for prompt in reading.prompts:
        ids = reading.ids(prompt)

        def on_layer(obs: Observation, k: Tensor, v: Tensor) -> None:
            if obs.layer not in layers:
                return
            queries = obs.queries(obs.n)
            group = len(queries) // len(k)
            for h in heads:
                own = k[h // group : h // group + 1]
                add((obs.layer, "attention", h), causal_softmax(queries[h : h + 1], own, obs.scale)[0])
            for h in sorted({h // group for h in heads}):
                add((obs.layer, "keys", h), k[h])

        reading.read(ids, Needs(last_q=len(ids)), on_layer)
        reading.tick()

    count = len(reading.prompts)
    return pd.DataFrame(
        {"layer": layer, "what": what, "head": h, "index": i + 1, "energy": e, "cumulative": c}
        for (layer, what, h), total in sums.items()
        for i, (e, c) in enumerate(zip((total / count).tolist(), (total / count).cumsum(0).tolist(), strict=True))
    )


def energy(matrix: Tensor) -> Tensor:
    """s_i^2 / sum of s^2 of the singular values of a matrix [n, m], largest first."""
    squares = torch.linalg.svdvals(matrix.float()).double().square()
    return squares / squares.sum()


def draw_energies(data: pd.DataFrame) -> Canvas:
    """Energies, and cumulative ones, of attention (above) and of keys (below); a line per head, its shade the layer."""
    fig = style.canvas(style.PAGE, 3.6)
    parts = fig.subplots(2, 2, squeeze=False)
    layers = sorted(data["layer"].unique())
    shade = dict(zip(layers, style.shades(len(layers)), strict=True))
    dash = {n: style.LINES[i % 4] for i, n in enumerate(layers)}
    for i, what in enumerate(("attention", "keys")):
        part = data[data["what"] == what]
        for (layer, head), rows in part.groupby(["layer", "head"]):
            label = f"layer {layer}" if i == 0 and head == part["head"].min() else None
            look = {"color": shade[layer], "ls": dash[layer], "lw": 0.8}
            parts[i][0].plot(rows["index"], rows["energy"].clip(lower=1e-12), label=label, **look)
            parts[i][1].plot(rows["index"], rows["cumulative"], **look)
        parts[i][0].set_yscale("log")
        parts[i][0].set_ylim(max(1e-8, 0.5 * part["energy"].min()), 1.3)
        parts[i][0].axhline(HIGH, color=style.GREY, lw=0.6, ls=":")
        parts[i][1].axhline(ENOUGH, color=style.GREY, lw=0.6, ls=":")
        parts[i][1].set_ylim(0, 1.02)
        for j, kind in enumerate(("energy", "cumulative energy")):
            parts[i][j].set_ylabel(kind)
            parts[i][j].set_xlabel("singular value")
            parts[i][j].set_title(f"({chr(97 + 2 * i + j)}) {what}", loc="left")
    parts[0][1].axvline(FIRST, color=style.GREY, lw=0.6, ls=":")
    fig.legend(loc="outside lower center", ncols=min(6, len(layers)))
    return fig


def say_energies(data: pd.DataFrame) -> str:
    """How many singular values matter, of attention and of keys."""
    parts = []
    for what, rows in data.groupby("what", sort=True):
        heads = rows.groupby(["layer", "head"])
        high = heads["energy"].agg(lambda e: int((e > HIGH).sum()))
        size = int(rows["index"].max())
        needed = heads["cumulative"].agg(lambda c: int((c < ENOUGH).sum()) + 1)
        most = f"more than {size}" if needed.max() > size else str(needed.max())
        text = (
            f"{what}: {high.min()} to {high.max()} singular values a head (median {high.median():.0f}) have an energy "
            f"above {HIGH}; {percent(ENOUGH)} of it takes {needed.min()} to {most}"
            + (f" of {size}" if size < SHOWN else "")
        )
        at = rows[rows["index"] == FIRST]["cumulative"]
        if len(at):
            text += (
                f"; the first {FIRST} hold {percent(at.min())} to {percent(at.max())}, more than {percent(ENOUGH)} in "
                f"{int((at > ENOUGH).sum())} of {len(at)} heads"
            )
        parts.append(_sentence(text))
    return " ".join(parts)


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


FIGURES = (
    Figure(
        id="think/fig4",
        title="magnitudes of key and value channels",
        shows=f"Mean |K| and |V| of one kv head by channel and token (runs of tokens make {BINS} rows at most), keys "
        "after RoPE as they are cached; above, each channel's mean over that of all. Head 0 of the layers at the depth "
        "of 14 and 20 of 32 (layers=, heads=), on the first prompt.",
        claim="A few key channels have significant magnitudes over all tokens; value channels show no pattern.",
        unsaid="The paper does not say which text it reads, nor whether keys are shown before or after RoPE; it speaks "
        "of the 150th channel of a head, and LLaMA-2-7B's heads have 128.",
        columns=("layer", "head", "what", "token", "channel", "magnitude"),
        compute=magnitudes,
        draw=draw_magnitudes,
        finding=say_magnitudes,
        knobs={"layers": None, "heads": None, "tokens": None},
        most=1,
    ),
    Figure(
        id="think/fig5",
        title="energies of singular values of attention and of keys",
        shows="Energy s_i^2 / sum s^2 of the singular values of each head's causal attention matrix softmax(Q K^T / "
        f"sqrt(D)), up to the {SHOWN}th, mean over prompts, and its cumulative sum; the same of the keys. Layers as in "
        "figure 4 (layers=), prompts cut to tokens= (1024).",
        claim=f"Few singular values have an energy above {HIGH} in any head; the first {FIRST} hold over "
        f"{percent(ENOUGH)}.",
        unsaid="The paper names no text, length or layers, and its formula no causal mask; the keys' own spectrum, on "
        "which its conclusion rests, is not shown there.",
        columns=("layer", "what", "head", "index", "energy", "cumulative"),
        compute=energies,
        draw=draw_energies,
        finding=say_energies,
        knobs={"layers": None, "heads": None, "tokens": 1024},
    ),
)
