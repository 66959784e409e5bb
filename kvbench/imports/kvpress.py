"""kvpress's ``predictions.csv``: the columns of its dataset but the context, and ``predicted_answer``.

pandas writes lists as numpy prints them (``['a' 'b']``) and a missing answer as an empty cell. The same records are
read from JSON: a list of objects, or columns as ``DataFrame.to_json`` writes them. Files of early versions, which hold
the column ``predicted_answer`` alone, cannot be scored. Source: github.com/NVIDIA/kvpress evaluation/evaluate.py.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvbench.errors import UsageError
from kvbench.imports import base
from kvbench.imports.base import ImportedAnswer, Predictions
from kvbench.tasks.rows import FileRow, kind, parse

LAYOUT = "kvpress"
PREDICTION = "predicted_answer"


def matches(path: Path) -> bool:
    """Whether a file's name is one of this layout."""
    return path.suffix == ".csv" or (path.suffix == ".json" and path.stem.startswith("predictions"))


def unrelated(path: Path) -> bool:
    """Whether a ``.csv`` of another name than kvpress's has no column of answers."""
    if path.suffix != ".csv" or path.stem.startswith("predictions"):
        return False
    try:
        with path.open("rb") as lines:
            header = lines.readline()
    except OSError:
        return False
    return PREDICTION.encode() not in header


def read(path: Path, sha256: str) -> list[Predictions]:
    """The answers of one file, by its column ``task``; UsageError naming file, line and reason for a damaged one."""
    found: dict[str, list[ImportedAnswer]] = {}
    for row in _json(path) if path.suffix == ".json" else _csv(path):
        references = "answers" if "answers" in row.values else "answer"
        answer = ImportedAnswer(
            base.text(row, PREDICTION), base.texts(row, references), base.classes(row), base.length(row), row.place
        )
        found.setdefault(str(row.values.get("task") or _folder_task(path)), []).append(answer)
    if not found:
        raise base.no_answers(path)
    return [Predictions(*base.dataset_of(t), path, LAYOUT, tuple(answers), sha256) for t, answers in found.items()]


def _folder_task(path: Path) -> str:
    """The task of a file without that column: its folder is ``dataset__task__model__press__ratio``."""
    parts = path.parent.name.split("__")
    return parts[1] if len(parts) > 3 else path.stem


def _csv(path: Path) -> Iterator[FileRow]:
    # the default limit of a cell, 128 KiB, is less than a long reference
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    reader = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
    try:
        header = next(reader, [])
        start = reader.line_num + 1
        for cells in reader:
            if len(cells) != len(header):
                raise UsageError(f"{path}, line {start}: {len(cells)} cells, but the header names {len(header)}")
            yield FileRow(path, f"line {start}", dict(zip(header, cells, strict=True)))
            start = reader.line_num + 1
    except csv.Error as error:
        raise UsageError(f"{path}, line {reader.line_num}: not CSV: {error}") from None


def _text(path: Path) -> str:
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{path}, line {line}: not UTF-8 text (byte {error.start} of the file)") from None


def _json(path: Path) -> Iterator[FileRow]:
    content = parse(path, "", _text(path))
    records = _records(content) if isinstance(content, dict) else content
    if not isinstance(records, list) or not all(isinstance(r, dict) for r in records):
        raise UsageError(f"{path}: must hold a list of objects, or columns, got {kind(content)}")
    for number, record in enumerate(records, start=1):
        yield FileRow(
            path, f"entry {number}", {k: "" if v is None and k == PREDICTION else v for k, v in record.items()}
        )


def _records(columns: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """``{column: {index: value}}`` as one object per index; None if that is not what it is."""
    if not columns or not all(isinstance(c, dict) for c in columns.values()):
        return None
    indices = next(iter(columns.values()))
    return [{name: column[i] for name, column in columns.items() if i in column} for i in indices]
