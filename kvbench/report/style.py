"""The style of all figures: sizes of a two-column page, colours that colour-blind readers can tell apart.

Series differ in marker and line as well as in colour, and maps grow evenly in lightness, so that all figures can be
read in grey. Figures are made without pyplot: nothing global changes, and equal data give equal bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.textpath import TextPath
from matplotlib.transforms import Bbox

from kvbench.base.numbers import ceil_div
from kvbench.report.looks import Look

# Okabe and Ito (2008), without their yellow, since it is lost on white
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
BLUE, VERMILLION = PALETTE[:2]
GREY, PALE = "#8C8C8C", "#D9D9D9"
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (7, 2)))
MAP = "cividis"
"""The colour map of all maps. Its lightness grows evenly, and colour-blind readers can read it."""
LineKeywords = dict[str, Any]
"""Keywords of matplotlib's ``plot`` for one line: colour, line style, marker."""

RC = mpl.rc_params_from_file(Path(__file__).with_name("figures.mplstyle"), use_default_template=False)


@contextmanager
def styled() -> Iterator[None]:
    """While the context is open, matplotlib has its defaults with our changes. On exit, restore the user's settings."""
    # the backend stays as it is: ``rc_context`` does not restore it on exit
    plain: dict[Any, Any] = {k: v for k, v in mpl.rcParamsDefault.items() if k != "backend"}
    with mpl.rc_context(plain | RC):
        yield


def canvas(width: float, height: float) -> Canvas:
    """Return an empty figure of ``width`` times ``height`` inches."""
    return Canvas(figsize=(width, height), layout="constrained")


def tighten(fig: Canvas) -> None:
    """Leave no more space between panels above each other than their titles and labels need.

    ``canvas`` must have made the figure.
    """
    engine = fig.get_layout_engine()
    assert engine is not None, "``canvas`` makes every figure with one"
    engine.set(hspace=0.0, h_pad=0.01)  # type: ignore[call-arg]


def lay_out(fig: Canvas) -> None:
    """Give every panel its place. This takes most of a figure's time. ``canvas`` must have made the figure."""
    # gives the figure a renderer, which measures texts
    FigureCanvasAgg(fig)
    engine = fig.get_layout_engine()
    assert engine is not None, "``canvas`` makes every figure with one"
    engine.execute(fig)


