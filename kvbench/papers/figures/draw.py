"""What the drawings of figures share: a sheet with a grid of panels, lines with intervals, maps, and their axes.

A figure's drawing is a function that takes its data and ``Head``, opens a ``Sheet``, draws into each of its panels, by
these functions or by matplotlib's own, and returns ``sheet.finish()``.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure as Canvas
from matplotlib.text import Annotation
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

from kvbench.papers.figures.names import name_task
from kvbench.papers.figures.sweep import FULL
from kvbench.report import looks, style
from kvbench.tasks.metrics import stats

HEADING, NOTE, GAP = 8.0, 6.5, 4.0
"""The sizes in points of a heading's letters, of a note's letters, and of the space below both texts."""
LINE = 1.25
"""The height of a line of text over the size of its letters."""
METHOD_COLUMNS = ("series", "method")
"""Columns whose values are methods: each has its own look and printed name (kvbench.report.looks)."""
MOST_BANDS = 2  # so many curves have bands around them; more bands would hide each other, and become error bars
DODGED = 0.05  # points with error bars that share one x are spread over this share of the axis
PREFIX = len("(a) ")  # the characters that a letter adds to a title
FAR = 1.4  # a title longer than so many times its room is broken, since it is too long even in small letters
BEHIND = 1.9  # the zorder of quiet lines, just below matplotlib's 2 for lines; the legend recognises them by it
WIDE = 10  # an ``auto`` scale is logarithmic if the highest value is more than so many times the lowest


class Head(NamedTuple):
    """The two texts above a figure's panels: a heading with its content, and a note on the model, data and examples."""

    heading: str = ""
    note: str = ""

    def open(self, width: float, height: float) -> Canvas:
        """Return a canvas with both texts, broken into lines, above ``height`` inches for panels."""
        # the heading is bold, and bold letters are about a fifth wider
        heading, note = _wrap(self.heading, 1.2 * HEADING, width), _wrap(self.note, NOTE, width)
        # the note's lines count as lines of the heading; an inch has 72 points
        count = len(heading) + len(note)
        fig = style.canvas(width, height + ((LINE * HEADING * count + GAP) / 72 if count else 0.0))
        if not count:
            return fig
        # 0.04 inches from the left edge, as a share of the width. matplotlib keeps room for one text at the top, so
        # empty lines in the heading reserve the room of the note
        room = "\n" * len(note)
        left = 0.04 / fig.get_size_inches()[0]
        text = fig.suptitle("\n".join(heading) + room, x=left, ha="left", fontsize=HEADING, fontweight="bold")
        text.set_linespacing(1.2)
        # the note begins at the heading's upper left corner, moved down by the heading's lines: by 1.3 letter sizes for
        # each, a little more than their line spacing of 1.2, so that the note keeps clear of the heading
        below = Annotation(
            "\n".join(note),
            xy=(0, 1),
            xycoords=text,
            xytext=(0, -1.3 * HEADING * len(heading)),
            textcoords="offset points",
            ha="left",
            va="top",
            fontsize=NOTE,
            color="#555555",
            annotation_clip=False,
        )
        below.set_in_layout(False)
        fig.add_artist(below)
        return fig


def _wrap(text: str, size: float, width: float) -> list[str]:
    # a letter is about half as wide as it is high, and an inch has 72 points
    return textwrap.wrap(text, int(72 * width / (0.56 * size)))


