"""What a table says on our model: its order of rows, the paper's differences that are seen here, and its filled cells.

Columns in which the full cache itself fails say nothing about methods and are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from kvbench.base.formatting import format_number, with_interval
from kvbench.papers.measured.plan import Line, PaperTable
from kvbench.papers.spec.row_knobs import parse_setting
from kvbench.papers.spec.table_spec import MEANS, SCORE
from kvbench.tasks.metrics import stats

SEEN, REVERSED, UNTOLD = "seen", "reversed", "not told apart"
MOST_NAMED = 3
"""The most reversed differences that are named."""


def describe_agreement(table: PaperTable) -> list[str]:
    """Return the sentences below a table of scores: order of rows, differences, filled cells. [] if none is filled."""
    filled, printed = count_filled(table)
    if not filled:
        return []
    share = f"all {printed}" if filled == printed else f"{filled} of {printed}"
    return list(_describe_order(table)) + list(_describe_differences(table)) + [f"Filled: {share} cells."]


def count_filled(table: PaperTable) -> tuple[int, int]:
    """Return (how many of the printed cells hold a number of ours, how many printed cells there are), without means."""
    filled = printed = 0
    for line in table.lines:
        cells = [cell for cell in _list_scores(table, line) if cell.paper_value is not None]
        printed += len(cells)
        filled += sum(cell.score is not None for cell in cells)
    return filled, printed


def order_of_rows(table: PaperTable) -> dict[str, float]:
    """Return Kendall's tau-b between our order of rows and the paper's, by column. A column may have none.

    Only rows of one block with equal examples are compared: tau = (C - D) / sqrt(P O), where C and D count the pairs of
    rows in the paper's order and against it, and P and O the pairs that the paper and we tell apart.
    """
    # [pairs, 2] by column: the differences of ours and of the printed values
    differences: dict[str, list[tuple[float, float]]] = {}
    for block in _list_blocks(table):
        for cells in zip(*(_list_scores(table, line) for line in block), strict=True):
            compared = [c for c in cells if c.value is not None and c.paper_value is not None and not c.floor]
            for a, b in combinations(compared, 2):
                if a.n == b.n:
                    pair = (a.value - b.value, a.paper_value - b.paper_value)
                    differences.setdefault(a.column, []).append(pair)
    taus = {}
    for column in table.columns:
        ours, published = np.sign(np.array(differences.get(column.name, []), dtype=float)).reshape(-1, 2).T
        told_apart = float(np.count_nonzero(ours)) * float(np.count_nonzero(published))
        if told_apart:
            taus[column.name] = float((ours * published).sum() / told_apart**0.5)
    return taus


def differences_of_rows(table: PaperTable) -> list[tuple[str, str, str]]:
    """Return two rows of a block, the one that the paper has ahead first, and SEEN, REVERSED or UNTOLD; for all pairs.

    Both sides are means over the columns that both rows have. Ours is paired over the same examples, and is told apart
    from 0 by its 95 % interval.
    """
    verdicts = []
    for block in _list_blocks(table):
        for a, b in combinations(block, 2):
            printed, differences = [], []
            for x, y in zip(_list_scores(table, a), _list_scores(table, b), strict=True):
                examples = sorted(x.scores.keys() & y.scores.keys())
                if x.paper_value is None or y.paper_value is None or len(examples) < 2 or x.floor:
                    continue
                sign = -1 if x.paper_less_is_better else 1
                printed.append(sign * (x.paper_value - y.paper_value))
                differences.append([sign * (x.scores[e] - y.scores[e]) for e in examples])
            published = sum(printed)
            if not published:
                continue
            point, interval = stats.mean_over_tasks(differences, bounds=None)
            ahead, behind = a.name, b.name
            if published < 0:
                ahead, behind, point = behind, ahead, -point
            verdict = SEEN if point > 0 else REVERSED
            if interval is None or interval[0] <= 0 <= interval[1]:
                verdict = UNTOLD
            verdicts.append((ahead, behind, verdict))
    return verdicts


def mean_tau(taus: Sequence[float]) -> tuple[float, stats.Interval | None]:
    """Return (the mean of the columns' taus, its 95 % interval over columns)."""
    mean = float(np.mean(taus))
    if len(taus) < 2:
        return mean, None
    return mean, stats.mean_interval(taus, bounds=(-1.0, 1.0))


def _describe_order(table: PaperTable) -> Iterator[str]:
    taus = order_of_rows(table)
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


def _describe_differences(table: PaperTable) -> Iterator[str]:
    verdicts = differences_of_rows(table)
    if not verdicts:
        return
    counts = Counter(verdict for _, _, verdict in verdicts)
    text = (
        f"Differences between two rows of a block: {len(verdicts)} in the paper. Here seen: {counts[SEEN]}, reversed: "
        f"{counts[REVERSED]}, not told apart: {counts[UNTOLD]} (paired over all columns, 95 % each)."
    )
    against = [f"{ahead} over {behind}" for ahead, behind, verdict in verdicts if verdict == REVERSED]
    if against:
        text += f" Reversed: {'; '.join(against[:MOST_NAMED])}"
        if len(against) > MOST_NAMED:
            text += f" and {len(against) - MOST_NAMED} more"
        text += "."
    yield text


def _list_blocks(table: PaperTable) -> list[list[Line]]:
    # the rows of each block that have a method, in the paper's order
    blocks: dict[tuple[str, ...], list[Line]] = {}
    for line in table.lines:
        setting = {"model": line.model} | parse_setting(line.setting)
        if line.method != "full":
            blocks.setdefault(tuple(setting.get(name, "") for name in table.spec.blocks), []).append(line)
    return list(blocks.values())


def _list_scores(table: PaperTable, line: Line) -> list[Any]:
    cells = zip(table.columns, table.pairs_of(line), strict=True)
    return [cell for column, cell in cells if column.quantity == SCORE and column.dataset not in MEANS]
