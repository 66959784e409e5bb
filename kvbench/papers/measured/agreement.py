"""What a table says on our model: its order of rows, the paper's differences that are seen here, and its filled cells.

Columns in which the full cache itself fails say nothing about methods and are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

from kvbench.base.formatting import format_number, with_interval
from kvbench.papers.measured.cell_view import CellView, View
from kvbench.papers.measured.our_table import TableLine
from kvbench.papers.spec.row_knobs import parse_setting
from kvbench.papers.spec.table_spec import MEANS, SCORE
from kvbench.tasks.metrics import stats

Line = tuple[TableLine, tuple[CellView, ...]]
"""A row of a view with its cells."""
SEEN, REVERSED, UNTOLD = "seen", "reversed", "not told apart"
MOST_NAMED = 3
"""The most reversed differences that are named."""


def describe_agreement(view: View) -> list[str]:
    """Return the sentences below a table of scores: order of rows, differences, filled cells. [] if none is filled."""
    filled, printed = count_filled(view)
    if not filled:
        return []
    lines = [*_describe_order(view), *_describe_differences(view)]
    lines.append(f"Filled: {filled} of {printed} cells." if filled < printed else f"Filled: all {printed} cells.")
    return lines


def count_filled(view: View) -> tuple[int, int]:
    """Return (how many of the printed cells hold a number of ours, how many printed cells there are), without means."""
    entries = [entry for _, row in view.rows for entry in _scored(view, row) if entry.published is not None]
    return sum(entry.score is not None for entry in entries), len(entries)


def order_of_rows(view: View) -> dict[str, float]:
    """Return Kendall's tau-b between our order of rows and the paper's, by column. A column may have none.

    Only rows of one block with equal examples are compared: tau = (C - D) / sqrt(P O), where C and D count the pairs of
    rows in the paper's order and against it, and P and O the pairs that the paper and we tell apart.
    """
    taus = {}
    for i, column in enumerate(view.columns):
        if column.quantity != SCORE or column.dataset in MEANS:
            continue
        # [pairs, 2]: the differences of ours and of the printed values
        differences = []
        for block in _blocks(view):
            points = []
            for _, row in block:
                cell = row[i]
                if cell.ours is not None and cell.published is not None and not cell.floor:
                    points.append((cell.n, cell.ours, cell.published))
            for a, b in combinations(points, 2):
                if a[0] == b[0]:
                    differences.append((a[1] - b[1], a[2] - b[2]))
        ours, published = np.sign(np.array(differences, dtype=float)).reshape(-1, 2).T
        told_apart = float(np.count_nonzero(ours)) * float(np.count_nonzero(published))
        if told_apart:
            taus[column.name] = float((ours * published).sum() / told_apart**0.5)
    return taus


def differences_of_rows(view: View) -> list[tuple[str, str, str]]:
    """Return two rows of a block, the one that the paper has ahead first, and SEEN, REVERSED or UNTOLD; for all pairs.

    Both sides are means over the columns that both rows have. Ours is paired over the same examples, and is told apart
    from 0 by its 95 % interval.
    """
    verdicts = []
    for block in _blocks(view):
        for (line_a, a), (line_b, b) in combinations(block, 2):
            printed, differences = [], []
            for x, y in zip(_scored(view, a), _scored(view, b), strict=True):
                examples = sorted(x.scores.keys() & y.scores.keys())
                if x.published is None or y.published is None or len(examples) < 2 or x.floor:
                    continue
                sign = -1 if x.less_is_better else 1
                printed.append(sign * (x.published - y.published))
                differences.append([sign * (x.scores[e] - y.scores[e]) for e in examples])
            published = sum(printed)
            if not published:
                continue
            point, interval = stats.mean_over_tasks(differences, bounds=None)
            names = (line_a.row.name, line_b.row.name)
            if published < 0:
                names, point = (names[1], names[0]), -point
            verdict = SEEN if point > 0 else REVERSED
            if interval is None or interval[0] <= 0 <= interval[1]:
                verdict = UNTOLD
            verdicts.append((*names, verdict))
    return verdicts


def mean_tau(taus: Sequence[float]) -> tuple[float, stats.Interval | None]:
    """Return (the mean of the columns' taus, its 95 % interval over columns)."""
    interval = stats.mean_interval(taus, bounds=(-1.0, 1.0)) if len(taus) > 1 else None
    return float(np.mean(taus)), interval


def _describe_order(view: View) -> Iterator[str]:
    taus = order_of_rows(view)
    if not taus:
        return
    mean, interval = mean_tau(list(taus.values()))
    text = f"Order of rows: Kendall's tau to the paper's is {with_interval(mean, interval, 2, gap=' ')}"
    if interval is not None:
        low, *_, high = sorted(taus, key=lambda name: taus[name])
        text += (
            f", the mean of {len(taus)} columns "
            f"({low} {format_number(taus[low], 2)}, {high} {format_number(taus[high], 2)})"
        )
    yield f"{text}."


def _describe_differences(view: View) -> Iterator[str]:
    verdicts = differences_of_rows(view)
    if not verdicts:
        return
    counts = Counter(verdict for _, _, verdict in verdicts)
    text = (
        f"Differences between two rows of a block: {len(verdicts)} in the paper. Here seen: {counts[SEEN]}, reversed: "
        f"{counts[REVERSED]}, not told apart: {counts[UNTOLD]} (paired over all columns, 95 % each)."
    )
    against = [f"{ahead} over {behind}" for ahead, behind, verdict in verdicts if verdict == REVERSED]
    if against:
        more = f" and {len(against) - MOST_NAMED} more" if len(against) > MOST_NAMED else ""
        text += f" Reversed: {'; '.join(against[:MOST_NAMED])}{more}."
    yield text


def _blocks(view: View) -> list[list[Line]]:
    blocks: dict[tuple[str, ...], list[Line]] = {}
    for line, row in view.rows:
        if line.row.method == "full":
            continue
        setting = {"model": line.row.model} | parse_setting(line.row.setting)
        key = tuple(setting.get(name, "") for name in view.ours.declared.blocks)
        blocks.setdefault(key, []).append((line, row))
    return list(blocks.values())


def _scored(view: View, row: Sequence[CellView]) -> list[CellView]:
    return [e for c, e in zip(view.columns, row, strict=True) if c.quantity == SCORE and c.dataset not in MEANS]
