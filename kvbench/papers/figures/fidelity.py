"""Divergences from the full cache by budget, by position of the continuation, and by layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.base.example import Example
from kvbench.engine.divergence import with_one_layer
from kvbench.engine.likelihood import diverge
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.prompt_cache import PromptCache
from kvbench.papers.figures.figure import Code, Fact
from kvbench.papers.figures.sweep import FULL, Point
from kvbench.plan.cells import Group
from kvbench.run import experiment
from kvbench.run.forced import choose_texts
from kvbench.run.host import Host
from kvbench.store.fidelity import MeanDivergence, TextFidelity, mean_divergence, summarise_texts
from kvbench.store.results import Sample, share
from kvbench.tasks.base import Task
from kvbench.tasks.metrics import stats

if TYPE_CHECKING:
    from kvbench.papers.figures.measured import MeasuredFigure

TEXTS = {"reference": "reference text", "greedy": "full cache's answer"}
SMOOTH, SMOOTH_LONG = 8, 32
"""Positions of which the mean is drawn."""
RUNNING = 8
"""Running means are over this part of a long text: an eighth."""
Place = dict[str, str | float]
"""Columns of a row of the data."""
ROWS = 16
"""Caches with one layer compressed that are compared at once."""


def _compressed_cells(measured: MeasuredFigure) -> Iterator[tuple[Point, Group, list[Sample]]]:
    """Yield each measured cell with the samples of this run, without refused cells and those without samples.

    The full cache's cells are left out as well: its divergence from itself is 0.
    """
    for sweep_run in measured.runs:
        for point, group, cell in sweep_run.cells():
            if point.series == FULL:
                continue
            if sweep_run.run.store.refusal(cell.id) is not None:
                continue
            samples = list(sweep_run.run.samples(group, cell).values())
            if samples:
                yield point, group, samples


def by_budget(measured: MeasuredFigure) -> pd.DataFrame:
    """Return the mean divergence of each method and task with its interval, beside tokens kept and bytes held."""
    rows = []
    for point, group, samples in _compressed_cells(measured):
        kept = 100 * sum(sample.kept for sample in samples) / sum(sample.n for sample in samples)
        x = point.x
        if math.isnan(x):
            # a method that the user named stands at the share of tokens that it kept, with two digits
            x = float(f"{kept:.2g}")
        bytes_held = share(
            sum(sample.payload16 for sample in samples),
            sum(sample.overhead16 for sample in samples),
            sum(sample.full16 for sample in samples),
        )
        for kind, text in TEXTS.items():
            summary = summarise_texts(_texts_of_kind(samples, kind))
            if summary is None:
                continue
            low, high = summary.ci or (math.nan, math.nan)
            rows.append(
                {
                    "series": point.series,
                    "x": x,
                    "task": group.task.id,
                    "kept": kept,
                    "bytes": bytes_held,
                    "text": text,
                    "kl": summary.kl_mean,
                    "low": low,
                    "high": high,
                    "floor": summary.floor,
                    "n": summary.n,
                }
            )
    return pd.DataFrame(rows)


def _texts_of_kind(samples: Sequence[Sample], kind: str) -> list[TextFidelity]:
    """Return the comparisons on one kind of text (see TEXTS), of the samples that have it."""
    return [sample.fidelity[kind] for sample in samples if sample.fidelity and kind in sample.fidelity]


def by_position(measured: MeasuredFigure) -> pd.DataFrame:
    """Return the mean divergence over prompts at each run of SMOOTH positions after the prompt, with its interval.

    n: the texts that are long enough to reach these positions.
    """
    rows: list[Place] = []
    for point, group, samples in _compressed_cells(measured):
        for kind, text in TEXTS.items():
            texts = _texts_of_kind(samples, kind)
            for start in range(0, _longest_text(texts), SMOOTH):
                mean = mean_divergence(texts, start, start + SMOOTH)
                assert mean is not None
                place: Place = {"series": point.series, "task": group.task.id, "text": text}
                rows.append(place | {"position": _middle_position(start, SMOOTH)} | _mean_numbers(mean))
    return pd.DataFrame(rows)


def _longest_text(texts: Sequence[TextFidelity]) -> int:
    """Return the number of positions of the longest text; 0 without texts."""
    return max((len(text.kl) for text in texts), default=0)


def _middle_position(start: int, smooth: int) -> float:
    """Return the middle of a run of positions, which are counted from 1: the run has start + 1 to start + smooth."""
    return start + (smooth + 1) / 2


def _mean_numbers(mean: MeanDivergence) -> Place:
    """Return the columns of a mean divergence. There is no interval below stats.FEWEST texts."""
    low, high = mean.ci or (math.nan, math.nan)
    return {"kl": mean.kl, "low": low, "high": high, "n": mean.n}


def by_layer(measured: MeasuredFigure) -> pd.DataFrame:
    """Return the mean divergence of each method with a single layer compressed, for each layer, and with all layers."""
    rows: list[tuple[str, str, str, int, float]] = []
    for sweep_run in measured.runs:
        host = experiment.make_host(sweep_run.run, sweep_run.run.load_model())
        series = [point.series for point in sweep_run.sweep.points]
        for group in sweep_run.run.groups:
            for example in group.examples:
                for name, text, layer, mean in _prompt_divergences(host, group.task, example, series, sweep_run.chains):
                    rows.append((name, group.task.id, text, layer, mean))
    return _over_prompts(pd.DataFrame(rows, columns=["series", "task", "text", "layer", "kl"]))


def _prompt_divergences(
    host: Host, task: Task, example: Example, series: Sequence[str], chains: Sequence[Chain]
) -> Iterator[tuple[str, str, int, float]]:
    """Yield (series, kind of text in words, layer, mean divergence) of one prompt, as ``_layer_divergences`` does.

    chains: the chain of each of ``series``.
    """
    encoded = host.encode(example, task)
    ids = list(encoded.ids) + list(encoded.question)
    # one pass over the prompt fills the full cache and that of each method
    caches = host.prefill(ids, [Chain()] + list(chains))
    full = caches[0]
    texts = choose_texts(host, example, full)
    if example.scored is not None:
        # the text itself continues behind its prefix
        texts["reference"] = list(example.scored.ids[len(ids) :])
    for kind, tokens in texts.items():
        for name, cache in zip(series, caches[1:], strict=True):
            for layer, mean in _layer_divergences(host.model, full, cache, torch.tensor(tokens)):
                yield name, TEXTS[kind], layer, mean


def _over_prompts(data: pd.DataFrame) -> pd.DataFrame:
    """Return the mean of ``kl`` over all rows with the same other columns, with its interval. A row is a prompt."""
    by = [column for column in data if column != "kl"]
    means: list[Place] = []
    for names, kl in data.groupby(by, sort=False)["kl"]:
        # every prompt weighs the same: the mean is the ratio of the sums of kl and of ones
        sums = np.stack([kl, np.ones(len(kl))], axis=1)
        place: Place = dict(zip(by, names, strict=True))
        means.append(place | _mean_numbers(MeanDivergence(float(kl.mean()), stats.ratio_interval(sums), len(kl))))
    return pd.DataFrame(means)


def _layer_divergences(
    model: PreTrainedModel, full: PromptCache, cache: PromptCache, tokens: Tensor
) -> list[tuple[int, float]]:
    """Return (layer, mean divergence over ``tokens``) for each layer of ``cache`` with all other layers exact.

    Layer -1 stands for all layers of ``cache`` at once.
    """
    single = [with_one_layer(full, cache, layer) for layer in range(len(full.layers))]
    means: list[float] = []
    for start in range(0, len(single), ROWS):
        forced_texts, _ = diverge(model, full, single[start : start + ROWS], tokens)
        for forced in forced_texts:
            if forced.divergence is not None:
                means.append(float(forced.divergence.kl.mean()))
    # all layers at once can diverge by more, or by less, than the sum of the single ones
    (all_layers,), _ = diverge(model, full, [cache], tokens)
    assert all_layers.divergence is not None
    return list(enumerate(means)) + [(-1, float(all_layers.divergence.kl.mean()))]


def with_samples(data: pd.DataFrame) -> pd.DataFrame:
    """Return the data with the column ``samples``, the number of texts behind each point in words.

    The texts' own continuation stands before the full cache's answer.
    """
    fewest, most = int(data["n"].min()), int(data["n"].max())
    if fewest != most:
        count = f"n = {fewest} to {most} texts"
    elif fewest == 1:
        count = "n = 1 text"
    else:
        count = f"n = {fewest} texts"
    order = list(TEXTS.values())
    data = data.sort_values("text", key=lambda texts: texts.map(order.index), kind="stable")
    return data.assign(samples=count)


def with_rounding(data: pd.DataFrame) -> pd.DataFrame:
    """Add in words the divergence that ``rounding`` alone makes."""
    return with_samples(data.assign(rounding=f"{data['floor'].max():.0e}"))


def with_methods(data: pd.DataFrame) -> pd.DataFrame:
    """Add the ``method`` of each series, which may have a budget in its name, and the ``tokens`` of a running mean."""
    starts = data["position"].nunique()
    method = data["series"].str.partition(",")[0].str.split().str[0]
    return with_samples(data.assign(method=method, tokens=_runs_in_mean(starts) * SMOOTH_LONG))


def single_layers(data: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of single layers, without those of all layers together.

    Their column ``samples`` has the number of texts, for titles.
    """
    return with_samples(data[data["layer"] >= 0])


