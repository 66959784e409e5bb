"""The two texts above a figure's panels: a heading with its content, and a note on the model, data and examples."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from matplotlib.figure import Figure as Canvas
from matplotlib.text import Annotation

HEADING, NOTE, GAP = 8.0, 6.5, 4.0
"""The sizes in points of a heading's letters, of a note's letters, and of the space below both texts."""
LINE = 1.25
"""The height of a line of text over the size of its letters."""


@dataclass(frozen=True)
class Head:
    """The lines of a figure's heading and of the note below it."""

    heading: tuple[str, ...]
    note: tuple[str, ...]

    @classmethod
    def of(cls, heading: str, note: str, width: float) -> Head:
        """Return the head with both texts broken into lines that fit into a figure of ``width`` inches."""
        # the heading is bold, and bold letters are about a fifth wider
        return cls(_wrap(heading, 1.2 * HEADING, width), _wrap(note, NOTE, width))

    @property
    def height(self) -> float:
        """The height in inches of both texts and the space below them; 0 without texts."""
        # the note's lines count as lines of the heading, since ``write`` reserves them so
        lines = len(self.heading) + len(self.note)
        if not lines:
            return 0.0
        # an inch has 72 points
        return (LINE * HEADING * lines + GAP) / 72

    def write(self, fig: Canvas) -> None:
        """Write the heading and, below it, the note at the top left of a figure."""
        if not self.heading and not self.note:
            return
        # 0.04 inches from the left edge, as a share of the width
        left = 0.04 / fig.get_size_inches()[0]
        # matplotlib keeps room for one text at the top, so empty lines in the heading reserve the room of the note
        room = "\n" * len(self.note)
        text = fig.suptitle("\n".join(self.heading) + room, x=left, ha="left", fontsize=HEADING, fontweight="bold")
        text.set_linespacing(1.2)
        # the note begins at the heading's upper left corner, moved down by the heading's lines: by 1.3 letter sizes for
        # each, a little more than their line spacing of 1.2, so that the note keeps clear of the heading
        note = Annotation(
            "\n".join(self.note),
            xy=(0, 1),
            xycoords=text,
            xytext=(0, -1.3 * HEADING * len(self.heading)),
            textcoords="offset points",
            ha="left",
            va="top",
            fontsize=NOTE,
            color="#555555",
            annotation_clip=False,
        )
        # the heading's empty lines already keep the room
        note.set_in_layout(False)
        fig.add_artist(note)


def _wrap(text: str, size: float, width: float) -> tuple[str, ...]:
    # a letter is about half as wide as it is high, and an inch has 72 points
    letters = int(72 * width / (0.56 * size))
    return tuple(textwrap.wrap(text, letters))
