"""VATP's figure 1: attention against the norms of the values that it fetches (arXiv 2406.12335)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
from torch import Tensor

from kvbench.base.formatting import format_percent
from kvbench.kv.exact_attention import causal_softmax
from kvbench.kv.observation import Needs, Observation
from kvbench.kv.segment import per_head
from kvbench.papers.figures.figure import Code, Fact
from kvbench.papers.figures.reading import Reading

SHOWN = 48  # attention is drawn among so many first tokens of the first prompt
SINK = 0.3  # a token that receives this share or more of a head's attention is a sink
DEPTHS = (0.0, 0.5, -1.0)  # by default attention is drawn of the first, the middle and the last layer

Row = dict[str, str | float]
"""A row of the data: values by the names of COLUMNS, without columns that do not apply to the row's quantity."""


def measure_value_norms(reading: Reading) -> pd.DataFrame:
    """Return the data of figure 1: attention and value norms of a few heads, and the most attended token of every head.

    Each row has one of four quantities in ``quantity``, and its number in ``value``.

    attention: the attention of a query to a token, among the first SHOWN tokens of the first prompt, of chosen heads.
    norm: ||v||_1 of each of these tokens.
    share: the share of all attention that a head's most attended token receives, for every prompt, layer and head. It
    is the token's accumulated attention over the number of queries.
    ratio: the ||v||_1 of this token over the median of the head's tokens.
    """
    # the layers and heads whose attention is drawn; shares and ratios are of all layers and heads
    layers = reading.layers(DEPTHS)
    chosen_heads = reading.chosen_heads([0], reading.shape.query_heads)
    # unless the user names heads, only the head of a layer with the strongest sink is drawn
    drawn_heads = chosen_heads if reading.knobs.get("heads") else None
    rows: list[Row] = []
    for number, prompt in enumerate(reading.prompts):
        # attention is drawn of the first prompt alone
        drawn_layers = layers if number == 0 else []
        place: Row = {"source": prompt.source, "prompt": number}
        for row in _measure_prompt(reading, reading.ids(prompt), drawn_layers, drawn_heads):
            rows.append(place | row)
        reading.tick()
    return pd.DataFrame(rows).reindex(columns=list(COLUMNS))


def _measure_prompt(
    reading: Reading, ids: Tensor, drawn_layers: Sequence[int], drawn_heads: Sequence[int] | None
) -> list[Row]:
    rows: list[Row] = []

    def on_layer(obs: Observation, k: Tensor, v: Tensor) -> None:
        # ``Needs`` below asks for the sums
        assert obs.colsums is not None
        # the attention of each query sums to 1, so the shares of a head do, too
        shares = obs.colsums.cpu() / obs.n
        query_heads = len(shares)
        # ||v||_1 of each token for each query head [query heads, n]
        norms = per_head(v.float().abs().sum(dim=-1), query_heads).cpu()
        # the most attended token of each head [query heads], and its norm over the median of the head's tokens
        top = shares.argmax(dim=1)
        ratios = norms.gather(1, top[:, None])[:, 0] / norms.median(dim=1).values
        for head in range(query_heads):
            place: Row = {"layer": obs.layer, "head": head}
            row = place | {"token": int(top[head])}
            rows.append(row | {"quantity": "share", "value": float(shares[head, top[head]])})
            rows.append(row | {"quantity": "ratio", "value": float(ratios[head])})
        if obs.layer in drawn_layers:
            strongest_head = int(shares.amax(dim=1).argmax())
            # repr shows line ends and spaces
            texts = [repr(reading.decode(int(token))) for token in ids[:SHOWN]]
            for head in drawn_heads or [strongest_head]:
                for row in _list_pattern_rows(obs, k, norms[head], head=head, texts=texts):
                    rows.append({"layer": obs.layer, "head": head} | row)

    reading.read(ids, Needs(last_q=len(ids), colsums=True), on_layer)
    return rows


