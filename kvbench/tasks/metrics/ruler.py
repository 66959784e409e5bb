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


def average_over_lengths(scores: Sequence[float]) -> tuple[float, float, float]:
    """Return (plain mean, mean with rising weights, mean with falling weights) of a task's scores at several lengths.

    scores: the score at each length, from the shortest length to the longest; at least one.

    Rising weights are 1, 2, 3, ... The means are ``Avg``, ``wAvg (inc)`` and ``wAvg (dec)`` in RULER's table.
    """
    weights = range(1, len(scores) + 1)
    total_weight = sum(weights)
    # sum_i i * x_i / sum_i i
    rising = sum(weight * score for weight, score in zip(weights, scores, strict=True))
    # from the longest length to the shortest, so that the weights fall with the length
    falling = sum(weight * score for weight, score in zip(weights, scores[::-1], strict=True))
    return sum(scores) / len(scores), rising / total_weight, falling / total_weight
