"""Sequences of the tiny model's corpus: the tasks of ``kvbench.tasks.tiny`` with many queries each.

A sequence has facts among filler and then as many queries as fit, so that a fifth of its tokens are answers. Some
filler is *noise*: pseudo-words spelled in bytes. Noise stands for real text, and no real text is used. The model was
trained on batches of these sequences and on two copy tasks (``scripts/tiny_model/corpus.py``).

All randomness comes from one generator. The order of its draws decides every later sequence, and thus the model's
calibrations: no draw may be added, removed or moved.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache, lru_cache

from tokenizers import Tokenizer

from kvbench.models import embedded
from kvbench.tasks import tiny

TASKS = ("needle", "hop", "listing", "labels", "code")
"""The tasks that are trained; ``multikey`` is ``needle`` with more than one fact."""
BOS, EOS = 1, 2
CONSONANTS = "bcdfghjklmnpqrstvwxyz"


class Role(IntEnum):
    """The part that a token plays in the tiny model's training loss.

    CONTEXT: facts, questions and filler.
    NOISE: filler of pseudo-words.
    ANSWER, LOOKUP: an answer. LOOKUP marks those of its tokens that must be looked up in a fact.
    COPY: the repeated part of the copy tasks, which only the training has.
    """

    CONTEXT = 0
    NOISE = 1
    ANSWER = 2
    LOOKUP = 3
    COPY = 4


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of a sequence, each with its role in the loss.

    ids: the tokens.
    roles: each token's role.
    task: the index in TASKS of the task that asks for these tokens; 0 for context.
    """

    ids: tuple[int, ...]
    roles: tuple[Role, ...]
    task: int = 0


def draw_tasks(rng: random.Random, mix: Mapping[str, float]) -> list[str]:
    """Return the names of one to three different tasks, drawn by the weights of ``mix``."""
    # half of the sequences have one task; a task that is drawn twice counts once
    count = rng.choice((1, 1, 2, 3))
    names = rng.choices(list(mix), list(mix.values()), k=count)
    return list(dict.fromkeys(names))


def draw_sequence(rng: random.Random, length: int, chosen: Sequence[str]) -> list[Span]:
    """Return a random sequence of ``length + 1`` tokens: ``<s>``, facts of ``chosen`` tasks among filler, then queries.

    The queries of all tasks are shuffled.
    """
    # three sequences in five give up to 72 % of their tokens to filler; the tasks share the rest
    filler_share = 0.72 * rng.random() if rng.random() < 0.6 else 0.0
    task_tokens = (length - 1) * (1 - filler_share) / len(chosen)
    groups: list[list[str]] = []  # the facts of each task
    queries: list[tuple[int, tiny.Query]] = []  # (index of the task, query)
    for name in chosen:
        puzzle = tiny.TASKS[name].puzzle(rng, _draw_fact_count(rng, name, task_tokens))
        groups.append(rng.sample(puzzle.facts, len(puzzle.facts)))
        queries += [(TASKS.index(name), query) for query in puzzle.queries]
    # seven in ten sequences have no noise among their filler; in the others a fifth or all of the filler is noise
    (noisy,) = rng.choices((0.0, 0.2, 1.0), (70, 15, 15))
    facts: list[Span] = []
    for group in groups:
        facts += [_encode_sentence(rng, fact, noisy) for fact in group]
    # in half of the sequences with several tasks, the facts stand task by task
    if len(groups) == 1 or rng.random() < 0.5:
        rng.shuffle(facts)
    header: tuple[int, ...] = ()
    if rng.random() < 0.8:
        header = encode(tiny.HEADER)
    free_tokens = length - len(header) - sum(len(fact.ids) for fact in facts)
    if free_tokens < 0:
        return draw_sequence(rng, length, chosen)  # facts can cost more tokens than planned: draw again
    rng.shuffle(queries)
    query_spans: list[Span] = []
    for task, query in queries:
        question = _encode_sentence(rng, query.question, noisy)
        answer = (*encode(f" {query.answer}"), EOS)
        roles = [Role.ANSWER] * len(answer)
        for i in query.lookups:
            roles[i] = Role.LOOKUP
        span = Span(question.ids + answer, question.roles + tuple(roles), task=task)
        # a query that no longer fits is left out, and a shorter one may follow
        if len(span.ids) <= free_tokens:
            query_spans.append(span)
            free_tokens -= len(span.ids)
    # filler takes the tokens that queries left, so that the sequence gets its length
    spans = [context((BOS, *header))]
    spans += _mix_at_random(rng, facts, draw_filler(rng, free_tokens, noisy))
    spans += query_spans
    return spans


def _draw_fact_count(rng: random.Random, name: str, task_tokens: float) -> int:
    """Return how many facts the task ``name`` gets, at least one. Its facts and queries share ``task_tokens``."""
    fact_cost, query_cost = _measure_costs(name)
    # with probability 1/4 the facts alone take three quarters of the share; else the facts and nine tenths of their
    # queries take 60 to 100 % of it
    if rng.random() < 0.25:
        count = task_tokens * 0.75 / fact_cost
    else:
        count = task_tokens * rng.uniform(0.6, 1.0) / (fact_cost + 0.9 * query_cost)
    # a puzzle needs a fact to ask for
    return max(1, int(count))