def series(i: int, points: int = 0) -> LineKeywords:
    """Return the look of the i-th line of a plot: colour, line and marker.

    points: the number of the line's points. About eight of them have a marker; with 0, every point has one.

    Markers are hollow once the colours are used up.
    """
    # colours, lines and markers are equally many, and begin anew together
    k = i % len(PALETTE)
    look: LineKeywords = {
        "color": PALETTE[k],
        "linestyle": LINES[k],
        "marker": MARKERS[k],
        "markevery": max(1, points // 8),
    }
    if i >= len(PALETTE):
        look["markerfacecolor"] = "white"
    return look


def of_look(look: Look, points: int = 0) -> LineKeywords:
    """Return matplotlib's keywords for a method's line: colour, line and marker.

    points: the number of the line's points. About eight of them have a marker; with 0, every point has one.
    """
    keywords: LineKeywords = {
        "color": look.color,
        "linestyle": look.line,
        "marker": look.marker,
        "markevery": max(1, points // 8),
    }
    if look.hollow:
        keywords["markerfacecolor"] = "white"
    return keywords


NAME_SIZE = 6.0
"""Points of a name beside a point of a drawing."""
NAME_PLACES = [(right, up) for up, right in product((-2, 5, -10, 12, -18, 20, 28, -27, 36, 45, 54), (5, -5))]
"""Where a name may stand, in points of type to the right of the drawn point and above it: at its side first."""

Name = tuple[float, float, str, str]
"""A name beside a drawn point: the point's x and y in data units, the text and its colour."""


def write_names(ax: Axes, names: Sequence[Name], avoid: Sequence[Sequence[float]]) -> None:
    """Write each name beside its point, at the nearest place where it covers no other name and no point.

    avoid: the points (x, y) in data units that no name may cover.

    The figure must be laid out, since data units have no place on the page before.
    """
    # a point of type is 1/72 inch
    pixels_per_point = ax.figure.dpi / 72
    # a marker of 3 points across, and some space around it
    radius = 2.5 * pixels_per_point
    frame = ax.get_window_extent()
    taken = []
    for point in avoid:
        across, up = ax.transData.transform(point)
        taken.append(Bbox.from_extents(across - radius, up - radius, across + radius, up + radius))
    # names are placed from the top down, so that a name that must move goes away from those that are written
    for x, y, text, color in sorted(names, key=_negate_height):
        point = ax.transData.transform((x, y)).tolist()
        place, box = _find_place(point, text, pixels_per_point, frame, taken)
        taken.append(box)
        right, up = place
        arrow = None
        # a name that was moved away from its point is joined to it by a line; places up to 8 points off are at its side
        if abs(up) > 8:
            arrow = {"arrowstyle": "-", "color": color, "linewidth": 0.4, "alpha": 0.7, "shrinkA": 0, "shrinkB": 2}
        written = ax.annotate(
            text,
            (x, y),
            xytext=place,
            textcoords="offset points",
            fontsize=NAME_SIZE,
            color=color,
            ha="left" if right > 0 else "right",
            arrowprops=arrow,
            zorder=4,
        )
        # the layout is settled, and names that it counted would shrink the panel
        written.set_in_layout(False)


def _negate_height(name: Name) -> float:
    """Return the sort key of a name that puts the highest point first."""
    _, y, _, _ = name
    return -y


def _find_place(
    point: Sequence[float], name: str, pixels_per_point: float, frame: Bbox, taken: Sequence[Bbox]
) -> tuple[tuple[float, float], Bbox]:
    """Return the first of NAME_PLACES where a name is inside ``frame`` and free of ``taken``, and the name's box.

    If there is none, return the first of NAME_PLACES.

    point: the point (x, y) that is named, in pixels.
    pixels_per_point: the pixels of a point of type.
    frame: the panel's box, in pixels as all boxes.
    taken: the boxes of points and of names that are already written.
    """
    x, y = point
    # the outline's width, since capitals and digits are wider than other letters, and 2 points between two names
    width = (TextPath((0, 0), name, size=NAME_SIZE).get_extents().width + 2) * pixels_per_point
    # a line is about 1.15 of the font's size
    height = 1.15 * NAME_SIZE * pixels_per_point
    boxes = []
    for right, up in NAME_PLACES:
        left = x + right * pixels_per_point
        # a name at the left side ends at the point
        if right < 0:
            left -= width
        bottom = y + up * pixels_per_point
        box = Bbox.from_extents(left, bottom, left + width, bottom + height)
        boxes.append(((right, up), box))
        inside = box.x0 >= frame.x0 and box.x1 <= frame.x1 and box.y0 >= frame.y0 and box.y1 <= frame.y1
        if inside and not any(box.overlaps(other) for other in taken):
            return (right, up), box
    # no place is free: the first one, which covers something
    return boxes[0]


def shades(count: int) -> list[Any]:
    """Return ``count`` colours from dark to light for ordered things, such as layers."""
    # the lightest end of the map, above 0.88, is lost on white
    return [mpl.colormaps[MAP](position) for position in np.linspace(0.0, 0.88, count)]


def integer_ticks(labels: Sequence[Any], most: int = 8) -> tuple[list[int], list[str]]:
    """Return (places, names) of at most ``most`` evenly spaced ticks on an axis with one step per label."""
    # without labels the quotient is 0, which is no step
    step = max(1, ceil_div(len(labels), most))
    places = list(range(0, len(labels), step))
    return places, [str(labels[i]) for i in places]


def token_ticks(ax: Axes, starts: Sequence[int], most: int = 8) -> None:
    """Set ticks at round numbers of tokens on the rows of a map.

    Row r covers the tokens from ``starts[r]`` on, and ``starts[0]`` is 0. All rows cover equally many tokens. There are
    at most ``most`` ticks.
    """
    # a single row does not tell how many tokens it covers
    tokens_per_row = starts[1] - starts[0] if len(starts) > 1 else 1
    end = starts[-1] + tokens_per_row
    # the smallest of 1, 2, 5, 10, 20, 50, ... that needs at most ``most`` ticks
    step = next(step for step in _round_numbers() if end <= step * most)
    tokens = range(0, end, step)
    # row r covers the tokens from r * tokens_per_row on and reaches from r - 0.5 to r + 0.5 on the axis
    ax.set_yticks([token / tokens_per_row - 0.5 for token in tokens], [str(token) for token in tokens])


def _round_numbers() -> Iterator[int]:
    """Yield 1, 2, 5, 10, 20, 50 and so on up to 500 millions."""
    for exponent in range(9):
        for factor in (1, 2, 5):
            yield factor * 10**exponent


def heat(
    ax: Axes,
    values: Any,
    rows: Sequence[Any],
    columns: Sequence[Any],
    numbers: str = "",
    **kwargs: Any,
) -> Any:
    """Draw a map of values [rows, columns] and return matplotlib's image of it.

    rows: the names of the rows' ticks. If there are many, only some are written.
    columns: the names of the columns' ticks, in the same way.
    numbers: the format that prints each value in its cell, such as ``%.0f``; '' prints none. A nan leaves it empty.
    kwargs: matplotlib's keywords for ``imshow``, such as the ends of the colour scale.
    """
    values = np.asarray(values, dtype=float)
    # cells need not be square: the figure's size decides
    image = ax.imshow(values, aspect="auto", **kwargs)
    ax.set_yticks(*integer_ticks(rows))
    ax.set_xticks(*integer_ticks(columns))
    ax.tick_params(length=0)
    for side in ("top", "right", "left", "bottom"):
        ax.spines[side].set_visible(False)
    if numbers:
        for (i, j), value in np.ndenumerate(values):
            # nothing was measured there
            if np.isnan(value):
                continue
            red_green_blue = image.cmap(image.norm(value))[:3]
            # each is from 0 to 1, so white has the sum 3
            colour = "black" if sum(red_green_blue) > 1.6 else "white"
            text = numbers % value
            # as in texts, a small negative value is 0 and not -0, and a minus is a minus
            if float(text) == 0:
                text = numbers % 0
            ax.text(j, i, text.replace("-", "−"), ha="center", va="center", fontsize=6, color=colour)
    return image
