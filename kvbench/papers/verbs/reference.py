"""reference: the value and the source of each preset's settings, and the paper results that can be reproduced."""

from __future__ import annotations

import argparse
import json


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("paper", nargs="?", default="all", help="think, refreekv, uncomp, vatp, qhitter (default all)")
    parser.add_argument("--format", choices=("text", "md"), default="text", help="text or Markdown (default text)")


def main(args: argparse.Namespace) -> int:
    """Print each preset's values with their sources, and which of the papers' results can be reproduced.

    Return exit status 0.
    """
    from kvbench.papers.report import reference
    from kvbench.papers.spec import catalogue

    papers = catalogue.choose_papers(args.paper)
    if args.json:
        print(json.dumps([reference.as_json(paper) for paper in papers], indent=1, ensure_ascii=False))
    elif args.format == "md":
        # the text ends with its own newline, so that a file made of it has one
        print(reference.write_markdown(papers), end="")
    else:
        print(reference.write_text(papers), end="")
    return 0
