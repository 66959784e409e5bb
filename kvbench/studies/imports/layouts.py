"""Readers of the predictions of other tools. To add a tool: a function that reads a file's answers, and an entry here.

LongBench: ``<dataset>.jsonl`` with pred, answers, all_classes and length a line (github.com/THUDM/LongBench pred.py,
which many repositories follow).

lm-evaluation-harness: ``samples_<task>_<time>.jsonl``, one object a line with doc, target and filtered_resps, per
document and filter; those of the first filter are read (github.com/EleutherAI/lm-evaluation-harness
lm_eval/loggers/evaluation_tracker.py, lm_eval/evaluator.py).

kvpress: ``predictions.csv``, the columns of its dataset but the context, and ``predicted_answer``. pandas writes lists
as numpy prints them (``['a' 'b']``) and a missing answer as an empty cell. The same records are read from JSON: a list
of objects, or columns as ``DataFrame.to_json`` writes them. Files of early versions, which hold the column
``predicted_answer`` alone, cannot be scored (github.com/NVIDIA/kvpress evaluation/evaluate.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.base.errors import UsageError
from kvbench.base.files import check_ends
from kvbench.studies.imports.base import ImportedAnswer, classes, length, text, texts
from kvbench.tasks.rows import FileRow, kind, parse, parse_csv, read_lines

PREDICTION = "predicted_answer"
_SAMPLES = re.compile(r"samples_(?P<task>.+?)(_\d{4}-\d\d-\d\dT[\d.:-]+)?")


@dataclass(frozen=True)
class Layout:
    """A tool's files: whose name ``matches``, and their ``answers``, each with the tool's name of its task."""

    name: str
    matches: Callable[[Path], bool]
    answers: Callable[[Path], Iterator[tuple[str, ImportedAnswer]]]


def longbench(path: Path) -> Iterator[tuple[str, ImportedAnswer]]:
    """Yield (task, answer) for each line of a predictions file written by LongBench, which is named after its task."""
    for row in read_lines(path):
        yield path.stem, _answer(row, text(row, "pred"), texts(row, "answers"))


def lm_eval(path: Path) -> Iterator[tuple[str, ImportedAnswer]]:
    """Yield (task, answer) for each line of an lm-evaluation-harness file that belongs to the file's first filter."""
    match = _SAMPLES.fullmatch(path.stem)
    chosen = None
    for row in read_lines(path):
        of_filter = row.values.get("filter", "none")
        chosen = of_filter if chosen is None else chosen
        if of_filter != chosen:
            continue
        doc = row.value("doc")
        if not isinstance(doc, dict):
            raise row.wrong(f"'doc' must be an object, got {kind(doc)}")
        inner = FileRow(path, f"{row.place}, doc", doc)
        references = texts(inner, "answers") if "answers" in doc else texts(row, "target")
        response: Any = row.value("filtered_resps")
        while isinstance(response, list) and response:
            response = response[0]
        if not isinstance(response, str):
            raise row.wrong(f"'filtered_resps' must hold a generated text, got {kind(row.value('filtered_resps'))}")
        yield match["task"] if match else path.stem, _answer(inner, response, references, row.place)


def kvpress(path: Path) -> Iterator[tuple[str, ImportedAnswer]]:
    """Yield (task, answer) for each record of a kvpress file, CSV or JSON.

    Its folder is named ``dataset__task__model__press__ratio``, which gives the task where no column does.
    """
    parts = path.parent.name.split("__")
    folder_task = parts[1] if len(parts) > 3 else path.stem
    for row in _json(path) if path.suffix == ".json" else parse_csv(path, _text(path), by_line=True):
        prediction, references = text(row, PREDICTION), texts(row, "answers" if "answers" in row.values else "answer")
        yield str(row.values.get("task") or folder_task), _answer(row, prediction, references)


LONGBENCH = Layout("longbench", lambda path: path.suffix == ".jsonl", longbench)
LAYOUTS = (
    Layout("lm-evaluation-harness", lambda path: path.suffix == ".jsonl" and path.stem.startswith("samples_"), lm_eval),
    Layout(
        "kvpress",
        lambda path: path.suffix == ".csv" or (path.suffix == ".json" and path.stem.startswith("predictions")),
        kvpress,
    ),
    LONGBENCH,
)


def unrelated(path: Path) -> bool:
    """Return True for a ``.csv`` of another name than kvpress's that has no column of answers."""
    if path.suffix != ".csv" or path.stem.startswith("predictions"):
        return False
    try:
        check_ends(path)
        with path.open("rb") as lines:
            return PREDICTION.encode() not in lines.readline()
    except OSError:
        return False


def _answer(row: FileRow, prediction: str, references: tuple[str, ...], place: str = "") -> ImportedAnswer:
    return ImportedAnswer(prediction, references, classes(row), length(row), place or row.place)


def _text(path: Path) -> str:
    check_ends(path)
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{path}, line {line}: not UTF-8 text (byte {error.start} of the file)") from None


def _json(path: Path) -> Iterator[FileRow]:
    records = content = parse(path, "", _text(path))
    if isinstance(content, dict) and content and all(isinstance(c, dict) for c in content.values()):
        # {column: {index: value}}
        indices = next(iter(content.values()))
        records = [{name: column[i] for name, column in content.items() if i in column} for i in indices]
    if not isinstance(records, list) or not all(isinstance(r, dict) for r in records):
        raise UsageError(f"{path}: must hold a list of objects, or columns, got {kind(content)}")
    for number, record in enumerate(records, start=1):
        if record.get(PREDICTION, "") is None:
            record[PREDICTION] = ""
        yield FileRow(path, f"entry {number}", record)
