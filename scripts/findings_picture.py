"""Draw the picture of results/README.md from the committed suite: retrieval against divergence, a point a method.

python scripts/findings_picture.py     write results/findings.png, .svg, .csv and .txt
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from scipy.stats import kendalltau

from kvbench.base.formatting import format_number, format_significant, with_interval
from kvbench.report import looks, style, writers
from kvbench.store import archive
from kvbench.store.store import ResultStore
from kvbench.suite import definition, folder, scores
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
NUMBERS = ("kl", "score", "reading", "share", "minus_full", "minus_control")
FIELDS = ("method", "kind", "bytes", *(f"{name}{end}" for name in NUMBERS for end in ("", "_low", "_high")))
PAIRS = (
    ("retrieval", 4, "nvfp4", "keydiff"),
    ("retrieval", 4, "kvzip", "snapkv+fp8"),
    *(("reading", 32, a, b) for a in ("streamingllm", "chunkkv", "snapkv") for b in ("kvzip", "random keep_window=32")),
    *(("reading", 4, a, "keydiff") for a in ("streamingllm", "chunkkv", "snapkv", "kvzip")),
    ("distance", 4, "kvzip", "snapkv+fp8"),
)
"""The pairs of rows that the findings compare: the part, the budget 1/d of the first row, and both rows."""

Interval = tuple[float, float, float]
"""A mean and the ends of its 95 % interval."""
PromptScores = Mapping[str, Mapping[str, float]]
"""A row's scores in one part by task and prompt."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One row of the suite, with the ends of the interval of each number.

    bytes: in per cent of the full cache's at 16 bits.
    kl: the mean divergence in nats.
    score: the RULER score, question withheld.
    reading: S in the part *reading*.
    share: the RULER score in per cent of the full cache's.
    minus_full, minus_control: the paired differences of RULER scores from the full cache and the negative control.
    """

    method: str
    bytes: float
    kl: Interval
    score: Interval
    reading: Interval
    share: Interval
    minus_full: Interval
    minus_control: Interval

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
        numbers += [format_significant(number, 2) for number in self.kl]
        for some in (self.score, self.reading, self.share, self.minus_full, self.minus_control):
            numbers += [f"{number:.1f}" for number in some]
        return dict(zip(FIELDS, (self.method, self.kind, *numbers), strict=True))


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What the findings say of the committed suite.

    points: the rows at about a quarter of the bytes.
    full: the full cache's RULER score.
    pairs: the mean difference of each of PAIRS: in points, or of divergences as the ratio of the second to the first.
    """

    points: list[Point]
    full: Interval
    pairs: list[Interval]


def read_findings(place: Path) -> Findings:
    """Return the numbers of the findings from the committed rows and samples in ``place``."""
    rows = folder.read_rows(place)
    suite = definition.load(rows[0]["suite"])
    parts = {part.name: part for part in suite.parts}
    least, most = ABOUT_A_QUARTER
    (full_row,) = [row for row in rows if row["role"] == "full"]
    shown = [row for row in rows if row is not full_row and least <= row["bytes"] <= most]
    row_of = {(_name(row), row["budget"]): row for row in rows if row is not full_row}
    (control_row,) = [row for row in shown if row["role"] == definition.NEGATIVE]
    # a format of four bits takes more than a quarter and stands at half of the bytes
    of_pairs = [
        (part, row_of.get((a, d)) or row_of[a, 2], row_of.get((b, d)) or row_of[b, 2]) for part, d, a, b in PAIRS
    ]
    wanted = [(row, part) for row in [full_row, *shown] for part in ("retrieval", "distance") if part in row["results"]]
    wanted += [(row, part) for part, *both in of_pairs for row in both]
    with tempfile.TemporaryDirectory() as temporary:
        store = ResultStore(Path(temporary))
        cells = {cell for row, part in wanted for cell in row["results"][part].values()}
        archive.unpack(place / folder.SAMPLES, store, wanted=cells, temporary=True)

        def read(row: folder.Line, part: str) -> PromptScores:
            samples = {column: store.samples(cell) for column, cell in row["results"][part].items()}
            return scores.score_prompts(parts[part], samples, suite.floor)

        return Findings(
            points=[_make_point(row, read, full_row, control_row) for row in shown],
            full=_mean(read(full_row, "retrieval"), 100),
            pairs=[_compare(read(a, part), read(b, part), part) for part, a, b in of_pairs],
        )


def _name(row: folder.Line) -> str:
    """Return a row's method, with the option that tells the two random controls apart."""
    return str(row["name"] if "keep_window" in row["name"] else row["name"].split(" ")[0])


