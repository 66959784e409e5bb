"""Any prompts with references: one JSON object a line."""

from __future__ import annotations

from pathlib import Path

from kvbench.base.errors import UsageError
from kvbench.base.example import Example, Turn
from kvbench.tasks import metrics
from kvbench.tasks.base import Task, Tokenizer
from kvbench.tasks.rows import FileRow, is_count, read_lines


def load(
    dataset: str,
    tokenizer: Tokenizer | None,
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
) -> list[Task]:
    """Return one task, ``file/<name of the file>``, with an example for each line that is not blank.

    A line holds the prompt, or a context and a question, a reference or a list of them, and maybe an id, a label list
    and its own limit of new tokens, under the given keys. Or it holds a context and a list of questions, each an object
    with a question and its references. Raises UsageError naming file, line and reason for anything else.
    """
    if not path:
        raise UsageError(f"dataset {dataset} reads prompts from a file: give path=FILE.jsonl")
    scorer = metrics.metric(metric)
    if not is_count(max_new_tokens):
        raise UsageError(f"dataset.{dataset}.max_new_tokens={max_new_tokens!r} is not possible: a whole number from 1")
    file = Path(path).expanduser()
    examples: dict[str, Example] = {}
    places: dict[str, str] = {}
    for row in read_lines(file, " (set prompt_key=, or context_key= and question_key=, and answers_key=)"):
        name = row.name(id_key, row.place.replace(" ", "-"))
        if name in examples:
            raise row.wrong(f"its id {name!r} is that of {places[name]}")
        classes = row.texts(classes_key) if classes_key in row else ()
        if scorer.needs_classes and not classes:
            raise row.wrong(f"metric {metric} needs a list of labels under the key {classes_key!r}")
        places[name] = row.place
        turns = _turns(row, questions_key, question_key, answers_key)
        if turns and context_key not in row:
            raise row.wrong(f"{questions_key!r} needs the context that they are asked of, under {context_key!r}")
        prompt, question = (row.text(context_key), "") if turns else _prompt(row, prompt_key, context_key, question_key)
        examples[name] = Example(
            id=name,
            prompt=prompt,
            question=question,
            answers=() if turns else row.texts(answers_key),
            max_new_tokens=row.count(max_new_tokens_key, max_new_tokens),
            classes=classes,
            turns=turns,
        )
        if bool(turns) != bool(next(iter(examples.values())).turns):
            raise row.wrong(f"all lines have {questions_key!r}, or none has: put the others into a file of their own")
    if not examples:
        raise UsageError(f"{file} is empty: it must hold a JSON object a line")
    return [Task(f"{dataset}/{file.stem}", tuple(examples.values()), metric, source=file.name)]


def _turns(row: FileRow, questions_key: str, question_key: str, answers_key: str) -> tuple[Turn, ...]:
    """Return the questions that a line asks of its context, () if it asks but one."""
    questions = row.records(questions_key) if questions_key in row else []
    return tuple(Turn(q.text(question_key), q.texts(answers_key)) for q in questions)


def _prompt(row: FileRow, prompt_key: str, context_key: str, question_key: str) -> tuple[str, str]:
    """Return (prompt of a line, question at its end, '' if the line names none)."""
    if prompt_key not in row and context_key in row:
        question = row.text(question_key)
        return row.text(context_key) + question, question
    prompt, end = row.text(prompt_key), row.values.get(question_key)
    return prompt, end if isinstance(end, str) and prompt.endswith(end) else ""
