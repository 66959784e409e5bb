"""Write results/papers.md and its picture: all tables of the papers on the pretrained model, a row a table.

python scripts/tables_page.py     from results/tables/counts.csv and numbers.csv, which scripts/paper_tables.py writes
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from paper_tables import PRETRAINED
from verification import Verification

from kvbench.papers.measured import coverage
from kvbench.papers.spec import catalogue, table_spec
from kvbench.papers.spec.table_spec import TableSpec
from kvbench.report import style, writers

RESULTS = Path(__file__).resolve().parent.parent / "results"
PAGE, PICTURE = "papers.md", "papers"
SPAN, BINS = 40.0, 20
"""The picture shows differences of up to SPAN points, in BINS by BINS fields a paper."""


def page(root: Path = RESULTS) -> str:
    """Return the page as Markdown."""
    counts = coverage.read_counts(root / "tables")
    specs = [spec for spec in table_spec.find_tables("all") if spec.measurable and spec.id in counts]
    filled = sum(int(counts[spec.id]["filled"]) for spec in specs)
    printed = sum(int(counts[spec.id]["printed"]) for spec in specs)
    rows = [_row(spec, counts[spec.id]) for spec in specs]
    table = writers.table(("table", "content", "filled", "order of rows: tau", "seen", "reversed", "not told"), rows)
    return (
        "# The papers' tables on SmolLM2-135M\n\n"
        f"{filled} of {printed} printed cells hold a number of this model, and each is made again from "
        "[its samples](samples) by `make verify-tables`. Each link opens a table with our numbers beside the printed "
        f"ones. `python scripts/paper_tables.py TABLE --model {PRETRAINED}` measures a table. "
        "[What claims and figures say](measured.md) · [claims](claims.md) · [figures](figures.md)\n\n"
        "tau: Kendall's tau between our order of a block's rows and the paper's, the mean over columns with its 95 % "
        "interval. 1 is the same order. Seen, reversed, not told: the paper's differences between two rows of a block, "
        "by our paired difference and its 95 % interval.\n\n"
        f"{table}\n"
        f"![Our differences to the full cache against the papers']({PICTURE}.png)\n\n"
        "*Each field counts cells: to the right what a method gains or loses in the paper, upwards what it does here, "
        "in points against the full cache. A pattern along the diagonal holds on this model.*\n"
    )


def _row(spec: TableSpec, line: Mapping[str, str]) -> tuple[str, ...]:
    """Return a table's row of the page."""
    tau = line["tau"]
    if line["tau_low"]:
        tau += f" [{line['tau_low']}, {line['tau_high']}]"
    return (
        f"[{spec.id}](tables/{spec.paper}-{spec.table}.md)",
        spec.title,
        f"{line['filled']} / {line['printed']}",
        tau.replace("-", "−"),
        line["seen"],
        line["reversed"],
        line["untold"],
    )


def draw(numbers: Sequence[Mapping[str, str]]) -> Figure:
    """Return the picture: for each paper, cells by the paper's difference to the full cache and by ours."""
    papers = list(dict.fromkeys(line["table"].partition("/")[0] for line in numbers))
    figure = style.canvas(2.1 * len(papers) + 0.4, 2.6)
    for i, (paper, axes) in enumerate(zip(papers, figure.subplots(1, len(papers), squeeze=False)[0], strict=True)):
        some = [line for line in numbers if line["table"].startswith(f"{paper}/")]
        theirs = [float(line["published"]) - float(line["published_full"]) for line in some]
        ours = [float(line["ours"]) - float(line["full"]) for line in some]
        axes.plot((-SPAN, SPAN), (-SPAN, SPAN), color=style.GREY, linewidth=0.6)
        axes.hist2d(theirs, ours, bins=BINS, range=((-SPAN, SPAN / 2),) * 2, cmap="Blues", norm=LogNorm(), cmin=1)
        axes.set_title(f"{catalogue.choose_papers(paper)[0].name} ({len(some)} cells)")
        axes.set_xlabel("paper's − full")
        if i == 0:
            axes.set_ylabel("ours − full")
    return figure


def verify(found: Verification, root: Path = RESULTS) -> None:
    """Add to ``found`` whether the counts give the committed page."""
    found.add_text(root / PAGE, lambda: page(root), PAGE, "python scripts/tables_page.py")


def main() -> int:
    """Write the page and the picture."""
    (RESULTS / PAGE).write_text(page(), encoding="utf-8")
    with style.styled():
        figure = draw(coverage.read_numbers(RESULTS / "tables"))
        figure.savefig(RESULTS / f"{PICTURE}.png", dpi=200)
    return 0


if __name__ == "__main__":
    sys.exit(main())
