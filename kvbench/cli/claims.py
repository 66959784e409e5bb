"""claims: what papers claim, tested on a model, with the evidence for each verdict."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from kvbench.base.errors import UsageError
from kvbench.plan.keys import pairs

FIXED = ("method", "dataset", "preset", "match", "reference")
"""Keys of `run` that a claim or a table of a paper decides itself."""


def refuse_fixed(options: Mapping[str, str], owner: str) -> None:
    """Raise UsageError if an option is a key that its ``owner`` decides, as "the claim"."""
    for key in options:
        if key in FIXED:
            raise UsageError(f"{key}={options[key]} is not possible here: {owner} says it. Use `run` instead")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("paper", nargs="?", default="all", help="a paper, or all (default)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="model=, limit=, results=, ...")
    parser.add_argument("--format", choices=("text", "md", "latex"), default="text", help="of the ledger")


def main(args: argparse.Namespace) -> int:
    """Measure what the claims need and print the ledger."""
    if "=" in args.paper:
        args.paper, args.overrides = "all", [args.paper, *args.overrides]
    options = {"limit": "20", **pairs(args.overrides)}
    refuse_fixed(options, "the claim")
    model, results = options.pop("model", "tiny"), Path(options.get("results", "results"))
    if not model:
        raise UsageError("model= needs a name: an entry of conf/model, a folder or a hub id")
    from kvbench.papers.claims import claim_runner, claims
    from kvbench.report import writers

    papers = claims.find(args.paper)
    prepared = claim_runner.prepare(papers, model, [f"{k}={v}" for k, v in options.items()])
    claim_runner.measure(prepared)
    content = claim_runner.plain(prepared, model, claim_runner.settle(prepared, model))
    claim_runner.write(content, results, papers)
    if args.json:
        print(json.dumps(content, indent=1, ensure_ascii=False))
    else:
        print(
            writers.compose(
                [claim_runner.sheet([content])],
                [*claim_runner.notes(content), *claim_runner.reasons(content)],
                args.format,
            ),
            end="",
        )
    return 0
