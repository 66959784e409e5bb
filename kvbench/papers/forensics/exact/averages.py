"""Averages: plain means over tasks, ReFreeKV's ratios to the full cache, budgets and times, means over layers."""

from __future__ import annotations

from collections.abc import Iterator

from kvbench.papers.forensics.exact.base import Exact
from kvbench.papers.spec.numbers import Number, exactly, mean, printed
from kvbench.papers.spec.published_cells import Book, PublishedRow

LAYERS = {"1": 1, "2": 1, "3-31": 29, "32": 1}
"""Layers that each line of ReFreeKV's table 6 stands for."""


def means(book: Book) -> Iterator[Exact]:
    """Yield the ``Avg.`` cells that are the plain mean of their row."""
    for row in book.rows:
        stated = row.cells.get(("avg", "mean"))
        if stated is not None and row.scores:
            numbers = [printed(c.printed) for c in row.scores.values()]
            yield Exact(stated, row.label, f"mean of the {len(numbers)} scores", mean(numbers))


def ratios(book: Book) -> Iterator[Exact]:
    """Yield the averages of ReFreeKV's tables 2 and 8: mean ratios to the full cache, less one, and mean budgets."""
    for table in ("2", "8"):
        full = {row.model: row for row in book.table("refreekv", table) if row.method == "full"}
        for row in book.table("refreekv", table):
            for (dataset, metric), cell in row.cells.items():
                if dataset == "avg" and metric.startswith("ratio_to_full"):
                    offset = 1 if metric.endswith("minus_1") else 0
                    formula = f"mean ratio to the full row over {len(row.scores)} datasets"
                    yield Exact(cell, row.label, formula, (ratio(row, full[row.model]) - offset) * 100)
            yield from _column_mean(row, "budget")


def ratio(row: PublishedRow, full: PublishedRow, without: tuple[str, ...] = ()) -> Number:
    """Return the mean over datasets of a row's scores relative to those of ``full``."""
    names = [d for d in row.scores if d in full.scores and d not in without]
    if row is full:
        return exactly(1)
    return mean(printed(row.scores[d].printed) / printed(full.scores[d].printed) for d in names)


def relative(book: Book) -> Iterator[Exact]:
    """Yield the cells of ReFreeKV's table 1: table 2 in per cent of its full row, and the mean of that."""
    for row in book.table("refreekv", 1):
        shares: list[Number] = []
        for (dataset, _), cell in row.cells.items():
            if dataset == "avg":
                yield Exact(cell, row.label, "mean of the three, from table 2", mean(shares))
                continue
            where = {"model": row.model, "method": row.method, "setting": row.setting}
            score = book.number("refreekv", 2, dataset, **where)
            full = book.number("refreekv", 2, dataset, model=row.model, method="full")
            shares.append(score / full * 100)
            yield Exact(cell, row.label, "table 2 divided by its full row", shares[-1])


def times(book: Book) -> Iterator[Exact]:
    """Yield the means of ReFreeKV's table 3: times over its six datasets."""
    for row in book.table("refreekv", 3):
        for metric in ("overall_time", "prune_time"):
            yield from _column_mean(row, metric)


def layers(book: Book) -> Iterator[Exact]:
    """Yield the means of ReFreeKV's table 6: the budget over 32 layers, of which 29 share a line."""
    rows = book.table("refreekv", 6)
    for average_row in (r for r in rows if r.settings["layer"] == "avg"):
        for (dataset, metric), cell in average_row.cells.items():
            total = exactly(0)
            for row in rows:
                if row is not average_row and (dataset, metric) in row.cells:
                    total = total + printed(row.cells[dataset, metric].printed) * LAYERS[row.settings["layer"]]
            yield Exact(cell, average_row.label, "mean over the 32 layers", total / sum(LAYERS.values()))


def _column_mean(row: PublishedRow, metric: str) -> Iterator[Exact]:
    """Yield the average of a metric over the datasets of a row, where the row prints one."""
    stated = row.cells.get(("avg", metric))
    if stated is not None:
        parts = [printed(c.printed) for (d, m), c in row.cells.items() if m == metric and d != "avg"]
        yield Exact(stated, row.label, f"mean of the {len(parts)} datasets", mean(parts))
