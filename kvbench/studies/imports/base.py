"""Imported answers, in the form that every reader returns."""

from __future__ import annotations

import ast
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvbench.tasks.longbench import TASKS
from kvbench.tasks.rows import FileRow, describe_value

# a text in quotes as Python and numpy print it, with escaped quotes inside
_LITERAL = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)


@dataclass(frozen=True)
class ImportedAnswer:
    """One generated answer, as another tool stored it.

    prediction: the text of the answer.
    references: the accepted answers.
    classes: the closed set of labels, () if it is empty; None if the file does not state it.
    length: the length of the example as LongBench states it; None if the file does not state it.
    place: the answer's position in its file, such as ``line 3``.
    """

    prediction: str
    references: tuple[str, ...]
    classes: tuple[str, ...] | None
    length: int | None
    place: str


@dataclass(frozen=True)
class Predictions:
    """All answers of one file to one dataset.

    dataset: LongBench's name of the task, or the tool's name for other benchmarks.
    extended: whether the file says that it belongs to LongBench-E.
    path: the file.
    layout: the tool whose format the file has.
    answers: the answers in the file's order.
    sha256: the digest of the whole file.
    """

    dataset: str
    extended: bool
    path: Path
    layout: str
    answers: tuple[ImportedAnswer, ...]
    sha256: str


def split_task_name(name: str) -> tuple[str, bool]:
    """Split a tool's task name into LongBench's name and whether the task belongs to LongBench-E.

    ``longbench_qasper_e`` becomes (qasper, True). The name of another benchmark's task stays as it is.
    """
    short = name.removeprefix("longbench_")
    base = re.sub(r"[_-]e$", "", short)
    # a task of another benchmark may end in _e, too
    if base != short and base in TASKS:
        return base, True
    return short, False


def read_text(row: FileRow, key: str) -> str:
    """Return the text under ``key``, which may be empty. Raises UsageError for any other value."""
    value = row.value(key)
    if not isinstance(value, str):
        raise row.wrong(f"{key!r} must be text, got {describe_value(value)}")
    return value


def read_texts(row: FileRow, key: str) -> tuple[str, ...]:
    """Return the texts under ``key`` as a tuple, which may be empty: a text or number, or a list of texts and numbers.

    A text that is a list as Python or numpy prints it is read as a list. Raises UsageError for any other value.
    """
    value = row.value(key)
    if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
        value = _parse_printed_list(row, key, value)
    # True and False are ints for Python
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(v, str | int | float) for v in value):
        raise row.wrong(f"{key!r} must be text or a list of texts, got {describe_value(value)}")
    return tuple(map(str, value))


def read_classes(row: FileRow) -> tuple[str, ...] | None:
    """Return the closed set of labels under ``all_classes``: () if the set is empty, None if the row lacks the key."""
    if "all_classes" not in row.values:
        return None
    # CSV has no null: pandas writes an empty cell, and str() turns None into text
    if row.values["all_classes"] in (None, "", "None"):
        return ()
    return read_texts(row, "all_classes")


def read_length(row: FileRow) -> int | None:
    """Return the example's length as the row states it, or None if it states none. Raises UsageError for a bad one."""
    value = row.values.get("length")
    if value in (None, ""):
        return None
    number = None
    # True and False are ints for Python
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        # pandas writes whole numbers of a column with gaps as 1024.0; int() fails on nan and on infinity
        with suppress(ValueError, OverflowError):
            number = int(float(value))
    if number is None or number < 0:
        raise row.wrong(f"'length' must be a whole number, got {describe_value(value)}")
    return number


def _parse_printed_list(row: FileRow, key: str, value: str) -> str | list[str]:
    """Parse a printed list of texts: Python's ``['a', 'b']``, or numpy's ``['a' 'b']``, which Python reads as one text.

    A value in brackets that is no such list is returned as the text that it is.
    """
    content = value[1:-1]
    # the characters outside quotes: only spaces and commas stand between the texts of a list
    between = _LITERAL.sub("", content)
    if not between.replace(",", " ").strip():
        return [ast.literal_eval(literal) for literal in _LITERAL.findall(content)]
    # numpy prints only the ends of a long list, so its other texts are lost
    if "..." in between:
        raise row.wrong(f"{key!r} was shortened with ... when it was printed")
    return value
