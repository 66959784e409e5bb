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

from kvbench.base.errors import UsageError
from kvbench.base.files import check_ends
from kvbench.studies.imports.base import ImportedAnswer, read_classes, read_length, read_text, read_texts
from kvbench.tasks.rows import FileRow, describe_value, parse_csv, parse_json, read_lines

PREDICTION = "predicted_answer"
"""kvpress's column of answers."""
# lm-evaluation-harness puts the time of the run behind the task: samples_qasper_2024-05-01T12-30-00.123456
_SAMPLES = re.compile(r"samples_(?P<task>.+?)(_\d{4}-\d\d-\d\dT[\d.:-]+)?")
# kvpress writes the ratio, or the threshold of some presses, with two digits
_RATIO = re.compile(r"-?\d+\.\d\d")


@dataclass(frozen=True)
class Layout:
    """The format of one tool's files of predictions.

    name: the tool's name.
    matches: returns True for a path with the name of one of the tool's files.
    answers: yields (the tool's name of the task, answer) for each answer of a file.
    """

    name: str
    matches: Callable[[Path], bool]
    answers: Callable[[Path], Iterator[tuple[str, ImportedAnswer]]]


def read_longbench(path: Path) -> Iterator[tuple[str, ImportedAnswer]]:
    """Yield (task, answer) for each line of LongBench's predictions file. The file is named after its task."""
    for row in read_lines(path):
        yield path.stem, _make_answer(row, read_text(row, "pred"), read_texts(row, "answers"))


def read_lm_eval(path: Path) -> Iterator[tuple[str, ImportedAnswer]]:
    """Yield (task, answer) for each line of an lm-evaluation-harness file that belongs to the file's first filter."""
    match = _SAMPLES.fullmatch(path.stem)
    task = match["task"] if match is not None else path.stem
    first_filter = None
    for row in read_lines(path):
        # a document has a line for each filter of the task, such as strict-match and flexible-extract
        filter_name = row.values.get("filter", "none")
        if first_filter is None:
            first_filter = filter_name
        if filter_name != first_filter:
            continue
        doc = row.value("doc")
        if not isinstance(doc, dict):
            raise row.wrong(f"'doc' must be an object, got {describe_value(doc)}")
        doc_row = FileRow(path, f"{row.place}, doc", doc)
        # ``target`` is the one reference that the task's template chose; LongBench's documents have all references
        if "answers" in doc:
            references = read_texts(doc_row, "answers")
        else:
            references = read_texts(row, "target")
        yield task, _make_answer(doc_row, _read_response(row), references, row.place)


def _read_response(row: FileRow) -> str:
    """Return the generated text in a line of lm-evaluation-harness. Raises UsageError if there is none."""
    response = row.value("filtered_resps")
    # a filter returns a text, or a list of texts for several samples of one document, of which the first is read
    while isinstance(response, list) and response:
        response = response[0]
    if not isinstance(response, str):
        raise row.wrong(
            f"'filtered_resps' must hold a generated text, got {describe_value(row.value('filtered_resps'))}"
        )
    return response


def read_kvpress(path: Path) -> Iterator[tuple[str, ImportedAnswer]]:
    """Yield (task, answer) for each record of a kvpress file, CSV or JSON.

    If no column gives the task, the folder's name does: ``dataset__task__model__press__ratio``, or for a data set of
    one task ``dataset__model__press__ratio``. In a folder of another name, the file's name does.
    """
    folder_task = _parse_folder_name(path.parent.name) or path.stem
    if path.suffix == ".json":
        rows = _read_json(path)
    else:
        rows = parse_csv(path, _read_text(path), by_line=True)
    for row in rows:
        # datasets with several references have the column "answers", those with one have "answer"
        column = "answers" if "answers" in row.values else "answer"
        prediction, references = read_text(row, PREDICTION), read_texts(row, column)
        yield str(row.values.get("task") or folder_task), _make_answer(row, prediction, references)


def _parse_folder_name(name: str) -> str:
    """Return the task in the name of a kvpress folder, '' for a folder of another name."""
    parts = name.split("__")
    if len(parts) <= 3:
        return ""
    dataset, task, _, ratio_or_press = parts[:4]
    # a data set of one task has no part for it, and the ratio then follows in the fourth place
    if _RATIO.fullmatch(ratio_or_press):
        return dataset
    return task


def _is_longbench(path: Path) -> bool:
    return path.suffix == ".jsonl"


def _is_lm_eval(path: Path) -> bool:
    return path.suffix == ".jsonl" and path.stem.startswith("samples_")


def _is_kvpress(path: Path) -> bool:
    return path.suffix == ".csv" or (path.suffix == ".json" and path.stem.startswith("predictions"))


LONGBENCH = Layout("longbench", _is_longbench, read_longbench)
# LongBench's layout goes last, since it takes every .jsonl
LAYOUTS = (
    Layout("lm-evaluation-harness", _is_lm_eval, read_lm_eval),
    Layout("kvpress", _is_kvpress, read_kvpress),
    LONGBENCH,
)


def is_unrelated(path: Path) -> bool:
    """Return True for a ``.csv`` file without answers.

    Such a file has another name than kvpress's predictions, and no column of answers.
    """
    if path.suffix != ".csv" or path.stem.startswith("predictions"):
        return False
    # the first line of a CSV names its columns
    try:
        check_ends(path)
        with path.open("rb") as lines:
            return PREDICTION.encode() not in lines.readline()
    except OSError:
        # a file that cannot be read is an error, which its reader reports
        return False


def _make_answer(row: FileRow, prediction: str, references: tuple[str, ...], place: str = "") -> ImportedAnswer:
    """Return an imported answer with the classes and the length that its row states.

    place: the answer's position in its file; '' to take the row's own.
    """
    return ImportedAnswer(
        prediction=prediction,
        references=references,
        classes=read_classes(row),
        length=read_length(row),
        place=place or row.place,
    )


def _read_text(path: Path) -> str:
    """Return the text of a file. Raises UsageError with the line and the byte where it is not UTF-8."""
    check_ends(path)
    raw = path.read_bytes()
    try:
        # -sig drops a byte order mark, which some programs write
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{path}, line {line}: not UTF-8 text (byte {error.start} of the file)") from None


def _read_json(path: Path) -> Iterator[FileRow]:
    """Yield the records of a JSON file: a list of objects, or columns. Raises UsageError for anything else."""
    content = parse_json(path, place="", text=_read_text(path))
    records = content
    # DataFrame.to_json writes {column: {index: value}}
    if isinstance(content, dict) and content and all(isinstance(column, dict) for column in content.values()):
        first_column, *_ = content.values()
        records = []
        for index in first_column:
            records.append({name: column[index] for name, column in content.items() if index in column})
    if not isinstance(records, list) or not all(isinstance(r, dict) for r in records):
        raise UsageError(f"{path}: must hold a list of objects, or columns, got {describe_value(content)}")
    for number, record in enumerate(records, start=1):
        # pandas writes an empty answer as null. A record without the key stays without it, so that an error names it
        if record.get(PREDICTION, "") is None:
            record[PREDICTION] = ""
        yield FileRow(path, f"entry {number}", record)
