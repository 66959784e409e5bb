"""One prompt of a dataset with its references."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Example:
    """One prompt with its references.

    ``prompt`` is text before tokenisation; ``answers`` are the acceptable references; ``classes`` is the closed
    label set of classification tasks; ``question`` is the prompt's end that ``query_aware=false`` withholds until the
    rest is compressed ('' where that cannot be told apart); ``tokens`` are the exact ids of a text that is not
    answered but scored by its likelihood, from token ``meta["prefix"]`` on; ``meta`` holds facts about the example
    (length, depth, ...) that reports use.
    """

    id: str
    prompt: str
    answers: tuple[str, ...]
    max_new_tokens: int
    classes: tuple[str, ...] = ()
    question: str = ""
    tokens: tuple[int, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)