class Sheet:
    """A figure with a grid of places, one for each pair of values of two columns of the data."""

    def __init__(
        self,
        data: pd.DataFrame,
        head: Head,
        width: float,
        height: float,
        *,
        base: float = 0,
        rows: str = "",
        columns: str = "",
        wrap: int = 0,
        heights: Sequence[float] = (),
        side_by_side: int = 1,
        sharex: bool | str = False,
        sharey: bool | str = False,
        share: float = 0,
    ) -> None:
        """Open the sheet.

        width: in inches. The figure is ``base`` high, plus ``height`` for each row of the grid, plus its head.
        rows, columns: the columns of the data whose values make the rows and columns of the grid; '' for a single one.
        wrap: the most places in a row of the grid; 0 for no limit.
        heights: the relative heights of a place's panels, if they are stacked; else ``side_by_side`` is their number.
        sharex, sharey: as in matplotlib's ``subplots``.
        share: the width of this sheet over that of one panel to its right (see ``open_right``); 0 for no such panel.
        """
        places: list[dict[str, object]] = [{}]
        for column in (rows, columns):
            if column:
                # rows without a value are not of this grid; the last column varies fastest
                values = list(dict.fromkeys(data[column].dropna()))
                places = [place | {column: value} for place in places for value in values]
        across = len({place.get(columns) for place in places})
        if wrap and across > wrap:
            # rows of about equal length: five places are three and two, not four and one
            across = math.ceil(across / math.ceil(across / wrap))
        down = math.ceil(len(places) / across)
        self.canvas = head.open(width, base + height * down)
        self.width, self.stacked, self.down = width, bool(heights), down
        self.titles: list[tuple[Axes, str]] = []
        self.letters = 0
        self.lettered = bool(share)
        # the panels that share each colour bar, by its number
        self.coloured: dict[int, list[tuple[Axes, Any, str]]] = {}
        self._right: Any = None
        self.part: Any = self.canvas
        if share:
            parts: Any = self.canvas.subfigures(1, 2, width_ratios=[share, 1])
            self.part, self._right = parts
        stack = len(heights) or 1
        self.axes = self.part.subplots(
            down * stack,
            across * side_by_side,
            height_ratios=list(heights or [1]) * down,
            sharex=sharex,
            sharey=sharey,
            squeeze=False,
        )
        self.across = across * side_by_side
        self.places: list[list[Panel]] = []
        for i, place in enumerate(places):
            down_i, across_i = divmod(i, across)
            is_last = i + across >= len(places)
            across_axes = slice(across_i * side_by_side, (across_i + 1) * side_by_side)
            axes = list(self.axes[down_i * stack : (down_i + 1) * stack, across_axes].flat)
            shown = data[_mask(data, place)]
            if len(shown):
                panel = Panel(self, axes[0], shown, data, i)
                # x is labelled below the last row of the grid, or everywhere if that row has gaps; y only at the left
                panel = replace(panel, has_x=is_last or len(places) % across > 0, has_y=across_i == 0)
                # a shared x axis hides the numbers of upper panels: show those of unstacked panels, and the lowest ones
                lowest = [not self.stacked or (is_last and ax is axes[-1]) for ax in axes]
                self.places.append([replace(panel, ax=ax, numbered=n) for ax, n in zip(axes, lowest, strict=True)])

    @property
    def panels(self) -> list[Panel]:
        """The first panel of each place."""
        return [panels[0] for panels in self.places]

    def open_right(self, data: pd.DataFrame) -> Panel:
        """Close the grid, and return the panel to its right."""
        self._close()
        self.part, self.across, self.stacked = self._right, 1, False
        self.axes = self.part.subplots(1, 1, squeeze=False)
        return Panel(self, self.axes[0, 0], data, data, 0)

    def _close(self) -> None:
        for ax in self.axes.flat:
            if not ax.has_data():
                ax.set_axis_off()
        self._write_titles()
        for panels in self.coloured.values():
            # the last panel's image and label stand for those of all panels
            _, image, label = panels[-1]
            all_axes = [ax for ax, _, _ in panels]
            self.part.colorbar(image, ax=all_axes, aspect=20, pad=0.01, label=label).outline.set_visible(False)
        if self.stacked and self.down > 1:
            style.tighten(self.part)
        self.letters += len(self.titles)
        self.titles, self.coloured = [], {}

    def _write_titles(self) -> None:
        # in a figure with several panels titles are lettered; all are small if one is longer than its room (about 15
        # characters an inch), and broken into lines if one is far longer
        room = 15 * self.width / self.across
        lettered = self.lettered or len(self.titles) > 1
        longest = max((len(title) + PREFIX for _, title in self.titles), default=0)
        for i, (ax, title) in enumerate(self.titles):
            text = title
            if longest > FAR * room:
                text = textwrap.fill(title, int(room), break_long_words=False)
            if lettered:
                text = f"({chr(ord('a') + self.letters + i)}) {text}"
                if self.stacked and not ax.get_subplotspec().is_first_row():  # type: ignore[union-attr]
                    # keep clear of the axis of the panel above
                    text = f"\n{text}"
            written = ax.set_title(text, loc="left")
            if longest > room:
                written.set_fontsize(6.5)

    def finish(self, legend: str = "below", columns: int = 6, direct: bool = False) -> Canvas:
        """Close the sheet and return its canvas, laid out.

        legend: the place of the legend, ``below`` or ``right``; '' for none. A single line gets none.
        columns: the most columns of a legend below.
        direct: True to write names beside lines.
        """
        self._close()
        _draw_legend(self.canvas, legend, columns)
        style.lay_out(self.canvas)
        if direct:
            # the names of lines keep clear of points, whose positions are known only now
            for ax in self.canvas.axes:
                _write_line_names(ax)
        return self.canvas


