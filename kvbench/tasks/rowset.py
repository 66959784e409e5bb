"""A dataset of rows as data: a YAML entry says how a row becomes a prompt with references.

Under ``_rows_`` an entry of conf/dataset has the fields of RowFormat. The entry's knobs stand beside it: ``file`` and
``max_new_tokens``, and ``metric``, ``references`` and ``seed`` if the format uses them.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

from kvbench.base.errors import UsageError
from kvbench.base.example import Example
from kvbench.base.files import Line
from kvbench.tasks import metrics
from kvbench.tasks.base import LoadContext, Task
from kvbench.tasks.knobs import check_whole, check_word, shuffled_by_seed
from kvbench.tasks.rows import FileRow, read_rows
from kvbench.tasks.source import Files

LETTERS = "ABCDEFGHIJ"
"""The letters of options, in order."""
_FIELD = re.compile(r"\{([^{}\n]+)\}")


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """The recipe for an example from a row. A key may be spelled as by the publisher, or in lower_case as on the hub.

    prompt, question: templates. ``{key}`` is the row's text under that key, ``{choices}`` the lettered options. The
    question ends the prompt, and ``query_aware=false`` withholds it.
    answers: the keys of the references, each with a text or a list of texts. If there are lists of keys by name, the
    knob ``references`` chooses one of them.
    metric: one metric, or several for the knob ``metric`` to choose from; the first is the default.
    title: the dataset's name in the source of its tasks; '' takes the entry's name.
    category, note: the fields of Task of these names. The note may get further facts in front.
    id: the key of a row's name; '' or a row without it: the row is numbered.
    places: possible places of the file, if the knob ``file`` names none.
    strip: True if the text of a ``{key}`` is stripped.
    after: a mark in the text of a reference. Only the text behind the last mark counts.
    split: by key, the mark that separates several references in one text.
    choices: the keys of the options, the right one first. The knob ``seed`` draws their order in the prompt.
    classes: all labels, for metrics that need them.
    reference: the path of a function from a row to the row's reference, in place of ``answers``.
    only: values by key. Rows with another value under such a key are left out.
    left_out: the words of the note for the rows that are left out.
    size: the number of examples in published tables, if other releases differ.
    meta: keys of the row, by their names in an example's meta.
    task: other fields of Task, such as ``first_line``.
    """

    prompt: str = ""
    question: str = ""
    answers: Sequence[str] | Mapping[str, Sequence[str]] | str = ()
    metric: Sequence[str] | str
    title: str = ""
    category: str = ""
    note: str = ""
    id: str = ""
    places: Sequence[str] = ()
    strip: bool = True
    after: str = ""
    split: Mapping[str, str] = field(default_factory=dict)
    choices: Sequence[str] = ()
    classes: Sequence[str] = ()
    reference: str = ""
    only: Mapping[str, Sequence[object]] = field(default_factory=dict)
    left_out: str = ""
    size: int | None = None
    meta: Mapping[str, str] = field(default_factory=dict)
    task: Mapping[str, Any] = field(default_factory=dict)


def load(
    context: LoadContext,
    _rows_: Mapping[str, Any],
    file: str | None = None,
    max_new_tokens: int = 64,
    metric: str | None = None,
    references: str | None = None,
    seed: int = 0,
) -> list[Task]:
    """Return one task with an example for each row that ``only`` does not leave out.

    _rows_: the fields of RowFormat.
    file: the file of rows below the data folder; None: the format's first existing place.
    max_new_tokens: the most tokens of an answer.
    metric: the name of one of the format's metrics; None: the first.
    references: the name of one of the format's lists of references; None: the format has only one.
    seed: draws the order of options.

    Raises UsageError naming file, place and reason for an incomplete row.
    """
    dataset, files = context.dataset, context.files
    form, task_fields = _parse_format(dataset, _rows_)
    check_whole(dataset, "max_new_tokens", max_new_tokens)
    check_whole(dataset, "seed", seed, least=0)
    scorer = _choose_metric(dataset, form, metric)
    answer_keys = form.answers
    if isinstance(answer_keys, Mapping):
        answer_keys = answer_keys[check_word(dataset, "references", references, answer_keys)]
    reader = RowReader(form, scorer, _as_list(answer_keys))
    path = _find_file(dataset, files, form, file)
    rows = list(read_rows(path))
    examples = []
    for i, row in enumerate(rows):
        if any(row.value(key) not in values for key, values in form.only.items()):
            continue
        # the number in the file, not among the examples, so that a change of ``only`` does not rename examples
        name = f"{dataset}-{i}"
        if form.id:
            name = row.name(form.id, name)
        examples.append(reader.read_example(row, name, seed, max_new_tokens))
    task = Task(
        id=dataset,
        examples=tuple(examples),
        metric=scorer.name,
        source=f"{form.title or dataset}, {path.name}",
        category=form.category,
        note=_write_note(dataset, form, len(examples), len(rows)),
        **task_fields,
    )
    return [task]


def _parse_format(dataset: str, record: Mapping[str, Any]) -> tuple[RowFormat, Line]:
    """Return (the format that ``_rows_`` describes, the fields of Task that it sets).

    record: the content of ``_rows_``.

    Raises UsageError for an unknown field, and for more options than LETTERS has.
    """
    try:
        form = RowFormat(**record)
        task_fields = _list_task_fields(form)
    except TypeError as error:
        # Python's error for an unknown field does not name the file in which its author has to look
        raise UsageError(f"conf/dataset/{dataset}.yaml, _rows_: {error}") from None
    if len(form.choices) > len(LETTERS):
        raise UsageError(
            f"conf/dataset/{dataset}.yaml, _rows_: choices has {len(form.choices)} options, at most {len(LETTERS)} are "
            "possible"
        )
    return form, task_fields


def _list_task_fields(form: RowFormat) -> Line:
    """Return the fields of Task that a format sets. Raises TypeError for a field that Task does not have."""
    task_fields = dict(form.task)
    for key, value in form.task.items():
        # YAML has lists, but a frozen Task needs tuples
        if isinstance(value, list):
            task_fields[key] = tuple(value)
    # this raises the TypeError before any row is read
    signature(Task).bind_partial(**task_fields)
    return task_fields


def _choose_metric(dataset: str, form: RowFormat, metric: str | None) -> metrics.Metric:
    """Return the metric that the knob names, or the format's first. Raises UsageError if it cannot score the rows."""
    allowed = _as_list(form.metric)
    for name in allowed:
        metrics.metric(name)  # this raises UsageError for an unknown metric
    if metric is None:
        scorer = metrics.metric(allowed[0])
    elif metrics.own.is_own(metric):
        scorer = metrics.choose(metric)
    else:
        scorer = metrics.metric(check_word(dataset, "metric", metric, allowed))
    if scorer.needs_classes and not form.classes:
        raise UsageError(f"conf/dataset/{dataset}.yaml, _rows_: metric {scorer.name} needs classes: a list of labels")
    return scorer


