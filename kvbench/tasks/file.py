"""Any prompts with references, from a file with one JSON object a line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvbench.base.errors import UsageError
from kvbench.base.example import Example, Turn
from kvbench.tasks import metrics
from kvbench.tasks.base import LoadContext, Task, limit_questions
from kvbench.tasks.rows import FileRow, is_count, read_lines


@dataclass(frozen=True, kw_only=True)
class LineKeys:
    """The keys under which a line of the file holds its parts.

    prompt: a whole prompt.
    context, question: a prompt in two parts. ``question`` is also the key in each entry of ``questions``.
    answers: the reference, or a list of references.
    id: the name of the example.
    classes: a list of labels, for metrics that need it.
    max_new_tokens: the line's own limit of new tokens.
    questions: a list of questions about one context.
    """

    prompt: str
    context: str
    question: str
    answers: str
    id: str
    classes: str
    max_new_tokens: str
    questions: str


def load(
    context: LoadContext,
    path: str | None,
    metric: str,
    max_new_tokens: int,
    questions: int | None = None,
    **names: str,
) -> list[Task]:
    """Return one task, ``file/<name of the file>``, with an example for each line that is not blank.

    A line holds a prompt, or a context and a question, and a reference or a list of references. It may have an id, a
    list of labels and its own limit of new tokens. A line may also hold a context and a list of questions, each an
    object with a question and its references. Other lines are left out, with file, line and reason in the task. Raises
    UsageError with the first reason if no line is left.

    path: the file.
    metric: the name of the metric, or FILE.py:NAME.
    max_new_tokens: the most tokens of an answer, for lines without a limit of their own.
    questions: the most questions of a context; its first ones are taken. None takes all.
    names: the keys of a line's parts, such as ``prompt_key``, one for each field of ``LineKeys``.
    """
    # the knob ``prompt_key`` sets the field ``prompt``
    keys = LineKeys(**{name.removesuffix("_key"): key for name, key in names.items()})
    dataset = context.dataset
    if not path:
        raise UsageError(f"dataset {dataset} reads prompts from a file: give path=FILE.jsonl")
    scorer = metrics.choose(metric)
    # lines without a limit of their own get this one, so check it before they are read
    if not is_count(max_new_tokens):
        raise UsageError(f"dataset.{dataset}.max_new_tokens={max_new_tokens!r} is not possible: a whole number from 1")
    file = Path(path).expanduser()
    # both by id, so that a repeated id is reported at the line that repeats it
    examples: dict[str, Example] = {}
    places: dict[str, str] = {}
    left_out: list[str] = []
    hint = " (set prompt_key=, or context_key= and question_key=, and answers_key=)"
    for row in read_lines(file, hint, left_out):
        try:
            # a line without an id is called by its place, such as line-3
            name = row.name(keys.id, row.place.replace(" ", "-"))
            if name in examples:
                raise row.wrong(f"its id {name!r} is that of {places[name]}")
            example = _read_example(row, name, keys, scorer, max_new_tokens)
            # either all lines hold one prompt, or all hold a context with several questions; the first line decides
            first_example = next(iter(examples.values()), example)
            if bool(example.turns) != bool(first_example.turns):
                raise row.wrong(
                    f"all lines have {keys.questions!r}, or none has: put the others into a file of their own"
                )
        except UsageError as error:
            left_out.append(str(error))
            continue
        places[name] = row.place
        examples[name] = example
    if not examples:
        raise UsageError(left_out[0] if left_out else f"{file} is empty: it must hold a JSON object a line")
    task = Task(
        f"{dataset}/{file.stem}", tuple(examples.values()), scorer.name, source=file.name, left_out=tuple(left_out)
    )
    return limit_questions(dataset, [task], questions)


def _read_example(row: FileRow, name: str, keys: LineKeys, scorer: metrics.Metric, max_new_tokens: int) -> Example:
    """Return the example of a line. Raises UsageError for a line that lacks a part.

    name: the example's id.
    scorer: the metric, which may need a list of labels.
    max_new_tokens: the most tokens of an answer, for lines without a limit of their own.
    """
    classes: tuple[str, ...] = row.texts(keys.classes) if keys.classes in row else ()
    if scorer.needs_classes and not classes:
        raise row.wrong(f"metric {scorer.name} needs a list of labels under the key {keys.classes!r}")
    turns = _read_turns(row, keys, scorer)
    if turns:
        if keys.context not in row:
            raise row.wrong(f"{keys.questions!r} needs the context that they are asked of, under {keys.context!r}")
        # the turns hold question and references
        prompt, question = row.text(keys.context), ""
        answers: tuple[str, ...] = ()
    else:
        prompt, question = _read_prompt(row, keys)
        answers = _read_references(row, keys, scorer)
    return Example(
        id=name,
        prompt=prompt,
        question=question,
        answers=answers,
        max_new_tokens=row.count(keys.max_new_tokens, max_new_tokens),
        classes=classes,
        turns=turns,
    )


def _read_references(row: FileRow, keys: LineKeys, scorer: metrics.Metric) -> tuple[str, ...]:
    """Return the references of a line or a question. Raises UsageError if all are blank and the metric needs text."""
    references = row.texts(keys.answers)
    if not (scorer.blank or any(reference.strip() for reference in references)):
        raise row.wrong(
            f"{keys.answers!r} is empty: metric={scorer.name} compares answers with a reference; fill it in or leave "
            "the line out (squad_f1 and squad_em take an empty reference for an empty answer)"
        )
    return references


def _read_turns(row: FileRow, keys: LineKeys, scorer: metrics.Metric) -> tuple[Turn, ...]:
    """Return a line's questions about its context, or () for a line with a single prompt."""
    if keys.questions not in row:
        return ()
    turns = []
    for question in row.records(keys.questions):
        turns.append(Turn(question.text(keys.question), _read_references(question, keys, scorer)))
    return tuple(turns)


def _read_prompt(row: FileRow, keys: LineKeys) -> tuple[str, str]:
    """Return (prompt of a line, the question that ends it).

    The question is '' if the line names none, or one that does not end the prompt.
    """
    if keys.prompt not in row and keys.context in row:
        question = row.text(keys.question)
        return row.text(keys.context) + question, question
    prompt, named_question = row.text(keys.prompt), row.values.get(keys.question)
    if isinstance(named_question, str) and prompt.endswith(named_question):
        return prompt, named_question
    # a question that does not end the prompt cannot be withheld
    return prompt, ""
