"""claims: the claims of papers, tested on a model, with the evidence for each verdict."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.base.errors import MissingModel, UsageError
from kvbench.plan.keys import parse_pairs

if TYPE_CHECKING:
    from kvbench.papers.claims.ledger import Ledger

FIXED = ("method", "dataset", "preset", "match", "reference")
"""Keys of `run` that a claim or a table of a paper decides itself."""


def refuse_fixed(options: Mapping[str, str], owner: str) -> None:
    """Raise UsageError if an option is one of FIXED. ``owner`` says in the message who decides it: "the claim"."""
    for key in options:
        if key in FIXED:
            raise UsageError(
                f"{key}={options[key]} is not possible here: {owner} sets it. Use `kvbench run` to choose it"
            )


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("paper", nargs="?", default="all", help="a paper, or all (default)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="model=, limit=, results=, ...")
    parser.add_argument(
        "--format",
        choices=("text", "md", "latex"),
        default="text",
        help="text (short), md or latex (with all evidence)",
    )
    parser.add_argument(
        "--explain", action="store_true", help="also print quotations, all evidence, and how verdicts are made"
    )


def main(args: argparse.Namespace) -> int:
    """Measure the results that the claims need and print the ledger. Return exit status 0.

    If nothing can be measured here, print the committed ledger of the model, if there is one.
    """
    # without a paper, argparse takes the first key=value for it
    if "=" in args.paper:
        args.overrides = [args.paper] + args.overrides
        args.paper = "all"
    # 20 examples of each task unless the user gives another limit
    options = {"limit": "20"} | parse_pairs(args.overrides)
    refuse_fixed(options, "the claim")
    model = options.pop("model", "tiny")
    results = Path(options.get("results", "results"))
    if not model:
        raise UsageError("model= needs a name: an entry of conf/model, a folder or a hub id")
    from kvbench.papers.claims import claim_runner, claims, ledger

    papers = claims.find_papers(args.paper)
    committed = None
    try:
        prepared = claim_runner.prepare(papers, model, [f"{key}={value}" for key, value in options.items()])
    except MissingModel as error:
        # committed verdicts need no model
        committed = ledger.read_committed(model, results, papers)
        if committed is None:
            raise
        missing = str(error)
    else:
        claim_runner.measure(prepared)
        outcomes = claim_runner.reach_verdicts(prepared, model)
        content = claim_runner.as_plain(prepared, model, outcomes)
        if not ledger.any_measured(content):
            committed = ledger.read_committed(model, results, papers)
        testable = [record for record in content["verdicts"] if record["test"] != "elsewhere"]
        missing = "\n".join(dict.fromkeys(record["reason"] for record in testable))
    if committed is None:
        # stored before it is printed: the report page reads it
        ledger.write_ledger(content, ledger.own_path(model, results, papers))
    else:
        # the committed ledger is that of all papers, also if the user names one
        path = ledger.ledger_path(model, results, claims.papers_with_claims())
        print(f"The verdicts below are those of {path}. Nothing could be measured here:\n{missing}\n", file=sys.stderr)
        content = committed
    _print_ledger(content, args)
    return 0


def _print_ledger(content: Ledger, args: argparse.Namespace) -> None:
    """Print a ledger as the user asked for it: as JSON, as a table with all evidence, or in brief."""
    from kvbench.papers.claims import ledger
    from kvbench.report import writers

    if args.json:
        print(json.dumps(content, indent=1, ensure_ascii=False))
        return
    # first how to read the ledger, then why verdicts are missing
    notes = ledger.write_notes(content) + ledger.list_reasons(content)
    table = ledger.compare_ledgers([content])
    if args.format != "text":
        print(writers.compose([table], notes, args.format, above=[ledger.tally_verdicts(content)]), end="")
        return
    print(ledger.write_brief(content))
    if args.explain:
        print(writers.compose([table], notes, "text"), end="")
    else:
        command = " ".join(["kvbench claims", args.paper, *args.overrides, "--explain"])
        print("Numbers: mean paired differences with 95 % intervals, in points (of 100) or in the unit beside them.")
        print("A difference above 0 is in favour of the claim's method. n: examples that both methods answered.")
        print(f"Quotations, all evidence and how verdicts are made: {command}")
