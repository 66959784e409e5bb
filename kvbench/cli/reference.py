"""reference: what each preset sets and from where, and what of each paper can be reproduced."""

from __future__ import annotations

import argparse

EXAMPLES = """examples:
  python -m kvbench reference think
  python -m kvbench reference --format md

For each paper: every value of its preset with its source, every table and figure with what of it can be reproduced,
and what the paper says, by its own numbers. docs/reference.md is all of it as Markdown."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("paper", nargs="?", default="all", help="think, refreekv, uncomp, vatp, qhitter (default all)")
    parser.add_argument("--format", choices=("text", "md"), default="text", help="text or Markdown (default text)")


def main(args: argparse.Namespace) -> int:
    """Print the reference."""
    from kvbench.papers.report import reference
    from kvbench.papers.spec import catalogue

    papers = catalogue.chosen(args.paper)
    print(reference.markdown(papers) if args.format == "md" else reference.text(papers), end="")
    return 0
