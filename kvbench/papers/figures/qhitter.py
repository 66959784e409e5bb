"""Q-Hitter's figures 2 and 3: attention shift under quantisation, and quantisation error against attention.

Zhang et al., MLSys 2024. Keys and values are quantised per token and head with an integer zero point
(``kv.packed.quantise_zero_point``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import pandas as pd
import torch
from torch import Tensor

from kvbench.base.formatting import format_percent
from kvbench.kv.observation import Needs, Observation
from kvbench.kv.packed import quantise_zero_point
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.contract import top_indices
from kvbench.methods.core.stage import Role, Stage
from kvbench.papers.figures.figure import Code, Fact
from kvbench.papers.figures.reading import Prompt, Reading

CRITICAL = 0.2  # the critical tokens are this share of all, those with the most accumulated attention
OUTLIER = 5.0  # ultra-crucial tokens have more than so many times the mean accumulated attention, which is 1
WIDTHS = (8, 4, 3, 2)
"""The bits of figure 2 by default."""
KINDS = {"own": "keys of this layer", "all": "whole cache"}
"""The kinds of quantisation in figure 2 (see ``measure_shifts``), in words."""
DEPTHS = (0.0, 0.5, -1.0)
"""The layers of figure 3 by default, as in ``Reading.layers``: the first, the middle and the last."""
ROWS = {"k_error": "keys", "v_error": "values"}
"""The columns of errors in figure 3, each with the name of its row of panels."""


@dataclass(frozen=True, kw_only=True)
class Coarse(Stage):
    """Quantise all keys and values that the prompt's attention reads to ``bits`` bits.

    A layer's errors change the hidden states of the layers behind it. This stage serves figure 2 alone: it is not
    registered as a method.
    """

    id: ClassVar[str] = "coarse"
    role: ClassVar[Role] = "quantise"
    bits: int

    @property
    def prefill_key(self) -> str:
        """The text under which stages share a pass. No stage with exact keys and values has it."""
        return f"coarse bits={self.bits}"

    def read(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values after quantisation, in their own dtype."""
        coarse_k = quantise_zero_point(k, self.bits).dequantise(k.dtype)
        coarse_v = quantise_zero_point(v, self.bits).dequantise(v.dtype)
        return coarse_k, coarse_v


def measure_overlap(exact: Tensor, shifted: Tensor) -> Tensor:
    """Return how much the critical tokens of two score tensors [H, n] agree: |S_o & S_q| / |S_o| of each head [H].

    S_o and S_q are the critical tokens by exact and by shifted scores. Both have CRITICAL of the n tokens, at least
    one. The lower token wins ties.
    """
    _, n = exact.shape
    size = max(1, int(CRITICAL * n))
    # S_o as a mask [H, n]
    is_critical = torch.zeros_like(exact, dtype=torch.bool).scatter_(1, top_indices(exact, size), True)
    # the mask at the positions of S_q [H, size]; both sets have one size, so its mean is the overlap
    return is_critical.gather(1, top_indices(shifted, size)).float().mean(dim=1)


def measure_shifts(reading: Reading) -> pd.DataFrame:
    """Return the data of figure 2: the mean overlap of critical sets over prompts.

    There is a row for each kind, number of bits, layer and query head. The kind is ``own`` if only this layer's keys
    are quantised, and ``all`` if all keys and values that the prompt's attention reads are quantised.
    """
    widths = reading.knobs.get("bits") or WIDTHS
    rows: list[tuple[str, int, int, int, float]] = []
    for prompt in reading.prompts:
        why = f"{format_percent(100 * CRITICAL)} of its tokens are to be at least one"
        ids = reading.ids(prompt, least=round(1 / CRITICAL), why=why)
        rows += _measure_prompt_shifts(reading, ids, widths)
        reading.tick()
    data = pd.DataFrame(rows, columns=["kind", "bits", "layer", "head", "overlap"])
    return data.groupby(["kind", "bits", "layer", "head"], sort=False)["overlap"].mean().reset_index()


