"""Draw the picture of results/README.md from the committed suite: retrieval against divergence, a point a method.

python scripts/findings_picture.py     write results/findings.png, .svg, .csv and .txt
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path

from matplotlib.figure import Figure
from scipy.stats import kendalltau

from kvbench.base.formatting import format_number, with_interval
from kvbench.report import looks, style, writers
from kvbench.store import archive
from kvbench.store.store import ResultStore
from kvbench.suite import definition, folder, scores
from kvbench.suite.definition import Suite, SuitePart
from kvbench.tasks.metrics import stats

RESULTS = Path(__file__).resolve().parent.parent / "results"
FOLDER = RESULTS / "suite" / "retain-v1-mini" / "kvbench"
KINDS = {
    "selects tokens": style.BLUE,
    "stores fewer bits": style.VERMILLION,
    "does both": style.PALETTE[2],
}
"""The colour of each kind of method."""
BITS = ("q4_0", "q4_0_h", "turboquant", "nvfp4", "kivi")
BOTH = ("snapkv+fp8", "snapkv+think")
CONTROLS = ("random", "random keep_window=32", "firsttokens")
"""Rows that are no methods. They are drawn, and left out of correlations."""
ABOUT_A_QUARTER = (20.0, 30.0)
"""The bytes, in per cent of the full cache's, of the rows that are drawn."""
NEAR, RETRIEVES = 0.07, 38
"""The divergence and the score between which the methods fall into two groups. They were chosen after the fact."""
FIELDS = ("method", "kind", "bytes", "kl", "kl_low", "kl_high", "score", "score_low", "score_high")


@dataclass(frozen=True, kw_only=True)
class Point:
    """One row of the suite: its mean divergence in nats and its RULER score, each with the ends of its interval.

    bytes: in per cent of the full cache's at 16 bits.
    """

    method: str
    bytes: float
    kl: tuple[float, float, float]
    score: tuple[float, float, float]

    @property
    def kind(self) -> str:
        """Return which of KINDS the method is."""
        if self.method in BITS:
            return "stores fewer bits"
        if self.method in BOTH:
            return "does both"
        return "selects tokens"

    def record(self) -> dict[str, object]:
        """Return the point as a line of the CSV, with as many digits as texts cite."""
        numbers = [format_number(self.bytes)]
        numbers += [f"{number:.2g}" for number in self.kl]
        numbers += [f"{number:.1f}" for number in self.score]
        return dict(zip(FIELDS, (self.method, self.kind, *numbers), strict=True))


def read_points(place: Path) -> tuple[list[Point], tuple[float, float, float]]:
    """Return the committed rows at about a quarter of the bytes, and the full cache's RULER score with its interval."""
    rows = folder.read_rows(place)
    suite = definition.load(rows[0]["suite"])
    parts = {part.name: part for part in suite.parts}
    least, most = ABOUT_A_QUARTER
    (full_row,) = [row for row in rows if row["role"] == "full"]
    shown = [row for row in rows if row is not full_row and least <= row["bytes"] <= most]
    cells = {cell for row in [full_row, *shown] for part in row["results"].values() for cell in part.values()}
    with tempfile.TemporaryDirectory() as temporary:
        store = ResultStore(Path(temporary))
        archive.unpack(place / folder.SAMPLES, store, wanted=cells)
        full = _mean(suite, parts["retrieval"], full_row, store, scale=100)
        found = []
        for row in shown:
            name = row["name"].split(" ")[0]
            if "keep_window" in row["name"]:
                name = row["name"]
            # the score of a divergence is -ln KL, so that its highest value is the lowest divergence
            mean, low, high = _mean(suite, parts["distance"], row, store)
            point = Point(
                method=name,
                bytes=row["bytes"],
                kl=(exp(-mean), exp(-high), exp(-low)),
                score=_mean(suite, parts["retrieval"], row, store, scale=100),
            )
            found.append(point)
    return found, full


def _mean(
    suite: Suite, part: SuitePart, row: folder.Line, store: ResultStore, scale: float = 1
) -> tuple[float, float, float]:
    """Return a row's mean score in a part over its tasks, and the ends of its 95 % interval, times ``scale``."""
    samples = {column: store.samples(cell) for column, cell in row["results"][part.name].items()}
    tasks = [list(task.values()) for task in scores.score_prompts(part, samples, suite.floor).values()]
    bounds: tuple[float, float] | None = (0.0, 1.0)
    if part.measure == definition.KL:
        bounds = None
    mean, interval = stats.mean_over_tasks(tasks, bounds)
    assert interval is not None, "each part has enough prompts for an interval"
    return scale * mean, scale * interval[0], scale * interval[1]


