"""Where a figure is written: never in place of one that shows something else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvbench.base.errors import UsageError
from kvbench.base.visible import say
from kvbench.papers.figures.figure import OWN_METHODS, Figure, facts_of, figure_folder, own_folder
from kvbench.tasks.base import read_text

SAME_FIGURE = ("model", "results", "output", "threads", "device", "data.root")
"""The keys with which a figure is still drawn with its own settings."""
LEFT_OUT = "left out"
"""The fact that names missing measurements."""


@dataclass(frozen=True)
class Place:
    """The folders that a command's figures go to.

    results, model: the command's results folder and model.
    output: the folder that the command names, '' if it names no folder.
    settings: the command's other arguments, such as ``limit=1``.
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

    def folder(self, figure: Figure, facts: Mapping[str, object]) -> Path:
        """Return the folder for a figure that was computed under ``facts``.

        A figure with its declared settings goes to the folder of results. A figure with other settings goes to the
        folder of the user's own figures, as does a figure that would replace one with other facts. Both print a
        message.
        """
        if self.output:
            return Path(self.output)
        results_folder = figure_folder(self.results, self.model)
        users_folder = own_folder(self.results, self.model)
        # the user's methods are none of the figure's, whatever lies in the folder of results
        if OWN_METHODS in facts:
            return users_folder
        path = results_folder / f"{figure.id}.csv"
        if path.exists():
            # equal facts were computed from the same data, so that nothing is lost
            if _can_replace(facts_of(read_text(path, figure.id)), {"figure": figure.id} | dict(facts)):
                return results_folder
            say(
                f"{path} shows something else and stays: {figure.id} goes to {users_folder}; "
                "output=FOLDER names another"
            )
            return users_folder
        # a first figure with other settings would keep the one with its own from being written
        if self.settings:
            settings = " ".join(self.settings)
            say(f"{figure.id} with {settings} goes to {users_folder}; output=FOLDER names another")
            return users_folder
        return results_folder


def _can_replace(old: Mapping[str, str], new: Mapping[str, object]) -> bool:
    """Tell whether a figure with the facts ``new`` may take the place of the figure with the facts ``old``.

    Both must show the same, and the new figure may lack measurements only if the old figure does.
    """
    if _normalise(old) != _normalise(new):
        return False
    return LEFT_OUT not in new or LEFT_OUT in old


def _normalise(facts: Mapping[str, object]) -> dict[str, str]:
    """Return facts for comparison: without the fact that names missing measurements, and lists without brackets."""
    texts = {}
    for key, value in facts.items():
        if key != LEFT_OUT:
            # in a CSV a fact is a text, which may have been written as [1, 2] or as 1,2
            texts[key] = re.sub(r"[\[\]\s]", "", str(value))
    return texts


def redrawn_path(figure: Figure, csv: Path, text: str, results: str, output: str) -> Path:
    """Return the path, without ending, of pictures that are drawn from a CSV: beside it, or in a folder of the user's.

    Raises UsageError where a CSV with other data lies there.
    """
    if output:
        stem = Path(output) / figure.id
    elif results:
        stem = Path(results) / "figures" / figure.id
    else:
        return csv.with_suffix("")
    # with output= the user names the folder, and answers for what is in it
    beside = stem.with_suffix(".csv")
    if not output and beside.exists() and read_text(beside, figure.id) != text:
        raise UsageError(
            f"--from-csv {csv}: {beside} holds other data, and its picture would no longer show them: give "
            "output=FOLDER, another place"
        )
    return stem
