"""RULER's two scores: which references an answer contains, whatever their case."""

from __future__ import annotations

import re
from collections.abc import Sequence


def contained(prediction: str, reference: str) -> float:
    """Return 1 if the reference stands in the answer, whose control characters part words as line breaks do."""
    text = re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip()
    return float(reference.lower() in text.lower())


def share_contained(prediction: str, references: Sequence[str]) -> float | None:
    """Return the share of the references that stand in the answer, None without references."""
    if not references:
        return None
    return sum(contained(prediction, reference) for reference in references) / len(references)
