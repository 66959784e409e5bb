"""Choose the folder that a figure is written to, so that it never replaces a figure that shows something else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from kvbench.base.errors import UsageError
from kvbench.base.visible import say
from kvbench.papers.figures.figure import OWN_METHODS, Figure, facts_of, figure_folder, own_folder
from kvbench.tasks.base import read_text

SAME_FIGURE = ("model", "results", "output", "threads", "device", "data.root")
"""Options that leave a figure's declared settings alone. With any other option it goes to the user's own folder."""
LEFT_OUT = "left out"
"""The key of a CSV's fact that names missing measurements."""


def choose_folder(
    figure: Figure, facts: Mapping[str, object], options: Mapping[str, str], results: str, model: str
) -> Path:
    """Return the folder for a figure whose CSV has these facts.

    With ``output=`` this is always the folder that the user named. Without it, a figure with its declared settings goes
    to the folder of results. Figures of the user's methods and figures with other settings go to the folder of the
    user's own figures. So does a figure that would replace one with other facts. A message says where the last two go.

    options: the command's options by key.
    results, model: the command's results folder and model, given or by default.
    """
    if options.get("output"):
        return Path(options["output"])
    results_folder, users_folder = figure_folder(results, model), own_folder(results, model)
    # figures of the user's methods never go to the folder of results, even if that is empty
    if OWN_METHODS in facts:
        return users_folder
    path = results_folder / f"{figure.id}.csv"
    if path.exists():
        # equal facts mean that both figures show the same data, so replacing the old one loses nothing
        if _can_replace(facts_of(read_text(path, figure.id)), {"figure": figure.id} | dict(facts)):
            return results_folder
        say(f"{path} shows something else and stays: {figure.id} goes to {users_folder}; output=FOLDER names another")
        return users_folder
    # a figure with other settings must not be the first here: the declared one could not replace it later
    settings = " ".join(f"{key}={value}" for key, value in options.items() if key not in SAME_FIGURE)
    if settings:
        say(f"{figure.id} with {settings} goes to {users_folder}; output=FOLDER names another")
        return users_folder
    return results_folder


def _can_replace(old: Mapping[str, str], new: Mapping[str, object]) -> bool:
    # both must show the same, and the new figure may lack measurements only if the old figure does
    return _normalise(old) == _normalise(new) and (LEFT_OUT not in new or LEFT_OUT in old)


def _normalise(facts: Mapping[str, object]) -> dict[str, str]:
    # a fact in a CSV is a text, and a list may stand there as [1, 2] or as 1,2
    return {key: re.sub(r"[\[\]\s]", "", str(value)) for key, value in facts.items() if key != LEFT_OUT}


def redrawn_path(figure: Figure, csv: Path, text: str, results: str, output: str) -> Path:
    """Return the path, without ending, of the pictures that are drawn from a CSV.

    They go to the folder ``output``, else below the folder ``results``, else beside the CSV. An option that the user
    did not give is ''. Raises UsageError if a CSV with other data lies below ``results``.

    csv, text: the path and the content of the CSV.
    """
    if output:
        return Path(output) / figure.id
    if not results:
        return csv.with_suffix("")
    # with output= the user names the folder, and answers for what is in it
    stem = Path(results) / "figures" / figure.id
    beside = stem.with_suffix(".csv")
    if beside.exists() and read_text(beside, figure.id) != text:
        raise UsageError(
            f"--from-csv {csv}: {beside} holds other data, and its picture would no longer show them: give "
            "output=FOLDER, another place"
        )
    return stem
