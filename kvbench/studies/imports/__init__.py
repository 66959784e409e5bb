"""Answers that other tools generated: find their files and read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvbench.base.errors import UsageError
from kvbench.base.files import sha256
from kvbench.studies.imports import layouts
from kvbench.studies.imports.base import ImportedAnswer, Predictions, dataset_of
from kvbench.tasks.longbench import TASKS

LAYOUTS = "<dataset>.jsonl of LongBench, predictions.csv of kvpress, samples_*.jsonl of lm-evaluation-harness"


def find(path: Path) -> list[Path]:
    """Return the prediction files at ``path``: the file itself, those of a folder, or else those of its subfolders.

    Raises UsageError if there are none, or ``path`` does not exist, cannot be read or has an unknown layout.
    """
    if path.is_file():
        if not _layout(path):
            raise UsageError(f"{path} is not a file of predictions ({LAYOUTS})")
        return [path]
    if not path.is_dir():
        raise UsageError(f"there is no folder or file {path}")
    try:
        folders = [path, *sorted(f for f in path.iterdir() if f.is_dir())]
        files = [sorted(f for f in folder.iterdir() if f.is_file() and _layout(f)) for folder in folders]
        paths = files[0] or [f for inner in files[1:] for f in inner]
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    if not paths:
        raise UsageError(f"{path} holds no predictions ({LAYOUTS})")
    return paths


def read(path: Path) -> list[Predictions]:
    """Return the predictions of one file that ``find`` returned, one entry for each task in it.

    Raises UsageError, with file, line and reason, if the file cannot be read.
    """
    layout = _layout(path)
    assert layout is not None
    try:
        digest = sha256(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    answers_by_task: dict[str, list[ImportedAnswer]] = {}
    for task, answer in layout.answers(path):
        answers_by_task.setdefault(task, []).append(answer)
    if not answers_by_task:
        raise UsageError(f"{path} is empty: it must hold at least one answer")
    # LongBench's script writes LongBench-E to pred_e/<model>/
    of_e = layout is layouts.LONGBENCH and path.parent.parent.name == "pred_e"
    return [
        Predictions(dataset, extended or of_e, path, layout.name, tuple(answers), digest)
        for task, answers in answers_by_task.items()
        for dataset, extended in (dataset_of(task),)
    ]


def settle_split(predictions: Sequence[Predictions], split: str) -> list[Predictions]:
    """Return the predictions with ``extended`` set by ``split`` (standard, e), or under ``auto`` by the files.

    Tasks that LongBench-E lacks are always of the standard split. A folder is also of LongBench-E where one of its
    files has more answers than the standard split has examples, and all have lengths.
    """

    def outgrows_standard(p: Predictions) -> bool:
        spec = TASKS.get(p.dataset)
        return spec is not None and spec.extended and len(p.answers) > spec.size

    extended_folders = {p.path.parent for p in predictions if outgrows_standard(p)}
    results = []
    for p in predictions:
        has_extended = p.dataset in TASKS and TASKS[p.dataset].extended
        extended = p.extended or (p.path.parent in extended_folders and all(a.length is not None for a in p.answers))
        results.append(replace(p, extended=has_extended and (extended if split == "auto" else split == "e")))
    return results


def _layout(path: Path) -> layouts.Layout | None:
    return next((layout for layout in layouts.LAYOUTS if layout.matches(path)), None)
