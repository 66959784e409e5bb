"""VATP's figure 1: attention against the norms of the values that it fetches (arXiv 2406.12335)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
from torch import Tensor

from kvbench.kv.exact_attention import causal_softmax
from kvbench.kv.observation import Needs, Observation
from kvbench.kv.segment import per_head
from kvbench.papers.figures.figure import Code, Fact, percent_text
from kvbench.papers.figures.reading import Prompt, Reading

SHOWN = 48  # first tokens of the first prompt whose attention is drawn
SINK = 0.3  # of all attention that a head pays: more to one token makes that a sink
DEPTHS = (0.0, 0.5, -1.0)

Row = dict[str, str | float]
"""A row of the data by the names of COLUMNS; a quantity that a column does not apply to has no value there."""


def value_norms(reading: Reading) -> pd.DataFrame:
    """Return attention and value norms of a few heads, and the most attended token of every head.

    Rows have one of four values of ``quantity``.
    attention: the attention of a query to a token, of the first SHOWN tokens of the first prompt and the chosen heads.
    norm: ||v||_1 of each of these tokens.
    share: the part of all attention that a head's most attended token receives, for every prompt, layer and head. It is
    that token's accumulated attention over the number of queries.
    ratio: that token's ||v||_1 over the median of the head's tokens.
    """
    layers = reading.layers(DEPTHS)
    named_heads = reading.knobs.get("heads")
    chosen_heads = reading.chosen_heads([0], reading.shape.query_heads)
    rows: list[Row] = []
    for number, prompt in enumerate(reading.prompts):
        ids = reading.ids(prompt)

        def on_layer(
            obs: Observation, k: Tensor, v: Tensor, prompt: Prompt = prompt, number: int = number, ids: Tensor = ids
        ) -> None:
            """Append the rows of one layer; k and v are [kv heads, n, D], ``colsums`` [query heads, n]."""
            assert obs.colsums is not None
            queries = obs.colsums.shape[0]
            norms = per_head(v.float().abs().sum(dim=-1), queries).cpu()
            share = obs.colsums.cpu() / obs.n  # every query pays 1 in all, so that a head's tokens sum to 1
            # the most attended token of each head [query heads], and its norm in times the median of the head
            top = share.argmax(dim=1)
            ratios = norms.gather(1, top[:, None])[:, 0] / norms.median(dim=1).values
            place: Row = {"source": prompt.source, "prompt": number, "layer": obs.layer}
            for head in range(queries):
                row = place | {"head": head, "token": int(top[head])}
                rows.append(row | {"quantity": "share", "value": float(share[head, top[head]])})
                rows.append(row | {"quantity": "ratio", "value": float(ratios[head])})
            if number == 0 and obs.layer in layers:
                # unless the user names heads, the one with the strongest sink is drawn
                heads = chosen_heads
                if not named_heads:
                    heads = [int(share.amax(dim=1).argmax())]
                texts = [repr(reading.decode(int(token))) for token in ids[: min(SHOWN, obs.n)]]
                for head in heads:
                    for row in _pattern_rows(obs, k, norms[head], head=head, texts=texts):
                        rows.append(place | {"head": head} | row)

        reading.read(ids, Needs(last_q=len(ids), colsums=True), on_layer)
        reading.tick()
    return pd.DataFrame(rows).reindex(columns=list(COLUMNS))


def _pattern_rows(obs: Observation, k: Tensor, norms: Tensor, *, head: int, texts: Sequence[str]) -> list[Row]:
    """Return one query head's attention [m, m] and value norms [m] of the first m tokens, as rows of the data.

    k: the keys [kv heads, n, D]. norms: ||v||_1 [n] of the head. texts: the m tokens' own.
    """
    m = len(texts)
    queries = obs.queries(obs.n)
    # so many query heads share one kv head
    group = queries.shape[0] // k.shape[0]
    query = queries[head : head + 1, :m]
    keys = k[head // group : head // group + 1, :m]
    # the first m rows of causal attention need no later token
    attention = causal_softmax(query, keys, obs.scale)[0].cpu()
    rows: list[Row] = []
    for i in range(m):
        for j in range(i + 1):
            rows.append({"quantity": "attention", "query": i, "token": j, "value": float(attention[i, j])})
    for j, text in enumerate(texts):
        rows.append({"quantity": "norm", "token": j, "text": text, "value": float(norms[j])})
    return rows


def with_marks(data: pd.DataFrame) -> pd.DataFrame:
    """Return the data for drawing: three heads at most, with their sinks, and a row ``head`` for every head."""
    maps = data[data["quantity"] == "attention"]
    heads = list(maps.groupby(["layer", "head"]))[:3]
    parts: list[pd.DataFrame] = []
    for (layer, head), weights in heads:
        table = weights.pivot(index="query", columns="token", values="value")
        # each query pays 1, so that a column's sum over the number of queries is the token's share
        sinks = table.columns[table.sum() / len(table) >= SINK]
        of_head = (data["layer"] == layer) & (data["head"] == head)
        head_rows = data[data["quantity"].isin(("attention", "norm")) & of_head]
        parts.append(head_rows.assign(sink=head_rows["token"].isin(sinks), place=f"layer {layer}, head {head}"))
    parts.append(_means_by_head(data).assign(quantity="head"))
    return pd.concat(parts, ignore_index=True)


def _means_by_head(data: pd.DataFrame) -> pd.DataFrame:
    """Return per layer and head the mean share, the geometric mean ratio, and how often that token is the first."""
    rows = data[data["quantity"].isin(("share", "ratio"))]
    tokens = rows.pivot(index=["prompt", "layer", "head", "token"], columns="quantity", values="value").reset_index()
    tokens = tokens.assign(first=tokens["token"] == 0, ratio=np.log(tokens["ratio"].clip(lower=1e-9)))
    # the mean of logarithms is the logarithm of the geometric mean
    means = tokens.groupby(["layer", "head"])[["share", "ratio", "first"]].mean().reset_index()
    return means.assign(ratio=np.exp(means["ratio"]))


def sink_facts(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield how many heads have a sink, and how small its value is."""
    heads = _means_by_head(data)
    sinks, others = heads[heads["share"] >= SINK], heads[heads["share"] < SINK]
    label = f"Heads of {len(heads)} that pay {percent_text(SINK)} or more of all attention to one token"
    yield Fact(label, len(sinks), "{}")
    if len(sinks):
        ratio = sinks["ratio"]
        text = f"{ratio.median():.2f} (median; {ratio.min():.2f} to {ratio.max():.2f})"
        yield Fact("Norm of its value in times the median of its head", text)
        yield Fact("Heads in which it is below half", int((ratio < 0.5).sum()), "{}")
        yield Fact("Cases in which it is the first token", 100 * sinks["first"].mean(), "{:.0f} %")
    if len(others):
        yield Fact("The same norm in the other heads (median)", others["ratio"].median(), "{:.2f}")
    norms = data[data["quantity"] == "norm"].groupby(["layer", "head"])["value"]
    spread = [f"{s / m:.2f}" for s, m in zip(norms.std(ddof=0), norms.mean(), strict=True)]
    if spread:
        yield Fact("Standard deviation over mean of the norms of the heads drawn", ", ".join(spread))


COLUMNS = ("quantity", "source", "prompt", "layer", "head", "query", "token", "text", "value")
CODE = {"vatp/fig1": Code(value_norms, sink_facts, with_marks)}
