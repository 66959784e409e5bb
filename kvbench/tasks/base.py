"""The dataset interface: named lists of examples with one metric each."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from kvbench.base.errors import UsageError, unknown
from kvbench.base.example import Example
from kvbench.base.files import check_ends
from kvbench.tasks import metrics
from kvbench.tasks.knobs import check_whole, check_word
from kvbench.tasks.metrics.text import first_line
from kvbench.tasks.source import Files, data_root
from kvbench.tasks.spread import order_by_spread
from kvbench.tasks.thoughts import THOUGHT, Thought

ROWS = "kvbench.tasks.rowset.load"
"""The loader of datasets whose entry names none."""
TURNS = ("isolated", "gold", "own")
"""The history that a context's cache holds when its next question comes: no earlier question, the earlier ones with
their references, or the earlier ones with the model's own answers."""
UNCUT = ("needle", "RULER")
"""The categories of tasks whose prompts must fit into the model's context: a cut could remove the answer."""


class Tokenizer(Protocol):
    """The methods of a transformers tokenizer that tasks may use."""

    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]:
        """Return the token ids of a text, by default with the special tokens around it."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = ...) -> str:
        """Return the text of token ids, by default with special tokens written out."""


def note_own_wording(dataset: str, *facts: str) -> str:
    """Return a task's note: ``facts`` that are not empty, then the statement that kvbench worded the prompts itself."""
    sentences = [fact for fact in facts if fact]
    sentences.append("the wording of its prompts is kvbench's own")
    return f"{dataset}: " + "; ".join(sentences)


