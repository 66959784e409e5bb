"""The first part of the report: a card with the verdict on each method, by model and dataset, and a picture of them.

The results of a store have no plan behind them. They are compared by their identities: the results of a method and of
the full cache belong together if they differ in nothing but the method.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvbench.report import listing, verdict
from kvbench.report.data import CellResult, ReportColumn, ReportData, ReportRow
from kvbench.report.looks import look_of
from kvbench.report.summary import paired_delta, summarise, summarise_row
from kvbench.report.table import range_text
from kvbench.report.verdict import MethodVerdict
from kvbench.store.results import Sample
from kvbench.store.store import ResultStore
from kvbench.tasks.metrics import metric

FULL = "full"
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


def collect_verdicts(store: ResultStore) -> list[VerdictSet]:
    """Return the verdicts on all stored methods that can be compared with a full cache, sorted by model and dataset."""
    # outer keys: model, dataset and prompt; inner keys: the identity without its chain, and then the method's label.
    # results under one inner key differ in the method alone
    comparable: dict[tuple[str, str, str], dict[str, dict[str, listing.StoredCell]]] = {}
    for cell in listing.list_cells(store, {}):
        identity = cell.record.identity
        # a result that was imported from another program has no chain in its identity
        if cell.record.kind is not None or "chain" not in identity:
            continue
        # JSON texts, since the parts of an identity cannot be keys; sorted, so that equal parts give equal texts
        prompt = json.dumps([identity.get("model"), identity.get("prompt")], sort_keys=True)
        other_parts = {key: value for key, value in identity.items() if key != "chain"}
        same_but_chain = json.dumps(other_parts, sort_keys=True)
        # a column is named dataset/task, with swept options behind a space
        family = cell.record.column.partition("/")[0].partition(" ")[0]
        cells_by_identity = comparable.setdefault((cell.record.model, family, prompt), {})
        cells_by_identity.setdefault(same_but_chain, {})[cell.label] = cell
    sets = []
    for (model, family, _), cells_by_identity in comparable.items():
        by_column: dict[str, dict[str, listing.StoredCell]] = {}
        for cells in cells_by_identity.values():
            # all cells of one identity are of one task
            column = next(iter(cells.values())).record.column
            # if a task was measured under several settings, take the settings that most methods share
            if FULL in cells and len(cells) > len(by_column.get(column, {})):
                by_column[column] = cells
        verdict_set = _judge_dataset(store, model, family, by_column)
        if verdict_set is not None:
            sets.append(verdict_set)
    return sorted(sets, key=lambda verdict_set: (verdict_set.model, verdict_set.dataset))


def _judge_dataset(
    store: ResultStore, model: str, family: str, by_column: Mapping[str, Mapping[str, listing.StoredCell]]
) -> VerdictSet | None:
    """Return the verdicts on the methods of one dataset, or None if no method has a verdict.

    family: the dataset's name.
    by_column: the results of each task, by the method's label. Each task has a result of the full cache.
    """
    # the keys are the methods' labels in order
    labels: dict[str, None] = {}
    # samples of each result, by task and the method's label
    samples_of: dict[str, dict[str, Mapping[str, Sample]]] = {}
    columns = []
    counts: set[int] = set()
    for task, cells in by_column.items():
        labels |= dict.fromkeys(cells)
        samples_of[task] = {}
        for label, cell in cells.items():
            if cell.summary is not None:
                samples_of[task][label] = store.samples(cell.id)
                counts.add(cell.summary.n)
        full = cells[FULL]
        if full.summary is not None:
            # verdicts need neither the category of a task nor its floor
            columns.append(ReportColumn(task, full.summary.metric, category="", floor=False))
    # tasks that the full cache has not answered are left out: there is nothing to compare with
    names = [column.task for column in columns]
    rows = []
    # the full cache comes first, since the verdicts below skip the first row
    labels_in_order = [FULL]
    labels_in_order += [label for label in labels if label != FULL]
    for label in labels_in_order:
        cells_of_row = []
        for report_column in columns:
            task = report_column.task
            cells_of_row.append(_entry_of_result(by_column[task].get(label), report_column, samples_of[task]))
        summaries = [cell.summary for cell in cells_of_row if cell.summary is not None]
        means = None
        if summaries:
            # the full cache is not compared with itself
            full_scores = None
            if label != FULL:
                full_scores = [_known_scores(samples_of[name].get(FULL, {})) for name in names]
            own_scores = [_known_scores(samples_of[name].get(label, {})) for name in names]
            means = summarise_row(summaries, own_scores, full_scores)
        # verdicts do not depend on whether a method evicts tokens
        rows.append(ReportRow(label, evicts=False, cells=tuple(cells_of_row), means=means, is_full=label == FULL))
    report = ReportData(
        model=model,
        settings="",
        columns=tuple(columns),
        rows=tuple(rows),
        notes=(),
        results=str(store.root),
    )
    pairs = zip(verdict.judge_methods(report), rows[1:], strict=True)
    # a method that was not measured has no outcome
    verdicts = tuple((method_verdict, row) for method_verdict, row in pairs if method_verdict.outcome)
    if not verdicts:
        return None
    dataset = names[0] if len(names) == 1 else f"{len(names)} tasks of {family}"
    return VerdictSet(model, dataset, examples=f"n = {range_text(counts)} a task", report=report, verdicts=verdicts)


def _entry_of_result(
    cell: listing.StoredCell | None, column: ReportColumn, samples_of: Mapping[str, Mapping[str, Sample]]
) -> CellResult:
    """Return a stored result as a cell of a report. Without a result (None) the cell has the status ``missing``.

    samples_of: the samples of the cell's task, by the method's label.
    """
    if cell is None:
        return CellResult(column.task, cell="", status="missing")
    if cell.summary is None:
        is_broken = cell.status.status in ("refused", "failed")
        status = cell.status.status if is_broken else "missing"
        return CellResult(column.task, cell.id, status, reason=cell.status.reason)
    samples = samples_of[cell.label]
    delta = None
    if cell.label != FULL:
        delta = paired_delta(samples, samples_of.get(FULL, {}), column.metric)
    # a record may not state the number of the task's examples
    examples_of_task = cell.record.of or len(samples)
    return CellResult(
        column.task,
        cell.id,
        "measured",
        summary=summarise(list(samples.values()), column.metric, examples_of_task),
        delta=delta,
        unchanged=cell.unchanged,
    )


def _known_scores(samples: Mapping[str, Sample]) -> dict[str, float]:
    """Return the scores by example id, without examples that have no score."""
    return {example: float(sample.score) for example, sample in samples.items() if sample.score is not None}


def render(sets: Sequence[VerdictSet]) -> str:
    """Return the cards and pictures of all sets as HTML."""
    if not sets:
        return "<p>No method stands beside the full cache yet: kvbench run method=snapkv.</p>"
    return "\n".join(map(_render_set, sets))


def _render_set(verdict_set: VerdictSet) -> str:
    """Return one model's verdicts on one dataset as HTML: a heading, a picture, and a card for each method."""
    cards = []
    points = _sized_methods(verdict_set)
    # the number of each method's point in the picture
    numbers = {point.name: i for i, point in enumerate(points, start=1)}

    def number_of(pair: tuple[MethodVerdict, ReportRow]) -> int:
        # methods without a point come last
        return numbers.get(pair[0].method, len(numbers) + 1)

    for method_verdict, _ in sorted(verdict_set.verdicts, key=number_of):
        method, size, tokens, score, difference, divergence, outcome = method_verdict.texts()
        # ``texts`` puts the options of a method below its name
        name, _, options = method.partition("\n")
        start = ""
        if method_verdict.method in numbers:
            start = f"<b>{numbers[method_verdict.method]}</b> "
        lines = []
        if size:
            lines.append(f'<p class="size">{html.escape(size)}</p>')
        for text in (score, difference, tokens, divergence):
            if text:
                lines.append(f"<p>{html.escape(text)}</p>")
        css_class = LEVELS.get(outcome.split()[0], "open")
        cards.append(
            f'<article class="card {css_class}"><h4>{start}{html.escape(name)}</h4>'
            f"<p>{html.escape(options)}</p>{''.join(lines)}"
            f'<p class="outcome">{html.escape(outcome)}</p></article>'
        )
    heading = html.escape(f"{verdict_set.model} on {verdict_set.dataset}, {verdict_set.examples}")
    return f'<h3>{heading}</h3>{_picture(verdict_set, points)}<div class="cards">{"".join(cards)}</div>'


