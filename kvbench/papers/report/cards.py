"""The first part of the report: a card with the verdict on each method, by model and dataset, and a picture of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

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


class VerdictSet(NamedTuple):
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
    verdicts: list[tuple[MethodVerdict, ReportRow]]


class _Point(NamedTuple):
    """A method in the picture: its size in per cent of the full cache, its score and the score's interval."""

    name: str
    size: float
    score: float
    ci: tuple[float, float] | None


def collect_verdicts(store: ResultStore) -> list[VerdictSet]:
    """Return the verdicts on all stored methods that can be compared with a full cache, sorted by model and dataset."""
    sets = []
    for report in of_store.collect_reports(store, for_verdicts=True):
        # the full cache's row comes first, and has no verdict; a method that was not measured has no outcome
        pairs = zip(verdict.judge_methods(report), report.rows[1:], strict=True)
        verdicts = [(method_verdict, row) for method_verdict, row in pairs if method_verdict.outcome]
        if not verdicts:
            continue
        counts = {cell.summary.n for cell in report.cells if cell.summary is not None}
        dataset = report.columns[0].task
        if len(report.columns) > 1:
            dataset = f"{len(report.columns)} tasks of {of_store.name_dataset(dataset)}"
        examples = f"n = {range_text(counts)} a task"
        sets.append(VerdictSet(report.model, dataset, examples=examples, report=report, verdicts=verdicts))
    return sets


def describe_set(verdict_set: VerdictSet) -> dict[str, Any]:
    """Return one model's verdicts on one dataset for the template cards.html: a heading, a picture and the cards."""
    points = []
    for method_verdict, row in verdict_set.verdicts:
        if method_verdict.score is not None and method_verdict.times_smaller is not None:
            size = 100 / method_verdict.times_smaller
            points.append(_Point(method_verdict.method, size, method_verdict.score, row.score_ci))
    points.sort(key=lambda point: point.size)
    # the number of each method's point in the picture; methods without a point come last
    numbers = {point.name: i for i, point in enumerate(points, start=1)}
    verdicts = [method_verdict for method_verdict, _ in verdict_set.verdicts]
    verdicts.sort(key=lambda method_verdict: numbers.get(method_verdict.method, len(numbers) + 1))
    return {
        "heading": f"{verdict_set.model} on {verdict_set.dataset}, {verdict_set.examples}",
        "picture": _describe_picture(verdict_set.report, points),
        "cards": [_describe_card(method_verdict, numbers.get(method_verdict.method)) for method_verdict in verdicts],
    }


def _describe_card(method_verdict: MethodVerdict, number: int | None) -> dict[str, Any]:
    method, size, tokens, score, difference, divergence, outcome = method_verdict.texts()
    # ``texts`` puts the options of a method below its name
    name, _, options = method.partition("\n")
    lines = [text for text in (score, difference, tokens, divergence) if text]
    level = LEVELS.get(outcome.split()[0], "open")
    card = {"number": number, "name": name, "options": options, "size": size}
    return card | {"lines": lines, "outcome": outcome, "level": level}


def _describe_picture(report: ReportData, points: Sequence[_Point]) -> dict[str, Any] | None:
    """Return a picture of scores against sizes for the template.

    Return None for scores without a fixed scale, such as perplexities, without points, and without a score of the full
    cache.
    """
    # ``of_store`` puts the full cache's row first, measured or not
    full = next(row for row in report.rows if row.is_full)
    if not points or full.means is None or full.means.score_mean is None:
        return None
    if any(metric(column.metric).formula is not None for column in report.columns):
        return None
    full_score = full.means.score_mean
    # scores begin at 0, so that a small difference looks small; both axes end at a ten
    highest = max([full_score] + [point.ci[1] if point.ci else point.score for point in points])
    widest = max(100, 10 * math.ceil(points[-1].size / 10))
    top = max(10, 10 * math.ceil(highest / 10))

    def x_of(size: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * size / widest

    def y_of(score: float) -> float:
        # SVG counts from the top
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - max(0.0, score) / top)

    grid = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        size, score = share * widest, share * top
        grid.append((format_number(size, 0), x_of(size), format_number(score, 0), y_of(score)))
    front = find_front(points)
    caption = (
        "Mean score by size. Bars are 95 % intervals, and numbers are those of the cards. A colour is a method, and a "
        "hollow point is a combination."
    )
    if front:
        caption += " The line joins methods that no smaller one beats."
    elif len(points) > 1:
        caption += " No front is drawn, because intervals overlap or are missing."
    drawn = []
    for point in points:
        look = look_of(" ".join(point.name.split()))
        place: dict[str, Any] = {"name": point.name, "x": x_of(point.size), "y": y_of(point.score), "color": look.color}
        # as in the figures, a combination has the colour of its first method and is hollow
        place |= {"filling": "var(--bg)" if look.hollow else look.color}
        place["bar"] = [y_of(end) for end in point.ci] if point.ci else None
        drawn.append(place)
    return {
        "width": WIDTH,
        "height": HEIGHT,
        "left": LEFT,
        "right": WIDTH - RIGHT,
        "below": HEIGHT - BOTTOM,
        "middle": (WIDTH + LEFT) / 2,
        "label": f"Scores against sizes of {len(points)} methods",
        "grid": grid,
        "full_y": y_of(full_score),
        "full_label": f"full {format_number(full_score)}",
        "front": [(x_of(point.size), y_of(point.score)) for point in front],
        "points": drawn,
        "numbers": _place_numbers([(place["x"], place["y"]) for place in drawn]),
        "caption": caption,
    }


def _place_numbers(places: Sequence[tuple[float, float]]) -> list[tuple[int, float, float, str]]:
    """Return (number, x, y, anchor) of the points, each at the first of PLACES where it covers no point or number.

    A number without a free position is left out. The reader still finds the method in the title of its point.
    """
    texts = []
    # boxes (left, right, upper, lower); a point has a radius of 4
    taken = [(x - 4, x + 4, y - 4, y + 4) for x, y in places]
    for number, (x, y) in enumerate(places, start=1):
        # a digit is about 7 units wide and 9 high
        width = 7.0 * len(str(number))
        # the anchor is the part of the text that stands at the coordinates
        before_anchor = {"start": 0.0, "middle": width / 2, "end": width}
        for across, down, anchor in PLACES:
            left = x + across - before_anchor[anchor]
            box = (left, left + width, y + down - 9, y + down)
            if not any(_overlap(box, other) for other in taken):
                taken.append(box)
                texts.append((number, x + across, y + down, anchor))
                break
    return texts


def _overlap(a: Sequence[float], b: Sequence[float]) -> bool:
    # they do not if one ends before the other begins, across or down
    apart_across = a[1] <= b[0] or b[1] <= a[0]
    apart_down = a[3] <= b[2] or b[3] <= a[2]
    return not (apart_across or apart_down)


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
        if lower.ci is None or upper.ci is None or lower.ci[1] >= upper.ci[0]:
            return []
    if len(front) < 2:
        return []
    return front