def draw_filler(rng: random.Random, room: int, noisy: float) -> list[Span]:
    """Return random filler of ``room`` tokens, one span a sentence. The first sentence is cut to fit.

    ``noisy`` is the probability that a sentence is noise.
    """
    spans: list[Span] = []
    while room > 0:
        if rng.random() < noisy:
            ids, role = encode(draw_noise(rng)), Role.NOISE
        else:
            ids, role = encode(f" {tiny.draw_filler_sentence(rng)}"), Role.CONTEXT
        ids = ids[-room:]  # the last sentence drawn is cut
        spans.append(Span(ids, (role,) * len(ids)))
        room -= len(ids)
    return spans[::-1]  # the sentence that is cut comes first


def _mix_at_random(rng: random.Random, facts: list[Span], fillers: list[Span]) -> list[Span]:
    """Return facts and fillers mixed at random, both in their order. The first filler comes first.

    One time in five all facts stay together.
    """
    if not fillers:
        return facts
    first_filler, later_fillers = fillers[0], fillers[1:]
    spans = [first_filler]
    if rng.random() < 0.8:
        spans += tiny.scatter(rng, facts, later_fillers)
        return spans
    place = rng.randrange(len(later_fillers) + 1)
    spans += later_fillers[:place] + facts + later_fillers[place:]
    return spans


def draw_noise(rng: random.Random) -> str:
    """Return a random sentence of pseudo-words and function words, with case, punctuation and breaks like prose."""
    words = []
    for _ in range(rng.randrange(3, 13)):
        # 35 % function words, 4 % numbers, 61 % pseudo-words
        kind = rng.random()
        if kind < 0.35:
            word = rng.choice(_list_function_words())
        elif kind < 0.39:
            word = str(rng.randrange(3000))
        else:
            word = _draw_pseudo_word(rng)
        (punctuation,) = rng.choices(("", ",", ";", "'", ":", "-"), (88, 6, 1, 2, 1, 2))
        words.append(word + punctuation)
    words[0] = words[0].capitalize()
    (opening,) = rng.choices((" ", "\n", "\n\n"), (80, 10, 10))
    (ending,) = rng.choices((".", "?", "!", '."', ""), (80, 6, 4, 4, 6))
    return opening + " ".join(words).rstrip(",;:'-") + ending


def _draw_pseudo_word(rng: random.Random) -> str:
    """Return one to nine random letters. A few words have a capital at the beginning, or capitals alone."""
    word = ""
    for _ in range(rng.randrange(1, 10)):
        letters = "aeiou" if rng.random() < 0.4 else CONSONANTS
        word += rng.choice(letters)
    case = rng.random()
    if case < 0.15:
        return word.capitalize()
    if case < 0.18:
        return word.upper()
    return word


@lru_cache(1 << 16)
def encode(text: str) -> tuple[int, ...]:
    """Return the token ids of a text without ``<s>``. They are cached, because the same sentences recur."""
    return tuple(_load_tokenizer().encode(text, add_special_tokens=False).ids)


def context(ids: tuple[int, ...]) -> Span:
    """Return the tokens as a span of context, which has no part in the loss."""
    return Span(ids, (Role.CONTEXT,) * len(ids))


def _encode_sentence(rng: random.Random, sentence: str, noisy: float) -> Span:
    """Return a sentence as a span of context, after a space.

    If ``noisy`` is not 0, some sentences come after a line break instead, as in real text.
    """
    separator = " "
    if noisy and rng.random() < 0.15:
        separator = "\n"
    return context(encode(separator + sentence))


@cache
def _load_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(embedded.path() / "tokenizer.json"))


@cache
def _measure_costs(name: str) -> tuple[float, float]:
    """Return (fact tokens per fact, query tokens per fact) of a task, measured on one puzzle of four facts."""
    # a generator of its own: measuring must not take draws from a sequence
    puzzle = tiny.TASKS[name].puzzle(random.Random(0), 4)
    fact_tokens = sum(tiny.count_tokens(fact) for fact in puzzle.facts)
    query_tokens = 0
    for query in puzzle.queries:
        query_tokens += tiny.count_tokens(f"{query.question} {query.answer}") + 1  # 1: EOS
    return fact_tokens / len(puzzle.facts), query_tokens / len(puzzle.facts)


@cache
def _list_function_words() -> list[str]:
    """Return the fixed words of the filler's templates in alphabetical order, without words that also fill slots."""
    slot_words: set[str] = set()
    for words_of_slot in tiny.FILLER_WORDS.values():
        slot_words.update(words_of_slot)
    template_words: set[str] = set()
    for template in tiny.FILLER:
        # a word with a brace is a slot
        template_words.update(word.strip(".,") for word in template.split() if "{" not in word)
    return sorted(template_words - slot_words)
