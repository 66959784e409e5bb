"""CoQA dev set: 7,983 turns of 500 conversations about stories. Source: stanfordnlp.github.io/coqa."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvbench.base.errors import UsageError
from kvbench.base.example import Example
from kvbench.tasks.base import Task, own_wording, read_text
from kvbench.tasks.knobs import whole
from kvbench.tasks.rows import FileRow, kind, parse, read
from kvbench.tasks.source import Files

OFFICIAL = "coqa-dev-v1.0.json"
PLACES = (OFFICIAL, "coqa_validation.jsonl")
PROMPT = "Read the story and answer the question about it in a few words.\n\n{story}\n\n"


class DialogueTurn(NamedTuple):
    """A question and its references, the conversation's own first; equal ones count separately in the score."""

    question: str
    answers: tuple[str, ...]


def load(dataset: str, files: Files, file: str | None, history: int | str, max_new_tokens: int) -> list[Task]:
    """Return one task with an example per turn: story, ``history`` earlier turns with their first answers, question.

    ``file`` is the official JSON, with up to four references a turn, or, as JSON Lines, the hub's table, which has one;
    None takes the first of PLACES that there is. An answer ends where the next ``Q:`` begins. The wording of the prompt
    is ours. Raises UsageError naming file, place and reason for stories without questions or answers.
    """
    whole(dataset, "max_new_tokens", max_new_tokens)
    if history != "all":
        whole(dataset, "history", history, least=0)
    path = files.path(file) if file else files.first(*PLACES) or files.path(OFFICIAL)
    examples = []
    for i, row in enumerate(_stories(path)):
        prompt, turns = PROMPT.format(story=row.text("story").strip()), list(_turns(row))
        for n, turn in enumerate(turns):
            earlier = turns[:n] if isinstance(history, str) else turns[max(0, n - history) : n]
            question = f"Q: {turn.question}\nA:"
            examples.append(
                Example(
                    id=f"{row.name('id', f'coqa-{i}')}-{n + 1}",
                    prompt=prompt + "".join(f"Q: {t.question}\nA: {t.answers[0]}\n\n" for t in earlier) + question,
                    answers=turn.answers,
                    max_new_tokens=max_new_tokens,
                    question=question,
                    meta={"turn": n + 1},
                )
            )
    if not examples:
        raise UsageError(f"{path} is empty: it must hold at least one story")
    source = f"CoQA dev, {path.name}"
    return [Task(dataset, tuple(examples), "coqa_f1", source, "common sense", own_wording(dataset), cut_at="\nQ:")]


def _stories(path: Path) -> Iterator[FileRow]:
    if path.suffix != ".json":
        yield from read(path)
        return
    content = parse(path, "", read_text(path, "dataset=coqa"))
    if not isinstance(content, dict):
        raise UsageError(f"{path}: must be a JSON object with a list under 'data', got {kind(content)}")
    yield from FileRow(path, "top level", content).records("data")


def _turns(row: FileRow) -> Iterator[DialogueTurn]:
    questions, references = _columns(row)
    for n, question in enumerate(questions):
        answers = tuple(a.strip() for column in references for a in column[n : n + 1] if a.strip())
        if not question.strip() or not answers:
            raise row.wrong(f"turn {n + 1} has no {'answer' if question.strip() else 'question'}")
        yield DialogueTurn(question.strip(), answers)


def _columns(row: FileRow) -> tuple[list[str], list[list[str]]]:
    """Return (questions, one list of answers per annotator, the conversation's own first)."""
    answers = row.value("answers")
    if isinstance(answers, dict):
        answer_columns = FileRow(row.file, f"{row.place}, answers", answers)
        return list(row.texts("questions")), [list(answer_columns.texts("input_text"))]
    references = [_turn_texts(row, "answers")]
    if "additional_answers" in row:
        additional = row.value("additional_answers")
        if not isinstance(additional, dict):
            raise row.wrong(f"'additional_answers' must be an object by annotator, got {kind(additional)}")
        annotators = FileRow(row.file, f"{row.place}, additional_answers", additional)
        references += [_turn_texts(annotators, key) for key in sorted(additional)]
    return _turn_texts(row, "questions"), references


def _turn_texts(row: FileRow, key: str) -> list[str]:
    values = [turn.value("input_text") for turn in row.records(key)]
    for value in values:
        if not isinstance(value, str):
            raise row.wrong(f"'input_text' in {key!r} must be text, got {kind(value)}")
    return values
