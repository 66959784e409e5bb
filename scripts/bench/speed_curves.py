"""Time a table against its rows, the prompt's length and the new tokens, beside kvpress and the bound, and draw it.

The rows are the full cache and StreamingLLM, SnapKV, KeyNorm and ExpectedAttention at falling budgets, on one essay. A
curve varies one of three sizes and keeps the others at 18 rows, 2,048 tokens and 32 new tokens. Each point is measured
in a process of its own: our whole table, five rows of kvpress one by one (it reads the prompt once a row, so that its
seconds a row do not depend on the number of rows), and the bound of real_table.py.

    python scripts/bench/speed_curves.py --peers PYTHON [--curves rows tokens new] [--repeats 1] [--threads 1]
    python scripts/bench/speed_curves.py --draw        the picture alone, from the CSV

Writes results/figures/speed.csv as points are measured, and speed.png and .svg. A point that the CSV has is not
measured again: delete its line for that.
"""

from __future__ import annotations

import csv
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from ratio import add_peers, finish, in_process, kvpress_seconds, options
from real_table import SELECTORS, Table, bound, prepare
from tables import through_kvbench

from kvbench.report import writers

FIGURES = Path(__file__).resolve().parents[2] / "results" / "figures"
DATA = FIGURES / "speed.csv"
BASE = {"rows": 18, "tokens": 2048, "new": 32}
CURVES: Mapping[str, Sequence[int]] = {
    "rows": (1, 3, 6, 12, 18, 24, 48),
    "tokens": (512, 1024, 2048, 4096, 8192),
    "new": (16, 32, 64, 128, 256, 512),
}
TITLES = {"rows": "rows of the table", "tokens": "tokens of the prompt", "new": "new tokens"}
BUDGETS = tuple(round(0.9 - 0.075 * i, 3) for i in range(12))
"""0.9 down to 0.075: at 2,048 tokens the smallest is above SnapKV's window of 32."""
FIELDS = ("rows", "tokens", "new", "kvbench_s", "kvpress_s_a_row", "bound_s", "threads", "torch")
PEERS = ("full", *(f"{selector} 0.25" for selector in SELECTORS))
"""kvpress's rows that are timed."""


def rows_of(count: int) -> Table:
    """Return a table of ``count`` rows: the full cache, then all selectors at one budget after the other."""
    words: list[tuple[str, ...]] = []
    rows_left = count - 1
    for budget in BUDGETS:
        selectors = SELECTORS[:rows_left]
        if not selectors:
            break
        words.append((f"method={','.join(selectors)}", f"kv_ratio={budget}"))
        rows_left -= len(selectors)
    return Table(words=tuple(words) or (("method=full",),), selectors=SELECTORS, aims=False)


def measure(point: Mapping[str, int], model: str, *, data: str | None, peers: str, repeats: int) -> dict[str, object]:
    """Return the line of the CSV for one point: seconds of our table, of a row of kvpress's, and of the bound."""
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as name:
        host, run = prepare(rows_of(point["rows"]), model, data, Path(name), length=point["tokens"], new=point["new"])
        least = bound(host, run, point["new"])
        sizes = ["--prompts", Path(name) / "prompts.jsonl", "--n", point["tokens"], "--new", point["new"]]
        sizes += ["--threads", threads, "--rows", *PEERS]
        ask_peers = partial(kvpress_seconds, peers, run.source.location, *sizes)
        ours, theirs = [], []
        for _ in range(repeats):
            ours.append(through_kvbench(host, run))
            theirs.append(sum(ask_peers().values()) / len(PEERS))
    return {
        **point,
        "kvbench_s": round(median(ours), 3),
        "kvpress_s_a_row": round(median(theirs), 3),
        "bound_s": round(least, 3),
        "threads": threads,
        "torch": torch.__version__,
    }


def read_lines(path: Path = DATA) -> list[dict[str, str]]:
    """Return the lines of the CSV; [] if there is none."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def points(curve: str) -> list[dict[str, int]]:
    """Return the points of a curve, each with all three sizes."""
    return [BASE | {curve: size} for size in CURVES[curve]]


def find(lines: Sequence[Mapping[str, str]], point: Mapping[str, int]) -> Mapping[str, str] | None:
    """Return the line of a point, or None if it was not measured."""
    for line in lines:
        if all(int(line[name]) == size for name, size in point.items()):
            return line
    return None


def describe(line: Mapping[str, object]) -> str:
    """Return a point's ratios in words."""
    rows = int(str(line["rows"]))
    ours, least = float(str(line["kvbench_s"])), float(str(line["bound_s"]))
    theirs = rows * float(str(line["kvpress_s_a_row"]))
    return (
        f"rows {rows}, tokens {line['tokens']}, new {line['new']}: kvpress / kvbench {theirs / ours:.2f}x "
        f"({theirs:.1f} s / {ours:.1f} s), kvbench / bound {ours / least:.2f}x"
    )


