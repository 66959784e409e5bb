"""TheoremQA: 747 questions that need no picture, of 800. Source: github.com/TIGER-AI-Lab/TheoremQA (MIT)."""

from __future__ import annotations

import json

from kvbench.example import Example
from kvbench.metrics.theorem import parse_reference
from kvbench.tasks.base import Task, own_wording
from kvbench.tasks.knobs import whole
from kvbench.tasks.rows import FileRow, kind, read
from kvbench.tasks.source import Files

PROMPT = (
    "Answer the question below. Its answer is a number, a list of numbers like [1, 2], True or False, or an option "
    "like (a). End with the sentence: The answer is X.\n\n"
    "Problem: {question}\n\nSolution:"
)
TYPES = ("integer", "float", "bool", "option", "list of integer", "list of float")
PLACES = ("theoremqa_test.json", "theoremqa_test.jsonl")


def load(dataset: str, files: Files, file: str | None, max_new_tokens: int) -> list[Task]:
    """One task; questions with a picture are skipped and counted in its note. The words before ``Problem:`` are ours.

    ``file`` is the official JSON list or, as JSON Lines, the hub's table, whose answers are text; None takes the
    first of PLACES that there is. The kind of each answer, which decides how it is compared, is written into the
    reference: ``3`` an integer, ``3.0`` a float. Raises UsageError naming file, entry and reason for a record without
    a question, with an unknown type or with an answer that is not of its type.
    """
    whole(dataset, "max_new_tokens", max_new_tokens)
    path = files.path(file) if file else files.first(*PLACES) or files.path(PLACES[0])
    examples: list[Example] = []
    rows = list(read(path))
    for i, row in enumerate(rows):
        if _has_picture(row):
            continue
        examples.append(
            Example(
                id=row.name("id", f"theoremqa-{i}"),
                prompt=PROMPT.format(question=row.text("Question").strip()),
                answers=(_reference(row),),
                max_new_tokens=max_new_tokens,
                meta={"answer_type": row.text("Answer_type")},
            )
        )
    skipped = len(rows) - len(examples)
    note = own_wording(
        dataset, f"{skipped} of {len(rows)} questions need a picture and are left out" if skipped else ""
    )
    return [Task(dataset, tuple(examples), "theorem", f"TheoremQA, {path.name}", "mathematics", note)]


def _has_picture(row: FileRow) -> bool:
    return row.value("Picture") not in (None, "", "NONE")


def _reference(row: FileRow) -> str:
    of, answer = row.text("Answer_type"), row.value("Answer")
    if of not in TYPES:
        raise row.wrong(f"'Answer_type' must be one of {', '.join(TYPES)}, got {kind(of)}")
    reference = answer if isinstance(answer, str) else json.dumps(answer)
    value = parse_reference(reference)
    if of == "float" and type(value) is int:
        value = float(value)
        reference = str(value)
    if not _fits(of, value):
        raise row.wrong(f"'Answer' must be of the type {of!r}, got {kind(answer)}")
    return str(value) if isinstance(value, bool) else reference


def _fits(of: str, value: object) -> bool:
    if of.startswith("list of "):
        return isinstance(value, tuple)
    return type(value) is {"integer": int, "float": float, "bool": bool, "option": str}[of]