def _measure_prompt_shifts(
    reading: Reading, ids: Tensor, widths: Sequence[int]
) -> list[tuple[str, int, int, int, float]]:
    # the attention that each token receives from all queries [query heads, n]: from exact keys by layer, and from
    # quantised keys by kind, bits and layer
    exact: dict[int, Tensor] = {}
    shifted: dict[tuple[str, int, int], Tensor] = {}

    def keep_exact(obs: Observation, k: Tensor, v: Tensor) -> None:
        # ``Needs`` asks for the sums below
        assert obs.colsums is not None
        exact[obs.layer] = obs.colsums
        for bits in widths:
            shifted["own", bits, obs.layer] = obs.colsums_q[bits]

    reading.read(ids, Needs(colsums=True, colsums_bits=frozenset(widths)), keep_exact)
    # errors of one layer change the hidden states of the next, so each width needs a pass of its own
    for bits in widths:
        for layer, attention in _read_coarsely(reading, ids, bits).items():
            shifted["all", bits, layer] = attention
    rows = []
    for (kind, bits, layer), scores in shifted.items():
        for head, value in enumerate(measure_overlap(exact[layer], scores).tolist()):
            rows.append((kind, bits, layer, head, value))
    return rows


def _read_coarsely(reading: Reading, ids: Tensor, bits: int) -> dict[int, Tensor]:
    attention_by_layer: dict[int, Tensor] = {}

    def keep(obs: Observation, k: Tensor, v: Tensor) -> None:
        # ``Needs`` asks for the sums below
        assert obs.colsums is not None
        attention_by_layer[obs.layer] = obs.colsums

    reading.read(ids, Needs(colsums=True), keep, Chain((Coarse(bits=bits),)))
    return attention_by_layer


