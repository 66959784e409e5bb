"""The ledgers of what papers claim: measure and write them, or decide again from what was measured alone.

python scripts/paper_claims.py                             on tiny: measure what is missing, write results/claims
python scripts/paper_claims.py --model smollm2-135m-q4_1   on a pretrained model, with the papers' data
python scripts/paper_claims.py --pack                      write what is measured so far, measure nothing
python scripts/paper_claims.py --verify                    fail if a committed ledger differs from what its samples give

results/claims.md has all ledgers side by side, those of pretrained models first.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
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


def samples(of: Target) -> Path:
    """The committed samples behind a model's ledger."""
    return ROWS / claim_runner.FOLDER / f"{of.model}.samples.jsonl.gz"


def content(of: Target, results: str, packed: Path | None = None) -> dict[str, Any]:
    """The ledger of what ``results`` has; its samples are packed if asked for."""
    prepared = claim_runner.prepare(claims.papers(), of.model, [f"results={results}", *of.arguments])
    if packed is not None:
        runs = [ours.run for some in prepared.values() for ours in some if ours.run is not None]
        for run in runs:
            experiment.settle(run)
        store = ResultStore(Path(results))
        archive.pack(store, {c.id for r in runs for g in r.groups for c in g.cells if store.samples(c.id)}, packed)
    return json.loads(json.dumps(claim_runner.plain(prepared, of.model, claim_runner.settle(prepared, of.model))))


def page() -> str:
    """All committed ledgers side by side, as Markdown."""
    ledgers = claim_runner.read(ROWS)
    if not ledgers:
        raise UsageError(f"{ROWS / claim_runner.FOLDER} has no ledger: make claims writes one")
    lines = [note for one in ledgers for note in (*claim_runner.notes(one), *claim_runner.reasons(one))]
    return writers.compose([claim_runner.sheet(ledgers)], list(dict.fromkeys(lines)), "md")


def write(of: Target, results: str) -> None:
    """Write a model's ledger, its samples and the page of all."""
    claim_runner.write(content(of, results, samples(of)), ROWS, claims.papers())
    (ROWS / "claims.md").write_text(page(), encoding="utf-8")


def verified(of: Target) -> bool:
    """Tell whether a committed ledger is what its samples give; a missing model is told, and no error."""
    path = claim_runner.place(of.model, ROWS, claims.papers())
    if not path.exists():
        return True
    try:
        with tempfile.TemporaryDirectory() as folder:
            archive.unpack(samples(of), ResultStore(Path(folder)))
            return bool(content(of, folder) == json.loads(path.read_text(encoding="utf-8")))
    except UsageError as error:
        if of.model == stand_ins.MODEL or os.environ.get("KVBENCH_REQUIRE_MODELS") == "1":
            raise
        print(f"kvbench: claims on {of.model} are not verified: {error}", file=sys.stderr)
        return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure or verify a ledger."""
    args = shards.arguments(__doc__).parse_args(arguments)
    return shards.ended(lambda: _do(args))


def _do(args: argparse.Namespace) -> int:
    if args.verify:
        models = [args.model] if args.model else [PRETRAINED, stand_ins.MODEL]
        wrong = [m for m in models if not verified(target(m))]
        made = ROWS / "claims.md"
        if not wrong and (not made.exists() or page() != made.read_text(encoding="utf-8")):
            wrong = [made.name]
        if wrong:
            print(f"kvbench: {', '.join(wrong)}: the ledger differs from its samples; make claims", file=sys.stderr)
        return 1 if wrong else 0
    of = target(args.model or stand_ins.MODEL)
    if samples(of).exists():
        archive.unpack(samples(of), ResultStore(Path(args.results)))
    if not args.pack:
        restore(of.tables(["all"]), of, args.results)  # many rows of claims are rows of tables
        given = [(p, ((f"claims/{p}",), of.model, args.results, of.arguments)) for p in claims.papers()]
        rounds = shards.ROUNDS if of.scored else (None,)
        shards.measure(given, rounds, args.workers, lambda: write(of, args.results))
    write(of, args.results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
