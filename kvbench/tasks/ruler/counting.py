"""Common and frequent words: lists whose words are to be counted, in English and in code."""

from __future__ import annotations

import math
import string
from collections.abc import Iterator, Sequence
from functools import partial
from random import Random

from kvbench.base.errors import UsageError
from kvbench.tasks.ruler.fitting import LengthBudget, LengthTooShort, RulerPrompt

COMMON_CONTEXT = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}\n"
)
COMMON_QUESTION = "Question: What are the 10 most common words in the above list?"
COMMON_PREFIX = " Answer: The top 10 words that appear most often in the list are:"
FREQUENT_CONTEXT = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}\n"
)
FREQUENT_QUESTION = (
    "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
    "appeared words in the above coded text?"
)
FREQUENT_PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"
COMMON = 10
PROBE = 4096
ZETA_2 = math.pi**2 / 6


def common(budget: LengthBudget, words: Sequence[str]) -> Iterator[RulerPrompt]:
    """Yield prompts of the ten most common words without end, each behind a solved example."""
    rng = Random(budget.seed)
    pool = list(words)
    Random(budget.seed).shuffle(pool)
    draw = partial(_draw_common, rng, budget, pool)
    per_word = budget.measure(draw(PROBE)) / PROBE
    size = budget.bisect(draw, 10, int(budget.length // per_word) * 2)
    while True:
        yield budget.sample(draw, size, 10, COMMON)


def _draw_common(rng: Random, budget: LengthBudget, pool: Sequence[str], size: int) -> RulerPrompt:
    """Return a prompt with ``size`` different words."""
    if size > len(pool):
        raise UsageError(
            f"ruler/{budget.task}: lengths={budget.length} needs {size} different words, and wonderwords has "
            f"{len(pool)} (RULER's longer list cannot be had): lower lengths="
        )
    short = budget.length < 4096
    solved, shown = _numbered(rng, budget.seed, pool, *((20, 3, 1) if short else (40, 10, 3)))
    context, answers = _numbered(rng, budget.seed, pool, size, *((6, 1) if short else (30, 3)))
    listing = " ".join(f"{i}. {word}" for i, word in enumerate(shown, start=1))
    example = f"{COMMON_CONTEXT.format(context=solved)}{COMMON_QUESTION}{COMMON_PREFIX} {listing}\n"
    return RulerPrompt(
        context=example + COMMON_CONTEXT.format(context=context),
        question=COMMON_QUESTION,
        prefix=COMMON_PREFIX,
        answers=tuple(answers),
        facts={"size": size},
    )


def _numbered(
    rng: Random, seed: int, pool: Sequence[str], size: int, often: int, seldom: int
) -> tuple[str, Sequence[str]]:
    """Return (a shuffled, numbered list of ``size`` words, repeated often or seldom; those repeated often)."""
    words = rng.sample(pool, size)
    listed = words[:COMMON] * often + words[COMMON:] * seldom
    Random(seed).shuffle(listed)
    return " ".join(f"{i}. {word}" for i, word in enumerate(listed, start=1)), words[:COMMON]


def frequent(budget: LengthBudget) -> Iterator[RulerPrompt]:
    """Yield prompts of the three most frequent coded words without end."""
    rng = Random(budget.seed)
    room = budget.length - budget.new_tokens
    step = room // 32
    if room // 50 < 4 or step < 1:
        raise LengthTooShort(f"ruler/{budget.task}: lengths={budget.length} is too short for four words")
    words, vocabulary = room // 6, _vocabulary(rng, budget.seed, room // 50)
    while budget.measure(_frequent(budget.seed, vocabulary, words)) < room:
        words += step
    words -= step
    while True:
        vocabulary, size = _vocabulary(rng, budget.seed, room // 50), words
        while budget.measure(prompt := _frequent(budget.seed, vocabulary, size)) > room and size > 0:
            size -= step
        if not all(f" {word} " in prompt.context for word in prompt.answers):
            raise budget.too_short(prompt)
        yield prompt


def _vocabulary(rng: Random, seed: int, size: int) -> list[str]:
    """Return different coded words in order of rank; the first stands for noise."""

    def draw() -> str:
        return "".join(rng.choices(string.ascii_lowercase, k=6))

    drawn = {draw() for _ in range(size)}
    while len(drawn) < size:
        drawn.add(draw())
    words = sorted(drawn)
    Random(seed).shuffle(words)
    return ["...", *words[1:]]


def _frequent(seed: int, vocabulary: Sequence[str], words: int) -> RulerPrompt:
    """Return a prompt of about ``words`` words, of which rank r is repeated as often as Zipf's law with r^-2 says."""
    listed = []
    for rank, word in enumerate(vocabulary, start=1):
        listed += [word] * int(words * rank**-2.0 / ZETA_2)
    Random(seed).shuffle(listed)
    return RulerPrompt(
        context=FREQUENT_CONTEXT.format(context=" ".join(listed)),
        question=FREQUENT_QUESTION,
        prefix=FREQUENT_PREFIX,
        answers=tuple(vocabulary[1:4]),
        facts={"size": words},
    )
