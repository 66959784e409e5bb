"""The first part of the report: a card with the verdict on each method, by model and dataset, and a picture of them.

The results of a store have no plan behind them. They are compared by their identities: a method's and the full cache's
results belong together if they differ in nothing but the method.
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
"""The CSS class of a card by the first word of its outcome."""


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
        prompt = json.dumps([identity.get("model"), identity.get("prompt")], sort_keys=True)
        family = cell.record.column.partition("/")[0].partition(" ")[0]
        rest = json.dumps({key: value for key, value in identity.items() if key != "chain"}, sort_keys=True)
        by_rest = comparable.setdefault((cell.record.model, family, prompt), {})
        by_rest.setdefault(rest, {})[cell.label] = cell
    sets = []
    for (model, family, _), by_rest in comparable.items():
        by_column: dict[str, dict[str, listing.StoredCell]] = {}
        for cells in by_rest.values():
            column = next(iter(cells.values())).record.column
            # if a task was measured under several settings, take the settings that most methods share
            if FULL in cells and len(cells) > len(by_column.get(column, {})):
                by_column[column] = cells
        found = _judge_dataset(store, model, family, by_column)
        if found is not None:
            sets.append(found)
    return sorted(sets, key=lambda found: (found.model, found.dataset))


def _judge_dataset(
    store: ResultStore, model: str, family: str, by_column: Mapping[str, Mapping[str, listing.StoredCell]]
) -> VerdictSet | None:
    """Return the verdicts on the methods of one dataset, or None if no method has a verdict.

    by_column: the results of each task, by the method's label.
    """
    labels: dict[str, None] = {}
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
            columns.append(ReportColumn(task, full.summary.metric, "", floor=False))
    # tasks that the full cache has not answered are left out: there is nothing to compare with
    names = [column.task for column in columns]
    rows = []
    # the full cache comes first, since the verdicts below skip the first row
    labels_in_order = [FULL]
    labels_in_order += [label for label in labels if label != FULL]
    for label in labels_in_order:
        cells_of_row = []
        for shown in columns:
            cells_of_row.append(_entry_of_result(by_column[shown.task].get(label), shown, samples_of[shown.task]))
        summaries = [cell.summary for cell in cells_of_row if cell.summary is not None]
        means = None
        if summaries:
            baseline = None
            if label != FULL:
                baseline = [_known_scores(samples_of[name].get(FULL, {})) for name in names]
            own_scores = [_known_scores(samples_of[name].get(label, {})) for name in names]
            means = summarise_row(summaries, own_scores, baseline)
        rows.append(ReportRow(label, False, tuple(cells_of_row), means, is_full=label == FULL))
    report = ReportData(
        model=model,
        settings="",
        columns=tuple(columns),
        rows=tuple(rows),
        notes=(),
        results=str(store.root),
    )
    pairs = zip(verdict.judge_methods(report), rows[1:], strict=True)
    found = tuple((each, row) for each, row in pairs if each.outcome)
    if not found:
        return None
    dataset = names[0] if len(names) == 1 else f"{len(names)} tasks of {family}"
    return VerdictSet(model, dataset, f"n = {range_text(counts)} a task", report, found)


def _entry_of_result(
    cell: listing.StoredCell | None, column: ReportColumn, samples_of: Mapping[str, Mapping[str, Sample]]
) -> CellResult:
    """Return a stored result as a cell of a report. Without a result (None) the cell has the status ``missing``.

    samples_of: the samples of the cell's task, by the method's label.
    """
    if cell is None:
        return CellResult(column.task, "", "missing")
    if cell.summary is None:
        status = "missing"
        if cell.status.status in ("refused", "failed"):
            status = cell.status.status
        return CellResult(column.task, cell.id, status, reason=cell.status.reason)
    samples = samples_of[cell.label]
    delta = None
    if cell.label != FULL:
        delta = paired_delta(samples, samples_of.get(FULL, {}), column.metric)
    return CellResult(
        column.task,
        cell.id,
        "measured",
        summary=summarise(list(samples.values()), column.metric, cell.record.of or len(samples)),
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


def _render_set(found: VerdictSet) -> str:
    """Return one model's verdicts on one dataset: a heading, a picture, and a card for each method."""
    cards = []
    points = _sized_methods(found)
    numbers = {point.name: i for i, point in enumerate(points, start=1)}
    # cards in the order of their numbers, those without a point last
    for each, _ in sorted(found.verdicts, key=lambda pair: numbers.get(pair[0].method, len(numbers) + 1)):
        method, size, tokens, score, difference, divergence, outcome = each.texts()
        name, _, options = method.partition("\n")
        start = ""
        if each.method in numbers:
            # the number of the method's point in the picture
            start = f"<b>{numbers[each.method]}</b> "
        lines = []
        if size:
            lines.append(f'<p class="size">{html.escape(size)}</p>')
        for text in (score, difference, tokens, divergence):
            if text:
                lines.append(f"<p>{html.escape(text)}</p>")
        level = LEVELS.get(outcome.split()[0], "open")
        cards.append(
            f'<article class="card {level}"><h4>{start}{html.escape(name)}</h4>'
            f"<p>{html.escape(options)}</p>{''.join(lines)}"
            f'<p class="outcome">{html.escape(outcome)}</p></article>'
        )
    heading = html.escape(f"{found.model} on {found.dataset}, {found.examples}")
    return f'<h3>{heading}</h3>{_picture(found, points)}<div class="cards">{"".join(cards)}</div>'


