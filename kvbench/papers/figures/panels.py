"""Draw tidy data as pictures: grids of panels with lines, points, bars or a map, placed by the values of columns.

A picture is a value, which figures.yaml declares beside the runs behind it. Defaults fit most figures, since nearly all
panels are lines over one column.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure as Canvas

from kvbench.papers.figures.head import Head
from kvbench.papers.figures.names import name_task
from kvbench.papers.figures.panel import Panel, mask_rows, set_axes
from kvbench.report import looks, style
from kvbench.tasks.metrics import stats

METHOD_COLUMNS = ("series", "method")
"""Columns whose values are methods: each has its own look and printed name (kvbench.report.looks)."""
MOST_BANDS = 2  # so many curves have bands around them; more bands would hide each other, and become error bars
DODGED = 0.05  # points with error bars that share one x are spread over this share of the axis
PREFIX = len("(a) ")  # the characters that a letter adds to a title
FAR = 1.4  # a title longer than so many times its room is broken, since it is too long even in small letters
BEHIND = 1.9  # the zorder of quiet lines, just below matplotlib's 2 for lines; the legend recognises them by it


class _ColouredPanel(NamedTuple):
    """A drawn panel with colours that a colour bar explains.

    image: matplotlib's map or points.
    label: the label of the colour bar.
    """

    ax: Axes
    image: Any
    label: str


@dataclass(frozen=True)
class Picture:
    """A grid of places that each hold all ``panels``, one place for each pair of values of two columns of the data.

    panels: the panels of a place. They are stacked if ``heights`` are given, else they stand side by side.
    width: the width of the figure in inches.
    height, base: in inches. The figure is ``base`` high, plus ``height`` for each row of the grid, plus its head.
    rows, columns: the columns of the data whose values make the rows and columns of the grid; '' for a single one.
    wrap: the most places in a row of the grid; 0 for no limit.
    heights: the relative heights of stacked panels.
    names: for a column, the texts that replace its values, in the order in which places are drawn.
    sharex, sharey: as in matplotlib's ``subplots``.
    legend: the place of the legend, ``below`` or ``right``; '' for none.
    legend_columns: the most columns of a legend below.
    bars: ``each`` for a colour bar at each place of the grid, ``one`` for a common one.
    beside: a second picture of the same data, at the right.
    share: the width of this picture over the width of the second one.
    """

    panels: tuple[Panel, ...]
    width: float
    height: float
    base: float = 0
    rows: str = ""
    columns: str = ""
    wrap: int = 0
    heights: Sequence[float] = ()
    names: Mapping[str, Mapping[object, str]] = field(default_factory=dict)
    sharex: bool | str = False
    sharey: bool | str = False
    legend: str = "below"
    legend_columns: int = 6
    bars: str = "one"
    beside: Picture | None = None
    share: float = 1

    def draw(self, data: pd.DataFrame, heading: str = "", note: str = "") -> Canvas:
        """Return the drawing of ``data``, laid out, with a ``heading`` and a ``note`` above it."""
        for column, texts in self.names.items():
            data = data.assign(**{column: _replace_values(data[column], texts)})
        places = self._list_places(data)
        places_down = math.ceil(len(places) / self._count_places_across(places))
        head = Head.of(heading, note, self.width)
        fig = style.canvas(self.width, self.base + self.height * places_down + head.height)
        head.write(fig)
        if self.beside is None:
            self._fill(fig, data, first_letter=0)
        else:
            halves: Any = fig.subfigures(1, 2, width_ratios=[self.share, 1])
            # the letters of the second picture go on where those of the first end
            letters_used = self._fill(halves[0], data, first_letter=0)
            self.beside._fill(halves[1], data, first_letter=letters_used)
        _draw_legend(fig, self.legend, self.legend_columns)
        style.lay_out(fig)
        if any(panel.direct for panel in self.panels):
            # the names of lines keep clear of points, whose positions are known only now
            for ax in fig.axes:
                _write_line_names(ax)
        return fig

    def _list_places(self, data: pd.DataFrame) -> list[dict[str, object]]:
        # rows that a place does not show, such as those of the picture beside, may have no value in these columns
        data = data[mask_rows(data, self.panels[0].where)]
        places: list[dict[str, object]] = [{}]
        for column in (self.rows, self.columns):
            if not column:
                continue
            values = list(dict.fromkeys(data[column]))
            if column in self.names:
                values = [text for text in self.names[column].values() if text in values]
            # each place so far becomes one for each value; the last column varies fastest, so its values stand beside
            # each other
            longer_places = []
            for place in places:
                longer_places += [place | {column: value} for value in values]
            places = longer_places
        return places

    def _count_places_across(self, places: Sequence[Mapping[str, object]]) -> int:
        # without a column there is one place in a row: its value is None
        count = len({place.get(self.columns) for place in places})
        if not self.wrap or count <= self.wrap:
            return count
        # rows of about equal length: five places are three and two, not four and one
        return math.ceil(count / math.ceil(count / self.wrap))

    def _fill(self, fig: Any, data: pd.DataFrame, first_letter: int) -> int:
        places = self._list_places(data)
        places_across = self._count_places_across(places)
        places_down = math.ceil(len(places) / places_across)
        # the panels of a place are stacked if there are heights, else they stand side by side
        panels_down = len(self.heights) or 1
        panels_across = len(self.panels) // panels_down
        axes = fig.subplots(
            places_down * panels_down,
            places_across * panels_across,
            height_ratios=list(self.heights or [1]) * places_down,
            sharex=self.sharex,
            sharey=self.sharey,
            squeeze=False,
        )
        last_row_has_gaps = len(places) % places_across > 0
        titles: list[tuple[Axes, str]] = []
        # the panels that share each colour bar, by its number
        panels_by_bar: dict[int, list[_ColouredPanel]] = {}
        for i, place in enumerate(places):
            row, column = divmod(i, places_across)
            in_last_row = i + places_across >= len(places)
            # the axes of the place's panels, downwards or to the right
            down, across = row * panels_down, column * panels_across
            place_axes = axes[down : down + panels_down, across : across + panels_across].flat
            for ax, panel in zip(place_axes, self.panels, strict=True):
                everything = data[mask_rows(data, panel.where)]
                rows = everything[mask_rows(everything, place)]
                if rows.empty:
                    continue
                image = KINDS[panel.kind](ax, rows, panel, everything)
                set_axes(ax, rows, panel, everything)
                first_row = _read_printed_values(rows.iloc[0])
                if panel.title:
                    titles.append((ax, panel.title.format(**first_row)))
                # x is labelled below the last row of the grid, or everywhere if that row has gaps; y only at the left
                _label_axes(ax, panel, first_row, x=in_last_row or last_row_has_gaps, y=column == 0)
                # a shared x axis hides the numbers of upper panels: show those of unstacked panels, and the lowest ones
                is_lowest = in_last_row and panel is self.panels[-1]
                if panels_down == 1 or is_lowest:
                    ax.tick_params(labelbottom=True)
                if image is not None:
                    bar = i if self.bars == "each" else 0
                    label = panel.bar.format(**first_row)
                    panels_by_bar.setdefault(bar, []).append(_ColouredPanel(ax, image, label))
        # places that the grid has beyond those of the data
        for ax in axes.flat:
            if not ax.has_data():
                ax.set_axis_off()
        # about 15 characters of a title fit into an inch
        max_characters = 15 * self.width / (places_across * panels_across)
        self._write_titles(titles, first_letter, max_characters, stacked=panels_down > 1)
        for coloured_panels in panels_by_bar.values():
            _draw_colour_bar(fig, coloured_panels)
        if panels_down > 1 and places_down > 1:
            style.tighten(fig)
        return first_letter + len(titles)

    def _write_titles(
        self, titles: Sequence[tuple[Axes, str]], first_letter: int, max_characters: float, stacked: bool
    ) -> None:
        lettered = first_letter > 0 or len(titles) > 1 or self.beside is not None
        longest = max((len(title) + PREFIX for _, title in titles), default=0)
        for i, (ax, title) in enumerate(titles):
            text = title
            if longest > FAR * max_characters:
                text = textwrap.fill(title, int(max_characters), break_long_words=False)
            if lettered:
                letter = chr(ord("a") + first_letter + i)
                text = f"({letter}) {text}"
                if stacked and not ax.get_subplotspec().is_first_row():  # type: ignore[union-attr]
                    # keep clear of the axis of the panel above
                    text = f"\n{text}"
            written = ax.set_title(text, loc="left")
            if longest > max_characters:
                written.set_fontsize(6.5)


def _label_axes(ax: Axes, panel: Panel, first_row: Mapping[str, Any], *, x: bool, y: bool) -> None:
    if x:
        ax.set_xlabel(panel.xlabel.format(**first_row))
    if y:
        ax.set_ylabel(panel.ylabel.format(**first_row))


def _draw_colour_bar(fig: Any, panels: Sequence[_ColouredPanel]) -> None:
    # the last panel's image and label stand for those of all panels
    last_panel = panels[-1]
    all_axes = [panel.ax for panel in panels]
    bar_axes = fig.colorbar(last_panel.image, ax=all_axes, aspect=20, pad=0.01, label=last_panel.label)
    bar_axes.outline.set_visible(False)


def draw_lines(ax: Axes, rows: pd.DataFrame, panel: Panel, everything: pd.DataFrame) -> None:
    """Draw a panel of lines: one for each value of ``hue``, with its intervals, and a dashed one for the ``level``.

    rows: the data of this panel.
    everything: the data of all panels of the picture, so that a name has one look in all of them.
    """
    is_level = pd.Series(False, index=rows.index)
    curves = everything
    if panel.level:
        is_level = mask_rows(rows, panel.level)
        curves = everything[~mask_rows(everything, panel.level)]
    fails = _draw_level(ax, rows[is_level].dropna(subset=[panel.y]), panel)
    names = list(dict.fromkeys(curves[panel.hue]))
    method_looks = looks.looks_of([str(name) for name in names])
    crowded = bool(panel.crowd) and len(names) > len(style.PALETTE)
    # more than two bands would hide each other, so points have error bars instead, which stand beside each other
    drawn_here = rows.loc[~is_level, panel.hue].nunique()
    has_bars = bool(panel.low) and drawn_here > MOST_BANDS and not panel.first_band
    # only x as declared is moved, since all curves have points there; a measured position stays where it is
    dodged = has_bars and panel.x == "x" and bool(rows[panel.low].notna().any())
    for i, name in enumerate(names):
        curve_rows = rows[~is_level & (rows[panel.hue] == name)].sort_values(panel.x, kind="stable")
        if fails:
            # NaN draws no points, but keeps the curve's entry in the legend
            curve_rows = curve_rows.assign(**{panel.y: np.nan, panel.low: np.nan, panel.high: np.nan})
        if dodged:
            # there are more than MOST_BANDS names here, so the division is possible
            side = i / (len(names) - 1) - 0.5
            curve_rows = _dodge(curve_rows, curves[panel.x], side, panel)
        look = _choose_line_look(panel, name, names, points=len(curve_rows), method_looks=method_looks)
        if crowded or name in panel.quiet:
            look = {"color": style.GREY, "lw": 0.6, "zorder": BEHIND}
        # equal labels are one entry of the legend, which stands for all lines of a crowd
        label = panel.crowd if crowded else _label_line(panel, name, method_looks)
        has_interval = bool(panel.low) and (name == names[0] or not panel.first_band)
        units: Iterable[tuple[object, pd.DataFrame]] = [(0, curve_rows)]
        if panel.unit:
            units = curve_rows.groupby(panel.unit, sort=False)
        for _, line in units:
            if line.empty:
                continue
            color = _draw_line(ax, line, panel, {"label": label} | look)
            if has_interval:
                # points without a line have nothing that a band could go along
                with_band = look.get("linestyle") != "none" and not has_bars
                bounded = line.dropna(subset=[panel.low, panel.high])
                _draw_intervals(ax, bounded, panel, color=color, with_band=with_band)
    if crowded:
        mean = rows.groupby(panel.x)[panel.y].mean()
        ax.plot(mean.index, mean, color=style.BLUE, lw=1.6, marker="o", label="mean")


def _draw_level(ax: Axes, level_rows: pd.DataFrame, panel: Panel) -> bool:
    if panel.fails and _write_failure(ax, level_rows, panel):
        return True
    if len(level_rows):
        level = float(level_rows[panel.y].iloc[0])
        ax.axhline(level, color=style.GREY, ls="--", lw=0.9, label="full cache", zorder=0)
    return False


def _draw_line(ax: Axes, line: pd.DataFrame, panel: Panel, keywords: style.LineKeywords) -> Any:
    if panel.shaded and line[panel.shaded].any():
        ground = line[line[panel.shaded]]
        ax.scatter(ground[panel.x], ground[panel.y], s=75, color=style.PALE, linewidths=0, zorder=0.5)
    (curve,) = ax.plot(line[panel.x], line[panel.y], **keywords)
    return curve.get_color()


def _label_line(panel: Panel, name: object, method_looks: Mapping[str, looks.Look]) -> str:
    if panel.hue in METHOD_COLUMNS:
        return method_looks[str(name)].name
    if panel.hue in ("task", "source"):
        return name_task(str(name))
    return str(name)


def _choose_line_look(
    panel: Panel, name: Any, names: Sequence[Any], points: int, method_looks: Mapping[str, looks.Look]
) -> style.LineKeywords:
    # a name with keywords of its own takes no marker or colour from the others: they are numbered without it
    unstyled = [other for other in names if other not in panel.looks]
    number = unstyled.index(name) if name in unstyled else 0
    look = style.series(number, points)
    if panel.hue in METHOD_COLUMNS:
        look = style.of_look(method_looks[str(name)], points)
    if panel.shades:
        line_style = looks.LINES[number % len(looks.LINES)]
        look = {"color": style.shades(len(names))[number], "linestyle": line_style, "lw": 0.8}
    # the panel's own keywords win over the defaults, and a line's own over the panel's
    look |= panel.look
    look |= panel.looks.get(str(name), {})
    return look


def _write_failure(ax: Axes, level_rows: pd.DataFrame, panel: Panel) -> bool:
    if level_rows.empty:
        return False
    full = level_rows.iloc[0]
    # below FEWEST examples an interval is too uncertain to decide
    reaches_zero = full["n"] >= stats.FEWEST and full[panel.low] <= 0
    if full[panel.y] >= 100 * stats.FLOOR and not reaches_zero:
        return False
    ax.text(
        0.5,
        0.55,
        f"the model fails\non this task\n(full cache {full[panel.y]:.1f})",
        transform=ax.transAxes,
        ha="center",
        va="center",
        fontsize=7,
        color=style.GREY,
    )
    ax.set_axis_off()
    return True


def _dodge(rows: pd.DataFrame, all_x: pd.Series[float], side: float, panel: Panel) -> pd.DataFrame:
    if panel.xscale.startswith("log"):
        # on a logarithmic axis a distance is a factor: (max / min)^(DODGED * side)
        factor = (all_x.max() / all_x.min()) ** (DODGED * side)
        return rows.assign(**{panel.x: rows[panel.x] * factor})
    return rows.assign(**{panel.x: rows[panel.x] + DODGED * side * (all_x.max() - all_x.min())})


def _draw_intervals(ax: Axes, rows: pd.DataFrame, panel: Panel, *, color: Any, with_band: bool) -> None:
    if rows.empty:
        return
    if with_band:
        ax.fill_between(rows[panel.x], rows[panel.low], rows[panel.high], color=color, alpha=0.13, linewidth=0)
    else:
        # errorbar takes the distances of both ends from the point
        spread = (rows[panel.y] - rows[panel.low], rows[panel.high] - rows[panel.y])
        ax.errorbar(rows[panel.x], rows[panel.y], spread, ls="", elinewidth=0.5, color=color, alpha=0.8)


def draw_points(ax: Axes, rows: pd.DataFrame, panel: Panel, everything: pd.DataFrame) -> Any:
    """Draw a panel with a point for each row, coloured by ``value``. Return the points, for a colour bar."""
    return ax.scatter(rows[panel.x], rows[panel.y], c=rows[panel.value], s=11, linewidths=0.3, edgecolors="black")


def draw_bars(ax: Axes, rows: pd.DataFrame, panel: Panel, everything: pd.DataFrame) -> None:
    """Draw a panel with a bar for each x; a ``marked`` bar is red. Only the first row of an x counts."""
    rows = rows.drop_duplicates(panel.x)
    colors = [style.GREY] * len(rows)
    if panel.marked:
        colors = list(np.where(rows[panel.marked], style.VERMILLION, style.GREY))
    ax.bar(rows[panel.x], rows[panel.y], width=0.8, color=colors)


def draw_map(ax: Axes, rows: pd.DataFrame, panel: Panel, everything: pd.DataFrame) -> Any:
    """Draw a map of the mean ``value`` of each x and y, x to the right and y downwards.

    Return matplotlib's image of the map, for a colour bar.

    everything: the data of all panels of the picture, whose values are the range of a logarithmic map's colours.
    """
    table = rows.pivot_table(index=panel.y, columns=panel.x, values=panel.value)
    row_labels = [f"{value:g}" for value in table.index if isinstance(value, int | float)]
    if not row_labels:
        # y are names, not numbers: pivot_table has sorted them, and they go back to the order of the data
        table = table.loc[list(dict.fromkeys(rows[panel.y]))]
        row_labels = [looks.name_methods(str(name)) for name in table.index]
    lowest, highest = None, None
    if panel.limits:
        lowest, highest = panel.limits
    # numbers of a large map would be too small to read
    numbers = "" if table.size > 100 else panel.numbers
    norm = None
    if panel.log:
        # all maps share one colour bar
        norm = LogNorm(everything[panel.value].min(), everything[panel.value].max())
    if panel.floor:
        # a logarithm needs values above 0
        table = table.clip(lower=panel.floor)
        norm = LogNorm(panel.floor, 1)
    column_labels = [f"{value:g}" for value in table.columns]
    image = style.heat(
        ax, table, row_labels, columns=column_labels, numbers=numbers, vmin=lowest, vmax=highest, norm=norm
    )
    if panel.runs:
        style.token_ticks(ax, list(table.index))
    return image


KINDS: dict[str, Callable[[Axes, pd.DataFrame, Panel, pd.DataFrame], Any]] = {
    "lines": draw_lines,
    "points": draw_points,
    "bars": draw_bars,
    "heat": draw_map,
}
"""The functions that draw a panel on its axes, by ``Panel.kind``. They take (axes, rows, panel, everything)."""


def _replace_values(values: pd.Series[Any], texts: Mapping[object, str]) -> pd.Series[Any]:
    return values.map(lambda value: texts.get(value, value))


def _read_printed_values(row: pd.Series) -> dict[str, Any]:
    values: dict[str, Any] = {str(column): value for column, value in row.items()}
    for column in METHOD_COLUMNS:
        if column in values:
            values[column] = looks.name_methods(str(values[column]))
    for column in ("task", "over", "source"):
        if column in values:
            values[column] = name_task(str(values[column]))
    return values


def _write_line_names(ax: Axes) -> None:
    # (x, y, name, colour) of each line
    highest: list[tuple[float, float, str, str]] = []
    # [x, y] of all points, which the names keep clear of
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
    # False sorts before True
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
