"""The audit on the page: text for terminals, the whole of it as Markdown, plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from textwrap import fill
from typing import Any

from kvbench.papers.forensics.exact import Exact, everything
from kvbench.papers.forensics.finding import WEIGHTS, Finding, place
from kvbench.papers.forensics.granularity import fits
from kvbench.papers.forensics.repeats import baselines, gap, repeated
from kvbench.papers.forensics.statements import judged
from kvbench.papers.spec import catalogue
from kvbench.papers.spec.numbers import fixed
from kvbench.papers.spec.published import Published
from kvbench.papers.spec.published_cells import Book
from kvbench.report.table import WIDTH, Table
from kvbench.report.writers import compose, table

MARKS = {"wrong": "✗", "doubt": "?", "note": "·"}
LEGEND = (
    "✗ wrong: the page contradicts itself. ? doubt: unlikely, or impossible under the assumption that is named. "
    "· note: nothing wrong, but it changes what a number means."
)
HEADS = {
    "derived": "Cells that do not follow from the others",
    "rounding": "Cells that only hidden digits explain",
    "ranking": "Orders that follow from wrong averages",
    "repeat": "Cells printed more than once, with different values",
    "copy": "Rows that share scores to the last digit",
    "twin": "One value in two places of a table",
    "gain": "Compressed caches far above the full one",
    "break": "Scores that fall out of a series",
    "granularity": "Accuracies that no whole number of right answers gives",
    "sample-count": "Numbers of questions that the scores do not fit",
    "statement": "Statements against numbers",
    "accounting": "What numbers count",
    "baseline": "The full cache of one model in several papers",
}
HEAD = """# Audit of the papers' numbers

Made by `python -m kvbench audit all --format md` from the published cells in `kvbench/papers/data`, and a pure
function of them; a test compares this page with the code. Numbers are compared with what rounding can hide: a mean of
printed cells is off only where no digits behind the printed ones could give it. Where a text was converted from PDF
(ThinK, UNComp, VATP, Q-Hitter), a slip of the conversion cannot always be told from one of the authors.
"""


def text(findings: Sequence[Finding], exact: Sequence[Exact] | None = None) -> str:
    """Format findings for a terminal of 100 columns, by paper and check; or the recomputed cells, where given."""
    if exact is not None:
        parts = []
        for name, rows in _by_table(exact):
            without_formula = Table(EXACT[:5], tuple(row[:5] for row in rows))
            parts.append(f"{name}\n\n{compose([without_formula], (), 'text')}")
        return (
            "\n".join(parts) + "✓: what is printed follows, within what rounding hides; else by how much it is off.\n"
        )
    parts = []
    for paper, group in groupby(findings, key=lambda f: f.paper):
        paper_findings = list(group)
        weights, count = Counter(f.weight for f in paper_findings), len(paper_findings)
        kinds = ", ".join(f"{weights[w]} {w}" for w in WEIGHTS if weights[w])
        parts.append(f"{fill(_title(paper), WIDTH)}\n{count} finding{'s' if count != 1 else ''}: {kinds}\n")
        for check, check_findings in _by_check(paper_findings):
            parts.append(f"{HEADS[check]}\n" + "".join(_line(f) for f in check_findings))
    return "\n".join([*parts, fill(LEGEND, WIDTH)]) + "\n"


def markdown(findings: Sequence[Finding], book: Book, what: str) -> str:
    """Return the page: findings with their values, the ledger of statements, and the tables behind them."""
    name = what.partition("/")[0]
    parts = [HEAD, LEGEND + "\n", *_summary(findings, book)]
    of_cells = [f for f in findings if f.check not in ("statement", "accounting") and "+" not in f.paper]
    for paper, group in groupby(of_cells, key=lambda f: f.paper):
        parts.append(f"## {_title(paper)}\n")
        for check, block in _by_check(list(group)):
            cells = [(MARKS[f.weight], _where(f), f.row, f.cell, f.printed, f.recomputed, f.why) for f in block]
            parts.append(f"### {HEADS[check]}\n\n{table(COLUMNS, cells)}")
    if "/" not in what:
        parts += [*_ledger(book, name), *_granularity(book, name)]
        parts += [*_full_rows(book)] if name == "all" else []
        parts += [*_exact(book, name), *_flags(book, name)]
    return "\n".join(parts).rstrip() + "\n"


def as_json(findings: Sequence[Finding], book: Book, exact: Sequence[Exact] | None = None) -> Any:
    """Return plain data: the findings with every statement's verdict, or the recomputed cells."""
    if exact is not None:
        return [
            {
                **{"paper": e.cell.paper, "table": e.cell.table, "row": e.row, "column": e.column},
                **{"published": e.published, "recomputed": e.shown, "formula": e.formula, "grade": e.grade, "ok": e.ok},
            }
            for e in exact
        ]
    papers = {f.paper for f in findings}
    ledger = [
        {
            **{"paper": s.paper, "place": s.place, "table": s.table},
            **{"statement": s.text, "verdict": j.verdict, "shown": j.shown},
        }
        for j in judged(book)
        if (s := j.statement).paper in papers
    ]
    return {"findings": [f.as_json() for f in findings], "statements": ledger}