def _sized_methods(found: VerdictSet) -> list[_Point]:
    """Return a point for each method with a score and a size, the smallest size first."""
    points = []
    for each, row in found.verdicts:
        if each.score is not None and each.times_smaller is not None:
            points.append(_Point(each.method, 100 / each.times_smaller, each.score, row.score_ci))
    return sorted(points, key=lambda point: point.size)


def _picture(found: VerdictSet, points: Sequence[_Point]) -> str:
    """Return a picture of scores against sizes as SVG; '' for scores without a fixed scale, such as perplexities."""
    # ``_judge_dataset`` puts the full cache's row first, measured or not
    full = next(row for row in found.report.rows if row.is_full)
    if not points or full.means is None or full.means.score_mean is None:
        return ""
    if any(metric(column.metric).shown is not None for column in found.report.columns):
        return ""
    base = full.means.score_mean
    tops = [base]
    for point in points:
        if point.ci:
            tops.append(point.ci[1])
        else:
            tops.append(point.score)
    # scores begin at 0, so that a small difference looks small; both axes end at a ten
    top = max(10, 10 * math.ceil(max(tops) / 10))
    widest = max(100, 10 * math.ceil(max(point.size for point in points) / 10))

    def x(size: float) -> float:
        """Return the picture's horizontal coordinate of a size in per cent."""
        return LEFT + (WIDTH - LEFT - RIGHT) * size / widest

    def y(score: float) -> float:
        """Return the picture's vertical coordinate of a score. SVG counts it from the top."""
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - max(0.0, score) / top)

    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(_svg_text(x(share * widest), HEIGHT - BOTTOM + 16, f"{share * widest:.0f}", "middle"))
        parts.append(_svg_text(LEFT - 6, y(share * top) + 4, f"{share * top:.0f}", "end"))
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(share * top):.1f}" y2="{y(share * top):.1f}"/>'
        )
    parts.append(_svg_text((WIDTH + LEFT) / 2, HEIGHT - 8, "size, % of the full cache (16 bits)", "middle"))
    parts.append(f'<line class="full" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(base):.1f}" y2="{y(base):.1f}"/>')
    # the label of the full cache's line stands at the right end, where few methods have a point
    parts.append(_svg_text(WIDTH - RIGHT, y(base) - 4, f"full {base:.1f}", "end"))
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
    parts += _numbers(places)
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


def _numbers(places: Sequence[tuple[float, float]]) -> list[str]:
    """Return the numbers of the points as SVG texts, each at the first of PLACES where it covers no point or number.

    A number without such a position is left out. The reader still finds the method in the title of its point.

    places: the coordinates (x, y) of each point.
    """
    texts = []
    # (left, right, upper, lower) end of each area that may not be covered: a point has a radius of 4
    taken = [(px - 4, px + 4, py - 4, py + 4) for px, py in places]
    for number, (px, py) in enumerate(places, start=1):
        # a digit is about 7 units wide and 9 high
        wide = 7.0 * len(str(number))
        for across, down, anchor in PLACES:
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
