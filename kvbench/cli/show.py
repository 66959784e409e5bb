"""show: the table of stored results, or one cell with its first answers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from kvbench.base.errors import UsageError
from kvbench.base.formatting import format_number, format_size
from kvbench.base.visible import one_line
from kvbench.cli.run import add_report_options, print_reports
from kvbench.plan import keys, words

if TYPE_CHECKING:
    from kvbench.report.report import Report
    from kvbench.store.results import CellRecord

LONGEST = 2000
"""The most characters of an answer that are printed."""
DEFAULT_SAMPLES = 3


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("overrides", nargs="*", metavar="ID | key=value", help="the id of a result, or keys of run")
    parser.add_argument("--samples", type=int, help="number of a result's answers to print (default 3)")
    parser.add_argument("--results", help="folder of results, the same as the key results= (default results)")
    add_report_options(parser)


def main(args: argparse.Namespace) -> int:
    """Print stored results. Nothing is run. Return the exit status."""
    cell_ids, options = keys.divide(args.overrides)
    if args.results is not None:
        options["results"] = args.results
    if len(cell_ids) > 1 or (cell_ids and options.keys() - {"results"}):
        raise UsageError(f"show {' '.join(args.overrides)}: give either the id of one result, or key=value")
    if args.samples is not None and args.samples < 0:
        raise UsageError(f"--samples {args.samples} is not possible: give a number of answers, 0 or more")
    if cell_ids:
        (cell_id,) = cell_ids
        if args.format != "text":
            raise UsageError(
                f"--format {args.format} is for tables: kvbench show {cell_id} prints text, or JSON with --json"
            )
        return _show_cell(cell_id, Path(options.get("results", "results")), args)
    if args.samples is not None:
        raise UsageError(
            "--samples needs the id of one result, as in: kvbench show ID --samples 5 (kvbench list runs prints ids)"
        )
    if not options.keys() - {"results"}:
        return _show_folder(options, args)
    return _show_runs(options, args)


def _show_folder(options: Mapping[str, str], args: argparse.Namespace) -> int:
    """Print the tables of all results that the folder ``results`` holds. Return the exit status."""
    from kvbench.report import of_store
    from kvbench.store.store import ResultStore

    store = ResultStore(Path(options.get("results", "results")).expanduser())
    if "results" in options:
        store.check_there()
    reports = of_store.collect_reports(store)
    if not reports and not args.json:
        command = " ".join(["kvbench run", *(f"{key}={text}" for key, text in options.items())])
        print(f"nothing measured yet in {store.root}. Measure the default run:\n{command}")
        return 0
    return print_reports(reports, args)


def _show_runs(options: dict[str, str], args: argparse.Namespace) -> int:
    """Print the tables of stored results of the runs that ``options`` name, by key. Return the exit status."""
    from kvbench.plan import config

    requests = words.request_runs(options)
    for request in requests:
        config.check_request(request)
    # these import PyTorch, which takes seconds
    from kvbench.plan import run_plan
    from kvbench.report import of_run

    plans = [run_plan.prepare(config.parse(request), reading=True) for request in requests]
    # all models of a command share one folder of results
    if "results" in options:
        plans[0].store.check_there()
    reports = [of_run.report_run(plan) for plan in plans]
    # a table of nothing but dashes would say less
    if not args.json and all(_is_unmeasured(report) for report in reports):
        words_typed = " ".join(f"{key}={text}" for key, text in options.items())
        print(f"nothing measured yet for {words_typed}. Measure it:\nkvbench run {words_typed}")
        return 0
    return print_reports(reports, args)


def _is_unmeasured(report: Report) -> bool:
    """Return True if the report has no result, and no refused or failed one either."""
    return all(cell.status == "missing" for cell in report.cells)


def _show_cell(cell_id: str, results: Path, args: argparse.Namespace) -> int:
    """Print one stored cell with its first answers. Return exit status 0."""
    from kvbench.store.labels import label_cell, list_settings
    from kvbench.store.store import ResultStore

    store = ResultStore(results.expanduser())
    damage = store.damage(store.find(cell_id))
    if damage is not None:
        raise UsageError(damage)
    record = store.cell(cell_id)
    if record is None:
        raise UsageError(f"nothing was measured yet for result {cell_id}, whose folder is in {store.root}/cells")
    identity = record.identity
    label = label_cell(identity, record.label)
    settings: dict[str, object] = {"model": record.model}
    settings |= list_settings(identity)
    refusal = store.refusal(cell_id)
    metrics = store.metrics(cell_id)
    # 0 is a number of answers, too: only None asks for the default
    count = DEFAULT_SAMPLES if args.samples is None else args.samples
    samples = list(store.lines(cell_id).values())[:count]
    if args.json:
        # later keys of one name replace earlier ones, in their place
        content = record.record()
        content |= {"label": label}
        content |= settings
        content |= {"refused": refusal, "metrics": metrics or None, "samples": samples}
        print(json.dumps(content, indent=1, ensure_ascii=False))
        return 0
    print(f"result {cell_id}: {label} on {record.column}")
    _print_facts(record, label, settings, refusal, metrics)
    # only cells that kvbench itself measured have no kind
    is_foreign = record.kind is not None
    for sample in samples:
        _print_sample(sample, is_foreign)
    return 0


def _print_facts(
    record: CellRecord, label: str, settings: Mapping[str, object], refusal: str | None, metrics: Mapping[str, Any]
) -> None:
    """Print a cell's settings, why it was refused, its score and its origin.

    label: the cell's label, whose budgets are explained.
    settings: the cell's settings by name; None or {} for one that it does not have.
    refusal: why the cell was refused; None if it was not.
    metrics: the cell's score and numbers of examples; {} without a score.
    """
    from kvbench.store.labels import explain_budgets

    cell_settings: dict[str, object] = {}
    for key, value in settings.items():
        # users know knobs as options
        name = "options" if key == "knobs" else key
        if value not in (None, {}):
            cell_settings[name] = value
    print(_wrap_text(_list_facts(cell_settings)))
    for note in explain_budgets([label]):
        print(_wrap_text(note))
    if refusal:
        print(f"refused: {refusal}")
    if metrics.get("score") is not None:
        score = format_number(metrics["score"], 2)
        print(f"{metrics['metric']} {score}, {metrics['n']} of {metrics['of']} examples")
    # a cell that several runs measured has a provenance of each
    origin = "imported from" if record.kind == "imported" else "measured with"
    for provenance in record.provenance:
        print(_wrap_text(f"{origin} {_list_facts(provenance)}"))


def _print_sample(sample: Mapping[str, Any], is_foreign: bool) -> None:
    """Print an example's score, the size of its cache, and its answer above the references.

    is_foreign: whether another program or an engine answered, so that nothing is known of the cache.
    """
    line = f"{one_line(sample['id'])}: score {sample['score']}"
    if not is_foreign:
        line += f", {sample['kept']:g} of {sample['n']} tokens, {format_size(sample['payload'])} payload"
    print(f"\n{line}")
    if sample.get("answers") is None:  # a text that was read, not answered
        return
    # several answers may have been drawn for one prompt
    for answer in sample.get("draws", ()):
        numbers = f"score {answer['score']}, {answer['new_tokens']} tokens"
        print(_wrap_text(f"  answer    ({numbers}) {_abbreviate(answer['prediction'])}"))
    if "draws" not in sample:
        print(_wrap_text(f"  answer    {_abbreviate(sample['prediction'])}"))
    print(_wrap_text(f"  reference {', '.join(map(_abbreviate, sample['answers']))}"))


def _abbreviate(text: str) -> str:
    """Return a text in quotes; a text of more than LONGEST characters as its beginning and its length."""
    if len(text) <= LONGEST:
        return repr(text)
    return f"{text[:LONGEST]!r}... ({len(text):,} characters; --json has all)"


def _wrap_text(text: str) -> str:
    """Return the text in lines of at most 100 columns."""
    return fill(text, 100, subsequent_indent="    ", break_on_hyphens=False)


def _list_facts(facts: Mapping[str, object]) -> str:
    """Return facts by key as text, without the braces and quotes of JSON; facts about a fact stand in parentheses."""
    texts = []
    for key, value in facts.items():
        text = f"({_list_facts(value)})" if isinstance(value, dict) else str(value)
        texts.append(f"{key} {text}")
    return ", ".join(texts)
