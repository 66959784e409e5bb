"""Panels draw the rows that they are given: lines and levels, bars, points and maps, each where its values say."""

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from kvbench.papers.figures import registry
from kvbench.papers.figures.draw import Head, Sheet, bars, heat, lines, mark_x, reverse_x, set_x, set_y
from kvbench.papers.figures.figure import Fact, join_facts
from kvbench.report import looks, style

DATA = pd.DataFrame(
    [
        (task, name, x, 10 * x + i, 10 * x, 10 * x + 5)
        for task in "ab"
        for i, name in enumerate(("full", "s", "t"))
        for x in (1, 2)
    ],
    columns=["task", "series", "x", "y", "low", "high"],
)
ENDS = ("low", "high")
HEAD = Head()


def draw(data, draw_panel, width=6, height=2, head=HEAD, **layout):
    """The drawing of a sheet and its axes, as far as a layout; ``draw_panel`` draws the panels of each place."""
    with style.styled():
        sheet = Sheet(data, head, width, height, **layout)
        for panels in sheet.places:
            draw_panel(*panels)
        fig = sheet.finish()
        FigureCanvasAgg(fig)
        fig.draw_without_rendering()
    return fig, fig.axes


def draw_series(panel):
    lines(panel, "x", "y", "series", interval=ENDS, level=True)
    panel.label("{task} of {x}".format(**panel.named))


def test_a_line_for_each_series_and_the_full_cache_as_a_level():
    fig, (remaining, right) = draw(DATA, draw_series, columns="task")
    assert [t.get_title(loc="left") for t in (remaining, right)] == ["(a) a of 1", "(b) b of 1"]
    level, first, second = remaining.get_lines()
    assert set(level.get_ydata()) == {10} and level.get_linestyle() == "--"
    assert list(first.get_xdata()) == [1, 2] and list(first.get_ydata()) == [11, 21]
    assert list(second.get_ydata()) == [12, 22] and len(remaining.collections) == 2
    assert [t.get_text() for t in fig.legends[0].get_texts()] == ["full cache", "s", "t"]


def test_three_lines_have_bars_beside_each_other_at_a_budget():
    _, (ax,) = draw(DATA, lambda panel: lines(panel, "x", "y", "series", interval=ENDS))
    assert len(ax.containers) == 3 and not [c for c in ax.collections if isinstance(c, mpl.collections.PolyCollection)]
    starts = [line.get_xdata()[0] for line in ax.get_lines() if len(line.get_xdata())]
    assert len(set(starts)) == 3 and max(starts) - min(starts) == pytest.approx(0.05)


def test_a_method_has_its_own_look_and_printed_name_wherever_it_stands():
    data = DATA.replace({"series": {"s": "snapkv", "t": "h2o+vatp"}})
    for order in (data, data.iloc[::-1]):
        _, (ax,) = draw(order, lambda panel: lines(panel, "x", "y", "series"))
        by_name = {line.get_label(): line for line in ax.get_lines()}
        assert set(by_name) == {"full cache", "SnapKV", "H2O + VATP"}
        assert by_name["SnapKV"].get_color() == looks.METHODS["snapkv"].color
        assert by_name["H2O + VATP"].get_marker() == looks.METHODS["vatp"].marker


def test_a_task_that_the_model_fails_has_no_lines():
    data = DATA.assign(n=8, low=0.0).assign(y=DATA["y"].where(DATA["series"] != "full", 1.0))
    _, (ax,) = draw(data, lambda panel: lines(panel, "x", "y", "series", interval=ENDS, level=True, fails=True))
    assert "the model fails" in ax.texts[0].get_text() and not ax.axison
    assert all(np.isnan(line.get_ydata()).all() for line in ax.get_lines())


def test_a_heading_and_a_note_stand_above_the_panels():
    fig, axes = draw(DATA, draw_series, width=3, head=Head("What is shown", "a model · n = 8"))
    heading, (note,) = fig._suptitle, [artist for artist in fig.artists if isinstance(artist, mpl.text.Annotation)]
    assert heading.get_text().strip() == "What is shown" and note.get_text() == "a model · n = 8"
    assert axes[0].get_tightbbox().y1 <= note.get_window_extent().y0 < heading.get_window_extent().y1


def test_points_without_a_line_have_error_bars():
    look = {"linestyle": "none"}
    _, (ax,) = draw(DATA, lambda panel: lines(panel, "x", "y", "series", interval=ENDS, look=look))
    assert len(ax.containers) == 3 and not [c for c in ax.collections if isinstance(c, mpl.collections.PolyCollection)]


