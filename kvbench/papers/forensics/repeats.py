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
    """The places of every number that is printed more than once, by what it measures."""
    found: dict[tuple[str, ...], Places] = {}
    for row in book.rows:
        paper, model, method, settings = identity(row)
        for (dataset, metric), cell in row.cells.items():
            if cell.value is None or not method or metric.startswith("speedup"):
                continue
            # an average repeats another only over the same tasks
            over = ",".join(sorted(row.scores)) if dataset == "avg" else ""
            setting = " ".join(f"{k}={v}" for k, v in settings)
            key = (paper, model, method, setting, dataset, metric, cell.unit, over)
            found.setdefault(key, []).append((row, cell))
    return {key: places for key, places in found.items() if len(places) > 1}


def repeats(book: Book) -> Iterator[Finding]:
    """Numbers that are printed in several places and differ."""
    for (paper, model, method, setting, dataset, *_), places in repeated(book).items():
        by: dict[str, list[str]] = {}
        for row, cell in places:
            by.setdefault(fixed(printed(cell.printed).value, 4), []).append(row.table)
        if len(by) > 1:
            values = [f"{_short(value)} ({', '.join(map(place, tables))})" for value, tables in by.items()]
            many = max(by, key=lambda v: len(by[v]))
            clear = sum(len(t) == len(by[many]) for t in by.values()) == 1
            tables = "+".join(dict.fromkeys(row.table for row, _ in places))
            label = " ".join(filter(None, (model, method, setting)))
            why = "the same measurement, printed with different values"
            settled = _short(many) if clear else ""
            yield Finding("repeat", "wrong", paper, tables, label, dataset, "; ".join(values), settled, why)


def baselines(book: Book) -> dict[tuple[str, str], dict[str, Published]]:
    """The full cache's score by paper, of each (family of models, dataset) that two papers or more print."""
    found: dict[tuple[str, str], dict[str, Published]] = {}
    for row in book.rows:
        if row.method == "full" and row.table.isdigit():
            for dataset, cell in row.scores.items():
                if cell.unit == "pct":
                    found.setdefault((family(row.model), dataset), {}).setdefault(row.paper, cell)
    return {key: by for key, by in found.items() if len(by) > 1}


def full_rows(book: Book) -> Iterator[Finding]:
    """Full-cache scores of one model that differ between papers: scores compare inside a paper only."""
    for (model, dataset), by in baselines(book).items():
        spread = gap(by)
        if spread:
            values = "; ".join(f"{c.printed} ({p} {place(c.table)})" for p, c in by.items())
            versions = {c.model for c in by.values()}
            why = f"the full cache of one model, {fixed(spread, 2)} points apart between papers"
            why += f" ({', '.join(sorted(versions))})" if len(versions) > 1 else ""
            yield Finding("baseline", "note", "+".join(by), "", model, dataset, values, "", why)


def gap(by: Mapping[str, Published]) -> Fraction:
    """Largest difference in points."""
    values = [printed(c.printed).value for c in by.values()]
    return max(values) - min(values)


def _short(value: str) -> str:
    """At least two decimals, no more than are needed."""
    head, _, tail = value.partition(".")
    return f"{head}.{tail[:2]}{tail[2:].rstrip('0')}"
