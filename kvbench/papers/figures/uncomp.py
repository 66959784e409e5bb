"""UNComp's figures 1, 2 and 4: effective rank of queries, keys and values, and 6: entropy of hidden states.

arXiv 2410.03090. Sigma, H and erank are those of ``calibration.entropy``; queries and keys are taken after RoPE.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from kvbench.kv.observation import Needs, Observation
from kvbench.methods.core.entropy import entropy, layer_groups, spectrum
from kvbench.models.interface import decoder_layers
from kvbench.papers.figures.figure import Code, Fact
from kvbench.papers.figures.reading import Prompt, Reading

TOP = 32
NAMES = {"q": "queries", "k": "keys", "v": "values"}
OTHERS = "other heads"


def _spectra(reading: Reading, names: str, layers: Collection[int]) -> list[tuple[str, int, str, Tensor]]:
    """Return (text, layer, name, eigenvalues [H, D]) of the ``names`` of q, k, v in these layers, for each prompt."""
    by_layer: list[tuple[str, int, str, Tensor]] = []
    least = reading.shape.head_dim
    for prompt in reading.prompts:
        # fewer tokens than a head has channels bound the rank
        ids = reading.ids(prompt, least, f"an effective rank of {least} channels needs as many tokens")

        def on_layer(obs: Observation, k: Tensor, v: Tensor, source: str = prompt.source) -> None:
            """Append the spectra of a chosen layer."""
            if obs.layer in layers:
                rows = {"q": obs.queries(obs.n), "k": k, "v": v}
                by_layer.extend((source, obs.layer, name, spectrum(rows[name]).cpu()) for name in names)

        reading.read(ids, Needs(last_q=len(ids)), on_layer)
        reading.tick()
    return by_layer


def rank_by_layer(reading: Reading) -> pd.DataFrame:
    """Return means of erank and erank_k, and erank's deviation, per text, q, k or v, and layer."""
    top = reading.knobs.get("top", TOP)
    layers = reading.layers([i / reading.shape.layers for i in range(reading.shape.layers)])
    rows = [
        (source, name, layer, float(entropy(values).exp().mean()), float(entropy(values, top).exp().mean()))
        for source, layer, name, values in _spectra(reading, "qkv", layers)
    ]
    data = pd.DataFrame(rows, columns=["source", "what", "layer", "erank", "erank_k"])
    groups = data.groupby(["source", "what", "layer"], sort=False)
    means = groups[["erank", "erank_k"]].mean()
    return means.assign(sd=groups["erank"].std(ddof=0), prompts=groups.size()).reset_index()


def rank_facts(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield the paper's three readings of its figure 1, in numbers."""
    curves = data.groupby(["what", "layer"])["erank"].mean().unstack("what").rename(columns=NAMES)
    queries, keys = curves["queries"], curves["keys"]
    yield Fact("Span of the effective rank over layers", (curves.max() - curves.min())[list(NAMES.values())])
    correlations = {f"queries and {w}": _pearson(queries, curves[w]) for w in ("keys", "values")}
    yield Fact("Correlation over layers", correlations, "{:.2f}")
    yield Fact(f"Layers of {len(curves)} in which queries lie above keys", int((queries > keys).sum()), "{}")
    yield Fact("Rank of queries", {"first layer": queries.iloc[0], "last layer": queries.iloc[-1]})
    yield Fact(f"Steps of {len(curves) - 1} in which it rises", int((np.diff(queries) > 0).sum()), "{}")
    ends = [(curves.index[g[0]], curves.index[g[-1]]) for g in layer_groups(queries.tolist())]
    groups = ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in ends)
    yield Fact("Groups of layers between drops of more than 1", groups)


def spectra(reading: Reading) -> pd.DataFrame:
    """Return mean eigenvalues over prompts of Sigma of the queries: per text, chosen layer, head and index."""
    by_place: dict[tuple[str, int], list[Tensor]] = {}
    for source, layer, _, values in _spectra(reading, "q", reading.layers([-1])):
        by_place.setdefault((source, layer), []).append(values)
    return pd.DataFrame(
        {"source": source, "layer": layer, "head": h, "index": i + 1, "eigenvalue": value}
        for (source, layer), of_prompts in by_place.items()
        for h, row in enumerate((sum(of_prompts, torch.zeros(())) / len(of_prompts)).tolist())
        for i, value in enumerate(row)
    )


