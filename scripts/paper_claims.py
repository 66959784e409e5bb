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
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import committed
import shards
import verification
from paper_tables import PRETRAINED, Target, target
from paper_tables import restore as restore_tables
from verification import Verification

from kvbench.base.errors import UsageError
from kvbench.papers.claims import claim_runner, claims, ledger
from kvbench.papers.measured.plan import PaperTable
from kvbench.papers.spec import stand_ins
from kvbench.report import writers
from kvbench.run import experiment
from kvbench.store import archive
from kvbench.store.sample_reader import SampleReader
from kvbench.store.store import ResultStore

MEASURED_TWICE = (
    f"On {PRETRAINED}, verdicts did decide how long to measure: after a first round, the papers with undecided claims "
    "were measured on more prompts, until the time was up."
)
"""A note for readers: the level of the test does not hold for this ledger."""


def samples(goal: Target) -> Path:
    """Return the path of the samples behind the tiny model's ledger. ``committed`` has a pretrained model's samples."""
    return ledger.ledger_path(goal.model, goal.root, claims.papers_with_claims()).with_suffix(".samples.jsonl.gz")


def restore(goal: Target, store: ResultStore, temporary: bool = False) -> None:
    """Put the committed samples of a ledger into ``store`` if they are missing there.

    ``temporary`` is True for a store that is thrown away.
    """
    if goal.scored:
        for paper in claims.papers_with_claims():
            committed.restore(paper, store, goal.packs, temporary=temporary)
    elif samples(goal).exists():
        archive.unpack(samples(goal), store, temporary=temporary)


def pack(goal: Target, prepared: Mapping[str, Sequence[PaperTable]], store: ResultStore) -> None:
    """Write the measured samples of a ledger."""
    runs = {paper: [t.run for t in some if t.run is not None] for paper, some in prepared.items()}
    if goal.scored:
        for paper, planned in runs.items():
            committed.pack(paper, planned, store, goal.packs)
        return
    cells = {c.id for some in runs.values() for r in some for g in r.groups for c in g.cells if store.samples(c.id)}
    archive.pack(store, cells, samples(goal))


def decided(goal: Target, prepared: Mapping[str, Sequence[PaperTable]]) -> ledger.Ledger:
    """Return the ledger of the measured claims."""
    return json.loads(
        json.dumps(claim_runner.as_plain(prepared, goal.model, claim_runner.reach_verdicts(prepared, goal.model)))
    )


def page(root: Path) -> str:
    """Return all ledgers committed in ``root`` side by side, as Markdown."""
    written = ledger.read_ledgers(root)
    if not written:
        raise UsageError(f"{root / ledger.FOLDER} has no ledger: make claims writes one")
    lines = [note for one in written for note in (*ledger.write_notes(one), *ledger.list_reasons(one))]
    if any(one["model"] == PRETRAINED for one in written):
        lines.insert(0, MEASURED_TWICE)
    tallies = [f"{one['model']}, {tally}" for one in written for tally in ledger.tally_verdicts(one["verdicts"])]
    return writers.compose([ledger.compare_ledgers(written)], list(dict.fromkeys(lines)), "md", above=tallies)


def write(goal: Target, results: str) -> None:
    """Write a ledger, its samples, and the page of all ledgers."""
    prepared = claim_runner.prepare(claims.papers_with_claims(), goal.model, [f"results={results}", *goal.arguments])
    for tables in prepared.values():
        for rows in tables:
            if rows.run is not None:
                experiment.settle(rows.run)
    pack(goal, prepared, ResultStore(Path(results)))
    ledger.write_ledger(decided(goal, prepared), ledger.ledger_path(goal.model, goal.root, claims.papers_with_claims()))
    (goal.root / "claims.md").write_text(page(goal.root), encoding="utf-8")


def same(goal: Target) -> bool:
    """Tell whether its samples give a committed ledger. Raises MissingFiles if it cannot be made here."""
    with tempfile.TemporaryDirectory() as folder:
        store = ResultStore(Path(folder))
        restore(goal, store, temporary=True)
        prepared = claim_runner.prepare(claims.papers_with_claims(), goal.model, [f"results={folder}", *goal.arguments])
        runs = [rows.run for some in prepared.values() for rows in some if rows.run is not None]
        verification.check(SampleReader(store), runs, goal.model)
        path = ledger.ledger_path(goal.model, goal.root, claims.papers_with_claims())
        return bool(decided(goal, prepared) == json.loads(path.read_text(encoding="utf-8")))


def same_page(root: Path) -> bool:
    """Tell whether the ledgers give the page of all ledgers."""
    path = root / "claims.md"
    return path.exists() and page(root) == path.read_text(encoding="utf-8")


def verify(found: Verification, models: Sequence[str] = (), root: Path = shards.COMMITTED) -> None:
    """Add to ``found`` whether samples give each ledger committed in ``root``, and ledgers the page of all."""
    for model in models or (PRETRAINED, stand_ins.MODEL):
        path = ledger.ledger_path(model, root, claims.papers_with_claims())
        if path.exists():
            remedy = f"python scripts/paper_claims.py --model {model}"
            found.add(str(path.relative_to(root)), partial(same, target(model, root)), remedy)
    found.add("claims.md", partial(same_page, root), "make claims")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure or verify a ledger. Return the exit status."""
    args = shards.arguments(__doc__).parse_args(arguments)
    return shards.ended(lambda: _do(args))


def _do(args: argparse.Namespace) -> int:
    if args.verify:
        return verification.verified(
            lambda found: verify(found, [args.model] if args.model else [], args.committed), args.without
        )
    goal = target(args.model or stand_ins.MODEL, args.committed)
    restore(goal, ResultStore(Path(args.results)))
    if not args.pack:
        if not goal.scored:
            restore_tables(goal.tables(["all"]), goal, args.results)  # many rows of claims are also rows of tables
        shares = [
            (p, ((f"claims/{p}",), goal.model, args.results, goal.arguments)) for p in claims.papers_with_claims()
        ]
        rounds = shards.ROUNDS if goal.scored else (None,)
        shards.measure(shares, rounds, args.workers, lambda: write(goal, args.results))
    write(goal, args.results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
