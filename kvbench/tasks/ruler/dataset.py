"""The dataset ruler: its tasks, the data that each task needs, and the prompts at the requested lengths."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import islice, product
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

from kvbench.base.errors import MissingData, UsageError, unknown
from kvbench.base.example import Example, Turn
from kvbench.tasks.base import LoadContext, Task, Tokenizer, limit_questions, read_text
from kvbench.tasks.knobs import check_whole, check_word
from kvbench.tasks.ruler import counting, documents, niah, tracing
from kvbench.tasks.ruler.fitting import LengthBudget, LengthTooShort, RulerPrompt
from kvbench.tasks.ruler.niah import Needles
from kvbench.tasks.ruler.words import VERSION, Essays, KeyWords, list_all_words
from kvbench.tasks.source import ENVIRONMENT, Files

ESSAYS = "paul_graham"
"""The folder of essays below the data folder."""
REVISIONS = ("2025", "2024", "lm_eval")
ALL, PART = "string_match_all", "string_match_part"
"""The metrics of RULER's tasks: by the share of the references that occur, and by whether one of them occurs."""
NEEDLES: Mapping[str, Needles] = MappingProxyType(
    {
        "niah_single_1": Needles(haystack="noise"),
        "niah_single_2": Needles(),
        "niah_single_3": Needles(value="uuid"),
        "niah_multikey_1": Needles(keys=4),
        "niah_multikey_2": Needles(haystack="needle"),
        "niah_multikey_3": Needles(haystack="needle", key="uuid", value="uuid"),
        "niah_multivalue": Needles(values=4),
        "niah_multiquery": Needles(keys=4, asked=4),
    }
)
"""The parameters of the tasks with needles, by the task's name."""
READERS: Mapping[str, tuple[str, Callable[[Path], documents.Library]]] = MappingProxyType(
    {
        "qa_1": ("ruler/squad.json", documents.read_squad),
        "qa_2": ("ruler/hotpotqa.json", documents.read_hotpot),
        # users may lack RULER's files; XQuAD has the form of SQuAD and is no part of RULER
        "qa_1@xquad": ("xquad.en.json", documents.read_squad),
    }
)
"""The tasks with questions about documents: each with its file below the data folder and the function that reads it."""
MANY = "@many"
"""The end of the name of a task that asks for the value of every key of its haystack, one question each."""
MANY_TASKS = ("niah_multikey_1@many", "niah_multikey_2@many", "niah_multikey_3@many")
SUBSTITUTES = ("qa_1@xquad", *MANY_TASKS)
"""The tasks that are not RULER's own. They are generated only if they are named."""
NEW_TOKENS: Mapping[str, int] = MappingProxyType(
    dict.fromkeys(NEEDLES, 128)
    | {"vt": 30, "cwe": 120, "fwe": 50}
    | dict.fromkeys(READERS, 32)
    | dict.fromkeys(MANY_TASKS, 128)
)
"""The tasks in RULER's order, then the substitutes, each with the new tokens of its answers."""
FILLED = 0.9
"""A prompt with its answer that is shorter than this share of its length is mentioned in the task's note."""


@dataclass(frozen=True, kw_only=True)
class RulerKnobs:
    """The knobs of conf/dataset/ruler.yaml, which explains each of them."""

    lengths: int | Sequence[int]
    examples: int
    seed: int
    revision: str | int
    haystack: str | None
    max_new_tokens: int | None
    questions: int | None = None


