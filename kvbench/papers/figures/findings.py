"""Findings of data in words: facts, each a label with its numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pandas as pd


@dataclass(frozen=True)
class Fact:
    """A label with values: a text, a number, or a series of numbers by name, or by name and place.

    form: how a number is written. at: how the place is.
    """

    label: str
    values: Any
    form: str = "{:.1f}"
    at: str = "{}"

    def text(self) -> str:
        """Return ``label: values``, with names before numbers and places after them; '' where no number is known."""
        if isinstance(self.values, str):
            return f"{self.label}: {self.values}"
        values = pd.Series(self.values).dropna()
        if not isinstance(self.values, pd.Series | dict):
            parts = [self.form.format(v) for v in values]
        elif values.index.nlevels == 1:
            parts = [f"{self.at.format(i)} {self.form.format(v)}" for i, v in values.items()]
        else:
            parts = []
            for name, rows in values.groupby(level=list(range(values.index.nlevels - 1)), sort=False):
                numbers = (f"{self.form.format(v)} at {self.at.format(i[-1])}" for i, v in rows.items())
                title = " ".join(map(str, name)) if isinstance(name, tuple) else name
                parts.append(f"{title} {', '.join(numbers)}")
        several = values.index.nlevels > 1
        return f"{self.label}: {('; ' if several else ', ').join(parts)}" if parts else ""


def sentences(facts: Iterable[Fact]) -> str:
    """Return the facts, a sentence each."""
    return " ".join(f"{text}." for text in (fact.text() for fact in facts) if text)