def state_shifts(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield, for each kind of quantisation, the mean overlaps by width and the share of heads with less than 50 %.

    The means are over all layers, over the first third of layers and over the last third.

    data: the rows of ``measure_shifts``.
    """
    layers = sorted(data["layer"].unique())
    # either end has a third of the layers, at least one
    third = max(1, len(layers) // 3)
    layers_by_name = {"mean": layers, "first third of layers": layers[:third], "last third": layers[-third:]}
    data = data.sort_values("bits", ascending=False, kind="stable").assign(overlap=100 * data["overlap"])
    for kind, name in KINDS.items():
        rows = data[data["kind"] == kind]
        overlaps = {}
        for layers_name, chosen_layers in layers_by_name.items():
            layer_rows = rows[rows["layer"].isin(chosen_layers)]
            overlaps[layers_name] = layer_rows.groupby("bits", sort=False)["overlap"].mean()
        overlaps["heads below 50 %"] = 100 * (rows["overlap"] < 50).groupby(rows["bits"], sort=False).mean()
        critical = format_percent(100 * CRITICAL)
        label = f"Overlap of the critical {critical} (chance: {critical}), {name} quantised"
        yield Fact(label, pd.concat(overlaps), "{:.0f} %", "{} bits")


def measure_errors(reading: Reading) -> pd.DataFrame:
    """Return the data of figure 3: accumulated attention and quantisation error of every token, per prompt and layer.

    attention: the sum of attention that the token receives from all queries, as a mean over query heads.
    k_error, v_error: ||x - Quant(x)||_2 of the token's key and of its value, over all kv heads.
    """
    # bits= is a list, since figure 2 shows several widths; for figure 3 ``plot`` allows only one
    widths = reading.knobs.get("bits") or (4,)
    bits = widths[0]
    layers = reading.layers(DEPTHS)
    frames: list[pd.DataFrame] = []
    for number, prompt in enumerate(reading.prompts):
        frames += _measure_prompt_errors(reading, prompt, number, layers=layers, bits=bits)
        reading.tick()
    return pd.concat(frames, ignore_index=True)


def _measure_prompt_errors(
    reading: Reading, prompt: Prompt, number: int, *, layers: Sequence[int], bits: int
) -> list[pd.DataFrame]:
    ids = reading.ids(prompt)
    frames: list[pd.DataFrame] = []

    def on_layer(obs: Observation, k: Tensor, v: Tensor) -> None:
        if obs.layer not in layers:
            return
        # ``Needs`` asks for the sums below
        assert obs.colsums is not None
        columns = {
            "source": prompt.source,
            "prompt": number,
            "bits": bits,
            "layer": obs.layer,
            "token": range(obs.n),
            # colsums [query heads, n]: the attention that each token receives from all queries
            "attention": obs.colsums.mean(dim=0).cpu().numpy(),
            "k_error": measure_token_errors(k, bits).cpu().numpy(),
            "v_error": measure_token_errors(v, bits).cpu().numpy(),
        }
        frames.append(pd.DataFrame(columns))

    reading.read(ids, Needs(colsums=True), on_layer)
    return frames


def measure_token_errors(states: Tensor, bits: int) -> Tensor:
    """Return each token's quantisation error ||x - Quant(x)||_2 [n], over its heads and channels.

    states: the keys or the values x [H, n, D].
    """
    error = states.float() - quantise_zero_point(states, bits).dequantise(torch.float32)
    return error.square().sum(dim=(0, 2)).sqrt()


def _mark_tokens(data: pd.DataFrame, error_column: str) -> pd.DataFrame:
    groups = data.groupby(["prompt", "layer"])
    attention_rank = groups["attention"].rank(ascending=False, method="first")
    error_rank = groups[error_column].rank(ascending=False, method="first")
    # the number of top tokens in each row's prompt and layer: CRITICAL of all, at least one, as in ``measure_overlap``
    top_count = (CRITICAL * groups["token"].transform("size")).astype(int).clip(lower=1)
    in_both = (attention_rank <= top_count) & (error_rank <= top_count)
    return data.assign(outlier=data["attention"] > OUTLIER, both=in_both)


def stack_halves(data: pd.DataFrame) -> pd.DataFrame:
    """Return figure 3's data for drawing: a row for each token's key and one for its value.

    half: keys or values.
    error: the error of that half.
    mark: the group of the token in words, which decides its look.

    data: the rows of ``measure_errors``.
    """
    halves = []
    for error_column, half in ROWS.items():
        halves.append(_mark_tokens(data, error_column).assign(half=half, error=data[error_column]))
    stacked = pd.concat(halves, ignore_index=True)
    mark = stacked["both"].map({True: "top 20 % by attention and error", False: "other tokens"})
    # the mark of an outlier replaces the other two, whether or not its error is large
    mark = mark.mask(stacked["outlier"], f"attention above {OUTLIER:g} times the mean")
    return stacked.assign(mark=mark)


def state_errors(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield the share of ultra-crucial tokens, their quantile by error, and the share of tokens in both top sets.

    data: the rows of ``measure_errors``.
    """
    outliers = 100 * (data["attention"] > OUTLIER).mean()
    yield Fact(f"Tokens with more than {OUTLIER:g} times the mean attention", outliers, "{:.1f} %")
    for error_column, half in ROWS.items():
        marked = _mark_tokens(data, error_column)
        # the place of each token among those of its prompt and layer, in per cent from the smallest error
        quantiles = 100 * marked.groupby(["prompt", "layer"])[error_column].rank(pct=True)
        median = quantiles[marked["outlier"]].median()
        yield Fact(f"Their quantile by the error of {half} (median)", median, "{:.0f} %")
        # if attention and error were independent, 20 % of 20 % of the tokens would be in both
        both = 100 * marked.groupby("layer")["both"].mean()
        chance = format_percent(100 * CRITICAL**2)
        label = f"Tokens in the top {format_percent(100 * CRITICAL)} by both (chance: {chance})"
        yield Fact(label, both, "{:.1f} %", "layer {}")


CODE = {
    "qhitter/fig2": Code(measure_shifts, state_shifts),
    "qhitter/fig3": Code(measure_errors, state_errors, stack_halves),
}
