"""ThinK's figures 3b, 4 and 5: memory with KIVI, channel magnitudes, singular values of attention (arXiv 2407.21018).

Figure 3b (section 4.4) is computed from the bytes of weights and caches alone. Prompts have 160 tokens and answers 338,
on LLaMA-2-7B in fp16, as in KIVI's own test. ThinK prunes all keys but those that KIVI leaves exact (appendix on KIVI:
keys are pruned when they are packed). Figure 3a, the rows of table 7, is measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pandas as pd
import torch
from torch import Tensor

from kvbench.audit.accounting import bytes_declared
from kvbench.base.conf import entries
from kvbench.kv.exact_attention import causal_softmax
from kvbench.kv.model_shape import from_entry
from kvbench.kv.observation import Needs, Observation
from kvbench.methods.core.resolve import chain_of
from kvbench.papers.figures.figure import Code, Fact, percent_text
from kvbench.papers.figures.reading import Reading
from kvbench.plan import presets

if TYPE_CHECKING:
    from kvbench.papers.figures.measured import MeasuredFigure

DEPTHS = (14 / 32, 20 / 32)  # layers 14 and 20 of LLaMA-2-7B's 32
NAMES = {"k": "keys", "v": "values"}
HEAD = ["layer", "head", "what"]
HEAD_CHANNEL = ["layer", "head", "what", "channel"]
BINS = 48  # rows of a map: consecutive tokens, whose magnitudes are averaged
SHOWN = 128  # largest singular values that are kept
HIGH, ENOUGH, FIRST = 0.01, 0.9, 50  # a high energy, a share of all energy, and a number of singular values
MODEL = "llama2-7b-chat"
PARAMETERS = 6_738_415_616
FP16, GIB = 2, 2**30
TOKENS = 160 + 338 - 1  # the last token is never read
BATCHES = (1, 50, 100, 150, 200, 250, 300, 350, 400)
ROOM = 80  # GiB, of an A100
METHODS: dict[str, dict[str, str | int]] = {
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
            # weights are held once, caches once for each sequence of the batch
            total = (FP16 * PARAMETERS + batch * cache.total) / GIB
            rows.append({"method": name, "batch": batch, "cache": cache.total / 2**20, "memory": total})
    return pd.DataFrame(rows)


def largest_batches(data: pd.DataFrame) -> dict[str, int]:
    """Return by method the largest batch that fits into ROOM with its caches and the weights."""
    batches = {}
    for method, cache in data.groupby("method", sort=False)["cache"].first().items():
        # batch = (room - weights) / cache, in bytes; the data have MiB
        batches[str(method)] = int((ROOM * GIB - FP16 * PARAMETERS) / (2**20 * cache))
    return batches


def memory_facts(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield the cache bytes of one sequence, and how many sequences fit, against the full cache."""
    caches = data.groupby("method", sort=False)["cache"].first()
    batches = largest_batches(data)
    yield Fact(f"One sequence of {TOKENS} tokens", caches, "{:.1f} MiB")
    yield Fact("Times less than in full", caches["full"] / caches.drop("full"), "{:.2f}")
    yield Fact(f"Caches that fit into {ROOM} GiB beside the weights", batches, "{}")
    gains = {method: batch / batches["full"] for method, batch in batches.items() if method != "full"}
    yield Fact("Times more than in full", gains)


