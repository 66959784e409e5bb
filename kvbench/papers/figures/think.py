"""ThinK's figures 3b, 4 and 5: memory with KIVI, channel magnitudes, singular values of attention (arXiv 2407.21018).

Figure 3b (section 4.4) is computed from the bytes of weights and caches alone: prompts of 160 tokens and answers of 338
on LLaMA-2-7B in fp16, as in KIVI's own test. What KIVI leaves exact is all that ThinK leaves whole (appendix on KIVI:
keys are pruned when they are packed). Figure 3a, the rows of table 7, is measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from kvbench.audit.accounting import bytes_declared
from kvbench.base.conf import entries
from kvbench.kv.exact_attention import causal_softmax
from kvbench.kv.model_shape import from_entry
from kvbench.kv.observation import Needs, Observation
from kvbench.methods.core.resolve import chain_of
from kvbench.papers.figures.figure import Code, Fact, percent
from kvbench.papers.figures.measured import MeasuredFigure
from kvbench.papers.figures.reading import Reading
from kvbench.plan import presets

DEPTHS = (14 / 32, 20 / 32)  # layers 14 and 20 of LLaMA-2-7B's 32
NAMES = {"k": "keys", "v": "values"}
HEAD = ["layer", "head", "what"]
BINS = 48  # rows of a map: consecutive tokens, whose magnitudes are averaged
SHOWN = 128  # largest singular values that are kept
HIGH, ENOUGH, FIRST = 0.01, 0.9, 50  # a high energy, a share of all energy, and a number of singular values
MODEL = "llama2-7b-chat"
PARAMETERS = 6_738_415_616
FP16, GIB = 2, 2**30
TOKENS = 160 + 338 - 1  # the last token is never read
BATCHES = (1, 50, 100, 150, 200, 250, 300, 350, 400)
ROOM = 80  # GiB, of an A100
METHODS: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "KIVI 4/4": {"method": "kivi", "bits": 4},
    "KIVI 4/4 + ThinK 0.4": {"method": "think+kivi", "bits": 4, "think.recent": 0},
    "KIVI 2/2": {"method": "kivi", "bits": 2},
    "KIVI 2/2 + ThinK 0.4": {"method": "think+kivi", "bits": 2, "think.recent": 0},
}


def memory(_: MeasuredFigure) -> pd.DataFrame:
    """Return bytes of weights and caches at the end of the answers, by method and batch size."""
    shape = from_entry(entries("model")[MODEL]["shape"])
    values = presets.values("think", MODEL)
    rows = []
    for name, entry in METHODS.items():
        cache = bytes_declared(chain_of(entry, preset=values), shape, TOKENS, FP16)
        assert cache is not None
        for batch in BATCHES:
            total = (FP16 * PARAMETERS + batch * cache.total) / GIB
            rows.append({"method": name, "batch": batch, "cache": cache.total / 2**20, "memory": total})
    return pd.DataFrame(rows)


def largest(data: pd.DataFrame) -> dict[str, int]:
    """Return the largest batch by method whose weights and caches fit into ROOM."""
    each = data.groupby("method", sort=False)["cache"].first()
    return {str(m): int((ROOM * GIB - FP16 * PARAMETERS) / (2**20 * cache)) for m, cache in each.items()}


def memory_facts(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield the cache bytes of one sequence, and how many sequences fit, against the full cache."""
    each, fit = data.groupby("method", sort=False)["cache"].first(), largest(data)
    yield Fact(f"One sequence of {TOKENS} tokens", each, "{:.1f} MiB")
    yield Fact("Times less than in full", each["full"] / each.drop("full"), "{:.2f}")
    yield Fact(f"Caches that fit into {ROOM} GiB beside the weights", fit, "{}")
    yield Fact("Times more than in full", {m: b / fit["full"] for m, b in fit.items() if m != "full"})


