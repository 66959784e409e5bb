"""The papers' tables on a model: measure and write them, or re-render them from what was measured alone.

python scripts/paper_tables.py                          on tiny: measure what is missing, write results/tiny
python scripts/paper_tables.py --model smollm2-135m-q4_1  on a pretrained model, with the papers' data: results/tables
python scripts/paper_tables.py think/2                  one table, or all of a paper
python scripts/paper_tables.py --pack                   write what is measured so far, measure nothing
python scripts/paper_tables.py --verify                 fail if a committed table differs from what its samples give

Scores follow from the samples beside a table, efficiency tables from the rows in results/gpu, or else results/cpu. How
much of each was measured stands in counts.csv beside them. What is committed is put into --results first, so that
measuring goes on from there.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import shards

from kvbench.errors import UsageError
from kvbench.papers.measured import coverage, our_table, page
from kvbench.papers.measured.cell_view import View, view
from kvbench.papers.measured.our_table import OurTable
from kvbench.papers.spec import stand_ins, table_spec
from kvbench.papers.spec.table_spec import TableSpec
from kvbench.papers.timed import timings
from kvbench.run import archive, experiment
from kvbench.run.store import ResultStore

ROWS = Path(__file__).resolve().parent.parent / "results"
PRETRAINED = "smollm2-135m-q4_1"
"""The pretrained model whose tables are committed in results/tables."""


@dataclass(frozen=True)
class Target:
    """A model's tables: where they are committed, and what is said to ``run`` beside the table's own.

    ``scored``: tables of scores alone are written, not those of times and of facts.
    """

    model: str
    folder: Path
    arguments: tuple[str, ...] = ()
    scored: bool = False

    def page(self, table: TableSpec) -> Path:
        return self.folder / f"{table.paper}-{table.table}.md"

    def samples(self, table: TableSpec) -> Path:
        return self.folder / f"{table.paper}-{table.table}.samples.jsonl.gz"

    def tables(self, wanted: Sequence[str]) -> list[TableSpec]:
        """Those of ``wanted`` that this target writes."""
        found = {t.id: t for name in wanted for t in table_spec.find(name)}.values()
        return [t for t in found if t.measurable or not self.scored]


def target(model: str) -> Target:
    """The tables of one model."""
    if model == stand_ins.MODEL:
        return Target(model, ROWS / "tiny", ("limit=50",))
    return Target(model, ROWS / "tables", scored=True)


def rendered(seen: View, of: Target) -> str:
    """The table as Markdown, with the command that makes it."""
    table = seen.ours.declared
    model = "" if of.model == stand_ins.MODEL else f" --model {of.model}"
    made = f"python scripts/paper_tables.py {table.id}{model}" if model else f"python -m kvbench table {table.id}"
    limit = "" if table.kind == timings.KIND or model else " ".join(("", *of.arguments))
    head, _, rest = page.render(seen, "md").partition("\n")
    return f"{head}\n\n`{made}{limit}`\n{rest}{cost(seen.ours) if of.scored else ''}"


def cost(ours: OurTable) -> str:
    """A line that says how long a table's answers took; a prompt's reading counts once for all of its rows."""
    if ours.run is None:
        return ""
    reads, rows = {}, 0.0
    for group in ours.run.groups:
        for cell in group.cells:
            for sample in ours.run.store.samples(cell.id).values():
                timing = sample.timing
                reads[group.task.id, group.cells[0].identity["content"], sample.id] = timing.prefill_s
                rows += timing.compress_s + timing.decode_s
    read = sum(reads.values())
    if not reads:
        return ""
    return (
        f"- Took {(read + rows) / 60:.1f} min of one core: {read / 60:.1f} min to read {len(reads)} prompts, once for "
        f"all rows, and {rows / 60:.1f} min to compress and answer.\n"
    )


def prepare(table: TableSpec, of: Target, results: str, *more: str) -> OurTable:
    """The table's run with its results in ``results``; what was timed is in a folder of its own, which is committed."""
    if table.kind == timings.KIND:
        return our_table.timed(timings.read(table, "", ROWS))
    return shards.prepare(table, of.model, results, *of.arguments, *more)


