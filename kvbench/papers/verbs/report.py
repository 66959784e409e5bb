"""report: everything on one HTML page that needs no network, or as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.base.errors import KvbenchError, UsageError
from kvbench.base.formatting import format_size
from kvbench.plan.keys import choice, parse_pairs, whole

if TYPE_CHECKING:
    from kvbench.papers.report.page import ReportPage

SAMPLES = whole("samples", least=0, default="0", allowed="a whole number, 0 for none")
"""The key for the number of examples of each task that the page shows."""
PAPERS = choice("papers", ("true", "false"))
"""The key that says whether the page shows the papers' tables, figures and claims."""
METHODS = {"method": "full,streamingllm,h2o,snapkv,snapkv+think", "kv_ratio": 0.125}
"""The settings of the run whose answers the page shows, if the user names no method."""
PAGE_KEYS = ("results", "model", "longbench", "data.root")
"""The keys of a run and of the papers' tables that have a meaning for a page without examples, too."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="output=, samples=, also=, and keys of run")


def main(args: argparse.Namespace) -> int:
    """Write the page and print its path, or print its content as JSON. Return exit status 0.

    Raises UsageError for a wrong argument, and KvbenchError if the page cannot be written.
    """
    options = parse_pairs(args.overrides, "output=report.html samples=1")
    asks_for_examples = "samples" in options
    if args.json and "output" in options:
        raise UsageError(
            f"output={options['output']} is not possible with --json, which prints the report and writes no page"
        )
    output = Path(options.pop("output", "report.html"))
    if output.is_dir():
        raise UsageError(f"output={output} is a folder: name a file in it, as in output={output / 'report.html'}")
    count = SAMPLES.value(options)
    papers = None
    if "papers" in options:
        papers = PAPERS.value(options) == "true"
    other_results = [Path(name) for name in options.get("also", "").split(",") if name]
    # the remaining keys are those of a run
    for key in ("samples", "papers", "also"):
        options.pop(key, None)
    for key, text in options.items():
        if not asks_for_examples and key not in PAGE_KEYS:
            raise UsageError(
                f"{key}={text} chooses the run whose examples the page shows: add samples=1, which measures missing "
                f"answers, or leave {key}= out"
            )
    report = _collect_page(options, count, papers, other_results)
    if args.json:
        print(json.dumps(report.as_json(), indent=1, ensure_ascii=False))
        return 0
    text = report.page()
    # the page took minutes: a folder that is missing is made, not asked for
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise KvbenchError(f"output={output} could not be written ({error.strerror})") from None
    print(f"{output} ({format_size(len(text.encode()))})")
    return 0


def _collect_page(
    options: dict[str, str], count: int, papers: bool | None, other_results: Sequence[Path]
) -> ReportPage:
    from kvbench.papers.figures import registry
    from kvbench.papers.figures.figure import own_folder
    from kvbench.papers.report import cards, page, samples
    from kvbench.plan import config, run_plan, words
    from kvbench.report import open_results
    from kvbench.store.store import ResultStore

    results = Path(options.get("results", "results"))
    model = options.get("model", "tiny")
    # parsed even if no answers are shown, so that a wrong key is an error in any case
    request = words.request(_choose_run_settings(options, results, count))
    store = ResultStore(results.expanduser())
    answers = []
    if count:
        answers = samples.collect_samples(run_plan.prepare(config.parse(request)), count)
    elif "results" in options:
        store.check_there()
    runs = open_results.list_lines(store)
    for place in other_results:
        for line in open_results.read_lines(place):
            # a column of the table of runs
            line["from"] = str(place)
            runs.append(line)
    if papers is None:
        papers = not runs
    report = page.ReportPage(
        model=model,
        tables=[],
        figures=[],
        claims=[],
        audit=[],
        samples=answers,
        runs=runs,
        own_figures=page.read_pictures(registry.read_drawn(own_folder(results, model))),
        papers=papers,
        verdicts=cards.collect_verdicts(store),
    )
    if not papers:
        return report
    return _add_papers(report, options, results)


def _add_papers(report: ReportPage, options: Mapping[str, str], results: Path) -> ReportPage:
    from kvbench.papers.claims import ledger
    from kvbench.papers.figures import registry
    from kvbench.papers.figures.figure import figure_folder
    from kvbench.papers.forensics import audit
    from kvbench.papers.report import page, tables
    from kvbench.papers.spec import stand_ins

    model = report.model
    # samples of the stand-in model and those of pretrained models are committed to a folder each
    committed_samples = results / "tiny" if model == stand_ins.MODEL else results / "tables"
    table_words = [f"{key}={options[key]}" for key in ("data.root", "longbench") if key in options]
    parts = tables.build_tables(model, str(results), committed_samples, table_words)
    return replace(
        report,
        tables=parts,
        figures=page.read_pictures(registry.read_drawn(figure_folder(results, model))),
        claims=ledger.read_with_own(results),
        audit=audit(),
        paper_cells=tables.list_cells(parts, model, str(results), table_words),
    )


def _choose_run_settings(options: Mapping[str, str], results: Path, count: int) -> dict[str, object]:
    settings: dict[str, object] = {}
    if "method" not in options:
        settings |= METHODS
    # longbench= is a key of papers' tables, not of runs
    settings |= {key: text for key, text in options.items() if key not in ("results", "longbench")}
    settings["results"] = results
    if "limit" not in options:
        settings["limit"] = max(1, count)
    return settings