def load(context: LoadContext, **entry: Any) -> list[Task]:
    """Return a task for each name and length: the selected ones, or else RULER's own tasks that can be generated.

    A length counts prompt, chat template, the answer's beginning and the answer, without special tokens. Raises
    UsageError for a selected task whose data is missing, or whose smallest prompt exceeds a length.
    """
    knobs = RulerKnobs(**entry)
    dataset, files, tokenizer = context.dataset, context.files, context.tokenizer
    lengths = _check_knobs(dataset, knobs)
    # YAML reads the revision 2025 as a number
    revision = check_word(dataset, "revision", str(knobs.revision), REVISIONS)
    if tokenizer is None:
        raise UsageError(f"dataset {dataset} is cut to a number of tokens: it needs a model with a tokenizer")
    # a selection may name one length, such as vt/4096; load_tasks leaves out the other lengths
    selected = dict.fromkeys(name.partition("/")[0] for name in context.selection)
    _check_possible(dataset, selected, revision)
    sources = Sources(files, revision, knobs.haystack)
    names, lacking = _split_by_data(sources, selected)
    # without a selection, tasks whose data is missing are left out, and the note names them
    if lacking and selected:
        raise _make_lacking_error(dataset, sources, selected, lacking)
    # keep the last counts: a prompt that fits is counted again for its meta, and need not be tokenised again
    count = lru_cache(maxsize=2)(partial(_count_tokens, tokenizer))
    make_budget = partial(
        LengthBudget, seed=knobs.seed, count=count, measure=partial(_measure_prompt, count, context.render)
    )
    tasks = []
    for name, length in product(names, lengths):
        new_tokens = knobs.max_new_tokens or NEW_TOKENS[name]
        budget = make_budget(task=name, length=length, new_tokens=new_tokens)
        try:
            tasks.append(_make_task(dataset, sources, name, budget, knobs.examples))
        except LengthTooShort as error:
            # a whole suite runs without the task, and its note says so; a named task must not be left out
            if selected:
                raise
            lacking.append(f"{name} at {length} ({error})")
    if not tasks:
        raise UsageError(f"dataset {dataset}: no task can be generated: {'; '.join(lacking)}")
    facts = _list_facts_for_readers(sources, names, lacking, tasks)
    tasks = limit_questions(dataset, tasks, knobs.questions)
    if not facts:
        return tasks
    # all tasks have the same text, so that a table prints it once
    note = f"{dataset}: {'; '.join(facts)}"
    return [replace(task, note=note) for task in tasks]


def _check_knobs(dataset: str, knobs: RulerKnobs) -> list[int]:
    """Return the lengths as a list. Raises UsageError for an impossible number, or a length given twice."""
    lengths = knobs.lengths
    if isinstance(lengths, int):
        lengths = [lengths]
    lengths = list(lengths)
    # each length is a task of its own, so the same length twice would be the same id twice
    for length in lengths:
        check_whole(dataset, "lengths", length, least=1, most=10_000_000)
    if not lengths or len(set(lengths)) < len(lengths):
        raise UsageError(f"dataset.{dataset}.lengths={lengths} must be a list of different values, at least one")
    check_whole(dataset, "examples", knobs.examples, least=1, most=1_000_000)
    check_whole(dataset, "seed", knobs.seed, least=0)
    if knobs.max_new_tokens is not None:
        check_whole(dataset, "max_new_tokens", knobs.max_new_tokens)
    return lengths


def _check_possible(dataset: str, selected: Collection[str], revision: str) -> None:
    """Raise UsageError for a task that does not exist, and for a revision that cannot be generated."""
    for name in selected:
        if name not in NEW_TOKENS:
            raise unknown(f"task of dataset {dataset}", name, NEW_TOKENS)
    # this name exists only to give the reason why it is impossible
    if revision == "lm_eval":
        raise UsageError(
            f"dataset.{dataset}.revision=lm_eval is not possible: lm-evaluation-harness draws all tasks from one "
            "generator, so that its prompts depend on which run together, and none could be verified: 2025 or 2024"
        )


def _split_by_data(sources: Sources, selected: Collection[str]) -> tuple[list[str], list[str]]:
    """Return (names of the tasks that can be generated, the others with the reason why they cannot).

    selected: the wanted tasks; without any, RULER's own tasks are wanted.
    """
    candidates = list(selected) or [name for name in NEW_TOKENS if name not in SUBSTITUTES]
    names, lacking = [], []
    for name in candidates:
        reason = sources.explain_lack(name)
        if reason:
            lacking.append(f"{name} ({reason})")
        else:
            names.append(name)
    return names, lacking


def _make_lacking_error(
    dataset: str, sources: Sources, selected: Collection[str], lacking: Sequence[str]
) -> UsageError:
    """Return the error for selected tasks that cannot be generated. It names the absent files, if there are any."""
    message = f"dataset {dataset}: these tasks cannot be generated: {'; '.join(lacking)}"
    # a dictionary keeps the order, and has a file once that several tasks need
    absent: dict[str, None] = {}
    for name in selected:
        path = sources.find_absent(name)
        if path:
            absent[path] = None
    if not absent:
        return UsageError(message)
    if sources.files.root is None:
        # without a data folder, there is no place where a file could be missing
        return MissingData(message)
    return MissingData(message, absent)


