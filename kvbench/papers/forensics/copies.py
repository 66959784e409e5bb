"""(c) Values that look copied, and values too good or too far from their neighbours to be believed unseen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations

from kvbench.papers.forensics.finding import Finding
from kvbench.papers.forensics.identity import identity
from kvbench.papers.spec.numbers import fixed, printed
from kvbench.papers.spec.published import Published
from kvbench.papers.spec.published_cells import Book, PublishedRow

COARSE = ("trec", "passage_retrieval_en", "passage_count", "gsm8k", "gpqa", "theoremqa", "needle")
"""Datasets whose scores take few values, so that equal ones say little."""
SHARED = 3
"""The number of equal scores of two models in one paper from which on they look copied."""
GAIN = 6 / 5
"""A compressed cache this much better than the full one is looked at; below a score of 10 it is noise."""
LEAST = 10
TWIN = 20
"""Scores above this that stand twice in a row or a column."""
FALL = 2 / 3
"""A last value below this share of the one before, in a series that else moves by less than STEADY of its mean."""
STEADY = 0.2


def copies(book: Book) -> Iterator[Finding]:
    """Yield rows of different models or methods that share values to the last digit."""
    rows = [r for r in book.rows if len(r.scores) >= 5 and r.table.isdigit()]
    values = [(r, identity(r), {d: c.printed for d, c in r.scores.items()}) for r in rows]
    for (one, first, a), (two, second, b) in combinations(values, 2):
        if one.paper != two.paper or first == second:
            continue
        equal = [d for d in a if a[d] == b.get(d)]
        all_equal = len(equal) == len(a.keys() & b.keys()) >= 5
        telling = [d for d in equal if _telling(one.scores[d])]
        if all_equal or (one.model != two.model and len(telling) >= SHARED):
            shared = equal if all_equal else telling
            shown = ", ".join(f"{d} {a[d]}" for d in shared)
            why = "every score is" if all_equal else f"{len(shared)} scores are"
            why += f" those of {two.label} in table {two.table}, to the last digit"
            yield Finding("copy", "doubt", one.paper, one.table, one.label, "+".join(shared), shown, "", why)


def twins(book: Book) -> Iterator[Finding]:
    """Yield two datasets of a row with one value, and one value under two budgets of a method."""
    for row in book.rows:
        if not row.table.isdigit():
            continue
        for one, two in combinations(row.scores.values(), 2):
            if one.printed == two.printed and _high(one) and not (one.dataset in COARSE and two.dataset in COARSE):
                cells = f"{one.dataset}+{two.dataset}"
                why = "two datasets of the row with one value; may be chance"
                yield Finding("twin", "doubt", row.paper, row.table, row.label, cells, one.printed, "", why)
    for block in _by(book, lambda r: (r.paper, r.table, r.model, r.method)):
        for first, second in combinations(block, 2):
            for dataset, cell in first.scores.items():
                other = second.scores.get(dataset)
                same = other is not None and other.printed == cell.printed
                if same and _high(cell) and _telling(cell) and first.paper == "refreekv" and "budget" in first.settings:
                    why = f"the value of this method under {second.setting}, to the last digit; may be chance"
                    place = (first.paper, first.table, first.label, dataset)
                    yield Finding("twin", "doubt", *place, cell.printed, "", why)


def gains(book: Book) -> Iterator[Finding]:
    """Yield compressed caches that beat the full one by more than 20 %."""
    full = {(r.paper, r.table, r.model): r for r in book.rows if r.method == "full"}
    for row in book.rows:
        base = full.get((row.paper, row.table, row.model))
        if base is None or base is row or not row.table.isdigit():
            continue
        for dataset, cell in row.scores.items():
            full_cell = base.scores.get(dataset)
            if full_cell is None or not cell.value or not full_cell.value or cell.unit != full_cell.unit:
                continue
            ratio = cell.value / full_cell.value
            if full_cell.value > LEAST and ratio > GAIN:
                shown = f"{cell.printed} against {full_cell.printed}"
                why = f"{ratio:.2f} times the full cache's score"
                yield Finding("gain", "doubt", row.paper, row.table, row.label, dataset, shown, "", why)


def breaks(book: Book) -> Iterator[Finding]:
    """Yield scores that fall out of an otherwise steady series over k, as where a digit is lost."""

    def series_of(row: PublishedRow) -> object:
        """Return what a row shares with those of other k."""
        others = tuple(sorted((k, v) for k, v in row.settings.items() if k != "k"))
        return row.paper, row.table, row.model, row.method, others

    for block in _by(book, series_of):
        # k is a per cent of the prompt
        series = [r for r in block if "%" in r.settings.get("k", "")]
        series.sort(key=lambda r: float(r.settings["k"].rstrip("%n")))
        for dataset in series[0].scores if len(series) >= 3 else ():
            values = [r.scores[dataset].value or 0.0 for r in series if dataset in r.scores]
            for i, row in enumerate(series):
                rest = values[:i] + values[i + 1 :]
                centre = sum(rest) / len(rest)
                neighbour = values[i - 1] if i else values[1]
                if values[i] < FALL * neighbour and max(rest) - min(rest) < STEADY * centre:
                    cell = row.scores[dataset]
                    fitting = fixed(printed(cell.printed).value + 10, 2)
                    why = f"the others of the series are {', '.join(f'{v:.2f}' for v in rest)}; {fitting} would fit"
                    place = (row.paper, row.table, row.label, dataset)
                    yield Finding("break", "doubt", *place, cell.printed, fitting, why)


def _by(book: Book, key: Callable[[PublishedRow], object]) -> Iterator[list[PublishedRow]]:
    """Yield the rows of a book in groups of one key."""
    groups: dict[object, list[PublishedRow]] = {}
    for row in book.rows:
        groups.setdefault(key(row), []).append(row)
    yield from groups.values()


def _high(cell: Published) -> bool:
    """Tell whether a score is above TWIN."""
    return (cell.value or 0) > TWIN and cell.unit == "pct"


def _telling(cell: Published) -> bool:
    """Tell whether an equal score says something: many values are possible, and it has three digits."""
    return cell.dataset not in COARSE and len(cell.printed.replace(".", "").strip("0")) >= 3
