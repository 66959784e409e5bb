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
from kvbench.base.formatting import format_percent
from kvbench.base.numbers import ceil_div
from kvbench.kv.exact_attention import causal_softmax
from kvbench.kv.model_shape import from_entry
from kvbench.kv.observation import Needs, Observation
from kvbench.methods.core.resolve import chain_of
from kvbench.papers.figures.figure import Code, Fact
from kvbench.papers.figures.reading import Reading
from kvbench.plan import presets

if TYPE_CHECKING:
    from kvbench.papers.figures.measured import MeasuredFigure

DEPTHS = (14 / 32, 20 / 32)  # the paper shows layers 14 and 20 of LLaMA-2-7B's 32
NAMES = {"k": "keys", "v": "values"}
HEAD = ["layer", "head", "what"]  # the columns that tell the keys and the values of each head apart
HEAD_CHANNEL = ["layer", "head", "what", "channel"]
BINS = 48  # a map has at most so many rows, each the mean magnitude over consecutive tokens
SHOWN = 128  # so many of the largest singular values are in the data
# figure 5 counts singular values with energies above HIGH, those that have ENOUGH of all energy, and the energy of the
# FIRST ones
HIGH, ENOUGH, FIRST = 0.01, 0.9, 50
MODEL = "llama2-7b-chat"
PARAMETERS = 6_738_415_616  # the weights of LLaMA-2-7B
FP16, MIB, GIB = 2, 2**20, 2**30
TOKENS = 160 + 338 - 1  # the last token of an answer is never read, so it is not cached
BATCHES = (1, 50, 100, 150, 200, 250, 300, 350, 400)
ROOM = 80  # an A100 has so many GiB
METHODS: dict[str, dict[str, str | int]] = {
    "full": {"method": "full"},
    "KIVI 4/4": {"method": "kivi", "bits": 4},
    "KIVI 4/4 + ThinK 0.4": {"method": "think+kivi", "bits": 4, "think.recent": 0},
    "KIVI 2/2": {"method": "kivi", "bits": 2},
    "KIVI 2/2 + ThinK 0.4": {"method": "think+kivi", "bits": 2, "think.recent": 0},
}
"""The methods of figure 3b by the names of their lines, each with its options."""

EnergyKey = tuple[int, str, int]
"""(layer, attention or keys, head): the matrices of figure 5 whose energies are summed."""


def compute_memory(_: MeasuredFigure) -> pd.DataFrame:
    """Return the data of figure 3b: the memory at the end of the answers, by method and batch size.

    The argument, which every figure with sweeps gets, has no runs and is not used.

    cache: the bytes of one sequence's cache, in MiB.
    memory: the bytes of the weights and all caches, in GiB.
    """
    shape = from_entry(entries("model")[MODEL]["shape"])
    preset_values = presets.values("think", MODEL)
    weights = FP16 * PARAMETERS
    rows = []
    for name, entry in METHODS.items():
        cache = bytes_declared(chain_of(entry, preset=preset_values), shape, TOKENS, FP16)
        # these methods keep all tokens, so the bytes do not depend on the prompt's text
        assert cache is not None
        for batch in BATCHES:
            # weights are held once, caches once for each sequence of the batch
            total = (weights + batch * cache.total) / GIB
            rows.append({"method": name, "batch": batch, "cache": cache.total / MIB, "memory": total})
    return pd.DataFrame(rows)


def find_largest_batches(data: pd.DataFrame) -> dict[str, int]:
    """Return, by method, the largest batch whose caches fit into ROOM beside the weights.

    data: the rows of ``compute_memory``.
    """
    room_for_caches = ROOM * GIB - FP16 * PARAMETERS
    batches = {}
    for method, cache in data.groupby("method", sort=False)["cache"].first().items():
        # the data have caches in MiB
        batches[str(method)] = int(room_for_caches / (MIB * cache))
    return batches


