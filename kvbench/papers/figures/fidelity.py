"""The data of kvbench's figures ``fidelity/...``: KL divergences of next-token distributions from the full cache's.

They are shown by budget, by position after the prompt, and by compressed layer.
"""

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
from kvbench.base.formatting import with_interval
from kvbench.engine.divergence import replace_layer
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
"""The kinds of text on which caches are compared (see ``forced.choose_texts``), with the words of the figures."""
SMOOTH, SMOOTH_LONG = 8, 32
"""Each drawn point is the mean over a run of so many positions; SMOOTH_LONG is for long texts."""
RUNNING = 8
"""A running mean over a long text goes over an eighth of the text: one part in RUNNING."""
Place = dict[str, str | float]
"""Values of a row of the data by the names of their columns."""
ROWS = 16
"""So many caches with one compressed layer each are compared in one batch."""


def _list_compressed_cells(measured: MeasuredFigure) -> Iterator[tuple[Point, Group, list[Sample]]]:
    for sweep_run in measured.runs:
        for point, group, cell in sweep_run.cells():
            if point.series == FULL:
                continue
            # a refused cell can have older samples, but they are not shown
            if sweep_run.run.store.refusal(cell.id) is not None:
                continue
            samples = list(sweep_run.run.samples(group, cell).values())
            if samples:
                yield point, group, samples


