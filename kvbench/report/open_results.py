"""Results in an open format: a JSON object a line. Any program can write it, and `report` reads it from any folder.

A line is the mean score of one method on one task. It has at least the keys of REQUIRED. docs/import.md names further
keys, and unknown keys are kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from kvbench.base.errors import UsageError
from kvbench.base.files import Line, disk_error, parse_finite_json
from kvbench.report import listing
from kvbench.store.fidelity import KINDS
from kvbench.store.labels import list_settings
from kvbench.store.results import Facts, Record
from kvbench.store.store import ResultStore

NAME = "results.jsonl"
"""The file's name in a folder."""
REQUIRED: Mapping[str, type | tuple[type, ...]] = {
    "model": str,
    "method": str,
    "dataset": str,
    "score": (int, float),
    "n": int,
}
"""The fields of each line: model, method with its budget and knobs, task, mean score and its number of examples."""

DISTANCES = ("kl_mean", "ci", "top1", "ppl_ratio", "floor", "at_floor")
"""The values of a comparison with the full cache that a line has. ``store.fidelity.FidelitySummary`` explains them."""


def list_lines(store: ResultStore, filters: Mapping[str, str] | None = None) -> list[Line]:
    """Return the cells of a store that pass ``filters`` as lines of the open format. A score may be missing (None)."""
    return [_build_line(store, cell) for cell in listing.list_cells(store, filters or {})]


def _build_line(store: ResultStore, cell: listing.StoredCell) -> dict[str, object]:
    """Return one cell as a line of the open format, without the mean score if the stored one is out of date."""
    # without a summary, the stored means cover fewer samples than the cell has now, so they are not passed on
    means: Record = store.metrics(cell.id) if cell.summary is not None else {}
    identity = cell.record.identity
    settings = list_settings(identity)
    # several processes may have measured the cell: the facts of the last one are used
    facts: Facts = cell.record.provenance[-1] if cell.record.provenance else {}
    # the keys have the order of the documented format
    line: dict[str, object] = {
        "model": cell.record.model,
        # cells of one label differ in other settings, without which two lines would have one name
        "method": f"{cell.label} {cell.differs}".strip(),
        "dataset": cell.record.column,
        "metric": means.get("metric"),
        "score": means.get("score"),
        "interval": means.get("ci"),
        "n": cell.status.n,
    }
    # imported, or engine; kvbench's own results have no kind
    if cell.record.kind is not None:
        line["kind"] = cell.record.kind
    if cell.unchanged:
        line["nothing_compressed"] = True
    protocol: dict[str, object] = {"query_aware": settings["query_aware"], "prompt": settings["prompt"]}
    # contexts with several questions: the history that each question's prompt has
    if "turns" in identity:
        protocol["turns"] = identity["turns"]
    if "samples_per_prompt" in settings:
        protocol["samples_per_prompt"] = settings["samples_per_prompt"]
    return line | {
        "knobs": settings["knobs"],
        "protocol": protocol,
        "bytes": cell.bytes,
        "percent_of_full": cell.percent_of_full,
        "fidelity": _select_distances(means.get("fidelity", {})),
        "seconds": means.get("timing"),
        "dtype": settings["dtype"],
        "status": cell.status.status,
        "commit": facts.get("commit"),
        "device": facts.get("device"),
        "torch": facts.get("torch"),
        "transformers": facts.get("transformers"),
        "cell": cell.id,
    }


def _select_distances(fidelity: Record) -> dict[str, dict[str, object]]:
    """Return the values of DISTANCES for each kind of text on which a cell was compared with the full cache."""
    distances_by_kind = {}
    for kind in KINDS:
        distances = fidelity.get(kind)
        if distances:
            distances_by_kind[kind] = {name: distances[name] for name in DISTANCES}
    return distances_by_kind


def format_lines(lines: Iterable[Mapping[str, object]]) -> str:
    """Return the lines that have a score as the text of a file, one JSON object a line."""
    scored_lines = [line for line in lines if line["score"] is not None]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in scored_lines)


def write_lines(lines: Iterable[Mapping[str, object]], path: Path) -> int:
    """Write the lines that have a score to a file. Return how many."""
    written = format_lines(lines)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(written, encoding="utf-8")
    except OSError as error:
        raise disk_error(error, path) from None
    return written.count("\n")


def read_lines(place: Path) -> list[Line]:
    """Return the lines of a file, of the results.jsonl of a folder, or else of the cells stored in the folder.

    Raises UsageError for a place that holds no results, and for a line that lacks a key of REQUIRED.
    """
    path = place / NAME if place.is_dir() else place
    if not path.is_file():
        # a results folder of kvbench's own has no file of lines: they are made of its cells
        if (place / "cells").is_dir():
            return list_lines(ResultStore(place))
        raise UsageError(f"{place} holds no results: give a file of lines, or a folder with {NAME} or with cells/")
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            line = parse_finite_json(text)
        except ValueError as error:
            raise UsageError(f"line {number} of {path} is no JSON, with finite numbers alone: {error}") from None
        if not isinstance(line, dict):
            wrong_keys = list(REQUIRED)
        else:
            wrong_keys = [key for key, kind in REQUIRED.items() if not isinstance(line.get(key), kind)]
        if wrong_keys:
            raise UsageError(
                f"line {number} of {path}: {', '.join(wrong_keys)} is missing or of another kind; each line is a JSON "
                f"object with at least {', '.join(REQUIRED)}"
            )
        lines.append(line)
    return lines