@dataclass(frozen=True)
class Panel:
    """One plot of a sheet.

    rows: its data.
    data: those of all panels of its kind, which decide the limits, so that panels can be compared.
    place: the number of its place in the grid.
    has_x, has_y, numbered: whether its axes are labelled, and the x axis has numbers.
    """

    sheet: Sheet
    ax: Axes
    rows: pd.DataFrame
    data: pd.DataFrame
    place: int
    has_x: bool = True
    has_y: bool = True
    numbered: bool = True

    def of(self, **where: object) -> Panel:
        """Return the panel with only those rows that have these values by column."""
        return replace(self, rows=self.rows[_mask(self.rows, where)], data=self.data[_mask(self.data, where)])

    @property
    def named(self) -> dict[str, Any]:
        """The values of the first row by column, with methods and tasks under their printed names."""
        values: dict[str, Any] = {str(column): value for column, value in self.rows.iloc[0].items()}
        for column in values.keys() & set(METHOD_COLUMNS):
            values[column] = looks.name_methods(str(values[column]))
        for column in values.keys() & {"task", "over", "source"}:
            values[column] = name_task(str(values[column]))
        return values

    def label(self, title: str = "", x: str = "", y: str = "") -> None:
        """Write the panel's title and the labels of its axes, if this panel has any."""
        if title:
            self.sheet.titles.append((self.ax, title))
        if self.has_x:
            self.ax.set_xlabel(x)
        if self.has_y:
            self.ax.set_ylabel(y)
        if self.numbered:
            self.ax.tick_params(labelbottom=True)

    def color(self, image: Any, label: str, own: bool = False) -> None:
        """Give the panel a colour bar, of its place's ``own`` or one that all panels share."""
        self.sheet.coloured.setdefault(self.place if own else 0, []).append((self.ax, image, label))


def _mask(data: pd.DataFrame, where: Mapping[str, object]) -> pd.Series[bool]:
    mask = pd.Series(True, index=data.index)
    for column, value in where.items():
        mask &= data[column] == value
    return mask


