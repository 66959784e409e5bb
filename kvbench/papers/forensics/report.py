"""The audit's findings as text for terminals, as a page of Markdown, and as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from textwrap import fill

import pandas as pd

from kvbench.papers.forensics.exact import Exact, recomputed_cells
from kvbench.papers.forensics.finding import WEIGHTS, Finding, name_table
from kvbench.papers.forensics.granularity import fit_grids
from kvbench.papers.forensics.paper_audit import FAILS, HOLDS, PARTLY
from kvbench.papers.forensics.repeats import collect_baselines, find_largest_gap, find_repeated_places
from kvbench.papers.forensics.statements import judge_statements
from kvbench.papers.spec import catalogue
from kvbench.papers.spec.numbers import format_fixed
from kvbench.papers.spec.published_cells import Book
from kvbench.report.table import WIDTH, Table
from kvbench.report.writers import compose, table

MARKS = {"wrong": "✗", "doubt": "?", "note": "·"}
LEGEND = (
    "✗ wrong: the page contradicts itself. ? doubt: unlikely, or impossible under the assumption that is named. "
    "· note: nothing wrong, but it changes what a number means."
)
HEADS = {
    "derived": "Printed values that do not follow from the others",
    "rounding": "Printed values that only hidden digits explain",
    "ranking": "Orders that follow from wrong averages",
    "repeat": "Measurements printed more than once, with different values",
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
"""The headings of the checks: contradictions first, then coincidences, then facts."""
HEAD = """# Audit of the papers' numbers

`kvbench audit all --format md` makes this page from the published values in `kvbench/papers/data` alone, and a test
compares the two. Rounding is allowed for: a mean of printed values is off only if no hidden digits could give it. Some
texts were converted from PDF (ThinK, UNComp, VATP, Q-Hitter). There, a slip of the conversion cannot always be told
from a slip of the authors.
"""
COLUMNS = ("", "place", "row", "cell", "printed", "recomputed", "why")
"""The columns of a table of findings. The first has the mark of the finding's weight."""
EXACT = ("row", "column", "published", "recomputed", "", "formula")
"""The columns of a table of recomputed cells. The unnamed one has ``Exact.mark``."""
FEW_CELLS = 5
"""The page names up to this many flagged cells of a row. If there are more, it states their number."""


def text(findings: Sequence[Finding]) -> str:
    """Format findings, which are sorted by paper, for a terminal, by paper and check."""
    parts = []
    for paper, group in groupby(findings, key=lambda finding: finding.paper):
        of_paper = list(group)
        weights = Counter(finding.weight for finding in of_paper)
        kinds = ", ".join(f"{weights[weight]} {weight}" for weight in WEIGHTS if weights[weight])
        plural = "" if len(of_paper) == 1 else "s"
        parts.append(f"{fill(_name_paper(paper), WIDTH)}\n{len(of_paper)} finding{plural}: {kinds}\n")
        for check, heading in HEADS.items():
            bodies = [_format_finding(finding) for finding in of_paper if finding.check == check]
            if bodies:
                parts.append(f"{heading}\n" + "".join(bodies))
    parts.append(fill(LEGEND, WIDTH))
    return "\n".join(parts) + "\n"


def _format_finding(finding: Finding) -> str:
    location = " · ".join(part for part in (_name_places(finding), finding.row, finding.cell) if part)
    values = " → ".join(value for value in (finding.printed, finding.recomputed) if value)
    body = f"{values}: {finding.why}"
    if finding.check in ("statement", "accounting"):
        # the row of such a finding is the statement, so the location already has it
        body = f"{finding.recomputed} ({finding.why})"
    # lines are indented below the mark, so findings can be told apart at the left edge
    head = fill(f"{MARKS[finding.weight]} {location}", WIDTH, initial_indent="  ", subsequent_indent="    ")
    indent = " " * 6
    lines = fill(body, WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False)
    return f"{head}\n{lines}\n"


