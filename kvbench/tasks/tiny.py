"""Six synthetic long-context tasks for the embedded tiny model, one per LongBench category.

A prompt hides *facts* ("the magic number of paris is 471.") between filler sentences and ends with a *query* whose last
words repeat the key ("... answer: paris is"). An answer has at least two tokens that must be looked up, because the
first generated token still comes from the uncompressed attention of the prefill.

Every example is a pure function of (task, length, index). Evaluation examples are seeded in their own domain
(``eval/...``); training (``kvbench.tasks.tiny_corpus``) draws from ``train/...``, so the two never share a seed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from kvbench.example import Example


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


CITIES = _words(
    """
    paris london tokyo berlin madrid rome oslo cairo lima quito dublin vienna prague athens lisbon warsaw moscow
    delhi beijing seoul bangkok hanoi jakarta manila sydney perth auckland toronto ottawa boston chicago dallas
    denver miami seattle houston phoenix havana bogota caracas santiago nairobi lagos accra dakar tunis rabat
    algiers tehran baghdad riyadh doha dubai kabul dhaka kathmandu colombo yangon taipei osaka kyoto mumbai chennai
    karachi lahore istanbul ankara sofia zagreb belgrade bucharest budapest
    """
)
VARIABLES = _words(
    """
    alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron rho sigma tau upsilon phi chi
    psi omega foo bar baz qux tmp buf ptr idx cnt acc ctx cfg env arg val ret res req src dst len pos col sum avg
    lhs rhs pid uid gid addr port host mode flag size cap node root step
    """
)
PEOPLE = _words(
    """
    anna bob carl dora emil fiona greg hana ivan julia kevin laura mark nina oscar paula quentin rosa simon tina
    ulrich vera walter xenia yusuf zoe alice brian clara david elena frank grace henry irene james karen liam maria
    nathan olivia peter rachel samuel teresa victor wendy aaron
    """
)
LABS = _words(
    """
    acme apex atlas aurora beacon cobalt cypress dynamo echo falcon genesis helix horizon icarus jupiter keystone
    lumen matrix nebula nova orion pegasus polaris quantum raven saturn summit titan umbra vertex vortex zenith
    """
)
OBJECTS = _words(
    """
    tulip lily daisy orchid fern oak maple pine cedar birch willow apple pear plum peach cherry lemon mango grape
    tiger lion bear wolf fox otter seal whale shark eagle hawk crow robin swan goose duck horse sheep goat camel
    violin piano drum flute harp guitar trumpet cello hammer wrench chisel ladder bucket kettle spoon plate candle
    lantern blanket pillow mirror basket rope
    """
)
SHADES = _words("deep pale soft vivid dull rich faint muted")
COLOURS = _words(
    """
    crimson amber azure ivory jade scarlet indigo violet olive teal maroon beige coral navy lilac khaki mauve ochre
    sepia sienna copper bronze silver golden
    """
)
TRAITS = _words(
    """
    brave quiet clever lazy gentle proud tiny giant ancient modern hungry happy angry sleepy curious famous
    """
)
TRADES = _words(
    """
    farmer doctor teacher painter sailor pilot baker judge soldier singer dancer writer miner tailor hunter monk
    """
)
ACTIONS = _words(
    """
    sings dances travels works sleeps waits laughs cries fights studies paints reads writes cooks swims climbs
    """
)
ORDINALS = ("first", "second", "third")

PLACES = _words(
    """
    wind river forest garden road village market bridge mountain valley harbor field tower library station window
    """
)
MOODS = _words("cold warm bright dark narrow wide low new clean dusty green grey calm busy long short")
TIMES = _words("morning evening night winter summer spring autumn noon")
CHANGES = _words("moves rests shines grows fades changes opens closes")
FILLER_WORDS = {"s": PLACES, "a": MOODS, "t": TIMES, "v": CHANGES}
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
# Sentences of 2 to 6 tokens with which any remaining room of two tokens or more can be filled exactly.
SHORT_FILLER = ("slowly.", "it {v}.", "the {s} {v}.", "the {s} was {a}.", "it was a {a} {t}.")
HEADER = "notes:"

PIECE = r" ?=>| ?[A-Za-z]+| ?\d| ?[^\w\s]"
"""Pre-token regex shared with the tokenizer: every piece of task text is one token."""
_PIECE = re.compile(PIECE)


def count_tokens(text: str) -> int:
    """Return the number of tokens of task text under the tiny tokenizer, without the leading ``<s>``."""
    return len(_PIECE.findall(text))


@dataclass(frozen=True)
class Query:
    """A question about one fact: ``question`` ends with the key, ``answer`` follows it after a space.

    ``lookups`` are the indices of the answer tokens that only the right fact determines (training weighs them more).
    """

    question: str
    answer: str
    lookups: tuple[int, ...]


@dataclass(frozen=True)
class Puzzle:
    """Facts to hide, in any order, and the queries that they answer."""

    facts: tuple[str, ...]
    queries: tuple[Query, ...]


@dataclass(frozen=True)
class TinyTask:
    """One task of the suite. ``tokens_per_fact`` decides how many facts fill a given length; ``most`` caps them."""

    category: str
    metric: str
    max_new_tokens: int
    puzzle: Callable[[random.Random, int], Puzzle]
    tokens_per_fact: int = 0
    most: int = 1
    classes: tuple[str, ...] = ()


def needle_sentence(city: str, digits: str) -> str:
    """Return the sentence to hide, in this suite or in real text: ``the magic number of paris is 471.``"""
    return f"the magic number of {city} is {digits}."


def needle_question(city: str) -> str:
    """Return the question that ends a needle prompt; the digits follow after a space."""
    return f"question: what is the magic number of {city}? answer: {city} is"


def needle_pair(index: int) -> tuple[str, str, str]:
    """Return the ``(sentence, question, answer)`` of an index, to hide in real text; its seed is not training's."""
    rng = random.Random(f"eval/needle-pair/{index}")
    city, number = rng.choice(CITIES), _digits(rng)
    return needle_sentence(city, number), needle_question(city), number


