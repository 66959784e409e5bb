"""Answers that other tools generated: find their files and read them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from kvbench.base.errors import UsageError
from kvbench.base.files import sha256
from kvbench.studies.imports import layouts
from kvbench.studies.imports.base import ImportedAnswer, Predictions, split_task_name
from kvbench.tasks.longbench import TASKS

LAYOUTS = "<dataset>.jsonl of LongBench, predictions.csv of kvpress, samples_*.jsonl of lm-evaluation-harness"
"""The kinds of files that can be read, in words for error messages."""


def find_files(path: Path) -> list[Path]:
    """Return the prediction files at ``path``: the file itself, a folder's files, or else its subfolders' files.

    Raises UsageError if there are none, or ``path`` does not exist, cannot be read or has an unknown layout.
    """
    if path.is_file():
        if _find_layout(path) is None:
            raise UsageError(f"{path} is not a file of predictions ({LAYOUTS})")
        return [path]
    if not path.is_dir():
        raise UsageError(f"there is no folder or file {path}")
    try:
        files_here = _list_files(path)
        # kvpress and lm-evaluation-harness write a folder for each run
        files_below: list[Path] = []
        for folder in sorted(entry for entry in path.iterdir() if entry.is_dir()):
            files_below += _list_files(folder)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    paths = files_here or files_below
    if not paths:
        raise UsageError(f"{path} holds no predictions ({LAYOUTS})")
    return paths


def _list_files(folder: Path) -> list[Path]:
    """Return the prediction files in a folder, but not those in its subfolders, sorted by name."""
    return sorted(path for path in folder.iterdir() if path.is_file() and _find_layout(path) is not None)


def read_predictions(path: Path) -> list[Predictions]:
    """Return the predictions of one file that ``find_files`` returned, one entry for each task in it.

    Raises UsageError, with file, line and reason, if the file cannot be read.
    """
    layout = _find_layout(path)
    # ``find_files`` returns no files of other layouts
    assert layout is not None
    try:
        digest = sha256(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    # a file of kvpress holds all tasks of a run
    answers_by_task: dict[str, list[ImportedAnswer]] = {}
    for task, answer in layout.answers(path):
        answers_by_task.setdefault(task, []).append(answer)
    if not answers_by_task:
        raise UsageError(f"{path} is empty: it must hold at least one answer")
    # LongBench's script writes LongBench-E to pred_e/<model>/
    in_extended_folder = layout is layouts.LONGBENCH and path.parent.parent.name == "pred_e"
    predictions = []
    for task, answers in answers_by_task.items():
        dataset, has_extended_name = split_task_name(task)
        predictions.append(
            Predictions(
                dataset=dataset,
                extended=has_extended_name or in_extended_folder,
                path=path,
                layout=layout.name,
                answers=tuple(answers),
                sha256=digest,
            )
        )
    return predictions


def settle_split(predictions: Sequence[Predictions], split: str) -> list[Predictions]:
    """Decide for each file whether its answers belong to LongBench-E, and return the files with ``extended`` set.

    split: ``standard`` or ``e`` as the user chose, or ``auto`` to decide by the files.

    Tasks that LongBench-E lacks always belong to the standard split. Under ``auto`` a file belongs to LongBench-E if
    its name or folder says so. It also does if all of its answers have lengths, and a file in its folder has more
    answers than the standard split has examples.
    """
    # LongBench-E has more examples of a task than the standard split, and one run writes all its tasks to one folder
    extended_folders = set()
    for file in predictions:
        spec = TASKS.get(file.dataset)
        if spec is not None and spec.extended and len(file.answers) > spec.size:
            extended_folders.add(file.path.parent)
    return [replace(file, extended=_is_extended(file, split, extended_folders)) for file in predictions]


def _is_extended(file: Predictions, split: str, extended_folders: Collection[Path]) -> bool:
    """Return True if a file's answers belong to LongBench-E.

    split: ``standard``, ``e`` or ``auto``.
    extended_folders: the folders with a file that has more answers than the standard split has examples.
    """
    if file.dataset not in TASKS or not TASKS[file.dataset].extended:
        return False
    if split != "auto":
        return split == "e"
    if file.extended:
        return True
    # LongBench-E reports scores by length, so its answers have lengths
    has_lengths = all(answer.length is not None for answer in file.answers)
    return file.path.parent in extended_folders and has_lengths


def _find_layout(path: Path) -> layouts.Layout | None:
    # LAYOUTS are in an order that matters: LongBench's *.jsonl would match lm-evaluation-harness's files, too
    for layout in layouts.LAYOUTS:
        if layout.matches(path):
            return layout
    return None