def _list_facts_for_readers(
    sources: Sources, names: Sequence[str], lacking: Sequence[str], tasks: Sequence[Task]
) -> list[str]:
    """Return the facts that a reader must know to compare these tasks with published ones.

    names: the kinds of the tasks.
    lacking: the kinds that cannot be generated, with the reasons.
    tasks: the generated tasks, of all kinds and lengths.
    """
    facts = []
    if lacking:
        facts.append(f"not all of RULER's 13 tasks: without {'; '.join(lacking)}")
    for name in names:
        if name.endswith(MANY):
            facts.append(f"{name} asks for every key and is part of no mean called RULER")
        elif "@" in name:
            facts.append(f"{name} has questions of other data and is part of no mean called RULER")
    if any(sources.hides_in_essays(name) for name in names) and not sources.essays.are_rulers:
        facts.append("its essays are not RULER's")
    unfilled = _describe_unfilled(tasks, sources.revision)
    if unfilled:
        facts.append(unfilled)
    return facts


def _describe_unfilled(tasks: Sequence[Task], revision: str) -> str:
    """Return the note on tasks with prompts much shorter than their length; '' if there are none."""
    shares = []
    for task in tasks:
        count = 0
        for example in task.examples:
            tokens = example.meta["tokens"] + example.max_new_tokens
            if tokens < FILLED * example.meta["length"]:
                count += 1
        if count:
            _, _, name_and_length = task.id.partition("/")
            shares.append(f"{name_and_length} {count} of {len(task.examples)}")
    if not shares:
        return ""
    if revision != "2025":
        reason = f"as revision {revision} leaves them"
    else:
        reason = "since RULER draws one that came out too long again a step smaller (500 words, 10 documents)"
    return f"prompts below {FILLED:.0%} of their length, {reason}: {', '.join(shares)}"


def _make_task(dataset: str, sources: Sources, name: str, budget: LengthBudget, examples: int) -> Task:
    """Return the task ``name`` at the length of ``budget``, with the first ``examples`` of its prompts.

    Raises LengthTooShort if the smallest prompt exceeds the length.
    """
    # RULER scores questions by whether one reference occurs, all other tasks by the share that occurs
    metric = PART if name in READERS else ALL
    return Task(
        id=f"{dataset}/{name}/{budget.length}",
        examples=tuple(_make_examples(sources, name, budget, examples)),
        metric=metric,
        source=f"RULER {sources.revision}, seed {budget.seed}" + sources.describe_data(name),
        category="RULER",
        query_aware=False,
    )


def _make_examples(sources: Sources, name: str, budget: LengthBudget, examples: int) -> Iterator[Example]:
    """Yield the first ``examples`` prompts of the task ``name`` as examples. ``budget`` has their length in tokens.

    A task that asks for every key (``@many``) gives an example with one question for each key.
    """
    for i, prompt in enumerate(islice(sources.make_prompts(name, budget), examples)):
        meta = {"length": budget.length, "tokens": budget.measure(prompt)}
        example = Example(
            id=f"{name}-{budget.length}-{i}",
            prompt=prompt.context + prompt.question,
            answers=prompt.answers,
            max_new_tokens=budget.new_tokens,
            question=prompt.question,
            answer_prefix=prompt.prefix,
            meta=meta | dict(prompt.facts),
        )
        if name.endswith(MANY):
            turns = [Turn(asked.question, asked.answers, prefix=asked.prefix) for asked in prompt.others]
            # in the order of their keys in the haystack, the questions would reveal where each needle is
            Random(f"{budget.seed} {i}").shuffle(turns)
            example = replace(example, prompt=prompt.context, answers=(), question="", turns=tuple(turns))
        yield example


def _count_tokens(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False))


def _measure_prompt(count: Callable[[str], int], render: Callable[[str], str] | None, prompt: RulerPrompt) -> int:
    """Return a prompt's tokens, chat template and answer prefix included, without the tokenizer's special tokens."""
    content = prompt.context + prompt.question
    if render is not None:
        content = render(content)
    return count(content + prompt.prefix)


