"""Checked values of a dataset's knobs, and draws that depend only on a seed."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from kvbench.base.errors import UsageError, unknown

T = TypeVar("T")
RULES = ("scripts", "mended")
"""Whether a score keeps the faults of published scripts."""


def check_whole(dataset: str, knob: str, value: object, least: int = 1, most: int | None = None) -> int:
    """Return ``value`` if it is a whole number from ``least`` to ``most``; None: without an upper limit.

    Raises UsageError, which names the knob and the allowed values, for any other value.
    """
    # true and false are integers for Python
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        if most is None:
            allowed = f"a whole number, {least} or more"
        else:
            allowed = f"a whole number from {least} to {most}"
        raise UsageError(f"dataset.{dataset}.{knob}={value!r} is not possible: {allowed}")
    return value


def check_word(dataset: str, knob: str, value: object, allowed: Iterable[str]) -> str:
    """Return ``value`` if it is one of the allowed words. Raises UsageError, with these words, for any other value."""
    names = tuple(allowed)
    if value not in names:
        raise unknown(f"value of dataset.{dataset}.{knob}", value, names)
    return str(value)


def shuffled_by_seed(items: Sequence[T], seed: str) -> Iterator[T]:
    """Yield all items in an order that only the seed decides, on every machine and Python version."""
    # random() is the only function of the random module that is promised to stay the same between versions
    rng = random.Random(seed)
    remaining = list(items)
    while remaining:
        i = int(rng.random() * len(remaining))
        # the last item takes the place of the drawn one, so that no other item moves
        remaining[i], remaining[-1] = remaining[-1], remaining[i]
        yield remaining.pop()
