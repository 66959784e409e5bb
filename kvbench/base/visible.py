"""Print text from files and models with control characters written out, so that they cannot steer a terminal."""

from __future__ import annotations

import codecs
import json
import re
import sys
from typing import IO, Any

# match control characters other than newline and tab, and characters that reorder a line; our own bold text stays
STEERS = re.compile(r"(?!\x1b\[[01]m)[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u2028-\u202e\u2066-\u2069]")
USER_INFO = re.compile(r"(?<=://)\S*@")
"""Name and password in an address, also those with characters that an address would write in another way."""
JSON_ESCAPES = "json"
"""The name under which ``_json_escapes`` is registered as an error handler of streams."""


def visible(text: str) -> str:
    """Return a text with its control characters written as JSON writes them, ``\\u001b``."""
    return STEERS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def one_line(text: str) -> str:
    """Return a name or other short text as one line, with newlines, tabs and control characters written out."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def without_password(text: str) -> str:
    """Return a text with the names and passwords of its addresses written as ``***``."""
    return USER_INFO.sub("***@", text)


def say(text: str) -> None:
    """Print a line to stderr with kvbench's name."""
    # stdout is for the result; an error's text may quote a file, and so hold anything
    print(f"kvbench: {visible(without_password(text))}", file=sys.stderr, flush=True)


class VisibleStream:
    """A stream of text that never writes control characters to a terminal."""

    def __init__(self, stream: IO[str], as_json: bool) -> None:
        """Wrap a stream. Characters that its encoding lacks are printed as ?, or, with ``as_json``, as JSON escapes."""
        self._stream = stream
        # a stream in memory, such as tests use, has no encoding
        if hasattr(stream, "reconfigure"):
            errors = JSON_ESCAPES if as_json else "replace"
            stream.reconfigure(errors=errors)

    def write(self, text: str) -> int:
        """Write a text with its control characters escaped. Return the number of characters written."""
        return self._stream.write(visible(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _json_escapes(error: UnicodeError) -> tuple[str, int]:
    """Return (JSON's ASCII escapes for the characters that cannot be encoded, the index at which encoding goes on).

    It is an error handler of codecs (``codecs.register_error``). An error of decoding is raised again.
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    # [1:-1] drops the quotes that json.dumps puts around a text
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


codecs.register_error(JSON_ESCAPES, _json_escapes)


def describe_duration(seconds: float) -> str:
    """Return a time as text: in hours from 2 hours on, in minutes from 2 minutes on, and in seconds below that."""
    for unit, unit_seconds in (("h", 3600), ("min", 60)):
        if seconds >= 2 * unit_seconds:
            return f"{seconds / unit_seconds:.0f} {unit}"
    return f"{seconds:.0f} s"
