"""Write the tables of cache formats with their samples, or re-render them from the samples alone.

python scripts/format_tables.py                measure what is missing, write results/tiny/formats.md and the others
python scripts/format_tables.py --stored       write what is measured so far
python scripts/format_tables.py --verify       fail if a committed table differs from what its samples give
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import shards
import verification
from verification import Verification

from kvbench.plan.run_plan import RunPlan
from kvbench.report import of_run, writers
from kvbench.run import experiment
from kvbench.store import archive
from kvbench.store.sample_reader import SampleReader
from kvbench.store.store import ResultStore
from kvbench.studies import format_table, own_tables

ROWS = Path(__file__).resolve().parent.parent / "results"
PRETRAINED = "smollm2-135m-q4_1"
QA = "longbench_mini/2wikimqa,longbench_mini/triviaqa"
TABLES = {
    "tiny/formats": "dataset=fidelity/tiny,tiny/needle limit=8",
    "tables/formats": f"dataset=fidelity/essays,needle,{QA} prompt=longbench max_length=2000 limit=10",
    "tiny/through_cache": "limit=16 length=256",
    "tables/through_cache": "limit=9",
}
"""What each table is measured on, by its name below results."""


def prepare(table: str, results: str) -> list[RunPlan]:
    """Return the runs behind a table, with their results in ``results``."""
    folder, _, name = table.partition("/")
    options = dict(word.split("=", 1) for word in TABLES[table].split()) | {"results": results}
    return own_tables.prepare(name, "tiny" if folder == "tiny" else PRETRAINED, options)


def rendered(runs: list[RunPlan], table: str) -> str:
    """Return the table as Markdown, with the command that makes it."""
    folder, _, name = table.partition("/")
    reports = [of_run.report_run(run) for run in runs]
    own = own_tables.read_own_table(name, runs, reports)
    model = "" if folder == "tiny" else f" model={PRETRAINED}"
    command = f"kvbench table {name}{model} {TABLES[table]}".strip()
    heading = f"# {format_table.TABLES[name]['title']}\n\n`{command}`\n\n"
    return heading + writers.compose(own.sheets, [*dict.fromkeys(r.settings for r in reports), *own.notes], "md")


def write(table: str, results: str, measure: bool) -> None:
    """Write the table and its samples from measured and committed results. ``measure`` completes them first."""
    runs = prepare(table, results)
    if (ROWS / f"{table}.samples.jsonl.gz").exists():
        archive.unpack(ROWS / f"{table}.samples.jsonl.gz", runs[0].store)
    for run in runs if measure else ():
        experiment.fill(run)
    store = runs[0].store
    cells = {c.id for run in runs for g in run.groups for c in g.cells if store.samples(c.id)}
    archive.pack(store, cells, ROWS / f"{table}.samples.jsonl.gz")
    (ROWS / f"{table}.md").write_text(rendered(runs, table), encoding="utf-8")
    print(ROWS / f"{table}.md")


def same(table: str) -> bool:
    """Tell whether the samples give the committed table. Raises MissingFiles if it cannot be made here."""
    with tempfile.TemporaryDirectory() as folder:
        archive.unpack(ROWS / f"{table}.samples.jsonl.gz", ResultStore(Path(folder)), temporary=True)
        runs = prepare(table, folder)
        verification.check(SampleReader(runs[0].store), runs, runs[0].cfg.model.name)
        return rendered(runs, table) == (ROWS / f"{table}.md").read_text(encoding="utf-8")


def verify(found: Verification, tables: Iterable[str] = TABLES) -> None:
    """Add to ``found`` whether the samples give each of the tables."""
    for table in tables:
        found.add(f"{table}.md", partial(same, table), f"python scripts/format_tables.py {table}")


def main() -> int:
    """Write or verify the named tables, or all. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", choices=[[], *TABLES], help="which (default: all)")
    verification.add_options(parser)
    parser.add_argument("--stored", action="store_true", help="measure nothing")
    parser.add_argument("--results", default="results", help="folder of measured cells")
    args = parser.parse_args()
    return shards.ended(partial(_carry_out, args))


def _carry_out(args: argparse.Namespace) -> int:
    """Do what the options say. Return the exit status."""
    if args.verify:
        return verification.verified(lambda found: verify(found, args.tables or TABLES), args.without)
    for table in args.tables or TABLES:
        write(table, args.results, measure=not args.stored)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
