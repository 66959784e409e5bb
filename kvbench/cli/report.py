"""report: everything on one HTML page that needs no network."""

from __future__ import annotations

import argparse
import html
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.errors import KvbenchError, UsageError

if TYPE_CHECKING:
    from kvbench.papers.forensics import Finding
    from kvbench.papers.report.tables import MeasuredTable, ReportPart

EXAMPLES = """examples:
  python -m kvbench report samples=1 output=report.html
  python -m kvbench report samples=0
  python -m kvbench report results=results method=full,snapkv,h2o kv_ratio=0.125 samples=2

Tables are those of `table`, from the samples committed in results/tiny (model=tiny) or results/tables (others), and
where there are none from the store; claims are what `claims` last wrote; figures are those of results/figures, of the
tiny model results/tiny/figures.
samples= examples of each task are shown with every method's answer and the tokens that it kept: by default of full,
streamingllm, h2o, snapkv and snapkv+think on the tiny suite; method=, dataset=, kv_ratio=, ... choose others, as in
`run`. They are measured where they are missing."""
METHODS = ("method=full,streamingllm,h2o,snapkv,snapkv+think", "kv_ratio=0.125")


def arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="output=, samples=, results=, and run's keys")


def main(args: argparse.Namespace) -> int:
    """Write the page and print its path."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if any("=" not in o for o in args.overrides):
        raise UsageError("report takes key=value only, as in output=report.html samples=1")
    given = dict(o.partition("=")[::2] for o in args.overrides)
    output = Path(given.pop("output", "report.html"))
    count = given.pop("samples", "1")
    if not count.isdigit():
        raise UsageError(f"samples={count} is not possible: a whole number, 0 for none")
    results, model = given.get("results", "results"), given.get("model", "tiny")
    text = _page(Path(results), model, int(count), [f"{k}={v}" for k, v in given.items()], "method" in given)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise KvbenchError(f"output={output} could not be written ({error.strerror})") from None
    print(f"{output} ({len(text.encode()) / 2**20:.1f} MiB)")
    return 0


def _page(results: Path, model: str, count: int, overrides: list[str], chosen: bool) -> str:
    from kvbench.papers.figures.figure import folder
    from kvbench.papers.forensics import audit
    from kvbench.papers.report import page, samples, tables
    from kvbench.papers.spec import stand_ins
    from kvbench.run import config, experiment
    from kvbench.run.words import rewrite

    written = [o for o in overrides if o.partition("=")[0] not in ("results", "longbench")]
    run = rewrite([*([] if chosen else METHODS), *written, f"results={results}", f"limit={max(1, count)}"]).runs[0]
    shown: list[dict[str, Any]] = []
    if count:
        shown = samples.collect(experiment.prepare(config.parse(config.compose_config(run))), count)
    own = [o for o in overrides if o.partition("=")[0] in ("data.root", "longbench")]
    parts = tables.parts(model, str(results), results / ("tiny" if model == stand_ins.MODEL else "tables"), own)
    found = audit()
    sections = [
        ("tables", "Tables", page.tables((p.paper, p.title, p.content) for p in parts)),
        ("figures", "Figures", page.figures(folder(results, model))),
        ("claims", "Claims", _claims(results)),
        ("audit", "Audit", _audit(found)),
        ("samples", "Examples", page.browser(len(shown))),
        ("runs", "Runs", _behind([p.measured for p in parts if p.measured]) + _runs(results)),
    ]
    return page.build("kvbench: five papers on KV-cache compression", sections, shown, _lead(model, parts, found))


def _lead(model: str, parts: Sequence[ReportPart], found: Sequence[Finding]) -> str:
    ours = sum("as printed" not in p.title for p in parts)
    stands = (
        ", a stand-in: compare orders with the papers', not values" if any("stand-in" in p.title for p in parts) else ""
    )
    return (
        f"{len(parts)} tables, {ours} of them with our numbers on {model}{stands}. In a cell ours comes first, the "
        f"paper's below it. {len(found)} findings about the papers' own numbers. Click a column's head to sort."
    )


def _claims(results: Path) -> str:
    from kvbench.papers.claims import claim_runner
    from kvbench.papers.report import page

    parts = []
    for content in claim_runner.read(results):
        body = [
            (
                v["id"],
                f"“{v['quote']}” ({v['paper']}, {v['where']})",
                f"{v['tested']}" + (f" Ran: {'; '.join(v['ran'])}." if v["ran"] else ""),
                v["verdict"],
                claim_runner.evidence(v),
                v["reason"],
            )
            for v in content["verdicts"]
        ]
        kinds = [f"verdict-{v['verdict'].split()[0]}" for v in content["verdicts"]]
        head = ("claim", "what the paper says", "what is tested", "verdict", "points", "why")
        title = f"{content['model']}{', a stand-in' if content['stand_in'] else ''}"
        said = "".join(f"<li>{html.escape(note)}</li>" for note in claim_runner.notes(content))
        parts.append(f"<h3>{html.escape(title)}</h3><ul>{said}</ul>" + page.rows(head, body, kinds))
    return "".join(parts) or "<p>None yet: python -m kvbench claims.</p>"


def _audit(found: Sequence[Finding]) -> str:
    from kvbench.papers.report import page

    head = ("table", "row", "cell", "printed", "recomputed", "weight", "why")
    return page.rows(
        head,
        [
            (
                f"{f.paper}/{f.table}",
                f.row,
                f.cell,
                "" if f.printed == f.row else f.printed,
                f.recomputed,
                f.weight,
                f.why,
            )
            for f in found
        ],
    )


def _behind(measured: Sequence[MeasuredTable]) -> str:
    """What the committed samples behind the tables were measured with."""
    from kvbench.papers.report import page, tables

    if not measured:
        return ""
    body = [(m.table, m.cells, m.answers, *(m.facts[k] for k in tables.FACTS)) for m in measured]
    return "<h3>Samples behind the tables</h3>" + page.rows(("table", "cells", "answers", *tables.FACTS), body)


def _runs(results: Path) -> str:
    """Every cell of the store with what it was measured with."""
    from kvbench.cli import runs
    from kvbench.papers.report import page
    from kvbench.run.labels import fields
    from kvbench.run.store import ResultStore

    store = ResultStore(results)
    kept, body = ("device", "torch", "transformers", "commit"), []
    for cell in runs.rows(store, {}):
        facts = cell.record.provenance[-1] if cell.record.provenance else {}
        method, dtype = f"{cell.label} {cell.differs}".strip(), fields(cell.record.identity)["dtype"]
        told = (facts.get(k) for k in kept)
        body.append((method, cell.record.column, cell.record.model, dtype, cell.status.n, *told, cell.id))
    head = ("method", "dataset", "model", "dtype", "n", *kept, "cell")
    title = f"<h3>Cells of the store: {len(body)}</h3>"
    return title + (page.rows(head, body) if body else "<p>None.</p>")
