"""audit: where the papers' printed numbers contradict themselves, and which can be computed again without a model."""

from __future__ import annotations

import argparse
import json

from kvbench.base.errors import UsageError, unknown


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
    # "all/7" would be a table of every paper, which is refused
    tables: list[str] = []
    if name != "all":
        for paper in papers:
            tables += [f"{paper.id}/{entry.id}" for entry in paper.entries if not entry.is_figure]
    if "/" in args.what and args.what not in tables:
        raise unknown("table", args.what, tables, "As in think/7.")
    book = read_published()
    if args.exact:
        exact = [e for e in recomputed_cells(book) if name in ("all", e.cell.paper) and table in ("", e.cell.table)]
        if not exact:
            raise UsageError(f"{args.what}: no value of it can be computed without a model")
        # numbered tables first, as texts of three characters: 010 comes behind 009
        exact.sort(key=lambda e: (e.cell.paper, not e.cell.table.isdigit(), e.cell.table.zfill(3)))
        if args.json:
            print(json.dumps(report.exact_json(exact), indent=1, ensure_ascii=False))
        else:
            print(report.exact_text(exact, args.format), end="")
        return 0
    findings = audit(book, args.what)
    if args.json:
        print(json.dumps(report.as_json(findings, book), indent=1, ensure_ascii=False))
    elif args.format == "md":
        print(report.markdown(findings, book, args.what), end="")
    elif findings:
        print(report.text(findings), end="")
    else:
        print(f"{args.what}: nothing found")
    return 0