def lines(
    panel: Panel,
    x: str,
    y: str,
    hue: str,
    *,
    interval: tuple[str, str] | None = None,
    level: bool = False,
    fails: bool = False,
    first_band: bool = False,
    unit: str = "",
    look: Mapping[str, object] | None = None,
    looks_of: Mapping[str, Mapping[str, object]] | None = None,
    quiet: Sequence[str] = (),
    crowd: str = "",
    shades: bool = False,
    shaded: str = "",
    log_x: bool = False,
) -> pd.DataFrame:
    """Draw a line for each value of the column ``hue``, with its intervals. Return the data of lines of all panels.

    interval: the columns of the ends of intervals, drawn as bands around one or two lines, as error bars for more.
    level: True to draw the full cache as a dashed line.
    fails: True to write that the model fails in place of lines, if the level is next to 0.
    first_band: True if only the first line shows its interval, as a band.
    unit: a column, each value of which has a line of its own with the look of its ``hue``.
    look, looks_of: matplotlib's keywords for all lines, and by value of ``hue``.
    quiet: the values of ``hue`` that are drawn thin and grey.
    crowd: the common name of more than seven lines, which are then thin and grey, beside their mean.
    shades: True if the values of ``hue`` have an order, which their colours show.
    shaded: a column; points with True have a grey background.
    log_x: True if the x axis is to be logarithmic.
    """
    ax, rows, own_looks = panel.ax, panel.rows, looks_of or {}
    low, high = interval or ("", "")
    is_level = rows["series"] == FULL if level else pd.Series(False, index=rows.index)
    curves = panel.data[panel.data["series"] != FULL] if level else panel.data
    failed = _draw_level(ax, rows[is_level].dropna(subset=[y]), y, low, fails)
    names = list(dict.fromkeys(curves[hue]))
    method_looks = looks.looks_of([str(name) for name in names])
    crowded = bool(crowd) and len(names) > len(style.PALETTE)
    # more than two bands would hide each other, so points have error bars instead, which stand beside each other
    has_bars = bool(low) and rows.loc[~is_level, hue].nunique() > MOST_BANDS and not first_band
    # only x as declared is moved, since all curves have points there; a measured position stays where it is
    dodged = has_bars and x == "x" and bool(rows[low].notna().any())
    # a name with keywords of its own takes no marker or colour from the others: they are numbered without it
    unstyled = [name for name in names if name not in own_looks]
    for i, name in enumerate(names):
        curve = rows[~is_level & (rows[hue] == name)].sort_values(x, kind="stable")
        if failed:
            # NaN draws no points, but keeps the curve's entry in the legend
            curve = curve.assign(**{y: np.nan, low: np.nan, high: np.nan})
        if dodged:
            # there are more than MOST_BANDS names here, so the division is possible
            curve = _dodge(curve, x, curves[x], i / (len(names) - 1) - 0.5, log_x)
        number = unstyled.index(name) if name in unstyled else 0
        line_look: dict[str, Any] = dict(style.series(number, len(curve)))
        if hue in METHOD_COLUMNS:
            line_look = dict(style.of_look(method_looks[str(name)], len(curve)))
        if shades:
            line_style = looks.LINES[number % len(looks.LINES)]
            line_look = {"color": style.shades(len(names))[number], "linestyle": line_style, "lw": 0.8}
        line_look |= dict(look or {}) | dict(own_looks.get(str(name), {}))
        if crowded or name in quiet:
            line_look = {"color": style.GREY, "lw": 0.6, "zorder": BEHIND}
        # equal labels are one entry of the legend, which stands for all lines of a crowd
        line_look = {"label": crowd if crowded else _label_line(hue, name, method_looks)} | line_look
        units: Iterable[tuple[object, pd.DataFrame]] = curve.groupby(unit, sort=False) if unit else [(0, curve)]
        for _, line in units:
            if line.empty:
                continue
            if shaded and line[shaded].any():
                ground = line[line[shaded]]
                ax.scatter(ground[x], ground[y], s=75, color=style.PALE, linewidths=0, zorder=0.5)
            (drawn,) = ax.plot(line[x], line[y], **line_look)
            if low and (name == names[0] or not first_band):
                # points without a line have nothing that a band could go along
                with_band = line_look.get("linestyle") != "none" and not has_bars
                bounded = line.dropna(subset=[low, high])
                _draw_intervals(ax, bounded[x], bounded[y], bounded[low], bounded[high], drawn.get_color(), with_band)
    if crowded:
        mean = rows.groupby(x)[y].mean()
        ax.plot(mean.index, mean, color=style.BLUE, lw=1.6, marker="o", label="mean")
    # the level is a line across the panel, so the x of its rows must not decide the limits
    return curves


def _draw_level(ax: Axes, full: pd.DataFrame, y: str, low: str, fails: bool) -> bool:
    """Draw the full cache's score as a dashed line, or write that the model fails. Return True if it fails."""
    if full.empty:
        return False
    first = full.iloc[0]
    # the score is next to 0, or its interval reaches 0; below FEWEST examples an interval is too uncertain to decide
    if fails and (first[y] < 100 * stats.FLOOR or (first["n"] >= stats.FEWEST and first[low] <= 0)):
        text = f"the model fails\non this task\n(full cache {first[y]:.1f})"
        ax.text(0.5, 0.55, text, transform=ax.transAxes, ha="center", va="center", fontsize=7, color=style.GREY)
        ax.set_axis_off()
        return True
    ax.axhline(float(first[y]), color=style.GREY, ls="--", lw=0.9, label="full cache", zorder=0)
    return False