def exact_text(exact: Sequence[Exact], style: str) -> str:
    """Return recomputed cells, sorted by table, as ``text`` or ``md``, with one table for each printed table."""
    parts = []
    for (paper, table_id), values in groupby(exact, key=lambda value: (value.cell.paper, value.cell.table)):
        rows = tuple((v.row, v.column, v.published, v.shown, v.mark, v.formula) for v in values)
        name = f"{paper}, {name_table(table_id)}"
        if style == "md":
            parts.append(f"## {name}\n\n{table(EXACT, rows)}")
        else:
            # a terminal has no room for formulas
            without_formula = Table(EXACT[:-1], tuple(row[:-1] for row in rows))
            parts.append(f"{name}\n\n{compose([without_formula], notes=(), style='text')}")
    if style == "md":
        return "\n".join(parts)
    return "\n".join(parts) + "✓: what is printed follows, within what rounding hides; else by how much it is off.\n"


def exact_json(exact: Sequence[Exact]) -> list[dict[str, object]]:
    """Return recomputed cells as plain data."""
    return [
        {
            "paper": value.cell.paper,
            "table": value.cell.table,
            "row": value.row,
            "column": value.column,
            "published": value.published,
            "recomputed": value.shown,
            "formula": value.formula,
            "grade": value.grade,
            "ok": value.ok,
        }
        for value in exact
    ]


def as_json(findings: Sequence[Finding], book: Book) -> dict[str, object]:
    """Return the findings, and the verdict on every statement of the papers that have findings, as plain data."""
    papers = {finding.paper for finding in findings}
    statements = []
    # statements that hold are included, though they are no findings
    for statement, verdict, shown in judge_statements(book):
        if statement.paper in papers:
            record = statement._asdict() | {"statement": statement.text, "verdict": verdict, "shown": shown}
            statements.append(
                {key: record[key] for key in ("paper", "place", "table", "statement", "verdict", "shown")}
            )
    return {"findings": [finding.as_json() for finding in findings], "statements": statements}


def markdown(findings: Sequence[Finding], book: Book, subject: str) -> str:
    """Return the audit's page: a summary, the findings, the ledger of statements, and the tables behind them.

    findings: sorted by paper, as ``audit`` returns them.
    subject: the audited paper, a table of a paper (``think/7``), or ``all``. The page of one table has no sections on
    the statements and other numbers of the paper.
    """
    paper_name, _, _ = subject.partition("/")
    parts = [HEAD, LEGEND + "\n", *_write_summary(findings, book)]
    # statements, and full rows of several papers (joined by +), have sections of their own
    cell_findings = [f for f in findings if f.check not in ("statement", "accounting") and "+" not in f.paper]
    for paper, group in groupby(cell_findings, key=lambda finding: finding.paper):
        of_paper = list(group)
        parts.append(f"## {_name_paper(paper)}\n")
        for check, heading in HEADS.items():
            rows = [
                (MARKS[f.weight], _name_places(f), f.row, f.cell, f.printed, f.recomputed, f.why)
                for f in of_paper
                if f.check == check
            ]
            if rows:
                parts.append(f"### {heading}\n\n{table(COLUMNS, rows)}")
    if "/" not in subject:
        parts += _write_ledger(book, paper_name)
        parts += _write_grids(book, paper_name)
        if paper_name == "all":
            parts += _write_full_rows(book)
        parts += _write_grades(book, paper_name)
        parts += _write_flags(book, paper_name)
    return "\n".join(parts).rstrip() + "\n"


def _name_places(finding: Finding) -> str:
    if not finding.table:
        return ""
    return ", ".join(map(name_table, finding.table.split("+")))


def _name_paper(paper: str) -> str:
    if "+" in paper:
        return ", ".join(paper.split("+"))
    entry = catalogue.read_paper(paper)
    return f"{entry.title} ({entry.source})"


def _write_summary(findings: Sequence[Finding], book: Book) -> Iterator[str]:
    rows = []
    # a paper without findings has no row
    for paper in dict.fromkeys(finding.paper for finding in findings if "+" not in finding.paper):
        recomputed = [value for value in recomputed_cells(book) if value.cell.paper == paper]
        weights = Counter(finding.weight for finding in findings if finding.paper == paper)
        # the verdict NOTE judges no statement, so it has no count in the table
        verdicts = Counter(judged.verdict for judged in judge_statements(book) if judged.statement.paper == paper)
        counts = [sum(cell.paper == paper for cell in book.cells), len(recomputed)]
        counts += [sum(not value.ok for value in recomputed)] + [weights[weight] for weight in WEIGHTS]
        statements = f"{verdicts[HOLDS]} / {verdicts[PARTLY]} / {verdicts[FAILS]}"
        rows.append([paper] + list(map(str, counts)) + [statements])
    heads = ("paper", "cells", "recomputed", "off", "wrong", "doubt", "note", "statements hold / partly / not")
    yield table(heads, rows)
    # a measurement that is printed three times counts once
    places = find_repeated_places(book)
    differ = len({finding.id for finding in findings if finding.check == "repeat"})
    yield f"{len(places)} measurements are printed in more than one place; {differ} of them with different values.\n"


