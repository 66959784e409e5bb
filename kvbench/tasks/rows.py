"""Records of a data file with checked access: JSON Lines, a JSON list, or CSV. Every error names file and place."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from kvbench.base.errors import UsageError
from kvbench.base.files import check_ends

# a pattern, since a loop over the hundreds of thousands of characters of a long prompt would take longer
HALF_PAIR = re.compile("[\ud800-\udfff]")
"""Half a surrogate pair."""


class FileRow:
    """One record of a file, with checked access to the record's values.

    file: the file, for errors.
    place: the record's position in the file, such as ``line 3``.
    values: the values by key.
    hint: the end of the message on a missing key.

    The methods raise UsageError, with file and place, for a value of another type than they return.
    """

    def __init__(self, file: Path, place: str, values: Mapping[str, object], hint: str = "") -> None:
        self.file, self.place, self.values, self.hint = file, place, values, hint

    def wrong(self, reason: str) -> UsageError:
        """Return the error for an unusable record, with file and place."""
        return UsageError(f"{self.file}, {self.place}: {reason}")

    def __contains__(self, key: str) -> bool:
        """Return True if there is a value other than null under ``key``."""
        return self.values.get(key) is not None

    def value(self, key: str) -> Any:
        """Return the value under ``key``, of any type. Raises UsageError that lists the keys if there is none."""
        if key not in self.values:
            keys = ", ".join(map(repr, self.values)) or "none"
            raise self.wrong(f"there is no key {key!r}; its keys: {keys}{self.hint}")
        return self.values[key]

    def text(self, key: str) -> str:
        """Return the text under ``key``, which must not be empty."""
        value = self.value(key)
        if not isinstance(value, str) or not value:
            raise self.wrong(f"{key!r} must be text that is not empty, got {describe_value(value)}")
        return self._check_unicode(key, value)

    def texts(self, key: str) -> tuple[str, ...]:
        """Return the texts under ``key`` as a tuple: one text, or a list of at least one."""
        value = self.value(key)
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not values or not all(isinstance(text, str) for text in values):
            raise self.wrong(f"{key!r} must be text or a list of texts, at least one, got {describe_value(value)}")
        return tuple(self._check_unicode(key, text) for text in values)

    def records(self, key: str) -> list[FileRow]:
        """Return the objects of the list under ``key`` as rows. There must be at least one."""
        value = self.value(key)
        if not isinstance(value, list) or not value or not all(isinstance(entry, dict) for entry in value):
            raise self.wrong(f"{key!r} must be a list of objects, at least one, got {describe_value(value)}")
        return [FileRow(self.file, f"{self.place}, {key}[{i}]", entry) for i, entry in enumerate(value)]

    def count(self, key: str, default: int) -> int:
        """Return the whole number, 1 or more, under ``key``, or ``default`` if there is none."""
        value = self.values.get(key)
        if value is None:
            return default
        if not is_count(value):
            raise self.wrong(f"{key!r} must be a whole number from 1, got {describe_value(value)}")
        return value

    def name(self, key: str, default: str) -> str:
        """Return the text or whole number under ``key`` as text, or ``default`` if there is none."""
        value = self.values.get(key)
        if value is None:
            return default
        # true and false are integers for Python, but no names
        if not isinstance(value, str | int) or isinstance(value, bool) or value == "":
            raise self.wrong(f"{key!r} must be text or a whole number, got {describe_value(value)}")
        return self._check_unicode(key, str(value))

    def _check_unicode(self, key: str, value: str) -> str:
        """Return ``value``. Raises UsageError if it holds half a surrogate pair."""
        # JSON escapes can spell half a pair; tokenizers would fail on it later, without the line's number
        if has_half_pair(value):
            raise self.wrong(f"{key!r} holds half a surrogate pair, which is not text")
        return value


def has_half_pair(text: str) -> bool:
    """Return True if a text holds half a surrogate pair, which cannot be written to a file as UTF-8."""
    return HALF_PAIR.search(text) is not None


def read_rows(file: Path) -> Iterator[FileRow]:
    """Yield the records of a .jsonl, .json (a list) or .csv file, in order.

    Raises UsageError for a file of another kind or without records.
    """
    readers = {".jsonl": read_lines, ".json": read_list, ".csv": read_csv}
    if file.suffix not in readers:
        raise UsageError(f"{file} must be a .jsonl, .json or .csv file")
    is_empty = True
    # yield rows, not a list: a run may read only the first rows of a training file with a million articles
    for row in readers[file.suffix](file):
        is_empty = False
        yield row
    if is_empty:
        raise UsageError(f"{file} is empty: it must hold at least one record")


def read_lines(file: Path, hint: str = "", damaged: list[str] | None = None) -> Iterator[FileRow]:
    """Yield the objects of a JSON Lines file, without blank lines. ``hint`` ends the message on a missing key.

    The error of a line that holds no object is added to the list ``damaged``, or raised if there is no such list.

    Only line feeds end a line. Python would also break lines at other characters, but JSON may hold them.
    """
    try:
        check_ends(file)
        # bytes end a line only at a line feed, and an error of decoding then has its line's number
        with file.open("rb") as lines:
            for number, raw in enumerate(lines, start=1):
                place = f"line {number}"
                try:
                    text = _decode(file, place, raw, at_start=number == 1)
                    if not text.strip():
                        continue
                    values = _check_object(file, place, parse_json(file, place, text))
                except UsageError as error:
                    if damaged is None:
                        raise
                    damaged.append(str(error))
                    continue
                yield FileRow(file, place, values, hint)
    except OSError as error:
        raise _unreadable(file, error) from None


def read_list(file: Path) -> Iterator[FileRow]:
    """Yield the objects of a file that holds one JSON list. Raises UsageError for a file with other content."""
    entries = parse_json(file, place="", text=_read_text(file))
    if not isinstance(entries, list):
        raise UsageError(f"{file}: must hold a JSON list, got {describe_value(entries)}")
    for i, entry in enumerate(entries, start=1):
        place = f"entry {i}"
        yield FileRow(file, place, _check_object(file, place, entry))


def read_csv(file: Path) -> Iterator[FileRow]:
    """Yield the rows of a CSV file with a header line. The place ``row 1`` is the first row below it."""
    return parse_csv(file, _read_text(file))


def parse_csv(file: Path, text: str, by_line: bool = False) -> Iterator[FileRow]:
    """Yield the rows of CSV with a header line. Raises UsageError for other text and for rows of another length.

    file: the file that errors name.
    text: the content of the file.
    by_line: True if a row's place is its line number in the file, False if rows below the header are counted from 1.
    """
    # the csv module limits a cell to 128 KiB by default, less than a long reference
    csv.field_size_limit(2**31 - 1)  # the largest limit that the module takes on every system
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = next(reader, [])
        # line_num is the last line of the row read so far, since a quoted cell may have line breaks; the next row
        # begins behind it
        line = reader.line_num + 1
        for number, cells in enumerate(reader, start=1):
            place = f"line {line}" if by_line else f"row {number}"
            if len(cells) != len(header):
                raise UsageError(f"{file}, {place}: {len(cells)} cells, but the header names {len(header)}")
            yield FileRow(file, place, dict(zip(header, cells, strict=True)))
            line = reader.line_num + 1
    except csv.Error as error:
        raise UsageError(f"{file}, line {reader.line_num}: not CSV: {error}") from None


def parse_json(file: Path, place: str, text: str) -> Any:
    """Return the value of a JSON text. Raises UsageError naming file, place and character if it is not JSON.

    place: the place of the text in the file, such as ``line 3``; '' if it is the whole file.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        # numbers of thousands of digits are ValueErrors without a position, and deep nesting is a RecursionError
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg} at character {error.pos + 1}"
        else:
            reason = str(error)
        raise UsageError(f"{_name_place(file, place)}: not JSON: {reason}") from None