def _label_line(hue: str, name: object, method_looks: Mapping[str, looks.Look]) -> str:
    if hue in METHOD_COLUMNS:
        return method_looks[str(name)].name
    return name_task(str(name)) if hue in ("task", "source") else str(name)


def _dodge(rows: pd.DataFrame, x: str, all_x: pd.Series[float], side: float, log_x: bool) -> pd.DataFrame:
    # error bars of curves with equal x stand beside each other: the first and the last curve move apart by DODGED
    if log_x:
        # on a logarithmic axis a distance is a factor: (max / min)^(DODGED * side)
        return rows.assign(**{x: rows[x] * (all_x.max() / all_x.min()) ** (DODGED * side)})
    return rows.assign(**{x: rows[x] + DODGED * side * (all_x.max() - all_x.min())})


def _draw_intervals(
    ax: Axes, x: pd.Series, y: pd.Series, low: pd.Series, high: pd.Series, color: Any, with_band: bool
) -> None:
    if x.empty:
        return
    if with_band:
        ax.fill_between(x, low, high, color=color, alpha=0.13, linewidth=0)
    else:
        # errorbar takes the distances of both ends from the point
        ax.errorbar(x, y, (y - low, high - y), ls="", elinewidth=0.5, color=color, alpha=0.8)


def bars(panel: Panel, x: str, y: str, marked: str = "") -> None:
    """Draw a bar for each x; one with True in the column ``marked`` is red. Only the first row of an x counts."""
    rows = panel.rows.drop_duplicates(x)
    colors = [style.GREY] * len(rows)
    if marked:
        colors = list(np.where(rows[marked], style.VERMILLION, style.GREY))
    panel.ax.bar(rows[x], rows[y], width=0.8, color=colors)


def heat(
    panel: Panel,
    x: str,
    y: str,
    value: str,
    *,
    limits: tuple[float | None, float | None] = (None, None),
    floor: float = 0,
    numbers: str = "",
    runs: bool = False,
) -> Any:
    """Draw a map of the mean ``value`` of each x and y, x to the right and y downwards. Return matplotlib's image.

    limits: the ends of the colours.
    floor: the lowest value of a logarithmic map that ends at 1; 0 for a linear one.
    numbers: the format of the values in a map with few of them.
    runs: True if the rows of the map are runs of tokens.
    """
    table = panel.rows.pivot_table(index=y, columns=x, values=value)
    labels = [f"{name:g}" for name in table.index if isinstance(name, int | float)]
    if not labels:
        # y are names, not numbers: pivot_table has sorted them, and they go back to the order of the data
        table = table.loc[list(dict.fromkeys(panel.rows[y]))]
        labels = [looks.name_methods(str(name)) for name in table.index]
    norm = None
    if floor:
        # a logarithm needs values above 0
        table = table.clip(lower=floor)
        norm = LogNorm(floor, 1)
    image = style.heat(
        panel.ax,
        table,
        labels,
        columns=[f"{name:g}" for name in table.columns],
        # numbers of a large map would be too small to read
        numbers="" if table.size > 100 else numbers,
        vmin=limits[0],
        vmax=limits[1],
        norm=norm,
    )
    if runs:
        style.token_ticks(panel.ax, list(table.index))
    return image


def set_x(
    panel: Panel,
    values: pd.Series[float],
    scale: str = "",
    ticks: str | Sequence[float] = (),
    right: float | None = None,
) -> None:
    """Set the scale and the ticks of the x axis.

    values: those of all panels, so that panels can be compared.
    scale: ``log``, ``log2``, ``auto`` (logarithmic if the values are far apart) or '' for linear.
    ticks: ``data``, ``even``, or a list; () leaves matplotlib's.
    right: the right end of the axis.
    """
    ax = panel.ax
    _set_scale(ax.set_xscale, ax.xaxis, scale, values.dropna())
    xs = sorted(values.unique())
    if ticks:
        # minor ticks of a logarithmic axis would stand between those that are set
        ax.xaxis.set_minor_locator(NullLocator())
    if ticks == "even":
        # matplotlib writes the labels of these ticks
        indices, _ = style.integer_ticks(xs, most=9)
        ax.xaxis.set_major_locator(FixedLocator([xs[i] for i in indices]))
    elif ticks:
        chosen = list(xs)
        if not isinstance(ticks, str):
            # a tick outside of the data would widen the axis
            chosen = [tick for tick in ticks if xs[0] / 1.15 <= tick <= (right or 1.15 * xs[-1])]
        elif scale == "log":
            # those whose labels have room: each more than 1.2 times the one before it
            chosen = xs[:1]
            for value in xs[1:]:
                if value > 1.2 * chosen[-1]:
                    chosen.append(value)
        ax.set_xticks(chosen, [f"{tick:g}" for tick in chosen])
    if right is not None:
        ax.set_xlim(right=right)