def _find_file(dataset: str, files: Files, form: RowFormat, file: str | None) -> Path:
    """Return the path of the file that the knob names, or of the format's first existing place."""
    if file:
        return files.path(file)
    places = form.places or [f"{dataset}.jsonl"]
    # if there is none, the error names the first place
    return files.find_first(*places) or files.path(places[0])


def _write_note(dataset: str, form: RowFormat, examples: int, rows: int) -> str:
    """Return the note of a task: the number of rows left out, a different published size, and the format's note.

    examples: the number of the task's examples.
    rows: the number of all rows in the file.
    """
    facts = []
    if examples < rows:
        facts.append(f"{rows - examples} of {rows} {form.left_out}")
    if form.size not in (None, examples):
        facts.append(f"{examples} questions, the release of published tables has {form.size}")
    if form.note:
        facts.append(form.note)
    if not facts:
        return ""
    return f"{dataset}: {'; '.join(facts)}"


@dataclass(frozen=True)
class RowReader:
    """The reader of a dataset's rows.

    form: the format of the rows.
    scorer: the metric of the task.
    answer_keys: the keys of the references.
    """

    form: RowFormat
    scorer: metrics.Metric
    answer_keys: Sequence[str]

    def read_example(self, row: FileRow, name: str, seed: int, max_new_tokens: int) -> Example:
        """Return the example of a row. Raises UsageError naming file, place and reason for an incomplete row.

        name: the example's id.
        seed: decides, with ``name``, the order of options.
        max_new_tokens: the most tokens of the answer.
        """
        form = self.form
        meta = {field_name: row.text(key) for field_name, key in form.meta.items()}
        # the keys of the options in the order in which the prompt lists them; [] for a question without options
        order = list(shuffled_by_seed(form.choices, f"{seed}:{name}"))
        letters = LETTERS[: len(order)]
        options = []
        for letter, key in zip(letters, order, strict=True):
            options.append(f"({letter}) {row.text(key).strip()}")
        choices = "\n".join(options)
        question = self._fill(row, form.question, choices)
        # the labels of a question with options are their letters
        classes = tuple(letters) if order else tuple(form.classes)
        if order:
            # the first of ``choices`` is right, and its letter in the drawn order is the reference
            right_place = order.index(form.choices[0])
            answers: tuple[str, ...] = (letters[right_place],)
        elif form.reference:
            module, _, function = form.reference.rpartition(".")
            answers = (getattr(importlib.import_module(module), function)(row),)
        else:
            answers = self._read_answers(row)
        return Example(
            id=name,
            prompt=self._fill(row, form.prompt, choices) + question,
            answers=answers,
            max_new_tokens=max_new_tokens,
            classes=classes,
            question=question,
            meta=meta,
        )

    def _fill(self, row: FileRow, template: str, choices: str) -> str:
        """Return a template with the row's texts in place of the template's keys, and ``choices`` for ``{choices}``."""

        def fill_field(match: re.Match[str]) -> str:
            if match[1] == "choices" and choices:
                return choices
            text = row.text(_find_key(row, match[1]))
            if self.form.strip:
                text = text.strip()
            return text

        return _FIELD.sub(fill_field, template)

    def _read_answers(self, row: FileRow) -> tuple[str, ...]:
        """Return the references of a row in order, each once. Raises UsageError if there is none."""
        # a dictionary keeps the order and drops repetitions
        answers: dict[str, None] = {}
        for key in self.answer_keys:
            answers |= dict.fromkeys(self._read_references(row, key))
        if not answers:
            keys = ", ".join(map(repr, self.answer_keys)) or "any key: answers= is empty"
            raise row.wrong(f"there is no reference under {keys}")
        return tuple(answers)

    def _read_references(self, row: FileRow, key: str) -> Iterator[str]:
        form = self.form
        name = _find_key(row, key)
        # a list has its parts already, so its texts are not split
        is_list = isinstance(row.value(name), list)
        texts = row.texts(name) if is_list else (row.text(name),)
        for text in texts:
            if form.after:
                text = self._cut_final_answer(row, name, text)
            references = [text]
            if key in form.split and not is_list:
                references = text.split(form.split[key])
            for reference in references:
                if reference.strip():
                    yield reference.strip()

    def _cut_final_answer(self, row: FileRow, name: str, text: str) -> str:
        """Return the part of a worked solution behind the last mark ``after`` of the format.

        name: the row's key of the solution, for the error.

        Raises UsageError if there is no mark, or if the metric cannot score the part behind it: no answer could equal
        such a reference.
        """
        mark = self.form.after
        _, found_mark, final_answer = text.rpartition(mark)
        # metrics of final answers read only the two texts, so an empty example will do
        nothing = Example(id="", prompt="", answers=(), max_new_tokens=1)
        if not found_mark or self.scorer.function(final_answer, final_answer, nothing) is None:
            raise row.wrong(f"{name!r} must end in '{mark} N', where {self.scorer.name} can score N")
        return final_answer


def _find_key(row: FileRow, key: str) -> str:
    """Return the name under which the row has ``key``: the key itself, or its lower_case form as on the hub."""
    hub_key = key.lower().replace(" ", "_")
    # a key that the row has in neither form is named by an error later, as the publisher spells it
    if hub_key in row and key not in row:
        return hub_key
    return key


def _as_list(value: Sequence[str] | str) -> list[str]:
    """Return the entries of a YAML value. It may be one text instead of a list."""
    if isinstance(value, str):
        return [value]
    return list(value)
