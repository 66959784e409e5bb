"""Pictures of tidy data: panels of lines, points, bars or a map, placed by the values of columns."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

from kvbench.report import style

WIDE = 10  # highest over lowest value, from where on an ``auto`` scale is logarithmic
PREFIX = len("(a) ")  # what a letter adds to a title
FAR = 1.4  # times the room of a title, from where on it reaches into the next panel even in small letters
BEHIND = 1.9  # zorder of quiet lines, just below the 2 that matplotlib gives to lines; the legend knows them by it


@dataclass(frozen=True)
class Panel:
    """One plot of a picture, with the columns that it shows and its look.

    kind: lines, points, bars or heat. The other texts name columns, except labels and scales.
    where: values that a row must have. title, xlabel, ylabel, bar: texts with ``{column}`` for a value of the first
    row; ``bar`` labels the colours of heat and points. hue: a line for each of its values, in a look of its own;
    unit: several lines in one look. value: the colours of heat and points. marked: bars that stand out.
    low, high: a band around lines, error bars where they have no line; first_band: around the first line alone.
    level: values of the rows that are a dashed horizontal line. look, looks: matplotlib's keywords for all lines and by
    ``hue``. quiet: values of ``hue`` drawn thin and grey. crowd: the name of more than seven lines, which are then thin
    and grey, with their mean. shades: ``hue`` has an order. ticks: ``data``, ``even``, ``powers`` (of 2) or a list.
    decades: how far a logarithmic axis reaches down. top: the axis goes from 0 to 100 or to the highest; bottom: from
    there. at_x, at_y: dotted lines. shade: a range of x. limits: of a map's colours; floor: the lowest of a logarithmic
    one; numbers: how its values are printed where there are few; runs: its rows are runs of tokens.
    """

    kind: str
    x: str
    y: str
    where: Mapping[str, Any] = field(default_factory=dict)
    title: str = ""
    xlabel: str = ""
    ylabel: str = ""
    bar: str = ""
    hue: str = ""
    unit: str = ""
    value: str = ""
    marked: str = ""
    low: str = ""
    high: str = ""
    first_band: bool = False
    level: Mapping[str, Any] = field(default_factory=dict)
    look: Mapping[str, Any] = field(default_factory=dict)
    looks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    quiet: Sequence[str] = ()
    crowd: str = ""
    shades: bool = False
    xscale: str = ""
    yscale: str = ""
    ticks: str | Sequence[float] = ()
    reverse: bool = False
    decades: float = 0
    top: bool = False
    bottom: float | None = None
    at_x: float | None = None
    at_y: float | None = None
    shade: Sequence[float] = ()
    limits: Sequence[float] = ()
    floor: float = 0
    numbers: str = ""
    runs: bool = False


@dataclass(frozen=True)
class Picture:
    """A grid with a place for each pair of values of the columns ``rows`` and ``columns``; each holds all ``panels``.

    panels: stacked if ``heights`` are given, else side by side.
    wrap: the most places in a row of the grid; 0 for no limit.
    width, height, base: in inches; the figure is ``base`` plus ``height`` for each row of the grid high.
    names: for a column, the texts of its values, in the order in which they are drawn.
    sharex, sharey: as in matplotlib's ``subplots``.
    legend, legend_columns: ``below``, ``right`` or '' for none, and its number of columns.
    bars: ``each`` for a colour bar a place, ``one`` for a common one.
    beside, share: a second picture at the right; this one is ``share`` times as wide as it.
    """

    panels: tuple[Panel, ...]
    width: float
    height: float
    base: float = 0
    rows: str = ""
    columns: str = ""
    wrap: int = 0
    heights: Sequence[float] = ()
    names: Mapping[str, Mapping[Any, str]] = field(default_factory=dict)
    sharex: bool | str = False
    sharey: bool | str = False
    legend: str = "below"
    legend_columns: int = 6
    bars: str = "one"
    beside: Picture | None = None
    share: float = 1

    def draw(self, data: pd.DataFrame) -> Canvas:
        """Return the drawing of ``data``."""
        data = data.assign(**{c: data[c].map(lambda v, of=of: of.get(v, v)) for c, of in self.names.items()})
        places = self._places(data)
        fig = style.canvas(self.width, self.base + self.height * math.ceil(len(places) / self._wide(places)))
        if self.beside is None:
            self._fill(fig, data, 0)
        else:
            halves: Any = fig.subfigures(1, 2, width_ratios=[self.share, 1])
            drawn = self._fill(halves[0], data, 0)
            self.beside._fill(halves[1], data, drawn)
        _legend(fig, self.legend, self.legend_columns)
        return fig

    def _places(self, data: pd.DataFrame) -> list[dict[str, Any]]:
        """Return {column: value} of ``rows`` and ``columns`` for each place of the grid, row by row."""
        data = data[_chosen(data, self.panels[0].where)]
        places: list[dict[str, Any]] = [{}]
        for column in filter(None, (self.rows, self.columns)):
            present = list(dict.fromkeys(data[column]))
            order = [v for v in self.names[column].values() if v in present] if column in self.names else present
            places = [{**place, column: value} for place in places for value in order]
        return places

    def _wide(self, places: Sequence[Mapping[str, Any]]) -> int:
        """Return how many places stand beside each other in a row of the grid."""
        across = len({place.get(self.columns) for place in places})
        return min(across, self.wrap or across)

    def _fill(self, fig: Any, data: pd.DataFrame, first_letter: int) -> int:
        """Draw the panels on ``fig`` and return how many letters are used: ``first_letter`` plus one for each title."""
        places = self._places(data)
        wide, stack = self._wide(places), len(self.heights) or 1
        deep, beside = math.ceil(len(places) / wide), len(self.panels) // stack
        shape: dict[str, Any] = {"sharex": self.sharex, "sharey": self.sharey, "squeeze": False}
        axes = fig.subplots(deep * stack, wide * beside, height_ratios=list(self.heights or [1]) * deep, **shape)
        titles: list[tuple[Axes, str]] = []
        maps: dict[int, list[tuple[Axes, Any, str]]] = {}
        for (i, place), (j, panel) in product(enumerate(places), enumerate(self.panels)):
            (row, column), (down, across) = divmod(i, wide), (j, 0) if stack > 1 else (0, j)
            ax = axes[row * stack + down, column * beside + across]
            everything = data[_chosen(data, panel.where)]
            rows = everything[_chosen(everything, place)]
            if rows.empty:
                continue
            image = KINDS[panel.kind](ax, rows, panel, everything)
            _axes(ax, rows, panel, everything)
            first = rows.iloc[0]
            if panel.title:
                titles.append((ax, panel.title.format(**first)))
            if i + wide >= len(places):
                ax.set_xlabel(panel.xlabel.format(**first))
                ax.tick_params(labelbottom=stack == 1 or j == len(self.panels) - 1)
            if column == 0:
                ax.set_ylabel(panel.ylabel.format(**first))
            if image is not None:
                maps.setdefault(i if self.bars == "each" else 0, []).append((ax, image, panel.bar.format(**first)))
        for ax in axes.flat:
            if not ax.has_data():
                ax.set_axis_off()
        self._write_titles(titles, first_letter, 15 * self.width / (wide * beside), "\n" if stack > 1 else "")
        for group in maps.values():
            bar = fig.colorbar(group[-1][1], ax=[ax for ax, _, _ in group], aspect=20, pad=0.01, label=group[-1][2])
            bar.outline.set_visible(False)
        if stack > 1 and deep > 1:
            style.tighten(fig)
        return first_letter + len(titles)

    def _write_titles(
        self, titles: Sequence[tuple[Axes, str]], first_letter: int, max_characters: float, gap: str
    ) -> None:
        """Write each panel's title, lettered (a), (b), ... from ``first_letter`` on if the figure has several panels.

        All titles are small if one is longer than ``max_characters``, and broken into lines if one is far longer.
        ``gap`` goes before those below the first row.
        """
        lettered = first_letter or len(titles) > 1 or self.beside
        longest = max((len(t) + PREFIX for _, t in titles), default=0)
        size: dict[str, Any] = {"fontsize": 6.5} if longest > max_characters else {}
        if longest > FAR * max_characters:
            titles = [(ax, textwrap.fill(t, int(max_characters), break_long_words=False)) for ax, t in titles]
        for i, (ax, title) in enumerate(titles):
            prefix = "" if ax.get_subplotspec().is_first_row() else gap  # type: ignore[union-attr]
            ax.set_title(f"{prefix}({chr(97 + first_letter + i)}) {title}" if lettered else title, loc="left", **size)


def lines(ax: Axes, rows: pd.DataFrame, panel: Panel, everything: pd.DataFrame) -> None:
    """Draw a line with its band for each value of ``hue``; without a line style, points with error bars."""
    is_level = _chosen(rows, panel.level) if panel.level else pd.Series(False, index=rows.index)
    level_rows = rows[is_level].dropna(subset=[panel.y])
    if len(level_rows):
        ax.axhline(float(level_rows[panel.y].iloc[0]), color=style.GREY, ls="--", lw=0.9, label="full cache", zorder=0)
    curves = everything[~_chosen(everything, panel.level)] if panel.level else everything
    names = list(dict.fromkeys(curves[panel.hue]))
    crowded = bool(panel.crowd) and len(names) > len(style.PALETTE)
    unstyled = [name for name in names if name not in panel.looks]
    for name in names:
        i = unstyled.index(name) if name in unstyled else 0
        curve_rows = rows[~is_level & (rows[panel.hue] == name)].sort_values(panel.x, kind="stable")
        quiet = crowded or name in panel.quiet
        look = style.series(i, len(curve_rows))
        if panel.shades:
            look = {"color": style.shades(len(names))[i], "linestyle": style.LINES[i % 4], "lw": 0.8}
        look |= {**panel.look, **panel.looks.get(str(name), {})}
        if quiet:
            look = {"color": style.GREY, "lw": 0.6, "zorder": BEHIND}
        for _, line in curve_rows.groupby(panel.unit, sort=False) if panel.unit else [(0, curve_rows)]:
            if line.empty:
                continue
            label = panel.crowd if crowded else f"{name}"
            (curve,) = ax.plot(line[panel.x], line[panel.y], label=label, **look)
            banded = line.dropna(subset=[panel.low, panel.high]) if panel.low else line.iloc[:0]
            if banded.empty or (panel.first_band and name != names[0]):
                continue
            if look.get("linestyle") == "none":
                spread = (banded[panel.y] - banded[panel.low], banded[panel.high] - banded[panel.y])
                ax.errorbar(banded[panel.x], banded[panel.y], spread, ls="", lw=0.5, color=curve.get_color())
            else:
                band: dict[str, Any] = {"color": curve.get_color(), "alpha": 0.13, "linewidth": 0}
                ax.fill_between(banded[panel.x], banded[panel.low], banded[panel.high], **band)
    if crowded:
        mean = rows.groupby(panel.x)[panel.y].mean()
        ax.plot(mean.index, mean, color=style.BLUE, lw=1.6, marker="o", label="mean")


def points(ax: Axes, rows: pd.DataFrame, panel: Panel, everything: pd.DataFrame) -> Any:
    """Draw a point for each row, its colour by ``value``."""
    return ax.scatter(rows[panel.x], rows[panel.y], c=rows[panel.value], s=11, linewidths=0.3, edgecolors="black")


def bars(ax: Axes, rows: pd.DataFrame, panel: Panel, everything: pd.DataFrame) -> None:
    """Draw a bar for each x, red where it is ``marked``."""
    rows = rows.drop_duplicates(panel.x)
    marked = rows[panel.marked] if panel.marked else [False] * len(rows)
    ax.bar(rows[panel.x], rows[panel.y], width=0.8, color=[style.VERMILLION if m else style.GREY for m in marked])


def heat(ax: Axes, rows: pd.DataFrame, panel: Panel, everything: pd.DataFrame) -> Any:
    """Draw a map of means of ``value``, x to the right and y downwards, with its numbers where there are few."""
    table = rows.pivot_table(index=panel.y, columns=panel.x, values=panel.value)
    look: dict[str, Any] = dict(zip(("vmin", "vmax"), panel.limits, strict=False))
    look["numbers"] = panel.numbers if table.size <= 100 else ""
    if panel.floor:
        table, look["norm"] = table.clip(lower=panel.floor), LogNorm(panel.floor, 1)
    image = style.heat(ax, table, [f"{v:g}" for v in table.index], [f"{v:g}" for v in table.columns], **look)
    if panel.runs:
        style.token_ticks(ax, list(table.index))
    return image


KINDS: dict[str, Callable[[Axes, pd.DataFrame, Panel, pd.DataFrame], Any]] = {
    "lines": lines,
    "points": points,
    "bars": bars,
    "heat": heat,
}


def _axes(ax: Axes, rows: pd.DataFrame, panel: Panel, everything: pd.DataFrame) -> None:
    """Set the scales, ticks and limits of a panel, and draw its reference lines."""
    if panel.kind == "heat":
        return
    if panel.level:
        everything = everything[~_chosen(everything, panel.level)]
    values = everything[panel.y].dropna()
    for axis, scale in (("x", panel.xscale), ("y", panel.yscale)):
        if scale == "log2":
            getattr(ax, f"set_{axis}scale")("log", base=2)
            getattr(ax, f"{axis}axis").set_major_formatter(lambda v, _: f"{v:.3g}")
        elif scale == "log":
            getattr(ax, f"set_{axis}scale")("log")
        elif scale == "auto" and values.max() > WIDE * values.min():
            ax.set_yscale("log")
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.yaxis.set_major_formatter(lambda v, _: f"{v:g}")
            ax.yaxis.set_minor_locator(NullLocator())
    xs = sorted(everything[panel.x].unique())
    if panel.ticks == "even":
        ax.xaxis.set_major_locator(FixedLocator([xs[i] for i in style.integer_ticks(xs, 9)[0]]))
    elif panel.ticks:
        ticks = panel.ticks if panel.ticks != "data" else _apart(xs) if panel.xscale == "log" else xs
        if panel.ticks == "powers":
            ticks = [2.0**k for k in range(math.floor(math.log2(xs[0])), math.ceil(math.log2(xs[-1])) + 1)]
        ax.set_xticks(ticks, [f"{t:g}" for t in ticks])
    if panel.ticks:
        ax.xaxis.set_minor_locator(NullLocator())
    if panel.reverse and not ax.xaxis_inverted():
        ax.invert_xaxis()
    maximum = values.max()
    if panel.decades:
        ax.set_ylim(max(maximum * 10**-panel.decades, 0.8 * values.clip(lower=1e-12).min()), 1.6 * maximum)
    elif panel.bottom is not None:
        ax.set_ylim(bottom=panel.bottom)
    elif panel.top:
        highest = max(maximum, everything[panel.high].max() if panel.high else 0)
        # per cent that come near to 100 get the whole scale, with 4 % of room at both ends
        top = 100.0 if 60 < highest <= 100 else float(highest)
        ax.set_ylim(-0.04 * top, 1.04 * top)
    if panel.shade:
        ax.axvspan(*panel.shade, color=style.PALE, alpha=0.4, lw=0)
    if panel.at_x is not None and rows[panel.x].min() <= panel.at_x <= rows[panel.x].max():
        ax.axvline(panel.at_x, color=style.GREY, lw=0.6, ls=":")
    if panel.at_y is not None:
        ax.axhline(panel.at_y, color=style.GREY, lw=0.6, ls=":")


def _apart(values: Sequence[float]) -> list[float]:
    """Return the values that leave room for their labels on a logarithmic axis, the smallest first."""
    ticks = values[:1]
    for value in values[1:]:
        if value > 1.2 * ticks[-1]:
            ticks = [*ticks, value]
    return list(ticks)


def _legend(fig: Any, where: str, columns: int) -> None:
    """Draw one legend for all panels at ``where``, with quiet lines last; draw none if ``where`` is empty."""
    entries = [p for ax in fig.axes for p in zip(*ax.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in entries}
    labels = sorted(handles, key=lambda label: handles[label].get_zorder() == BEHIND)
    if where and labels:
        place: dict[str, Any] = {"loc": "outside right center"}
        if where == "below":
            place = {"loc": "outside lower center", "ncols": min(columns, len(labels)), "columnspacing": 1.2}
        fig.legend([handles[label] for label in labels], labels, **place)


def _chosen(data: pd.DataFrame, where: Mapping[str, Any]) -> pd.Series[bool]:
    """Return a mask of the rows that have these values."""
    mask = pd.Series(np.ones(len(data), bool), index=data.index)
    for column, value in where.items():
        mask &= data[column] == value
    return mask