def measure_by_budget(measured: MeasuredFigure) -> pd.DataFrame:
    """Return the mean divergence of each point, task and kind of text, with its interval, beside tokens and bytes.

    kept, bytes: tokens kept, and bytes held at 16 bits, in per cent of the full cache's.
    kl, low, high: the mean divergence in nats a token, and its 95 % interval, NaN with too few texts.
    floor: the divergence that rounding alone makes.
    n: the number of texts.
    """
    rows = []
    for point, group, samples in _list_compressed_cells(measured):
        tokens_kept = sum(sample.kept for sample in samples)
        tokens_read = sum(sample.n for sample in samples)
        kept = 100 * tokens_kept / tokens_read
        bytes_held = share(
            payload16=sum(sample.payload16 for sample in samples),
            overhead16=sum(sample.overhead16 for sample in samples),
            full16=sum(sample.full16 for sample in samples),
        )
        for kind, text in TEXTS.items():
            summary = summarise_texts(_choose_texts_of_kind(samples, kind))
            # no sample of the task was compared on this kind of text
            if summary is None:
                continue
            # with too few texts there is no interval
            low, high = summary.ci or (math.nan, math.nan)
            rows.append(
                {
                    "series": point.series,
                    "x": point.find_x(kept),
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


def _choose_texts_of_kind(samples: Sequence[Sample], kind: str) -> list[TextFidelity]:
    return [sample.fidelity[kind] for sample in samples if sample.fidelity and kind in sample.fidelity]


def measure_by_position(measured: MeasuredFigure) -> pd.DataFrame:
    """Return the mean divergence over texts for each run of SMOOTH positions after the prompt, with its interval.

    There is a row for each point, task, kind of text and run of positions.

    position: the middle of the run. The first token after the prompt has position 1.
    n: the number of texts that are long enough to reach the run.
    """
    rows: list[Place] = []
    for point, group, samples in _list_compressed_cells(measured):
        for kind, text in TEXTS.items():
            texts = _choose_texts_of_kind(samples, kind)
            for start in range(0, _count_positions(texts), SMOOTH):
                mean = mean_divergence(texts, start, start + SMOOTH)
                # the longest text reaches every run
                assert mean is not None
                place: Place = {"series": point.series, "task": group.task.id, "text": text}
                rows.append(place | {"position": _find_middle(start, SMOOTH)} | _make_mean_columns(mean))
    return pd.DataFrame(rows)


def _count_positions(texts: Sequence[TextFidelity]) -> int:
    return max((len(text.kl) for text in texts), default=0)


def _find_middle(start: int, length: int) -> float:
    return start + (length + 1) / 2


def _make_mean_columns(mean: MeanDivergence) -> Place:
    """Return the columns kl, low, high and n of a mean divergence. With too few texts low and high are NaN."""
    low, high = mean.ci or (math.nan, math.nan)
    return {"kl": mean.kl, "low": low, "high": high, "n": mean.n}


def measure_by_layer(measured: MeasuredFigure) -> pd.DataFrame:
    """Return the mean divergence over prompts of each method with one layer compressed, for each layer in turn.

    There is a row for each method, task, kind of text and layer. Layer -1 stands for all layers compressed at once.
    This loads the model and reads the prompts again, since the store has no divergences of single layers.
    """
    rows: list[tuple[str, str, str, int, float]] = []
    for sweep_run in measured.runs:
        host = experiment.make_host(sweep_run.run, sweep_run.run.load_model())
        series = [point.series for point in sweep_run.sweep.points]
        for group in sweep_run.run.groups:
            for example in group.examples:
                for name, text, layer, mean in _measure_prompt(host, group.task, example, series, sweep_run.chains):
                    rows.append((name, group.task.id, text, layer, mean))
    return _average_over_prompts(pd.DataFrame(rows, columns=["series", "task", "text", "layer", "kl"]))


def _measure_prompt(
    host: Host, task: Task, example: Example, series: Sequence[str], chains: Sequence[Chain]
) -> Iterator[tuple[str, str, int, float]]:
    encoded = host.encode(example, task)
    # a question that a run withholds until the cache is compressed is a part of the prompt here
    ids = list(encoded.ids) + list(encoded.question)
    # one pass over the prompt fills the full cache and that of each method
    full, *compressed = host.prefill(ids, [Chain()] + list(chains))
    texts = choose_texts(host, example, full)
    if example.scored is not None:
        # a scored text has no reference answer: its own continuation behind the prompt takes the place of one
        texts["reference"] = list(example.scored.ids[len(ids) :])
    for kind, tokens in texts.items():
        for name, cache in zip(series, compressed, strict=True):
            for layer, mean in _measure_layers(host.model, full, cache, torch.tensor(tokens)):
                yield name, TEXTS[kind], layer, mean


def _average_over_prompts(data: pd.DataFrame) -> pd.DataFrame:
    place_columns = [column for column in data if column != "kl"]
    means: list[Place] = []
    for place_values, kl in data.groupby(place_columns, sort=False)["kl"]:
        # every prompt weighs the same, so the mean is sum(kl) / sum(1), and it gets the interval of such a ratio
        terms = np.stack([kl, np.ones(len(kl))], axis=1)
        mean = MeanDivergence(float(kl.mean()), stats.ratio_interval(terms), len(kl))
        place: Place = dict(zip(place_columns, place_values, strict=True))
        means.append(place | _make_mean_columns(mean))
    return pd.DataFrame(means)


def _measure_layers(
    model: PreTrainedModel, full: PromptCache, cache: PromptCache, tokens: Tensor
) -> list[tuple[int, float]]:
    single_layer_caches = [replace_layer(full, cache, layer) for layer in range(len(full.layers))]
    means: list[float] = []
    for start in range(0, len(single_layer_caches), ROWS):
        # the second result is the divergence by rounding alone, which this figure does not show
        forced_texts, _ = diverge(model, full, single_layer_caches[start : start + ROWS], tokens)
        for forced in forced_texts:
            # ``diverge`` compares every cache that it is given
            assert forced.divergence is not None
            means.append(float(forced.divergence.kl.mean()))
    # all layers at once can diverge by more, or by less, than the sum of the single ones
    (all_layers,), _ = diverge(model, full, [cache], tokens)
    assert all_layers.divergence is not None
    return list(enumerate(means)) + [(-1, float(all_layers.divergence.kl.mean()))]


def add_samples(data: pd.DataFrame) -> pd.DataFrame:
    """Return the data with a column ``samples`` for the note above the figure, such as ``n = 4 to 8 texts``.

    Rows about reference texts come first, since panels are drawn in the order of the rows.

    data: the data of a figure of divergences.
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


def add_rounding(data: pd.DataFrame) -> pd.DataFrame:
    """Return the data with two columns for the note above the figure.

    samples: the number of texts in words, such as ``n = 4 to 8 texts``.
    rounding: the largest divergence that rounding alone makes, as text.

    data: the rows of ``measure_by_budget``.
    """
    largest_rounding = f"{data['floor'].max():.0e}"
    return add_samples(data.assign(rounding=largest_rounding))


def add_methods(data: pd.DataFrame) -> pd.DataFrame:
    """Return the data with columns for the panels' titles and the note above the figure.

    method: the first word of the series: its method, without the budget that may follow.
    tokens: the number of positions that a running mean goes over.
    samples: the number of texts in words, such as ``n = 4 to 8 texts``.

    data: the rows of ``measure_by_long_position``.
    """
    # "snapkv, budget" and "h2o orig" are series of snapkv and of h2o
    method = data["series"].str.partition(",")[0].str.split().str[0]
    # the data have one position for each run of SMOOTH_LONG positions
    runs_in_mean = _count_runs_in_mean(data["position"].nunique())
    return add_samples(data.assign(method=method, tokens=runs_in_mean * SMOOTH_LONG))


def choose_single_layers(data: pd.DataFrame) -> pd.DataFrame:
    """Return the rows about single layers, without those about all layers at once, with a column ``samples``.

    data: the rows of ``measure_by_layer``.
    """
    return add_samples(data[data["layer"] >= 0])


def state_layers(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield three facts by kind of text and method.

    They are the layer that diverges most if it alone is compressed, the divergence with this layer compressed, and the
    divergence with all layers compressed.

    data: the rows of ``measure_by_layer``.
    """
    # layer -1 stands for all layers together
    single, all_layers = choose_single_layers(data), data[data["layer"] < 0]
    worst = single.loc[single.groupby(["text", "series"], sort=False)["kl"].idxmax()]
    yield Fact("Layer that alone diverges most", worst.set_index(["text", "series"])["layer"].astype(float), "{:.0f}")
    yield Fact("Its divergence in nats", _format_intervals(worst, ["text", "series", "layer"]), "{}", "layer {:g}")
    yield Fact("All layers together", _format_intervals(all_layers, ["text", "series", "n"]), "{}", "n = {:g}")


def _format_intervals(data: pd.DataFrame, index_columns: list[str]) -> pd.Series[str]:
    texts = []
    for kl, low, high in zip(data["kl"], data["low"], data["high"], strict=True):
        ci = None if math.isnan(low) else (low, high)
        texts.append(with_interval(kl, ci, 3, significant=True, gap=" "))
    return pd.Series(texts, index=pd.MultiIndex.from_frame(data[index_columns]))


def state_budgets(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield three facts: the divergences, the largest divergence by rounding alone, and the number of examples.

    Divergences are in nats, by kind of text, method and bytes held in per cent of the full cache's.

    data: the rows of ``measure_by_budget``.
    """
    divergences = data.set_index(["text", "series", "bytes"])["kl"]
    yield Fact("Nats at the per cent of bytes held", divergences, form="{:.3g}", at="{:.1f}")
    yield Fact("Rounding alone, at most", f"{data['floor'].max():.1g} nats")
    yield Fact("Examples", f"n = {int(data['n'].min())} to {int(data['n'].max())}")


def state_positions(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield the divergences, by kind of text and method, over the first and over the last SMOOTH positions.

    data: the rows of ``measure_by_position``.
    """
    ends = {"first": data["position"].min(), "last": data["position"].max()}
    for label, position in ends.items():
        rows = data[data["position"] == position]
        divergences = _format_intervals(rows, ["text", "series", "n"])
        yield Fact(f"Nats over the {label} {SMOOTH} positions", divergences, form="{}", at="n = {:g}")


def measure_by_long_position(measured: MeasuredFigure) -> pd.DataFrame:
    """Return the mean divergence on long texts' own continuations for each run of SMOOTH_LONG positions.

    There is a row for each point, task and run.

    kl: the mean over the run.
    running: the mean over an eighth of all positions, around the run.
    low, high: the 95 % interval of ``running``, NaN with too few texts.
    n: the number of texts behind ``running``.
    held: the most tokens of prompt and continuation that any head held; 0 if nothing was decoded.
    """
    rows = []
    for point, group, samples in _list_compressed_cells(measured):
        most_held = max((sample.decode_peak or 0 for sample in samples), default=0)
        texts = _choose_texts_of_kind(samples, "reference")
        starts = range(0, _count_positions(texts), SMOOTH_LONG)
        # a running mean goes over the run itself, ``before`` positions in front of it, and about as many behind it
        runs_in_mean = _count_runs_in_mean(len(starts))
        before = runs_in_mean // 2 * SMOOTH_LONG
        after = runs_in_mean * SMOOTH_LONG - before
        for start in starts:
            run = mean_divergence(texts, start, start + SMOOTH_LONG)
            running = mean_divergence(texts, max(0, start - before), start + after)
            # the longest text reaches every run
            assert run is not None and running is not None
            place: Place = {
                "series": point.series,
                "task": group.task.id,
                "text": TEXTS["reference"],
                "held": most_held,
                "position": _find_middle(start, SMOOTH_LONG),
            }
            rows.append(place | _make_mean_columns(running) | {"kl": run.kl, "running": running.kl})
    return pd.DataFrame(rows)


def _count_runs_in_mean(runs: int) -> int:
    return max(1, round(runs / RUNNING))


def state_answers(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield facts by method: the mean divergence in each quarter of the continuation, and the most tokens held.

    The last fact is the number of texts.

    data: the rows of ``measure_by_long_position``.
    """
    # cut the range of positions into four intervals of equal length
    quarter = pd.cut(data["position"], bins=4, labels=["first", "second", "third", "last"])
    for label, rows in data.groupby(quarter, observed=True):
        means = rows.groupby("series", sort=False)["kl"].mean()
        yield Fact(f"Nats over the {label} quarter", means, "{:.3g}")
    yield Fact("Tokens held at most", data.groupby("series", sort=False)["held"].max(), "{:.0f}")
    yield Fact("Texts", f"n = {int(data['n'].min())} to {int(data['n'].max())}")


CODE = {
    "fidelity/answers": Code(measure_by_long_position, state_answers, add_methods),
    "fidelity/budget": Code(measure_by_budget, state_budgets, add_rounding),
    "fidelity/positions": Code(measure_by_position, state_positions, add_samples),
    "fidelity/layers": Code(measure_by_layer, state_layers, choose_single_layers),
}
