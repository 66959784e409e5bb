"""clean: remove leftovers of runs, and cells that the user names."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.base.errors import KvbenchError, UsageError
from kvbench.base.visible import say

if TYPE_CHECKING:
    from kvbench.store.store import ResultStore
    from kvbench.store.store_clean import Removal

WORDS = {
    "cell": "result{s}",
    "mark": "record{s} of runs that ended early",
    "temporary": "half-written file{s}",
    "lines": "block{s} of damaged lines or lines of other results (moved to a file beside their own)",
    "lock": "lock{s} that nobody holds",
    "aside": "damaged part{s} (moved to the folder damaged)",
}
"""The kinds of leftovers; {s} is the s of a plural."""
KEYS = ("results", "cells", "status", "model", "method", "dataset")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    filters = ", ".join(f"{key}=" for key in KEYS if key != "results")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help=f"results=FOLDER, and filters of results: {filters}"
    )
    parser.add_argument("--yes", action="store_true", help="delete (without --yes, clean only lists)")


def main(args: argparse.Namespace) -> int:
    """Print the files that can be removed. With --yes, remove them. Return exit status 0.

    Raises KvbenchError if a cell that the user names is being measured.
    """
    from kvbench.report.listing import list_cells, read_filters
    from kvbench.store.store import LINK, ResultStore
    from kvbench.store.store_clean import carry_out, list_leftovers, list_removals

    filters = read_filters(args.overrides, KEYS)
    store = ResultStore(Path(filters.pop("results", "results")).expanduser())
    if not store.root.is_dir():
        raise UsageError(
            f"results={store.root} is not a folder: name the folder with the results of your runs, as in results=FOLDER"
        )
    cells = [cell.id for cell in list_cells(store, filters)]
    busy = _find_busy(store, cells)
    # a cell that is named must go, or the user must know why not; others are left alone
    if busy and "cells" in filters:
        cell, shards = next(iter(busy.items()))
        raise KvbenchError(
            f"cells={cell}: shard {', '.join(map(str, shards))} of it is being measured now. Stop that run first"
        )
    # cells that the user names by id or status go as a whole; other cells lose only lines that do not count
    go_whole = "cells" in filters or "status" in filters
    removals = list_removals(store, cells, whole=go_whole)
    # half-removed folders belong to no cell, so that no filter chooses them
    if not filters:
        removals += list_leftovers(store)
    # a folder that is a link is left alone, and the user must know why it is not in the list
    for warning in store.warnings:
        if LINK in warning:
            say(warning)
    if args.yes:
        carry_out(store, removals)
    if args.json:
        _print_json(removals, busy, removed=args.yes)
    else:
        _print_text(removals, busy, folder=store.root / "cells", removed=args.yes)
    return 0


def _find_busy(store: ResultStore, cells: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the shards that are being measured now, by the id of their cell. Cells without any are left out."""
    busy: dict[str, tuple[int, ...]] = {}
    for cell in cells:
        shards = store.measuring(cell)
        if shards:
            busy[cell] = shards
    return busy


def _print_json(removals: Sequence[Removal], busy: Collection[str], removed: bool) -> None:
    """Print the removals and the ids of busy cells as JSON."""
    items = []
    for removal in removals:
        items.append({"kind": removal.kind, "cell": removal.cell, "path": str(removal.path), "about": removal.about})
    print(json.dumps({"removed": removed, "items": items, "busy": sorted(busy)}, indent=1, ensure_ascii=False))


def _print_text(removals: Sequence[Removal], busy: Collection[str], folder: Path, removed: bool) -> None:
    """Print a line for each removal and for each busy cell, and the number of removals of each kind.

    folder: the folder of all cells, to which paths are relative.
    """
    for removal in removals:
        # every cell has a lock: locks are counted, not listed
        if removal.kind == "lock":
            continue
        # users know a cell as a result
        kind = "result" if removal.kind == "cell" else removal.kind
        print(f"{kind:<10} {removal.path.relative_to(folder)}: {removal.about}")
    for cell in busy:
        print(f"left alone {cell}: it is being measured now")
    counts = Counter(removal.kind for removal in removals)
    totals = []
    for kind, n in counts.items():
        plural = "s" if n > 1 else ""
        totals.append(f"{n} {WORDS[kind].format(s=plural)}")
    total = ", ".join(totals) or "nothing"
    if removed:
        print(f"removed {total}")
    elif removals:
        them = "them" if len(removals) > 1 else "it"
        print(f"would remove {total}. Add --yes to remove {them}")
    else:
        print(f"would remove {total}")
