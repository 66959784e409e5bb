"""UNComp's figures 1, 2 and 4 (effective rank of queries, keys and values) and 6 (entropy of hidden states).

arXiv 2410.03090. Sigma (eq. 1), the entropy H and erank = exp(H) are those of ``methods.core.entropy``. Queries and
keys are taken after RoPE.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from kvbench.kv.observation import Needs, Observation
from kvbench.methods.core.entropy import compute_truncated_entropy, group_layers, measure_spectrum
from kvbench.models.interface import all_layers
from kvbench.papers.figures.figure import Code, Fact
from kvbench.papers.figures.names import name_task
from kvbench.papers.figures.reading import Prompt, Reading

TOP = 32
"""By default, truncated effective ranks are computed from so many of the largest eigenvalues."""
NAMES = {"q": "queries", "k": "keys", "v": "values"}
OTHERS = "other heads"
"""The name of all lines of figure 2 but those of the two extreme heads."""


class HeadSpectra(NamedTuple):
    """The eigenvalues of Sigma of each head of one layer, on one prompt.

    source: the prompt's text or task.
    what: q, k or v, for queries, keys or values.
    eigenvalues: [H, D] for H heads of D channels.
    """

    source: str
    layer: int
    what: str
    eigenvalues: Tensor


def _measure_heads(reading: Reading, wanted: str, layers: Collection[int]) -> list[HeadSpectra]:
    spectra: list[HeadSpectra] = []
    for prompt in reading.prompts:
        spectra += _measure_prompt_heads(reading, prompt, wanted, layers)
        reading.tick()
    return spectra


def _measure_prompt_heads(reading: Reading, prompt: Prompt, wanted: str, layers: Collection[int]) -> list[HeadSpectra]:
    # with fewer tokens than a head has channels, the number of tokens would limit the rank
    least = reading.shape.head_dim
    ids = reading.ids(prompt, least=least, why=f"an effective rank of {least} channels needs as many tokens")
    spectra: list[HeadSpectra] = []

    def on_layer(obs: Observation, k: Tensor, v: Tensor) -> None:
        if obs.layer not in layers:
            return
        states = {"q": obs.queries(obs.n), "k": k, "v": v}  # [heads, n, D] each
        for what in wanted:
            spectra.append(HeadSpectra(prompt.source, obs.layer, what, measure_spectrum(states[what]).cpu()))

    reading.read(ids, Needs(last_q=len(ids)), on_layer)
    return spectra


def measure_ranks_by_layer(reading: Reading) -> pd.DataFrame:
    """Return the data of figure 1: the effective rank of each text, kind of states (``what``: q, k or v) and layer.

    erank: exp(H) of all eigenvalues, the mean over heads and prompts.
    erank_k: the same from the ``top`` largest eigenvalues alone.
    sd: the standard deviation of erank over prompts.
    prompts: the number of prompts.
    """
    top = reading.knobs.get("top", TOP)
    # without the knob all layers are read. A layer is named by the depth of its middle, since rounding can move that of
    # its beginning, i / layers, into the layer before it
    count = reading.shape.layers
    layers = reading.layers([(layer + 0.5) / count for layer in range(count)])
    rows = []
    for source, layer, what, eigenvalues in _measure_heads(reading, "qkv", layers):
        # erank = exp(H(p)) of each head's eigenvalues p [H, D], and erank_k that of the k largest; means over heads
        erank = compute_truncated_entropy(eigenvalues).exp()
        erank_k = compute_truncated_entropy(eigenvalues, top).exp()
        rows.append((source, what, layer, float(erank.mean()), float(erank_k.mean())))
    data = pd.DataFrame(rows, columns=["source", "what", "layer", "erank", "erank_k"])
    groups = data.groupby(["source", "what", "layer"], sort=False)
    means = groups[["erank", "erank_k"]].mean()
    return means.assign(sd=groups["erank"].std(ddof=0), prompts=groups.size()).reset_index()


def state_ranks(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield the facts that the paper reads off its figure 1.

    Three are the span of ranks over layers, the correlation of the queries' ranks with those of keys and values, and
    the number of layers in which queries lie above keys. The others describe the course of the queries' rank: its ends,
    its rises, and the groups of layers between drops.

    data: the rows of ``measure_ranks_by_layer``.
    """
    # the mean rank over texts [layers], with a column for each kind of states
    curves = data.groupby(["what", "layer"])["erank"].mean().unstack("what").rename(columns=NAMES)
    queries, keys = curves["queries"], curves["keys"]
    spans = curves.max() - curves.min()
    yield Fact("Span of the effective rank over layers", spans[list(NAMES.values())])
    correlations = {f"queries and {name}": _correlate(queries, curves[name]) for name in ("keys", "values")}
    yield Fact("Correlation over layers", correlations, "{:.2f}")
    yield Fact(f"Layers of {len(curves)} in which queries lie above keys", int((queries > keys).sum()), "{}")
    yield Fact("Rank of queries", {"first layer": queries.iloc[0], "last layer": queries.iloc[-1]})
    yield Fact(f"Steps of {len(curves) - 1} in which it rises", int((np.diff(queries) > 0).sum()), "{}")
    groups = []
    for group in group_layers(queries.tolist()):
        # a group has positions in the list of ranks; the index of the curves gives the numbers of their layers
        first, last = curves.index[group[0]], curves.index[group[-1]]
        groups.append(f"{first}" if first == last else f"{first} to {last}")
    yield Fact("Groups of layers between drops of more than 1", ", ".join(groups))


