"""RULER's two scores, of which references an answer contains, whatever their case, and its means over lengths."""

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


def over_lengths(scores: Sequence[float]) -> tuple[float, float, float]:
    """Return the means of scores at rising lengths: plain, and with weights 1, 2, 3, ... that rise and that fall."""
    weights = range(1, len(scores) + 1)
    rising, falling = (sum(w * x for w, x in zip(weights, by, strict=True)) for by in (scores, scores[::-1]))
    return sum(scores) / len(scores), rising / sum(weights), falling / sum(weights)
