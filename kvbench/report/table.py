"""The model of a table: texts in cells, heads, blocks of rows and groups of columns. ``writers`` writes it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from kvbench.base.visible import visible

WIDTH = 100
"""The number of characters in a line of text."""


class Bold(str):
    """The text of a cell whose first line is the best of its block."""


@dataclass(frozen=True)
class Table:
    """A table of texts. Lines of a cell, or of a head, are separated by newlines.

    left: how many columns, from the first on, are text; the others are numbers.
    ruled: text has a line between rows.
    breaks: lines of a cell stay lines in every format, and text breaks long heads.
    groups: each column's name above its head, '' for none; neighbours of one name share it.
    headings: the heading of each block of rows, by the number of the block's first row.
    """

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int = 1
    ruled: bool = False
    breaks: bool = False
    groups: tuple[str, ...] = ()
    headings: Mapping[int, str] = field(default_factory=lambda: {0: ""})

    @property
    def blocks(self) -> list[tuple[str, tuple[tuple[str, ...], ...]]]:
        """Return (heading, rows) of each block."""
        starts = sorted(self.headings)
        ends = [*starts[1:], len(self.rows)] if starts else []
        return [(self.headings[a], self.rows[a:b]) for a, b in zip(starts, ends, strict=True)]

    @property
    def heads(self) -> tuple[str, ...]:
        """Return the heads for text: a long one is broken into several lines at _, / or -."""
        if not self.breaks:
            return self.headers
        return tuple(re.sub(r"([_/-])(?=\w{2})", r"\1\n", h) if len(h) > 10 else h for h in self.headers)

    def width(self, column: int) -> int:
        """Return the number of characters in a column's widest line."""
        return max(len(line) for text in (self.heads[column], *(r[column] for r in self.rows)) for line in lines(text))

    def spans(self) -> list[tuple[str, int]]:
        """Return (name, number of columns) of each group of neighbouring columns; [] if no group has a name."""
        return [(name, len(list(columns))) for name, columns in groupby(self.groups)] if any(self.groups) else []

    def folded(self) -> Iterator[Table]:
        """Yield the table in pieces of columns that fit WIDTH, each with the first column."""
        headings = max(len(part) + 4 for heading in self.headings.values() for part in heading.split(", "))
        first = max(self.width(0) + 2, headings)
        part, used = [0], first
        for column in range(1, len(self.headers)):
            needed = self.width(column) + 2
            if len(part) > 1 and used + needed > WIDTH:
                yield self._select(part)
                part, used = [0], first
            part.append(column)
            used += needed
        yield self._select(part)

    def _select(self, columns: Sequence[int]) -> Table:
        """Return the table with these columns alone."""
        headers, groups, *rows = (
            tuple(texts[i] for i in columns) for texts in (self.headers, self.groups or self.headers, *self.rows)
        )
        return replace(self, headers=headers, groups=groups if self.groups else (), rows=tuple(rows))


def lines(text: str) -> list[str]:
    """Return the lines of a cell, at least one."""
    return visible(text).split("\n")


def size(n: float) -> str:
    """Return a number of bytes as text in the largest unit that it reaches: ``1.5 MiB``."""
    for unit, unit_bytes in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= unit_bytes:
            return f"{n / unit_bytes:.1f} {unit}"
    return f"{n:.0f} B"
