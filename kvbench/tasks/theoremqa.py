"""The references of TheoremQA. Source: github.com/TIGER-AI-Lab/TheoremQA (MIT)."""

from __future__ import annotations

import json

from kvbench.metrics.theorem import parse_reference
from kvbench.tasks.rows import FileRow, kind

TYPES = ("integer", "float", "bool", "option", "list of integer", "list of float")


def reference(row: FileRow) -> str:
    """The answer of a question, by whose kind it is compared: ``3`` an integer, ``3.0`` a float.

    It is text in the hub's table. Raises UsageError for an unknown type, or an answer that is not of its type.
    """
    of, answer = row.text("Answer_type"), row.value("Answer")
    if of not in TYPES:
        raise row.wrong(f"'Answer_type' must be one of {', '.join(TYPES)}, got {kind(of)}")
    reference = answer if isinstance(answer, str) else json.dumps(answer)
    value = parse_reference(reference)
    if of == "float" and type(value) is int:
        value = float(value)
        reference = str(value)
    if not _fits(of, value):
        raise row.wrong(f"'Answer' must be of the type {of!r}, got {kind(answer)}")
    return str(value) if isinstance(value, bool) else reference


def _fits(of: str, value: object) -> bool:
    if of.startswith("list of "):
        return isinstance(value, tuple)
    return type(value) is {"integer": int, "float": float, "bool": bool, "option": str}[of]
