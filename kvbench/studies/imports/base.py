"""Answers that were made elsewhere, as every reader returns them."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.tasks.longbench import TASKS
from kvbench.tasks.rows import FileRow, kind

_LITERAL = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)


@dataclass(frozen=True)
class ImportedAnswer:
    """One generated text with its references, closed label set and stored length; ``place`` is where it stands."""

    prediction: str
    references: tuple[str, ...]
    classes: tuple[str, ...] | None
    length: int | None
    place: str


@dataclass(frozen=True)
class Predictions:
    """All answers of one file to one dataset. ``extended``: the file says that it is of LongBench-E.

    ``layout`` is the tool whose format the file has; ``sha256`` is of the whole file.
    """

    dataset: str
    extended: bool
    path: Path
    layout: str
    answers: tuple[ImportedAnswer, ...]
    sha256: str


def dataset_of(name: str) -> tuple[str, bool]:
    """Return (LongBench's task name, whether it is of LongBench-E): ``longbench_qasper_e`` -> (qasper, True)."""
    short = name.removeprefix("longbench_")
    base = re.sub(r"[_-]e$", "", short)
    return (base, True) if base != short and base in TASKS else (short, False)


def text(row: FileRow, key: str) -> str:
    """Return text, which may be empty and may hold anything."""
    value = row.value(key)
    if not isinstance(value, str):
        raise row.wrong(f"{key!r} must be text, got {kind(value)}")
    return value


def texts(row: FileRow, key: str) -> tuple[str, ...]:
    """Return text or number, or a list of them, as a tuple, maybe empty.

    A list that Python or numpy printed is read as one.
    """
    value = row.value(key)
    if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
        value = _printed_list(row, key, value)
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(v, str | int | float) for v in value):
        raise row.wrong(f"{key!r} must be text or a list of texts, got {kind(value)}")
    return tuple(map(str, value))


def classes(row: FileRow) -> tuple[str, ...] | None:
    """Return the closed set of labels: () if the row gives none, None if it lacks the key."""
    if "all_classes" not in row.values:
        return None
    return () if row.values["all_classes"] in (None, "", "None") else texts(row, "all_classes")


def length(row: FileRow) -> int | None:
    """Return the stored length of the example, or None if the row has none."""
    value = row.values.get("length")
    if value in (None, ""):
        return None
    try:
        number = int(float(value)) if isinstance(value, str | int | float) and not isinstance(value, bool) else -1
    except (ValueError, OverflowError):
        number = -1
    if number < 0:
        raise row.wrong(f"'length' must be a whole number, got {kind(value)}")
    return number


def _printed_list(row: FileRow, key: str, value: str) -> Any:
    """Parse ``['a', 'b']`` or numpy's ``['a' 'b']``, which Python would read as one text; other brackets stay text."""
    between = _LITERAL.sub("", value[1:-1])
    if not between.replace(",", " ").strip():
        return [ast.literal_eval(literal) for literal in _LITERAL.findall(value[1:-1])]
    if "..." in between:
        raise row.wrong(f"{key!r} was shortened with ... when it was printed")
    return value
