"""The dataset ruler: which tasks there are, what each needs, and its prompts at the lengths asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import islice, product
from pathlib import Path
from random import Random
from types import MappingProxyType

from kvbench.base.errors import MissingData, UsageError, unknown
from kvbench.base.example import Example, Turn
from kvbench.tasks.base import Task, Tokenizer, read_text
from kvbench.tasks.knobs import one_of, whole
from kvbench.tasks.ruler import counting, documents, niah, tracing
from kvbench.tasks.ruler.fitting import LengthBudget, LengthTooShort, RulerPrompt
from kvbench.tasks.ruler.niah import Needles
from kvbench.tasks.ruler.words import VERSION, Essays, KeyWords, pool
from kvbench.tasks.source import ENVIRONMENT, Files

ESSAYS = "paul_graham"
REVISIONS = ("2025", "2024", "lm_eval")
ALL, PART = "string_match_all", "string_match_part"
NEEDLES: Mapping[str, Needles] = MappingProxyType(
    {
        "niah_single_1": Needles("noise"),
        "niah_single_2": Needles(),
        "niah_single_3": Needles(value="uuid"),
        "niah_multikey_1": Needles(keys=4),
        "niah_multikey_2": Needles("needle"),
        "niah_multikey_3": Needles("needle", "uuid", "uuid"),
        "niah_multivalue": Needles(values=4),
        "niah_multiquery": Needles(keys=4, asked=4),
    }
)
READERS: Mapping[str, tuple[str, Callable[[Path], documents.Library]]] = MappingProxyType(
    {
        "qa_1": ("ruler/squad.json", documents.squad),
        "qa_2": ("ruler/hotpotqa.json", documents.hotpot),
        "qa_1@xquad": ("xquad.en.json", documents.squad),
    }
)
MANY = "@many"
"""Ends the name of a task that asks for the value of every key of its haystack, one question each."""
SUBSTITUTES = ("qa_1@xquad", *(f"niah_multikey_{i}{MANY}" for i in (1, 2, 3)))
NEW_TOKENS: Mapping[str, int] = MappingProxyType(
    {
        **{**dict.fromkeys(NEEDLES, 128), "vt": 30, "cwe": 120, "fwe": 50, **dict.fromkeys(READERS, 32)},
        **dict.fromkeys(SUBSTITUTES[1:], 128),
    }
)
"""The tasks in RULER's order, then substitutes; each with the new tokens of its answers."""
FILLED = 0.9


@dataclass(frozen=True, kw_only=True)
class RulerKnobs:
    """The knobs of conf/dataset/ruler.yaml, which explains each of them."""

    lengths: int | Sequence[int]
    examples: int
    seed: int
    revision: str | int
    haystack: str | None
    max_new_tokens: int | None


