"""The model of a table: texts in cells, heads, blocks of rows and groups of columns. ``writers`` writes it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from kvbench.base.visible import visible

WIDTH = 100
"""The number of characters in a line of text."""
GAP = 2
"""The number of characters between two columns."""
LONGEST_HEAD = 10
"""The number of characters up to which a head stays on one line."""


class Bold(str):
    """The text of the best cell of a block. Writers print its first line bold."""


@dataclass(frozen=True)
class Table:
    """A table of texts. Newlines separate the lines of a cell or of a head.

    headers: the head of each column.
    rows: the cells of each row, one for each column.
    left: how many columns, from the first on, are text. The others are numbers.
    ruled: text output has a line between rows.
    bare: text output shows no heads, and only the last column wraps: its rows are sentences in columns.
    breaks: lines of a cell stay lines in every format, and text output breaks long heads.
    groups: the name above each column's head, '' for none. Neighbours with one name share it.
    headings: the heading of each block of rows, by the number of the block's first row.
    """

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int = 1
    ruled: bool = False
    bare: bool = False
    breaks: bool = False
    groups: tuple[str, ...] = ()
    headings: Mapping[int, str] = field(default_factory=lambda: {0: ""})

    @property
    def blocks(self) -> list[tuple[str, tuple[tuple[str, ...], ...]]]:
        """The (heading, rows) of each block."""
        starts = sorted(self.headings)
        # a block ends where the next one starts, and the last one ends with the table
        ends = starts[1:]
        if starts:
            ends.append(len(self.rows))
        return [(self.headings[start], self.rows[start:end]) for start, end in zip(starts, ends, strict=True)]

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads for text output. With ``breaks``, a long head is broken into several lines at _, / or -."""
        if not self.breaks:
            return self.headers
        heads = []
        for header in self.headers:
            if len(header) <= LONGEST_HEAD:
                heads.append(header)
            else:
                # two word characters must follow: a break in front of a single letter would leave it alone on a line
                heads.append(re.sub(r"([_/-])(?=\w{2})", r"\1\n", header))
        return tuple(heads)

    def width(self, column: int) -> int:
        """Return the number of characters in a column's widest line."""
        widest = max(len(line) for line in split_lines(self.heads[column]))
        for row in self.rows:
            for line in split_lines(row[column]):
                widest = max(widest, len(line))
        return widest

    def spans(self) -> list[tuple[str, int]]:
        """Return (name, number of columns) of each group of neighbouring columns; [] if no group has a name."""
        if not any(self.groups):
            return []
        # ``groups`` repeats a group's name for each of its columns
        return [(name, len(list(columns))) for name, columns in groupby(self.groups)]

    def folded(self) -> Iterator[Table]:
        """Yield the table in pieces of columns that fit WIDTH. Each piece begins with the table's first column."""
        # writers put "· " in front of a heading, break it at each comma and indent the following lines by as much
        indentation = 2
        heading_lines: list[str] = []
        for heading in self.headings.values():
            heading_lines += heading.split(", ")
        widest_heading = indentation + max(map(len, heading_lines))
        first_width = max(self.width(0), widest_heading) + GAP
        columns, width = [0], first_width
        for column in range(1, len(self.headers)):
            added_width = self.width(column) + GAP
            # a column too wide for any piece still stands in one, beside the first column
            if len(columns) > 1 and width + added_width > WIDTH:
                yield self._select(columns)
                columns, width = [0], first_width
            columns.append(column)
            width += added_width
        yield self._select(columns)

    def _select(self, columns: Sequence[int]) -> Table:
        def pick(texts: Sequence[str]) -> tuple[str, ...]:
            return tuple(texts[column] for column in columns)

        # a table without groups has (), and no column can be picked from that
        groups: tuple[str, ...] = pick(self.groups) if self.groups else ()
        return replace(self, headers=pick(self.headers), groups=groups, rows=tuple(map(pick, self.rows)))


def split_lines(text: str) -> list[str]:
    """Return the lines of a cell, at least one."""
    return visible(text).split("\n")


def range_text(counts: Collection[int]) -> str:
    """Return the smallest and the largest count as "2–5", one number if they are equal, and "0" without counts."""
    if not counts:
        return "0"
    low, high = min(counts), max(counts)
    if low == high:
        return str(low)
    return f"{low}–{high}"
