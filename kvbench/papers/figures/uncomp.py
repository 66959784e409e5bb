"""UNComp's figures 1, 2 and 4: effective rank of queries, keys and values (arXiv 2410.03090).

Sigma, H and erank are those of ``calibration.entropy``; queries and keys are taken after RoPE.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from kvbench.cache.observation import Needs, Observation
from kvbench.methods.entropy import entropy, layer_groups, spectrum
from kvbench.papers.figures.figure import Figure, percent
from kvbench.papers.figures.reading import Prompt, Reading
from kvbench.tables import style

TOP = 32
NAMES = {"q": "queries", "k": "keys", "v": "values"}


def _ids(reading: Reading, prompt: Prompt) -> Tensor:
    """Ids of a prompt of at least as many tokens as a head has channels: fewer bound the rank by themselves."""
    least = reading.head_dim
    return reading.ids(prompt, least, f"an effective rank of {least} channels needs as many tokens")


def _each_spectrum(
    reading: Reading, see: Callable[[Prompt, Observation, str, Tensor], None], names: str, layers: set[int]
) -> None:
    """Call ``see(prompt, observation, name, eigenvalues [H, D])`` for the ``names`` of q, k and v of these layers."""
    for prompt in reading.prompts:
        ids = _ids(reading, prompt)

        def on_layer(obs: Observation, k: Tensor, v: Tensor, prompt: Prompt = prompt) -> None:
            if obs.layer in layers:
                rows = {"q": obs.queries(obs.n), "k": k, "v": v}
                for name in names:
                    see(prompt, obs, name, spectrum(rows[name]).cpu())

        reading.read(ids, Needs(last_q=len(ids)), on_layer)
        reading.tick()


def rank_by_layer(reading: Reading) -> pd.DataFrame:
    """Per text, q, k or v, and layer: means of erank and erank_k over heads and prompts, and erank's deviation."""
    top = reading.knobs.get("top", TOP)
    found: list[dict[str, Any]] = []

    def see(prompt: Prompt, obs: Observation, name: str, eigenvalues: Tensor) -> None:
        found.append(
            {
                "source": prompt.source,
                "what": name,
                "layer": obs.layer,
                "erank": float(entropy(eigenvalues).exp().mean()),
                "erank_k": float(entropy(eigenvalues, top).exp().mean()),
            }
        )

    _each_spectrum(reading, see, "qkv", set(reading.layers([i / reading.n_layers for i in range(reading.n_layers)])))
    groups = pd.DataFrame(found).groupby(["source", "what", "layer"], sort=False)
    means = groups[["erank", "erank_k"]].mean()
    return means.assign(sd=groups["erank"].std(ddof=0), prompts=groups.size()).reset_index()


def draw_ranks(data: pd.DataFrame) -> Canvas:
    """A panel each for queries, keys and values, a line per text."""
    fig, axes, _ = style.grid(3, 3, style.PAGE, 2.0, sharey=True)
    style.mark_panels(axes, [f"{NAMES[w]} $\\mathbf{{{w.upper()}}}_m$" for w in NAMES])
    for ax, what in zip(axes, NAMES, strict=True):
        for i, (source, rows) in enumerate(data[data["what"] == what].groupby("source", sort=False)):
            ax.plot(rows["layer"], rows["erank"], label=source, **style.series(i, len(rows)))
        style.layer_axis(ax, sorted(data["layer"].unique()))
    axes[0].set_ylabel("effective rank")
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6))
    return fig


def say_ranks(data: pd.DataFrame) -> str:
    """The paper's three readings of its figure 1, in numbers."""
    curves = data.groupby(["what", "layer"])["erank"].mean().unstack("what")
    spans = {w: curves[w].max() - curves[w].min() for w in NAMES}
    layers = [int(i) for i in curves.index]
    ends = [(layers[g[0]], layers[g[-1]]) for g in layer_groups(curves["q"].tolist())]
    groups = [str(a) if a == b else f"{a} to {b}" for a, b in ends]
    rises = int((np.diff(curves["q"]) > 0).sum())
    above = int((curves["q"] > curves["k"]).sum())
    return (
        "Over layers the effective rank spans "
        + ", ".join(f"{spans[w]:.1f} for {NAMES[w]}" for w in NAMES)
        + f"; queries and keys correlate at {_pearson(curves['q'], curves['k']):.2f} (queries and values at "
        f"{_pearson(curves['q'], curves['v']):.2f}); queries lie above keys in {above} of {len(layers)} layers. "
        f"From the first to the last layer that of queries goes from {curves['q'].iloc[0]:.1f} to "
        f"{curves['q'].iloc[-1]:.1f}, rising in {rises} of {len(layers) - 1} steps; drops of more than 1 part the "
        f"layers into {', '.join(groups)}."
    )