def write(table: TableSpec, of: Target, results: str, time_it: bool = True) -> None:
    """Write the table from what is measured of it, and its samples; what is timed is measured here, alone."""
    ours = prepare(table, of, results)
    if ours.timings is not None and time_it:
        timings.measure(ours.timings)
        ours = prepare(table, of, results)
    elif ours.run is not None:
        experiment.settle(ours.run)
        cells = {c.id for g in ours.run.groups for c in g.cells if ours.run.store.samples(c.id)}
        archive.pack(ours.run.store, cells, of.samples(table))
    seen = view(ours)
    of.page(table).parent.mkdir(parents=True, exist_ok=True)
    of.page(table).write_text(rendered(seen, of), encoding="utf-8")
    if _counted(table):
        coverage.write(of.folder, coverage.count(seen))


def restore(tables: Sequence[TableSpec], of: Target, results: str) -> None:
    """Put the committed samples into ``results`` where they are missing there."""
    for table in tables:
        if of.samples(table).exists():
            archive.unpack(of.samples(table), ResultStore(Path(results)))


def measure(tables: Sequence[TableSpec], of: Target, results: str, workers: int) -> None:
    """Measure what is missing of all tables, a paper at a time, and write them after each round."""
    papers = [(paper, list(some)) for paper, some in groupby(tables, key=lambda t: t.paper)]
    given = [(p, (tuple(t.id for t in some if t.measurable), of.model, results, of.arguments)) for p, some in papers]

    def write_scores() -> None:
        for table in tables:
            if table.kind != timings.KIND:
                write(table, of, results)

    shards.measure(given, shards.ROUNDS if of.scored else (None,), workers, write_scores)
    for table in tables:
        if table.kind == timings.KIND:  # what is timed waits until nothing else runs
            write(table, of, results)


def verify(table: TableSpec, of: Target) -> bool:
    """Whether the committed table, and what is counted of it, is what its samples or rows give."""
    with tempfile.TemporaryDirectory() as folder:
        if table.measurable and of.samples(table).exists():
            archive.unpack(of.samples(table), ResultStore(Path(folder)))
        seen = view(prepare(table, of, folder))
        same = of.page(table).exists() and rendered(seen, of) == of.page(table).read_text(encoding="utf-8")
        return same and (not _counted(table) or coverage.read(of.folder).get(table.id) == coverage.count(seen))


def verified(wanted: Sequence[str], models: Sequence[str]) -> int:
    """Verify the committed tables of each model; one that is not here is told, and no error."""
    wrong = []
    for of in map(target, models):
        try:
            for table in of.tables(wanted):
                if of.page(table).exists() or of.model == stand_ins.MODEL:
                    wrong += [] if verify(table, of) else [of.page(table).name]
        except UsageError as error:
            if of.model == stand_ins.MODEL or os.environ.get("KVBENCH_REQUIRE_MODELS") == "1":
                raise
            print(f"kvbench: tables of {of.model} are not verified: {error}", file=sys.stderr)
    if wrong:
        print(f"kvbench: {', '.join(wrong)} differ from their samples; make tables", file=sys.stderr)
    return 1 if wrong else 0


def _counted(table: TableSpec) -> bool:
    return table.measurable or table.kind == timings.KIND


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure or verify the tables named, all by default."""
    parser = shards.arguments(__doc__)
    parser.add_argument("tables", nargs="*", default=["all"], help="paper/number, paper or all (default)")
    args = parser.parse_args(arguments)
    return shards.ended(lambda: _do(args))


def _do(args: argparse.Namespace) -> int:
    if args.verify:
        return verified(args.tables, [args.model] if args.model else [stand_ins.MODEL, PRETRAINED])
    of = target(args.model or stand_ins.MODEL)
    tables = of.tables(args.tables)
    restore(tables, of, args.results)
    if args.pack:
        for table in tables:
            write(table, of, args.results, time_it=False)
    else:
        measure(tables, of, args.results, args.workers)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
