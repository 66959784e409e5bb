"""Needles in a haystack: sentences that give keys a value, hidden in noise, in essays or among other such sentences."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from types import MappingProxyType

from kvbench.tasks.ruler.fitting import LengthBudget, RulerPrompt
from kvbench.tasks.ruler.words import Essays, KeyWords

NEEDLE = "One of the special magic {types} for {key} is: {value}."
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
CONTEXT = (
    "{some} special magic {type} {are} hidden within the following text. Make sure to memorize it. I will quiz you "
    "about the {type} afterwards.\n{context}\n"
)
QUESTION = "What {are} the special magic {type} for {query} mentioned in the provided text?"
PREFIX = " The special magic {type} for {query} mentioned in the provided text {are}"
DEPTHS = [round(100 * i / 39) for i in range(40)]
STEPS = MappingProxyType({"essay": 500, "noise": 25, "needle": 25})


@dataclass(frozen=True)
class Needles:
    """What distinguishes one needle task: haystack, what keys and values are, keys, values of each and keys asked."""

    haystack: str = "essay"
    key: str = "word"
    value: str = "number"
    keys: int = 1
    values: int = 1
    asked: int = 1


def prompts(
    budget: LengthBudget, needles: Needles, keys: KeyWords, essays: Essays | None, revision: str
) -> Iterator[RulerPrompt]:
    """Yield a task's prompts without end."""
    draw = partial(_draw, Random(budget.seed), budget.seed, needles, keys, essays)
    step = STEPS[needles.haystack]
    if revision == "2024":
        size = budget.climb(draw, step)
    else:
        step = 5 if budget.length < 4096 and needles.haystack != "essay" else step
        size = budget.bisect(draw, step)
    while True:
        yield budget.sample(draw, size, step)


def _draw(
    rng: Random, seed: int, needles: Needles, key_words: KeyWords, essays: Essays | None, size: int
) -> RulerPrompt:
    """Return a prompt whose haystack has ``size`` words or lines."""

    def draw(kind: str) -> str:
        if kind == "word":
            return str(rng.choice(key_words))
        if kind == "number":
            return str(rng.randint(10**6, 10**7 - 1))
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))

    sentence = NEEDLE.replace("{types}", f"{needles.value}s")
    told: dict[str, list[str]] = {}  # the values of each key in the haystack
    values: dict[int, list[str]] = {}
    keys, hidden = [], []
    for i in range(needles.keys):
        keys.append(draw(needles.key))
        values[i] = [draw(needles.value) for _ in range(needles.values)]
        hidden += [sentence.format(key=keys[i], value=value) for value in values[i]]
    Random(seed).shuffle(hidden)
    if essays is not None:
        context = _in_essays(rng, essays.sentences(size), hidden)
    else:
        lines = [NOISE] * size
        if needles.haystack == "needle":
            pairs = [(draw(needles.key), draw(needles.value)) for _ in range(size)]
            lines = [sentence.format(key=key, value=value) for key, value in pairs]
            for key, value in pairs:
                told.setdefault(key, []).append(value)
        places = sorted(rng.sample(range(size), len(hidden)), reverse=True)
        for place, needle in zip(places, hidden, strict=True):
            lines.insert(place, needle)
        context = "\n".join(lines)
    asked = rng.sample(range(needles.keys), needles.asked)
    answers = tuple(value for i in asked for value in values[i])
    for key, found in zip(keys, values.values(), strict=True):
        told.setdefault(key, []).extend(found)
    queries = [keys[i] for i in asked]
    query = f"{', '.join(queries[:-1])}, and {queries[-1]}" if len(queries) > 1 else queries[0]
    one = needles.asked * needles.values == 1
    wording = {"type": needles.value if one else f"{needles.value}s", "are": "is" if one else "are", "query": query}
    opening = CONTEXT.format(some="A" if one else "Some", context=context, **wording)
    return RulerPrompt(
        context=opening,
        question=QUESTION.format(**{**wording, "are": "is" if one else "are all"}),
        prefix=PREFIX.format(**wording),
        answers=answers,
        facts={"size": size, "depth": round(100 * opening.index(answers[0]) / len(opening), 1)},
        short=essays is not None and size > len(essays),
        others=tuple(
            (QUESTION.format(**{**wording, "query": key}), PREFIX.format(**{**wording, "query": key}), tuple(found))
            for key, found in told.items()
        )
        if one
        else (),
    )


def _in_essays(rng: Random, sentences: Sequence[str], hidden: Sequence[str]) -> str:
    """Return the sentences with needles between them, at depths of which none is drawn twice."""
    depths = rng.sample(DEPTHS, len(hidden))
    places = [0, *sorted(int(len(sentences) * (depth / 100)) for depth in depths), len(sentences)]
    pieces = []
    for i, needle in enumerate(hidden):
        pieces += [" ".join(sentences[places[i] : places[i + 1]]), needle]
    return " ".join([*pieces, " ".join(sentences[places[-2] :])])
