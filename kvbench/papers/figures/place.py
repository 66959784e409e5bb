"""Where a figure is written: never in place of one that shows something else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.base.errors import UsageError, say
from kvbench.papers.figures.figure import OWN_METHODS, Figure, facts_of, folder, own_folder
from kvbench.tasks.base import read_text

SAME_FIGURE = ("model", "results", "output", "threads", "device", "data.root")
"""The keys with which a figure is still drawn with its own settings."""
LEFT_OUT = "left out"
"""The fact that names missing measurements."""


@dataclass(frozen=True)
class Place:
    """The folders that a command's figures go to.

    results, model: those of the command. output: the folder that it names, '' for none. settings: its other arguments,
    as ``limit=1``.
    """

    results: Path
    model: str
    output: str = ""
    settings: tuple[str, ...] = ()

    @classmethod
    def of(cls, options: Mapping[str, str], results: str, model: str) -> Place:
        """Return the place of a command's arguments."""
        settings = tuple(f"{key}={value}" for key, value in options.items() if key not in SAME_FIGURE)
        return cls(Path(results), model, options.get("output", ""), settings)

    def folder(self, figure: Figure, facts: Mapping[str, Any]) -> Path:
        """Return the folder of a figure of these facts.

        The folder of results has figures with their own settings. One with others goes to the folder of the user's own
        figures, and so does one that would replace a figure of other facts; both are said.
        """
        if self.output:
            return Path(self.output)
        plain, own = folder(self.results, self.model), own_folder(self.results, self.model)
        if OWN_METHODS in facts:
            return own
        path = plain / f"{figure.id}.csv"
        if path.exists():
            if _as_told(facts_of(read_text(path, figure.id)), {"figure": figure.id, **facts}):
                return plain
            say(f"{path} shows something else and stays: {figure.id} goes to {own}; output=FOLDER names another")
            return own
        if self.settings:
            say(f"{figure.id} with {' '.join(self.settings)} goes to {own}; output=FOLDER names another")
            return own
        return plain


def _as_told(there: Mapping[str, str], new: Mapping[str, Any]) -> bool:
    """Tell whether a figure of the facts ``new`` shows what the one that is there does, and not less of it."""
    return _compared(there) == _compared(new) and (LEFT_OUT not in new or LEFT_OUT in there)


def _compared(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return facts as they are compared: without what is missing, and lists however they were written."""
    return {key: re.sub(r"[\[\]\s]", "", str(value)) for key, value in facts.items() if key != LEFT_OUT}


def redrawn(figure: Figure, csv: Path, text: str, results: str, output: str) -> Path:
    """Return the path, without ending, of pictures drawn from the text of a CSV: beside it, or in a folder given.

    Raises UsageError where a CSV with other data lies there.
    """
    if output:
        stem = Path(output) / figure.id
    elif results:
        stem = Path(results) / "figures" / figure.id
    else:
        return csv.with_suffix("")
    beside = stem.with_suffix(".csv")
    if not output and beside.exists() and read_text(beside, figure.id) != text:
        raise UsageError(
            f"--from-csv {csv}: {beside} holds other data, and its picture would no longer show them: give "
            "output=FOLDER, another place"
        )
    return stem
