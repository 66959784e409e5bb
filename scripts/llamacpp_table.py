"""Write the table of kvbench's formats beside llama.cpp's own caches, with its samples, or make it again from these.

python scripts/llamacpp_table.py            measure what is missing (needs the extra llamacpp), write the table
python scripts/llamacpp_table.py --stored   write what is measured so far
python scripts/llamacpp_table.py --verify   fail if the committed table differs from what its samples give

Both read the same windows of WikiText-2 through the cache, and count the same tokens. kvbench's rows are compared with
its full cache, llama.cpp's with its own f16 cache.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import shards
import verification
from verification import Verification

from kvbench.base.formatting import format_number, format_significant, with_interval
from kvbench.engines import divergence, llamacpp
from kvbench.engines.llamacpp import CacheType
from kvbench.engines.rows import EngineRow, EngineRun
from kvbench.methods.core.resolve import resolve
from kvbench.models.fetch import gguf_file, packages_by_name
from kvbench.plan import config, run_plan
from kvbench.plan.run_plan import RunPlan
from kvbench.report import writers
from kvbench.report.table import Table
from kvbench.run import experiment
from kvbench.store import archive
from kvbench.store.fidelity import TextFidelity, log_ratio_of_means, summarise_texts
from kvbench.store.sample_reader import SampleReader
from kvbench.store.store import ResultStore

ROWS = Path(__file__).resolve().parent.parent / "results"
NAME = "tables/llamacpp"
MODEL = "smollm2-135m-q4_1"
WINDOWS = 24
LENGTH = 512
REFERENCE = "reference"
F16 = llamacpp.EXACT
FLOOR = CacheType(k="bf16", v="bf16")
"""A cache of llama.cpp that is nearly exact: what it diverges by, its products of 8 bits make of any small change."""


@dataclass(frozen=True, kw_only=True)
class FormatPair:
    """One format as kvbench stores it and as llama.cpp does."""

    name: str
    method: Mapping[str, object]
    cache_type: CacheType


def pairs() -> list[FormatPair]:
    """Return the formats that both have: keys and values coded, or one of the two, rotated or not."""
    found = []
    for name in ("q8_0", "q4_0"):
        for rotation, rotate in (("off", "none"), ("on", "hadamard")):
            for coded in ("both", "keys", "values"):
                if name == "q8_0" and coded != "both":
                    continue
                method: dict[str, object] = {"method": name, "rotate": rotate}
                if coded != "both":
                    method["only"] = coded
                cache_type = CacheType(
                    k=F16 if coded == "values" else name, v=F16 if coded == "keys" else name, rotation=rotation
                )
                label = name
                if coded != "both":
                    label += f", {coded} only"
                if rotation == "on":
                    label += ", rotated"
                found.append(FormatPair(name=label, method=method, cache_type=cache_type))
    return found


def prepare(results: str) -> tuple[RunPlan, EngineRun]:
    """Return kvbench's run and llama.cpp's rows on the same windows."""
    cfg = config.configure(
        {
            "model": MODEL,
            "dataset": "fidelity/wikitext2",
            "kl_mode": "through_cache",
            "length": LENGTH,
            "limit": WINDOWS,
            "method": "full",
            "results": results,
        }
    )
    package = packages_by_name()[MODEL]
    digest = package.sha256[package.gguf][: llamacpp.DIGITS]
    rows = [_row(digest, pair.cache_type) for pair in pairs()] + [_row(digest, FLOOR)]
    plan = run_plan.prepare(cfg)
    chains = tuple(resolve([dict(pair.method) for pair in pairs()]))
    return run_plan.prepare(replace(cfg, chains=chains)), EngineRun(plan=plan, rows=tuple(rows))


def _row(digest: str, cache_type: CacheType) -> EngineRow:
    """Return llama.cpp's row with a type of cache."""

    def start() -> llamacpp.LlamaCpp:
        return llamacpp.LlamaCpp(gguf_file(MODEL), cache_type, LENGTH, 1, every_logit=True)

    return EngineRow(label=cache_type.label, identity=llamacpp.build_identity(digest, cache_type), open=start)


def measure(own: RunPlan, theirs: EngineRun) -> None:
    """Measure what both rows lack."""
    experiment.fill(own)
    digest = str(theirs.rows[0].identity["gguf"])
    divergence.measure(theirs, _row(digest, CacheType(k=F16, v=F16)))


