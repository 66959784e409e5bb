"""The papers' tables on the tiny model: measure and write them, or re-render them from their samples alone.

python scripts/paper_tables.py                measure what is missing, write results/tables/<paper>-<n>.md and samples
python scripts/paper_tables.py think/2        one table, or all of a paper
python scripts/paper_tables.py --verify       fail if a committed table differs from what its samples give
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from kvbench import archive, experiment
from kvbench.errors import KvbenchError
from kvbench.papers import declared, measured, page
from kvbench.papers.declared import Declared
from kvbench.papers.measured import Ours
from kvbench.papers.view import view
from kvbench.store import ResultStore

FOLDER = Path(__file__).resolve().parent.parent / "results" / "tables"
EXAMPLES = {"think": 20}
FEWER = 10
"""Examples a task: measured so far on two busy cores; raise them and run again, what is there is kept."""


def examples(table: Declared) -> int:
    """How many examples of each task a table has."""
    return EXAMPLES.get(table.paper, FEWER)


def rendered(ours: Ours) -> str:
    """The table as Markdown, with the command that makes it."""
    command = f"`python -m kvbench table {ours.declared.id} limit={examples(ours.declared)}`"
    head, _, rest = page.render(view(ours), "md").partition("\n")
    return f"{head}\n\n{command}\n{rest}"


def prepare(table: Declared, results: str) -> Ours:
    """The table's run with its results in ``results``."""
    return measured.prepare(table, "tiny", [f"results={results}", f"limit={examples(table)}"])


def measure(table: Declared, results: str) -> None:
    """Measure what is missing and write the table, and its samples."""
    ours = prepare(table, results)
    if ours.run is not None:
        experiment.measure(ours.run)
        cells = [c.id for g in ours.run.groups for c in g.cells]
        archive.pack(ours.run.store, cells, _samples(table))
    _page(table).write_text(rendered(ours), encoding="utf-8")


def verify(table: Declared) -> bool:
    """Whether the committed table is what its samples give."""
    with tempfile.TemporaryDirectory() as folder:
        if table.measurable:
            archive.unpack(_samples(table), ResultStore(Path(folder)))
        return _page(table).exists() and rendered(prepare(table, folder)) == _page(table).read_text(encoding="utf-8")


def _page(table: Declared) -> Path:
    return FOLDER / f"{table.paper}-{table.table}.md"


def _samples(table: Declared) -> Path:
    return FOLDER / f"{table.paper}-{table.table}.samples.jsonl.gz"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure or verify the tables named, all by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", default=["all"], help="paper/number, paper or all (default)")
    parser.add_argument("--verify", action="store_true", help="re-render from samples and compare")
    parser.add_argument("--results", default="results", help="folder of measured cells")
    args = parser.parse_args(arguments)
    wrong = []
    start = time.monotonic()
    try:
        tables = {t.id: t for name in args.tables for t in declared.find(name)}
        for table in tables.values():
            if not args.verify:
                measure(table, args.results)
                print(f"{_page(table)}  ({time.monotonic() - start:.0f} s so far)", flush=True)
            elif not verify(table):
                wrong.append(table.id)
    except KvbenchError as error:
        print(f"kvbench: {error}", file=sys.stderr)
        return error.status
    if wrong:
        print(f"kvbench: {', '.join(wrong)} differ from their samples; make tables", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
