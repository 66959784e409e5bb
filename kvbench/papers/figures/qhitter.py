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

from kvbench.kv.observation import Needs, Observation
from kvbench.kv.packed import quantise_zero_point
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.contract import top_indices
from kvbench.methods.core.stage import Role, Stage
from kvbench.papers.figures.figure import Code, Fact, percent_text
from kvbench.papers.figures.reading import Prompt, Reading

CRITICAL = 0.2  # of the tokens: those with the most accumulated attention
OUTLIER = 5.0  # times the mean accumulated attention, which is 1: ultra-crucial tokens
WIDTHS = (8, 4, 3, 2)
KINDS = {"own": "keys of this layer", "all": "whole cache"}
DEPTHS = (0.0, 0.5, -1.0)
ROWS = {"k_error": "keys", "v_error": "values"}


@dataclass(frozen=True, kw_only=True)
class Coarse(Stage):
    """Keys and values of ``bits`` bits for the prompt's attention; errors reach later layers. It is no method."""

    id: ClassVar[str] = "coarse"
    role: ClassVar[Role] = "quantise"
    bits: int

    @property
    def prefill_key(self) -> str:
        """Return a key that keeps these passes apart from exact ones."""
        return f"coarse bits={self.bits}"

    def read(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values after quantisation, in their own dtype."""
        coarse_k = quantise_zero_point(k, self.bits).dequantise(k.dtype)
        coarse_v = quantise_zero_point(v, self.bits).dequantise(v.dtype)
        return coarse_k, coarse_v


def overlap(exact: Tensor, shifted: Tensor) -> Tensor:
    """Return |S_o & S_q| / |S_o| of the critical sets of scores [H, n] -> [H]; the lower token wins ties."""
    size = max(1, int(CRITICAL * exact.shape[1]))
    # S_o as a mask [H, n], which is read at the positions of S_q [H, size]: both sets have one size
    critical = torch.zeros_like(exact, dtype=torch.bool).scatter_(1, top_indices(exact, size), True)
    return critical.gather(1, top_indices(shifted, size)).float().mean(dim=1)


def shifts(reading: Reading) -> pd.DataFrame:
    """Return the mean overlap of critical sets over prompts: per kind, bits, layer and query head.

    ``own``: this layer's keys alone are quantised. ``all``: all keys and values that the prompt's attention reads are.
    """
    widths = reading.knobs.get("bits") or WIDTHS
    rows: list[tuple[str, int, int, int, float]] = []
    for prompt in reading.prompts:
        ids = reading.ids(prompt, round(1 / CRITICAL), f"{percent_text(CRITICAL)} of its tokens are to be at least one")
        rows += _measure_shifts(reading, ids, widths)
        reading.tick()
    data = pd.DataFrame(rows, columns=["kind", "bits", "layer", "head", "overlap"])
    return data.groupby(["kind", "bits", "layer", "head"], sort=False)["overlap"].mean().reset_index()


def _measure_shifts(reading: Reading, ids: Tensor, widths: Sequence[int]) -> list[tuple[str, int, int, int, float]]:
    """Return (kind, bits, layer, head, overlap) for each layer and query head of one prompt.

    The prompt is read once with an exact cache, and once for each of ``widths`` with a quantised cache.
    """
    exact: dict[int, Tensor] = {}
    shifted: dict[tuple[str, int, int], Tensor] = {}  # by kind, bits and layer

    def keep_exact(obs: Observation, k: Tensor, v: Tensor) -> None:
        """Keep a layer's exact scores, and those with its own keys quantised."""
        assert obs.colsums is not None
        exact[obs.layer] = obs.colsums
        for bits in widths:
            shifted["own", bits, obs.layer] = obs.colsums_q[bits]

    reading.read(ids, Needs(colsums=True, colsums_bits=frozenset(widths)), keep_exact)
    for bits in widths:

        def keep_coarse(obs: Observation, k: Tensor, v: Tensor, bits: int = bits) -> None:
            """Keep the scores of a pass with all keys and values at ``bits``."""
            assert obs.colsums is not None
            shifted["all", bits, obs.layer] = obs.colsums

        # errors of one layer change the hidden states of the next, so that each width needs a pass of its own
        reading.read(ids, Needs(colsums=True), keep_coarse, Chain((Coarse(bits=bits),)))
    rows = []
    for (kind, bits, layer), scores in shifted.items():
        # accumulated attention [query heads, n] of both sides
        for head, value in enumerate(overlap(exact[layer], scores).tolist()):
            rows.append((kind, bits, layer, head, value))
    return rows


def shift_facts(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield overlaps by width, and overlaps of shallow layers beside overlaps of deep layers."""
    # a third of the layers from either end, at least one
    order = sorted(data["layer"].unique())
    third = max(1, len(order) // 3)
    data = data.sort_values("bits", ascending=False, kind="stable").assign(overlap=100 * data["overlap"])
    for kind, name in KINDS.items():
        rows = data[data["kind"] == kind]
        by_layers = {"mean": order, "first third of layers": order[:third], "last third": order[-third:]}
        parts = {}
        for part, layers in by_layers.items():
            layer_rows = rows[rows["layer"].isin(layers)]
            parts[part] = layer_rows.groupby("bits", sort=False)["overlap"].mean()
        parts["heads below 50 %"] = 100 * (rows["overlap"] < 50).groupby(rows["bits"], sort=False).mean()
        label = f"Overlap of the critical {percent_text(CRITICAL)} (chance: {percent_text(CRITICAL)}), {name} quantised"
        yield Fact(label, pd.concat(parts), "{:.0f} %", "{} bits")


def errors(reading: Reading) -> pd.DataFrame:
    """Return accumulated attention and quantisation error of every token, per prompt and layer.

    Attention is the sum that the token receives from all queries, as a mean over query heads. Errors are
    ||x - Quant(x)||_2 of the token's key, and of its value, over all kv heads.
    """
    bits = (reading.knobs.get("bits") or (4,))[0]
    layers = reading.layers(DEPTHS)
    frames: list[pd.DataFrame] = []
    for number, prompt in enumerate(reading.prompts):
        ids = reading.ids(prompt)

        def on_layer(obs: Observation, k: Tensor, v: Tensor, prompt: Prompt = prompt, number: int = number) -> None:
            """Append a row for each token of a chosen layer; k and v are [kv heads, n, D]."""
            if obs.layer not in layers:
                return
            assert obs.colsums is not None
            columns = {
                "source": prompt.source,
                "prompt": number,
                "bits": bits,
                "layer": obs.layer,
                "token": range(obs.n),
                # colsums [query heads, n]: the attention that each token receives from all queries
                "attention": obs.colsums.mean(dim=0).cpu().numpy(),
                "k_error": token_error(k, bits).cpu().numpy(),
                "v_error": token_error(v, bits).cpu().numpy(),
            }
            frames.append(pd.DataFrame(columns))

        reading.read(ids, Needs(colsums=True), on_layer)
        reading.tick()
    return pd.concat(frames, ignore_index=True)


def token_error(x: Tensor, bits: int) -> Tensor:
    """Return ||x - Quant(x)||_2 [n] of x [H, n, D], over the heads and channels of a token."""
    error = x.float() - quantise_zero_point(x, bits).dequantise(torch.float32)
    return error.square().sum(dim=(0, 2)).sqrt()


def _mark_tokens(data: pd.DataFrame, error: str) -> pd.DataFrame:
    """Add ``outlier`` tokens, and ``both``: in the top 20 % of a prompt's layer by attention and by error."""
    groups = data.groupby(["prompt", "layer"])
    attention_rank = groups["attention"].rank(ascending=False, method="first")
    error_rank = groups[error].rank(ascending=False, method="first")
    size = (CRITICAL * groups["token"].transform("size")).astype(int).clip(lower=1)
    return data.assign(outlier=data["attention"] > OUTLIER, both=(attention_rank <= size) & (error_rank <= size))


def by_half(data: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each token's key and for its value, with the ``error`` and the ``mark`` of the token."""
    halves = [_mark_tokens(data, error).assign(half=name, error=data[error]) for error, name in ROWS.items()]
    long = pd.concat(halves, ignore_index=True)
    # an outlier has that mark alone, whether or not its error is large
    mark = long["both"].map({True: "top 20 % by attention and error", False: "other tokens"})
    return long.assign(mark=mark.mask(long["outlier"], f"attention above {OUTLIER:g} times the mean"))


def error_facts(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield where ultra-crucial tokens stand by error, and how many tokens are crucial and hard to quantise."""
    outliers = 100 * (data["attention"] > OUTLIER).mean()
    yield Fact(f"Tokens with more than {OUTLIER:g} times the mean attention", outliers, "{:.1f} %")
    for error, name in ROWS.items():
        marked = _mark_tokens(data, error)
        quantiles = 100 * marked.groupby(["prompt", "layer"])[error].rank(pct=True)
        yield Fact(f"Their quantile by the error of {name} (median)", quantiles[marked["outlier"]].median(), "{:.0f} %")
        # if attention and error were independent, 20 % of 20 % of the tokens would be in both
        both = 100 * marked.groupby("layer")["both"].mean()
        label = f"Tokens in the top {percent_text(CRITICAL)} by both (chance: {percent_text(CRITICAL**2)})"
        yield Fact(label, both, "{:.1f} %", "layer {}")


CODE = {
    "qhitter/fig2": Code(shifts, shift_facts),
    "qhitter/fig3": Code(errors, error_facts, by_half),
}
