"""Results in an open format: a JSON object a line, which any program can write and `report` reads from any folder.

A line is the mean score of one method on one task. It has at least the keys of REQUIRED; docs/import.md names those
that say more, and others are kept as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvbench.base.errors import UsageError
from kvbench.base.files import disk_error
from kvbench.report import listing
from kvbench.store.fidelity import KINDS
from kvbench.store.labels import fields
from kvbench.store.store import ResultStore

NAME = "results.jsonl"
REQUIRED: Mapping[str, type | tuple[type, ...]] = {
    "model": str,
    "method": str,
    "dataset": str,
    "score": (int, float),
    "n": int,
}
"""What each line has: model, method with its budget and knobs, task, mean score and its number of examples."""

DISTANCES = ("kl_mean", "ci", "top1", "ppl_ratio", "floor", "at_floor")


def records(store: ResultStore, filters: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Return the cells of a store that pass ``filters`` as lines of the open format; a score may be missing (None)."""
    lines = []
    for cell in listing.rows(store, filters or {}):
        means = store.metrics(cell.id) if cell.summary is not None else {}
        settings, identity = fields(cell.record.identity), cell.record.identity
        facts = cell.record.provenance[-1] if cell.record.provenance else {}
        protocol = {"query_aware": settings["query_aware"], "prompt": settings["prompt"]}
        close = {kind: means.get("fidelity", {}).get(kind) for kind in KINDS}
        lines.append(
            {
                "model": cell.record.model,
                "method": f"{cell.label} {cell.differs}".strip(),
                "dataset": cell.record.column,
                **{"metric": means.get("metric"), "score": means.get("score"), "interval": means.get("ci")},
                "n": cell.status.n,
                **({"nothing_compressed": True} if cell.unchanged else {}),
                "knobs": settings["knobs"],
                "protocol": {**protocol, **({"turns": identity["turns"]} if "turns" in identity else {})},
                "bytes": means["payload"] + means["overhead"] if "payload" in means else None,
                "percent_of_full": means.get("percent_of_full"),
                "fidelity": {k: {x: far[x] for x in DISTANCES} for k, far in close.items() if far},
                "seconds": means.get("timing"),
                **{"dtype": settings["dtype"], "status": cell.status.status, "commit": facts.get("commit")},
                **{key: facts.get(key) for key in ("device", "torch", "transformers")},
                "cell": cell.id,
            }
        )
    return lines


def text(lines: Iterable[Mapping[str, Any]]) -> str:
    """Return the lines that have a score as the text of a file."""
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines if line["score"] is not None)


def write(lines: Iterable[Mapping[str, Any]], path: Path) -> int:
    """Write the lines that have a score to a file. Return how many."""
    written = text(lines)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(written, encoding="utf-8")
    except OSError as error:
        raise disk_error(error, path) from None
    return written.count("\n")


def read(place: Path) -> list[dict[str, Any]]:
    """Return the lines of a file, of the results.jsonl of a folder, or else of the cells stored in the folder.

    Raises UsageError for what is no such place, and for a line without what it must have.
    """
    path = place / NAME if place.is_dir() else place
    if not path.is_file():
        if (place / "cells").is_dir():
            return records(ResultStore(place))
        raise UsageError(f"{place} holds no results: give a file of lines, or a folder with {NAME} or with cells/")
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        wrong = [k for k, kind in REQUIRED.items() if not isinstance(line, dict) or not isinstance(line.get(k), kind)]
        if wrong:
            raise UsageError(
                f"line {number} of {path}: {', '.join(wrong)} is missing or of another kind; each line is a JSON "
                f"object with at least {', '.join(REQUIRED)}"
            )
        lines.append(line)
    return lines