def is_count(value: object) -> TypeGuard[int]:
    """Return True if a value is a whole number from 1. Python counts true and false as whole numbers, this does not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def describe_value(value: object) -> str:
    """Return a value as JSON for error messages. A long one is cut after 40 characters, with its type in front."""
    if value is None:
        return "null"
    shown = json.dumps(value, ensure_ascii=False)
    if len(shown) <= 40:
        return shown
    return f"{type(value).__name__} {shown[:40]}..."


def _read_text(file: Path) -> str:
    """Return the text of a whole file. Raises UsageError if it cannot be read."""
    try:
        check_ends(file)
        return _decode(file, "", file.read_bytes(), at_start=True)
    except OSError as error:
        raise _unreadable(file, error) from None


def _decode(file: Path, place: str, raw: bytes, at_start: bool) -> str:
    """Return the text of bytes of a file. Raises UsageError if they are not UTF-8.

    place: the place of the bytes in the file; '' if they are the whole file.
    at_start: True if the bytes begin the file, and so may begin with a byte order mark.
    """
    if at_start:
        # Windows programs begin UTF-8 with a byte order mark, and json.loads refuses it
        raw = raw.removeprefix(b"\xef\xbb\xbf")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = f"byte {error.start}"
        if place:
            byte += " of the line"
        raise UsageError(f"{_name_place(file, place)}: not UTF-8 text ({byte})") from None


def _name_place(file: Path, place: str) -> str:
    """Return a file and the place in it, for the beginning of an error message. The place '' is the whole file."""
    if not place:
        return str(file)
    return f"{file}, {place}"


def _check_object(file: Path, place: str, value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise UsageError(f"{file}, {place}: must be a JSON object, got {describe_value(value)}")
    return value


def _unreadable(file: Path, error: OSError) -> UsageError:
    if isinstance(error, FileNotFoundError):
        return UsageError(f"there is no file {file}")
    if isinstance(error, IsADirectoryError):
        return UsageError(f"{file} is a folder, not a file")
    return UsageError(f"{file} cannot be read: {error.strerror}")
