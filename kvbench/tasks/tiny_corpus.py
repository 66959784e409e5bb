"""Training sequences of the tiny model: the tasks of ``kvbench.tasks.tiny`` with many queries each, and two copy tasks.

A sequence is facts among filler, then as many queries as fit, so that a fifth of its tokens are answers. Some filler is
*noise*: pseudo-words spelled in bytes, which stand for real text (of which none is used). The copy tasks are made of
random tokens, so nothing in them can be memorised; they only teach to look back.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache

import torch
from torch import Tensor

from kvbench.tasks import tiny, tiny_tokens
from kvbench.tasks.tiny_tokens import BOS, EOS, FIRST_WORD, SPECIAL, encode

TASKS = ("needle", "hop", "listing", "labels", "code")
"""Tasks that are trained; ``multikey`` is ``needle`` with more than one fact."""
NAMES = (*TASKS, "copy", "pairs")
CONSONANTS = "bcdfghjklmnpqrstvwxyz"
SPREAD = 2304
"""The random gaps in the positions of T tokens sum to less than twice SPREAD - T."""


class Role(IntEnum):
    """The part a token plays in the loss."""

    CONTEXT = 0
    NOISE = 1
    ANSWER = 2
    LOOKUP = 3
    COPY = 4


@dataclass(frozen=True)
class Span:
    """Tokens with the role of each."""

    ids: tuple[int, ...]
    roles: tuple[Role, ...]


@dataclass(frozen=True)
class Batch:
    """``ids`` and ``positions`` are [B, T]; ``targets``, ``roles`` and ``tasks`` (indices into NAMES) are [B * T]."""

    ids: Tensor
    positions: Tensor
    targets: Tensor
    roles: Tensor
    tasks: Tensor


@dataclass(frozen=True)
class CorpusLine:
    """One training sequence of T + 1 tokens; ``tasks`` are indices into NAMES, 0 where the role is CONTEXT."""

    ids: tuple[int, ...]
    roles: tuple[Role, ...]
    tasks: tuple[int, ...]


def batch(rng: random.Random, length: int, size: int, mix: Mapping[str, float], difficulty: int, gaps: bool) -> Batch:
    """Draw ``size`` sequences of ``length`` predicted tokens.

    ``mix`` weighs NAMES; ``difficulty`` from 0 to 2 is that of the copy tasks. With ``gaps``, half of the sequences get
    jumps in their positions after sentence ends, so that short sequences teach the long distances too.
    """
    lines = [sequence(rng, length, mix, difficulty) for _ in range(size)]
    ids = torch.tensor([line.ids for line in lines])
    positions = torch.tensor([_positions(rng, line.ids[:-1], gaps) for line in lines])
    roles = torch.tensor([line.roles for line in lines])
    tasks = torch.tensor([line.tasks for line in lines])
    return Batch(ids[:, :-1], positions, ids[:, 1:].flatten(), roles[:, 1:].flatten(), tasks[:, 1:].flatten())


def sequence(rng: random.Random, length: int, mix: Mapping[str, float], difficulty: int) -> CorpusLine:
    """Draw one sequence of ``length + 1`` tokens: a copy task, or one to three tasks together."""
    chosen = list(dict.fromkeys(rng.choices(list(mix), list(mix.values()), k=rng.choice((1, 1, 2, 3)))))
    if "copy" in chosen:
        return _single("copy", _copy(rng, length, difficulty))
    if "pairs" in chosen:
        return _single("pairs", _pairs(rng, length, difficulty))
    return _questions(rng, length, chosen)


def _questions(rng: random.Random, length: int, chosen: Sequence[str]) -> CorpusLine:
    """Draw facts of the chosen tasks among filler, then shuffled queries; ``<s>`` first."""
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
    room = length - len(header) - sum(len(fact.ids) for fact in facts)
    if room < 0:
        return _questions(rng, length, chosen)
    rng.shuffle(queries)
    queried: list[tuple[int, Span]] = []
    for task, query in queries:
        span = _ask(rng, query, noisy)
        if len(span.ids) <= room:
            queried.append((task, span))
            room -= len(span.ids)
    body = _mingle(rng, facts, _fillers(rng, room, noisy))
    spans = [
        (0, Span((BOS, *header), (Role.CONTEXT,) * (1 + len(header)))),
        *((0, span) for span in body),
        *queried,
    ]
    return _line(spans)


def _ask(rng: random.Random, query: tiny.Query, noisy: float) -> Span:
    question = _text(rng, query.question, noisy).ids
    answer = (*encode(f" {query.answer}"), EOS)
    roles = tuple(Role.LOOKUP if i in query.lookups else Role.ANSWER for i in range(len(answer)))
    return Span(question + answer, (Role.CONTEXT,) * len(question) + roles)


def _fillers(rng: random.Random, room: int, noisy: float) -> list[Span]:
    """Draw filler of exactly ``room`` tokens, cut at its start; a part ``noisy`` of its sentences is noise."""
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
    """Put facts among fillers, both in order, the first filler first; one time in five all facts stay together."""
    if not fillers:
        return facts
    first, rest = fillers[0], fillers[1:]
    if rng.random() < 0.8:
        places = sorted(rng.randrange(len(rest) + 1) for _ in facts)
    else:
        places = [rng.randrange(len(rest) + 1)] * len(facts)
    spans, start = [first], 0
    for place, fact in zip(places, facts, strict=True):
        spans += [*rest[start:place], fact]
        start = place
    return spans + rest[start:]


def noise(rng: random.Random) -> str:
    """Draw a sentence of pseudo-words that looks like prose: case, punctuation, line breaks, some function words."""
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


def _copy(rng: random.Random, length: int, difficulty: int) -> list[Span]:
    """Draw a random span, filler, and the span again (plain induction); fewer distinct tokens need longer contexts."""
    span_length = rng.randrange(10, length // 2)
    if difficulty == 0 or rng.random() < 0.2:
        size = 450
    else:
        size = rng.choice((25, 40, 60) if difficulty == 1 else (10, 16, 25, 40))
    alphabet = rng.sample(_tokens(), size)
    distinct = difficulty == 0 and span_length <= size
    span = tuple(alphabet[:span_length] if distinct else rng.choices(alphabet, k=span_length))
    lead = min(3, span_length - 1)  # the copy's first tokens cannot be predicted
    fillers = _fillers(rng, length - 2 * span_length, 0.0)
    copied = Span(span, (Role.CONTEXT,) * lead + (Role.COPY,) * (span_length - lead))
    return [_context((BOS, *span)), *fillers, copied]


def _pairs(rng: random.Random, length: int, difficulty: int) -> list[Span]:
    """Draw random key-value pairs, then the same pairs in another order: lookup with a separator of 0 to 3 tokens."""
    gap = rng.choice(((0,), (0, 1), (0, 1, 1, 2, 3))[difficulty])
    separator = tuple(rng.choices(_tokens(), k=gap))
    ending = (rng.choice(_ends()),) if rng.random() < 0.7 else ()
    width = rng.choice((1, 1, 2))  # tokens of a value
    # every pair occurs twice; pairs take 30, 60 or 100 % of the sequence, filler the rest
    n = int(length // (2 * (1 + gap + width + len(ending))) * rng.choice((0.3, 0.6, 1.0)))
    keys = rng.sample(_tokens(), min(max(2, n), 200))
    values = rng.sample(_tokens(), rng.choice((8, 24, 100)))
    pairs = [((key, *separator), tuple(rng.choices(values, k=width))) for key in keys]
    pair_spans = [_context(key + value + ending) for key, value in pairs]
    queried = []
    for key, value in rng.sample(pairs, len(pairs)):
        roles = (Role.LOOKUP,) + (Role.ANSWER,) * (width - 1)
        queried.append(Span(key + value + ending, (Role.CONTEXT,) * len(key) + roles + (Role.CONTEXT,) * len(ending)))
    room = length - 2 * sum(len(span.ids) for span in pair_spans)
    fillers = _fillers(rng, room, 0.0)
    place = rng.randrange(len(fillers) + 1) if rng.random() < 0.5 else 0
    return [_context((BOS,)), *fillers[:place], *pair_spans, *fillers[place:], *queried]


def _positions(rng: random.Random, ids: Sequence[int], gaps: bool) -> list[int]:
    positions = list(range(len(ids)))
    spare = SPREAD - len(ids)
    if not gaps or spare <= 0 or rng.random() < 0.5:
        return positions
    ends = [i for i, token in enumerate(ids) if token in (*_ends(), EOS)]
    total = rng.randrange(spare)
    for _ in range(rng.choice((1, 2, 4)) if ends else 0):
        cut, jump = rng.choice(ends) + 1, total // rng.choice((2, 4))
        positions[cut:] = [position + jump for position in positions[cut:]]
    return positions


def _text(rng: random.Random, sentence: str, noisy: float) -> Span:
    """Return a sentence after a space; in noisy sequences sometimes after a line break, as in real text."""
    return _context(encode(("\n" if noisy and rng.random() < 0.15 else " ") + sentence))


def _context(ids: tuple[int, ...]) -> Span:
    return Span(ids, (Role.CONTEXT,) * len(ids))


def _single(name: str, spans: list[Span]) -> CorpusLine:
    return _line([(NAMES.index(name), span) for span in spans])


def _line(spans: Sequence[tuple[int, Span]]) -> CorpusLine:
    return CorpusLine(
        tuple(i for _, span in spans for i in span.ids),
        tuple(role for _, span in spans for role in span.roles),
        tuple(task for task, span in spans for _ in span.ids),
    )


@cache
def _costs(name: str) -> tuple[float, float]:
    """Return fact tokens per fact, and query tokens per fact, of a task."""
    puzzle = tiny.TASKS[name].puzzle(random.Random(0), 4)
    facts = sum(map(tiny.count_tokens, puzzle.facts))
    queries = sum(tiny.count_tokens(f"{q.question} {q.answer}") + 1 for q in puzzle.queries)
    return facts / len(puzzle.facts), queries / len(puzzle.facts)


@cache
def _function_words() -> list[str]:
    slot_words = {word for group in tiny.FILLER_WORDS.values() for word in group}
    template_words = {word.strip(".,") for template in tiny.FILLER for word in template.split() if "{" not in word}
    return sorted(template_words - slot_words)


@cache
def _tokens() -> range:
    """Return the ids of the random copy tasks: every word piece."""
    return range(FIRST_WORD, len(tiny_tokens.vocabulary()))


@cache
def _ends() -> tuple[int, int]:
    return len(SPECIAL) + ord("."), len(SPECIAL) + ord(";")
