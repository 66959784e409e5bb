"""audit: where the papers' printed numbers contradict themselves, and which can be computed again without a model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvbench.base.errors import UsageError, unknown

if TYPE_CHECKING:
    from kvbench.papers.forensics.exact import Exact


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("what", help="think, refreekv, uncomp, vatp, qhitter, all, or one table such as think/7")
    parser.add_argument(
        "--exact", action="store_true", help="list the printed values that follow from others, in place of findings"
    )
    parser.add_argument("--format", choices=("text", "md"), default="text", help="text or Markdown (default text)")


def main(args: argparse.Namespace) -> int:
    """Print the findings or the recomputed cells. Return exit status 0.

    Raises UsageError for a paper or table that is not known, and for ``--exact`` without a recomputed cell.
    """
    from kvbench.papers.forensics import audit, report
    from kvbench.papers.forensics.exact import recomputed_cells
    from kvbench.papers.spec import catalogue
    from kvbench.papers.spec.published_cells import read_published

    # "think/7" is a table, "think" all tables of a paper
    name, _, table = args.what.partition("/")
    # called without a table, too, since it refuses an unknown paper
    papers = catalogue.choose_papers(name)
    known_tables = []
    # "all/7" would be a table of every paper, which is refused
    if name != "all":
        for paper in papers:
            known_tables += [f"{name}/{entry.id}" for entry in paper.entries if not entry.is_figure]
    if "/" in args.what and args.what not in known_tables:
        raise unknown("table", args.what, known_tables, "As in think/7.")
    book = read_published()
    findings, exact = [], None
    if args.exact:
        exact = _select_cells(recomputed_cells(book), name, table)
        if not exact:
            raise UsageError(f"{args.what}: no value of it can be computed without a model")
    else:
        findings = audit(book, args.what)
    if args.json:
        print(json.dumps(report.as_json(findings, book, exact), indent=1, ensure_ascii=False))
    elif args.format == "md" and exact:
        print(report.exact_markdown(exact), end="")
    elif args.format == "md":
        print(report.markdown(findings, book, args.what), end="")
    elif findings or exact:
        print(report.text(findings, exact), end="")
    else:
        print(f"{args.what}: nothing found")
    return 0


def _select_cells(cells: Iterable[Exact], paper: str, table: str) -> list[Exact]:
    selected = []
    for recomputed in cells:
        is_of_paper = paper == "all" or recomputed.cell.paper == paper
        is_of_table = not table or recomputed.cell.table == table
        if is_of_paper and is_of_table:
            selected.append(recomputed)

    def place_of(recomputed: Exact) -> tuple[str, bool, str]:
        table_id = recomputed.cell.table
        # numbers are ordered as texts of three characters: 010 comes behind 009
        return recomputed.cell.paper, not table_id.isdigit(), table_id.zfill(3)

    return sorted(selected, key=place_of)
