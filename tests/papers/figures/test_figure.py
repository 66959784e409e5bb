"""Every figure: its record, its CSV, and drawings that depend on the CSV alone.

test_committed.py draws every figure's committed CSV again, under other settings: here one figure is drawn twice.
"""

import re

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from support.readings import reading

from kvbench.base.errors import UsageError
from kvbench.papers.figures import registry
from kvbench.papers.figures.figure import facts_of, figure_folder, read_csv
from kvbench.report import style

pytestmark = pytest.mark.e2e("draws every figure")

FIGURES = {i: f for i, f in registry.FIGURES.items() if f.sweeps is None}
KNOBS = {"qhitter/fig2": {"bits": (4, 2)}}
DRAWN_TWICE = "uncomp/fig6"


@pytest.fixture(scope="module", params=FIGURES)
def made(request):
    """(figure, its data on two texts of a random model)."""
    figure = FIGURES[request.param]
    knobs = {**figure.knobs, **KNOBS.get(figure.id, {})}
    return figure, figure.compute(reading(lengths=(48,), sources=("a", "b"), **knobs))


def test_ids_and_papers():
    wanted = [f"uncomp/fig{n}" for n in (1, 2, 4, 6)]
    wanted += ["vatp/fig1", "think/fig4", "think/fig5", "qhitter/fig2", "qhitter/fig3"]
    assert sorted(FIGURES) == sorted(wanted)
    measured = [f"qhitter/fig{n}" for n in (5, 7, 8, 9, 10)]
    measured += ["refreekv/fig2", "refreekv/fig3", "vatp/fig3", "think/fig3a", "think/fig3b"]
    measured += ["results/pareto", "results/budget", "needle/heatmap"]
    measured += ["fidelity/budget", "fidelity/layers", "fidelity/positions", "fidelity/answers"]
    assert sorted(registry.FIGURES) == sorted([*wanted, *measured])
    selected = registry.select_figures(["think", "think/fig5"])
    assert [f.id for f in selected] == [f"think/fig{n}" for n in ("3a", "3b", "4", "5")]
    assert len(registry.select_figures(["all"])) == len(registry.FIGURES)
    with pytest.raises(UsageError, match="Did you mean uncomp/fig1"):
        registry.select_figures(["uncomp/fig11"])


@pytest.mark.parametrize("name", registry.FIGURES)
def test_records_say_what_readers_need(name):
    figure = registry.FIGURES[name]
    for text in (figure.shows, figure.claim, figure.unsaid):
        assert text.endswith(".") and len(text) > 40
        for place in re.finditer("tiny", text):
            message = text[: place.start()]
            assert message.lower().endswith(("on the ", "(the ")), f"said of every model: {text}"
    assert re.fullmatch(r"[a-zKQ][^.]+", figure.title)


def test_the_csv_holds_the_data_of_the_pictures(made, tmp_path):
    figure, data = made
    paths, finding = figure.write(data, {"model": "random", "texts": "a, b"}, tmp_path)
    assert [p.relative_to(tmp_path).as_posix() for p in paths] == [f"{figure.id}.{e}" for e in ("png", "svg", "csv")]
    name, text = read_csv(paths[2])
    assert name == figure.id and facts_of(text) == {"figure": figure.id, "model": "random", "texts": "a, b"}
    read = figure.parse(text)
    assert tuple(read.columns) == figure.columns and len(read) == len(data)
    for column in figure.columns:
        if pd.api.types.is_numeric_dtype(data[column]):
            np.testing.assert_allclose(read[column], data[column].astype(float), rtol=1e-4)
        else:
            assert read[column].fillna("").tolist() == data[column].fillna("").tolist()
    assert finding.endswith(".") and "nan" not in finding
    if figure.id == DRAWN_TWICE:
        with mpl.rc_context({"font.size": 20, "axes.grid": True, "savefig.dpi": 50, "svg.hashsalt": "other"}):
            again, message = figure.redraw(text, tmp_path / "again")
        assert message == finding
        for a, b in zip(paths[:2], again, strict=True):
            assert a.read_bytes() == b.read_bytes()
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    svg = paths[1].read_text()
    assert "<dc:date>" not in svg and mpl.__version__ not in svg


def test_the_tiny_models_figures_replace_no_others(tmp_path):
    assert figure_folder(tmp_path, "tiny") != figure_folder(tmp_path, "smollm2-135m-q4_1") == tmp_path / "figures"


def test_files_that_are_no_figures(tmp_path):
    figure = FIGURES["uncomp/fig4"]
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match="this is no figure's CSV"):
        read_csv(path)
    for text, why in (
        ("a,b\n1,2\n", "no column source, layer"),
        ("source,layer,head,erank_k\n", "no rows"),
        ("", "read"),
    ):
        with pytest.raises(UsageError, match=why):
            figure.parse(text)
    with pytest.raises(UsageError, match="cannot be written"):
        figure.write(pd.DataFrame({"source": ["a"], "layer": [0], "head": [0], "erank_k": [1.0]}), {}, path)


def test_series_can_be_told_apart_without_colour():
    looks = [style.series(i) for i in range(len(style.PALETTE))]
    assert len({look["marker"] for look in looks}) == len({str(look["linestyle"]) for look in looks}) == len(looks)
    light = [sum(w * c for w, c in zip((0.3, 0.59, 0.11), shade[:3], strict=True)) for shade in style.shades(6)]
    assert light == sorted(light) and min(np.diff(light)) > 0.05


def test_ticks_of_long_axes():
    assert style.integer_ticks(range(6)) == ([0, 1, 2, 3, 4, 5], ["0", "1", "2", "3", "4", "5"])
    fig = style.canvas(2, 2)
    ax = fig.subplots()
    style.token_ticks(ax, range(0, 1024, 22))  # rows of 22 tokens
    assert [t.get_text() for t in ax.get_yticklabels()] == ["0", "200", "400", "600", "800", "1000"]
    assert ax.get_yticks()[1] == pytest.approx(200 / 22 - 0.5)
    places, names = style.integer_ticks([10 * i for i in range(32)])
    assert places == list(range(0, 32, 4)) and names[1] == "40"