def draw(lines: Sequence[Mapping[str, str]]) -> Figure:
    """Return the picture: a panel a curve, seconds a row of kvpress, of kvbench and of the bound."""
    figure = Figure(figsize=(11.0, 3.6), layout="constrained")
    panels = figure.subplots(1, len(CURVES), sharey=True)
    for axes, curve in zip(panels, CURVES, strict=True):
        _draw_panel(axes, curve, lines)
    panels[0].set_ylabel("seconds a row")
    panels[0].legend(frameon=False, fontsize=8)
    figure.suptitle(
        "A table of SmolLM2 on one essay: 18 rows, 2,048 tokens and 32 new ones where an axis does not say otherwise",
        fontsize=9,
    )
    return figure


def _draw_panel(axes: Axes, curve: str, lines: Sequence[Mapping[str, str]]) -> None:
    """Draw one curve. Numbers above our points say how many times kvpress takes as long."""
    measured = []
    for point in points(curve):
        line = find(lines, point)
        if line is not None:
            measured.append(line)
    x = [int(line[curve]) for line in measured]
    theirs = [float(line["kvpress_s_a_row"]) for line in measured]
    ours = [float(line["kvbench_s"]) / int(line["rows"]) for line in measured]
    least = [float(line["bound_s"]) / int(line["rows"]) for line in measured]
    axes.plot(x, theirs, marker="s", color="#888888", label="kvpress, row by row")
    axes.plot(x, ours, marker="o", color="#1f77b4", label="kvbench, all rows at once")
    axes.plot(x, least, linestyle=":", color="#1f77b4", label="bound")
    # a curve that falls has free space at its right, one that rises at its left
    falls = curve == "rows"
    for place, above, below in zip(x, theirs, ours, strict=True):
        axes.annotate(
            f"{above / below:.1f}x",
            (place, below),
            xytext=(3 if falls else -3, 4),
            textcoords="offset points",
            fontsize=7,
            ha="left" if falls else "right",
        )
    axes.set_xscale("log", base=2)
    axes.margins(x=0.2)
    axes.set_yscale("log")
    axes.set_xticks(x, [f"{size:,}" for size in x], fontsize=7.5)
    axes.minorticks_off()
    axes.set_xlabel(TITLES[curve])
    axes.spines[["top", "right"]].set_visible(False)


def main() -> int:
    """Measure what the CSV lacks, and draw the picture. Return exit status 0."""
    parser = options(__doc__, repeats=1, threads=1)
    parser.add_argument("--model", default="smollm2-135m-q4_1")
    parser.add_argument("--data", default=os.environ.get("KVBENCH_DATA"), help="folder with paul_graham or state_union")
    parser.add_argument("--curves", nargs="+", choices=list(CURVES), default=list(CURVES))
    parser.add_argument("--draw", action="store_true", help="draw the picture from the CSV and measure nothing")
    parser.add_argument("--point", type=json.loads, help="measure one point, as JSON, and print its line")
    add_peers(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.point:
        print(json.dumps(measure(args.point, args.model, data=args.data, peers=args.peers, repeats=args.repeats)))
        return 0
    lines = read_lines()
    if not args.draw:
        if not args.peers:
            parser.error("--peers is missing: a Python with kvpress (make .venv-peers/.ready)")
        shared = ["--model", args.model, "--peers", args.peers, "--repeats", args.repeats, "--threads", args.threads]
        if args.data:
            shared += ["--data", args.data]
        for curve in args.curves:
            for point in points(curve):
                if find(lines, point) is None:
                    line = in_process("speed_curves", "--point", json.dumps(point), *shared)
                    lines.append({name: str(value) for name, value in line.items()})
                    DATA.write_text(writers.csv(FIELDS, lines), encoding="utf-8")
                    print(describe(lines[-1]), flush=True)
    else:
        for line in lines:
            print(describe(line))
    figure = draw(lines)
    for kind in ("png", "svg"):
        figure.savefig(DATA.with_suffix(f".{kind}"), dpi=150, metadata={"Date": None} if kind == "svg" else None)
    print(f"wrote {DATA.with_suffix('.png')}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    finish(main)