@dataclass(frozen=True)
class Task:
    """One column of a table: examples in a fixed order, the metric that scores them, and facts for the reader.

    id: ``dataset/task``.
    examples: the examples in their order, at least one.
    metric: the name of the metric.
    source: the origin of the examples.
    category: the kind of task, such as "summarisation". Reports and UNCUT group tasks by it.
    note: a text that is printed under the table.
    stop: texts that end an answer (samsum's newline). It is cut where one of them stands.
    forbid_first: texts that cannot stand in the first token of an answer.
    min_new_tokens: the number of tokens before which an answer cannot end.
    first_line: True if only the first line after leading newlines is scored.
    cut_at: a text behind which nothing is scored; '' for none.
    chat: False for tasks that are read without a chat template even if the run uses one (few-shot and code).
    strip: True if whitespace at the ends of an answer is not scored. False for code, where indentation counts.
    grid: the keys of ``meta`` over which a limit spreads (a needle's depth). Without keys a limit takes the first
    examples.
    lead: the beginning of a sentence that the prompt asks to complete. It is scored in front of the answer.
    fidelity: True if every method is compared with the full cache, token by token, even if the run does not ask for it.
    query_aware: True if the question is read before the context is compressed. A loader states the task's own choice,
    and ``load_tasks`` replaces it by the run's. It is False wherever a context has several questions.
    turns: the history that a context's cache holds, one of TURNS. It is '' unless examples have ``turns``.
    beside: metrics whose means are recorded beside the score of examples with ``turns``.
    samples: the number of answers drawn for each prompt. Their mean score is the example's.
    thought: the marks of thoughts in answers.
    left_out: the reasons why records of the file are no examples, with file and place.
    """

    id: str
    examples: tuple[Example, ...]
    metric: str
    source: str
    category: str = ""
    note: str = ""
    stop: tuple[str, ...] = ()
    forbid_first: tuple[str, ...] = ()
    min_new_tokens: int = 0
    first_line: bool = False
    cut_at: str = ""
    chat: bool = True
    strip: bool = True
    grid: tuple[str, ...] = ()
    lead: str = ""
    fidelity: bool = False
    query_aware: bool = True
    turns: str = ""
    beside: tuple[str, ...] = ()
    samples: int = 1
    thought: Thought = THOUGHT
    left_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise UsageError for a task without examples, or with two examples of one id."""
        if not self.examples:
            raise UsageError(f"dataset {self.id} has no examples")
        # answers are stored by the id of their example, so a second example with one id would overwrite the first
        ids = [e.id for e in self.examples]
        if len(set(ids)) < len(ids):
            repeated = next(name for name in ids if ids.count(name) > 1)
            raise UsageError(f"dataset {self.id}: two examples have the id {repeated!r}")

    def take_examples(self, limit: int | None) -> tuple[Example, ...]:
        """Return the examples that ``limit`` takes, in order, or all if it is None.

        A larger limit takes all examples that a smaller one takes.
        """
        if limit is None or not self.grid:
            return self.examples[:limit]
        # every beginning of the spread order covers the grid; the chosen examples keep the task's order
        chosen = sorted(order_by_spread(self.examples, self.grid)[:limit])
        return tuple(self.examples[i] for i in chosen)

    def score(self, text: str, example: Example, metric: str = "") -> float | None:
        """Return the score of a generated text, by the task's metric or by another ``metric``."""
        return metrics.score(metric or self.metric, text, example, cut=self.answer, thought=self.thought)

    def answer(self, text: str) -> str:
        """Return what is scored of a ``text`` without thought: ``lead``, then the part that is the answer."""
        if self.first_line:
            text = first_line(text)
        # models continue with another question or article, and this is no part of the answer
        if self.cut_at:
            text = text.partition(self.cut_at)[0]
        if self.strip:
            text = text.strip()
        return self.lead + text

    @cached_property
    def longest_answer(self) -> int:
        """The most tokens of an answer to any of the examples."""
        return max(example.max_new_tokens for example in self.examples)

    def list_answer_settings(self) -> dict[str, object]:
        """Return, by name, the settings that end an answer and choose its scored part, for a cell's identity."""
        settings: dict[str, object] = {
            "stop": list(self.stop),
            "forbid_first": list(self.forbid_first),
            "min_new_tokens": self.min_new_tokens,
            "first_line": self.first_line,
            "cut_at": self.cut_at,
            "strip": self.strip,
        }
        # only one needle phrasing has a lead: without the key, all other cells keep their earlier ids
        if self.lead:
            settings["lead"] = self.lead
        # likewise, only some models' templates have thoughts
        if self.thought.told:
            settings["thought"] = asdict(self.thought)
        return settings

    def content_hash(self) -> str:
        """Return the SHA-256 of all examples in hexadecimal digits. It identifies the data of a cell."""
        digest = hashlib.sha256()
        for example in self.examples:
            content = example.content()
            # only some datasets use these fields. Without empty fields in the hash, all other datasets keep the hashes
            # that they had before the fields came
            for name in ("turns", "answer_prefix"):
                if not content[name]:
                    del content[name]
            for turn in content.get("turns", ()):
                if not turn["prefix"]:
                    del turn["prefix"]
            digest.update(json.dumps(content, sort_keys=True, default=_make_json_ready).encode())
        return digest.hexdigest()


def _make_json_ready(value: object) -> object:
    """Return a value that JSON does not know in a form that it knows: a dataclass by its fields, others as text."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return str(value)


@dataclass(frozen=True)
class LoadContext:
    """The request for tasks, and the means to make them. Every loader gets it as its first argument.

    dataset: the entry's name. It begins the ids of its tasks and the messages about it.
    selection: the names of the wanted tasks; () wants all. A loader may ignore it: load_tasks leaves out other tasks.
    tokenizer: the model's tokenizer; None if tasks are listed without a model.
    render: the function from a prompt to its text in the model's chat template; None without a template.
    data: the data folder that the run names; None: the folder that the environment names.
    """

    dataset: str
    selection: tuple[str, ...] = ()
    tokenizer: Tokenizer | None = None
    render: Callable[[str], str] | None = None
    data: str | None = None

    @property
    def chat(self) -> bool:
        """True if prompts are put into a chat template. Answers are longer then."""
        return self.render is not None

    @cached_property
    def files(self) -> Files:
        """The dataset's files below the data folder. Raises MissingData if the folder does not exist."""
        # opened at first use: a dataset without files must not require the folder
        return Files(self.dataset, data_root(self.data))


