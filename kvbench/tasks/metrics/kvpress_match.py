"""RULER's scores as kvpress computes them: kvpress deletes control characters, RULER turns them into line breaks."""

from __future__ import annotations

import re
from collections.abc import Sequence

_CONTROL = re.compile(r"[\x00-\x1f]")


def share_contained(prediction: str, references: Sequence[str]) -> float | None:
    """Return the share of the references that occur in the answer in any case; None without references."""
    if not references:
        return None
    # deleting line breaks joins a reference that the answer breaks over two lines; RULER's own script does not find it
    answer = _CONTROL.sub("", prediction.strip()).strip().lower()
    contained = [reference for reference in references if reference.lower() in answer]
    return len(contained) / len(references)


def any_contained(prediction: str, references: Sequence[str]) -> float:
    """Return 1 if a reference occurs in the answer in any case, else 0."""
    share = share_contained(prediction, references)
    # a share of None, for no references, counts as 0
    return 1.0 if share else 0.0
