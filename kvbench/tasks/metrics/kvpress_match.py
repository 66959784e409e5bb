"""RULER's scores as kvpress computes them: kvpress deletes control characters, RULER turns them into line breaks."""

from __future__ import annotations

import re
from collections.abc import Sequence

_CONTROL = re.compile(r"[\x00-\x1f]")


def share_contained(prediction: str, references: Sequence[str]) -> float | None:
    """Return the share of the references that occur in the answer in any case; None without references."""
    if not references:
        return None
    # a reference that the answer breaks over two lines counts here, but not in RULER's own script
    answer = _CONTROL.sub("", prediction.strip()).strip().lower()
    return sum(reference.lower() in answer for reference in references) / len(references)


def any_contained(prediction: str, references: Sequence[str]) -> float:
    """Return 1 if a reference occurs in the answer in any case, else 0."""
    return float(bool(share_contained(prediction, references)))