@dataclass(frozen=True)
class Sources:
    """The data for generating tasks. It is read when the first task needs it.

    files: the files below the data folder.
    revision: RULER's version.
    haystack: the file or folder of essays that the user names; None: the folder ESSAYS below the data folder.
    """

    files: Files
    revision: str
    haystack: str | None

    def explain_lack(self, task: str) -> str:
        """Return why a task cannot be generated; '' if it can."""
        # only the older revision's needles were compared with published prompts
        if self.revision != "2025" and task.removesuffix(MANY) not in NEEDLES:
            return f"its form of revision {self.revision} could not be verified"
        absent = self.find_absent(task)
        if not absent:
            return ""
        if task not in READERS:
            where = self.haystack or f"{ESSAYS} below the data folder, data.root= or {ENVIRONMENT}"
            return f"there are no .txt files of essays in {where}"
        reason = f"{absent} is not below the data folder"
        if f"{task}@xquad" in READERS:
            reason += f"; {task}@xquad stands in its place, if named"
        return reason

    def find_absent(self, task: str) -> str:
        """Return the absent file or folder that a task needs; '' if there is none."""
        if task in READERS:
            file, _ = READERS[task]
            if self._find_path(file) is None:
                return file
        if self.hides_in_essays(task) and not self._list_essay_files():
            return self.haystack or ESSAYS
        return ""

    def make_prompts(self, name: str, budget: LengthBudget) -> Iterator[RulerPrompt]:
        """Return an iterator over a task's prompts. Prompts about documents end with their file, others never end.

        name: the task.
        budget: the prompts' length in tokens, and the seed of all draws.
        """
        needles = NEEDLES.get(name.removesuffix(MANY))
        if needles is not None:
            # Punkt and a megabyte of essays are read only for a task that hides its needles in them
            essays = self.essays if self.hides_in_essays(name) else None
            return niah.make_prompts(budget, needles, self.keys, essays, revision=self.revision)
        if name in READERS:
            file, read_library = READERS[name]
            return documents.make_prompts(budget, read_library(self.files.path(file)))
        if name == "vt":
            return tracing.make_prompts(budget)
        if name == "cwe":
            return counting.make_common_prompts(budget, list_all_words())
        return counting.make_frequent_prompts(budget)

    def describe_data(self, task: str) -> str:
        """Return the data of a task in words, ready to follow other text; '' for a task without data."""
        if task in READERS:
            file, _ = READERS[task]
            return f"; {file}"
        if task.removesuffix(MANY) not in NEEDLES and task != "cwe":
            return ""
        # the version decides the keys of all prompts
        text = f"; words of wonderwords {VERSION}"
        if self.hides_in_essays(task):
            text += f"; {len(self._list_essay_files())} files of essays, sentences by Punkt"
        return text

    @cached_property
    def keys(self) -> KeyWords:
        """The ``adjective-noun`` pairs from which the keys of needles are drawn."""
        return KeyWords()

    @cached_property
    def essays(self) -> Essays:
        """The text that hides needles, read at first use."""
        # RULER joins its essays without a separator
        return Essays("".join(read_text(path, "dataset ruler: haystack") for path in self._list_essay_files()))

    def hides_in_essays(self, task: str) -> bool:
        """Return True if a task hides its needles in essays."""
        needles = NEEDLES.get(task.removesuffix(MANY))
        return needles is not None and needles.haystack == "essay"

    def _list_essay_files(self) -> list[Path]:
        """Return the essays' files: the file ``haystack``, or the .txt files of a folder in the order of their names.

        Without ``haystack`` the folder is ESSAYS. If it does not exist, there are no files.
        """
        if self.haystack:
            haystack: Path | None = Path(self.haystack).expanduser()
        else:
            haystack = self._find_path(ESSAYS)
        if haystack is None:
            return []
        if haystack.is_file():
            return [haystack]
        return sorted(haystack.glob("*.txt"))

    def _find_path(self, name: str) -> Path | None:
        if self.files.root is None:
            return None
        path = self.files.root / name
        if not path.exists():
            return None
        return path
