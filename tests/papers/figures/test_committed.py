"""The committed figures: drawn again from their CSV alone, and told on results' pages with the CSV's own numbers."""

import re
from functools import cache
from pathlib import Path

import matplotlib as mpl
import pytest

from kvbench.papers.figures import registry
from kvbench.papers.figures.figure import facts_of, read_csv

pytestmark = pytest.mark.e2e("draws every committed figure")

RESULTS = Path(__file__).parents[3] / "results"
FOLDERS = {"smollm2-135m-q4_1": RESULTS / "figures", "tiny": RESULTS / "tiny" / "figures"}
# a figure lies in the folder of its paper; speed.csv beside these folders is of scripts/bench/speed_curves.py
CSVS = sorted(path for folder in FOLDERS.values() for path in folder.glob("*/*.csv"))
DRAWN_WITH = "3.11"  # other versions of matplotlib draw other bytes
LINK = re.compile(r"\]\((tiny/)?figures/([\w/]+)\.png\)")
NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")


def name(path):
    return path.relative_to(RESULTS).with_suffix("").as_posix()


@cache
def finding(path):
    """The figure's id, the text of its CSV and what its data say."""
    figure, text = read_csv(path)
    return figure, text, registry.FIGURES[figure].finding(registry.FIGURES[figure].parse(text))


def numbers(text):
    return [m.replace(",", "") for m in NUMBER.findall(text)]


@pytest.mark.parametrize("path", CSVS, ids=map(name, CSVS))
def test_every_csv_has_its_pictures_and_says_what_it_is_from(path):
    figure, text, message = finding(path)
    assert path == next(f for f in FOLDERS.values() if f in path.parents) / f"{figure}.csv"
    assert path.with_suffix(".png").exists() and path.with_suffix(".svg").exists()
    model = next(m for m, f in FOLDERS.items() if f in path.parents)
    facts = facts_of(text)
    assert figure == "think/fig3b" or model in facts.get("model", facts.get("runs")), "another model's"
    assert message.endswith(".")


@pytest.mark.skipif(
    not mpl.__version__.startswith(DRAWN_WITH), reason=f"the pictures were drawn with matplotlib {DRAWN_WITH}"
)
@pytest.mark.parametrize("path", CSVS, ids=map(name, CSVS))
def test_the_csv_alone_draws_the_committed_pictures(path, tmp_path):
    figure, text = read_csv(path)
    with mpl.rc_context({"font.size": 20, "axes.grid": True, "savefig.dpi": 50, "svg.hashsalt": "other"}):
        # the user's own settings change nothing, and are left alone
        drawn, _ = registry.FIGURES[figure].redraw(text, tmp_path / "again")
        assert mpl.rcParams["font.size"] == 20
    for built in drawn:
        assert built.read_bytes() == path.with_suffix(built.suffix).read_bytes(), f"kvbench plot --from-csv {path}"


def rows():
    """(figure, cell on SmolLM2, cell on tiny) of every line of the tables of figures."""
    collected, figures = [], []
    pages = [(RESULTS / page).read_text(encoding="utf-8") for page in ("figures.md", "measured.md")]
    for line in "\n".join(pages).splitlines():
        cells = [c.strip() for c in line.strip().strip("|").split(" | ")]
        if len(cells) == 4 and LINK.search(cells[0]):
            figures = list(dict.fromkeys(found_name for _, found_name in LINK.findall(cells[0])))
        elif len(cells) != 4 or cells[0]:
            figures = []
        if figures:
            collected.append((figures, cells[2], cells[3]))
    return collected


def test_every_figure_is_committed_and_in_the_table():
    printed = {figure for figures, _, _ in rows() for figure in figures}
    assert printed == {read_csv(path)[0] for path in CSVS} == set(registry.FIGURES)


@pytest.mark.parametrize("column", [1, 2], ids=list(FOLDERS))
def test_numbers_of_the_table_are_those_of_the_csv(column):
    folder, missing = list(FOLDERS.values())[column - 1], []
    for row in rows():
        figures, cell = row[0], row[column]
        paths = [folder / f"{f}.csv" for f in figures if (folder / f"{f}.csv").exists()]
        if not paths:
            missing += [f"{figures[0]}: {n}, and no CSV" for n in numbers(cell)]
        message = ""
        for path in paths:
            _, text, told = finding(path)
            message += told + str(facts_of(text))
        missing += [f"{figures[0]}: {n} is not in: {message}" for n in numbers(cell) if n not in numbers(message)]
    assert not missing
