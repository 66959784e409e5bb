"""Needles in a haystack: sentences that give keys a value, hidden in noise, in essays or among other such sentences."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from types import MappingProxyType

from kvbench.tasks.ruler.fitting import LengthBudget, OtherQuestion, RulerPrompt
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
"""RULER's depths of a needle in essays, in per cent: numpy.linspace(0, 100, 40), rounded."""
# the step of the search for a size, in words of essays, lines of noise or needles
STEPS = MappingProxyType({"essay": 500, "noise": 25, "needle": 25})


@dataclass(frozen=True)
class Needles:
    """The parameters of one needle task, as in RULER's synthetic.yaml.

    haystack: ``essay``, ``noise``, or ``needle`` for further sentences of the needle's form.
    key: the kind of keys: ``word``, ``number`` or ``uuid``.
    value: the kind of values, likewise.
    keys: the number of hidden keys.
    values: the number of values of each hidden key.
    asked: the number of keys that the question names.
    """

    haystack: str = "essay"
    key: str = "word"
    value: str = "number"
    keys: int = 1
    values: int = 1
    asked: int = 1

    def write(self, key: str, value: str) -> str:
        """Return the sentence that gives a key a value."""
        return NEEDLE.format(types=f"{self.value}s", key=key, value=value)


@dataclass(frozen=True)
class NeedleSource:
    """The material from which a task's prompts are drawn.

    rng: the generator of all draws, begun with ``seed``.
    seed: a number that alone decides how needles are shuffled.
    needles: the parameters of the task.
    key_words: the words of keys.
    essays: the haystack of tasks in essays; None for other tasks.
    """

    rng: Random
    seed: int
    needles: Needles
    key_words: KeyWords
    essays: Essays | None

    def draw(self, kind: str) -> str:
        """Return a drawn key or value of a kind: ``word``, ``number`` or ``uuid``."""
        if kind == "word":
            return str(self.rng.choice(self.key_words))
        if kind == "number":
            # numbers have seven digits
            return str(self.rng.randint(10**6, 10**7 - 1))
        return str(uuid.UUID(int=self.rng.getrandbits(128), version=4))


def make_prompts(
    budget: LengthBudget, needles: Needles, keys: KeyWords, essays: Essays | None, revision: str
) -> Iterator[RulerPrompt]:
    """Yield a task's prompts without end.

    keys: the words of keys.
    essays: the haystack of a task in essays; None for other tasks.
    revision: RULER's version. It decides how sizes are searched.
    """
    source = NeedleSource(rng=Random(budget.seed), seed=budget.seed, needles=needles, key_words=keys, essays=essays)
    draw = partial(_draw_prompt, source)
    step = STEPS[needles.haystack]
    if revision == "2024":
        size = budget.climb(draw, step)
    else:
        # since 2025 short lengths are searched in smaller steps
        if budget.length < 4096 and needles.haystack != "essay":
            step = 5
        size = budget.bisect(draw, step)
    while True:
        yield budget.sample(draw, size, step)


def _draw_prompt(source: NeedleSource, size: int) -> RulerPrompt:
    """Return a prompt whose haystack has ``size`` words or lines.

    The order of draws is RULER's: keys with their values, the haystack, the places, and last the question's keys.
    """
    needles, rng = source.needles, source.rng
    keys: list[str] = []
    values: list[list[str]] = []
    hidden: list[str] = []
    for _ in range(needles.keys):
        key = source.draw(needles.key)
        key_values = [source.draw(needles.value) for _ in range(needles.values)]
        keys.append(key)
        values.append(key_values)
        hidden += [needles.write(key, value) for value in key_values]
    Random(source.seed).shuffle(hidden)
    # the values of all keys in the haystack, the hidden keys last; essays hold no other keys
    values_by_key: dict[str, list[str]] = {}
    if source.essays is not None:
        haystack = _hide_in_essays(rng, source.essays.sentences(size), hidden)
    else:
        haystack = _hide_in_lines(source, size, hidden, values_by_key)
    # a hidden key may also have been drawn for the haystack: it then has both values
    for key, key_values in zip(keys, values, strict=True):
        values_by_key.setdefault(key, []).extend(key_values)
    asked_indices = rng.sample(range(needles.keys), needles.asked)
    answers: list[str] = []
    for i in asked_indices:
        answers += values[i]
    # several keys, or several values of one key, are asked for in the plural
    wording = Wording.choose(needles.value, one_answer=needles.asked * needles.values == 1)
    query = _enumerate_words([keys[i] for i in asked_indices])
    # for the tasks with ``@many`` in their names; the plural suits no single key
    others: list[OtherQuestion] = []
    if wording.one_answer:
        for key, key_values in values_by_key.items():
            others.append(OtherQuestion(wording.write_question(key), wording.write_prefix(key), tuple(key_values)))
    context = wording.write_context(haystack)
    depth = 100 * context.index(answers[0]) / len(context)
    return RulerPrompt(
        context=context,
        question=wording.write_question(query),
        prefix=wording.write_prefix(query),
        answers=tuple(answers),
        facts={"size": size, "depth": round(depth, 1)},
        short=source.essays is not None and size > len(source.essays),
        others=tuple(others),
    )


