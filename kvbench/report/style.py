"""The style of all figures: sizes of a two-column page, colours that colour-blind readers can tell apart.

Series differ in marker and line as well as in colour, and maps grow evenly in lightness, so that all of it can be read
in grey. Figures are made without pyplot: nothing global changes, and equal data give equal bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

# Okabe and Ito (2008), without their yellow, which is lost on white
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
BLUE, VERMILLION = PALETTE[:2]
GREY, PALE = "#8C8C8C", "#D9D9D9"
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (7, 2)))
MAP = "cividis"

RC = mpl.rc_params_from_file(Path(__file__).with_name("figures.mplstyle"), use_default_template=False)


@contextmanager
def styled() -> Iterator[None]:
    """Put matplotlib's defaults with ours on top in force, whatever the user's settings are; these return on exit."""
    plain: dict[Any, Any] = {k: v for k, v in mpl.rcParamsDefault.items() if k != "backend"}
    with mpl.rc_context(plain | RC):
        yield


def canvas(width: float, height: float) -> Canvas:
    """Return an empty figure of ``width`` times ``height`` inches."""
    return Canvas(figsize=(width, height), layout="constrained")


def tighten(fig: Canvas) -> None:
    """Leave no more space between panels above each other than their titles and labels need."""
    engine = fig.get_layout_engine()
    assert engine is not None
    engine.set(hspace=0.0, h_pad=0.01)  # type: ignore[call-arg]


def series(i: int, points: int = 0) -> dict[str, Any]:
    """Return the look of the i-th line of a plot: colour, line and marker (on about eight of its ``points``).

    Markers are hollow once the colours are used up.
    """
    k = i % len(PALETTE)
    look = {"color": PALETTE[k], "linestyle": LINES[k], "marker": MARKERS[k], "markevery": max(1, points // 8)}
    return look if i < len(PALETTE) else {**look, "markerfacecolor": "white"}


def shades(count: int) -> list[Any]:
    """Return ``count`` colours from dark to light for ordered things, such as layers."""
    return [mpl.colormaps[MAP](x) for x in np.linspace(0.0, 0.88, count)]


def integer_ticks(labels: Sequence[Any], most: int = 8) -> tuple[list[int], list[str]]:
    """Return (places, names) of at most ``most`` evenly spaced ticks on an axis with one step per label."""
    step = max(1, -(-len(labels) // most))
    places = list(range(0, len(labels), step))
    return places, [str(labels[i]) for i in places]


def token_ticks(ax: Axes, starts: Sequence[int], most: int = 8) -> None:
    """Set ticks at round numbers of tokens on the rows of a map, each of which covers tokens from its start on."""
    run = starts[1] - starts[0] if len(starts) > 1 else 1
    end = starts[-1] + run
    round_ = (m * 10**e for e in range(9) for m in (1, 2, 5))
    tokens = range(0, end, next(step for step in round_ if end <= step * most))
    ax.set_yticks([t / run - 0.5 for t in tokens], [str(t) for t in tokens])


def heat(
    ax: Axes,
    values: Any,
    rows: Sequence[Any],
    columns: Sequence[Any],
    numbers: str = "",
    **kwargs: Any,
) -> Any:
    """Draw a map of values [rows, columns] with a tick per row and column; the format ``numbers`` prints cells."""
    values = np.asarray(values, dtype=float)
    image = ax.imshow(values, aspect="auto", **kwargs)
    ax.set_yticks(*integer_ticks(rows))
    ax.set_xticks(*integer_ticks(columns))
    ax.tick_params(length=0)
    for side in ("top", "right", "left", "bottom"):
        ax.spines[side].set_visible(False)
    if numbers:
        for (i, j), value in np.ndenumerate(values):
            light = sum(image.cmap(image.norm(value))[:3]) > 1.6
            ax.text(j, i, numbers % value, ha="center", va="center", fontsize=6, color="black" if light else "white")
    return image