def magnitudes(reading: Reading) -> pd.DataFrame:
    """Return mean |K| and |V| per channel over runs of tokens: per layer, kv head, channel and first token."""
    layers = reading.layers(DEPTHS)
    heads = reading.chosen_heads([0], reading.shape.kv_heads)
    rows: list[dict[str, Any]] = []
    ids = reading.ids(reading.prompts[0])

    def on_layer(obs: Observation, k: Tensor, v: Tensor) -> None:
        """Append the mean magnitudes of a chosen layer; k and v are [kv heads, n, D]."""
        if obs.layer not in layers:
            return
        step = -(-obs.n // BINS)  # rounded up, so that there are at most BINS runs
        for what, cache in (("k", k), ("v", v)):
            for h in heads:
                for start in range(0, obs.n, step):
                    means = cache[h, start : start + step].float().abs().mean(dim=0).tolist()
                    place = {"layer": obs.layer, "head": h, "what": what, "token": start}
                    rows.extend({**place, "channel": c, "magnitude": m} for c, m in enumerate(means))

    reading.read(ids, Needs(), on_layer)
    reading.tick()
    return pd.DataFrame(rows)


def with_means(data: pd.DataFrame) -> pd.DataFrame:
    """Add the ``mean`` of each channel over tokens, in times that of all channels of its head."""
    means = data.groupby([*HEAD, "channel"])["magnitude"].transform("mean")
    relative = means / data.assign(m=means).groupby(HEAD)["m"].transform("mean")
    return data.assign(
        mean=relative, place=[f"layer {n}, head {h}" for n, h in zip(data["layer"], data["head"], strict=True)]
    )


def magnitude_facts(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield how unequal channels are, of keys and of values."""
    means = with_means(data).replace({"what": NAMES}).drop_duplicates([*HEAD, "channel"])
    for (layer, head), rows in means.groupby(["layer", "head"]):
        by_half = rows.groupby("what")["mean"]
        yield Fact(f"Layer {layer}, head {head}, largest channel in times the mean", by_half.max())
        yield Fact("Variation (standard deviation over mean)", by_half.std(ddof=0), "{:.2f}")


def energies(reading: Reading) -> pd.DataFrame:
    """Return energies of singular values, largest first, of each head's attention and keys, mean over prompts.

    Energy i is s_i^2 over the sum of all squares. One head's attention [n, n] is held at a time.
    """
    layers = reading.layers(DEPTHS)
    sums: dict[tuple[int, str, int], Tensor] = {}
    heads = reading.chosen_heads(range(reading.shape.query_heads), reading.shape.query_heads)

    def add(key: tuple[int, str, int], matrix: Tensor) -> None:
        """Add the leading energies of a matrix to their sum, cut to the shortest prompt's."""
        values = energy(matrix)[:SHOWN].cpu()
        running = sums.get(key)
        size = len(values) if running is None else min(len(values), len(running))
        sums[key] = values if running is None else running[:size] + values[:size]

    for prompt in reading.prompts:
        ids = reading.ids(prompt)

        def on_layer(obs: Observation, k: Tensor, v: Tensor) -> None:
            """Add a chosen layer's energies; k is [kv heads, n, D], one attention [n, n] at a time."""
            if obs.layer not in layers:
                return
            queries = obs.queries(obs.n)
            group = len(queries) // len(k)
            for h in heads:
                keys = k[h // group : h // group + 1]
                add((obs.layer, "attention", h), causal_softmax(queries[h : h + 1], keys, obs.scale)[0])
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
    """Return s_i^2 / sum of s^2 of the singular values of a matrix [n, m], largest first."""
    squares = torch.linalg.svdvals(matrix.float()).double().square()
    return squares / squares.sum()


def by_quantity(data: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each energy and for each cumulative one, with a name for the layer."""
    long = data.melt(["layer", "what", "head", "index"], ["energy", "cumulative"], "quantity", "shown")
    return long.assign(name="layer " + long["layer"].astype(str), shown=long["shown"].clip(lower=1e-12))


def energy_facts(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield how many singular values matter, of attention and of keys."""
    for what, rows in data.groupby("what", sort=True):
        heads, size = rows.groupby(["layer", "head"]), int(rows["index"].max())
        high = heads["energy"].agg(lambda e: int((e > HIGH).sum()))
        needed = heads["cumulative"].agg(lambda c: int((c < ENOUGH).sum()) + 1)
        largest = f"more than {size}" if needed.max() > size else f"{needed.max()}"
        counts = f"{high.min()} to {high.max()}, median {high.median():.0f}"
        yield Fact(f"Singular values of {what} with an energy above {HIGH}, by head", counts)
        shown = f" of {size}" if size < SHOWN else ""
        yield Fact(f"With {percent(ENOUGH)} of the energy", f"{needed.min()} to {largest}{shown}")
        sums = rows[rows["index"] == FIRST]["cumulative"]
        if len(sums):
            heads_over = f"in {int((sums > ENOUGH).sum())} of {len(sums)} heads"
            yield Fact(
                f"Energy of the first {FIRST}",
                f"{percent(sums.min())} to {percent(sums.max())}, more than {percent(ENOUGH)} {heads_over}",
            )


CODE = {
    "think/fig3b": Code(memory, memory_facts),
    "think/fig4": Code(magnitudes, magnitude_facts, with_means),
    "think/fig5": Code(energies, energy_facts, by_quantity),
}