def rendered(own: RunPlan, theirs: EngineRun) -> str:
    """Return the table as Markdown, with what it says."""
    (group,) = own.groups
    (engine_group,) = theirs.plan.groups
    chains = {cell.chain: cell for cell in group.cells}
    table_rows = []
    windows = tokens = 0
    # the last row is the floor, which kvbench has no format for
    for pair, row in zip(pairs(), theirs.rows[:-1], strict=True):
        (template,) = resolve([dict(pair.method)])
        samples = own.samples(group, chains[template.chain])
        ours = {i: s.fidelity[REFERENCE] for i, s in samples.items() if s.fidelity is not None}
        lines = theirs.plan.store.lines(theirs.make_cell(engine_group, row).id)
        other = {i: TextFidelity.read(line["fidelity"][REFERENCE]) for i, line in lines.items()}
        shared = sorted(ours.keys() & other.keys())
        if not shared:
            continue
        table_rows.append(_cells(pair.name, [ours[i] for i in shared], [other[i] for i in shared]))
        windows = len(shared)
        tokens = sum(len(other[i].kl) for i in shared)
    heads = (
        "format",
        "KL, kvbench",
        "KL, llama.cpp",
        "ln of\ntheir ratio",
        "same choice %, kvbench",
        "same choice %, llama.cpp",
    )
    heading = "# kvbench's formats beside llama.cpp's own\n\n`python scripts/llamacpp_table.py`\n\n"
    notes = _notes(windows, tokens)
    floor_lines = theirs.plan.store.lines(theirs.make_cell(engine_group, theirs.rows[-1]).id).values()
    floor = summarise_texts([TextFidelity.read(line["fidelity"][REFERENCE]) for line in floor_lines])
    if floor is not None:
        # the second reason needs the first
        notes.insert(
            2,
            f"Why they differ, 1: llama.cpp's own bf16 cache already diverges from its f16 cache by "
            f"{format_significant(floor.kl_mean)} (same choice {format_number(floor.top1)} %): activations are rounded "
            "to 8 bits before each product with a weight, so that a change in the last places moves some of them by a "
            "whole step. Its rows of 8 bits show mostly this.",
        )
    return heading + writers.compose([Table(heads, tuple(table_rows))], notes, "md")


def _cells(name: str, ours: Sequence[TextFidelity], theirs: Sequence[TextFidelity]) -> tuple[str, ...]:
    """Return a row of the table from both comparisons of the same windows."""
    summaries = [summarise_texts(texts) for texts in (ours, theirs)]
    divergences, choices = [], []
    for summary in summaries:
        assert summary is not None, "a pair has windows"
        divergences.append(with_interval(summary.kl_mean, summary.ci, 3, significant=True, gap=" "))
        choices.append(format_number(summary.top1))
    point, ci = log_ratio_of_means(theirs, ours)
    return (name, *divergences, with_interval(point, ci, 2, sign=True, gap=" "), *choices)


def _notes(windows: int, tokens: int) -> list[str]:
    return [
        f"KL: mean divergence of the next-token distribution from each program's own 16- or 32-bit cache, in nats a "
        f"token, over the second half of {windows} windows of {LENGTH} tokens of WikiText-2 ({tokens:,} tokens). "
        "[95 % intervals over articles.] ln of their ratio: llama.cpp's over kvbench's, on the same windows.",
        f"{MODEL}: llama.cpp reads the GGUF (weights of 4 bits, activations of 8 bits in each product, f16 cache as "
        "the reference); kvbench reads the same weights as float32, and its reference is a float32 cache.",
        "Why they differ, 2: llama.cpp multiplies coded keys with a query that it rounds to 8 bits in blocks of 32 "
        "channels, kvbench with the query itself. Without rotation some channels of a query are far larger than the "
        "others of their block. This would explain why unrotated keys differ most and rotated ones little; it was not "
        "measured apart.",
    ]


def write(results: str, is_measuring: bool) -> None:
    """Write the table and its samples from measured and committed results."""
    own, theirs = prepare(results)
    samples = ROWS / f"{NAME}.samples.jsonl.gz"
    if samples.exists():
        archive.unpack(samples, own.store)
    if is_measuring:
        measure(own, theirs)
    cells = [cell.id for group in own.groups for cell in group.cells]
    cells += [theirs.make_cell(group, row).id for group in theirs.plan.groups for row in theirs.rows]
    archive.pack(own.store, [cell for cell in cells if own.store.lines(cell)], samples)
    (ROWS / f"{NAME}.md").write_text(rendered(own, theirs), encoding="utf-8")
    print(ROWS / f"{NAME}.md")


def same() -> bool:
    """Tell whether the samples give the committed table. Raises MissingFiles if it cannot be made here."""
    with tempfile.TemporaryDirectory() as folder:
        store = ResultStore(Path(folder))
        archive.unpack(ROWS / f"{NAME}.samples.jsonl.gz", store, temporary=True)
        own, theirs = prepare(folder)
        verification.check(SampleReader(own.store), [own], MODEL)
        return rendered(own, theirs) == (ROWS / f"{NAME}.md").read_text(encoding="utf-8")


def verify(found: Verification) -> None:
    """Add to ``found`` whether the samples give the table."""
    if (ROWS / f"{NAME}.md").exists():
        found.add(f"{NAME}.md", partial(same), "python scripts/llamacpp_table.py")


def main() -> int:
    """Write or verify the table. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verification.add_options(parser)
    parser.add_argument("--stored", action="store_true", help="measure nothing")
    parser.add_argument("--results", default="results", help="folder of measured cells")
    args = parser.parse_args()
    return shards.ended(partial(_carry_out, args))


def _carry_out(args: argparse.Namespace) -> int:
    """Do what the options say. Return the exit status."""
    if args.verify:
        return verification.verified(verify, args.without)
    write(args.results, is_measuring=not args.stored)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
