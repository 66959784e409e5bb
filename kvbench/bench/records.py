"""Measured rows on disk: one JSON object a line, appended and never changed, so that finished rows stay."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any, BinaryIO, TypedDict

from kvbench.base.errors import KvbenchError

MEASURED, OOM, REFUSED, FAILED, NOT_RUN = "measured", "OOM", "refused", "failed", "not run"
FINISHED = (MEASURED, OOM, REFUSED)
"""The statuses of rows that are not measured again."""
FULL = "full"
"""The entrant whose rows are the base of ratios, if no other is named: the full cache."""

Row = dict[str, Any]
"""One JSON object: an entrant on a workload, with its status, facts and quantities. Older files may lack newer keys."""


class RepeatSpread(TypedDict):
    """The distribution of one quantity over the repeats of a row.

    median: the middle value.
    q1: the first quartile.
    q3: the third quartile.
    n: the number of repeats.
    """

    median: float
    q1: float
    q3: float
    n: int


def hash_identity(identity: Mapping[str, object]) -> str:
    """Return the hash of the facts that decide a row's numbers, as 12 hexadecimal digits."""
    # sort the keys, so that the order of collecting facts does not matter
    text = json.dumps(identity, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def read_rows(path: Path) -> list[Row]:
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
            # the last line has no newline: its process was killed while writing it
            if number == len(lines):
                continue
            raise KvbenchError(f"{path}, line {number}: not JSON; remove the line to go on") from None
    return rows


def append_rows(path: Path, rows: Sequence[Row]) -> None:
    """Append rows to the file and sync it. A torn last line is removed first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as f:
        _remove_torn_line(f)
        # in mode "a" every write goes to the end of the file, wherever the last read was
        for row in rows:
            f.write(json.dumps(row, ensure_ascii=False, default=str).encode() + b"\n")
        # measuring again takes minutes, so sync the rows before the next workload starts
        f.flush()
        os.fsync(f.fileno())


def _remove_torn_line(file: BinaryIO) -> None:
    """Remove a last line without a newline from an open file: its process was killed while writing it."""
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        return
    file.seek(size - 1)
    if file.read(1) == b"\n":
        return
    file.seek(0)
    whole_lines, last_newline, _ = file.read().rpartition(b"\n")
    file.truncate(len(whole_lines) + len(last_newline))


def index_latest(rows: Sequence[Row]) -> dict[str, Row]:
    """Return the last row of each key, by key: later measurements replace earlier ones."""
    return {row["key"]: row for row in rows}


def summarise_repeats(values: Sequence[float]) -> RepeatSpread:
    """Return the median, quartiles and number of values of one quantity. A single value is its own quartiles."""
    if len(values) == 1:
        low, high = values[0], values[0]
    else:
        # inclusive: the smallest and the largest value are the quantiles 0 and 1, so no quartile lies outside
        low, _, high = quantiles(values, n=4, method="inclusive")
    return {"median": median(values), "q1": low, "q3": high, "n": len(values)}


def median_of(row: Row, quantity: str) -> float | None:
    """Return the median of one quantity of a row, or None if the row lacks that quantity."""
    statistics = row.get("quantities", {}).get(quantity)
    if statistics is None:
        return None
    return float(statistics["median"])


def row_of_base(row: Row, rows: Sequence[Row], method: str = FULL) -> Row | None:
    """Return the row of ``method`` with the same session, model and workload as ``row``; None if there is none.

    Only times of one session are compared, since machines differ and drift. Of several such rows, the last one in
    ``rows`` is returned, which is the newest.
    """
    for candidate in reversed(rows):
        is_comparable = all(candidate.get(fact) == row.get(fact) for fact in ("session", "model", "workload"))
        if is_comparable and candidate["method"] == method:
            return candidate
    return None


def ratio_of_medians(row: Row, base_row: Row | None, quantity: str) -> float | None:
    """Return the median of the row's quantity divided by the median of the same quantity of ``base_row``.

    Return None if there is no base row, a median is missing or the divisor is 0.
    """
    if base_row is None:
        return None
    numerator, denominator = median_of(row, quantity), median_of(base_row, quantity)
    if numerator is None or not denominator:
        return None
    return numerator / denominator