def state_memory(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield the cache bytes of one sequence and how many sequences fit, and both relative to the full cache.

    data: the rows of ``compute_memory``.
    """
    caches = data.groupby("method", sort=False)["cache"].first()
    batches = find_largest_batches(data)
    yield Fact(f"One sequence of {TOKENS} tokens", caches, "{:.1f} MiB")
    yield Fact("Times less than in full", caches["full"] / caches.drop("full"), "{:.2f}")
    yield Fact(f"Caches that fit into {ROOM} GiB beside the weights", batches, "{}")
    gains = {method: batch / batches["full"] for method, batch in batches.items() if method != "full"}
    yield Fact("Times more than in full", gains)


def measure_magnitudes(reading: Reading) -> pd.DataFrame:
    """Return the data of figure 4: the mean |K| and |V| of each channel over runs of tokens of the first prompt.

    There is a row for each chosen layer and kv head, keys or values (``what``), run of consecutive tokens (``token`` is
    the first) and channel.
    """
    layers = reading.layers(DEPTHS)
    heads = reading.chosen_heads([0], reading.shape.kv_heads)
    first_prompt = reading.prompts[0]
    ids = reading.ids(first_prompt)
    # (layer, head, what, token, channel, magnitude)
    rows: list[tuple[int, int, str, int, int, float]] = []

    def on_layer(obs: Observation, k: Tensor, v: Tensor) -> None:
        if obs.layer not in layers:
            return
        # the length of a run, so that there are at most BINS runs
        length = ceil_div(obs.n, BINS)
        for what, states in (("k", k), ("v", v)):
            for head in heads:
                for start in range(0, obs.n, length):
                    # the mean over a run of tokens [D]
                    means = states[head, start : start + length].float().abs().mean(dim=0)
                    for channel, magnitude in enumerate(means.tolist()):
                        rows.append((obs.layer, head, what, start, channel, magnitude))

    reading.read(ids, Needs(), on_layer)
    reading.tick()
    return pd.DataFrame(rows, columns=["layer", "head", "what", "token", "channel", "magnitude"])


def add_means(data: pd.DataFrame) -> pd.DataFrame:
    """Return figure 4's data with a column for drawing and one for titles.

    mean: the channel's mean magnitude over tokens, over the mean of all channels of its head.
    place: the layer and the head in words.

    data: the rows of ``measure_magnitudes``.
    """
    channel_means = data.groupby(HEAD_CHANNEL)["magnitude"].transform("mean")
    # a channel's mean stands in all of its rows, equally many for each channel, so their mean is the head's
    head_means = data.assign(channel_mean=channel_means).groupby(HEAD)["channel_mean"].transform("mean")
    places = [f"layer {layer}, head {head}" for layer, head in zip(data["layer"], data["head"], strict=True)]
    return data.assign(mean=channel_means / head_means, place=places)


def state_magnitudes(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield, for each layer and head, the largest channel of keys and of values, and how much channels vary.

    data: the rows of ``measure_magnitudes``.
    """
    # the rows of a channel have the same mean, so one of them is enough
    means = add_means(data).replace({"what": NAMES}).drop_duplicates(HEAD_CHANNEL)
    for (layer, head), rows in means.groupby(["layer", "head"]):
        by_half = rows.groupby("what")["mean"]
        yield Fact(f"Layer {layer}, head {head}, largest channel in times the mean", by_half.max())
        yield Fact("Variation (standard deviation over mean)", by_half.std(ddof=0), "{:.2f}")


def measure_energies(reading: Reading) -> pd.DataFrame:
    """Return the data of figure 5: energies of the singular values of each head's attention and keys, over prompts.

    There is a row for each chosen layer and head, attention or keys (``what``), and index of a singular value, from 1
    for the largest. Heads of attention are query heads, heads of keys are kv heads.

    energy: s_i^2 / sum of all s^2, the mean over prompts.
    cumulative: the sum of the energies up to this index.
    """
    layers = reading.layers(DEPTHS)
    heads = reading.chosen_heads(range(reading.shape.query_heads), reading.shape.query_heads)
    # the sums of energies over prompts, largest first
    sums: dict[EnergyKey, Tensor] = {}

    def on_layer(obs: Observation, k: Tensor, v: Tensor) -> None:
        if obs.layer not in layers:
            return
        queries = obs.queries(obs.n)
        # each kv head serves a group of so many query heads
        group = len(queries) // len(k)
        # only one head's attention [n, n] is held at a time
        for head in heads:
            kv_head = head // group
            query, keys = queries[head : head + 1], k[kv_head : kv_head + 1]
            (attention,) = causal_softmax(query, keys, obs.scale)
            _add_energies(sums, (obs.layer, "attention", head), attention)
        for kv_head in sorted({head // group for head in heads}):
            _add_energies(sums, (obs.layer, "keys", kv_head), k[kv_head])

    for prompt in reading.prompts:
        ids = reading.ids(prompt)
        reading.read(ids, Needs(last_q=len(ids)), on_layer)
        reading.tick()

    rows = []
    for (layer, what, head), total in sums.items():
        means = total / len(reading.prompts)
        cumulative = means.cumsum(dim=0)
        for index, (energy, up_to_here) in enumerate(zip(means.tolist(), cumulative.tolist(), strict=True), start=1):
            rows.append((layer, what, head, index, energy, up_to_here))
    return pd.DataFrame(rows, columns=["layer", "what", "head", "index", "energy", "cumulative"])


def _add_energies(sums: dict[EnergyKey, Tensor], key: EnergyKey, matrix: Tensor) -> None:
    """Add the largest energies of a matrix [n, m] to ``sums[key]``. The shortest prompt limits how many are summed."""
    energies = compute_energy_shares(matrix)[:SHOWN].cpu()
    if key in sums:
        size = min(len(energies), len(sums[key]))
        energies = sums[key][:size] + energies[:size]
    sums[key] = energies


def compute_energy_shares(matrix: Tensor) -> Tensor:
    """Return the energies s_i^2 / sum of s^2 of the singular values s of a matrix [n, m], largest first."""
    # the smallest squares are many orders of magnitude below the largest, so they are computed in fp64
    squares = torch.linalg.svdvals(matrix.float()).double().square()
    return squares / squares.sum()


def stack_by_quantity(data: pd.DataFrame) -> pd.DataFrame:
    """Return figure 5's data for drawing: a row for each energy and one for each cumulative energy.

    quantity: energy or cumulative.
    shown: the value, clipped to above 0 for a logarithmic axis.
    name: the layer in words.

    data: the rows of ``measure_energies``.
    """
    # melt makes a row for each of the two columns, with the column's name in ``quantity`` and its value in ``shown``
    stacked = data.melt(["layer", "what", "head", "index"], ["energy", "cumulative"], "quantity", "shown")
    return stacked.assign(name="layer " + stacked["layer"].astype(str), shown=stacked["shown"].clip(lower=1e-12))


def state_energies(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield facts for attention and for keys, over all heads.

    They are how many singular values have an energy above HIGH, and how many together have the share ENOUGH of the
    energy. The last is the share of the energy that the first FIRST have.

    data: the rows of ``measure_energies``.
    """
    for what, rows in data.groupby("what", sort=True):
        rows_by_head = rows.groupby(["layer", "head"])
        high = rows_by_head["energy"].agg(lambda energies: int((energies > HIGH).sum()))
        counts = f"{high.min()} to {high.max()}, median {high.median():.0f}"
        yield Fact(f"Singular values of {what} with an energy above {HIGH}, by head", counts)
        # the singular values before the share is reached, and the one that reaches it
        needed = rows_by_head["cumulative"].agg(lambda cumulative: int((cumulative < ENOUGH).sum()) + 1)
        size = int(rows["index"].max())
        # the data have only the first singular values, and a head may need more of them
        most = f"{needed.max()}" if needed.max() <= size else f"more than {size}"
        text = f"{needed.min()} to {most}"
        # a matrix can have more singular values than SHOWN, and the data do not say how many
        if size < SHOWN:
            text += f" of {size}"
        yield Fact(f"With {format_percent(100 * ENOUGH)} of the energy", text)
        # one number a head; none if the data have fewer singular values than FIRST
        first_sums = rows[rows["index"] == FIRST]["cumulative"]
        if len(first_sums):
            heads_over = f"in {int((first_sums > ENOUGH).sum())} of {len(first_sums)} heads"
            span = f"{format_percent(100 * first_sums.min())} to {format_percent(100 * first_sums.max())}"
            yield Fact(f"Energy of the first {FIRST}", f"{span}, more than {format_percent(100 * ENOUGH)} {heads_over}")


CODE = {
    "think/fig3b": Code(compute_memory, state_memory),
    "think/fig4": Code(measure_magnitudes, state_magnitudes, add_means),
    "think/fig5": Code(measure_energies, state_energies, stack_by_quantity),
}