def magnitudes(reading: Reading) -> pd.DataFrame:
    """Return mean |K| and |V| per channel over runs of tokens: per layer, kv head, channel and first token."""
    layers = reading.layers(DEPTHS)
    heads = reading.chosen_heads([0], reading.shape.kv_heads)
    rows: list[tuple[int, int, str, int, int, float]] = []
    ids = reading.ids(reading.prompts[0])

    def on_layer(obs: Observation, k: Tensor, v: Tensor) -> None:
        """Append the mean magnitudes of a chosen layer; k and v are [kv heads, n, D]."""
        if obs.layer not in layers:
            return
        step = -(-obs.n // BINS)  # rounded up, so that there are at most BINS runs
        for what, cache in (("k", k), ("v", v)):
            for head in heads:
                for start in range(0, obs.n, step):
                    # the mean over a run of tokens [D]
                    means = cache[head, start : start + step].float().abs().mean(dim=0).tolist()
                    for channel, magnitude in enumerate(means):
                        rows.append((obs.layer, head, what, start, channel, magnitude))

    reading.read(ids, Needs(), on_layer)
    reading.tick()
    return pd.DataFrame(rows, columns=["layer", "head", "what", "token", "channel", "magnitude"])


def with_means(data: pd.DataFrame) -> pd.DataFrame:
    """Add the ``mean`` of each channel over tokens, as a multiple of the mean over all channels of its head."""
    means = data.groupby(HEAD_CHANNEL)["magnitude"].transform("mean")
    # every row has its channel's mean, so that the mean of these is the head's
    relative = means / data.assign(m=means).groupby(HEAD)["m"].transform("mean")
    places = [f"layer {layer}, head {head}" for layer, head in zip(data["layer"], data["head"], strict=True)]
    return data.assign(mean=relative, place=places)


def magnitude_facts(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield how unequal channels are, of keys and of values."""
    # one row for each channel: rows of its other runs of tokens have the same mean
    means = with_means(data).replace({"what": NAMES}).drop_duplicates(HEAD_CHANNEL)
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
        values = energy_shares(matrix)[:SHOWN].cpu()
        if key in sums:
            size = min(len(values), len(sums[key]))
            values = sums[key][:size] + values[:size]
        sums[key] = values

    for prompt in reading.prompts:
        ids = reading.ids(prompt)

        def on_layer(obs: Observation, k: Tensor, v: Tensor) -> None:
            """Add a chosen layer's energies; k is [kv heads, n, D], one attention [n, n] at a time."""
            if obs.layer not in layers:
                return
            queries = obs.queries(obs.n)
            # so many query heads share one kv head
            group = len(queries) // len(k)
            kv_heads = {head // group for head in heads}
            for head in heads:
                keys = k[head // group : head // group + 1]
                add((obs.layer, "attention", head), causal_softmax(queries[head : head + 1], keys, obs.scale)[0])
            for head in sorted(kv_heads):
                add((obs.layer, "keys", head), k[head])

        reading.read(ids, Needs(last_q=len(ids)), on_layer)
        reading.tick()

    rows = []
    for (layer, what, head), total in sums.items():
        mean = total / len(reading.prompts)
        cumulative = mean.cumsum(0)
        for index, (one, up_to_here) in enumerate(zip(mean.tolist(), cumulative.tolist(), strict=True), start=1):
            rows.append((layer, what, head, index, one, up_to_here))
    return pd.DataFrame(rows, columns=["layer", "what", "head", "index", "energy", "cumulative"])


def energy_shares(matrix: Tensor) -> Tensor:
    """Return s_i^2 / sum of s^2 of the singular values of a matrix [n, m], largest first."""
    # squared in fp64: the tail of a spectrum is many orders below its head
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
        most = f"{needed.max()}"
        if needed.max() > size:
            most = f"more than {size}"  # the data end there
        counts = f"{high.min()} to {high.max()}, median {high.median():.0f}"
        yield Fact(f"Singular values of {what} with an energy above {HIGH}, by head", counts)
        text = f"{needed.min()} to {most}"
        if size < SHOWN:
            text += f" of {size}"
        yield Fact(f"With {percent_text(ENOUGH)} of the energy", text)
        sums = rows[rows["index"] == FIRST]["cumulative"]
        if len(sums):
            heads_over = f"in {int((sums > ENOUGH).sum())} of {len(sums)} heads"
            span = f"{percent_text(sums.min())} to {percent_text(sums.max())}"
            yield Fact(f"Energy of the first {FIRST}", f"{span}, more than {percent_text(ENOUGH)} {heads_over}")


CODE = {
    "think/fig3b": Code(memory, memory_facts),
    "think/fig4": Code(magnitudes, magnitude_facts, with_means),
    "think/fig5": Code(energies, energy_facts, by_quantity),
}
