"""Six synthetic long-context tasks for the embedded tiny model, one per LongBench category.

A prompt hides *facts* ("the magic number of paris is 471.") between filler sentences. It ends with a *query*, whose
last words repeat the key ("... answer: paris is"). An answer has at least two tokens that must be looked up: the first
generated token still comes from the uncompressed attention of the prefill.

Every example is a pure function of (task, length, index). Evaluation examples are seeded in their own domain
(``eval/...``); training (``scripts/tiny_model``) draws from ``train/...``, so the two never share a seed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product
from pathlib import Path
from typing import NamedTuple, TypeVar

import yaml

from kvbench.base.example import Example
from kvbench.tasks.base import LoadContext, Task, limit_answers
from kvbench.tasks.knobs import check_whole

T = TypeVar("T")

WORDS = {
    name: tuple(text.split())
    for name, text in yaml.safe_load(Path(__file__).with_name("tiny_words.yaml").read_text(encoding="utf-8")).items()
}
"""The word lists of tiny_words.yaml by name."""
CITIES, PEOPLE, LABS = WORDS["cities"], WORDS["people"], WORDS["labs"]
SHADES, COLOURS = WORDS["shades"], WORDS["colours"]
ORDINALS = ("first", "second", "third")
FILLER_WORDS = {"s": WORDS["places"], "a": WORDS["moods"], "t": WORDS["times"], "v": WORDS["changes"]}
FILLER = (
    "the {s} is {a} in the {t}.",
    "in the {t} the {s} {v} slowly.",
    "there is a {a} {s} near the {s}.",
    "we walked past the {a} {s} and saw the {s}.",
    "the {s} and the {s} are {a}.",
    "every {t} the {a} {s} {v} again.",
    "people say that the {s} {v} in the {t}.",
    "here we go, there and back again.",
    "it was a {a} {t} by the {s}.",
)
# these sentences have 2 to 6 tokens, so they can fill any room of two tokens or more exactly
SHORT_FILLER = ("slowly.", "it {v}.", "the {s} {v}.", "the {s} was {a}.", "it was a {a} {t}.")
HEADER = "notes:"
NEEDLE = "the magic number of {key} is {value}."
"""The sentence to hide, in this suite or in real text."""
NEEDLE_QUESTION = "question: what is the magic number of {key}? answer: {key} is"
"""The question that ends a prompt. The digits of the answer follow a space."""

PIECE = r" ?=>| ?[A-Za-z]+| ?\d| ?[^\w\s]"
"""Pre-token regex shared with the tokenizer: every piece of task text is one token."""
_PIECE = re.compile(PIECE)


def count_tokens(text: str) -> int:
    """Return the number of tokens of task text under the tiny tokenizer, without the leading ``<s>``."""
    return len(_PIECE.findall(text))


@dataclass(frozen=True)
class Query:
    """A question about one fact.

    question: the text of the question, which ends with the key.
    answer: the text that follows the question after a space.
    lookups: the indices of the answer's tokens that only the right fact determines. Training gives them more weight.
    """

    question: str
    answer: str
    lookups: tuple[int, ...]


@dataclass(frozen=True)
class Puzzle:
    """Facts to hide in a prompt, in any order, and the queries that they answer. A prompt asks one of the queries."""

    facts: tuple[str, ...]
    queries: tuple[Query, ...]


@dataclass(frozen=True)
class TinyTask:
    """One task of the suite.

    category: the kind of task, by which reports group tasks.
    metric: the name of the metric.
    max_new_tokens: the most tokens of an answer.
    puzzle: the function that draws facts and queries from (random stream, number of facts).
    tokens_per_fact: the tokens of a prompt for each fact; 0 for tasks with one fact or a fixed number.
    most: the largest number of facts in a prompt.
    classes: the closed set of labels, if answers are labels.
    """

    category: str
    metric: str
    max_new_tokens: int
    puzzle: Callable[[random.Random, int], Puzzle]
    tokens_per_fact: int = 0
    most: int = 1
    classes: tuple[str, ...] = ()


class NeedlePair(NamedTuple):
    """A sentence to hide in a text, and the question that asks for it.

    needle: the sentence.
    question: the text of the question.
    answer: the reference.
    """

    needle: str
    question: str
    answer: str


def draw_needle(index: int) -> NeedlePair:
    """Return the needle that example ``index`` of a needle test hides in real text. Training draws from other seeds."""
    rng = random.Random(f"eval/needle-pair/{index}")
    city, number = rng.choice(CITIES), _draw_digits(rng)
    return NeedlePair(NEEDLE.format(key=city, value=number), NEEDLE_QUESTION.format(key=city), number)


def make_lookups(
    keys: Sequence[str], draw: Callable[[random.Random], str], fact: str, question: str
) -> Callable[[random.Random, int], Puzzle]:
    """Return a function for ``TinyTask.puzzle``. It makes facts of different keys, and a query for each.

    keys: the keys to choose from.
    draw: the function that draws the value of a key.
    fact: the template of a fact, which holds ``{key}`` and ``{value}``.
    question: the template of a query's question, which holds ``{key}``.
    """

    def draw_puzzle(rng: random.Random, n: int) -> Puzzle:
        """Return ``n`` facts, or one for each key if there are fewer keys, with their queries."""
        chosen_keys = rng.sample(keys, min(n, len(keys)))
        # draw all keys before all values: another order would draw other prompts
        values = [draw(rng) for _ in chosen_keys]
        facts = []
        queries = []
        for key, value in zip(chosen_keys, values, strict=True):
            facts.append(fact.format(key=key, value=value))
            # the first token of a value decides it, as no two facts have the same key
            queries.append(Query(question.format(key=key), value, lookups=(0,)))
        return Puzzle(tuple(facts), tuple(queries))

    return draw_puzzle


def draw_two_hops(rng: random.Random, n: int) -> Puzzle:
    """Return the facts about people, each of whom works in a lab of their own in a city, with a query for each person.

    n: the most facts. Each person takes two, and there is at least one person. A query's answer names the lab, then the
        city.
    """
    count = max(1, min(n // 2, len(LABS)))
    people = rng.sample(PEOPLE, count)
    labs = rng.sample(LABS, count)
    cities = rng.sample(CITIES, count)
    work_facts = []
    lab_facts = []
    queries = []
    for person, lab, city in zip(people, labs, cities, strict=True):
        work_facts.append(f"{person} works at the {lab} lab.")
        lab_facts.append(f"the {lab} lab is in {city}.")
        query = Query(
            question=f"question: which city does {person} work in? answer: {person} works at the",
            answer=f"{lab} lab. the {lab} lab is in {city}",
            lookups=(0, 4, 8),  # the lab, the lab again and the city in "LAB lab. the LAB lab is in CITY"
        )
        queries.append(query)
    return Puzzle(tuple(work_facts + lab_facts), tuple(queries))


def draw_key_points(rng: random.Random, n: int) -> Puzzle:
    """Return three facts, each a key point, whatever ``n`` is, and one query that asks for them in order."""
    points = []
    for _ in ORDINALS:
        words = [rng.choice(WORDS[kind]) for kind in ("traits", "trades", "actions")]
        points.append(" ".join(words))
    facts = []
    items = []
    for ordinal, point in zip(ORDINALS, points, strict=True):
        facts.append(f"key point {ordinal}: {point}.")
        items.append(f"{ordinal}: {point}")
    # the question ends with "first:", so the answer goes on behind this word
    question = f"question: list the key points first, second, third. answer: {ORDINALS[0]}:"
    answer = ", ".join(items).removeprefix(f"{ORDINALS[0]}: ")
    # the first words of the points: a point has three words, and ", second: " puts three tokens between two points
    query = Query(question, answer, lookups=(0, 6, 12))
    return Puzzle(tuple(facts), (query,))


def _draw_digits(rng: random.Random) -> str:
    # three tokens: the model's tokenizer splits numbers into digits
    return f"{rng.randrange(1000):03d}"


def _draw_shade(rng: random.Random) -> str:
    """Return a shade and a colour, one of LABELS."""
    return f"{rng.choice(SHADES)} {rng.choice(COLOURS)}"


needles = make_lookups(CITIES, _draw_digits, NEEDLE, NEEDLE_QUESTION)
variables = make_lookups(WORDS["variables"], _draw_digits, "{key} = {value};", "print {key}; {key} =")
mappings = make_lookups(WORDS["objects"], _draw_shade, "{key} => {value}.", "{key} =>")
LABELS = tuple(f"{shade} {colour}" for shade, colour in product(SHADES, COLOURS))
TASKS: Mapping[str, TinyTask] = {
    "needle": TinyTask("single-document QA", "f1", max_new_tokens=8, puzzle=needles),
    "hop": TinyTask("multi-document QA", "f1", max_new_tokens=16, puzzle=draw_two_hops, tokens_per_fact=10, most=48),
    "listing": TinyTask("summarisation", "rouge_l", max_new_tokens=24, puzzle=draw_key_points),
    "labels": TinyTask(
        "few-shot", "accuracy", max_new_tokens=8, puzzle=mappings, tokens_per_fact=7, most=56, classes=LABELS
    ),
    "multikey": TinyTask(
        "synthetic retrieval", "exact_match", max_new_tokens=8, puzzle=needles, tokens_per_fact=14, most=64
    ),
    "code": TinyTask("code", "edit_sim", max_new_tokens=8, puzzle=variables, tokens_per_fact=9, most=56),
}
MIN_LENGTH, MAX_LENGTH = 64, 4096
"""The least and the most tokens of a prompt."""
GOLDEN = (5**0.5 - 1) / 2
"""The golden ratio without its whole part. The fractional parts of its multiples spread evenly from 0 to 1."""


def make_example(task: str, length: int, index: int) -> Example:
    """Return example ``index`` of a task. The prompt has exactly ``length`` tokens, ``<s>`` included.

    Raises ValueError for an unknown task, and for a length out of MIN_LENGTH to MAX_LENGTH.
    """
    if task not in TASKS:
        raise ValueError(f"unknown tiny task {task!r}; available: {', '.join(TASKS)}")
    if not MIN_LENGTH <= length <= MAX_LENGTH:
        raise ValueError(f"length {length} of a tiny task is not in {MIN_LENGTH}..{MAX_LENGTH} tokens")
    spec, rng = TASKS[task], random.Random(f"eval/{task}/{length}/{index}")
    fact_count = 1
    if spec.tokens_per_fact:
        # keep 40 tokens for the header, the query and some filler
        room_for_facts = length - 40
        fact_count = max(2, min(spec.most, room_for_facts // spec.tokens_per_fact))
    puzzle = spec.puzzle(rng, fact_count)
    query = rng.choice(puzzle.queries)
    facts = list(puzzle.facts)
    rng.shuffle(facts)
    # fillers fill the room exactly; the 1 is <s>
    room = length - 1 - count_tokens(_join_prompt(facts, query.question))
    fillers = draw_filler_sentences(rng, room)
    meta: dict[str, object] = {"task": task, "category": spec.category, "length": length, "facts": len(facts)}
    if len(facts) == 1:
        # over the examples, a single fact takes all depths evenly, not at random; example 0 has it in the middle
        depth = (0.5 + index * GOLDEN) % 1.0
        place = round(depth * len(fillers))
        sentences = fillers[:place] + facts + fillers[place:]
        # the 1 is <s>
        tokens_before = 1 + count_tokens(f"{HEADER} {' '.join(fillers[:place])}")
        meta["depth"] = round(tokens_before / length, 4)
    else:
        sentences = scatter(rng, facts, fillers)
    return Example(
        id=f"{task}-{length}-{index:05d}",
        prompt=_join_prompt(sentences, query.question),
        answers=(query.answer,),
        max_new_tokens=spec.max_new_tokens,
        classes=spec.classes,
        question=f" {query.question}",  # as the prompt ends, with the space before it
        meta=meta,
    )


def _join_prompt(sentences: Sequence[str], question: str) -> str:
    return f"{HEADER} {' '.join(sentences)} {question}"


def load(context: LoadContext, length: int, examples: int, max_new_tokens: int | None = None) -> list[Task]:
    """Return the wanted tasks of the six with ``examples`` generated prompts of ``length`` tokens each.

    max_new_tokens: the most tokens of every answer; None: each task's own number.

    No file is read. If a wanted task does not exist, all six are returned, so that load_tasks can name them in its
    error.
    """
    dataset = context.dataset
    check_whole(dataset, "length", length, least=64, most=4000)
    check_whole(dataset, "examples", examples, least=1, most=100_000)
    wanted = set(context.selection)
    if not wanted or not wanted <= TASKS.keys():
        wanted = set(TASKS)
    tasks = []
    for name, spec in TASKS.items():
        if name not in wanted:
            continue
        task = Task(
            id=f"{dataset}/{name}",
            examples=_make_examples(name, length, examples),
            metric=spec.metric,
            source=f"generated by kvbench.tasks.tiny, length {length}",
            category=spec.category,
        )
        tasks.append(task)
    return limit_answers(dataset, tasks, max_new_tokens)


# cached, since a report asks for the examples once for every table
@lru_cache(maxsize=24)
def _make_examples(task: str, length: int, count: int) -> tuple[Example, ...]:
    return tuple(make_example(task, length, i) for i in range(count))


def draw_filler_sentences(rng: random.Random, room: int) -> list[str]:
    """Return random sentences without facts that have ``room`` tokens together.

    Raises ValueError if ``room`` is 1 or below 0, which no sentences can fill.
    """
    if room == 1 or room < 0:
        raise ValueError(f"no filler sentences have {room} tokens together")
    sentences: list[str] = []
    while room:
        # no sentence has one token, so none or at least two tokens must remain after each of them
        templates = [template for template in FILLER if room - count_template_tokens(template) >= 2]
        if not templates:
            # near the end, take a sentence that fills the room, or that leaves two tokens for the last sentence
            templates = [
                template for template in FILLER + SHORT_FILLER if count_template_tokens(template) in (room, room - 2)
            ]
        template = rng.choice(templates)
        sentences.append(_fill_template(rng, template))
        room -= count_template_tokens(template)
    rng.shuffle(sentences)
    return sentences


def draw_filler_sentence(rng: random.Random) -> str:
    """Return one random sentence without facts."""
    return _fill_template(rng, rng.choice(FILLER))


def scatter(rng: random.Random, facts: list[T], fillers: list[T]) -> list[T]:
    """Return the facts in their order at random places among the filler sentences."""
    # a fact at place i stands before filler i; several facts may have the same place
    places = sorted(rng.randrange(len(fillers) + 1) for _ in facts)
    sentences: list[T] = []
    start = 0
    for place, fact in zip(places, facts, strict=True):
        sentences += fillers[start:place]
        sentences.append(fact)
        start = place
    return sentences + fillers[start:]


@cache
def count_template_tokens(template: str) -> int:
    """Return the number of tokens of a filler sentence made from ``template``."""
    # every word of the lists is one token, as x is
    return count_tokens(re.sub(r"\{\w\}", "x", template))


def _fill_template(rng: random.Random, template: str) -> str:
    """Return a sentence: the template with a random word of FILLER_WORDS for each ``{letter}``."""
    return re.sub(r"\{(\w)\}", lambda match: rng.choice(FILLER_WORDS[match[1]]), template)
