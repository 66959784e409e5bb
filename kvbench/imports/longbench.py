"""LongBench's own prediction files: ``<dataset>.jsonl`` with pred, answers, all_classes and length a line.

Source: github.com/THUDM/LongBench pred.py, which many other repositories follow.
"""

from __future__ import annotations

from pathlib import Path

from kvbench.imports import base
from kvbench.imports.base import ImportedAnswer, Predictions
from kvbench.tasks.rows import read_lines

LAYOUT = "longbench"


def matches(path: Path) -> bool:
    """Whether a file's name is one of this layout."""
    return path.suffix == ".jsonl"


def read(path: Path, sha256: str) -> list[Predictions]:
    """The answers of one file; UsageError naming file, line and reason for a damaged one."""
    answers = tuple(
        ImportedAnswer(
            base.text(row, "pred"), base.texts(row, "answers"), base.classes(row), base.length(row), row.place
        )
        for row in read_lines(path)
    )
    if not answers:
        raise base.no_answers(path)
    dataset, extended = base.dataset_of(path.stem)
    # LongBench's script writes LongBench-E to pred_e/<model>/
    return [Predictions(dataset, extended or path.parent.parent.name == "pred_e", path, LAYOUT, answers, sha256)]