def measure_spectra(reading: Reading) -> pd.DataFrame:
    """Return the data of figure 2: the queries' mean eigenvalues over prompts, by text, layer, head and index."""
    # the spectra [query heads, D] of each prompt, by text and layer
    spectra_by_place: dict[tuple[str, int], list[Tensor]] = {}
    # the depth -1 is the last layer
    for source, layer, _, spectra in _measure_heads(reading, "q", reading.layers([-1])):
        spectra_by_place.setdefault((source, layer), []).append(spectra)
    rows = []
    for (source, layer), prompt_spectra in spectra_by_place.items():
        # sum starts with a tensor, since its own 0 would make the type of the result unclear
        mean = sum(prompt_spectra, torch.zeros(())) / len(prompt_spectra)
        for head, eigenvalues in enumerate(mean.tolist()):
            for index, eigenvalue in enumerate(eigenvalues, start=1):
                rows.append((source, layer, head, index, eigenvalue))
    return pd.DataFrame(rows, columns=["source", "layer", "head", "index", "eigenvalue"])


def mark_extremes(data: pd.DataFrame) -> pd.DataFrame:
    """Return figure 2's data for drawing. The heads of lowest and highest effective rank come first.

    panel: the text, and the layer if there are several, in words.
    name: the name of the line: the rank of an extreme head, or OTHERS.
    shown: the eigenvalue, clipped to above 0 for a logarithmic axis.

    data: the rows of ``measure_spectra``.
    """
    # the mean spectrum over texts of each head: a row for each layer and head, a column for each index
    mean = data.groupby(["layer", "head", "index"])["eigenvalue"].mean().unstack("index")
    # erank = exp(H) with H = -sum p log p over all eigenvalues p; the clip keeps 0 log 0 at 0
    minus_entropies = (mean * np.log(mean.clip(lower=1e-300))).sum(axis=1)
    ranks = np.exp(-minus_entropies)
    names_of_extremes = {}
    for layer, head in (ranks.idxmin(), ranks.idxmax()):
        names_of_extremes[layer, head] = f"layer {layer}, head {head}: erank {ranks[layer, head]:.1f}"
    places = zip(data["layer"], data["head"], strict=True)
    names = [names_of_extremes.get(place, OTHERS) for place in places]
    panels = data["source"].astype(str).map(name_task)
    if data["layer"].nunique() > 1:
        panels = panels + ", layer " + data["layer"].astype(str)
    marked = data.assign(panel=panels, name=names, shown=data["eigenvalue"].clip(lower=1e-9))
    # False sorts before True
    return marked.sort_values("name", key=lambda names: names == OTHERS, kind="stable")


