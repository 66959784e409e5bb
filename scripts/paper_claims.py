"""The ledgers of what papers claim: measure and write them, or decide again from what was measured alone.

python scripts/paper_claims.py                             on tiny: measure what is missing, write results/claims
python scripts/paper_claims.py --model smollm2-135m-q4_1   on a pretrained model, with the papers' data
python scripts/paper_claims.py --pack                      write what is measured so far, measure nothing
python scripts/paper_claims.py --verify                    fail if a committed ledger differs from what its samples give
python scripts/paper_claims.py --nats [--pack]             the claims of NATS on the pretrained model, in nats, too

results/claims.md has all ledgers side by side, those of pretrained models first.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import shards
from paper_tables import PRETRAINED, ROWS, Target, restore, target

from kvbench.errors import UsageError
from kvbench.papers.claims import claim_runner, claims
from kvbench.papers.spec import stand_ins
from kvbench.run import archive, experiment
from kvbench.run.store import ResultStore
from kvbench.tables import writers

NATS = ("think", "vatp")
"""The papers whose claims are also tested by divergence from the full cache, on one prompt of each task."""


def ledgers(model: str) -> list[tuple[Target, tuple[str, ...]]]:
    """Return what is measured for each committed ledger of a model, and the papers whose claims are in it."""
    ledger = (target(model), claims.papers())
    nats = (replace(target(model), arguments=("fidelity=true", "limit=1")), NATS)
    return [ledger, nats] if model == PRETRAINED else [ledger]


def samples(goal: Target, papers: Sequence[str]) -> Path:
    """Return the path of the committed samples behind a ledger."""
    return claim_runner.place(goal.model, ROWS, papers).with_suffix(".samples.jsonl.gz")


def content(goal: Target, papers: Sequence[str], results: str, packed: Path | None = None) -> dict[str, Any]:
    """Return the ledger of what is measured in ``results``, and pack its samples into the file ``packed`` if given."""
    prepared = claim_runner.prepare(papers, goal.model, [f"results={results}", *goal.arguments])
    if packed is not None:
        runs = [row_run.run for rows in prepared.values() for row_run in rows if row_run.run is not None]
        for run in runs:
            experiment.settle(run)
        store = ResultStore(Path(results))
        archive.pack(store, {c.id for r in runs for g in r.groups for c in g.cells if store.samples(c.id)}, packed)
    return json.loads(json.dumps(claim_runner.plain(prepared, goal.model, claim_runner.settle(prepared, goal.model))))


def page() -> str:
    """Return all committed ledgers side by side, as Markdown."""
    written = claim_runner.read(ROWS)
    if not written:
        raise UsageError(f"{ROWS / claim_runner.FOLDER} has no ledger: make claims writes one")
    lines = [note for one in written for note in (*claim_runner.notes(one), *claim_runner.reasons(one))]
    return writers.compose([claim_runner.sheet(written)], list(dict.fromkeys(lines)), "md")


def write(goal: Target, papers: Sequence[str], results: str) -> None:
    """Write a ledger, its samples, and the page of all ledgers."""
    claim_runner.write(content(goal, papers, results, samples(goal, papers)), ROWS, papers)
    (ROWS / "claims.md").write_text(page(), encoding="utf-8")


def verified(goal: Target, papers: Sequence[str]) -> bool:
    """Tell whether a committed ledger is what its samples give.

    A model that is not here is reported and is no error, unless KVBENCH_REQUIRE_MODELS is 1.
    """
    path = claim_runner.place(goal.model, ROWS, papers)
    if not path.exists():
        return True
    try:
        with tempfile.TemporaryDirectory() as folder:
            archive.unpack(samples(goal, papers), ResultStore(Path(folder)))
            return bool(content(goal, papers, folder) == json.loads(path.read_text(encoding="utf-8")))
    except UsageError as error:
        if goal.model == stand_ins.MODEL or os.environ.get("KVBENCH_REQUIRE_MODELS") == "1":
            raise
        print(f"kvbench: claims on {goal.model} are not verified: {error}", file=sys.stderr)
        return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure or verify a ledger; return the exit status."""
    parser = shards.arguments(__doc__)
    parser.add_argument("--nats", action="store_true", help="the claims of NATS by divergence, too")
    args = parser.parse_args(arguments)
    return shards.ended(lambda: _do(args))


def _do(args: argparse.Namespace) -> int:
    if args.verify:
        models = [args.model] if args.model else [PRETRAINED, stand_ins.MODEL]
        wrong = [m for m in models if not all(verified(*ledger) for ledger in ledgers(m))]
        claims_page = ROWS / "claims.md"
        if not wrong and (not claims_page.exists() or page() != claims_page.read_text(encoding="utf-8")):
            wrong = [claims_page.name]
        if wrong:
            print(f"kvbench: {', '.join(wrong)}: the ledger differs from its samples; make claims", file=sys.stderr)
        return 1 if wrong else 0
    goal, papers = ledgers(PRETRAINED)[1] if args.nats else ledgers(args.model or stand_ins.MODEL)[0]
    if samples(goal, papers).exists():
        archive.unpack(samples(goal, papers), ResultStore(Path(args.results)))
    if not args.pack:
        if not args.nats:
            restore(goal.tables(["all"]), goal, args.results)  # many rows of claims are rows of tables
        shares = [(p, ((f"claims/{p}",), goal.model, args.results, goal.arguments)) for p in papers]
        rounds = (1,) if args.nats else shards.ROUNDS if goal.scored else (None,)
        shards.measure(shares, rounds, args.workers, lambda: write(goal, papers, args.results))
    write(goal, papers, args.results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
