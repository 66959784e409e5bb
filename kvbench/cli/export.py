"""export: measured cells in the open format, or in the form of another tool's results."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.base.errors import UsageError, say
from kvbench.plan.keys import one_of

if TYPE_CHECKING:
    from kvbench.store.store import ResultStore

FORMATS = ("jsonl", "kvpress")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("form", metavar="FORMAT", help="jsonl, or kvpress: the folders that its leaderboard reads")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="which cells, and where to")


def main(args: argparse.Namespace) -> int:
    """Write what is chosen and print where."""
    from kvbench.report.listing import FILTERS, given
    from kvbench.store.store import ResultStore

    one_of("format of export", FORMATS, args.form)
    own = ("name",) if args.form == "kvpress" else ()
    options = given(args.overrides, ("results", "output", *own, *FILTERS))
    named = "results" in options
    store = ResultStore(Path(options.pop("results", "results")).expanduser())
    if named:
        store.check_there()
    if args.form == "kvpress":
        return _folders(store, options, as_json=args.json)
    from kvbench.report import open_results

    path = Path(options.pop("output", open_results.NAME)).expanduser()
    if path.is_dir():
        raise UsageError(f"output={path} is a folder: name a file in it, as in output={path / open_results.NAME}")
    lines = [line for line in open_results.records(store, options) if line["score"] is not None]
    if not lines:
        raise UsageError(_nothing(store) + (f"; {path} is left as it is" if path.exists() else ""))
    count = open_results.write(lines, path)
    print(json.dumps({"file": str(path), "results": count}) if args.json else f"{path} ({count} results)")
    return 0


def _nothing(store: ResultStore) -> str:
    return f"{store.root} holds no measured answers that are chosen here (python -m kvbench list runs)"


def _folders(store: ResultStore, options: dict[str, str], as_json: bool) -> int:
    """Write a folder for each model, method and length; print their names."""
    from kvbench.report import export_kvpress
    from kvbench.report.listing import rows

    root = Path(options.pop("output", "kvpress-results")).expanduser()
    if root.exists() and not root.is_dir():
        raise UsageError(f"output={root} is a file: name a folder, which is made")
    name = options.pop("name", None)
    if name is not None and (name != Path(name).name or name == ".."):
        raise UsageError(f"name={name} is not possible: what the data set is called in the folders' names, without /")
    runs, notes = export_kvpress.runs(store, rows(store, options), name)
    if not runs:
        raise UsageError("; ".join(notes) or _nothing(store))
    export_kvpress.check_names(runs, root)
    folders = [export_kvpress.write(run, root) for run in runs]
    for note in notes:
        say(note)
    if as_json:
        listed = [
            {"folder": str(f), "tasks": [*run.tasks], "n": len(run.samples)}
            for f, run in zip(folders, runs, strict=True)
        ]
        print(json.dumps({"folders": listed}, indent=1, ensure_ascii=False))
    else:
        print("\n".join(map(str, folders)))
    partial = [run for run in runs if run.fraction < 1]
    short = [run for run in runs if run.is_ruler and len(run.tasks) < len(export_kvpress.RULER)]
    if partial:
        say(f"{len(partial)} folders hold a part of their data set, which kvpress's leaderboard leaves out")
    if short:
        say(f"{len(short)} folders hold {len(short[0].tasks)} of RULER's 13 tasks: their mean is no RULER score")
    return 0
