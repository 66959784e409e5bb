"""The first part of the report: a card with the verdict on each method, by model and dataset, and a picture of them."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from kvbench.base.formatting import format_number
from kvbench.report import of_store, verdict
from kvbench.report.data import ReportData, ReportRow
from kvbench.report.looks import look_of
from kvbench.report.table import range_text
from kvbench.report.verdict import MethodVerdict
from kvbench.store.store import ResultStore
from kvbench.tasks.metrics import metric

WIDTH, HEIGHT = 560, 300
"""The size of the picture in SVG units, which scale with the page."""
LEFT, RIGHT, TOP, BOTTOM = 48, 16, 14, 44
"""The margins for the axes around the plotted area."""
PLACES = ((7, -5, "start"), (-7, -5, "end"), (7, 13, "start"), (-7, 13, "end"), (0, -10, "middle"), (0, 20, "middle"))
"""Possible positions of a number beside its point: offset to the right, offset down, and SVG's text-anchor."""
LEVELS = {"worse": "worse", "better": "better", "✗": "failed"}
"""The CSS class of a card by the first word of its outcome; cards with another first word have the class open."""


@dataclass(frozen=True)
class VerdictSet:
    """The verdicts on the methods of one model and dataset.

    dataset: its name, with the number of its tasks if it has several.
    examples: the number of examples a task, as text.
    report: the full cache's row and the methods' rows, from which the verdicts are made.
    verdicts: each method's verdict with its row of ``report``.
    """

    model: str
    dataset: str
    examples: str
    report: ReportData
    verdicts: tuple[tuple[MethodVerdict, ReportRow], ...]


@dataclass(frozen=True)
class _Point:
    """A method in the picture: its size in per cent of the full cache, its score and the score's interval."""

    name: str
    size: float
    score: float
    ci: tuple[float, float] | None


@dataclass(frozen=True)
class _Axes:
    """The picture's axes, which both begin at 0.

    widest: the size in per cent at the right end.
    top: the score at the upper end.
    """

    widest: int
    top: int

    def x(self, size: float) -> float:
        """Return the picture's horizontal coordinate of a size in per cent."""
        return LEFT + (WIDTH - LEFT - RIGHT) * size / self.widest

    def y(self, score: float) -> float:
        """Return the picture's vertical coordinate of a score, which SVG counts from the top."""
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - max(0.0, score) / self.top)


class _Box(NamedTuple):
    """An area of the picture that no number may cover, in SVG's coordinates, which grow to the right and down."""

    left: float
    right: float
    upper: float
    lower: float

    def meets(self, other: _Box) -> bool:
        """Return True if two areas overlap. They do not if one ends before the other begins, across or down."""
        apart_across = self.right <= other.left or other.right <= self.left
        apart_down = self.lower <= other.upper or other.lower <= self.upper
        return not (apart_across or apart_down)


def collect_verdicts(store: ResultStore) -> list[VerdictSet]:
    """Return the verdicts on all stored methods that can be compared with a full cache, sorted by model and dataset."""
    sets = []
    for report in of_store.collect_reports(store, for_verdicts=True):
        # the full cache's row comes first, and has no verdict
        pairs = zip(verdict.judge_methods(report), report.rows[1:], strict=True)
        # a method that was not measured has no outcome
        verdicts = tuple((method_verdict, row) for method_verdict, row in pairs if method_verdict.outcome)
        if not verdicts:
            continue
        counts = {cell.summary.n for cell in report.cells if cell.summary is not None}
        dataset = report.columns[0].task
        if len(report.columns) > 1:
            dataset = f"{len(report.columns)} tasks of {of_store.name_dataset(dataset)}"
        sets.append(
            VerdictSet(
                report.model, dataset, examples=f"n = {range_text(counts)} a task", report=report, verdicts=verdicts
            )
        )
    return sets


def render_cards(sets: Sequence[VerdictSet]) -> str:
    """Return the cards and pictures of all sets as HTML."""
    if not sets:
        return "<p>No method stands beside the full cache yet: kvbench run method=snapkv.</p>"
    return "\n".join(map(_render_set, sets))


def _render_set(verdict_set: VerdictSet) -> str:
    points = _list_points(verdict_set)
    # the number of each method's point in the picture
    numbers = {point.name: i for i, point in enumerate(points, start=1)}
    verdicts = [method_verdict for method_verdict, _ in verdict_set.verdicts]
    # methods without a point come last
    verdicts.sort(key=lambda method_verdict: numbers.get(method_verdict.method, len(numbers) + 1))
    cards = [_render_card(method_verdict, numbers.get(method_verdict.method)) for method_verdict in verdicts]
    heading = html.escape(f"{verdict_set.model} on {verdict_set.dataset}, {verdict_set.examples}")
    return f'<h3>{heading}</h3>{_draw_picture(verdict_set, points)}<div class="cards">{"".join(cards)}</div>'


def _render_card(method_verdict: MethodVerdict, number: int | None) -> str:
    """Return a method's card as HTML. ``number`` is that of its point in the picture, None without a point."""
    method, size, tokens, score, difference, divergence, outcome = method_verdict.texts()
    # ``texts`` puts the options of a method below its name
    name, _, options = method.partition("\n")
    start = "" if number is None else f"<b>{number}</b> "
    lines = []
    if size:
        lines.append(f'<p class="size">{html.escape(size)}</p>')
    for text in (score, difference, tokens, divergence):
        if text:
            lines.append(f"<p>{html.escape(text)}</p>")
    first_word, *_ = outcome.split()
    css_class = LEVELS.get(first_word, "open")
    return (
        f'<article class="card {css_class}"><h4>{start}{html.escape(name)}</h4>'
        f"<p>{html.escape(options)}</p>{''.join(lines)}"
        f'<p class="outcome">{html.escape(outcome)}</p></article>'
    )