def load(
    dataset: str,
    tokenizer: Tokenizer | None,
    files: Files,
    selection: Sequence[str],
    knobs: RulerKnobs,
    render: Callable[[str], str] | None,
) -> list[Task]:
    """Return a task for each name and length: those selected, or else those of RULER that can be generated.

    A length counts prompt, chat template, the answer's beginning and the answer, without special tokens. Raises
    UsageError for a selected task whose data is missing, or whose smallest prompt exceeds a length.
    """
    lengths = [knobs.lengths] if isinstance(knobs.lengths, int) else list(knobs.lengths)
    for length in lengths:
        whole(dataset, "lengths", length, 1, 10_000_000)
    if not lengths or len(set(lengths)) < len(lengths):
        raise UsageError(f"dataset.{dataset}.lengths={lengths} must be a list of different values, at least one")
    whole(dataset, "examples", knobs.examples, 1, 1_000_000)
    whole(dataset, "seed", knobs.seed, 0)
    if knobs.max_new_tokens is not None:
        whole(dataset, "max_new_tokens", knobs.max_new_tokens)
    revision = one_of(dataset, "revision", str(knobs.revision), REVISIONS)
    if tokenizer is None:
        raise UsageError(f"dataset {dataset} is cut to a number of tokens: it needs a model with a tokenizer")
    selected = dict.fromkeys(name.partition("/")[0] for name in selection)
    for name in selected:
        if name not in NEW_TOKENS:
            raise unknown(f"task of dataset {dataset}", name, NEW_TOKENS)
    if revision == "lm_eval":
        raise UsageError(
            f"dataset.{dataset}.revision=lm_eval is not possible: lm-evaluation-harness draws all tasks from one "
            "generator, so that its prompts depend on which run together, and none could be verified: 2025 or 2024"
        )
    sources = Sources(files, revision, knobs.haystack)
    reasons = {n: sources.lack(n) for n in selected or NEW_TOKENS if n in selected or n not in SUBSTITUTES}
    names = [name for name, reason in reasons.items() if not reason]
    lacking = [f"{name} ({reason})" for name, reason in reasons.items() if reason]
    if lacking and selected:
        text = f"dataset {dataset}: these tasks cannot be generated: {'; '.join(lacking)}"
        absent = dict.fromkeys(filter(None, map(sources.absent, selected)))
        if absent:
            raise MissingData(text, absent if files.root else ())
        raise UsageError(text)
    kinds = {n: "asks for every key" if n.endswith(MANY) else "has questions of other data" for n in names if "@" in n}
    substitutes = [f"{name} {kind} and is part of no mean called RULER" for name, kind in kinds.items()]
    # a prompt that fits is counted once more, for what is recorded of it
    count = lru_cache(maxsize=2)(partial(_count, tokenizer))
    budget = partial(LengthBudget, seed=knobs.seed, count=count, measure=partial(_measure, count, render))
    tasks = []
    for name, length in product(names, lengths):
        fitted = budget(name, length, knobs.max_new_tokens or NEW_TOKENS[name])
        try:
            examples = tuple(_examples(sources, name, fitted, knobs.examples))
        except LengthTooShort as error:
            if selected:
                raise
            lacking.append(f"{name} at {length} ({error})")
            continue
        task = Task(
            id=f"{dataset}/{name}/{length}",
            examples=examples,
            metric=PART if name in READERS else ALL,
            source=f"RULER {revision}, seed {knobs.seed}" + sources.used(name),
            category="RULER",
            query_aware=False,
        )
        tasks.append(task)
    if not tasks:
        raise UsageError(f"dataset {dataset}: no task can be generated: {'; '.join(lacking)}")
    missing = f"not all of RULER's 13 tasks: without {'; '.join(lacking)}" if lacking else ""
    in_essays = any(sources.in_essays(name) for name in names)
    other = "its essays are not RULER's" if in_essays and not sources.essays.are_rulers else ""
    facts = [missing, *substitutes, other, _unfilled(tasks, revision)]
    note = f"{dataset}: {'; '.join(filter(None, facts))}" if any(facts) else ""
    return [replace(task, note=note) for task in tasks]


def _unfilled(tasks: Sequence[Task], revision: str) -> str:
    """Return the note on tasks with prompts much shorter than their length, '' if there are none."""
    shares = []
    for task in tasks:
        short = sum(e.meta["tokens"] + e.max_new_tokens < FILLED * e.meta["length"] for e in task.examples)
        if short:
            shares.append(f"{task.id.partition('/')[2]} {short} of {len(task.examples)}")
    reason = ", since RULER draws one that came out too long again a step smaller (500 words, 10 documents)"
    of_revision = reason if revision == "2025" else f", as revision {revision} leaves them"
    return f"prompts below {FILLED:.0%} of their length{of_revision}: {', '.join(shares)}" if shares else ""