def load_tasks(
    dataset: str,
    entry: Mapping[str, Any],
    selection: Sequence[str],
    tokenizer: Tokenizer | None,
    data: str | None = None,
    render: Callable[[str], str] | None = None,
    query_aware: bool | None = None,
) -> list[Task]:
    """Return the selected tasks of a conf/dataset entry.

    The entry's loader is called with a LoadContext, and with the entry's knobs as keywords.

    dataset: the entry's name.
    entry: the entry, with the path of its loader under ``_target_``.
    selection: the names of the wanted tasks, such as ``needle`` for ``tiny/needle``. The part before a slash names
    several tasks, such as ``vt`` for ``ruler/vt`` at all lengths. Empty: all tasks.
    tokenizer, data, render: fields of LoadContext.
    query_aware: True if questions are in view while prompts are compressed; None: each task keeps its own setting.
    """
    # _target_ is the path of a function, such as kvbench.tasks.needle.load
    module, _, name = str(entry.get("_target_", ROWS)).rpartition(".")
    loader: Callable[..., list[Task]] = getattr(importlib.import_module(module), name)
    # these keys are for load_tasks, run and fetch, not for loaders
    knobs = {key: value for key, value in entry.items() if key not in ("_target_", "default_limit", "hub", "turns")}
    turns = ""
    if "turns" in entry:
        turns = check_word(dataset, "turns", entry["turns"], TURNS)
    context = LoadContext(dataset, tuple(selection), tokenizer=tokenizer, render=render, data=data)
    tasks = []
    for task in loader(context, **knobs):
        if query_aware is not None:
            task = replace(task, query_aware=query_aware)
        # a dataset may have the knob ``turns`` although each of its examples asks one question
        if task.examples[0].turns:
            # one cache serves all questions of a context, so no question can be in view when it is compressed
            task = replace(task, turns=turns, query_aware=False)
        tasks.append(task)
    if not selection:
        return tasks
    return _select_tasks(dataset, tasks, selection)


def limit_answers(dataset: str, tasks: list[Task], max_new_tokens: int | None) -> list[Task]:
    """Return the tasks with ``max_new_tokens`` for every answer. None keeps the lengths in the data.

    Raises UsageError if ``max_new_tokens`` is not a whole number of at least 1.
    """
    if max_new_tokens is None:
        return tasks
    most = check_whole(dataset, "max_new_tokens", max_new_tokens)
    limited = []
    for task in tasks:
        examples = tuple(replace(example, max_new_tokens=most) for example in task.examples)
        limited.append(replace(task, examples=examples))
    return limited


def limit_questions(dataset: str, tasks: list[Task], questions: int | None) -> list[Task]:
    """Return the tasks with only the first ``questions`` questions of every context. None keeps all questions.

    Raises UsageError if ``questions`` is not a whole number of at least 1.
    """
    if questions is None:
        return tasks
    most = check_whole(dataset, "questions", questions)
    limited = []
    for task in tasks:
        examples = tuple(replace(example, turns=example.turns[:most]) for example in task.examples)
        limited.append(replace(task, examples=examples))
    return limited


def _select_tasks(dataset: str, tasks: Sequence[Task], selection: Sequence[str]) -> list[Task]:
    """Return the tasks that ``selection`` names, each once, in the order of the names.

    Raises UsageError for an unknown name.
    """
    # a single task has its dataset's name as its id, and so no name to select it by
    by_name = {task.id.partition("/")[2]: task for task in tasks}
    selected: dict[str, Task] = {}
    for wanted in selection:
        matches = {}
        for name, task in by_name.items():
            # with a slash behind both, ``vt`` finds ``vt/4096`` and ``vt``, but not ``vt2``
            if f"{name}/".startswith(f"{wanted}/"):
                matches[name] = task
        if not matches:
            raise unknown(f"task of dataset {dataset}", wanted, [name for name in by_name if name])
        selected |= matches
    return list(selected.values())


def read_text(path: Path, use: str) -> str:
    """Return the text of a UTF-8 file. Raises UsageError if it cannot be read.

    use: the use of the file, such as ``dataset=mdqa``, with which the error's text begins.
    """
    try:
        # reading a pipe or a device would never end
        check_ends(path)
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{use}: there is no file {path}") from None
    except IsADirectoryError:
        raise UsageError(f"{use}: {path} is a folder; give a file") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{use}: {path} is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise UsageError(f"{use}: {path} cannot be read: {error.strerror}") from None