def exact_markdown(exact: Sequence[Exact]) -> str:
    """Format the recomputed cells, one table of Markdown for each printed table."""
    return "\n".join(f"## {name}\n\n{table(EXACT, rows)}" for name, rows in _by_table(exact))


def _by_table(exact: Sequence[Exact]) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Yield the name of each printed table, with a row of EXACT for each of its recomputed cells."""
    for (paper, number), block in groupby(exact, key=lambda e: (e.cell.paper, e.cell.table)):
        yield f"{paper}, {place(number)}", [(e.row, e.column, e.published, e.shown, e.mark, e.formula) for e in block]


COLUMNS = ("", "place", "row", "cell", "printed", "recomputed", "why")
EXACT = ("row", "column", "published", "recomputed", "", "formula")


def _line(f: Finding) -> str:
    """Format one finding for a terminal: its place on the first lines, its numbers and reason below."""
    location = " · ".join(filter(None, (_where(f), f.row, f.cell)))
    if f.check in ("statement", "accounting"):
        body = f"{f.recomputed} ({f.why})"
    else:
        body = f"{' → '.join(filter(None, (f.printed, f.recomputed)))}: {f.why}"
    head = fill(f"{MARKS[f.weight]} {location}", WIDTH, initial_indent="  ", subsequent_indent="    ")
    return f"{head}\n{fill(body, WIDTH, initial_indent=' ' * 6, subsequent_indent=' ' * 6, break_long_words=False)}\n"


def _where(f: Finding) -> str:
    """Return the tables of a finding in words."""
    return ", ".join(place(t) for t in f.table.split("+")) if f.table else ""


def _by_check(findings: Sequence[Finding]) -> Iterator[tuple[str, list[Finding]]]:
    """Yield every check that has findings, in the order of HEADS, with them."""
    for check in HEADS:
        block = [f for f in findings if f.check == check]
        if block:
            yield check, block


def _title(paper: str) -> str:
    """Return a paper's title and source, or the names of several papers."""
    if "+" in paper:
        return ", ".join(paper.split("+"))
    p = catalogue.paper(paper)
    return f"{p.title} ({p.source})"


def _summary(findings: Sequence[Finding], book: Book) -> Iterator[str]:
    """Yield a table by paper (cells, recomputed cells, findings, verdicts), then how many measurements are repeated."""
    exact, ledger = everything(book), judged(book)
    rows = []
    for paper in dict.fromkeys(f.paper for f in findings if "+" not in f.paper):
        weights = Counter(f.weight for f in findings if f.paper == paper)
        recomputed = [e for e in exact if e.cell.paper == paper]
        verdicts = Counter(j.verdict for j in ledger if j.statement.paper == paper)
        verdict_text = f"{verdicts['holds']} / {verdicts['partly']} / {verdicts['does not hold']}"
        cells = sum(c.paper == paper for c in book.cells)
        numbers = (cells, len(recomputed), sum(not e.ok for e in recomputed), *(weights[w] for w in WEIGHTS))
        rows.append((paper, *map(str, numbers), verdict_text))
    head = ("paper", "cells", "recomputed", "off", "wrong", "doubt", "note", "statements hold / partly / not")
    yield table(head, rows)
    places = repeated(book)
    differ = len({f.id for f in findings if f.check == "repeat"})
    yield f"{len(places)} measurements are printed in more than one place; {differ} of them with different values.\n"