def rank_correlation(shown: Sequence[Point]) -> tuple[float, float]:
    """Return (Kendall's tau, p) between nearness by divergence and retrieval over the points."""
    result = kendalltau([-p.kl[0] for p in shown], [p.score[0] for p in shown])
    return float(result.statistic), float(result.pvalue)


def draw(shown: Sequence[Point], full: tuple[float, float, float]) -> Figure:
    """Return the picture: divergence to the right, retrieval upwards, intervals as lines, the full cache as a band."""
    figure = style.canvas(7.0, 5.2)
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.axhspan(full[1], full[2], color=style.PALE, alpha=0.5, linewidth=0)
    axes.axhline(full[0], color=style.GREY, linewidth=0.8)
    axes.annotate("full cache", (0.995, full[0]), xycoords=("axes fraction", "data"), ha="right", va="bottom")
    for kind, colour in KINDS.items():
        some = [p for p in shown if p.kind == kind]
        x, y = [p.kl[0] for p in some], [p.score[0] for p in some]
        across = [[p.kl[0] - p.kl[1] for p in some], [p.kl[2] - p.kl[0] for p in some]]
        up = [[p.score[0] - p.score[1] for p in some], [p.score[2] - p.score[0] for p in some]]
        axes.errorbar(x, y, xerr=across, yerr=up, fmt="none", ecolor=colour, elinewidth=0.6, alpha=0.25)
        axes.scatter(x, y, color=colour, s=16, label=kind, zorder=3)
    axes.set_xlabel("divergence of the next-token distribution from the full cache's, in nats a token (n = 24 texts)")
    axes.set_ylabel("RULER, question withheld (n = 176 prompts)")
    axes.set_xticks([0.03, 0.1, 0.3, 1], ["0.03", "0.1", "0.3", "1"])
    axes.set_xticks([], minor=True)
    axes.legend(loc="upper right", bbox_to_anchor=(1.0, 0.85), title="lines: 95 % intervals", alignment="left")
    axes.set_title("At a quarter of the bytes, a small KL divergence does not mean good retrieval", loc="left")
    # names are placed by where the points lie on the page
    style.lay_out(figure)
    spots = [(p.kl[0], p.score[0]) for p in shown]
    names = [(*spot, looks.name_methods(p.method), KINDS[p.kind]) for spot, p in zip(spots, shown, strict=True)]
    style.write_names(axes, names, spots)
    return figure


def describe(shown: Sequence[Point], full: tuple[float, float, float]) -> list[str]:
    """Return lines for readers: the full cache's score, and how divergence and retrieval go together."""
    methods = [p for p in shown if p.method not in CONTROLS]
    selectors = [p for p in methods if p.kind == "selects tokens"]
    lines = [f"RULER, question withheld: the full cache scores {with_interval(full[0], full[1:], gap=' ')}."]
    for some, what in ((methods, "methods"), (selectors, "methods that select tokens")):
        tau, p_value = rank_correlation(some)
        lines.append(
            f"Nearness by divergence and RULER over {len(some)} {what}: Kendall's tau {tau:.2f}, p {p_value:.2f}."
        )
    near, far = [p for p in methods if p.kl[0] < NEAR], [p for p in methods if p.kl[0] >= NEAR]
    lines.append(
        f"Of {len(near)} methods below {NEAR} nats a token, {sum(p.score[0] >= RETRIEVES for p in near)} score "
        f"{RETRIEVES} or more; the best of the {len(far)} others scores {format_number(max(p.score[0] for p in far))}."
    )
    return lines


def files_of_numbers(shown: Sequence[Point], full: tuple[float, float, float]) -> dict[str, str]:
    """Return the files of numbers, findings.csv and findings.txt, by their names."""
    # the full cache has no divergence from itself
    exact = Point(method="full", bytes=100, kl=(0, 0, 0), score=full).record() | {"kind": "full cache"}
    table = writers.csv(FIELDS, [exact, *(p.record() for p in shown)])
    return {"findings.csv": table, "findings.txt": "\n".join(describe(shown, full)) + "\n"}


def main() -> int:
    """Write the picture, its numbers and its text; return the exit status."""
    shown, full = read_points(FOLDER)
    for name, text in files_of_numbers(shown, full).items():
        (RESULTS / name).write_text(text, encoding="utf-8")
    with style.styled():
        figure = draw(shown, full)
        figure.savefig(RESULTS / "findings.png", dpi=250)
        figure.savefig(RESULTS / "findings.svg", metadata={"Date": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
