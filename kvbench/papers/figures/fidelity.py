"""Divergences from the full cache by budget, by position of the continuation, and by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd
import torch

from kvbench.engine.divergence import with_one_layer
from kvbench.engine.likelihood import diverge
from kvbench.methods.core.chain import Chain
from kvbench.papers.figures.figure import Code, Fact
from kvbench.papers.figures.measured import FULL, MeasuredFigure, Point
from kvbench.plan.cells import Group
from kvbench.run import experiment
from kvbench.run.forced import texts_of
from kvbench.store.fidelity import FidelitySummary, TextFidelity, summarise_texts
from kvbench.store.results import Sample, share

TEXTS = {"reference": "reference text", "greedy": "full cache's answer"}
ALL = "all layers"
SMOOTH, SMOOTH_LONG = 8, 32
"""Positions of which the mean is drawn."""
ROWS = 16
"""Caches with one layer compressed that are compared at once."""


def _cells(measured: MeasuredFigure) -> Iterator[tuple[Point, Group, list[Sample]]]:
    """Yield each measured cell but the full cache's, with the samples of this run."""
    for ran in measured.ran:
        for point, group, cell in ran.cells():
            samples = [*ran.run.samples(group, cell).values()]
            if point.series != FULL and samples and ran.run.store.refusal(cell.id) is None:
                yield point, group, samples


def by_budget(measured: MeasuredFigure) -> pd.DataFrame:
    """Return the mean divergence of each method and task with its interval, beside tokens kept and bytes held."""
    rows = []
    for point, group, samples in _cells(measured):
        kept = 100 * sum(s.kept for s in samples) / sum(s.n for s in samples)
        held = (sum(values) for values in zip(*((s.payload16, s.overhead16, s.full16) for s in samples), strict=True))
        place = {
            "series": point.series,
            "x": point.x if point.x == point.x else float(f"{kept:.2g}"),
            "task": group.task.id,
            "kept": kept,
            "bytes": share(*held),
        }
        for kind, text in TEXTS.items():
            summary = summarise_texts([s.fidelity[kind] for s in samples if s.fidelity and kind in s.fidelity])
            if summary is not None:
                rows.append({**place, "text": text, **_numbers(summary)})
    return pd.DataFrame(rows)


def _numbers(summary: FidelitySummary) -> dict[str, float]:
    low, high = summary.ci or (float("nan"), float("nan"))
    return {"kl": summary.kl_mean, "low": low, "high": high, "floor": summary.floor, "n": summary.n}


def by_position(measured: MeasuredFigure, smooth: int = SMOOTH) -> pd.DataFrame:
    """Return the mean divergence over prompts at each run of ``smooth`` positions after the prompt.

    held: the most tokens that a head held by the end of the texts, prompt and continuation.
    """
    rows = []
    for point, group, samples in _cells(measured):
        for kind, text in TEXTS.items():
            texts = [s.fidelity[kind] for s in samples if s.fidelity and kind in s.fidelity]
            held = max((s.decode_peak or 0 for s in samples), default=0)
            place = {"series": point.series, "task": group.task.id, "text": text, "n": len(texts), "held": held}
            rows += [{**place, "position": at, "kl": mean} for at, mean in _runs(texts, smooth)]
    return pd.DataFrame(rows)


def _runs(texts: Sequence[TextFidelity], smooth: int) -> Iterator[tuple[float, float]]:
    """Yield the middle and the mean divergence of each run of positions that some text reaches."""
    for start in range(0, max((len(t.kl) for t in texts), default=0), smooth):
        values = [x for t in texts for x in t.kl[start : start + smooth]]
        yield start + (smooth + 1) / 2, sum(values) / len(values)


