"""The one model of a table: texts in cells, heads, blocks of rows and groups of columns; ``writers`` writes it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

WIDTH = 100
"""Characters of a line of text."""


class Bold(str):
    """The text of a cell whose first line is the best of its block."""


@dataclass(frozen=True)
class Table:
    """A table of texts. Lines of a cell, or of a head, are separated by newlines.

    left: columns of text, from the first on; those behind them are numbers. ruled: text has a line between rows.
    breaks: lines of a cell stay lines in every format, and text breaks long heads. groups: a name over neighbouring
    columns, '' for none. headings: the heading of each block of rows by the block's first row.
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
        """Each block's heading with its rows."""
        starts = sorted(self.headings)
        ends = [*starts[1:], len(self.rows)]
        return [(self.headings[a], self.rows[a:b]) for a, b in zip(starts, ends, strict=True)]

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads as text has them: a long one over several lines, where it has a place to break."""
        if not self.breaks:
            return self.headers
        return tuple(re.sub(r"([_/-])(?=\w{2})", r"\1\n", h) if len(h) > 10 else h for h in self.headers)

    def width(self, column: int) -> int:
        """Characters of a column's widest line."""
        return max(len(line) for text in (self.heads[column], *(r[column] for r in self.rows)) for line in lines(text))

    def spans(self) -> list[tuple[str, int]]:
        """The groups of neighbouring columns: each name, and how many columns it has; none where no group has one."""
        return [(name, len(list(some))) for name, some in groupby(self.groups)] if any(self.groups) else []

    def folded(self) -> Iterator[Table]:
        """The table in pieces of columns that fit WIDTH, each with the first column."""
        headings = max(len(part) + 4 for heading in self.headings.values() for part in heading.split(", "))
        first = max(self.width(0) + 2, headings)
        part, used = [0], first
        for column in range(1, len(self.headers)):
            needed = self.width(column) + 2
            if len(part) > 1 and used + needed > WIDTH:
                yield self._of(part)
                part, used = [0], first
            part.append(column)
            used += needed
        yield self._of(part)

    def _of(self, columns: Sequence[int]) -> Table:
        headers, groups, *rows = (
            tuple(some[i] for i in columns) for some in (self.headers, self.groups or self.headers, *self.rows)
        )
        return replace(self, headers=headers, groups=groups if self.groups else (), rows=tuple(rows))


def lines(text: str) -> list[str]:
    """The lines of a cell, at least one."""
    return text.split("\n")
