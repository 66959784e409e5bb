"""Measured rows on disk: one JSON object a line, appended and never changed, so that finished rows stay."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from kvbench.base.errors import KvbenchError

MEASURED, OOM, REFUSED, FAILED, NOT_RUN = "measured", "OOM", "refused", "failed", "not run"
FINISHED = (MEASURED, OOM, REFUSED)
"""The statuses of rows that are not measured again."""
FULL = "full"

Row = dict[str, Any]


def key(identity: Mapping[str, Any]) -> str:
    """Return the hash of the facts that decide a row's numbers, as 12 hexadecimal digits."""
    text = json.dumps(identity, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def read(path: Path) -> list[Row]:
    """Return all rows of a file in order, without a torn last line. Raises KvbenchError for any other damage."""
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
    """Append rows to the file and sync it. A torn last line is removed first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as f:
        size = f.seek(0, os.SEEK_END)
        if size:
            f.seek(size - 1)
            if f.read(1) != b"\n":
                intact = path.read_bytes().rpartition(b"\n")
                f.truncate(len(intact[0]) + len(intact[1]))
        for row in rows:
            f.write(json.dumps(row, ensure_ascii=False, default=str).encode() + b"\n")
        f.flush()
        os.fsync(f.fileno())


def latest(rows: Sequence[Row]) -> dict[str, Row]:
    """Return the last row of each key, by key."""
    return {row["key"]: row for row in rows}


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return the median, quartiles and number of values of one quantity. A single value is its own quartiles."""
    low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
    return {"median": median(values), "q1": low, "q3": high, "n": len(values)}


def value(row: Mapping[str, Any], quantity: str) -> float | None:
    """Return the median of one quantity of a row, or None if the row lacks that quantity."""
    statistics = row.get("quantities", {}).get(quantity)
    return None if statistics is None else float(statistics["median"])


def base(row: Mapping[str, Any], rows: Sequence[Row], method: str = FULL) -> Row | None:
    """Return the last row of ``method`` with the same session, model and workload as ``row``, or None."""
    for candidate in reversed(rows):
        alike = all(candidate.get(k) == row.get(k) for k in ("session", "model", "workload"))
        if alike and candidate["method"] == method:
            return candidate
    return None


def ratio(row: Mapping[str, Any], to: Mapping[str, Any] | None, quantity: str) -> float | None:
    """Return the median of the row's quantity over that of ``to``, or None if one is missing or ``to``'s is 0."""
    numerator, denominator = value(row, quantity), None if to is None else value(to, quantity)
    return numerator / denominator if numerator is not None and denominator else None
