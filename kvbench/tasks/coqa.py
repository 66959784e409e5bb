"""CoQA dev set: 7,983 turns of 500 conversations about stories. Source: stanfordnlp.github.io/coqa."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvbench.base.errors import UsageError
from kvbench.base.example import Example
from kvbench.tasks.base import LoadContext, Task, note_own_wording, read_text
from kvbench.tasks.knobs import check_whole
from kvbench.tasks.rows import FileRow, describe_value, parse_json, read_rows

OFFICIAL = "coqa-dev-v1.0.json"
# the official file comes first: it has four references a turn, the hub's table has one
PLACES = (OFFICIAL, "coqa_validation.jsonl")
PROMPT = "Read the story and answer the question about it in a few words.\n\n{story}\n\n"


class DialogueTurn(NamedTuple):
    """One turn of a conversation.

    question: the text of the question.
    answers: the references, the conversation's own first. Equal references count separately in the score.
    """

    question: str
    answers: tuple[str, ...]


def load(context: LoadContext, file: str | None, history: int | str, max_new_tokens: int) -> list[Task]:
    """Return one task with an example per turn: story, earlier turns with their first answers, question.

    file: the official JSON, with up to four references a turn, or the hub's table as JSON Lines, with one. None takes
        the first of PLACES that is there.
    history: the most earlier turns in a prompt, or ``all``.
    max_new_tokens: the most tokens of an answer.

    An answer ends at the beginning of the next ``Q:``. The wording of the prompt is kvbench's own. Raises UsageError
    naming file, place and reason for stories without questions or answers.
    """
    dataset, files = context.dataset, context.files
    check_whole(dataset, "max_new_tokens", max_new_tokens)
    if history != "all":
        check_whole(dataset, "history", history, least=0)
    if file:
        path = files.path(file)
    else:
        # if none is there, ``path`` raises the error that names the official file
        path = files.find_first(*PLACES) or files.path(OFFICIAL)
    examples: list[Example] = []
    for i, row in enumerate(_read_stories(path)):
        examples += _make_examples(row, f"coqa-{i}", history, max_new_tokens)
    if not examples:
        raise UsageError(f"{path} is empty: it must hold at least one story")
    task = Task(
        id=dataset,
        examples=tuple(examples),
        metric="coqa_f1",
        source=f"CoQA dev, {path.name}",
        category="common sense",
        note=note_own_wording(dataset),
        cut_at="\nQ:",
    )
    return [task]


def _make_examples(row: FileRow, default_id: str, history: int | str, max_new_tokens: int) -> Iterator[Example]:
    """Yield an example for each turn of a conversation.

    default_id: the id of a story for which the file has none.
    history: the most earlier turns in a prompt, or ``all``.
    """
    story = PROMPT.format(story=row.text("story").strip())
    turns = list(_read_turns(row))
    story_id = row.name("id", default_id)
    for n, turn in enumerate(turns):
        # a history of ``all`` begins with the first turn
        first_shown = max(0, n - history) if isinstance(history, int) else 0
        # earlier turns show their references as answers, so that examples do not depend on each other's answers
        dialogue = [f"Q: {earlier.question}\nA: {earlier.answers[0]}\n\n" for earlier in turns[first_shown:n]]
        question = f"Q: {turn.question}\nA:"
        yield Example(
            id=f"{story_id}-{n + 1}",
            prompt=story + "".join(dialogue) + question,
            answers=turn.answers,
            max_new_tokens=max_new_tokens,
            question=question,
            meta={"turn": n + 1},
        )


def _read_stories(path: Path) -> Iterator[FileRow]:
    """Yield one row per conversation, from CoQA's official JSON file or from the hub's table as JSON Lines."""
    if path.suffix != ".json":
        yield from read_rows(path)
        return
    content = parse_json(path, place="", text=read_text(path, "dataset=coqa"))
    if not isinstance(content, dict):
        raise UsageError(f"{path}: must be a JSON object with a list under 'data', got {describe_value(content)}")
    yield from FileRow(path, "top level", content).records("data")


def _read_turns(row: FileRow) -> Iterator[DialogueTurn]:
    """Yield the turns of a conversation. Raises UsageError for a turn without question or answer."""
    # the n-th answer of every annotator belongs to the n-th question
    questions, answers_by_annotator = _read_columns(row)
    for n, question in enumerate(questions):
        if not question.strip():
            raise row.wrong(f"turn {n + 1} has no question")
        answers = []
        for column in answers_by_annotator:
            # an annotator may have fewer answers than the conversation has turns, and some may be empty
            if n < len(column) and column[n].strip():
                answers.append(column[n].strip())
        if not answers:
            raise row.wrong(f"turn {n + 1} has no answer")
        yield DialogueTurn(question.strip(), tuple(answers))


def _read_columns(row: FileRow) -> tuple[list[str], list[list[str]]]:
    """Return (questions, one list of answers per annotator). The conversation's own answers come first."""
    answers = row.value("answers")
    if isinstance(answers, dict):
        # the hub's table has an object of lists where the official file has a list of objects
        answer_columns = FileRow(row.file, f"{row.place}, answers", answers)
        return list(row.texts("questions")), [list(answer_columns.texts("input_text"))]
    answers_by_annotator = [_read_turn_texts(row, "answers")]
    if "additional_answers" in row:
        additional = row.value("additional_answers")
        if not isinstance(additional, dict):
            raise row.wrong(f"'additional_answers' must be an object by annotator, got {describe_value(additional)}")
        annotators = FileRow(row.file, f"{row.place}, additional_answers", additional)
        # the keys are "0", "1" and "2", in any order; sorted, so that the references have the same order everywhere
        for annotator in sorted(additional):
            answers_by_annotator.append(_read_turn_texts(annotators, annotator))
    return _read_turn_texts(row, "questions"), answers_by_annotator


def _read_turn_texts(row: FileRow, key: str) -> list[str]:
    """Return the texts of the turns under ``key``. Texts may be empty. Raises UsageError if a value is no text."""
    values = [turn.value("input_text") for turn in row.records(key)]
    for value in values:
        if not isinstance(value, str):
            raise row.wrong(f"'input_text' in {key!r} must be text, got {describe_value(value)}")
    return values