def _ledger(book: Book, name: str) -> Iterator[str]:
    """Yield the section of statements with their verdicts."""
    judgements = [j for j in judged(book) if name in ("all", j.statement.paper)]
    yield "## Statements of the papers against their own numbers\n"
    yield "Picked by hand, so the share that holds says nothing about a paper. A note is no statement of the paper.\n"
    rows = [(j.statement.paper, j.statement.place, j.statement.text, j.verdict, j.shown) for j in judgements]
    yield table(("paper", "place", "statement, in our words", "verdict", "recomputed"), rows)


def _granularity(book: Book, name: str) -> Iterator[str]:
    """Yield the section on accuracies that must be k of n."""
    grid_fits = [f for f in fits(book) if name in ("all", f.grid.paper)]
    if grid_fits:
        yield "## Accuracies as k of n\n"
        head = ("paper", "dataset", "n", "where n is from", "scores", "attainable", "by chance")
        rows = [
            (
                *(f.grid.paper, f.grid.dataset, str(f.grid.n), f.grid.why),
                *(str(len(f.cells)), str(len(f.cells) - len(f.off)), f"{100 * f.chance:.0f} %"),
            )
            for f in grid_fits
        ]
        yield table(head, rows)


def _full_rows(book: Book) -> Iterator[str]:
    """Yield the section on the full cache of one model in several papers."""
    yield "## The full cache of one model in several papers\n"
    yield "Scores compare inside a paper only.\n"
    by_model: dict[str, dict[str, Mapping[str, Published]]] = {}
    for (model, dataset), cells in baselines(book).items():
        by_model.setdefault(model, {})[dataset] = cells
    for model, datasets in by_model.items():
        papers = list(dict.fromkeys(p for cells in datasets.values() for p in cells))
        rows = [
            (d, *(cells[p].printed if p in cells else "" for p in papers), fixed(gap(cells), 2))
            for d, cells in datasets.items()
        ]
        yield f"### {model}\n\n{table(('dataset', *papers, 'apart'), rows)}"


def _exact(book: Book, name: str) -> Iterator[str]:
    """Yield the section that counts recomputed cells by table and grade."""
    yield "## Cells that need no model\n"
    yield "Recomputed from other cells, budgets, shapes and datasets; `audit PAPER --exact` lists them.\n"
    recomputed = [e for e in everything(book) if name in ("all", e.cell.paper)]
    counts: dict[tuple[str, str], Counter[str]] = {}
    for e in recomputed:
        counts.setdefault((e.cell.paper, e.cell.table), Counter())[e.grade] += 1
    rows = [
        (p, place(t), str(sum(c.values())), str(c["equal"]), str(c["rounding"]), str(c["off"]))
        for (p, t), c in sorted(counts.items(), key=lambda x: (x[0][0], not x[0][1].isdigit(), x[0][1].zfill(3)))
    ]
    yield table(("paper", "table", "recomputed", "equal", "within rounding", "off"), rows)


def _flags(book: Book, name: str) -> Iterator[str]:
    """Yield the section of repaired, suspect and missing cells, a row and reason at a time."""
    flagged: dict[tuple[str, str, str, str, str], list[str]] = {}
    for row in book.rows:
        for cell in row.cells.values():
            for kind, reason in cell.flags.items() if name in ("all", row.paper) else ():
                shown = f"{cell.dataset} {cell.printed}".strip()
                flagged.setdefault((kind, row.paper, row.table, row.label, reason), []).append(shown)
    if flagged:
        yield "## Cells with a flag\n"
        yield "Repaired: the text is certainly wrong, and other places say what stands there. Suspect: as printed.\n"
        rows = [
            (kind, paper, place(t), row, ", ".join(cells) if len(cells) < 6 else f"{len(cells)} cells", reason)
            for (kind, paper, t, row, reason), cells in sorted(flagged.items())
        ]
        yield table(("flag", "paper", "place", "row", "cells", "reason"), rows)
