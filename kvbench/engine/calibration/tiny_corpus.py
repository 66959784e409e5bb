"""Sequences of the tiny model's corpus: the tasks of ``kvbench.tasks.tiny`` with many queries each.

A sequence is facts among filler, then as many queries as fit, so that a fifth of its tokens are answers. Some filler is
*noise*: pseudo-words spelled in bytes, which stand for real text (of which none is used). The model was trained on
batches of these sequences and on two copy tasks (``scripts/tiny_model/corpus.py``).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache, lru_cache

from tokenizers import Tokenizer

from kvbench.models import embedded
from kvbench.tasks import tiny

TASKS = ("needle", "hop", "listing", "labels", "code")
"""Tasks that are trained; ``multikey`` is ``needle`` with more than one fact."""
BOS, EOS = 1, 2
CONSONANTS = "bcdfghjklmnpqrstvwxyz"


class Role(IntEnum):
    """The part a token plays in the loss."""

    CONTEXT = 0
    NOISE = 1
    ANSWER = 2
    LOOKUP = 3
    COPY = 4


@dataclass(frozen=True)
class Span:
    """Tokens with the role of each. ``task`` is the index of the task that asks for them, 0 for context."""

    ids: tuple[int, ...]
    roles: tuple[Role, ...]
    task: int = 0


def draw_tasks(rng: random.Random, mix: Mapping[str, float]) -> list[str]:
    """Return the names of one to three different tasks, drawn by the weights of ``mix``."""
    return list(dict.fromkeys(rng.choices(list(mix), list(mix.values()), k=rng.choice((1, 1, 2, 3)))))


def questions(rng: random.Random, length: int, chosen: Sequence[str]) -> list[Span]:
    """Draw a sequence of ``length + 1`` tokens: ``<s>``, facts of the chosen tasks among filler, shuffled queries."""
    # three sequences in five give up to 72 % of their tokens to filler; the tasks share the rest
    share = (length - 1) * (1 - (0.72 * rng.random() if rng.random() < 0.6 else 0.0)) / len(chosen)
    groups: list[list[str]] = []
    queries: list[tuple[int, tiny.Query]] = []
    for name in chosen:
        fact_cost, query_cost = _costs(name)
        # one time in four facts take three quarters of the share; else facts and nine tenths of their queries fit in it
        if rng.random() < 0.25:
            n = share * 0.75 / fact_cost
        else:
            n = share * rng.uniform(0.6, 1.0) / (fact_cost + 0.9 * query_cost)
        puzzle = tiny.TASKS[name].puzzle(rng, max(1, int(n)))
        groups.append(rng.sample(puzzle.facts, len(puzzle.facts)))
        queries += [(TASKS.index(name), query) for query in puzzle.queries]
    noisy = rng.choices((0.0, 0.2, 1.0), (70, 15, 15))[0]
    facts = [_text(rng, fact, noisy) for group in groups for fact in group]
    if len(groups) == 1 or rng.random() < 0.5:
        rng.shuffle(facts)
    header = encode(tiny.HEADER) if rng.random() < 0.8 else ()
    free_tokens = length - len(header) - sum(len(fact.ids) for fact in facts)
    if free_tokens < 0:
        return questions(rng, length, chosen)
    rng.shuffle(queries)
    queried: list[Span] = []
    for task, query in queries:
        span = replace(_ask(rng, query, noisy), task=task)
        if len(span.ids) <= free_tokens:
            queried.append(span)
            free_tokens -= len(span.ids)
    return [context((BOS, *header)), *_mingle(rng, facts, filler_spans(rng, free_tokens, noisy)), *queried]


def _ask(rng: random.Random, query: tiny.Query, noisy: float) -> Span:
    question = _text(rng, query.question, noisy)
    answer = (*encode(f" {query.answer}"), EOS)
    roles = tuple(Role.LOOKUP if i in query.lookups else Role.ANSWER for i in range(len(answer)))
    return Span(question.ids + answer, question.roles + roles)


def filler_spans(rng: random.Random, room: int, noisy: float) -> list[Span]:
    """Return random filler of ``room`` tokens, cut at its start. A share ``noisy`` of its sentences is noise."""
    spans: list[Span] = []
    while room > 0:
        if rng.random() < noisy:
            ids, role = encode(noise(rng)), Role.NOISE
        else:
            ids, role = encode(f" {tiny.filler_sentence(rng)}"), Role.CONTEXT
        ids = ids[-room:]
        spans.append(Span(ids, (role,) * len(ids)))
        room -= len(ids)
    return spans[::-1]


def _mingle(rng: random.Random, facts: list[Span], fillers: list[Span]) -> list[Span]:
    """Return facts among fillers, both in order, with the first filler first.

    One time in five all facts stay together.
    """
    if not fillers:
        return facts
    first_filler, later_fillers = fillers[0], fillers[1:]
    if rng.random() < 0.8:
        return [first_filler, *tiny.scatter(rng, facts, later_fillers)]
    place = rng.randrange(len(later_fillers) + 1)
    return [first_filler, *later_fillers[:place], *facts, *later_fillers[place:]]


def noise(rng: random.Random) -> str:
    """Return a random sentence of pseudo-words like prose: with case, punctuation, line breaks and function words."""
    words = []
    for _ in range(rng.randrange(3, 13)):
        kind = rng.random()
        if kind < 0.35:
            word = rng.choice(_function_words())
        elif kind < 0.39:
            word = str(rng.randrange(3000))
        else:
            length = rng.randrange(1, 10)
            word = "".join(rng.choice("aeiou" if rng.random() < 0.4 else CONSONANTS) for _ in range(length))
            case = rng.random()
            if case < 0.15:
                word = word.capitalize()
            elif case < 0.18:
                word = word.upper()
        words.append(word + rng.choices(("", ",", ";", "'", ":", "-"), (88, 6, 1, 2, 1, 2))[0])
    words[0] = words[0].capitalize()
    opening = rng.choices((" ", "\n", "\n\n"), (80, 10, 10))[0]
    return opening + " ".join(words).rstrip(",;:'-") + rng.choices((".", "?", "!", '."', ""), (80, 6, 4, 4, 6))[0]


@lru_cache(1 << 16)
def encode(text: str) -> tuple[int, ...]:
    """Return the token ids of a text without ``<s>``. They are cached, as the same sentences come again and again."""
    return tuple(_tokenizer().encode(text, add_special_tokens=False).ids)


def context(ids: tuple[int, ...]) -> Span:
    """Return the tokens as a span that no loss looks at."""
    return Span(ids, (Role.CONTEXT,) * len(ids))


def _text(rng: random.Random, sentence: str, noisy: float) -> Span:
    """Return a sentence after a space; in noisy sequences sometimes after a line break, as in real text."""
    return context(encode(("\n" if noisy and rng.random() < 0.15 else " ") + sentence))


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(embedded.path() / "tokenizer.json"))


@cache
def _costs(name: str) -> tuple[float, float]:
    """Return (fact tokens per fact, query tokens per fact) of a task."""
    puzzle = tiny.TASKS[name].puzzle(random.Random(0), 4)
    facts = sum(map(tiny.count_tokens, puzzle.facts))
    queries = sum(tiny.count_tokens(f"{q.question} {q.answer}") + 1 for q in puzzle.queries)
    return facts / len(puzzle.facts), queries / len(puzzle.facts)


@cache
def _function_words() -> list[str]:
    slot_words = {word for group in tiny.FILLER_WORDS.values() for word in group}
    template_words = {word.strip(".,") for template in tiny.FILLER for word in template.split() if "{" not in word}
    return sorted(template_words - slot_words)
