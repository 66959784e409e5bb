"""One panel of a picture: the columns that it shows, its look, and the scales, ticks and limits of its axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

from kvbench.report import style

WIDE = 10  # an ``auto`` scale is logarithmic if the highest value is more than so many times the lowest


@dataclass(frozen=True)
class Panel:
    """One plot of a picture: the columns that it shows, and its look.

    The fields x, y, hue, unit, value, marked, shaded, low and high are names of columns. ``{column}`` in a text stands
    for the first row's value in this column.
    """

    kind: str  # lines, points, bars or heat
    x: str
    y: str
    where: Mapping[str, object] = field(default_factory=dict)  # the values that a shown row has, by column
    title: str = ""
    xlabel: str = ""
    ylabel: str = ""
    bar: str = ""  # the label of the colours of heat and points
    hue: str = ""  # each value of this column has a line with its own look
    unit: str = ""  # each value of this column has a line, all of them with one look
    value: str = ""  # the numbers behind the colours of heat and points
    marked: str = ""  # bars with True stand out
    shaded: str = ""  # points with True have a grey background
    # low and high are the ends of intervals, drawn as bands around one or two lines, as error bars for more lines
    low: str = ""
    high: str = ""
    first_band: bool = False  # only the first line shows its interval, as a band
    level: Mapping[str, object] = field(default_factory=dict)  # rows with these values are a dashed horizontal line
    fails: bool = False  # if the level is next to 0, the panel says that the model fails, and shows no lines
    direct: bool = False  # names stand beside the lines, not in a legend
    look: Mapping[str, object] = field(default_factory=dict)  # matplotlib's keywords for all lines
    looks: Mapping[str, Mapping[str, object]] = field(default_factory=dict)  # the same, by value of ``hue``
    quiet: Sequence[str] = ()  # the values of ``hue`` that are drawn thin and grey
    crowd: str = ""  # the common name of more than seven lines, which are then thin and grey, beside their mean
    shades: bool = False  # the values of ``hue`` have an order, which their colours show
    xscale: str = ""  # ``log``, ``log2``, or ``auto``: logarithmic if the values are far apart
    yscale: str = ""  # as xscale
    ticks: str | Sequence[float] = ()  # x ticks: ``data``, ``even``, ``powers`` (of 2) or a list
    reverse: bool = False  # x runs from right to left
    decades: float = 0  # the y axis ends at most this many powers of ten below the highest value
    top: bool = False  # the y axis runs from 0 to the highest value, or to 100 if that is near
    bottom: float | None = None  # the lower end of the y axis
    highest: float | None = None  # the largest upper end that the y axis may have
    right: float | None = None  # the right end of the x axis
    at_x: float | None = None  # the place of a dotted vertical line
    at_text: str = ""  # the text above that line
    at_y: float | None = None  # the place of a dotted horizontal line
    shade: Sequence[float] = ()  # a range of x with a grey background
    limits: Sequence[float] = ()  # the ends of a map's colours
    floor: float = 0  # the lowest value of a logarithmic map that ends at 1
    log: bool = False  # the colours of maps are logarithmic, over the values of all maps
    numbers: str = ""  # the format of the values in a map with few of them
    runs: bool = False  # the rows of a map are runs of tokens


def set_axes(ax: Axes, rows: pd.DataFrame, panel: Panel, everything: pd.DataFrame) -> None:
    """Set the scales, ticks and limits of a panel, and draw its reference lines. A map keeps its own axes.

    rows: the data of this panel.
    everything: the data of all panels of the picture, which decide the limits.
    """
    if panel.kind == "heat":
        return
    # the level is a line across the panel, so the x of its rows must not decide the limits
    if panel.level:
        everything = everything[~mask_rows(everything, panel.level)]
    # limits are those of all data, so that panels can be compared
    xs, ys = everything[panel.x].dropna(), everything[panel.y].dropna()
    _set_scale(ax.set_xscale, ax.xaxis, panel.xscale, xs)
    _set_scale(ax.set_yscale, ax.yaxis, panel.yscale, ys)
    _set_ticks(ax, panel, sorted(everything[panel.x].unique()))
    # panels with a shared x axis turn it together, and a second call would turn it back
    if panel.reverse and not ax.xaxis_inverted():
        ax.invert_xaxis()
    _set_limits(ax, panel, everything)
    _draw_references(ax, rows, panel)


def _set_limits(ax: Axes, panel: Panel, everything: pd.DataFrame) -> None:
    values = everything[panel.y].dropna()
    highest = values.max()
    if panel.decades:
        # the axis begins so many decades below the highest value, or just below the lowest if that is higher; values
        # are clipped, since a logarithmic axis has no 0
        lowest_positive = values.clip(lower=1e-12).min()
        ax.set_ylim(max(highest * 10**-panel.decades, 0.8 * lowest_positive), 1.6 * highest)
    elif panel.bottom is not None:
        ax.set_ylim(bottom=panel.bottom)
    elif panel.top:
        top = float(max(highest, 0))
        if panel.high:
            # intervals may reach above all values
            top = float(max(highest, everything[panel.high].max()))
        # per cent that come near to 100 get the whole scale, with 4 % of room at both ends
        if 60 < top <= 100:
            top = 100.0
        ax.set_ylim(-0.04 * top, 1.04 * top)
    if panel.highest is not None and ax.get_ylim()[1] > panel.highest:
        ax.set_ylim(top=panel.highest)
    if panel.right is not None:
        ax.set_xlim(right=panel.right)


def _draw_references(ax: Axes, rows: pd.DataFrame, panel: Panel) -> None:
    if panel.shade:
        ax.axvspan(*panel.shade, color=style.PALE, alpha=0.4, lw=0)
    # a line outside of the panel's own data would widen the axis
    if panel.at_x is not None and rows[panel.x].min() <= panel.at_x <= rows[panel.x].max():
        ax.axvline(panel.at_x, color=style.GREY, lw=0.6, ls=":")
        if panel.at_text:
            # x in data, y as a share of the axes' height: just above the panel
            transform = ax.get_xaxis_transform()
            ax.text(panel.at_x, 1.01, panel.at_text, transform=transform, ha="center", fontsize=6, color=style.GREY)
    if panel.at_y is not None:
        ax.axhline(panel.at_y, color=style.GREY, lw=0.6, ls=":")


def _set_scale(set_scale: Callable[..., None], axis: Axis, scale: str, values: pd.Series[float]) -> None:
    if scale == "log2":
        set_scale("log", base=2)
        axis.set_major_formatter(lambda tick, _: f"{tick:.3g}")
    elif scale == "log":
        set_scale("log")
    elif scale == "auto" and values.max() > WIDE * values.min():
        set_scale("log")
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(lambda tick, _: f"{tick:g}")
        axis.set_minor_locator(NullLocator())


def _set_ticks(ax: Axes, panel: Panel, xs: Sequence[float]) -> None:
    if not panel.ticks:
        return
    # minor ticks of a logarithmic axis would stand between those that are set
    ax.xaxis.set_minor_locator(NullLocator())
    if panel.ticks == "even":
        # matplotlib writes the labels of these ticks
        indices, _ = style.integer_ticks(xs, most=9)
        ax.xaxis.set_major_locator(FixedLocator([xs[i] for i in indices]))
        return
    if panel.ticks == "powers":
        lowest_power = math.floor(math.log2(xs[0]))
        highest_power = math.ceil(math.log2(xs[-1]))
        ticks = [2.0**power for power in range(lowest_power, highest_power + 1)]
    elif not isinstance(panel.ticks, str):
        # a tick outside of the data would widen the axis
        last = panel.right or 1.15 * xs[-1]
        ticks = [tick for tick in panel.ticks if xs[0] / 1.15 <= tick <= last]
    elif panel.xscale == "log":
        ticks = _thin_out(xs)
    else:
        ticks = list(xs)
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])


def _thin_out(values: Sequence[float]) -> list[float]:
    # a slice, so that no values give no ticks
    ticks = list(values[:1])
    for value in values[1:]:
        if value > 1.2 * ticks[-1]:
            ticks.append(value)
    return ticks


def mask_rows(data: pd.DataFrame, where: Mapping[str, object]) -> pd.Series[bool]:
    """Return a mask that is True for the rows with the values of ``where``, by column."""
    mask = pd.Series(True, index=data.index)
    for column, value in where.items():
        mask &= data[column] == value
    return mask