def needles(rng: random.Random, n: int) -> Puzzle:
    """Make up to ``n`` cities with three-digit magic numbers, and one query for each."""
    cities = rng.sample(CITIES, min(n, len(CITIES)))
    numbers = [_digits(rng) for _ in cities]
    return Puzzle(
        tuple(map(needle_sentence, cities, numbers)),
        tuple(Query(needle_question(city), number, (0,)) for city, number in zip(cities, numbers, strict=True)),
    )


def variables(rng: random.Random, n: int) -> Puzzle:
    """Make up to ``n`` assignments such as ``foo = 471;``, and one query for each, which prints the variable."""
    names = rng.sample(VARIABLES, min(n, len(VARIABLES)))
    values = [_digits(rng) for _ in names]
    return Puzzle(
        tuple(f"{name} = {value};" for name, value in zip(names, values, strict=True)),
        tuple(Query(f"print {name}; {name} =", value, (0,)) for name, value in zip(names, values, strict=True)),
    )


def mappings(rng: random.Random, n: int) -> Puzzle:
    """Make up to ``n`` few-shot pairs such as ``tulip => deep crimson.``, and one query for each object's label."""
    objects = rng.sample(OBJECTS, min(n, len(OBJECTS)))
    labels = [f"{rng.choice(SHADES)} {rng.choice(COLOURS)}" for _ in objects]
    return Puzzle(
        tuple(f"{name} => {label}." for name, label in zip(objects, labels, strict=True)),
        tuple(Query(f"{name} =>", label, (0,)) for name, label in zip(objects, labels, strict=True)),
    )


