"""Write the leaderboard of RULER on SmolLM2 with its samples and results.jsonl, or make it again from the samples.

python scripts/leaderboard.py                measure what is missing (--limit prompts a task), write the files
python scripts/leaderboard.py --length 2048  the same of prompts of that length, in a folder of its own
python scripts/leaderboard.py --stored       write what is measured so far
python scripts/leaderboard.py --verify       fail if committed files, of any length, differ from what the samples give
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import shards
import verification
from verification import Verification

from kvbench.plan.run_plan import RunPlan
from kvbench.report import of_run, open_results, writers
from kvbench.run import experiment
from kvbench.store import archive
from kvbench.store.store import ResultStore
from kvbench.studies import leaderboard

ROWS = Path(__file__).resolve().parent.parent / "results"
FOLDER = ROWS / "leaderboard"
BOARDS = {"1024": FOLDER, "2048": FOLDER / "2048"}
"""The folder of each committed leaderboard, by the length of its prompts in tokens."""
SAMPLES = "samples.jsonl.gz"
MODEL = "smollm2-135m-q4_1"
COMMITTED = {"limit": "8"}
"""The prompts a task that the committed leaderboard has at most; its tables say how many are measured."""


def rendered(runs: list[RunPlan], length: str) -> dict[str, str]:
    """Return the text of each file by name."""
    reports = [of_run.report_run(run) for run in runs]
    standings = leaderboard.standings(runs, reports)
    cells = [c for run in runs for g in run.groups for c in g.cells]
    records = [record for c in cells if (record := runs[0].store.cell(c.id)) is not None]
    commits = sorted({str(facts["commit"]) for record in records for facts in record.provenance})
    key = "" if length == leaderboard.DEFAULTS["lengths"] else f" lengths={length}"
    heading = f"# RULER, the question withheld\n\n`kvbench table leaderboard model={MODEL}{key}`\n\n"
    below = [*dict.fromkeys(r.settings for r in reports), *leaderboard.notes(standings)]
    # the page is made again on other machines, so it has the tasks' notes and no note on the machine
    below += dict.fromkeys(f"{group.task.note}." for group in runs[0].groups if group.task.note)
    below += reports[0].notes
    table = heading + writers.compose(leaderboard.sheets(standings), below, "md")
    lines = leaderboard.records(standings, MODEL, ", ".join(commits))
    return {"leaderboard.md": table, open_results.NAME: open_results.format_lines(lines)}


def write(runs: list[RunPlan], length: str) -> None:
    """Write the files and the samples of what is stored."""
    folder = BOARDS[length]
    folder.mkdir(exist_ok=True)
    cells = {c.id for run in runs for g in run.groups for c in g.cells if run.store.samples(c.id)}
    archive.pack(runs[0].store, cells, folder / SAMPLES)
    for name, text in rendered(runs, length).items():
        (folder / name).write_text(text, encoding="utf-8")
        print(folder / name)


def planned(measured: Mapping[str, object], results: str, length: str) -> list[RunPlan]:
    """Return the runs behind the files. Raises MissingData if they lack cells of ``measured``: texts are missing."""
    runs = leaderboard.prepare(MODEL, {**COMMITTED, "lengths": length, "results": results})
    if not measured.keys() <= {c.id for run in runs for g in run.groups for c in g.cells}:
        verification.check(runs[0].store, runs, MODEL)
    return runs


def same(length: str) -> bool:
    """Tell whether the samples give the committed files. Raises MissingFiles if they cannot be made here."""
    board = BOARDS[length]
    with tempfile.TemporaryDirectory() as folder:
        measured = archive.unpack(board / SAMPLES, ResultStore(Path(folder)))
        files = rendered(planned(measured, folder, length), length)
    return all((board / name).read_text(encoding="utf-8") == text for name, text in files.items())


def verify(found: Verification) -> None:
    """Add to ``found`` whether the samples give each of the leaderboards."""
    for length, board in BOARDS.items():
        if (board / SAMPLES).exists():
            remedy = f"python scripts/leaderboard.py --length {length}"
            found.add(str((board / "leaderboard.md").relative_to(ROWS)), partial(same, length), remedy)


def main() -> int:
    """Measure, write or verify; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verification.add_options(parser)
    parser.add_argument("--stored", action="store_true", help="measure nothing")
    parser.add_argument("--length", choices=BOARDS, default=leaderboard.DEFAULTS["lengths"], help="tokens of a prompt")
    parser.add_argument("--limit", default=COMMITTED["limit"], help="prompts a task to measure, now")
    parser.add_argument("--results", default="results", help="folder of measured cells")
    args = parser.parse_args()
    return shards.ended(partial(_carry_out, args))


def _carry_out(args: argparse.Namespace) -> int:
    """Do what the options say. Return the exit status."""
    if args.verify:
        return verification.verified(verify, args.without)
    # committed results are not measured again
    samples = BOARDS[args.length] / SAMPLES
    measured = archive.unpack(samples, ResultStore(Path(args.results))) if samples.exists() else {}
    runs = planned(measured, args.results, args.length)
    if not args.stored:
        options = {"limit": args.limit, "lengths": args.length, "results": args.results}
        for run in leaderboard.prepare(MODEL, options):
            experiment.fill(run)
    write(runs, args.length)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