def _examples(sources: Sources, name: str, budget: LengthBudget, examples: int) -> Iterator[Example]:
    """Yield the first ``examples`` prompts of one task and length."""
    for i, prompt in enumerate(islice(sources.prompts(name, budget), examples)):
        example = Example(
            id=f"{name}-{budget.length}-{i}",
            prompt=prompt.context + prompt.question,
            answers=prompt.answers,
            max_new_tokens=budget.new_tokens,
            question=prompt.question,
            answer_prefix=prompt.prefix,
            meta={"length": budget.length, "tokens": budget.measure(prompt), **prompt.facts},
        )
        if name.endswith(MANY):
            turns = [Turn(question, answers, prefix) for question, prefix, answers in prompt.others]
            Random(f"{budget.seed} {i}").shuffle(turns)  # the order says nothing of the place
            example = replace(example, prompt=prompt.context, answers=(), question="", turns=tuple(turns))
        yield example


def _count(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False))


def _measure(count: Callable[[str], int], render: Callable[[str], str] | None, prompt: RulerPrompt) -> int:
    """Return the tokens that a model reads of a prompt, without those that the tokenizer puts around a text."""
    content = prompt.context + prompt.question
    return count((render(content) if render else content) + prompt.prefix)


@dataclass(frozen=True)
class Sources:
    """The data that tasks are generated from, read when the first task needs it."""

    files: Files
    revision: str
    haystack: str | None

    def lack(self, task: str) -> str:
        """Return why a task cannot be generated, '' if it can."""
        if self.revision != "2025" and task.removesuffix(MANY) not in NEEDLES:
            return f"its form of revision {self.revision} could not be verified"
        absent = self.absent(task)
        if absent and task in READERS:
            instead = f"; {task}@xquad stands in its place, if named" if f"{task}@xquad" in READERS else ""
            return f"{absent} is not below the data folder{instead}"
        if absent:
            where = self.haystack or f"{ESSAYS} below the data folder, data.root= or {ENVIRONMENT}"
            return f"there are no .txt files of essays in {where}"
        return ""

    def absent(self, task: str) -> str:
        """Return the file or folder that a task needs and that is not there, '' for none."""
        if task in READERS and not self._path(READERS[task][0]):
            return READERS[task][0]
        if self.in_essays(task) and not self._essay_files():
            return self.haystack or ESSAYS
        return ""

    def prompts(self, name: str, budget: LengthBudget) -> Iterator[RulerPrompt]:
        """Return the generator of a task's prompts."""
        if (needles := NEEDLES.get(name.removesuffix(MANY))) is not None:
            essays = self.essays if self.in_essays(name) else None
            return niah.prompts(budget, needles, self.keys, essays, self.revision)
        if name in READERS:
            file, read = READERS[name]
            return documents.prompts(budget, read(self.files.path(file)))
        if name == "vt":
            return tracing.prompts(budget)
        return counting.common(budget, pool()) if name == "cwe" else counting.frequent(budget)

    def used(self, task: str) -> str:
        """Return the data of a task in words, ready to follow other text."""
        if task in READERS:
            return f"; {READERS[task][0]}"
        essays = f"; {len(self._essay_files())} files of essays, sentences by Punkt" if self.in_essays(task) else ""
        return f"; words of wonderwords {VERSION}{essays}" if task.removesuffix(MANY) in (*NEEDLES, "cwe") else ""

    @cached_property
    def keys(self) -> KeyWords:
        return KeyWords()

    @cached_property
    def essays(self) -> Essays:
        # without anything between them, as RULER joins them
        return Essays("".join(read_text(path, "dataset ruler: haystack") for path in self._essay_files()))

    def in_essays(self, task: str) -> bool:
        """Tell if a task hides its needles in essays."""
        needles = NEEDLES.get(task.removesuffix(MANY))
        return needles is not None and needles.haystack == "essay"

    def _essay_files(self) -> list[Path]:
        folder = Path(self.haystack).expanduser() if self.haystack else self._path(ESSAYS)
        if folder is None or folder.is_file():
            return [folder] if folder else []
        return sorted(folder.glob("*.txt"))

    def _path(self, name: str) -> Path | None:
        path = self.files.root / name if self.files.root is not None else None
        return path if path is not None and path.exists() else None
