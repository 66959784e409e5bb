"""The references of TheoremQA. Source: github.com/TIGER-AI-Lab/TheoremQA (MIT)."""

from __future__ import annotations

import json

from kvbench.tasks.metrics.theorem import parse_reference
from kvbench.tasks.rows import FileRow, describe_value

# the type of the parsed answer, by the answer's type in the question's record
TYPES = {"integer": int, "float": float, "bool": bool, "option": str, "list of integer": tuple, "list of float": tuple}


def reference(row: FileRow) -> str:
    """Return the answer of a question as text. The form gives the answer's type: ``3`` is an integer, ``3.0`` a float.

    In the hub's table the answer is text already. Raises UsageError if the answer's type is unknown or not the stated
    type.
    """
    answer_type, answer = row.text("Answer_type"), row.value("Answer")
    if answer_type not in TYPES:
        raise row.wrong(f"'Answer_type' must be one of {', '.join(TYPES)}, got {describe_value(answer_type)}")
    answer_text = answer if isinstance(answer, str) else json.dumps(answer)
    value = parse_reference(answer_text)
    # ``type`` and not ``isinstance`` here and below, since True is an instance of int
    if answer_type == "float" and type(value) is int:
        # a float may be written 3; without this it would be compared as an integer
        value = float(value)
        answer_text = str(value)
    if type(value) is not TYPES[answer_type]:
        raise row.wrong(f"'Answer' must be of the type {answer_type!r}, got {describe_value(answer)}")
    if isinstance(value, bool):
        # Python's True, not JSON's true
        return str(value)
    return answer_text