def two_hops(rng: random.Random, n: int) -> Puzzle:
    """Make up to ``n // 2`` people, each in a lab of their own in a city; each query's answer names lab, then city."""
    n = max(1, min(n // 2, len(LABS)))
    people, labs, cities = rng.sample(PEOPLE, n), rng.sample(LABS, n), rng.sample(CITIES, n)
    work_facts = tuple(f"{person} works at the {lab} lab." for person, lab in zip(people, labs, strict=True))
    lab_facts = tuple(f"the {lab} lab is in {city}." for lab, city in zip(labs, cities, strict=True))
    queries = tuple(
        Query(
            f"question: which city does {person} work in? answer: {person} works at the",
            f"{lab} lab. the {lab} lab is in {city}",
            (0, 4, 8),  # the lab, the lab again and the city in "LAB lab. the LAB lab is in CITY"
        )
        for person, lab, city in zip(people, labs, cities, strict=True)
    )
    return Puzzle(work_facts + lab_facts, queries)


def key_points(rng: random.Random, n: int) -> Puzzle:
    """Make three key points (whatever ``n`` is) and one query that lists them in order."""
    points = [f"{rng.choice(TRAITS)} {rng.choice(TRADES)} {rng.choice(ACTIONS)}" for _ in ORDINALS]
    facts = tuple(f"key point {ordinal}: {point}." for ordinal, point in zip(ORDINALS, points, strict=True))
    answer = ", ".join(f"{ordinal}: {point}" for ordinal, point in zip(ORDINALS, points, strict=True))
    question = f"question: list the key points first, second, third. answer: {ORDINALS[0]}:"
    # a point has three words; ", second: " puts three tokens between two points
    return Puzzle(facts, (Query(question, answer.removeprefix(f"{ORDINALS[0]}: "), (0, 6, 12)),))


LABELS = tuple(f"{shade} {colour}" for shade in SHADES for colour in COLOURS)
TASKS: Mapping[str, TinyTask] = {
    "needle": TinyTask("single-document QA", "f1", 8, needles),
    "hop": TinyTask("multi-document QA", "f1", 16, two_hops, tokens_per_fact=10, most=48),
    "listing": TinyTask("summarisation", "rouge_l", 24, key_points),
    "labels": TinyTask("few-shot", "accuracy", 8, mappings, tokens_per_fact=7, most=56, classes=LABELS),
    "multikey": TinyTask("synthetic retrieval", "exact_match", 8, needles, tokens_per_fact=14, most=64),
    "code": TinyTask("code", "edit_sim", 8, variables, tokens_per_fact=9, most=56),
}
MIN_LENGTH, MAX_LENGTH = 64, 4096
GOLDEN = (5**0.5 - 1) / 2
"""Step that spreads any number of consecutive indices evenly over the depths."""


def example(task: str, length: int, index: int) -> Example:
    """Return example ``index`` of a task, whose prompt has exactly ``length`` tokens, ``<s>`` included."""
    if task not in TASKS:
        raise ValueError(f"unknown tiny task {task!r}; available: {', '.join(TASKS)}")
    if not MIN_LENGTH <= length <= MAX_LENGTH:
        raise ValueError(f"length {length} of a tiny task is not in {MIN_LENGTH}..{MAX_LENGTH} tokens")
    spec, rng = TASKS[task], random.Random(f"eval/{task}/{length}/{index}")
    n = max(2, min(spec.most, (length - 40) // spec.tokens_per_fact)) if spec.tokens_per_fact else 1
    puzzle = spec.puzzle(rng, n)
    query = rng.choice(puzzle.queries)
    facts = list(puzzle.facts)
    rng.shuffle(facts)
    room = length - 1 - count_tokens(" ".join([HEADER, *facts, query.question]))
    fillers = filler_sentences(rng, room)
    meta: dict[str, object] = {"task": task, "category": spec.category, "length": length, "facts": len(facts)}
    if len(facts) == 1:
        leading_fillers = fillers[: round((0.5 + index * GOLDEN) % 1.0 * len(fillers))]
        meta["depth"] = round((1 + count_tokens(" ".join([HEADER, *leading_fillers]))) / length, 4)
        sentences = [*leading_fillers, *facts, *fillers[len(leading_fillers) :]]
    else:
        sentences = scatter(rng, facts, fillers)
    return Example(
        id=f"{task}-{length}-{index:05d}",
        prompt=" ".join([HEADER, *sentences, query.question]),
        answers=(query.answer,),
        max_new_tokens=spec.max_new_tokens,
        classes=spec.classes,
        question=f" {query.question}",
        meta=meta,
    )


def filler_sentences(rng: random.Random, room: int) -> list[str]:
    """Return random sentences without facts that have ``room`` tokens together (``room`` 0 or at least 2)."""
    if room == 1 or room < 0:
        raise ValueError(f"no filler sentences have {room} tokens together")
    sentences: list[str] = []
    while room:
        fitting = [t for t in FILLER if room - template_tokens(t) >= 2]
        template = rng.choice(fitting or [t for t in FILLER + SHORT_FILLER if template_tokens(t) in (room, room - 2)])
        sentences.append(_fill(rng, template))
        room -= template_tokens(template)
    rng.shuffle(sentences)
    return sentences


def filler_sentence(rng: random.Random) -> str:
    """Return one random sentence without facts."""
    return _fill(rng, rng.choice(FILLER))


def scatter(rng: random.Random, facts: list[str], fillers: list[str]) -> list[str]:
    """Return the facts in their order at random places among the filler sentences."""
    places = sorted(rng.randrange(len(fillers) + 1) for _ in facts)
    sentences: list[str] = []
    start = 0
    for place, fact in zip(places, facts, strict=True):
        sentences += [*fillers[start:place], fact]
        start = place
    return sentences + fillers[start:]


@cache
def template_tokens(template: str) -> int:
    """Return the number of tokens of a filler sentence made from ``template``."""
    return count_tokens(re.sub(r"\{\w\}", "x", template))


def words() -> list[str]:
    """Return every word of the tasks, sorted: the word pieces of the tokenizer."""
    lists = (CITIES, VARIABLES, PEOPLE, LABS, OBJECTS, SHADES, COLOURS, TRAITS, TRADES, ACTIONS, ORDINALS)
    rng = random.Random(0)
    puzzles = [spec.puzzle(rng, 2) for spec in TASKS.values()]
    texts = [text for p in puzzles for text in (*p.facts, *(f"{q.question} {q.answer}" for q in p.queries))]
    texts += [re.sub(r"\{\w\}", "", template) for template in FILLER + SHORT_FILLER]
    known = {word for group in (*lists, *FILLER_WORDS.values()) for word in group}
    return sorted(known | {word for text in texts for word in re.findall(r"[a-z]+", text)})


def _digits(rng: random.Random) -> str:
    return f"{rng.randrange(1000):03d}"


def _fill(rng: random.Random, template: str) -> str:
    return re.sub(r"\{(\w)\}", lambda match: rng.choice(FILLER_WORDS[match[1]]), template)
