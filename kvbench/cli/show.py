"""show: the table of what the store holds, or one cell with its first answers."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from textwrap import fill
from typing import Any

from kvbench.base.errors import UsageError
from kvbench.base.visible import one_line
from kvbench.cli.run import output_arguments, print_reports
from kvbench.plan import keys, words

LONGEST = 2000
"""The most characters of an answer that are printed."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("overrides", nargs="*", metavar="CELL | key=value", help="a cell's id, or a run's overrides")
    parser.add_argument("--samples", type=int, help="answers to show of a cell (default 3)")
    parser.add_argument("--results", help="folder of results, as results= (default results)")
    output_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Print what is stored; nothing is run."""
    cells, options = keys.divide(args.overrides)
    if args.results is not None:
        options["results"] = args.results
    if len(cells) > 1 or (cells and options.keys() - {"results"}):
        raise UsageError(f"show {' '.join(args.overrides)}: give one cell id, or key=value overrides, not both")
    if args.samples is not None and args.samples < 0:
        raise UsageError(f"--samples {args.samples} is not possible: a number of answers, 0 for none")
    if cells and args.format != "text":
        raise UsageError(f"--format {args.format} is of tables: show {cells[0]} prints text, or JSON with --json")
    if cells:
        return _show_cell(cells[0], Path(options.get("results", "results")), args)
    if args.samples is not None:
        raise UsageError("--samples shows answers of one cell: show CELL (ids: python -m kvbench list runs)")
    from kvbench.plan import config
    from kvbench.run import experiment

    runs = words.read([f"{key}={value}" for key, value in options.items()]).runs
    prepared = [experiment.prepare(config.parse(o), reading=True) for o in runs]
    if "results" in options:
        prepared[0].store.check_there()
    reports = [experiment.report(p) for p in prepared]
    if not args.json and all(cell.status == "missing" for r in reports for cell in r.cells):
        print(f"nothing of this is measured yet in {reports[0].results}; run it: python -m kvbench run ...")
        return 0
    return print_reports(reports, args)


def _show_cell(cell_id: str, results: Path, args: argparse.Namespace) -> int:
    from kvbench.report.render import size
    from kvbench.store.labels import fields, label
    from kvbench.store.store import ResultStore

    store = ResultStore(results.expanduser())
    damage = store.damage(store.find(cell_id))
    if damage is not None:
        raise UsageError(damage)
    record = store.cell(cell_id)
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
        "samples": samples[: 3 if args.samples is None else args.samples],
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
        if s.get("answers") is None:  # a text that was read, not answered
            continue
        print(_wrapped(f"  answer    {_cut(s['prediction'])}"))
        print(_wrapped(f"  reference {', '.join(map(_cut, s['answers']))}"))
    return 0


def _cut(text: str) -> str:
    """Return a text in quotes, of a long one its beginning and length."""
    return repr(text) if len(text) <= LONGEST else f"{text[:LONGEST]!r}... ({len(text):,} characters; --json has all)"


def _wrapped(text: str) -> str:
    """Return the text in lines of at most 100 columns."""
    return fill(text, 100, subsequent_indent="    ", break_on_hyphens=False)


def _plain(value: Any) -> str:
    """Return a fact in words, without the braces and quotes of JSON."""
    if isinstance(value, dict):
        return "(" + ", ".join(f"{k} {_plain(v)}" for k, v in value.items()) + ")"
    return str(value)
