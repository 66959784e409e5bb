"""export: measured cells in the open format, or in the form of another tool's results."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.base.errors import UsageError
from kvbench.base.visible import say
from kvbench.plan.keys import check_choice

if TYPE_CHECKING:
    from kvbench.report.export_kvpress import Run
    from kvbench.store.store import ResultStore

FORMATS = ("jsonl", "kvpress")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("form", metavar="FORMAT", help="jsonl, or kvpress (folders that kvpress's leaderboard reads)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="filters of results, and output=")


def main(args: argparse.Namespace) -> int:
    """Write the chosen cells and print the names of the files. Return exit status 0."""
    from kvbench.report.listing import FILTERS, read_filters
    from kvbench.store.store import ResultStore

    check_choice("format of export", FORMATS, args.form)
    keys = ["results", "output"]
    if args.form == "kvpress":
        keys.append("name")
    keys += FILTERS
    options = read_filters(args.overrides, keys)
    # the default folder may be missing, one that is named may not
    is_named = "results" in options
    store = ResultStore(Path(options.pop("results", "results")).expanduser())
    if is_named:
        store.check_there()
    if args.form == "kvpress":
        return _write_folders(store, options, as_json=args.json)
    return _write_lines(store, options, as_json=args.json)


def _write_lines(store: ResultStore, options: dict[str, str], as_json: bool) -> int:
    """Write a line of the open format for each cell that has a score; print the file's name. Return exit status 0.

    options: ``output`` and the filters of cells.
    """
    from kvbench.report import open_results

    path = Path(options.pop("output", open_results.NAME)).expanduser()
    if path.is_dir():
        raise UsageError(f"output={path} is a folder: name a file in it, as in output={path / open_results.NAME}")
    # the remaining options are filters
    lines = [line for line in open_results.list_lines(store, options) if line["score"] is not None]
    if not lines:
        message = _explain_nothing_chosen(store)
        if path.exists():
            message += f". {path} is left as it is"
        raise UsageError(message)
    count = open_results.write_lines(lines, path)
    if as_json:
        print(json.dumps({"file": str(path), "results": count}))
    else:
        print(f"{path} ({count} results)")
    return 0


def _explain_nothing_chosen(store: ResultStore) -> str:
    """Return the message for filters that choose no measured cell."""
    return f"{store.root} has no measured answers that fit the filters. `kvbench list runs` lists all results"


def _write_folders(store: ResultStore, options: dict[str, str], as_json: bool) -> int:
    """Write a folder for each model, method and length; print their names. Return exit status 0.

    options: ``output``, ``name`` and the filters of cells.
    """
    from kvbench.report import export_kvpress
    from kvbench.report.listing import list_cells

    root = Path(options.pop("output", "kvpress-results")).expanduser()
    if root.exists() and not root.is_dir():
        raise UsageError(f"output={root} is a file: name a folder, which is created if it is missing")
    # the name becomes a part of the folders' names
    name = options.pop("name", None)
    if name is not None and (name != Path(name).name or name == ".."):
        raise UsageError(f"name={name} is not possible: the name becomes part of folder names, so it must not have a /")
    runs, notes = export_kvpress.find_runs(store, list_cells(store, options), name)
    if not runs:
        raise UsageError("; ".join(notes) or _explain_nothing_chosen(store))
    # all names are checked before the first folder is written
    export_kvpress.check_names(runs, root)
    folders = [export_kvpress.write_run(run, root) for run in runs]
    for note in notes:
        say(note)
    if as_json:
        records = []
        for folder, run in zip(folders, runs, strict=True):
            records.append({"folder": str(folder), "tasks": list(run.tasks), "n": len(run.samples)})
        print(json.dumps({"folders": records}, indent=1, ensure_ascii=False))
    else:
        print("\n".join(map(str, folders)))
    _warn_of_parts(runs)
    return 0


def _warn_of_parts(runs: Sequence[Run]) -> None:
    """Say how many of the written runs hold only a part of their data set, or only some of RULER's tasks."""
    from kvbench.report import export_kvpress
    from kvbench.report.table import range_text

    partial_runs = [run for run in runs if run.fraction < 1]
    if partial_runs:
        say(
            f"folders with only a part of their data set: {len(partial_runs)} of {len(runs)}. kvpress's leaderboard "
            "leaves them out"
        )
    # RULER's score is the mean of all its tasks
    short_runs = [run for run in runs if run.is_ruler and len(run.tasks) < len(export_kvpress.RULER)]
    if short_runs:
        counts = range_text([len(run.tasks) for run in short_runs])
        say(
            f"folders with only {counts} of RULER's 13 tasks: {len(short_runs)} of {len(runs)}. Their means are no "
            "RULER scores"
        )