def spectra(reading: Reading) -> pd.DataFrame:
    """Mean eigenvalues over prompts of Sigma of the queries of the chosen layers: per text, layer, head and index."""
    layers = reading.layers([-1])
    sums: dict[tuple[str, int], Tensor] = {}
    counts: dict[str, int] = {}

    def see(prompt: Prompt, obs: Observation, name: str, eigenvalues: Tensor) -> None:
        at = (prompt.source, obs.layer)
        sums[at] = sums.get(at, torch.zeros_like(eigenvalues)) + eigenvalues
        counts[prompt.source] = counts.get(prompt.source, 0) + (obs.layer == layers[0])

    _each_spectrum(reading, see, "q", set(layers))
    return pd.DataFrame(
        {"source": source, "layer": layer, "head": h, "index": i + 1, "eigenvalue": value}
        for (source, layer), total in sums.items()
        for h, row in enumerate((total / counts[source]).tolist())
        for i, value in enumerate(row)
    )


def draw_spectra(data: pd.DataFrame) -> Canvas:
    """A panel per text and layer; a line per head, those with the highest and lowest effective rank in colour."""
    panels = list(data.groupby(["source", "layer"], sort=False))
    ranks = _head_ranks(data)
    extreme = {ranks.idxmin(): (style.VERMILLION, "--"), ranks.idxmax(): (style.BLUE, "-")}
    fig, axes, bottom = style.grid(len(panels), 3, style.PAGE, 1.75, sharey=True, sharex=True)
    several = data["layer"].nunique() > 1
    style.mark_panels(axes, [f"{s}, layer {n}" if several else str(s) for (s, n), _ in panels])
    for ax, ((_, layer), rows) in zip(axes, panels, strict=True):
        for head, line in rows.groupby("head"):
            look = extreme.get((layer, head))
            colour, dash = look or (style.GREY, "-")
            label = f"layer {layer}, head {head}: erank {ranks[layer, head]:.1f}" if look else "other heads"
            width = 1.4 if look else 0.6
            y = line["eigenvalue"].clip(lower=1e-9)
            ax.plot(line["index"], y, color=colour, ls=dash, lw=width, zorder=3 if look else 2, label=label)
        ax.set_yscale("log")
    top, low = data["eigenvalue"].max(), data["eigenvalue"].clip(lower=1e-9).min()
    axes[0].set_ylim(0.8 * max(1e-5 * top, low), 1.6 * top)
    for ax in bottom:
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_xlabel("eigenvalue's rank")
    for ax in axes[::3]:
        ax.set_ylabel(r"eigenvalue of $\Sigma_{\mathbf{Q}_m}$")
    found = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    order = sorted(found, key=lambda label: label == "other heads")
    fig.legend([found[label] for label in order], order, loc="outside lower center", ncols=3)
    return fig


