"""Common and frequent words: the prompt lists words, in English or in code, and the model counts them."""

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
"""The number of common words that are asked for."""
STEP = 10
"""The number of words by which the search for a prompt's size goes on."""
PROBE = 4096
"""The number of words in the list from which the tokens of a word are estimated."""
ZETA_2 = math.pi**2 / 6
"""The sum of r^-2 over all ranks r from 1, by which Zipf's law is normed."""


def make_common_prompts(budget: LengthBudget, words: Sequence[str]) -> Iterator[RulerPrompt]:
    """Yield, without end, prompts that ask for the ten most common words. A solved example stands in front of each.

    words: all words that a prompt may list.
    """
    rng = Random(budget.seed)
    pool = list(words)
    # shuffling has a generator of its own, so it does not move the one that draws
    Random(budget.seed).shuffle(pool)
    draw = partial(_draw_common, rng, budget, pool)
    # RULER estimates a word's tokens on a long list, and searches no further than twice the estimated size
    tokens_per_word = budget.measure(draw(PROBE)) / PROBE
    estimated_size = int(budget.length // tokens_per_word)
    size = budget.bisect(draw, STEP, most=estimated_size * 2)
    while True:
        # a prompt must have all the words that are asked for
        yield budget.sample(draw, size, STEP, least=COMMON)


def _draw_common(rng: Random, budget: LengthBudget, pool: Sequence[str], size: int) -> RulerPrompt:
    """Return a prompt that lists ``size`` different words, behind a solved example with a list of its own.

    Raises UsageError if ``pool`` has fewer words.
    """
    if size > len(pool):
        raise UsageError(
            f"ruler/{budget.task}: lengths={budget.length} needs {size} different words, and wonderwords has "
            f"{len(pool)} (RULER's longer list cannot be had): lower lengths="
        )
    # RULER's numbers: the words of the solved example, and how often common words and other words stand in each list
    if budget.length < 4096:
        example_size, example_often, example_seldom = 20, 3, 1
        often, seldom = 6, 1
    else:
        example_size, example_often, example_seldom = 40, 10, 3
        often, seldom = 30, 3
    # the example is drawn first, as in RULER: another order would draw other words
    solved, common_words = _repeat_words(
        rng, budget.seed, pool, example_size, often=example_often, seldom=example_seldom
    )
    context, answers = _repeat_words(rng, budget.seed, pool, size, often=often, seldom=seldom)
    example = f"{COMMON_CONTEXT.format(context=solved)}{COMMON_QUESTION}{COMMON_PREFIX} {_number_words(common_words)}\n"
    return RulerPrompt(
        context=example + COMMON_CONTEXT.format(context=context),
        question=COMMON_QUESTION,
        prefix=COMMON_PREFIX,
        answers=tuple(answers),
        facts={"size": size},
    )


def _repeat_words(
    rng: Random, seed: int, pool: Sequence[str], size: int, *, often: int, seldom: int
) -> tuple[str, Sequence[str]]:
    """Return (a shuffled, numbered list of ``size`` different words, the COMMON words of it that are most common).

    often: how many times each of the common words stands in the list.
    seldom: how many times each other word stands in it.
    """
    words = rng.sample(pool, size)
    common, others = words[:COMMON], words[COMMON:]
    repeated = common * often + others * seldom
    # a generator of its own for each list, as in RULER
    Random(seed).shuffle(repeated)
    return _number_words(repeated), common


def _number_words(words: Sequence[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, start=1))


def make_frequent_prompts(budget: LengthBudget) -> Iterator[RulerPrompt]:
    """Yield, without end, prompts that ask for the three most frequent coded words.

    Raises LengthTooShort if the length gives no vocabulary of four words, or a prompt without one of its answers.
    """
    rng = Random(budget.seed)
    room = budget.length - budget.new_tokens
    # RULER's numbers: one word of vocabulary for 50 tokens, and steps of a thirty-second of the room
    vocabulary_size = room // 50
    step = room // 32
    # four: the three words that are asked for, and the dots
    if vocabulary_size < 4 or step < 1:
        raise LengthTooShort(f"ruler/{budget.task}: lengths={budget.length} is too short for four words")
    # one vocabulary serves the search for the size of all prompts, which begins at a sixth of the room
    size = room // 6
    vocabulary = _draw_vocabulary(rng, budget.seed, vocabulary_size)
    while budget.measure(_write_frequent(budget.seed, vocabulary, size)) < room:
        size += step
    # the last size that fitted
    size -= step
    while True:
        vocabulary = _draw_vocabulary(rng, budget.seed, vocabulary_size)
        yield _fit_frequent(budget, vocabulary, size, step, room)


def _fit_frequent(budget: LengthBudget, vocabulary: Sequence[str], size: int, step: int, room: int) -> RulerPrompt:
    """Return a prompt of ``size`` words, or of fewer by as many steps as it takes to fit into ``room`` tokens.

    Raises LengthTooShort if not all of its answers occur in it.
    """
    prompt = _write_frequent(budget.seed, vocabulary, size)
    while budget.measure(prompt) > room and size > 0:
        size -= step
        prompt = _write_frequent(budget.seed, vocabulary, size)
    if not all(f" {word} " in prompt.context for word in prompt.answers):
        raise budget.too_short(prompt)
    return prompt


def _draw_vocabulary(rng: Random, seed: int, size: int) -> list[str]:
    """Return ``size`` different coded words in the order of their frequency. Dots take the first place, as noise."""

    def draw_word() -> str:
        return "".join(rng.choices(string.ascii_lowercase, k=6))

    drawn_words = {draw_word() for _ in range(size)}
    # draw again for words that were drawn twice
    while len(drawn_words) < size:
        drawn_words.add(draw_word())
    # sort, since the order of a set differs between runs of Python
    words = sorted(drawn_words)
    Random(seed).shuffle(words)
    words[0] = "..."
    return words


def _write_frequent(seed: int, vocabulary: Sequence[str], words: int) -> RulerPrompt:
    """Return a prompt of about ``words`` words that repeat by Zipf's law with the exponent 2.

    vocabulary: the coded words, the most frequent first.
    """
    listed = []
    for rank, word in enumerate(vocabulary, start=1):
        # Zipf's law: the share of rank r is r^-2 / zeta(2)
        count = int(words * rank**-2.0 / ZETA_2)
        listed += [word] * count
    Random(seed).shuffle(listed)
    return RulerPrompt(
        context=FREQUENT_CONTEXT.format(context=" ".join(listed)),
        question=FREQUENT_QUESTION,
        prefix=FREQUENT_PREFIX,
        # the first word, the dots, is noise
        answers=tuple(vocabulary[1:4]),
        facts={"size": words},
    )