def by_layer(measured: MeasuredFigure) -> pd.DataFrame:
    """Return the mean divergence of each method with one layer compressed and all others exact, and with all."""
    rows: list[dict[str, Any]] = []
    for ran in measured.ran:
        model = ran.run.load_model()
        host = experiment.make_host(ran.run, model)
        for group in ran.run.groups:
            for example in group.examples:
                encoded = host.encode(example, group.task)
                ids = [*encoded.ids, *encoded.question]
                full, *caches = host.prefill(ids, [Chain(), *ran.chains])
                texts = texts_of(host, example, full)
                if example.tokens:
                    texts["reference"] = [*example.tokens[len(ids) :]]
                for kind, tokens in texts.items():
                    for point, cache in zip(ran.sweep.points, caches, strict=True):
                        single = [with_one_layer(full, cache, i) for i in range(len(full.layers))]
                        means = [
                            float(forced.divergence.kl.mean())
                            for i in range(0, len(single), ROWS)
                            for forced in diverge(model, full, single[i : i + ROWS], torch.tensor(tokens))[0]
                            if forced.divergence is not None
                        ]
                        (whole,) = diverge(model, full, [cache], torch.tensor(tokens))[0]
                        assert whole.divergence is not None
                        place = {
                            "series": point.series,
                            "task": group.task.id,
                            "text": TEXTS[kind],
                            "prompt": example.id,
                        }
                        rows += [{**place, "layer": layer, "kl": mean} for layer, mean in enumerate(means)]
                        rows.append({**place, "layer": -1, "kl": float(whole.divergence.kl.mean())})
    data = pd.DataFrame(rows)
    by = ["series", "task", "text", "layer"]
    return data.groupby(by, sort=False)["kl"].agg(kl="mean", n="count").reset_index()


def with_samples(data: pd.DataFrame) -> pd.DataFrame:
    """Return the data with the column ``samples``, the number of texts behind each point in words, for titles."""
    counts = dict.fromkeys((int(data["n"].min()), int(data["n"].max())))
    return data.assign(samples=f"n = {' to '.join(map(str, counts))}")


def single_layers(data: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of single layers, with the number of texts for titles."""
    return with_samples(data[data["layer"] >= 0])


def layer_facts(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield for each text the layer whose compression alone diverges most, and the divergence of all together."""
    single, whole = single_layers(data), data[data["layer"] < 0]
    worst = single.loc[single.groupby(["text", "series"], sort=False)["kl"].idxmax()]
    yield Fact("Layer that alone diverges most", worst.set_index(["text", "series"])["layer"].astype(float), "{:.0f}")
    yield Fact("Its divergence in nats", worst.set_index(["text", "series", "layer"])["kl"], "{:.3g}", "layer {:g}")
    yield Fact("All layers together", whole.set_index(["text", "series", "n"])["kl"], "{:.3g}", "n = {:g}")


def budget_facts(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield the divergences by text, method and bytes held."""
    yield Fact(
        "Nats at the per cent of bytes held", data.set_index(["text", "series", "bytes"])["kl"], "{:.3g}", "{:.1f}"
    )
    yield Fact("Floor, at most", f"{data['floor'].max():.1g} nats")
    yield Fact("Examples", f"n = {int(data['n'].min())} to {int(data['n'].max())}")


def position_facts(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield the divergence over the first and the last positions."""
    for label, at in (("first", data["position"].min()), ("last", data["position"].max())):
        rows = data[data["position"] == at]
        yield Fact(f"Nats over the {label} {SMOOTH} positions", rows.set_index(["text", "series"])["kl"], "{:.3g}")


def by_long_position(measured: MeasuredFigure) -> pd.DataFrame:
    """Return what ``by_position`` does on the texts' own continuations, over longer runs."""
    data = by_position(measured, SMOOTH_LONG)
    return data[data["text"] == TEXTS["reference"]].reset_index(drop=True)


def answer_facts(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield the divergence over four parts of the continuation, and the most tokens that a head held."""
    quarter = pd.cut(data["position"], 4, labels=["first", "second", "third", "last"])
    for label, rows in data.groupby(quarter, observed=True):
        means = rows.groupby("series", sort=False)["kl"].mean()
        yield Fact(f"Nats over the {label} quarter", means, "{:.3g}")
    yield Fact("Tokens held at most", data.groupby("series", sort=False)["held"].max(), "{:.0f}")
    yield Fact("Texts", f"n = {int(data['n'].min())} to {int(data['n'].max())}")


CODE = {
    "fidelity/answers": Code(by_long_position, answer_facts, with_samples),
    "fidelity/budget": Code(by_budget, budget_facts, with_samples),
    "fidelity/positions": Code(by_position, position_facts, with_samples),
    "fidelity/layers": Code(by_layer, layer_facts, single_layers),
}
