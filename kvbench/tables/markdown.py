"""Tables of Markdown for pages that are read and diffed."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with all columns to the left; a pipe in a cell is escaped."""
    lines = [_line(head), f"|{'|'.join(['---'] * len(head))}|", *map(_line, rows)]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(c.replace("|", r"\|").replace("\n", " ") for c in cells) + " |"