def _write_ledger(book: Book, name: str) -> Iterator[str]:
    yield "## Statements of the papers against their own numbers\n"
    yield (
        "We picked the statements by hand, so the share that holds says nothing about a paper. Rows marked *note* are "
        "remarks of ours.\n"
    )
    rows = []
    for statement, verdict, shown in judge_statements(book):
        if name in ("all", statement.paper):
            rows.append((statement.paper, statement.place, statement.text, verdict, shown))
    yield table(("paper", "place", "statement, in our words", "verdict", "recomputed"), rows)


def _write_grids(book: Book, name: str) -> Iterator[str]:
    rows = []
    for fit in fit_grids(book):
        grid = fit.grid
        if name in ("all", grid.paper):
            counts = (str(len(fit.cells)), str(fit.attained), f"{100 * fit.chance:.0f} %")
            rows.append((grid.paper, grid.dataset, str(grid.n), grid.why) + counts)
    if rows:
        yield "## Accuracies as k of n\n"
        yield table(("paper", "dataset", "n", "where n is from", "scores", "attainable", "by chance"), rows)


def _write_full_rows(book: Book) -> Iterator[str]:
    yield "## The full cache of one model in several papers\n"
    yield "Scores compare inside a paper only.\n"
    for model, group in pd.Series(collect_baselines(book)).groupby(level=0, sort=False):
        # a column for each paper that prints the model, in the order of appearance
        papers = list(dict.fromkeys(chain.from_iterable(group)))
        rows = []
        for (_, dataset), cell_by_paper in group.items():
            printed = [cell_by_paper[paper].printed if paper in cell_by_paper else "" for paper in papers]
            rows.append([dataset] + printed + [format_fixed(find_largest_gap(cell_by_paper), 2)])
        yield f"### {model}\n\n{table(['dataset'] + papers + ['apart'], rows)}"


def _write_grades(book: Book, name: str) -> Iterator[str]:
    yield "## Values that need no model\n"
    yield "They follow from other printed values, budgets, shapes and datasets. `audit PAPER --exact` lists them.\n"
    grades: dict[tuple[str, str], Counter[str]] = {}
    for value in recomputed_cells(book):
        if name in ("all", value.cell.paper):
            grades.setdefault((value.cell.paper, value.cell.table), Counter())[value.grade] += 1
    rows = []
    # numbered tables come first, ordered as texts of three characters: 010 comes behind 009
    for paper, table_id in sorted(grades, key=lambda place: (place[0], not place[1].isdigit(), place[1].zfill(3))):
        counts = grades[paper, table_id]
        numbers = [counts.total()] + [counts[grade] for grade in ("equal", "rounding", "off")]
        rows.append([paper, name_table(table_id)] + list(map(str, numbers)))
    yield table(("paper", "table", "recomputed", "equal", "within rounding", "off"), rows)


def _write_flags(book: Book, name: str) -> Iterator[str]:
    # one reason often holds for a whole row: list the row's cells in one line
    cells_by_reason: dict[tuple[str, str, str, str, str], list[str]] = {}
    for row in book.rows:
        if name not in ("all", row.paper):
            continue
        for cell in row.cells.values():
            for kind, reason in cell.flags.items():
                key = (kind, row.paper, row.table, row.label, reason)
                cells_by_reason.setdefault(key, []).append(f"{cell.dataset} {cell.printed}".strip())
    if not cells_by_reason:
        return
    yield "## Values with a flag\n"
    yield (
        "Repaired: the value in our text is certainly wrong, and other places of the paper have the right one. "
        "Suspect: the value may be wrong, and is used as printed.\n"
    )
    rows = []
    for (kind, paper, table_id, label, reason), cells in sorted(cells_by_reason.items()):
        names = ", ".join(cells)
        if len(cells) > FEW_CELLS:
            names = f"{len(cells)} cells"
        rows.append((kind, paper, name_table(table_id), label, names, reason))
    yield table(("flag", "paper", "place", "row", "cells", "reason"), rows)