def test_many_lines_are_grey_with_their_mean():
    data = pd.DataFrame({"name": f"s{i}", "x": x, "y": i * x} for i in range(8) for x in (1, 2))
    fig, (ax,) = draw(data, lambda panel: lines(panel, "x", "y", "name", crowd="samples"))
    assert len(ax.get_lines()) == 9 and list(ax.get_lines()[-1].get_ydata()) == [3.5, 7]
    assert sorted(t.get_text() for t in fig.legends[0].get_texts()) == ["mean", "samples"]


def test_maps_and_bars_stand_above_each_other_in_every_place():
    cells = [
        (p, x, y, 10 * x + y + 100 * (p == "values"), y == 0)
        for p in ("keys", "values")
        for x in range(3)
        for y in range(2)
    ]
    data = pd.DataFrame(cells, columns=["part", "x", "y", "value", "marked"])

    def draw_place(upper, lower):
        upper.color(heat(upper, "x", "y", "value", numbers="%.0f"), upper.named["part"], own=True)
        upper.label(upper.named["part"], "x", "y")
        bars(lower, "x", "value", marked="marked")
        lower.label(x="x")

    _, actual = draw(data, draw_place, columns="part", heights=(3, 1))
    maps = [ax for ax in actual if ax.images]
    assert [ax.get_title(loc="left") for ax in maps] == ["(a) keys", "(b) values"]
    np.testing.assert_array_equal(maps[0].images[0].get_array(), [[0, 10, 20], [1, 11, 21]])
    assert [t.get_text() for t in maps[0].texts] == ["0", "10", "20", "1", "11", "21"]
    strips = [ax for ax in actual if ax.patches]
    assert [p.get_height() for p in strips[0].patches] == [0, 10, 20]
    assert len(actual) == 6, "a colour bar for each map"


def test_a_row_of_panels_ends_where_it_is_to_wrap():
    data = pd.DataFrame({"task": t, "series": "s", "x": x, "y": x} for t in "abcde" for x in (1, 2))

    def draw_panel(panel):
        lines(panel, "x", "y", "series")
        panel.label(x="x", y="y")

    _, actual = draw(data, draw_panel, columns="task", wrap=3)
    assert [ax.axison for ax in actual] == [True] * 5 + [False]
    assert [bool(ax.get_ylabel()) for ax in actual] == [True, False, False, True, False, False]
    assert [bool(ax.get_xlabel()) for ax in actual] == [True] * 5 + [False]  # every panel says what its axis is


def test_scales_and_ticks():
    def draw_steep(panel):
        curves = lines(panel, "x", "y", "series")
        set_x(panel, curves["x"], "log", ticks="data")
        reverse_x(panel)
        set_y(panel, curves["y"], "auto")
        mark_x(panel, "x", 1.5)

    _, (ax,) = draw(DATA.assign(y=DATA["y"] ** 4), draw_steep)
    assert ax.get_yscale() == "log" and list(ax.get_xticks()) == [1, 2] and ax.xaxis_inverted()
    assert [line.get_xdata()[0] for line in ax.get_lines() if line.get_linestyle() == ":"][-1] == 1.5

    def draw_flat(panel):
        curves = lines(panel, "x", "y", "series")
        set_y(panel, curves["y"], "auto", top=curves["y"])

    _, (ax,) = draw(DATA, draw_flat)
    assert ax.get_yscale() == "linear" and ax.get_ylim() == pytest.approx((-0.88, 22.88))


def test_points_of_a_sweep():
    built = list(registry._list_grid_points(["a", "b"], "r", {"r": [0.5, 0.25], "bits": [4, 2]}, times=100))
    assert [(p.series, p.x, p.knobs["bits"]) for p in built[:4]] == [
        ("a", 50, 4),
        ("a", 50, 2),
        ("a", 25, 4),
        ("a", 25, 2),
    ]
    assert [(p.series, p.x) for p in registry._list_grid_points("a", None, {"r": [3, 1]}, "s")] == [("s", 0), ("s", 1)]
    assert [p.x for p in registry._list_grid_points("a", 512, {"r": 3})] == [512]


def test_facts_in_words():
    places = pd.Series({("a", 1): 2.0, ("a", 2): float("nan"), ("b", 1): 3.0})
    printed = [
        Fact("One", 0.5, "{:.2f}"),
        Fact("By name", {"x": 1, "y": 2}, "{} %"),
        Fact("By place", places, at="{} bits"),
    ]
    assert join_facts([*printed, Fact("Words", "so it is"), Fact("Unknown", float("nan"))]) == (
        "One: 0.50. By name: x 1 %, y 2 %. By place: a 2.0 at 1 bits; b 3.0 at 1 bits. Words: so it is."
    )