def _sized_methods(verdict_set: VerdictSet) -> list[_Point]:
    """Return a point for each method with a score and a size, the smallest size first."""
    points = []
    for method_verdict, row in verdict_set.verdicts:
        if method_verdict.score is not None and method_verdict.times_smaller is not None:
            size = 100 / method_verdict.times_smaller
            points.append(_Point(method_verdict.method, size, method_verdict.score, row.score_ci))
    return sorted(points, key=lambda point: point.size)


def _picture(verdict_set: VerdictSet, points: Sequence[_Point]) -> str:
    """Return a picture of scores against sizes as SVG, in a figure of HTML.

    Return '' for scores without a fixed scale, such as perplexities, without points, and without a score of the full
    cache.
    """
    # ``_judge_dataset`` puts the full cache's row first, measured or not
    full = next(row for row in verdict_set.report.rows if row.is_full)
    if not points or full.means is None or full.means.score_mean is None:
        return ""
    if any(metric(column.metric).formula is not None for column in verdict_set.report.columns):
        return ""
    full_score = full.means.score_mean
    # the upper end of everything that is drawn
    ends = [full_score]
    for point in points:
        ends.append(point.ci[1] if point.ci else point.score)
    # scores begin at 0, so that a small difference looks small; both axes end at a ten
    top = max(10, 10 * math.ceil(max(ends) / 10))
    widest = max(100, 10 * math.ceil(max(point.size for point in points) / 10))

    def x(size: float) -> float:
        """Return the picture's horizontal coordinate of a size in per cent."""
        return LEFT + (WIDTH - LEFT - RIGHT) * size / widest

    def y(score: float) -> float:
        """Return the picture's vertical coordinate of a score, which SVG counts from the top. The axis begins at 0."""
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - max(0.0, score) / top)

    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(_svg_text(x(share * widest), HEIGHT - BOTTOM + 16, f"{share * widest:.0f}", "middle"))
        parts.append(_svg_text(LEFT - 6, y(share * top) + 4, f"{share * top:.0f}", "end"))
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(share * top):.1f}" y2="{y(share * top):.1f}"/>'
        )
    parts.append(_svg_text((WIDTH + LEFT) / 2, HEIGHT - 8, "size, % of the full cache (16 bits)", "middle"))
    full_y = f"{y(full_score):.1f}"
    parts.append(f'<line class="full" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{full_y}" y2="{full_y}"/>')
    # the label of the line stands at the right end, where few methods have a point
    parts.append(_svg_text(WIDTH - RIGHT, y(full_score) - 4, f"full {full_score:.1f}", "end"))
    front = find_front(points)
    if front:
        path = " ".join(f"{x(point.size):.1f},{y(point.score):.1f}" for point in front)
        parts.append(f'<polyline class="front" points="{path}"/>')
    places = [(x(point.size), y(point.score)) for point in points]
    for (px, py), point in zip(places, points, strict=True):
        look = look_of(" ".join(point.name.split()))
        color = look.color
        if point.ci is not None:
            parts.append(
                f'<line class="bar" style="stroke:{color}" x1="{px:.1f}" x2="{px:.1f}" '
                f'y1="{y(point.ci[0]):.1f}" y2="{y(point.ci[1]):.1f}"/>'
            )
        # as in the figures, a combination has the colour of its first method and is hollow
        filling = "var(--bg)" if look.hollow else color
        parts.append(
            f'<circle style="fill:{filling};stroke:{color}" cx="{px:.1f}" cy="{py:.1f}" r="4">'
            f"<title>{html.escape(point.name)}</title></circle>"
        )
    parts += _number_texts(places)
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


