"""The papers' tables on a model: measure and write them, or re-render them from what was measured alone.

python scripts/paper_tables.py                          on tiny: measure what is missing, write results/tiny
python scripts/paper_tables.py --model smollm2-135m-q4_1  on a pretrained model, with the papers' data: results/tables
python scripts/paper_tables.py think/2                  one table, or all of a paper
python scripts/paper_tables.py --pack                   write what is measured so far, measure nothing
python scripts/paper_tables.py --verify                 fail if a committed table differs from what its samples give

Scores follow from the samples beside a table, a pretrained model's from those of its paper in results/samples;
efficiency tables from the rows in results/gpu, or else results/cpu. How much of each was measured stands in
counts.csv beside them. What is committed is put into --results first, so that measuring goes on from there.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import committed
import shards
import verification
from verification import Verification

from kvbench.papers.measured import coverage, page, plan
from kvbench.papers.measured.cells import read_cells
from kvbench.papers.measured.plan import PaperTable
from kvbench.papers.spec import stand_ins, table_spec, workloads
from kvbench.papers.spec.table_spec import TableSpec
from kvbench.papers.timed import timings
from kvbench.plan.inputs import Inputs
from kvbench.run import experiment
from kvbench.store import archive
from kvbench.store.sample_reader import SampleReader
from kvbench.store.store import ResultStore

PRETRAINED = "smollm2-135m-q4_1"
"""The pretrained model whose tables are committed in results/tables."""


@dataclass(frozen=True)
class Target:
    """A model's tables and the folder where they are committed.

    arguments: arguments of ``run`` beside those of each table.
    scored: only tables of scores are written, no tables of times or of facts. Their samples belong to a paper, not to a
    table (``committed``).
    """

    model: str
    folder: Path
    arguments: tuple[str, ...] = ()
    scored: bool = False

    @property
    def root(self) -> Path:
        """Return the folder of all committed files."""
        return self.folder.parent

    @property
    def packs(self) -> Path:
        """Return the folder of the papers' samples."""
        return self.root / committed.FOLDER

    def page(self, table: TableSpec) -> Path:
        return self.folder / f"{table.paper}-{table.table}.md"

    def samples(self, table: TableSpec) -> Path:
        return self.folder / f"{table.paper}-{table.table}.samples.jsonl.gz"

    def tables(self, wanted: Sequence[str]) -> list[TableSpec]:
        """Return the tables named in ``wanted`` that this target writes."""
        specs = {t.id: t for name in wanted for t in table_spec.find_tables(name)}.values()
        return [t for t in specs if t.measurable or not self.scored]


def target(model: str, root: Path) -> Target:
    """Return the target of one model: the stand-in's tables in ``root``/tiny, others' scores in ``root``/tables."""
    if model == stand_ins.MODEL:
        return Target(model, root / "tiny", ("limit=50",))
    return Target(model, root / "tables", ("kl=true",), scored=True)


def rendered(seen: PaperTable, goal: Target, reader: SampleReader) -> str:
    """Return the table as Markdown, with the command that makes it. ``reader`` reads the samples of its run."""
    table = seen.spec
    option = "" if goal.model == stand_ins.MODEL else f" --model {goal.model}"
    command = f"python scripts/paper_tables.py {table.id}{option}" if option else f"kvbench table {table.id}"
    limit = "" if table.kind == timings.KIND or option else " ".join(("", *goal.arguments))
    heading, _, body = page.render(seen, "md", intervals=True).partition("\n")
    page_text = f"{heading}\n\n`{command}{limit}`\n{body}"
    if goal.scored:
        page_text += cost(seen, reader)
    return page_text


def cost(ours: PaperTable, reader: SampleReader) -> str:
    """Return a line that says how long a table's answers took; '' if none was measured.

    The time to read a prompt counts once for all rows of the table.
    """
    if ours.run is None:
        return ""
    reads: dict[tuple[str, str, str], float] = {}
    rows = 0.0
    for group in ours.run.groups:
        for cell in group.cells:
            for sample in reader.read(cell.id).values():
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


def prepare(table: TableSpec, goal: Target, results: str, *more: str, inputs: Inputs | None = None) -> PaperTable:
    """Return the table's run with its results in ``results``. A timed table's results are the committed ones.

    inputs: the tokenizers and tasks that other tables have read.
    """
    if table.kind == timings.KIND:
        return plan.make_timed_table(timings.read_timings(table, "", goal.root))
    return shards.prepare(table, goal.model, results, *goal.arguments, *more, inputs=inputs)


