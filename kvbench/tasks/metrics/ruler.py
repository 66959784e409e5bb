"""RULER's two scores and its means over lengths. Both scores count references in the answer, in any case."""

from __future__ import annotations

import re
from collections.abc import Sequence


def contained(prediction: str, reference: str) -> float:
    """Return 1 if the reference stands in the answer in any case, else 0."""
    # RULER's postprocess_pred replaces control characters by line breaks, so a reference across one is not found
    text = re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip()
    return float(reference.lower() in text.lower())


def share_contained(prediction: str, references: Sequence[str]) -> float | None:
    """Return the share of the references that stand in the answer in any case; None without references."""
    if not references:
        return None
    return sum(contained(prediction, reference) for reference in references) / len(references)


def over_lengths(scores: Sequence[float]) -> tuple[float, float, float]:
    """Return three means of the scores at rising lengths: plain, with rising weights 1, 2, 3, ... and falling ones.

    These are the averages ``Avg``, ``wAvg (inc)`` and ``wAvg (dec)`` of RULER's table. At least one score is needed.
    """
    weights = range(1, len(scores) + 1)
    # sum_i w_i x_i with w_i = i, for the scores in their order and from the longest to the shortest
    rising = sum(weight * score for weight, score in zip(weights, scores, strict=True))
    falling = sum(weight * score for weight, score in zip(weights, scores[::-1], strict=True))
    return sum(scores) / len(scores), rising / sum(weights), falling / sum(weights)
