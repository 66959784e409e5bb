"""claims: the claims of papers, tested on a model, with the evidence for each verdict."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.base.errors import KvbenchError, UsageError
from kvbench.base.visible import say
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
        "--measure", action="store_true", help="measure the claims, in place of showing stored verdicts"
    )
    parser.add_argument(
        "--explain", action="store_true", help="also print quotations, all evidence, and how verdicts are made"
    )


def main(args: argparse.Namespace) -> int:
    """Print the stored ledger of a model. With --measure, measure the results that the claims need first.

    Return exit status 0.
    """
    # without a paper, argparse takes the first key=value for it
    if "=" in args.paper:
        args.overrides = [args.paper] + args.overrides
        args.paper = "all"
    options = parse_pairs(args.overrides)
    refuse_fixed(options, "the claim")
    model = options.pop("model", "tiny")
    results = Path(options.get("results", "results"))
    if not model:
        raise UsageError("model= needs a name: an entry of conf/model, a folder or a hub id")
    from kvbench.papers.claims import claims, ledger

    papers = claims.find_papers(args.paper)
    command = " ".join(["kvbench claims", args.paper, *args.overrides, "--measure"])
    if args.measure:
        content = _measure(papers, model, options)
        # stored before it is printed: the report page reads it
        ledger.write_ledger(content, ledger.own_path(model, results, papers))
    else:
        for key, text in options.items():
            if key != "results":
                raise UsageError(f"{key}={text} is a setting of measurements, and stored verdicts are shown: {command}")
        path = ledger.find_stored(model, results, papers)
        if path is None:
            raise UsageError(f"no verdicts on model={model} are stored below {results}. Measure them: {command}")
        say(f"the verdicts are those of {path}; --measure measures here")
        content = ledger.read_ledger(path)
        # the ledger may be that of all papers
        content["verdicts"] = [record for record in content["verdicts"] if record["paper"] in papers]
    _print_ledger(content, args)
    return 0


def _measure(papers: Sequence[str], model: str, options: Mapping[str, str]) -> Ledger:
    from kvbench.papers.claims import claim_runner, ledger

    words = [f"{key}={value}" for key, value in {"limit": "20", **options}.items()]
    prepared = claim_runner.prepare(papers, model, words)
    claim_runner.measure(prepared)
    content = claim_runner.as_plain(prepared, model, claim_runner.reach_verdicts(prepared, model))
    if not ledger.any_measured(content):
        testable = [record for record in content["verdicts"] if record["test"] != "elsewhere"]
        reasons = "\n".join(dict.fromkeys(record["reason"] for record in testable))
        raise KvbenchError(f"nothing could be measured: {reasons}")
    return content


def _print_ledger(content: Ledger, args: argparse.Namespace) -> None:
    from kvbench.papers.claims import ledger
    from kvbench.report import writers

    if args.json:
        print(json.dumps(content, indent=1, ensure_ascii=False))
        return
    # first how to read the ledger, then why verdicts are missing
    notes = ledger.write_notes(content) + ledger.list_reasons(content)
    table = ledger.compare_ledgers([content])
    if args.format != "text":
        print(writers.compose([table], notes, args.format, above=ledger.tally_verdicts(content["verdicts"])), end="")
        return
    print(ledger.write_brief(content))
    if args.explain:
        print(writers.compose([table], notes, "text"), end="")
    else:
        measure = ["--measure"] if args.measure else []
        command = " ".join(["kvbench claims", args.paper, *args.overrides, *measure, "--explain"])
        print("Numbers: mean paired differences with 95 % intervals, in points (of 100) or in the unit beside them.")
        print("A difference above 0 is in favour of the claim's method. n: examples that both methods answered.")
        print(f"Quotations, all evidence and how verdicts are made: {command}")
