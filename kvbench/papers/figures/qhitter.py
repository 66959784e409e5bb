"""Q-Hitter's figures 2 and 3: attention shift under quantisation, and quantisation error against attention.

Zhang et al., MLSys 2024. Keys and values are quantised per token and head with an integer zero point (cache.packed).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pandas as pd
import torch
from matplotlib.figure import Figure as Canvas
from torch import Tensor

from kvbench.cache.observation import Needs, Observation
from kvbench.cache.packed import quantise_zero_point
from kvbench.methods.base import Role, Stage
from kvbench.methods.chain import Chain
from kvbench.methods.statistics import top_indices
from kvbench.papers.figures.figure import Figure, percent
from kvbench.papers.figures.reading import OnLayer, Prompt, Reading
from kvbench.tables import style

CRITICAL = 0.2  # of the tokens: those with the most accumulated attention
OUTLIER = 5.0  # times the mean accumulated attention, which is 1: ultra-crucial tokens
WIDTHS = (8, 4, 3, 2)
KINDS = {"own": "keys of this layer", "all": "whole cache"}
DEPTHS = (0.0, 0.5, -1.0)
ROWS = {"k_error": "keys", "v_error": "values"}


@dataclass(frozen=True, kw_only=True)
class Coarse(Stage):
    """Not a method: the prompt's attention reads keys and values of ``bits`` bits, and errors reach later layers."""

    id: ClassVar[str] = "coarse"
    role: ClassVar[Role] = "quantise"
    bits: int

    @property
    def prefill_key(self) -> str:
        return f"coarse bits={self.bits}"

    def read(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(quantise_zero_point(x, self.bits).dequantise(x.dtype) for x in (k, v))  # type: ignore[return-value]


def overlap(exact: Tensor, shifted: Tensor) -> Tensor:
    """|S_o & S_q| / |S_o| of the critical sets of scores [H, n] -> [H]; ties with the lower token."""
    size = max(1, int(CRITICAL * exact.shape[1]))
    chosen = torch.zeros_like(exact, dtype=torch.bool).scatter_(1, top_indices(exact, size), True)
    return chosen.gather(1, top_indices(shifted, size)).float().mean(dim=1)


def shifts(reading: Reading) -> pd.DataFrame:
    """Mean overlap of critical sets over prompts: per kind, bits, layer and query head.

    ``own``: this layer's keys alone are quantised. ``all``: all keys and values that the prompt's attention reads are.
    """
    widths = reading.knobs.get("bits") or WIDTHS
    found: list[dict[str, Any]] = []
    for prompt in reading.prompts:
        ids = reading.ids(prompt, round(1 / CRITICAL), f"{percent(CRITICAL)} of its tokens are to be at least one")
        found += _shifts_of(reading, ids, widths)
        reading.tick()
    means = pd.DataFrame(found).groupby(["kind", "bits", "layer", "head"], sort=False)["overlap"].mean()
    return means.reset_index()


def _shifts_of(reading: Reading, ids: Tensor, widths: Sequence[int]) -> list[dict[str, Any]]:
    """The overlaps of one prompt: one pass with the exact cache, and one for every width."""
    found: list[dict[str, Any]] = []
    exact: dict[int, Tensor] = {}

    def add(kind: str, bits: int, layer: int, scores: Tensor | None) -> None:
        assert scores is not None
        for h, value in enumerate(overlap(exact[layer], scores).tolist()):
            found.append({"kind": kind, "bits": bits, "layer": layer, "head": h, "overlap": value})

    def plain(obs: Observation, k: Tensor, v: Tensor) -> None:
        assert obs.colsums is not None
        exact[obs.layer] = obs.colsums
        for bits in widths:
            add("own", bits, obs.layer, obs.colsums_q[bits])

    def coarse(bits: int) -> OnLayer:
        return lambda obs, k, v: add("all", bits, obs.layer, obs.colsums)

    reading.read(ids, Needs(colsums=True, colsums_bits=frozenset(widths)), plain)
    for bits in widths:
        reading.read(ids, Needs(colsums=True), coarse(bits), Chain((Coarse(bits=bits),)))
    return found


def draw_shifts(data: pd.DataFrame) -> Canvas:
    """A row per kind, a column per width; layers to the right, heads downwards; the darker, the larger the shift."""
    widths = sorted(data["bits"].unique(), reverse=True)
    kinds = [k for k in KINDS if (data["kind"] == k).any()]
    heads, layers = sorted(data["head"].unique()), sorted(data["layer"].unique())
    fig = style.canvas(style.PAGE, 0.5 + 1.35 * len(kinds))
    parts = fig.subplots(len(kinds), len(widths), squeeze=False, sharex=True, sharey=True)
    image: Any = None
    for i, kind in enumerate(kinds):
        for j, bits in enumerate(widths):
            ax = parts[i][j]
            rows = data[(data["kind"] == kind) & (data["bits"] == bits)]
            table = rows.pivot(index="head", columns="layer", values="overlap")
            image = style.heat(ax, table, heads, layers, vmin=0, vmax=1)
            ax.set_title(f"({chr(97 + i * len(widths) + j)}) {bits} bits, {KINDS[kind]}", loc="left", fontsize=6.5)
            ax.tick_params(labelbottom=i == len(kinds) - 1, labelleft=j == 0)
            if i == len(kinds) - 1:
                ax.set_xlabel("layer")
        parts[i][0].set_ylabel("head")
    bar = fig.colorbar(image, ax=parts, aspect=24, pad=0.01)
    bar.outline.set_visible(False)
    bar.set_label(r"overlap $|S_o \cap S_q|\,/\,|S_o|$")
    return fig


def say_shifts(data: pd.DataFrame) -> str:
    """Overlaps by width, and of shallow against deep layers."""
    parts = []
    third = max(1, data["layer"].nunique() // 3)
    order = sorted(data["layer"].unique())
    for kind in (k for k in KINDS if (data["kind"] == k).any()):
        rows = data[data["kind"] == kind]
        by_bits = []
        for bits in sorted(rows["bits"].unique(), reverse=True):
            part = rows[rows["bits"] == bits]
            low = (part["overlap"] < 0.5).mean()
            shallow = part[part["layer"].isin(order[:third])]["overlap"].mean()
            deep = part[part["layer"].isin(order[-third:])]["overlap"].mean()
            by_bits.append(
                f"{bits} bits {percent(part['overlap'].mean())} (first third of layers {percent(shallow)}, last "
                f"{percent(deep)}; {percent(low)} of heads below 50 %)"
            )
        parts.append(f"{KINDS[kind]} quantised: " + ", ".join(by_bits))
    text = "; ".join(parts)
    return (
        f"Mean overlap of the critical {percent(CRITICAL)} with that of the exact cache, {text}. Chance is "
        f"{percent(CRITICAL)}."
    )


def errors(reading: Reading) -> pd.DataFrame:
    """Accumulated attention and quantisation error of every token: per prompt and layer.

    Attention is the mean over query heads of what the token receives from all queries; errors are ||x - Quant(x)||_2
    over all kv heads of the token's key and of its value.
    """
    bits = (reading.knobs.get("bits") or (4,))[0]
    layers = reading.layers(DEPTHS)
    found: list[pd.DataFrame] = []
    for number, prompt in enumerate(reading.prompts):
        ids = reading.ids(prompt)

        def on_layer(obs: Observation, k: Tensor, v: Tensor, prompt: Prompt = prompt, number: int = number) -> None:
            if obs.layer not in layers:
                return
            assert obs.colsums is not None
            values = {
                "attention": obs.colsums.mean(dim=0),
                **{name: token_error(x, bits) for name, x in (("k_error", k), ("v_error", v))},
            }
            at = {"source": prompt.source, "prompt": number, "bits": bits, "layer": obs.layer, "token": range(obs.n)}
            found.append(pd.DataFrame({**at, **{name: t.cpu().numpy() for name, t in values.items()}}))

        reading.read(ids, Needs(colsums=True), on_layer)
        reading.tick()
    return pd.concat(found, ignore_index=True)


def token_error(x: Tensor, bits: int) -> Tensor:
    """||x - Quant(x)||_2 [n] of x [H, n, D], over the heads and channels of a token."""
    lost = x.float() - quantise_zero_point(x, bits).dequantise(torch.float32)
    return lost.square().sum(dim=(0, 2)).sqrt()


def _marked(data: pd.DataFrame, error: str) -> pd.DataFrame:
    """The data with ``outlier`` tokens, and ``both``: in the top 20 % of a prompt's layer by attention and by error."""
    groups = data.groupby(["prompt", "layer"])
    most = [groups[c].rank(ascending=False, method="first") for c in ("attention", error)]
    size = (CRITICAL * groups["token"].transform("size")).astype(int).clip(lower=1)
    return data.assign(outlier=data["attention"] > OUTLIER, both=(most[0] <= size) & (most[1] <= size))


def draw_errors(data: pd.DataFrame) -> Canvas:
    """A column per layer, keys above and values below; a point per token."""
    layers = sorted(data["layer"].unique())
    fig = style.canvas(style.PAGE, 3.2)
    parts = fig.subplots(2, len(layers), squeeze=False, sharex=True)
    for i, (error, name) in enumerate(ROWS.items()):
        marked = _marked(data, error)
        groups = (
            (marked[~marked["outlier"] & ~marked["both"]], style.GREY, ".", 7, "other tokens"),
            (marked[marked["both"] & ~marked["outlier"]], style.VERMILLION, "^", 8, "top 20 % by attention and error"),
            (marked[marked["outlier"]], style.ORANGE, "o", 16, f"attention above {OUTLIER:g} times the mean"),
        )
        for j, layer in enumerate(layers):
            ax = parts[i][j]
            for rows, colour, marker, size, label in groups:
                here = rows[rows["layer"] == layer]
                edge = {"edgecolors": "black", "linewidths": 0.4} if marker == "o" else {"linewidths": 0}
                look = {"c": colour, "marker": marker, "s": size, **edge}
                ax.scatter(here["attention"], here[error], label=label, rasterized=marker != "o", **look)
            ax.set_xscale("log")
            ax.set_ylim(bottom=0)
            ax.set_title(f"({chr(97 + i * len(layers) + j)}) {name}, layer {layer}", loc="left")
            if i == 1:
                ax.set_xlabel("accumulated attention")
        parts[i][0].set_ylabel(f"error at {data['bits'].iloc[0]} bits")
    handles, labels = parts[0][0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=3)
    return fig


def say_errors(data: pd.DataFrame) -> str:
    """Where ultra-crucial tokens stand by error, and how many tokens are crucial and hard to quantise."""
    parts = []
    for error, name in ROWS.items():
        marked = _marked(data, error)
        place = marked.groupby(["prompt", "layer"])[error].rank(pct=True)
        outliers = marked["outlier"]
        both = marked.groupby("layer")["both"].mean()
        where = (
            f"tokens with more than {OUTLIER:g} times the mean attention ({percent(outliers.mean(), 1)} of all) lie "
            f"at the {percent(place[outliers].median())} quantile by error (median)"
            if outliers.any()
            else f"no token receives more than {OUTLIER:g} times the mean attention"
        )
        shares = ", ".join(f"{percent(share, 1)} in layer {layer}" for layer, share in both.items())
        parts.append(f"{name}: {where}; in the top {percent(CRITICAL)} by both are {shares}")
    text = ". ".join(p[0].upper() + p[1:] for p in parts)
    return f"{text} (chance: {percent(CRITICAL**2)})."


FIGURES = (
    Figure(
        id="qhitter/fig2",
        title="attention shift caused by quantising the cache",
        shows=f"Overlap of each head's critical set (the {percent(CRITICAL)} of tokens with the most accumulated "
        "attention) with and without a quantised cache, by layer, head and bits, mean over prompts; darker is a "
        "larger shift. Above, the keys of that layer alone are quantised; below, everything that the prompt's "
        "attention reads, so that errors add up over layers.",
        claim="Shallow layers hardly shift, deeper ones fall below 50 % of overlap; at 2 bits nearly all heads lie "
        "below 30 %.",
        unsaid="The paper does not say whether errors add up over layers (both are shown), nor which widths its blocks "
        "show (bits=8,4,3,2 here) and how long its texts are.",
        columns=("kind", "bits", "layer", "head", "overlap"),
        compute=shifts,
        draw=draw_shifts,
        finding=say_shifts,
        knobs={"bits": WIDTHS, "tokens": None},
    ),
    Figure(
        id="qhitter/fig3",
        title="quantisation error against attention, by token",
        shows="Accumulated attention of each token (mean over query heads) and the error of quantising its key or "
        "value, ||x - Quant(x)||_2 over all heads. First, middle and last layer unless layers= says otherwise. Orange: "
        f"more than {OUTLIER:g} times the mean attention. Red: the top {percent(CRITICAL)} by both.",
        claim="The few ultra-crucial tokens are easy to quantise; among the top 20 % by attention are tokens that are "
        "hard to quantise.",
        unsaid="The paper does not say which layer, heads and bits it shows (bits=4 here), whether the error is that "
        f"of keys or values, nor from where on a token is ultra-crucial ({OUTLIER:g} times the mean here).",
        columns=("source", "prompt", "bits", "layer", "token", "attention", "k_error", "v_error"),
        compute=errors,
        draw=draw_errors,
        finding=say_errors,
        knobs={"bits": (4,), "layers": None, "tokens": None},
        most=1,
    ),
)
