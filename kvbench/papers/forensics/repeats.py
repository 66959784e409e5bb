"""(b) Cells that a paper prints in several places, and (f) full-cache rows of one model in several papers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction

from kvbench.papers.forensics.finding import Finding, place
from kvbench.papers.forensics.identity import family, identity
from kvbench.papers.spec.numbers import fixed, printed
from kvbench.papers.spec.published import Published
from kvbench.papers.spec.published_cells import Book, PublishedRow

Places = list[tuple[PublishedRow, Published]]


def repeated(book: Book) -> dict[tuple[str, ...], Places]:
    """Return the places of every number that is printed more than once, by what it measures."""
    places_of: dict[tuple[str, ...], Places] = {}
    for row in book.rows:
        paper, model, method, settings = identity(row)
        for (dataset, metric), cell in row.cells.items():
            if cell.value is None or not method or metric.startswith("speedup"):
                continue
            # an average repeats another only over the same tasks
            tasks = ",".join(sorted(row.scores)) if dataset == "avg" else ""
            setting = " ".join(f"{k}={v}" for k, v in settings)
            key = (paper, model, method, setting, dataset, metric, cell.unit, tasks)
            places_of.setdefault(key, []).append((row, cell))
    return {key: places for key, places in places_of.items() if len(places) > 1}


def repeats(book: Book) -> Iterator[Finding]:
    """Yield a finding for each measurement that is printed in several places with different values."""
    for (paper, model, method, setting, dataset, *_), places in repeated(book).items():
        tables_of: dict[str, list[str]] = {}
        for row, cell in places:
            tables_of.setdefault(fixed(printed(cell.printed).value, 4), []).append(row.table)
        if len(tables_of) > 1:
            values = [f"{_short(value)} ({', '.join(map(place, tables))})" for value, tables in tables_of.items()]
            most_printed = max(tables_of, key=lambda v: len(tables_of[v]))
            has_majority = sum(len(t) == len(tables_of[most_printed]) for t in tables_of.values()) == 1
            tables = "+".join(dict.fromkeys(row.table for row, _ in places))
            label = " ".join(filter(None, (model, method, setting)))
            why = "the same measurement, printed with different values"
            likely = _short(most_printed) if has_majority else ""
            yield Finding("repeat", "wrong", paper, tables, label, dataset, "; ".join(values), likely, why)


def baselines(book: Book) -> dict[tuple[str, str], dict[str, Published]]:
    """Return the full cache's score by paper, of each (model family, dataset) that two or more papers print."""
    by_place: dict[tuple[str, str], dict[str, Published]] = {}
    for row in book.rows:
        if row.method == "full" and row.table.isdigit():
            for dataset, cell in row.scores.items():
                if cell.unit == "pct":
                    by_place.setdefault((family(row.model), dataset), {}).setdefault(row.paper, cell)
    return {key: by_paper for key, by_paper in by_place.items() if len(by_paper) > 1}


def full_rows(book: Book) -> Iterator[Finding]:
    """Yield full-cache scores of one model that differ between papers: scores compare inside a paper only."""
    for (model, dataset), by_paper in baselines(book).items():
        spread = gap(by_paper)
        if spread:
            values = "; ".join(f"{c.printed} ({p} {place(c.table)})" for p, c in by_paper.items())
            versions = {c.model for c in by_paper.values()}
            why = f"the full cache of one model, {fixed(spread, 2)} points apart between papers"
            why += f" ({', '.join(sorted(versions))})" if len(versions) > 1 else ""
            yield Finding("baseline", "note", "+".join(by_paper), "", model, dataset, values, "", why)


def gap(by: Mapping[str, Published]) -> Fraction:
    """Return the largest difference in points."""
    values = [printed(c.printed).value for c in by.values()]
    return max(values) - min(values)


def _short(value: str) -> str:
    """Shorten a number to at least two decimals, no more than are needed."""
    head, _, tail = value.partition(".")
    return f"{head}.{tail[:2]}{tail[2:].rstrip('0')}"