def with_extremes(data: pd.DataFrame) -> pd.DataFrame:
    """Add a ``panel`` and a ``name`` for each line; heads of lowest and highest effective rank come first."""
    mean = data.groupby(["layer", "head", "index"])["eigenvalue"].mean().unstack("index")
    # erank = exp(-sum p log p), untruncated; eigenvalues of 0 add nothing
    ranks = np.exp(-(mean * np.log(mean.clip(lower=1e-300))).sum(axis=1))
    named = {at: f"layer {at[0]}, head {at[1]}: erank {ranks[at]:.1f}" for at in (ranks.idxmin(), ranks.idxmax())}
    places = list(zip(data["layer"], data["head"], strict=True))
    layers = [f", layer {n}" if data["layer"].nunique() > 1 else "" for n in data["layer"]]
    panels = data["source"].astype(str) + pd.Series(layers, index=data.index)
    marked = data.assign(
        panel=panels, name=[named.get(at, OTHERS) for at in places], shown=data["eigenvalue"].clip(1e-9)
    )
    return marked.sort_values("name", key=lambda names: names == OTHERS, kind="stable")


def spectrum_facts(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield how heads differ in the leading and trailing parts of their spectra, and how alike texts are."""
    mean = data.groupby(["layer", "head", "index"])["eigenvalue"].mean()
    first = mean.xs(1, level="index")
    yield Fact("Largest eigenvalue by head", {"lowest": first.min(), "highest": first.max()}, "{:.2f}")
    heads = mean.unstack("index")
    dims = heads.shape[1]
    needed = (heads.cumsum(axis=1).div(heads.sum(axis=1), axis=0) < 0.9).sum(axis=1) + 1
    yield Fact(f"Eigenvalues of {dims} with 90 % of the trace", {"lowest": needed.min(), "highest": needed.max()}, "{}")
    spread = 100 * mean.groupby("index").std(ddof=0) / mean.groupby("index").mean()
    parts = {
        "leading eighth": spread.iloc[: max(1, dims // 8)].mean(),
        "trailing half": spread.iloc[dims // 2 :].mean(),
    }
    yield Fact("Difference between heads (standard deviation over mean)", parts, "{:.0f} %")
    logs = data.assign(log=np.log(data["eigenvalue"].clip(lower=1e-9))).pivot_table(
        index=["layer", "head", "index"], columns="source", values="log"
    )
    pairs = [_pearson(logs[a], logs[b]) for a, b in itertools.combinations(logs.columns, 2)]
    yield Fact("Lowest correlation of two texts' log spectra", min(pairs, default=np.nan), "{:.3f}")


def head_map(reading: Reading) -> pd.DataFrame:
    """Return the mean erank_k of the queries over prompts: per text, layer and head."""
    top = reading.knobs.get("top", TOP)
    data = pd.DataFrame(
        {"source": source, "layer": layer, "head": h, "erank_k": value}
        for source, layer, _, values in _spectra(reading, "q", range(reading.shape.layers))
        for h, value in enumerate(entropy(values, top).exp().tolist())
    )
    return data.groupby(["source", "layer", "head"], sort=False)["erank_k"].mean().reset_index()


def head_facts(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield the range, and how far texts agree on the order of heads within a layer."""
    table = data.pivot_table(index="layer", columns="head", values="erank_k", aggfunc="mean")
    yield Fact("Truncated effective rank", {"lowest": table.min().min(), "highest": table.max().max()})
    yield Fact("Difference of heads within a layer, mean", (table.max(axis=1) - table.min(axis=1)).mean())
    by_source = data.pivot_table(index=["layer", "head"], columns="source", values="erank_k")
    ranks = by_source.groupby("layer").rank()
    correlations_by_layer = [ranks.loc[layer].corr().to_numpy() for layer in table.index]
    pairs = np.concatenate([a[np.triu_indices(len(a), 1)] for a in correlations_by_layer])
    pairs = pairs[np.isfinite(pairs)]
    if len(pairs):
        correlations = {"mean": pairs.mean(), "lowest": pairs.min()}
        yield Fact("Rank correlation of two texts' orders of a layer's heads", correlations, "{:.2f}")
    else:
        yield Fact("Whether the order of heads depends on the text", "it takes prompts of two texts or more")


def _pearson(a: Any, b: Any) -> float:
    """Return the correlation of two rows of numbers; not a number where one of them is constant."""
    a, b = np.asarray(a), np.asarray(b)
    return float(np.corrcoef(a, b)[0, 1]) if a.std() > 0 and b.std() > 0 else float("nan")


def hidden_entropy(reading: Reading) -> pd.DataFrame:
    """Return H of Sigma of the residual stream before each layer and after the last: per prompt and depth."""
    rows: list[dict[str, Any]] = []
    for number, prompt in enumerate(reading.prompts):
        ids = reading.ids(prompt)

        def see(depth: int, hidden: Tensor, prompt: Prompt = prompt, number: int = number, n: int = len(ids)) -> None:
            """Append the entropy of hidden states [n, d] in front of layer ``depth``."""
            h = matrix_entropy(hidden)
            place = {"source": prompt.source, "prompt": number, "tokens": n, "layer": depth}
            rows.append({**place, "entropy": h, "erank": float(np.exp(h))})

        with residual_stream(reading.model, see):
            reading.read(ids, Needs(), lambda obs, k, v: None)
        reading.tick()
    return pd.DataFrame(rows)


def matrix_entropy(rows: Tensor) -> float:
    """Return H of Sigma of rows [n, d], from the smaller of X'X and XX', whose eigenvalues differ only in zeros."""
    centred = rows.float() - rows.float().mean(dim=0)
    unit = centred / centred.norm(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    n, d = unit.shape
    small = (unit @ unit.T if n < d else unit.T @ unit) / n
    return float(entropy(torch.linalg.eigvalsh(small.double()).clamp(min=0)))


@contextmanager
def residual_stream(model: Any, see: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Call ``see(depth, hidden [n, d])`` with what goes into each decoder layer and, at the end, comes out of the last.

    Hooks go on exit.
    """
    decoders = decoder_layers(model)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Show the input of the first layer."""
        see(0, (kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])[0])

    def after(depth: int) -> Callable[..., None]:
        """Return a hook that shows the output of the layer in front of ``depth``."""
        return lambda module, args, output: see(depth, (output[0] if isinstance(output, tuple) else output)[0])

    handles = [decoders[0].register_forward_pre_hook(before, with_kwargs=True)]
    handles += [layer.register_forward_hook(after(depth)) for depth, layer in enumerate(decoders, start=1)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def named(data: pd.DataFrame) -> pd.DataFrame:
    """Add a ``name`` for each prompt: its text, or its number where texts have several."""
    texts = data["source"].nunique() == data["prompt"].nunique()
    return data.assign(name=data["source"] if texts else [f"sample {int(i) + 1}" for i in data["prompt"]])


def entropy_facts(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield the steps by which entropy rises layer by layer."""
    curve = data.groupby("layer")["entropy"].mean()
    lines = data.pivot_table(index="prompt", columns="layer", values="entropy")
    ends = {"in front of the first layer": curve.iloc[0], "behind the last": curve.iloc[-1]}
    yield Fact("Mean entropy", ends, "{:.2f} nats")
    yield Fact("Highest", {f"after {int(curve.idxmax())} layers": curve.max()}, "{:.2f} nats")
    yield Fact(f"Steps of {len(curve) - 1} in which it rises", int((np.diff(curve) > 0).sum()), "{}")
    always_rising = int((np.diff(lines.to_numpy(), axis=1) > 0).all(axis=1).sum())
    yield Fact(f"Samples of {len(lines)} in which every step rises", always_rising, "{}")


CODE = {
    "uncomp/fig1": Code(rank_by_layer, rank_facts),
    "uncomp/fig2": Code(spectra, spectrum_facts, with_extremes),
    "uncomp/fig4": Code(head_map, head_facts),
    "uncomp/fig6": Code(hidden_entropy, entropy_facts, named),
}
