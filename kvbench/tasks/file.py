"""Any prompts with references, from a file with one JSON object a line."""

from __future__ import annotations

from pathlib import Path

from kvbench.base.errors import UsageError
from kvbench.base.example import Example, Turn
from kvbench.tasks import metrics
from kvbench.tasks.base import LoadContext, Task, limit_questions
from kvbench.tasks.rows import FileRow, is_count, read_lines


def load(
    context: LoadContext,
    path: str | None,
    metric: str,
    max_new_tokens: int,
    prompt_key: str,
    context_key: str,
    question_key: str,
    answers_key: str,
    id_key: str,
    classes_key: str,
    max_new_tokens_key: str,
    questions_key: str,
    questions: int | None = None,
) -> list[Task]:
    """Return one task, ``file/<name of the file>``, with an example for each line that is not blank.

    A line holds a prompt, or a context and a question, and a reference or a list of references. It may have an id, a
    list of labels and its own limit of new tokens. A line may also hold a context and a list of questions, each an
    object with a question and its references. The arguments name the keys of all these. Raises UsageError naming file,
    line and reason for any other content.
    """
    dataset = context.dataset
    if not path:
        raise UsageError(f"dataset {dataset} reads prompts from a file: give path=FILE.jsonl")
    scorer = metrics.metric(metric)
    # lines without a limit of their own get this one, so check it before they are read
    if not is_count(max_new_tokens):
        raise UsageError(f"dataset.{dataset}.max_new_tokens={max_new_tokens!r} is not possible: a whole number from 1")
    file = Path(path).expanduser()
    # ids are the keys, so that a repeated id is reported at the line that repeats it
    examples: dict[str, Example] = {}
    places: dict[str, str] = {}
    for row in read_lines(file, " (set prompt_key=, or context_key= and question_key=, and answers_key=)"):
        name = row.name(id_key, row.place.replace(" ", "-"))
        if name in examples:
            raise row.wrong(f"its id {name!r} is that of {places[name]}")
        classes: tuple[str, ...] = ()
        if classes_key in row:
            classes = row.texts(classes_key)
        if scorer.needs_classes and not classes:
            raise row.wrong(f"metric {metric} needs a list of labels under the key {classes_key!r}")
        places[name] = row.place
        turns = _read_turns(row, questions_key, question_key, answers_key)
        if turns:
            if context_key not in row:
                raise row.wrong(f"{questions_key!r} needs the context that they are asked of, under {context_key!r}")
            # the turns hold question and references
            prompt, question = row.text(context_key), ""
            answers: tuple[str, ...] = ()
        else:
            prompt, question = _read_prompt(row, prompt_key, context_key, question_key)
            answers = row.texts(answers_key)
        examples[name] = Example(
            id=name,
            prompt=prompt,
            question=question,
            answers=answers,
            max_new_tokens=row.count(max_new_tokens_key, max_new_tokens),
            classes=classes,
            turns=turns,
        )
        # a task is scored either by prompts or by contexts; the first line decides
        first_example = next(iter(examples.values()))
        if bool(turns) != bool(first_example.turns):
            raise row.wrong(f"all lines have {questions_key!r}, or none has: put the others into a file of their own")
    if not examples:
        raise UsageError(f"{file} is empty: it must hold a JSON object a line")
    task = Task(f"{dataset}/{file.stem}", tuple(examples.values()), metric, source=file.name)
    return limit_questions(dataset, [task], questions)


def _read_turns(row: FileRow, questions_key: str, question_key: str, answers_key: str) -> tuple[Turn, ...]:
    """Return a line's questions about its context, or () for a line with a single prompt."""
    if questions_key not in row:
        return ()
    turns = []
    for question in row.records(questions_key):
        turns.append(Turn(question.text(question_key), question.texts(answers_key)))
    return tuple(turns)


def _read_prompt(row: FileRow, prompt_key: str, context_key: str, question_key: str) -> tuple[str, str]:
    """Return (prompt of a line, question at its end, '' if the line names none)."""
    if prompt_key not in row and context_key in row:
        question = row.text(question_key)
        return row.text(context_key) + question, question
    prompt, end = row.text(prompt_key), row.values.get(question_key)
    if isinstance(end, str) and prompt.endswith(end):
        return prompt, end
    # a question that does not end the prompt cannot be withheld
    return prompt, ""