def say_spectra(data: pd.DataFrame) -> str:
    """How heads differ in the leading part of their spectra and in the tail, and how alike texts are."""
    mean = data.groupby(["layer", "head", "index"])["eigenvalue"].mean()
    first = mean.xs(1, level="index")
    spread = mean.groupby("index").std(ddof=0) / mean.groupby("index").mean()
    heads = mean.unstack("index")
    needed = (heads.cumsum(axis=1).div(heads.sum(axis=1), axis=0) < 0.9).sum(axis=1) + 1
    dims = heads.shape[1]
    lead, tail = spread.iloc[: max(1, dims // 8)].mean(), spread.iloc[dims // 2 :].mean()
    text = (
        f"The largest eigenvalue lies between {first.min():.2f} and {first.max():.2f} by head; 90 % of the trace takes "
        f"{needed.min()} to {needed.max()} of {dims} eigenvalues. Between heads eigenvalues differ by {percent(lead)} "
        f"of their mean (standard deviation) in the leading eighth and by {percent(tail)} in the trailing half."
    )
    logs = data.assign(log=np.log(data["eigenvalue"].clip(lower=1e-9))).pivot_table(
        index=["layer", "head", "index"], columns="source", values="log"
    )
    pairs = [_pearson(logs[a], logs[b]) for a, b in itertools.combinations(logs.columns, 2)]
    alike = f" Log spectra of two texts correlate at {min(pairs):.3f} or more." if pairs else ""
    return text + alike


def head_map(reading: Reading) -> pd.DataFrame:
    """Mean erank_k over prompts of the queries: per text, layer and head."""
    top = reading.knobs.get("top", TOP)
    found: list[dict[str, Any]] = []

    def see(prompt: Prompt, obs: Observation, name: str, eigenvalues: Tensor) -> None:
        for h, value in enumerate(entropy(eigenvalues, top).exp().tolist()):
            found.append({"source": prompt.source, "layer": obs.layer, "head": h, "erank_k": value})

    _each_spectrum(reading, see, "q", set(range(reading.n_layers)))
    return pd.DataFrame(found).groupby(["source", "layer", "head"], sort=False)["erank_k"].mean().reset_index()


def draw_head_map(data: pd.DataFrame) -> Canvas:
    """Layers to the right, heads downwards, mean over texts."""
    table = data.pivot_table(index="head", columns="layer", values="erank_k", aggfunc="mean")
    fig = style.canvas(style.COLUMN, 0.9 + min(2.6, max(1.2, 0.13 * len(table))))
    ax = fig.subplots()
    few = table.size <= 100
    image = style.heat(ax, table, list(table.index), list(table.columns), numbers="%.1f" if few else "")
    ax.set_xlabel("layer")
    ax.set_ylabel("head")
    bar = fig.colorbar(image, ax=ax, aspect=18, pad=0.02)
    bar.outline.set_visible(False)
    bar.set_label(r"$\mathrm{erank}_k(\Sigma_{\mathbf{Q}_m})$")
    return fig


def say_head_map(data: pd.DataFrame) -> str:
    """The range, and whether texts agree on the order of heads within a layer."""
    table = data.pivot_table(index="layer", columns="head", values="erank_k", aggfunc="mean")
    within = (table.max(axis=1) - table.min(axis=1)).mean()
    by_source = data.pivot_table(index=["layer", "head"], columns="source", values="erank_k")
    placed = by_source.groupby("layer").rank()
    alike = [placed.loc[layer].corr().to_numpy() for layer in table.index]
    pairs = np.concatenate([a[np.triu_indices(len(a), 1)] for a in alike])
    pairs = pairs[np.isfinite(pairs)]
    text = (
        f"Truncated effective ranks go from {table.min().min():.1f} to {table.max().max():.1f}; within a layer heads "
        f"differ by {within:.1f} in the mean"
    )
    if not len(pairs):
        return text + ". Whether the order of heads depends on the text takes prompts of two texts or more."
    return text + (
        f". The order of a layer's heads correlates at {np.mean(pairs):.2f} in the mean between two texts (rank "
        f"correlation, lowest {np.min(pairs):.2f})."
    )


def _pearson(a: Any, b: Any) -> float:
    """Correlation of two rows of numbers; not a number where one of them is constant."""
    a, b = np.asarray(a), np.asarray(b)
    return float(np.corrcoef(a, b)[0, 1]) if a.std() > 0 and b.std() > 0 else float("nan")


def _head_ranks(data: pd.DataFrame) -> pd.Series[float]:
    """The untruncated effective rank of each (layer, head) by its mean spectrum."""
    mean = data.groupby(["layer", "head", "index"])["eigenvalue"].mean().unstack("index")
    return np.exp(-(mean * np.log(mean.clip(lower=1e-300))).sum(axis=1))


FIGURES = (
    Figure(
        id="uncomp/fig1",
        title="effective rank of queries, keys and values by layer",
        shows="Effective rank exp(H) of Sigma of queries, keys and values by layer, untruncated, mean over heads and "
        "prompts; a line per text. Queries and keys after RoPE. The data have the truncated rank erank_k, too.",
        claim="Queries and keys vary more over layers than values do, and alike; queries mostly lie above keys; rank "
        "grows with depth, and drops of more than 1 part the layers into groups.",
        unsaid="The paper does not say whether this rank is truncated, whether it is the mean over heads or that of "
        "all heads' channels as one matrix, nor which three datasets it used.",
        columns=("source", "what", "layer", "erank", "erank_k", "sd", "prompts"),
        compute=rank_by_layer,
        draw=draw_ranks,
        finding=say_ranks,
        knobs={"top": TOP, "layers": None, "tokens": None},
        each=8,
    ),
    Figure(
        id="uncomp/fig2",
        title="eigenvalue spectra of queries by head",
        shows="Eigenvalues of Sigma of the queries by head, largest first, mean over prompts; a panel per text. Last "
        "layer unless layers= says otherwise. Coloured: the heads with the largest and the smallest effective rank.",
        claim="Heads differ clearly in the leading part of the spectrum; all texts show a similar long tail.",
        unsaid="The paper does not say which heads and datasets it shows, nor its axis' scale (ours: logarithmic).",
        columns=("source", "layer", "head", "index", "eigenvalue"),
        compute=spectra,
        draw=draw_spectra,
        finding=say_spectra,
        knobs={"layers": None, "tokens": None},
        each=8,
    ),
    Figure(
        id="uncomp/fig4",
        title="truncated effective rank of queries, head by layer",
        shows="erank_k of Sigma of the queries (top= eigenvalues, 32 as in released code) by layer and head, mean over "
        "prompts and texts.",
        claim="Heads of a layer differ, and which ones are high does not depend on the text.",
        unsaid="The paper samples 500 texts and does not say what it searched as the elbow; its code uses 32.",
        columns=("source", "layer", "head", "erank_k"),
        compute=head_map,
        draw=draw_head_map,
        finding=say_head_map,
        knobs={"top": TOP, "tokens": None},
        each=8,
    ),
)