def _hide_in_lines(source: NeedleSource, size: int, hidden: Sequence[str], values_by_key: dict[str, list[str]]) -> str:
    """Return ``size`` lines of noise, or of drawn needles, with the ``hidden`` needles between them at drawn places.

    values_by_key: the keys and values of drawn needles are added here.
    """
    needles = source.needles
    lines = [NOISE] * size
    if needles.haystack == "needle":
        for i in range(size):
            key, value = source.draw(needles.key), source.draw(needles.value)
            lines[i] = needles.write(key, value)
            values_by_key.setdefault(key, []).append(value)
    # insert from the last place to the first: an insertion then does not move the places still to come
    places = sorted(source.rng.sample(range(size), len(hidden)), reverse=True)
    for place, needle in zip(places, hidden, strict=True):
        lines.insert(place, needle)
    return "\n".join(lines)


@dataclass(frozen=True)
class Wording:
    """The words of a prompt that depend on the kind of values, and on the number of values that it asks for.

    type: the name of the values, such as ``number`` or ``numbers``.
    some: the word before the values in the introduction, ``A`` or ``Some``.
    are: the verb of the introduction and of the answer's beginning.
    are_all: the verb of the question.
    one_answer: True if the prompt asks for one value.
    """

    type: str
    some: str
    are: str
    are_all: str
    one_answer: bool

    @classmethod
    def choose(cls, value: str, one_answer: bool) -> Wording:
        """Return RULER's words: singular if the question has ``one_answer``, else plural.

        value: the kind of values, ``number`` or ``uuid``.
        """
        if one_answer:
            return cls(type=value, some="A", are="is", are_all="is", one_answer=True)
        return cls(type=f"{value}s", some="Some", are="are", are_all="are all", one_answer=False)

    def write_context(self, text: str) -> str:
        """Return a haystack with its introduction."""
        return CONTEXT.format(some=self.some, type=self.type, are=self.are, context=text)

    def write_question(self, query: str) -> str:
        """Return the question for the values of one key, or of several keys in one text."""
        return QUESTION.format(are=self.are_all, type=self.type, query=query)

    def write_prefix(self, query: str) -> str:
        """Return the beginning of the answer."""
        return PREFIX.format(type=self.type, query=query, are=self.are)


def _enumerate_words(words: Sequence[str]) -> str:
    """Return words as an English enumeration: a, b, and c."""
    if len(words) == 1:
        return words[0]
    return f"{', '.join(words[:-1])}, and {words[-1]}"


def _hide_in_essays(rng: Random, sentences: Sequence[str], hidden: Sequence[str]) -> str:
    """Return the sentences with the ``hidden`` needles between them, in order, at different depths."""
    depths = rng.sample(DEPTHS, len(hidden))
    places = sorted(int(len(sentences) * (depth / 100)) for depth in depths)
    pieces = []
    start = 0
    for place, needle in zip(places, hidden, strict=True):
        # in a short text two depths can be one place: then the piece between them is empty, and adds a space
        pieces.append(" ".join(sentences[start:place]))
        pieces.append(needle)
        start = place
    pieces.append(" ".join(sentences[start:]))
    return " ".join(pieces)
