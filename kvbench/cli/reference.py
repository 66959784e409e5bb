"""reference: what each preset sets and from where, and what of each paper can be reproduced."""

from __future__ import annotations

import argparse
import json


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("paper", nargs="?", default="all", help="think, refreekv, uncomp, vatp, qhitter (default all)")
    parser.add_argument("--format", choices=("text", "md"), default="text", help="text or Markdown (default text)")


def main(args: argparse.Namespace) -> int:
    """Print the reference."""
    from kvbench.papers.report import reference
    from kvbench.papers.spec import catalogue

    papers = catalogue.chosen(args.paper)
    if args.json:
        print(json.dumps([reference.as_json(p) for p in papers], indent=1, ensure_ascii=False))
        return 0
    print(reference.markdown(papers) if args.format == "md" else reference.text(papers), end="")
    return 0
