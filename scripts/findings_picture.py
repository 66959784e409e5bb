"""Draw the picture of results/README.md from the committed ranking: retrieval against divergence, a point a method.

python scripts/findings_picture.py     write results/findings.png, .svg and .csv
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from kvbench.report import looks, writers

RESULTS = Path(__file__).resolve().parent.parent / "results"
RANKING = RESULTS / "tables" / "ranking.md"
KINDS = {
    "selects tokens": "#1f77b4",
    "stores fewer bits": "#d95f02",
    "does both": "#7b3294",
}
BITS = ("q4_0_h", "turboquant", "nvfp4", "mxfp4")
BOTH = ("snapkv+fp8", "snapkv+think", "qhitter")
FIELDS = ("method", "kind", "bytes", "kl", "kl_low", "kl_high", "score", "score_low", "score_high")
NUMBER = re.compile(r"^([\d.]+)(?: \[([\d.]+), ([\d.]+)\])?$")


PIXEL = 100 / 72
"""Pixels of a point, the unit of offsets."""
PLACES = [(right, up) for up in (-3, 5, -12, 14, -21, 23, 32, -30, 41, 50, 60) for right in (5, -5)]
"""Where a name may stand, in points from its method's point: at its side first."""


@dataclass(frozen=True)
class Point:
    """One method of the ranking: bytes in per cent, divergence in nats and RULER's score, each with its interval."""

    method: str
    bytes: float
    kl: tuple[float, float, float]
    score: tuple[float, float, float]

    @property
    def kind(self) -> str:
        """Return which of KINDS the method is."""
        if self.method in BITS:
            return "stores fewer bits"
        return "does both" if self.method in BOTH else "selects tokens"

    def record(self) -> dict[str, object]:
        """Return the point as a line of the CSV."""
        return dict(zip(FIELDS, (self.method, self.kind, self.bytes, *self.kl, *self.score), strict=True))


def points(text: str) -> list[Point]:
    """Return the methods of the ranking's first table in Markdown, without the full cache."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    head = next(line for line in lines if "KL, nats" in line)
    kl, score = head.index("KL, nats"), head.index("RULER withheld")
    found = []
    for line in lines[lines.index(head) + 1 :]:
        if len(line) != len(head):  # skip the rule below the heads, and other tables
            continue
        name = line[0].split(" ")[0]
        values = [NUMBER.match(line[i]) for i in (kl, score)]
        if name != "full" and all(values):
            kl_ends, score_ends = (tuple(float(x) for x in v.groups()) for v in values if v is not None)
            found.append(Point(name, float(line[1]), kl_ends, score_ends))  # type: ignore[arg-type]
    return found


def full_score(text: str) -> float:
    """Return the full cache's score with the question withheld."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    head = next(line for line in lines if "KL, nats" in line)
    full = next(line for line in lines if line[0].split(" ")[0] == "full" and len(line) == len(head))
    return float(full[head.index("RULER withheld")].split(" ")[0])


def draw(shown: list[Point], full: float) -> Figure:
    """Return the picture: divergence on a logarithmic axis, the score above it, intervals as thin lines."""
    figure = Figure(figsize=(8.0, 5.0), layout="constrained")
    axes = figure.subplots()
    axes.axhline(full, color="0.5", linewidth=1, linestyle=":")
    axes.annotate(
        "full cache", (0.995, full), xycoords=("axes fraction", "data"), ha="right", va="bottom", color="0.35"
    )
    for kind, colour in KINDS.items():
        some = [p for p in shown if p.kind == kind]
        x, y = [p.kl[0] for p in some], [p.score[0] for p in some]
        across = [[p.kl[0] - p.kl[1] for p in some], [p.kl[2] - p.kl[0] for p in some]]
        up = [[p.score[0] - p.score[1] for p in some], [p.score[2] - p.score[0] for p in some]]
        axes.errorbar(x, y, xerr=across, yerr=up, fmt="none", ecolor=colour, elinewidth=0.7, alpha=0.18)
        axes.scatter(x, y, color=colour, s=26, label=kind, zorder=3)
    axes.set_xscale("log")
    axes.set_xlabel("divergence from the full cache on essays, nats a token (n = 8; left is nearer)")
    axes.set_ylabel("RULER at 1,024 tokens, question withheld (n = 15)")
    axes.set_ylim(-3, 80)
    axes.legend(loc="upper left", frameon=False, title="thin lines: 95 % intervals", alignment="left")
    axes.spines[["top", "right"]].set_visible(False)
    _name(axes, shown)
    axes.set_title("A quarter of the bytes: near by divergence is not near by retrieval", loc="left")
    return figure


def _name(axes: Axes, shown: list[Point]) -> None:
    """Write each method's name beside its point, at the nearest of PLACES where it covers no other name or point."""
    spots = [axes.transData.transform((p.kl[0], p.score[0])) for p in shown]
    taken = [Bbox.from_extents(x - 4, y - 4, x + 4, y + 4) for x, y in spots]
    for p, (x, y) in sorted(zip(shown, spots, strict=True), key=lambda named: -named[0].score[0]):
        name = looks.print_name(p.method)
        width, height = 4.4 * len(name) * PIXEL, 8 * PIXEL
        for right, up in PLACES:
            left = x + right * PIXEL - (width if right < 0 else 0)
            box = Bbox.from_extents(left, y + up * PIXEL, left + width, y + up * PIXEL + height)
            if not any(box.overlaps(other) for other in taken):
                break
        taken.append(box)
        far = abs(up) > 12
        axes.annotate(
            name,
            (p.kl[0], p.score[0]),
            xytext=(right, up),
            textcoords="offset points",
            fontsize=7,
            ha="right" if right < 0 else "left",
            arrowprops={"arrowstyle": "-", "color": "0.6", "linewidth": 0.5} if far else None,
        )


def main() -> int:
    """Write the picture and its numbers; return the exit status."""
    text = RANKING.read_text(encoding="utf-8")
    shown = points(text)
    (RESULTS / "findings.csv").write_text(writers.csv(FIELDS, (p.record() for p in shown)), encoding="utf-8")
    with mpl.rc_context({"svg.hashsalt": "kvbench"}):
        figure = draw(shown, full_score(text))
        for ending in ("png", "svg"):
            figure.savefig(
                RESULTS / f"findings.{ending}", dpi=150, metadata={"Date": None} if ending == "svg" else None
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
