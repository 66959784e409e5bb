"""clean: remove what runs left behind, and cells that are named."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from kvbench.base.errors import KvbenchError, UsageError, say

WORDS = {
    "cell": "cell{s}",
    "mark": "mark{s} of runs that ended early",
    "temporary": "half-written file{s}",
    "lines": "block{s} of lines that do not count (kept in a file beside)",
    "lock": "lock{s} that nobody holds",
    "aside": "damaged part{s} (kept in the folder damaged)",
}
KEYS = ("results", "cells", "status", "model", "method", "dataset")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    chosen = ", ".join(f"{k}=" for k in KEYS[1:])
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=f"results=FOLDER, and which cells: {chosen}")
    parser.add_argument("--yes", action="store_true", help="remove; without it only show")


def main(args: argparse.Namespace) -> int:
    """Show what can go, and with --yes remove it."""
    from kvbench.report.listing import given, rows
    from kvbench.store.store import LINK, ResultStore
    from kvbench.store.store_clean import carry_out, leftovers, plan

    filters = given(args.overrides, KEYS)
    store = ResultStore(Path(filters.pop("results", "results")).expanduser())
    if not store.root.is_dir():
        raise UsageError(f"results={store.root} is not a folder: give results=FOLDER that runs were made in")
    all_samples = "cells" in filters or "status" in filters
    cells = [cell.id for cell in rows(store, filters)]
    busy = {cell: shards for cell in cells if (shards := store.measuring(cell))}
    if busy and "cells" in filters:
        cell, shards = next(iter(busy.items()))
        raise KvbenchError(
            f"cells={cell}: shard {', '.join(map(str, shards))} of it is being measured now; stop that run first"
        )
    removals = [*plan(store, cells, all_samples), *(leftovers(store) if not filters else ())]
    for warning in filter(lambda w: LINK in w, store.warnings):
        say(warning)
    if args.yes:
        carry_out(store, removals)
    if args.json:
        shown = [{"kind": r.kind, "cell": r.cell, "path": str(r.path), "about": r.about} for r in removals]
        print(json.dumps({"removed": args.yes, "items": shown, "busy": sorted(busy)}, indent=1, ensure_ascii=False))
        return 0
    for removal in removals:
        if removal.kind != "lock":
            print(f"{removal.kind:<10} {removal.path.relative_to(store.root / 'cells')}: {removal.about}")
    for cell in busy:
        print(f"left alone {cell}: it is being measured now")
    counts = Counter(r.kind for r in removals)
    total = ", ".join(f"{n} {WORDS[kind].format(s='s' * (n > 1))}" for kind, n in counts.items()) or "nothing"
    print(
        f"{'removed' if args.yes else 'would remove'} {total}" + ("" if args.yes or not removals else "; --yes does it")
    )
    return 0
