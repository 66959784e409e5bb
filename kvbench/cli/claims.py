"""claims: what papers claim, tested on a model, with the evidence for each verdict."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from kvbench.errors import UsageError

EXAMPLES = """examples:
  python -m kvbench claims think limit=8 up_to=8
  python -m kvbench claims all limit=20 up_to=80
  python -m kvbench claims vatp limit=8 up_to=8 --format md
  python -m kvbench claims uncomp model=FOLDER data.root=FOLDER --json

Each claim compares two methods on the same examples (kvbench/papers/<paper>/claims.yaml). limit= examples a task are
measured at first (default 20), twice as many while a claim is undecided, up_to= at most (default 80). On model=tiny,
the default, tasks and budgets are those that `table` maps the paper's to; any other model reads the papers' own data,
LongBench's as longbench=mini or full says. What else you give goes to `run`. The ledger is also written to claims.json
below results=."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("paper", nargs="?", default="all", help="a paper, or all (default)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="model=, limit=, up_to=, results=, ...")
    parser.add_argument("--format", choices=("text", "md", "latex"), default="text", help="of the ledger")
    parser.add_argument("--json", action="store_true", help="print as JSON on stdout")


def main(args: argparse.Namespace) -> int:
    """Measure what the claims need and print the ledger."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if "=" in args.paper:
        args.paper, args.overrides = "all", [args.paper, *args.overrides]
    given = dict(o.partition("=")[::2] for o in args.overrides)
    model = given.pop("model", "tiny")
    limit, up_to = (_whole(key, given.pop(key, default)) for key, default in (("limit", "20"), ("up_to", "80")))
    if up_to < limit:
        raise UsageError(f"up_to={up_to} is not possible: at least limit={limit}")
    from kvbench import render
    from kvbench.papers import claims, ledger
    from kvbench.store_files import write_json

    papers, arguments = claims.find(args.paper), [f"{k}={v}" for k, v in given.items()]
    stand_in = ledger.stands_in(papers, model)
    verdicts = ledger.settle(papers, model, arguments, limit, up_to)
    dtype = ledger.dtype_of(model, arguments)
    plain = [ledger.plain(v) for v in verdicts]
    content = {"model": model, "dtype": dtype, "stand_in": stand_in, "verdicts": plain}
    write_json(Path(given.get("results", "results")) / "claims.json", content)
    if args.json:
        print(json.dumps(content, indent=1, ensure_ascii=False))
    else:
        lines = ledger.notes(verdicts, model, dtype, stand_in)
        print(render.compose([ledger.sheet(verdicts)], lines, args.format), end="")
    return 0


def _whole(key: str, value: str) -> int:
    if not value.isdigit() or int(value) < 1:
        raise UsageError(f"{key}={value} is not possible: a whole number, 1 or more")
    return int(value)
