"""The dataset interface: named lists of examples with one metric each."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol, get_type_hints

from kvbench.base.errors import UsageError, unknown
from kvbench.base.example import Example
from kvbench.base.files import check_ends
from kvbench.tasks.knobs import one_of, whole
from kvbench.tasks.metrics.text import first_line
from kvbench.tasks.source import Files, data_root
from kvbench.tasks.spread import spread

ROWS = "kvbench.tasks.rowset.load"
TURNS = ("isolated", "gold", "own")
"""What a context's cache holds when its next question comes: nothing of the questions before, those with their
references, or those with the model's own answers."""
UNCUT = ("needle", "RULER")
"""The categories of tasks whose prompts must fit into the model's context: a cut could take what is asked for."""


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that tasks may use."""

    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = ...) -> str: ...


def own_wording(dataset: str, *facts: str) -> str:
    """Return the note of a task whose prompts are worded by kvbench, behind other ``facts`` that readers must know."""
    return f"{dataset}: " + "; ".join([*filter(None, facts), "the wording of its prompts is kvbench's own"])


@dataclass(frozen=True)
class Task:
    """One column of a table: examples in a fixed order, the metric that scores them, and what readers must know.

    id: ``dataset/task``.
    source: where the examples come from.
    note: a text that is printed under the table.
    stop: texts whose last token ends an answer (samsum's newline).
    forbid_first: texts whose last token cannot be the first of an answer.
    min_new_tokens: the number of tokens before which an answer cannot end.
    first_line: only the first line after leading newlines is scored.
    cut_at: only what stands before this text is scored.
    chat: False for tasks that are read without a chat template even where one is used (few-shot and code).
    strip: whitespace at the ends of an answer is not scored; False for code, which is indented.
    grid: the keys of ``meta`` over which a limit spreads (a needle's depth); without any it takes the first examples.
    lead: the beginning of a sentence that the prompt asks to complete; it is scored in front of the answer.
    fidelity: every method is compared with the full cache, token by token, whether the run asks for that or not.
    query_aware: whether the question is read before the context is compressed, where the run does not say.
    turns: what a context's cache holds when its next question comes, one of TURNS; '' unless examples have ``turns``.
    beside: metrics whose means are recorded beside the score of examples with ``turns``.
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

    def __post_init__(self) -> None:
        if not self.examples:
            raise UsageError(f"dataset {self.id} has no examples")
        ids = [e.id for e in self.examples]
        if len(set(ids)) < len(ids):
            repeated = next(i for i in ids if ids.count(i) > 1)
            raise UsageError(f"dataset {self.id}: two examples have the id {repeated!r}")

    def taken(self, limit: int | None) -> tuple[Example, ...]:
        """Return the examples that ``limit`` takes, in order, or all if it is None.

        A larger limit takes all examples that a smaller one takes.
        """
        if limit is None or not self.grid:
            return self.examples[:limit]
        return tuple(self.examples[i] for i in sorted(spread(self.examples, self.grid)[:limit]))

    def answer(self, text: str) -> str:
        """Return the part of a generated text that is scored."""
        if self.first_line:
            text = first_line(text)
        if self.cut_at:
            text = text.partition(self.cut_at)[0]
        return self.lead + (text.strip() if self.strip else text)

    def answering(self) -> dict[str, Any]:
        """Return the settings that end an answer and choose its scored part, by name, for a cell's identity."""
        return {
            "stop": list(self.stop),
            "forbid_first": list(self.forbid_first),
            "min_new_tokens": self.min_new_tokens,
            "first_line": self.first_line,
            "cut_at": self.cut_at,
            "strip": self.strip,
            **({"lead": self.lead} if self.lead else {}),
        }

    def content_hash(self) -> str:
        """Return the SHA-256 of all examples, which identifies the data of a cell."""
        digest = hashlib.sha256()
        for example in self.examples:
            # without fields that only some datasets have, so that the others keep their ids
            content = {k: v for k, v in asdict(example).items() if k not in ("turns", "answer_prefix") or v}
            for turn in content.get("turns", ()):
                if not turn["prefix"]:
                    del turn["prefix"]
            digest.update(json.dumps(content, sort_keys=True, default=str).encode())
        return digest.hexdigest()


def load_tasks(
    dataset: str,
    entry: Mapping[str, Any],
    selection: Sequence[str],
    tokenizer: Tokenizer | None,
    data: str | None = None,
    render: Callable[[str], str] | None = None,
) -> list[Task]:
    """Return the selected tasks of a conf/dataset entry. Its ``_target_``, else the loader of rows, gets its knobs.

    A loader that reads files takes ``files`` (tasks.source.Files, below the data folder that ``data`` or the
    environment names); one that builds only what was asked for takes ``selection``; one that counts tokens takes
    ``tokenizer``; one whose answers are longer behind a chat template takes ``chat``; one that counts a template's
    tokens takes ``render``, the function from a prompt to its text in it, None without one; one with many knobs takes
    them as ``knobs``, a dataclass. Where a loader leaves the length of answers to the data, the entry's
    ``max_new_tokens`` replaces it. ``turns`` is set where examples are contexts with several questions, of which
    ``questions`` takes the first.

    ``selection`` names the wanted tasks (``needle`` of ``tiny/needle``), or several by the part before a slash
    (``ruler/vt`` at all its lengths); empty means all.
    """
    module, _, name = str(entry.get("_target_", ROWS)).rpartition(".")
    loader = getattr(importlib.import_module(module), name)
    knobs = {k: v for k, v in entry.items() if k not in ("_target_", "default_limit", "hub")}
    parameters = inspect.signature(loader).parameters
    offered: dict[str, Any] = {"tokenizer": tokenizer, "selection": tuple(selection)}
    offered |= {"chat": render is not None, "render": render}
    if "files" in parameters:
        # only now: a dataset without files does not care whether the data folder exists
        offered["files"] = Files(dataset, data_root(data))
    form = get_type_hints(loader)["knobs"] if "knobs" in parameters else None
    knob_names = [f.name for f in fields(form)] if form else parameters
    max_new_tokens = None if "max_new_tokens" in knob_names else knobs.pop("max_new_tokens", None)
    turns = one_of(dataset, "turns", knobs.pop("turns"), TURNS) if "turns" in knobs else ""
    most = knobs.pop("questions", None) if "questions" not in knob_names else None
    options = {k: v for k, v in offered.items() if k in parameters}
    tasks: list[Task] = loader(dataset=dataset, **options, **({"knobs": form(**knobs)} if form else knobs))
    if max_new_tokens is not None:
        whole(dataset, "max_new_tokens", max_new_tokens)
        tasks = [
            replace(t, examples=tuple(replace(e, max_new_tokens=max_new_tokens) for e in t.examples)) for t in tasks
        ]
    if most is not None:
        whole(dataset, "questions", most)
        tasks = [replace(t, examples=tuple(replace(e, turns=e.turns[:most]) for e in t.examples)) for t in tasks]
    tasks = [replace(t, turns=turns) if t.examples[0].turns else t for t in tasks]
    by_name = {t.id.partition("/")[2]: t for t in tasks}
    chosen: dict[str, Task] = {}
    for wanted in selection:
        found = {name: t for name, t in by_name.items() if f"{name}/".startswith(f"{wanted}/")}
        if not found:
            raise unknown(f"task of dataset {dataset}", wanted, (n for n in by_name if n))
        chosen |= found
    return list(chosen.values()) if selection else tasks


def read_text(path: Path, what: str) -> str:
    """Return the text of a UTF-8 file. Raises UsageError beginning with ``what``, its use, if it cannot be read."""
    try:
        check_ends(path)
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{what}: there is no file {path}") from None
    except IsADirectoryError:
        raise UsageError(f"{what}: {path} is a folder; give a file") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{what}: {path} is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise UsageError(f"{what}: {path} cannot be read: {error.strerror}") from None