def state_spectra(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield facts on how the heads' spectra differ.

    The first two are ranges over heads: the largest eigenvalue, and the number of eigenvalues that hold 90 % of the
    trace. The third is how much heads differ in large and in small eigenvalues. The last is how similar the spectra of
    two texts are.

    data: the rows of ``measure_spectra``.
    """
    mean = data.groupby(["layer", "head", "index"])["eigenvalue"].mean()
    largest = mean.xs(1, level="index")
    yield Fact("Largest eigenvalue by head", {"lowest": largest.min(), "highest": largest.max()}, "{:.2f}")
    # a row for each head, a column for each index
    spectra = mean.unstack("index")
    _, dims = spectra.shape
    # the share of the trace that the eigenvalues up to each index hold
    cumulative_shares = spectra.cumsum(axis=1).div(spectra.sum(axis=1), axis=0)
    # the eigenvalues before the share reaches 90 %, and the one with which it does
    needed = (cumulative_shares < 0.9).sum(axis=1) + 1
    yield Fact(f"Eigenvalues of {dims} with 90 % of the trace", {"lowest": needed.min(), "highest": needed.max()}, "{}")
    # at each index the standard deviation over heads, in per cent of the mean
    spread = 100 * mean.groupby("index").std(ddof=0) / mean.groupby("index").mean()
    parts = {
        "leading eighth": spread.iloc[: max(1, dims // 8)].mean(),
        "trailing half": spread.iloc[dims // 2 :].mean(),
    }
    yield Fact("Difference between heads (standard deviation over mean)", parts, "{:.0f} %")
    # a column for each text; the clip keeps the logarithm of an eigenvalue of 0 finite
    log_data = data.assign(log=np.log(data["eigenvalue"].clip(lower=1e-9)))
    logs = log_data.pivot_table(index=["layer", "head", "index"], columns="source", values="log")
    correlations = [_correlate(logs[first], logs[second]) for first, second in itertools.combinations(logs.columns, 2)]
    yield Fact("Lowest correlation of two texts' log spectra", min(correlations, default=np.nan), "{:.3f}")


def measure_ranks_by_head(reading: Reading) -> pd.DataFrame:
    """Return the data of figure 4: the queries' mean truncated effective rank over prompts, by text, layer and head."""
    top = reading.knobs.get("top", TOP)
    rows = []
    for source, layer, _, eigenvalues in _measure_heads(reading, "q", range(reading.shape.layers)):
        for head, erank_k in enumerate(compute_truncated_entropy(eigenvalues, top).exp().tolist()):
            rows.append((source, layer, head, erank_k))
    data = pd.DataFrame(rows, columns=["source", "layer", "head", "erank_k"])
    return data.groupby(["source", "layer", "head"], sort=False)["erank_k"].mean().reset_index()


def state_head_ranks(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield the lowest and highest effective rank of a head, and how far heads and texts agree.

    Heads are compared by the highest minus the lowest rank of a layer, as a mean over layers. Texts are compared by
    Spearman's correlation of the order in which they rank a layer's heads.

    data: the rows of ``measure_ranks_by_head``.
    """
    # the mean rank over texts [layers, heads]
    table = data.pivot_table(index="layer", columns="head", values="erank_k", aggfunc="mean")
    yield Fact("Truncated effective rank", {"lowest": table.min().min(), "highest": table.max().max()})
    differences = table.max(axis=1) - table.min(axis=1)
    yield Fact("Difference of heads within a layer, mean", differences.mean())
    correlations = _correlate_orders(data)
    if len(correlations):
        numbers = {"mean": correlations.mean(), "lowest": correlations.min()}
        yield Fact("Rank correlation of two texts' orders of a layer's heads", numbers, "{:.2f}")
    else:
        yield Fact("Whether the order of heads depends on the text", "it takes prompts of two texts or more")


def _correlate_orders(data: pd.DataFrame) -> np.ndarray:
    by_source = data.pivot_table(index=["layer", "head"], columns="source", values="erank_k")
    # each text's order of the heads of a layer
    orders = by_source.groupby("layer").rank()
    correlations_by_layer = []
    for layer in sorted(data["layer"].unique()):
        # Pearson's correlation of orders is Spearman's of the values; the matrix is [texts, texts]
        matrix = orders.loc[layer].corr().to_numpy()
        # each pair of texts once: above the diagonal
        correlations_by_layer.append(matrix[np.triu_indices(len(matrix), 1)])
    correlations = np.concatenate(correlations_by_layer)
    return correlations[np.isfinite(correlations)]


def _correlate(left: Any, right: Any) -> float:
    """Return Pearson's correlation of two equally long sequences of numbers; NaN if one of them is constant."""
    if np.std(left) == 0 or np.std(right) == 0:
        return float("nan")
    return float(np.corrcoef(left, right)[0, 1])


def measure_hidden_entropy(reading: Reading) -> pd.DataFrame:
    """Return the data of figure 6: the entropy of each prompt's hidden states by depth.

    layer: the depth, as the number of layers that the hidden states have passed, from 0.
    tokens: the length of the prompt.
    entropy, erank: H of Sigma of the hidden states, and exp(H).
    """
    rows: list[tuple[str, int, int, int, float, float]] = []
    for number, prompt in enumerate(reading.prompts):
        ids = reading.ids(prompt)
        for depth, entropy in _measure_prompt_entropies(reading, ids):
            rows.append((prompt.source, number, len(ids), depth, entropy, float(np.exp(entropy))))
        reading.tick()
    return pd.DataFrame(rows, columns=["source", "prompt", "tokens", "layer", "entropy", "erank"])


def _measure_prompt_entropies(reading: Reading, ids: Tensor) -> list[tuple[int, float]]:
    entropies: list[tuple[int, float]] = []

    def see(depth: int, hidden: Tensor) -> None:
        """Append the entropy of hidden states [n, d] in front of layer ``depth``."""
        entropies.append((depth, compute_matrix_entropy(hidden)))

    with watch_residual_stream(reading.model, see):
        # keys and values are not needed, only the pass through the model
        reading.read(ids, Needs(), lambda obs, k, v: None)
    return entropies


def compute_matrix_entropy(hidden: Tensor) -> float:
    """Return the entropy H of Sigma of hidden states [n, d].

    Sigma = X'X / n has the rows of X centred and scaled to unit length. X'X and XX' have the same eigenvalues but for
    zeros, so those of the smaller matrix are computed.
    """
    centred = hidden.float() - hidden.float().mean(dim=0)
    # the clamp keeps a row that equals the mean, whose length is 0, from a division by 0
    unit = centred / centred.norm(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    n, d = unit.shape
    # unit rows give Sigma a trace of 1
    if n < d:
        smaller = unit @ unit.T / n
    else:
        smaller = unit.T @ unit / n
    # rounding can make an eigenvalue of 0 slightly negative
    eigenvalues = torch.linalg.eigvalsh(smaller.double()).clamp(min=0)
    return float(compute_truncated_entropy(eigenvalues))


@contextmanager
def watch_residual_stream(model: Any, see: Callable[[int, Tensor], None]) -> Iterator[None]:
    """While the context is open, call ``see(depth, hidden [n, d])`` in each pass of the model.

    It is called with the hidden states in front of each decoder layer, at depths from 0, and with those behind the last
    layer. The hooks on the layers are removed on exit.
    """
    decoders = all_layers(model)

    def see_input(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Tensor]) -> None:
        # some families pass the hidden states [1, n, d] by name
        batch = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        (hidden,) = batch
        see(0, hidden)

    def see_output(depth: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        # some families return the hidden states [1, n, d] first of several values
        batch = output[0] if isinstance(output, tuple) else output
        (hidden,) = batch
        see(depth, hidden)

    handles = [decoders[0].register_forward_pre_hook(see_input, with_kwargs=True)]
    for depth, layer in enumerate(decoders, start=1):
        handles.append(layer.register_forward_hook(partial(see_output, depth)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def add_names(data: pd.DataFrame) -> pd.DataFrame:
    """Return figure 6's data with a column ``name``, the name of each prompt's line.

    It is the prompt's ``source``, or ``sample 1``, ``sample 2`` and so on if prompts share a source.

    data: the rows of ``measure_hidden_entropy``.
    """
    if data["source"].nunique() == data["prompt"].nunique():
        return data.assign(name=data["source"])
    return data.assign(name=[f"sample {int(prompt) + 1}" for prompt in data["prompt"]])


def state_entropy(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield the mean entropy at both ends, its highest value, and in how many layers and prompts it rises.

    data: the rows of ``measure_hidden_entropy``.
    """
    # the mean over prompts [layers]
    curve = data.groupby("layer")["entropy"].mean()
    # [prompts, layers]
    curves = data.pivot_table(index="prompt", columns="layer", values="entropy")
    ends = {"in front of the first layer": curve.iloc[0], "behind the last": curve.iloc[-1]}
    yield Fact("Mean entropy", ends, "{:.2f} nats")
    yield Fact("Highest", {f"after {int(curve.idxmax())} layers": curve.max()}, "{:.2f} nats")
    yield Fact(f"Steps of {len(curve) - 1} in which it rises", int((np.diff(curve) > 0).sum()), "{}")
    # [prompts, steps]
    rises = np.diff(curves.to_numpy(), axis=1) > 0
    yield Fact(f"Samples of {len(curves)} in which every step rises", int(rises.all(axis=1).sum()), "{}")


CODE = {
    "uncomp/fig1": Code(measure_ranks_by_layer, state_ranks),
    "uncomp/fig2": Code(measure_spectra, state_spectra, mark_extremes),
    "uncomp/fig4": Code(measure_ranks_by_head, state_head_ranks),
    "uncomp/fig6": Code(measure_hidden_entropy, state_entropy, add_names),
}