def _list_pattern_rows(obs: Observation, k: Tensor, norms: Tensor, *, head: int, texts: Sequence[str]) -> list[Row]:
    m = len(texts)
    queries = obs.queries(obs.n)
    # each kv head serves a group of so many query heads
    group = len(queries) // len(k)
    kv_head = head // group
    query, keys = queries[head : head + 1, :m], k[kv_head : kv_head + 1, :m]
    # causal attention of the first m tokens reads no later token
    (attention,) = causal_softmax(query, keys, obs.scale).cpu()
    rows: list[Row] = []
    for i in range(m):
        # query i reads no token behind itself
        for j in range(i + 1):
            rows.append({"quantity": "attention", "query": i, "token": j, "value": float(attention[i, j])})
    for j, text in enumerate(texts):
        rows.append({"quantity": "norm", "token": j, "text": text, "value": float(norms[j])})
    return rows


def mark_sinks(data: pd.DataFrame) -> pd.DataFrame:
    """Return the data for drawing: the rows of at most three heads with attention, and a summary row for every head.

    sink: True for rows about a token that is a sink of the head.
    place: the layer and the head in words.

    Summary rows have the quantity ``head`` and the columns of ``_average_by_head``.

    data: the rows of ``measure_value_norms``.
    """
    maps = data[data["quantity"] == "attention"]
    # three heads are those of the default layers
    drawn_heads = list(maps.groupby(["layer", "head"]))[:3]
    frames: list[pd.DataFrame] = []
    for (layer, head), attention_rows in drawn_heads:
        attention = attention_rows.pivot(index="query", columns="token", values="value")
        # a query's attention sums to 1, so the mean of a column is the share that its token receives
        sinks = attention.columns[attention.sum() / len(attention) >= SINK]
        is_of_head = (data["layer"] == layer) & (data["head"] == head)
        head_rows = data[data["quantity"].isin(("attention", "norm")) & is_of_head]
        frames.append(head_rows.assign(sink=head_rows["token"].isin(sinks), place=f"layer {layer}, head {head}"))
    frames.append(_average_by_head(data).assign(quantity="head"))
    return pd.concat(frames, ignore_index=True)


def _average_by_head(data: pd.DataFrame) -> pd.DataFrame:
    rows = data[data["quantity"].isin(("share", "ratio"))]
    # a row for each prompt and head, about its most attended token
    tokens = rows.pivot(index=["prompt", "layer", "head", "token"], columns="quantity", values="value").reset_index()
    # the geometric mean is exp(mean(log ratio)); the clip keeps a norm of 0 finite
    tokens = tokens.assign(first=tokens["token"] == 0, ratio=np.log(tokens["ratio"].clip(lower=1e-9)))
    means = tokens.groupby(["layer", "head"])[["share", "ratio", "first"]].mean().reset_index()
    return means.assign(ratio=np.exp(means["ratio"]))


def state_sinks(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield how many heads have a sink, how small its value norm is, and how often it is the first token.

    data: the rows of ``measure_value_norms``.
    """
    heads = _average_by_head(data)
    sinks, others = heads[heads["share"] >= SINK], heads[heads["share"] < SINK]
    label = f"Heads of {len(heads)} that pay {format_percent(100 * SINK)} or more of all attention to one token"
    yield Fact(label, len(sinks), "{}")
    if len(sinks):
        ratios = sinks["ratio"]
        text = f"{ratios.median():.2f} (median; {ratios.min():.2f} to {ratios.max():.2f})"
        yield Fact("Norm of its value in times the median of its head", text)
        yield Fact("Heads in which it is below half", int((ratios < 0.5).sum()), "{}")
        yield Fact("Cases in which it is the first token", 100 * sinks["first"].mean(), "{:.0f} %")
    if len(others):
        yield Fact("The same norm in the other heads (median)", others["ratio"].median(), "{:.2f}")
    norms = data[data["quantity"] == "norm"].groupby(["layer", "head"])["value"]
    variations = [f"{spread / mean:.2f}" for spread, mean in zip(norms.std(ddof=0), norms.mean(), strict=True)]
    if variations:
        yield Fact("Standard deviation over mean of the norms of the heads drawn", ", ".join(variations))


COLUMNS = ("quantity", "source", "prompt", "layer", "head", "query", "token", "text", "value")
CODE = {"vatp/fig1": Code(measure_value_norms, state_sinks, mark_sinks)}
