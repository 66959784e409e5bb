"""audit: where the papers' printed numbers contradict themselves, and which can be computed again without a model."""

from __future__ import annotations

import argparse
import json

from kvbench.base.errors import UsageError, unknown


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("what", help="think, refreekv, uncomp, vatp, qhitter or all; one table as in think/7")
    parser.add_argument("--exact", action="store_true", help="list the cells that need no model instead of findings")
    parser.add_argument("--format", choices=("text", "md"), default="text", help="text or Markdown (default text)")


def main(args: argparse.Namespace) -> int:
    """Print the findings or the recomputed cells."""
    from kvbench.papers.forensics import audit, report
    from kvbench.papers.forensics.exact import everything
    from kvbench.papers.spec import catalogue
    from kvbench.papers.spec.published_cells import published

    name, _, table = args.what.partition("/")
    tables = [e.id for p in catalogue.chosen(name) for e in p.entries if not e.is_figure]
    if "/" in args.what and (name == "all" or table not in tables):
        raise unknown("table", args.what, [f"{name}/{t}" for t in tables] if name != "all" else (), "As in think/7.")
    book = published()
    exact = None
    if args.exact:
        mine = [e for e in everything(book) if name in ("all", e.cell.paper) and table in ("", e.cell.table)]
        exact = sorted(mine, key=lambda e: (e.cell.paper, not e.cell.table.isdigit(), e.cell.table.zfill(3)))
        if not exact:
            raise UsageError(f"{args.what}: no cell of it can be computed without a model")
    findings = audit(book, args.what) if exact is None else []
    if args.json:
        print(json.dumps(report.as_json(findings, book, exact), indent=1, ensure_ascii=False))
    elif args.format == "md":
        print(report.exact_markdown(exact) if exact else report.markdown(findings, book, args.what), end="")
    elif not findings and exact is None:
        print(f"{args.what}: nothing found")
    else:
        print(report.text(findings, exact), end="")
    return 0
