"""Text of others as it is printed: what would steer a terminal is written out, so that it can only be read."""

from __future__ import annotations

import codecs
import json
import re
from typing import IO, Any

# control characters but newline and tab, and those that reorder a line; the bold of our own tables stays
STEERS = re.compile(r"(?!\x1b\[[01]m)[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u2028-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """Return a text with its control characters written as JSON writes them, ``\\u001b``."""
    return STEERS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def one_line(text: str) -> str:
    """Return a name as one visible line."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


class VisibleStream:
    """A stream of text that writes nothing that steers a terminal."""

    def __init__(self, stream: IO[str], as_json: bool) -> None:
        """Signs that the stream's encoding lacks become ? in what people read, and escapes in JSON."""
        self._stream = stream
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="json" if as_json else "replace")

    def write(self, text: str) -> int:
        return self._stream.write(visible(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _json_escapes(error: UnicodeError) -> tuple[str, int]:
    """Return the signs that cannot be encoded as JSON writes them in ASCII: a codec's handler of errors."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


codecs.register_error("json", _json_escapes)
