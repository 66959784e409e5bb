"""MiniLongBench on a pretrained model for the rows of all papers' tables, with the distance from the full cache.

python scripts/measure_longbench.py               measure what is missing, round by round; hours, and it can be resumed
python scripts/measure_longbench.py --paper vatp  the tables of one paper; processes with other papers may run beside it
python scripts/measure_longbench.py --pack        write what is measured so far, measure nothing

All examples are measured: 8 of each task first, then 16, then the rest. Prompts that several papers cut and ask alike
are read once for the rows of all. The samples are written to results/longbench after each task. They are what the
papers' tables, claims and the findings will rest on.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import shards

from kvbench.run import archive, experiment
from kvbench.run.experiment import RunPlan
from kvbench.run.plan import Group
from kvbench.run.store import ResultStore

PACKED = Path(__file__).resolve().parent.parent / "results" / "longbench"
MODEL = "smollm2-135m-q4_1"
DATASET = "longbench_mini"
TABLES = {
    "vatp": ("1", "2"),
    "think": ("1", "2", "3", "4", "5", "7", "8", "9"),
    "refreekv": ("1", "2", "4", "5", "8", "9", "11", "12"),
    "uncomp": ("1", "2", "4", "6", "7", "8", "9"),  # last, as a calibration of half an hour comes before it
}
ROUNDS = (8, 16, None)
"""Examples of each task in each round; None: all."""


def runs(papers: Sequence[str], results: str, calibrate: bool) -> Iterator[RunPlan]:
    """Yield the runs of some papers' tables, a paper after the other; those that read the same prompts are joined."""
    for paper in papers:
        names = tuple(f"{paper}/{number}" for number in TABLES[paper])
        shard = names, MODEL, results, ("fidelity=true",)
        if calibrate:
            shards.calibrate_shard(shard, 0, 1)
        for run in shards.joined(shard, 0, 1):
            groups = tuple(g for g in run.groups if g.task.id.startswith(DATASET))
            if groups:
                yield replace(run, groups=groups)


def pack(run: RunPlan, group: Group) -> None:
    """Write the samples of a group to its file in results/longbench."""
    PACKED.mkdir(parents=True, exist_ok=True)
    cells = {c.id for c in group.cells if run.store.lines(c.id)}
    name = f"{run.cfg.prompt.name}-{group.task.id.partition('/')[2]}"
    if cells:
        archive.pack(run.store, cells, PACKED / f"{name}.samples.jsonl.gz")


def main() -> int:
    """Measure or pack; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", default="results", help="folder of measured cells")
    parser.add_argument("--paper", action="append", choices=TABLES, help="one paper's tables; may be given again")
    parser.add_argument("--pack", action="store_true", help="write what is measured so far, measure nothing")
    args = parser.parse_args()
    for path in sorted(PACKED.glob("*.samples.jsonl.gz")):
        archive.unpack(path, ResultStore(Path(args.results)))
    start = time.monotonic()
    for most in ROUNDS:
        for run in runs(args.paper or list(TABLES), args.results, calibrate=not args.pack):
            for group in sorted(run.groups, key=lambda g: g.task.examples[0].max_new_tokens):
                if not args.pack:
                    examples = group.examples if most is None else tuple(group.task.taken(most))
                    experiment.fill(replace(run, groups=(replace(group, examples=examples),)), quiet=True)
                pack(run, group)
                seconds = time.monotonic() - start
                print(f"{run.cfg.prompt.name} {group.column}, {most or 'all'}: {seconds:.0f} s", flush=True)
        if args.pack:
            break
    return 0


if __name__ == "__main__":
    raise SystemExit(shards.ended(main))
