"""Measured rows on disk: one JSON object a line, appended and never changed, so that what was finished stays."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from kvbench.errors import KvbenchError

MEASURED, OOM, REFUSED, FAILED, NOT_RUN = "measured", "OOM", "refused", "failed", "not run"
FINISHED = (MEASURED, OOM, REFUSED)
"""What need not be tried again."""
FULL = "full"

Row = dict[str, Any]


def key(identity: Mapping[str, Any]) -> str:
    """Of what decides a row's numbers."""
    text = json.dumps(identity, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def read(path: Path) -> list[Row]:
    """All rows in order; a last line that was cut off is left out, any other damage is a KvbenchError."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append(dict(json.loads(line)))
        except ValueError:
            # without its newline a line was still being written
            if number == len(lines):
                continue
            raise KvbenchError(f"{path}, line {number}: not JSON; remove the line to go on") from None
    return rows


def append(path: Path, rows: Sequence[Row]) -> None:
    """Write rows behind what is there, and see them onto the disk. A line that was cut off is ended first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as f:
        size = f.seek(0, os.SEEK_END)
        if size:
            f.seek(size - 1)
            if f.read(1) != b"\n":
                kept = path.read_bytes().rpartition(b"\n")
                f.truncate(len(kept[0]) + len(kept[1]))
        for row in rows:
            f.write(json.dumps(row, ensure_ascii=False, default=str).encode() + b"\n")
        f.flush()
        os.fsync(f.fileno())


def latest(rows: Sequence[Row]) -> dict[str, Row]:
    """The last row of each key."""
    return {row["key"]: row for row in rows}


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles of one quantity; of fewer than two values the quartiles are the value."""
    low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
    return {"median": median(values), "q1": low, "q3": high, "n": len(values)}


def value(row: Mapping[str, Any], quantity: str) -> float | None:
    """The median of a quantity of a row, None where it has none."""
    found = row.get("quantities", {}).get(quantity)
    return None if found is None else float(found["median"])


def base(row: Mapping[str, Any], rows: Sequence[Row], method: str = FULL) -> Row | None:
    """The row of ``method`` that was measured beside ``row``: the same session, model and workload."""
    for other in reversed(rows):
        alike = all(other.get(k) == row.get(k) for k in ("session", "model", "workload"))
        if alike and other["method"] == method:
            return other
    return None


def ratio(row: Mapping[str, Any], to: Mapping[str, Any] | None, quantity: str) -> float | None:
    """The quantity over that of ``to``; None where one of them has none."""
    mine, theirs = value(row, quantity), None if to is None else value(to, quantity)
    return mine / theirs if mine is not None and theirs else None