def write(table: TableSpec, goal: Target, results: str, time_it: bool = True) -> None:
    """Write the table from its measured cells, and its samples. ``time_it`` measures a timed table first."""
    ours = prepare(table, goal, results)
    if ours.timings is not None and time_it:
        timings.measure_missing(ours.timings)
        ours = prepare(table, goal, results)
    elif ours.run is not None:
        experiment.settle(ours.run)
        if goal.scored:
            committed.pack(table.paper, [ours.run], ours.run.store, goal.packs)
        else:
            cells = {c.id for g in ours.run.groups for c in g.cells if ours.run.store.samples(c.id)}
            archive.pack(ours.run.store, cells, goal.samples(table))
    seen = read_cells(ours)
    goal.page(table).parent.mkdir(parents=True, exist_ok=True)
    goal.page(table).write_text(rendered(seen, goal, SampleReader(ResultStore(Path(results)))), encoding="utf-8")
    if _counted(table):
        coverage.write_counts(goal.folder, coverage.count_cells(seen))
    if goal.scored:
        coverage.write_numbers(goal.folder, table.id, coverage.list_numbers(seen))


def restore(tables: Sequence[TableSpec], goal: Target, results: str) -> None:
    """Put the committed samples into ``results`` if they are missing there."""
    store = ResultStore(Path(results))
    if goal.scored:
        for paper in dict.fromkeys(t.paper for t in tables):
            committed.restore(paper, store, goal.packs)
        return
    for table in tables:
        if goal.samples(table).exists():
            archive.unpack(goal.samples(table), store)


def measure(tables: Sequence[TableSpec], goal: Target, results: str, workers: int) -> None:
    """Measure the missing cells of all tables, and write the tables after each round."""
    names = tuple(table.id for table in tables if table.measurable)
    shares = [("tables", (names, goal.model, results, goal.arguments))]

    def write_scores() -> None:
        for table in tables:
            if table.kind != timings.KIND:
                write(table, goal, results)

    shards.measure(shares, shards.ROUNDS if goal.scored else (None,), workers, write_scores)
    for table in tables:
        if table.kind == timings.KIND:  # take times while nothing else runs
            write(table, goal, results)


def same(table: TableSpec, goal: Target, inputs: Inputs) -> bool:
    """Tell whether samples or timed rows give the committed table and its entry in counts.csv.

    inputs: the tokenizers and tasks that other tables have read.

    Raises MissingFiles if the table cannot be made here.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = ResultStore(Path(folder))
        if table.measurable and goal.scored:
            datasets = {c.dataset for c in table.scores}
            # a column's samples may be of the dataset that is read in place of its own
            datasets |= {workloads.INSTEAD[name][0] for name in datasets if name in workloads.INSTEAD}
            committed.restore(table.paper, store, goal.packs, datasets, temporary=True)
        elif table.measurable and goal.samples(table).exists():
            archive.unpack(goal.samples(table), store, temporary=True)
        ours = prepare(table, goal, folder, inputs=inputs)
        # a run has its results in the same folder
        reader = SampleReader(store)
        runs = []
        if ours.run is not None:
            runs.append(ours.run)
        verification.check(reader, runs, goal.model, inputs)
        seen = read_cells(ours, reader)
        page_text = goal.page(table).read_text(encoding="utf-8") if goal.page(table).exists() else ""
        if page_text != rendered(seen, goal, reader):
            # the page itself names the cells that were missing when it was written
            absent = (w.name for w, why in ours.absent.items() if why not in page_text)
            verification.need_texts(absent, goal.model, inputs)
            return False
        if _counted(table) and coverage.read_counts(goal.folder).get(table.id) != coverage.count_cells(seen):
            return False
        committed_numbers = [line for line in coverage.read_numbers(goal.folder) if line["table"] == table.id]
        return not goal.scored or committed_numbers == coverage.list_numbers(seen)


def verify(
    found: Verification, wanted: Sequence[str] = ("all",), models: Sequence[str] = (), root: Path = shards.COMMITTED
) -> None:
    """Add to ``found`` whether samples give the tables of each model committed in ``root``."""
    for model in models or (stand_ins.MODEL, PRETRAINED):
        goal = target(model, root)
        inputs = Inputs()
        for table in goal.tables(wanted):
            if goal.page(table).exists() or goal.model == stand_ins.MODEL:
                remedy = f"python scripts/paper_tables.py --model {goal.model}"
                found.add(str(goal.page(table).relative_to(root)), partial(same, table, goal, inputs), remedy)


def _counted(table: TableSpec) -> bool:
    return table.measurable or table.kind == timings.KIND


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure or verify the named tables, or all. Return the exit status."""
    parser = shards.arguments(__doc__)
    parser.add_argument("tables", nargs="*", default=["all"], help="paper/number, paper or all (default)")
    args = parser.parse_args(arguments)
    return shards.ended(lambda: _do(args))


def _do(args: argparse.Namespace) -> int:
    if args.verify:
        return verification.verified(
            lambda found: verify(found, args.tables, [args.model] if args.model else [], args.committed), args.without
        )
    goal = target(args.model or stand_ins.MODEL, args.committed)
    tables = goal.tables(args.tables)
    restore(tables, goal, args.results)
    if args.pack:
        for table in tables:
            write(table, goal, args.results, time_it=False)
    else:
        measure(tables, goal, args.results, args.workers)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
