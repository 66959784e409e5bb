"""Batches to train the tiny model on: sequences of kvbench's tiny corpus, and two copy tasks.

The copy tasks are made of random tokens, so nothing in them can be memorised; they only teach to look back.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from kvbench.engine.calibration import tiny_corpus
from kvbench.engine.calibration.tiny_corpus import BOS, EOS, TASKS, Role, Span, context, draw_filler
from tiny_model import tokenizer

NAMES = (*TASKS, "copy", "pairs")
SPREAD = 2304
"""The random gaps in the positions of T tokens sum to less than twice SPREAD - T."""
ENDS = tuple(len(tokenizer.SPECIAL) + ord(mark) for mark in ".;")
"""Tokens at which a sentence of the tasks ends."""


@dataclass(frozen=True)
class Batch:
    """Sequences to train on.

    ids, positions: [B, T].
    targets, roles, tasks: [B * T]; tasks are indices into NAMES.
    """

    ids: Tensor
    positions: Tensor
    targets: Tensor
    roles: Tensor
    tasks: Tensor


def batch(rng: random.Random, length: int, size: int, mix: Mapping[str, float], difficulty: int, gaps: bool) -> Batch:
    """Draw ``size`` sequences of ``length`` predicted tokens.

    ``mix`` weighs NAMES. ``difficulty``, from 0 to 2, applies to the copy tasks. With ``gaps``, half of the sequences
    get jumps in their positions after sentence ends, so that short sequences teach the long distances, too.
    """
    lines = [sequence(rng, length, mix, difficulty) for _ in range(size)]
    ids = torch.tensor([[i for span in line for i in span.ids] for line in lines])
    positions = torch.tensor([_positions(rng, row[:-1], gaps) for row in ids.tolist()])
    roles = torch.tensor([[role for span in line for role in span.roles] for line in lines])
    tasks = torch.tensor([[span.task for span in line for _ in span.ids] for line in lines])
    return Batch(ids[:, :-1], positions, ids[:, 1:].flatten(), roles[:, 1:].flatten(), tasks[:, 1:].flatten())


def sequence(rng: random.Random, length: int, mix: Mapping[str, float], difficulty: int) -> list[Span]:
    """Draw one sequence of ``length + 1`` tokens: a copy task, or one to three tasks together."""
    chosen = tiny_corpus.draw_tasks(rng, mix)
    for name, draw in (("copy", _copy), ("pairs", _pairs)):
        if name in chosen:
            return [replace(span, task=NAMES.index(name)) for span in draw(rng, length, difficulty)]
    return tiny_corpus.draw_sequence(rng, length, chosen)


def _copy(rng: random.Random, length: int, difficulty: int) -> list[Span]:
    """Draw a random span, filler, and the span again: plain induction.

    Higher difficulty means fewer distinct tokens, so that longer contexts are needed to tell them apart.
    """
    span_length = rng.randrange(10, length // 2)
    if difficulty == 0 or rng.random() < 0.2:
        size = 450
    else:
        size = rng.choice((25, 40, 60) if difficulty == 1 else (10, 16, 25, 40))
    alphabet = rng.sample(_words(), size)
    distinct = difficulty == 0 and span_length <= size
    span = tuple(alphabet[:span_length] if distinct else rng.choices(alphabet, k=span_length))
    lead = min(3, span_length - 1)  # the copy's first tokens cannot be predicted
    fillers = draw_filler(rng, length - 2 * span_length, 0.0)
    copied = Span(span, (Role.CONTEXT,) * lead + (Role.COPY,) * (span_length - lead))
    return [context((BOS, *span)), *fillers, copied]


def _pairs(rng: random.Random, length: int, difficulty: int) -> list[Span]:
    """Draw random key-value pairs, then the same pairs in another order: lookup with a separator of 0 to 3 tokens."""
    gap = rng.choice(((0,), (0, 1), (0, 1, 1, 2, 3))[difficulty])
    separator = tuple(rng.choices(_words(), k=gap))
    ending = (rng.choice(ENDS),) if rng.random() < 0.7 else ()
    width = rng.choice((1, 1, 2))  # tokens of a value
    # every pair occurs twice; pairs take 30, 60 or 100 % of the sequence, filler the rest
    n = int(length // (2 * (1 + gap + width + len(ending))) * rng.choice((0.3, 0.6, 1.0)))
    keys = rng.sample(_words(), min(max(2, n), 200))
    values = rng.sample(_words(), rng.choice((8, 24, 100)))
    pairs = [((key, *separator), tuple(rng.choices(values, k=width))) for key in keys]
    pair_spans = [context(key + value + ending) for key, value in pairs]
    queried = []
    for key, value in rng.sample(pairs, len(pairs)):
        roles = (Role.LOOKUP,) + (Role.ANSWER,) * (width - 1)
        queried.append(Span(key + value + ending, (Role.CONTEXT,) * len(key) + roles + (Role.CONTEXT,) * len(ending)))
    room = length - 2 * sum(len(span.ids) for span in pair_spans)
    fillers = draw_filler(rng, room, 0.0)
    place = rng.randrange(len(fillers) + 1) if rng.random() < 0.5 else 0
    return [context((BOS,)), *fillers[:place], *pair_spans, *fillers[place:], *queried]


def _positions(rng: random.Random, ids: Sequence[int], gaps: bool) -> list[int]:
    positions = list(range(len(ids)))
    spare = SPREAD - len(ids)
    if not gaps or spare <= 0 or rng.random() < 0.5:
        return positions
    ends = [i for i, token in enumerate(ids) if token in (*ENDS, EOS)]
    total = rng.randrange(spare)
    for _ in range(rng.choice((1, 2, 4)) if ends else 0):
        cut, jump = rng.choice(ends) + 1, total // rng.choice((2, 4))
        positions[cut:] = [position + jump for position in positions[cut:]]
    return positions


@cache
def _words() -> range:
    """Return the ids that the random copy tasks draw from: the ids of all word pieces."""
    return range(tokenizer.FIRST_WORD, len(tokenizer.vocabulary()))
