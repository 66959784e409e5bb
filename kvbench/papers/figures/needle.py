"""Needle in a haystack: score by length of the text and depth of the needle, a map per method."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure as Canvas

from kvbench.metrics import metric
from kvbench.papers.figures.measured import MeasuredFigure, Point, ResultFigure, Sweep
from kvbench.tables import heatmap, style

METHODS: dict[str, dict[str, Any]] = {
    "streamingllm": {"kv_ratio": 0.25},
    "h2o": {"kv_ratio": 0.25},
    "snapkv": {"kv_ratio": 0.25},
    "snapkv+think": {"kv_ratio": 0.25, "ratio": 0.5},
}
COLUMNS = ("series", "length", "depth", "score", "n")


def maps(measured: MeasuredFigure) -> pd.DataFrame:
    """Mean score and number of prompts of every method, length and depth."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for ran in measured.ran:
        for point, group, cell in ran.cells():
            mine = {e.id for e in group.examples}
            samples = [s for i, s in ran.run.store.samples(cell.id).items() if i in mine]
            if group.task.category == "needle" and samples and ran.run.store.refusal(cell.id) is None:
                found.setdefault(point.series, []).extend(heatmap.points(samples, metric(group.task.metric).show))
    rows = [(name, *row) for name, found_of in found.items() for row in heatmap.heat_map(found_of).rows()]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def draw_maps(data: pd.DataFrame) -> Canvas:
    """A map per method in the order of the data, with its mean score."""
    heats = {}
    for name, rows in data.groupby("series", sort=False):
        each = rows.loc[rows.index.repeat(rows["n"].astype(int))]
        heats[str(name)] = heatmap.heat_map(list(each[["length", "depth", "score"]].itertuples(index=False, name=None)))
    fig = style.canvas(style.PAGE, 1.1 + 0.16 * data["depth"].nunique())
    axes = fig.subplots(1, len(heats), sharey=True, squeeze=False)[0]
    image: Any = None
    for i, (ax, (name, heat)) in enumerate(zip(axes, heats.items(), strict=True)):
        mean = (heat.scores * heat.counts).sum() / heat.counts.sum() if heat.counts.all() else float("nan")
        image = heatmap.panel(ax, heat, f"({chr(97 + i)}) {name}: {mean:.1f}")
    axes[0].set_ylabel("depth, %")
    bar = fig.colorbar(image, ax=list(axes), aspect=18, pad=0.01)
    bar.outline.set_visible(False)
    counts = sorted({int(n) for n in data["n"]})
    bar.set_label(f"score, n = {' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} a field")
    return fig


def say_maps(data: pd.DataFrame) -> str:
    """Mean score by method, and where the needle is lost."""
    parts = []
    for name, rows in data.groupby("series", sort=False):
        mean = (rows["score"] * rows["n"]).sum() / rows["n"].sum()
        by_depth = rows.groupby("depth").apply(lambda r: (r["score"] * r["n"]).sum() / r["n"].sum())
        lost = ", ".join(f"{d:g} %" for d, s in by_depth.items() if s < 50)
        parts.append(f"{name} {mean:.1f}" + (f" (below 50 at depths {lost})" if lost else ""))
    fields = data.groupby(["length", "depth"]).ngroups
    return f"Mean scores: {'; '.join(parts)}; {int(data['n'].min())} prompts in each of {fields} fields."


FIGURES = (
    ResultFigure(
        id="needle/heatmap",
        title="needle in a haystack by length and depth, a map per method",
        shows="Mean score at every length of the text (real essays) and depth of the needle, the full cache and "
        "methods that keep a quarter of the tokens (ThinK behind SnapKV drops half of the key channels, too); above "
        "each map its mean.",
        claim="ThinK, figure 6: behind SnapKV it keeps the needle as well as SnapKV alone (accuracies of 78.6 and "
        "77.8, 90.8 and 90.4 at 128 and 1,024 tokens of Mistral-7B); StreamingLLM finds it only where its window "
        "reaches.",
        unsaid="The paper does not print its needle: on the tiny model it is a number that its own tasks ask for, on "
        "others the classical sentence, to be completed as in papers' scripts, where an empty answer has 60. "
        "phrasing=, lengths=, depths= and repeats= choose otherwise.",
        columns=COLUMNS,
        compute=maps,
        draw=draw_maps,
        finding=say_maps,
        each=12,
        sweeps=(
            Sweep(
                tuple(Point(m, 25, m, knobs) for m, knobs in METHODS.items()),
                dataset="needle",
                arguments=("lengths=256,512,1024,2048", "depths=0,20,40,60,80,100", "repeats=2"),
                pretrained=("phrasing=completion",),
            ),
        ),
    ),
)