def reverse_x(panel: Panel) -> None:
    """Let x run from right to left."""
    # panels with a shared x axis turn it together, and a second call would turn it back
    if not panel.ax.xaxis_inverted():
        panel.ax.invert_xaxis()


def set_y(
    panel: Panel, values: pd.Series[float], scale: str = "", decades: float = 0, top: pd.Series[float] | None = None
) -> None:
    """Set the scale and the ends of the y axis.

    values: those of all panels, so that panels can be compared.
    scale: as in ``set_x``.
    decades: the axis ends at most this many powers of ten below the highest value.
    top: the upper ends of intervals, or the values, to run from 0 to the highest, or to 100 if that is near.
    """
    values = values.dropna()
    _set_scale(panel.ax.set_yscale, panel.ax.yaxis, scale, values)
    if decades:
        # the axis begins so many decades below the highest value, or just below the lowest if that is higher; values
        # are clipped, since a logarithmic axis has no 0
        lowest = max(values.max() * 10**-decades, 0.8 * values.clip(lower=1e-12).min())
        panel.ax.set_ylim(lowest, 1.6 * values.max())
    if top is not None:
        # intervals may reach above all values
        highest = float(max(values.max(), 0, top.max()))
        # per cent that come near to 100 get the whole scale, with 4 % of room at both ends
        if 60 < highest <= 100:
            highest = 100.0
        panel.ax.set_ylim(-0.04 * highest, 1.04 * highest)


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


def mark_x(panel: Panel, x: str, value: float, text: str = "") -> None:
    """Draw a dotted vertical line, with a text above it, if the panel's own data reach it."""
    # elsewhere it would widen the axis
    if panel.rows[x].min() <= value <= panel.rows[x].max():
        panel.ax.axvline(value, color=style.GREY, lw=0.6, ls=":")
        if text:
            # x in data, y as a share of the axes' height: just above the panel
            transform = panel.ax.get_xaxis_transform()
            panel.ax.text(value, 1.01, text, transform=transform, ha="center", fontsize=6, color=style.GREY)


def mark_y(panel: Panel, value: float) -> None:
    """Draw a dotted horizontal line."""
    panel.ax.axhline(value, color=style.GREY, lw=0.6, ls=":")


def _write_line_names(ax: Axes) -> None:
    # the name of each line stands beside its highest point: (x, y, name, colour)
    highest: list[tuple[float, float, str, str]] = []
    points: list[list[float]] = []
    for line in ax.get_lines():
        label = str(line.get_label())
        positions = np.asarray(line.get_xydata(), dtype=float).tolist()
        # lines without a label of their own get one with _ from matplotlib; reference lines have no markers
        if label.startswith("_") or not positions or line.get_marker() in ("", "None"):
            continue
        points += positions
        x, y = max(positions, key=lambda position: position[1])
        highest.append((x, y, label, str(line.get_color())))
    style.write_names(ax, highest, points)


def _draw_legend(fig: Any, where: str, columns: int) -> None:
    # lines of one label look alike in all panels, so any of them stands for the label
    handles: dict[str, Any] = {}
    for ax in fig.axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles[label] = handle
    # quiet lines last
    labels = sorted(handles, key=lambda label: handles[label].get_zorder() == BEHIND)
    # one line needs no legend: the heading names it
    if not where or len(labels) <= 1:
        return
    entries = [handles[label] for label in labels]
    if where == "below":
        columns = min(columns, len(labels))
        fig.legend(entries, labels, loc="outside lower center", ncols=columns, columnspacing=1.2)
    else:
        fig.legend(entries, labels, loc="outside right center")