def _list_points(verdict_set: VerdictSet) -> list[_Point]:
    points = []
    for method_verdict, row in verdict_set.verdicts:
        if method_verdict.score is not None and method_verdict.times_smaller is not None:
            size = 100 / method_verdict.times_smaller
            points.append(_Point(method_verdict.method, size, method_verdict.score, row.score_ci))
    return sorted(points, key=lambda point: point.size)


def _draw_picture(verdict_set: VerdictSet, points: Sequence[_Point]) -> str:
    # ``of_store`` puts the full cache's row first, measured or not
    full = next(row for row in verdict_set.report.rows if row.is_full)
    if not points or full.means is None or full.means.score_mean is None:
        return ""
    if any(metric(column.metric).formula is not None for column in verdict_set.report.columns):
        return ""
    full_score = full.means.score_mean
    # the upper end of everything that is drawn
    upper_ends = [full_score]
    for point in points:
        _, upper_end = point.ci or (point.score, point.score)
        upper_ends.append(upper_end)
    # scores begin at 0, so that a small difference looks small; both axes end at a ten
    axes = _Axes(
        widest=max(100, 10 * math.ceil(max(point.size for point in points) / 10)),
        top=max(10, 10 * math.ceil(max(upper_ends) / 10)),
    )
    parts = _draw_axes(axes, full_score)
    front = find_front(points)
    if front:
        path = " ".join(f"{axes.x(point.size):.1f},{axes.y(point.score):.1f}" for point in front)
        parts.append(f'<polyline class="front" points="{path}"/>')
    for point in points:
        parts += _draw_point(point, axes)
    parts += _place_numbers([(axes.x(point.size), axes.y(point.score)) for point in points])
    caption = (
        "Mean score by size. Bars are 95 % intervals, and numbers are those of the cards. A colour is a method, and a "
        "hollow point is a combination."
    )
    if front:
        caption += " The line joins methods that no smaller one beats."
    elif len(points) > 1:
        caption += " No front is drawn, because intervals overlap or are missing."
    label = html.escape(f"Scores against sizes of {len(points)} methods")
    drawing = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    return f'<figure class="pareto">{drawing}<figcaption>{caption}</figcaption></figure>'


def _draw_axes(axes: _Axes, full_score: float) -> list[str]:
    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        size, score = share * axes.widest, share * axes.top
        parts.append(_svg_text(axes.x(size), HEIGHT - BOTTOM + 16, format_number(size, 0), "middle"))
        parts.append(_svg_text(LEFT - 6, axes.y(score) + 4, format_number(score, 0), "end"))
        grid_y = f"{axes.y(score):.1f}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{grid_y}" y2="{grid_y}"/>')
    parts.append(_svg_text((WIDTH + LEFT) / 2, HEIGHT - 8, "size, % of the full cache (16 bits)", "middle"))
    full_y = f"{axes.y(full_score):.1f}"
    parts.append(f'<line class="full" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{full_y}" y2="{full_y}"/>')
    # the label of the line stands at the right end, where few methods have a point
    parts.append(_svg_text(WIDTH - RIGHT, axes.y(full_score) - 4, f"full {format_number(full_score)}", "end"))
    return parts


def _draw_point(point: _Point, axes: _Axes) -> list[str]:
    parts = []
    x, y = axes.x(point.size), axes.y(point.score)
    look = look_of(" ".join(point.name.split()))
    if point.ci is not None:
        low, high = point.ci
        parts.append(
            f'<line class="bar" style="stroke:{look.color}" x1="{x:.1f}" x2="{x:.1f}" '
            f'y1="{axes.y(low):.1f}" y2="{axes.y(high):.1f}"/>'
        )
    # as in the figures, a combination has the colour of its first method and is hollow
    filling = "var(--bg)" if look.hollow else look.color
    parts.append(
        f'<circle style="fill:{filling};stroke:{look.color}" cx="{x:.1f}" cy="{y:.1f}" r="4">'
        f"<title>{html.escape(point.name)}</title></circle>"
    )
    return parts


def _place_numbers(places: Sequence[tuple[float, float]]) -> list[str]:
    texts = []
    # a point has a radius of 4
    taken = [_Box(left=x - 4, right=x + 4, upper=y - 4, lower=y + 4) for x, y in places]
    for number, (x, y) in enumerate(places, start=1):
        # a digit is about 7 units wide and 9 high
        width = 7.0 * len(str(number))
        # the anchor is the part of the text that stands at the coordinates
        before_anchor = {"start": 0.0, "middle": width / 2, "end": width}
        for across, down, anchor in PLACES:
            left = x + across - before_anchor[anchor]
            box = _Box(left, left + width, upper=y + down - 9, lower=y + down)
            if not any(box.meets(other) for other in taken):
                taken.append(box)
                texts.append(_svg_text(x + across, y + down, str(number), anchor))
                break
    return texts


def find_front(points: Sequence[_Point]) -> list[_Point]:
    """Return the Pareto front, the smallest point first: points with a higher score than every smaller point.

    Return [] if fewer than two points are left, or if an interval is missing or overlaps that of the next point.
    """
    front: list[_Point] = []
    # of equal sizes the highest score comes first, so that the others are not on the front
    for point in sorted(points, key=lambda point: (point.size, -point.score)):
        if not front or point.score > front[-1].score:
            front.append(point)
    for lower, upper in pairwise(front):
        if lower.ci is None or upper.ci is None:
            return []
        _, end_of_lower = lower.ci
        start_of_upper, _ = upper.ci
        if end_of_lower >= start_of_upper:
            return []
    if len(front) < 2:
        return []
    return front


def _svg_text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'
