"""show: the table of what the store holds, or one cell with its first answers."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from textwrap import fill
from typing import Any

from kvbench.cli.run import output_arguments, print_reports
from kvbench.errors import UsageError
from kvbench.run import words
from kvbench.visible import one_line


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("overrides", nargs="*", metavar="CELL | key=value", help="a cell's id, or a run's overrides")
    parser.add_argument("--samples", type=int, default=3, help="answers to show of a cell (default 3)")
    parser.add_argument("--results", default="results", help="folder of results, for a cell (default results)")
    output_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Print what is stored; nothing is run."""
    cells = [o for o in args.overrides if "=" not in o]
    folders = [o.partition("=")[2] for o in args.overrides if o.startswith("results=")]
    if cells and folders:
        args.results, args.overrides = folders[-1], cells
    if cells and len(args.overrides) > 1:
        raise UsageError(f"show {' '.join(args.overrides)}: give one cell id, or key=value overrides, not both")
    if cells:
        return _show_cell(cells[0], args)
    from kvbench.run import config, experiment

    runs = words.read(args.overrides).runs
    prepared = [experiment.prepare(config.parse(o), reading=True) for o in runs]
    reports = [experiment.report(p) for p in prepared]
    if not args.json and all(cell.status == "missing" for r in reports for cell in r.cells):
        print(f"nothing of this is measured yet in {reports[0].results}; run it: python -m kvbench run ...")
        return 0
    return print_reports(reports, args)


def _show_cell(cell_id: str, args: argparse.Namespace) -> int:
    from kvbench.run.labels import fields, label
    from kvbench.run.store import ResultStore
    from kvbench.tables.render import size

    store = ResultStore(Path(args.results))
    record = store.cell(store.find(cell_id))
    if record is None:
        raise UsageError(f"cell {cell_id} was never started; it lies in {store.root}/cells")
    samples = list(store.lines(cell_id).values())
    identity = record.identity
    settings = {"label": label(identity, record.label), "model": record.model, **fields(identity)}
    shown: dict[str, Any] = {
        **record.record(),
        **settings,
        "refused": store.refusal(cell_id),
        "metrics": store.metrics(cell_id) or None,
        "samples": samples[: args.samples],
    }
    if args.json:
        print(json.dumps(shown, indent=1, ensure_ascii=False))
        return 0
    metrics = shown["metrics"] or {}
    print(f"cell {cell_id}: {settings.pop('label')} on {record.column}")
    print(_wrapped(", ".join(f"{key} {_plain(value)}" for key, value in settings.items() if value not in (None, {}))))
    if shown["refused"]:
        print(f"refused: {shown['refused']}")
    if metrics.get("score") is not None:
        print(f"{metrics['metric']} {metrics['score']:.2f}, {metrics['n']} of {metrics['of']} examples")
    imported = record.kind == "imported"
    for facts in record.provenance:
        told = ", ".join(f"{key} {_plain(value)}" for key, value in facts.items())
        print(_wrapped(f"{'imported from' if imported else 'measured with'} {told}"))
    for s in shown["samples"]:
        held = "" if imported else f", {s['kept']:g} of {s['n']} tokens, {size(s['payload'])} payload"
        print(f"\n{one_line(s['id'])}: score {s['score']}{held}")
        print(_wrapped(f"  answer    {s['prediction']!r}"))
        print(_wrapped(f"  reference {', '.join(map(repr, s['answers']))}"))
    return 0


def _wrapped(text: str) -> str:
    """Return the text in lines of at most 100 columns."""
    return fill(text, 100, subsequent_indent="    ", break_on_hyphens=False)


def _plain(value: Any) -> str:
    """Return a fact in words, without the braces and quotes of JSON."""
    if isinstance(value, dict):
        return "(" + ", ".join(f"{k} {_plain(v)}" for k, v in value.items()) + ")"
    return str(value)
