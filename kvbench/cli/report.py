"""report: everything on one HTML page that needs no network, or as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.base.errors import KvbenchError, UsageError
from kvbench.plan.keys import choice, pairs, whole

if TYPE_CHECKING:
    from kvbench.papers.report.page import ReportPage

SAMPLES = whole("samples", 0, "1", "a whole number, 0 for none")
PAPERS = choice("papers", ("true", "false"))
METHODS = ("method=full,streamingllm,h2o,snapkv,snapkv+think", "kv_ratio=0.125")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="output=, samples=, also=, and run's keys")


def main(args: argparse.Namespace) -> int:
    """Write the page and print its path, or print what it shows."""
    options = pairs(args.overrides, "output=report.html samples=1")
    if args.json and "output" in options:
        raise UsageError(f"output={options['output']} is not possible with --json, which prints and writes no page")
    output = Path(options.pop("output", "report.html"))
    if output.is_dir():
        raise UsageError(f"output={output} is a folder: name a file in it, as in output={output / 'report.html'}")
    count = SAMPLES.value(options)
    papers = PAPERS.value(options) == "true"
    places = [Path(name) for name in options.get("also", "").split(",") if name]
    for key in ("samples", "papers", "also"):
        options.pop(key, None)
    report = _collect_page(options, count, papers, places)
    if args.json:
        print(json.dumps(report.as_json(), indent=1, ensure_ascii=False))
        return 0
    text = report.page()
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise KvbenchError(f"output={output} could not be written ({error.strerror})") from None
    print(f"{output} ({len(text.encode()) / 2**20:.1f} MiB)")
    return 0


def _collect_page(options: dict[str, str], count: int, papers: bool, places: Sequence[Path]) -> ReportPage:
    from kvbench.papers.claims import claim_runner
    from kvbench.papers.figures.figure import folder, own_folder
    from kvbench.papers.forensics import audit
    from kvbench.papers.report import page, samples, tables
    from kvbench.papers.spec import stand_ins
    from kvbench.plan import config, words
    from kvbench.report import open_results
    from kvbench.run import experiment
    from kvbench.store.store import ResultStore

    results, model = Path(options.get("results", "results")), options.get("model", "tiny")
    arguments = [f"{k}={v}" for k, v in options.items() if k not in ("results", "longbench")]
    limit = () if "limit" in options else (f"limit={max(1, count)}",)
    methods = () if "method" in options else METHODS
    run = words.read([*methods, *arguments, f"results={results}", *limit]).runs[0]
    answers: list[dict[str, Any]] = []
    if count:
        answers = samples.collect(experiment.prepare(config.parse(run)), count)
    table_arguments = [f"{k}={options[k]}" for k in ("data.root", "longbench") if k in options]
    runs = open_results.records(ResultStore(results))
    for place in places:
        runs += [{**line, "from": str(place)} for line in open_results.read(place)]
    committed = results / ("tiny" if model == stand_ins.MODEL else "tables")
    return page.ReportPage(
        model,
        tables.parts(model, str(results), committed, table_arguments) if papers else [],
        page.figures_of(folder(results, model)) if papers else [],
        claim_runner.read(results) if papers else [],
        audit() if papers else [],
        answers,
        runs,
        page.figures_of(own_folder(results, model)),
        papers,
    )