def layer_facts(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield for each text the layer that alone diverges most when compressed, and the divergence of all together."""
    # by_layer has all layers together as layer -1
    single, all_layers = single_layers(data), data[data["layer"] < 0]
    worst = single.loc[single.groupby(["text", "series"], sort=False)["kl"].idxmax()]
    yield Fact("Layer that alone diverges most", worst.set_index(["text", "series"])["layer"].astype(float), "{:.0f}")
    yield Fact("Its divergence in nats", _with_intervals(worst, ["text", "series", "layer"]), "{}", "layer {:g}")
    yield Fact("All layers together", _with_intervals(all_layers, ["text", "series", "n"]), "{}", "n = {:g}")


def _with_intervals(data: pd.DataFrame, by: list[str]) -> pd.Series[str]:
    """Return each row's divergence in nats as text, with its interval if it has one, by the columns ``by``."""
    texts = []
    for kl, low, high in zip(data["kl"], data["low"], data["high"], strict=True):
        text = f"{kl:.3g}"
        if not math.isnan(low):
            text += f" [{low:.3g}, {high:.3g}]"
        texts.append(text)
    return pd.Series(texts, index=pd.MultiIndex.from_frame(data[by]))


def budget_facts(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield the divergences by text, method and bytes held."""
    yield Fact(
        "Nats at the per cent of bytes held", data.set_index(["text", "series", "bytes"])["kl"], "{:.3g}", "{:.1f}"
    )
    yield Fact("Rounding alone, at most", f"{data['floor'].max():.1g} nats")
    yield Fact("Examples", f"n = {int(data['n'].min())} to {int(data['n'].max())}")


def position_facts(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield the divergence over the first and the last positions."""
    for label, at in (("first", data["position"].min()), ("last", data["position"].max())):
        rows = data[data["position"] == at]
        yield Fact(
            f"Nats over the {label} {SMOOTH} positions",
            _with_intervals(rows, ["text", "series", "n"]),
            "{}",
            "n = {:g}",
        )


def by_long_position(measured: MeasuredFigure) -> pd.DataFrame:
    """Return the mean divergence on the texts' own continuations at each run of SMOOTH_LONG positions.

    running: the mean over an eighth of the positions around the run, with its interval.
    held: the most tokens that a head held by the end of the texts, prompt and continuation.
    """
    rows = []
    for point, group, samples in _compressed_cells(measured):
        # samples that were compared without decoding have no peak
        most_held = max((sample.decode_peak or 0 for sample in samples), default=0)
        texts = _texts_of_kind(samples, "reference")
        starts = range(0, _longest_text(texts), SMOOTH_LONG)
        before = _runs_in_mean(len(starts)) // 2 * SMOOTH_LONG
        after = _runs_in_mean(len(starts)) * SMOOTH_LONG - before
        for start in starts:
            run = mean_divergence(texts, start, start + SMOOTH_LONG)
            running = mean_divergence(texts, max(0, start - before), start + after)
            assert run is not None and running is not None
            place: Place = {
                "series": point.series,
                "task": group.task.id,
                "text": TEXTS["reference"],
                "held": most_held,
            }
            place |= {"position": _middle_position(start, SMOOTH_LONG)}
            rows.append(place | _mean_numbers(running) | {"kl": run.kl, "running": running.kl})
    return pd.DataFrame(rows)


def _runs_in_mean(runs: int) -> int:
    """Return over how many runs of positions a running mean goes, in a text with ``runs`` runs in all."""
    return max(1, round(runs / RUNNING))


def answer_facts(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield the divergence over four parts of the continuation, and the most tokens that a head held."""
    # four runs of positions of equal length
    quarter = pd.cut(data["position"], 4, labels=["first", "second", "third", "last"])
    for label, rows in data.groupby(quarter, observed=True):
        means = rows.groupby("series", sort=False)["kl"].mean()
        yield Fact(f"Nats over the {label} quarter", means, "{:.3g}")
    yield Fact("Tokens held at most", data.groupby("series", sort=False)["held"].max(), "{:.0f}")
    yield Fact("Texts", f"n = {int(data['n'].min())} to {int(data['n'].max())}")


CODE = {
    "fidelity/answers": Code(by_long_position, answer_facts, with_methods),
    "fidelity/budget": Code(by_budget, budget_facts, with_rounding),
    "fidelity/positions": Code(by_position, position_facts, with_samples),
    "fidelity/layers": Code(by_layer, layer_facts, single_layers),
}
