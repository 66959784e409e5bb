"""RULER's scores as kvpress computes them: control characters are deleted, where RULER makes them line breaks."""

from __future__ import annotations

import re
from collections.abc import Sequence

_CONTROL = re.compile(r"[\x00-\x1f]")


def share_contained(prediction: str, references: Sequence[str]) -> float | None:
    """Return the share of the references that occur in the answer, whatever their case; None without references."""
    answer = _CONTROL.sub("", prediction.strip()).strip().lower()
    return sum(r.lower() in answer for r in references) / len(references) if references else None


def any_contained(prediction: str, references: Sequence[str]) -> float:
    """Return 1 if a reference occurs in the answer, whatever its case, else 0."""
    return float(bool(share_contained(prediction, references)))
