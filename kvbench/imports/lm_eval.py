"""lm-evaluation-harness's ``samples_<task>_<time>.jsonl``: one object a line with doc, target and filtered_resps.

A file holds one line per document and filter; the lines of its first filter are read. Source:
github.com/EleutherAI/lm-evaluation-harness lm_eval/loggers/evaluation_tracker.py, lm_eval/evaluator.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from kvbench.imports import base
from kvbench.imports.base import ImportedAnswer, Predictions
from kvbench.tasks.rows import FileRow, kind, read_lines

LAYOUT = "lm-evaluation-harness"
_NAME = re.compile(r"samples_(?P<task>.+?)(_\d{4}-\d\d-\d\dT[\d.:-]+)?")


def matches(path: Path) -> bool:
    """Whether a file's name is one of this layout."""
    return path.suffix == ".jsonl" and path.stem.startswith("samples_")


def read(path: Path, sha256: str) -> list[Predictions]:
    """The answers of one file; UsageError naming file, line and reason for a damaged one."""
    answers, chosen = [], None
    for row in read_lines(path):
        chosen = row.values.get("filter", "none") if chosen is None else chosen
        if row.values.get("filter", "none") != chosen:
            continue
        doc = row.value("doc")
        if not isinstance(doc, dict):
            raise row.wrong(f"'doc' must be an object, got {kind(doc)}")
        inner = FileRow(path, f"{row.place}, doc", doc)
        references = base.texts(inner, "answers") if "answers" in doc else base.texts(row, "target")
        answers.append(ImportedAnswer(_response(row), references, base.classes(inner), base.length(inner), row.place))
    if not answers:
        raise base.no_answers(path)
    match = _NAME.fullmatch(path.stem)
    dataset, extended = base.dataset_of(match["task"] if match else path.stem)
    return [Predictions(dataset, extended, path, LAYOUT, tuple(answers), sha256)]


def _response(row: FileRow) -> str:
    """The first filtered response of a line."""
    value: Any = row.value("filtered_resps")
    while isinstance(value, list) and value:
        value = value[0]
    if not isinstance(value, str):
        raise row.wrong(f"'filtered_resps' must hold a generated text, got {kind(row.value('filtered_resps'))}")
    return value
