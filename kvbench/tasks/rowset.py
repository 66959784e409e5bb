"""A dataset of rows as data: a YAML entry says how a row becomes a prompt and what its references are.

Under ``_rows_`` an entry of conf/dataset has the fields of RowFormat; beside it its knobs: ``file`` and
``max_new_tokens``, and where the format has a use for them ``metric``, ``references`` and ``seed``.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

from kvbench.base.errors import UsageError
from kvbench.base.example import Example
from kvbench.tasks import metrics
from kvbench.tasks.base import Task
from kvbench.tasks.knobs import drawn, one_of, whole
from kvbench.tasks.rows import FileRow, read
from kvbench.tasks.source import Files

LETTERS = "ABCDEFGHIJ"
_FIELD = re.compile(r"\{([^{}\n]+)\}")


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """The recipe for an example from a row. A key may be the publisher's, or in lower_case as the hub's.

    ``prompt`` and behind it ``question``, which a prompt that leaves out the question ends before, are templates:
    ``{key}`` is the row's text under that key, ``{choices}`` the options under the keys ``choices``, the right one
    first there and in an order drawn by the knob ``seed`` in the prompt. References stand under the keys ``answers``,
    text or lists of texts: what follows ``after``, parted by the mark that ``split`` has for the key. Lists of keys by
    name are chosen by the knob ``references``, several ``metric`` names by the knob. ``reference`` names a function of
    the row in their place.
    """

    prompt: str = ""
    question: str = ""
    answers: Sequence[str] | Mapping[str, Sequence[str]] | str = ()
    metric: Sequence[str] | str
    title: str = ""  # of the dataset, in the source of its tasks
    category: str = ""
    note: str = ""
    id: str = ""  # the key of a row's name; rows without one are numbered
    places: Sequence[str] = ()  # where the file may lie, if the knob ``file`` names none
    strip: bool = True  # of what ``{key}`` stands for
    after: str = ""
    split: Mapping[str, str] = field(default_factory=dict)
    choices: Sequence[str] = ()
    classes: Sequence[str] = ()  # all labels, for metrics that need them
    reference: str = ""
    only: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # rows that have one of these values under a key
    left_out: str = ""  # what is said of other rows
    size: int | None = None  # examples of the release that is published, if there are others
    meta: Mapping[str, str] = field(default_factory=dict)  # names in an example's meta: keys
    task: Mapping[str, Any] = field(default_factory=dict)  # fields of Task, as first_line


def load(
    dataset: str,
    files: Files,
    _rows_: Mapping[str, Any],
    file: str | None = None,
    max_new_tokens: int = 64,
    metric: str | None = None,
    references: str | None = None,
    seed: int = 0,
) -> list[Task]:
    """Return one task with an example per row; ``only`` leaves out rows.

    Raises UsageError naming file, place and reason for an incomplete row.
    """
    try:
        form = RowFormat(**_rows_)
        task_fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in form.task.items()
        }
        signature(Task).bind_partial(**task_fields)  # raises TypeError for an unknown field
    except TypeError as error:
        raise UsageError(f"conf/dataset/{dataset}.yaml, _rows_: {error}") from None
    whole(dataset, "max_new_tokens", max_new_tokens)
    whole(dataset, "seed", seed, least=0)
    allowed = _listed(form.metric)
    for name in allowed:
        metrics.metric(name)  # raises UsageError for an unknown one
    scorer = metrics.metric(allowed[0] if metric is None else one_of(dataset, "metric", metric, allowed))
    if scorer.needs_classes and not form.classes:
        raise UsageError(f"conf/dataset/{dataset}.yaml, _rows_: metric {scorer.name} needs classes: a list of labels")
    keys = form.answers
    if isinstance(keys, Mapping):
        keys = keys[one_of(dataset, "references", references, keys)]
    places = form.places or [f"{dataset}.jsonl"]
    path = files.path(file) if file else files.first(*places) or files.path(places[0])
    examples = []
    rows = list(read(path))
    for i, row in enumerate(rows):
        if any(row.value(key) not in values for key, values in form.only.items()):
            continue
        name = row.name(form.id, f"{dataset}-{i}") if form.id else f"{dataset}-{i}"
        meta = {field_name: row.text(key) for field_name, key in form.meta.items()}
        content = _content(form, row, f"{seed}:{name}", _listed(keys), scorer)
        examples.append(Example(id=name, max_new_tokens=max_new_tokens, meta=meta, **content))
    facts = [form.note]
    if form.size not in (None, len(examples)):
        facts.insert(0, f"{len(examples)} questions, the release of published tables has {form.size}")
    if len(examples) < len(rows):
        facts.insert(0, f"{len(rows) - len(examples)} of {len(rows)} {form.left_out}")
    note = "; ".join(filter(None, facts))
    source = f"{form.title or dataset}, {path.name}"
    note = f"{dataset}: {note}" if note else ""
    return [Task(dataset, tuple(examples), scorer.name, source, form.category, note, **task_fields)]


def _content(form: RowFormat, row: FileRow, seed: str, keys: Sequence[str], scorer: metrics.Metric) -> dict[str, Any]:
    """Return a row's prompt, question, references and classes under the names of Example's fields."""
    order = list(drawn(form.choices, seed))
    lines = [f"({letter}) {row.text(key).strip()}" for letter, key in zip(LETTERS, order, strict=False)]
    texts = {"choices": "\n".join(lines)} if order else {}

    def fill(template: str) -> str:
        return _FIELD.sub(lambda match: texts.get(match[1]) or _text(form, row, match[1]), template)

    question = fill(form.question)
    if order:
        answers: tuple[str, ...] = (LETTERS[order.index(form.choices[0])],)
    elif form.reference:
        module, _, name = form.reference.rpartition(".")
        answers = (getattr(importlib.import_module(module), name)(row),)
    else:
        answers = tuple(dict.fromkeys(a for key in keys for a in _references(form, row, key, scorer)))
        if not answers:
            raise row.wrong(f"there is no reference under {', '.join(map(repr, keys)) or 'any key: answers= is empty'}")
    return {
        "prompt": fill(form.prompt) + question,
        "question": question,
        "answers": answers,
        "classes": tuple(LETTERS[: len(order)]) or tuple(form.classes),
    }


def _references(form: RowFormat, row: FileRow, key: str, scorer: metrics.Metric) -> Iterator[str]:
    name = _key(row, key)
    value = row.value(name)
    for text in row.texts(name) if isinstance(value, list) else [row.text(name)]:
        _, mark, final = text.rpartition(form.after) if form.after else ("", "", text)
        if form.after and (not mark or scorer.function(final, final, Example("", "", (), 1)) is None):
            raise row.wrong(f"{name!r} must end in '{form.after} N', where {scorer.name} can score N")
        parts = final.split(form.split[key]) if key in form.split and not isinstance(value, list) else [final]
        yield from filter(None, map(str.strip, parts))


def _text(form: RowFormat, row: FileRow, key: str) -> str:
    text = row.text(_key(row, key))
    return text.strip() if form.strip else text


def _key(row: FileRow, key: str) -> str:
    """Return the name under which the row has ``key``: the key itself, or its form in lower_case as on the hub."""
    hub_key = key.lower().replace(" ", "_")
    return hub_key if hub_key in row and key not in row else key


def _listed(value: Sequence[str] | Mapping[str, Sequence[str]] | str) -> list[str]:
    return [value] if isinstance(value, str) else list(value)
