"""Write the audit's findings: as text for terminals, as a whole page of Markdown, and as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from textwrap import fill

from kvbench.papers.forensics.exact import Exact, recomputed_cells
from kvbench.papers.forensics.finding import WEIGHTS, Finding, name_table
from kvbench.papers.forensics.granularity import fit_grids
from kvbench.papers.forensics.paper_audit import FAILS, HOLDS, PARTLY
from kvbench.papers.forensics.repeats import collect_baselines, find_largest_gap, find_repeated_places
from kvbench.papers.forensics.statements import judge_statements
from kvbench.papers.spec import catalogue
from kvbench.papers.spec.numbers import format_fixed
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


def text(findings: Sequence[Finding], exact: Sequence[Exact] | None = None) -> str:
    """Format findings for a terminal, by paper and check. If ``exact`` is given, format these cells instead."""
    if exact is not None:
        return _format_exact(exact)
    parts = []
    # findings are sorted by paper already, with those about several papers last
    for paper, paper_findings in _group_by_paper(findings):
        weights = Counter(finding.weight for finding in paper_findings)
        kinds = ", ".join(f"{weights[weight]} {weight}" for weight in WEIGHTS if weights[weight])
        count = len(paper_findings)
        plural = "" if count == 1 else "s"
        parts.append(f"{fill(_name_paper(paper), WIDTH)}\n{count} finding{plural}: {kinds}\n")
        for check, check_findings in _group_by_check(paper_findings):
            parts.append(f"{HEADS[check]}\n" + "".join(map(_format_finding, check_findings)))
    parts.append(fill(LEGEND, WIDTH))
    return "\n".join(parts) + "\n"


def _format_exact(exact: Sequence[Exact]) -> str:
    parts = []
    for name, rows in _group_by_table(exact):
        without_formula = Table(EXACT[:-1], tuple(row[:-1] for row in rows))
        parts.append(f"{name}\n\n{compose([without_formula], notes=(), style='text')}")
    return "\n".join(parts) + "✓: what is printed follows, within what rounding hides; else by how much it is off.\n"


def _format_finding(finding: Finding) -> str:
    location = " · ".join(part for part in (_name_places(finding), finding.row, finding.cell) if part)
    if finding.check in ("statement", "accounting"):
        # the row of such a finding is the statement, so the location already has it
        body = f"{finding.recomputed} ({finding.why})"
    else:
        values = [value for value in (finding.printed, finding.recomputed) if value]
        body = f"{' → '.join(values)}: {finding.why}"
    # lines are indented below the mark, so findings can be told apart at the left edge
    head_lines = fill(f"{MARKS[finding.weight]} {location}", WIDTH, initial_indent="  ", subsequent_indent="    ")
    indent = " " * 6
    body_lines = fill(body, WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False)
    return f"{head_lines}\n{body_lines}\n"


def markdown(findings: Sequence[Finding], book: Book, subject: str) -> str:
    """Return the audit's page: a summary, the findings, the ledger of statements, and the tables behind them.

    findings: sorted by paper, as ``audit`` returns them.
    subject: the audited paper, a table of a paper (``think/7``), or ``all``. The page of one table has no sections on
    the statements and other numbers of the paper.
    """
    paper_name, _, _ = subject.partition("/")
    parts = [HEAD, LEGEND + "\n"]
    parts.extend(_write_summary(findings, book))
    # statements, and full rows of several papers (joined by +), have sections of their own
    cell_findings = []
    for finding in findings:
        if finding.check not in ("statement", "accounting") and "+" not in finding.paper:
            cell_findings.append(finding)
    for paper, paper_findings in _group_by_paper(cell_findings):
        parts.append(f"## {_name_paper(paper)}\n")
        for check, check_findings in _group_by_check(paper_findings):
            rows = [_list_texts(finding) for finding in check_findings]
            parts.append(f"### {HEADS[check]}\n\n{table(COLUMNS, rows)}")
    # the page of one table has no sections about its paper
    if "/" not in subject:
        parts.extend(_write_ledger(book, paper_name))
        parts.extend(_write_grids(book, paper_name))
        if paper_name == "all":
            parts.extend(_write_full_rows(book))
        parts.extend(_write_grades(book, paper_name))
        parts.extend(_write_flags(book, paper_name))
    return "\n".join(parts).rstrip() + "\n"


def _list_texts(finding: Finding) -> tuple[str, ...]:
    mark, places = MARKS[finding.weight], _name_places(finding)
    return mark, places, finding.row, finding.cell, finding.printed, finding.recomputed, finding.why


def as_json(findings: Sequence[Finding], book: Book, exact: Sequence[Exact] | None = None) -> object:
    """Return data for JSON: the findings, and the verdict on every statement of the papers that have findings.

    book: the published cells by which statements are judged.
    exact: recomputed cells, to be returned alone; None to return the findings.
    """
    if exact is not None:
        return [_record_exact(cell) for cell in exact]
    papers = {finding.paper for finding in findings}
    ledger = []
    for judgement in judge_statements(book):
        statement = judgement.statement
        # statements that hold are included, though they are no findings
        if statement.paper in papers:
            ledger.append(
                {
                    "paper": statement.paper,
                    "place": statement.place,
                    "table": statement.table,
                    "statement": statement.text,
                    "verdict": judgement.verdict,
                    "shown": judgement.shown,
                }
            )
    return {"findings": [finding.as_json() for finding in findings], "statements": ledger}


def _record_exact(exact: Exact) -> dict[str, str | bool]:
    return {
        "paper": exact.cell.paper,
        "table": exact.cell.table,
        "row": exact.row,
        "column": exact.column,
        "published": exact.published,
        "recomputed": exact.shown,
        "formula": exact.formula,
        "grade": exact.grade,
        "ok": exact.ok,
    }


def exact_markdown(exact: Sequence[Exact]) -> str:
    """Return recomputed cells as Markdown, with one table for each printed table of a paper.

    exact: the cells, sorted by table.
    """
    return "\n".join(f"## {name}\n\n{table(EXACT, rows)}" for name, rows in _group_by_table(exact))


def _group_by_table(exact: Sequence[Exact]) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    for (paper, table_id), values in groupby(exact, key=lambda value: (value.cell.paper, value.cell.table)):
        rows: list[tuple[str, ...]] = []
        for value in values:
            rows.append((value.row, value.column, value.published, value.shown, value.mark, value.formula))
        yield f"{paper}, {name_table(table_id)}", rows


def _name_places(finding: Finding) -> str:
    """Return the tables of a finding in words; '' if it concerns no table."""
    if not finding.table:
        return ""
    return ", ".join(map(name_table, finding.table.split("+")))


def _group_by_paper(findings: Sequence[Finding]) -> Iterator[tuple[str, list[Finding]]]:
    for paper, group in groupby(findings, key=attrgetter("paper")):
        yield paper, list(group)


def _group_by_check(findings: Sequence[Finding]) -> Iterator[tuple[str, list[Finding]]]:
    # HEADS has contradictions first, then coincidences, then facts
    for check in HEADS:
        check_findings = [finding for finding in findings if finding.check == check]
        if check_findings:
            yield check, check_findings


def _name_paper(paper: str) -> str:
    if "+" in paper:
        return ", ".join(paper.split("+"))
    entry = catalogue.read_paper(paper)
    return f"{entry.title} ({entry.source})"


def _write_summary(findings: Sequence[Finding], book: Book) -> Iterator[str]:
    all_recomputed, judgements = recomputed_cells(book), judge_statements(book)
    rows = []
    # a paper without findings has no row
    for paper in dict.fromkeys(finding.paper for finding in findings if "+" not in finding.paper):
        n_cells = sum(cell.paper == paper for cell in book.cells)
        recomputed = [value for value in all_recomputed if value.cell.paper == paper]
        n_off = sum(not value.ok for value in recomputed)
        weights = Counter(finding.weight for finding in findings if finding.paper == paper)
        # the verdict NOTE judges no statement, so it has no count in the table
        verdicts = Counter(judgement.verdict for judgement in judgements if judgement.statement.paper == paper)
        row = [paper, str(n_cells), str(len(recomputed)), str(n_off)]
        row.extend(str(weights[weight]) for weight in WEIGHTS)
        row.append(f"{verdicts[HOLDS]} / {verdicts[PARTLY]} / {verdicts[FAILS]}")
        rows.append(row)
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
    for judgement in judge_statements(book):
        statement = judgement.statement
        if name in ("all", statement.paper):
            rows.append((statement.paper, statement.place, statement.text, judgement.verdict, judgement.shown))
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
    datasets_by_model: dict[str, dict[str, dict[str, Published]]] = {}
    for (model, dataset), cell_by_paper in collect_baselines(book).items():
        datasets_by_model.setdefault(model, {})[dataset] = cell_by_paper
    for model, datasets in datasets_by_model.items():
        # a column for each paper that prints the model; the keys are the papers in the order of appearance
        papers: dict[str, None] = {}
        for cell_by_paper in datasets.values():
            papers |= dict.fromkeys(cell_by_paper)
        heads = ["dataset"]
        heads.extend(papers)
        heads.append("apart")
        rows = []
        for dataset, cell_by_paper in datasets.items():
            row = [dataset]
            for paper in papers:
                row.append(cell_by_paper[paper].printed if paper in cell_by_paper else "")
            row.append(format_fixed(find_largest_gap(cell_by_paper), 2))
            rows.append(row)
        yield f"### {model}\n\n{table(heads, rows)}"


def _write_grades(book: Book, name: str) -> Iterator[str]:
    yield "## Values that need no model\n"
    yield "They follow from other printed values, budgets, shapes and datasets. `audit PAPER --exact` lists them.\n"
    # how many cells have each grade, by paper and then by table
    grades: dict[str, dict[str, Counter[str]]] = {}
    for value in recomputed_cells(book):
        if name in ("all", value.cell.paper):
            grades.setdefault(value.cell.paper, {}).setdefault(value.cell.table, Counter())[value.grade] += 1
    rows = []
    for paper in sorted(grades):
        # numbered tables come first, ordered as texts of three characters: 010 comes behind 009
        for table_id in sorted(grades[paper], key=lambda table_id: (not table_id.isdigit(), table_id.zfill(3))):
            # equal + rounding + off are all recomputed cells
            counts = grades[paper][table_id]
            row = [paper, name_table(table_id), str(counts.total())]
            row.extend(str(counts[grade]) for grade in ("equal", "rounding", "off"))
            rows.append(row)
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
        names = f"{len(cells)} cells" if len(cells) > FEW_CELLS else ", ".join(cells)
        rows.append((kind, paper, name_table(table_id), label, names, reason))
    yield table(("flag", "paper", "place", "row", "cells", "reason"), rows)