def _number_texts(places: Sequence[tuple[float, float]]) -> list[str]:
    """Return the numbers of the points as SVG texts, each at the first of PLACES where it covers no point or number.

    A number without a free position is left out. The reader still finds the method in the title of its point.

    places: the coordinates (x, y) of each point.
    """
    texts = []
    # (left, right, upper, lower) end of each area that may not be covered: a point has a radius of 4
    taken = [(px - 4, px + 4, py - 4, py + 4) for px, py in places]
    for number, (px, py) in enumerate(places, start=1):
        # a digit is about 7 units wide and 9 high
        wide = 7.0 * len(str(number))
        for across, down, anchor in PLACES:
            # the anchor is the part of the text that stands at the coordinates
            left = px + across - {"start": 0.0, "middle": wide / 2, "end": wide}[anchor]
            box = (left, left + wide, py + down - 9, py + down)
            # two areas do not meet if one ends before the other begins, across or down
            if all(box[1] <= b[0] or b[1] <= box[0] or box[3] <= b[2] or b[3] <= box[2] for b in taken):
                taken.append(box)
                texts.append(_svg_text(px + across, py + down, str(number), anchor))
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
        if lower.ci is None or upper.ci is None or lower.ci[1] >= upper.ci[0]:
            return []
    return front if len(front) > 1 else []


def _svg_text(x: float, y: float, text: str, anchor: str) -> str:
    """Return a text element of the picture. ``anchor`` is SVG's text-anchor: start, middle or end."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'