def _make_point(
    row: folder.Line, read: Callable[[folder.Line, str], PromptScores], full: folder.Line, control: folder.Line
) -> Point:
    """Return the numbers of one row. ``read`` returns a row's scores in a part."""
    own, exact = read(row, "retrieval"), read(full, "retrieval")
    # the score of a divergence is -ln KL, so that its highest value is the lowest divergence
    mean, low, high = _mean(read(row, "distance"), 1, bounds=None)
    tasks = [np.array([(own[task][prompt], exact[task][prompt]) for prompt in own[task]]) for task in own]
    share, interval = stats.share_of_full(tasks)
    assert share is not None and interval is not None, "the full cache scores more than 0"
    reading = row["parts"]["reading"]
    return Point(
        method=_name(row),
        bytes=row["bytes"],
        kl=(exp(-mean), exp(-high), exp(-low)),
        score=_mean(own, 100),
        reading=(reading["retained"], *(reading["ci"] or (reading["retained"], reading["retained"]))),
        share=(share, *interval),
        minus_full=_mean(_subtract(own, exact), 100, bounds=(-1.0, 1.0)),
        minus_control=_mean(_subtract(own, read(control, "retrieval")), 100, bounds=(-1.0, 1.0)),
    )


def _compare(first: PromptScores, second: PromptScores, part: str) -> Interval:
    """Return the mean paired difference of two rows in points; of divergences, the second's over the first's."""
    if part != "distance":
        return _mean(_subtract(first, second), 100, bounds=(-1.0, 1.0))
    mean, low, high = _mean(_subtract(first, second), 1, bounds=None)
    return exp(mean), exp(low), exp(high)


def _subtract(first: PromptScores, second: PromptScores) -> PromptScores:
    """Return the difference of two rows' scores for each prompt of each task."""
    return {task: {name: score - second[task][name] for name, score in own.items()} for task, own in first.items()}


def _mean(found: PromptScores, scale: float, bounds: stats.Bounds | None = (0.0, 1.0)) -> Interval:
    """Return the mean over tasks and the ends of its 95 % interval, times ``scale``."""
    mean, interval = stats.mean_over_tasks([list(task.values()) for task in found.values()], bounds)
    assert interval is not None, "each part has enough prompts for an interval"
    return scale * mean, scale * interval[0], scale * interval[1]


def rank_correlation(shown: Sequence[Point], name: str) -> tuple[float, float]:
    """Return (Kendall's tau, p) between nearness by divergence and the field ``name`` over the points."""
    result = kendalltau([-p.kl[0] for p in shown], [getattr(p, name)[0] for p in shown])
    return float(result.statistic), float(result.pvalue)


def draw(shown: Sequence[Point], full: Interval) -> Figure:
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


def _write(number: Interval, digits: int = 1, sign: bool = False) -> str:
    """Return a number with its interval as text."""
    return with_interval(number[0], number[1:], digits, sign=sign, gap=" ")


def describe(found: Findings) -> list[str]:
    """Return lines for readers: how nearness and scores go together, and the paired differences of PAIRS."""
    methods = [p for p in found.points if p.method not in CONTROLS]
    selectors = [p for p in methods if p.kind == "selects tokens"]
    lines = [f"RULER, question withheld: the full cache scores {_write(found.full)}."]
    for some, what in ((methods, "methods"), (selectors, "methods that select tokens")):
        for name, part in (("reading", "reading (question in the prompt)"), ("score", "RULER (question withheld)")):
            tau, p_value = rank_correlation(some, name)
            lines.append(
                f"Nearness by divergence and {part}, {len(some)} {what}: Kendall's tau {tau:.2f}, p {p_value:.2g}."
            )
    near, far = [p for p in methods if p.kl[0] < NEAR], [p for p in methods if p.kl[0] >= NEAR]
    lines.append(
        f"Of {len(near)} methods below {NEAR} nats a token, {sum(p.score[0] >= RETRIEVES for p in near)} score "
        f"{RETRIEVES} or more; the best of the {len(far)} others scores {format_number(max(p.score[0] for p in far))}."
    )
    for (part, budget, first, second), difference in zip(PAIRS, found.pairs, strict=True):
        if part == "distance":
            lines.append(f"Divergence of {second} over that of {first}: {_write(difference, digits=2)}.")
        else:
            written = _write(difference, sign=True)
            lines.append(f"{part}, 1/{budget} of the bytes, {first} minus {second}: {written} points.")
    return lines


def files_of_numbers(found: Findings) -> dict[str, str]:
    """Return the files of numbers, findings.csv and findings.txt, by their names."""
    # the full cache has no divergence from itself, and its other numbers stand in the suite's card
    mean, low, high = (f"{number:.1f}" for number in found.full)
    exact = dict.fromkeys(FIELDS, "") | {"method": "full", "kind": "full cache", "bytes": "100.0"}
    exact |= {"kl": "0", "kl_low": "0", "kl_high": "0", "score": mean, "score_low": low, "score_high": high}
    table = writers.csv(FIELDS, [exact, *(p.record() for p in found.points)])
    return {"findings.csv": table, "findings.txt": "\n".join(describe(found)) + "\n"}


def main() -> int:
    """Write the picture, its numbers and its text; return the exit status."""
    found = read_findings(FOLDER)
    for name, text in files_of_numbers(found).items():
        (RESULTS / name).write_text(text, encoding="utf-8")
    with style.styled():
        figure = draw(found.points, found.full)
        figure.savefig(RESULTS / "findings.png", dpi=250)
        figure.savefig(RESULTS / "findings.svg", metadata={"Date": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
